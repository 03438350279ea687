package llp

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/tests/testkit"
)

// mapped returns n bytes of memory outside of the heap, with the bytes of stream.
func mapped(t *testing.T, n int) []byte {
	t.Helper()
	m, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(m) })
	copy(m, stream(n))
	return m
}

// inUse returns how many pipes there are, and how many of them are idle.
func (p *pipePool) inUse() (open, idle int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.open, len(p.idle)
}

// headersAndPages cuts m into parts, some of them of single bytes and some of several pages, and returns those for WritePages.
func headersAndPages(m []byte) (parts [][]byte, pages []PagesPart) {
	for i := 0; len(m) > 0; i++ {
		n := min([]int{48, 65536, 1, 262144, 3000, 5000, 700000, 512}[i%8], len(m)) // 5000 and 700000 follow each other
		if i%8 == 1 || i%8 == 3 || i%8 == 5 || i%8 == 6 {
			pages = append(pages, PagesPart{Index: len(parts)})
		}
		parts, m = append(parts, m[:n]), m[n:]
	}
	return parts, pages
}

// WritePages writes all parts in their order, waits while the peer takes nothing, and leaves no pipe behind. Data that it has written still changes with its
// memory, until the peer has it: that is how the kernel refers to it.
func TestSocketWritesPages(t *testing.T) {
	a, b := testkit.Pair(t)
	s := NewSocket(a)
	const n = 16 << 20
	m := mapped(t, n)
	parts, pages := headersAndPages(m)
	want := stream(n)
	sent := make(chan error, 1)
	go func() {
		k, err := s.WritePages(parts, pages)
		if err == nil && k != n {
			err = io.ErrShortWrite
		}
		sent <- err
	}()
	select {
	case err := <-sent:
		t.Fatalf("all is written although nobody reads: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	got := make([]byte, n)
	if _, err := io.ReadFull(b, got); err != nil {
		t.Fatal(err)
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("other bytes came")
	}
	if open, idle := pipes.inUse(); open != idle {
		t.Errorf("%d pipes are open, %d idle", open, idle)
	}
	one := m[:65536]
	if _, err := s.WritePages([][]byte{one}, []PagesPart{{Index: 0}}); err != nil {
		t.Fatal(err)
	}
	one[100] ^= 0xff
	if _, err := io.ReadFull(b, got[:len(one)]); err != nil {
		t.Fatal(err)
	}
	if got[100] != one[100] {
		t.Error("the data was copied")
	}
	if n := testing.AllocsPerRun(100, func() {
		s.WritePages(parts[:4], pages[:2])
		io.ReadFull(b, got[:size(parts[:4])])
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// Where pipes are used up, or may take no more descriptors, data is copied. Peers that take nothing keep maxPipes of them and no more.
func TestPagesWithoutPipes(t *testing.T) {
	m := mapped(t, 16<<20)
	for i := range maxPipes + 3 {
		a, b := testkit.Pair(t)
		done := make(chan error, 1)
		go func() {
			_, err := NewSocket(a).WritePages([][]byte{m}, []PagesPart{{Index: 0}})
			done <- err
		}()
		t.Cleanup(func() { // it fails, and gives back its pipe, with what is in it
			b.Close()
			a.Close()
			if err := <-done; err == nil {
				t.Error("a peer that takes nothing has taken all")
			}
			if open, _ := pipes.inUse(); i == 0 && open > maxIdlePipes {
				t.Errorf("%d pipes are left", open)
			}
		})
		testkit.Eventually(t, "the writer waits", func() bool {
			_, owed, _ := Taken(a)
			return owed > 0
		})
	}
	if open, idle := pipes.inUse(); open != maxPipes || idle != 0 {
		t.Errorf("%d pipes are open, %d idle, want %d and 0", open, idle, maxPipes)
	}
	copies := func() {
		t.Helper()
		a, b := testkit.Pair(t)
		want := bytes.Clone(m[:65536])
		if n, err := NewSocket(a).WritePages([][]byte{m[:48], m[48:65536]}, []PagesPart{{Index: 1}}); n != 65536 || err != nil {
			t.Fatal(n, err)
		}
		m[100] ^= 0xff
		got := make([]byte, 65536)
		if _, err := io.ReadFull(b, got); err != nil || !bytes.Equal(got, want) {
			t.Errorf("other bytes came: %v", err)
		}
	}
	copies()
	t.Run("descriptors", func(t *testing.T) {
		old := pipes.open
		pipes.mu.Lock()
		pipes.open = 0 // as if nobody had any
		pipes.mu.Unlock()
		LimitPipes(3)
		copies()
		LimitPipes(1 << 62)
		pipes.mu.Lock()
		pipes.open = old
		pipes.mu.Unlock()
	})
}

// WritePages fails as WriteBuffers does, also between a part of a pipe and the rest. Then nobody else gets the pipe.
func TestSocketFailsToWritePages(t *testing.T) {
	m := mapped(t, 16<<20)
	parts, pages := headersAndPages(m)
	for name, tc := range map[string]struct {
		end func(a, b net.Conn)
		is  error
	}{
		"a deadline":         {func(a, _ net.Conn) { a.SetWriteDeadline(time.Unix(1, 0)) }, os.ErrDeadlineExceeded},
		"a closed socket":    {func(a, _ net.Conn) { a.Close() }, net.ErrClosed},
		"a reset":            {func(_, b net.Conn) { b.(*net.TCPConn).SetLinger(0); b.Close() }, syscall.ECONNRESET},
		"the end of writing": {func(a, _ net.Conn) { a.(*net.TCPConn).CloseWrite() }, syscall.EPIPE},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := testkit.Pair(t)
			s := NewSocket(a)
			go func() {
				time.Sleep(20 * time.Millisecond)
				tc.end(a, b)
			}()
			n, err := s.WritePages(parts, pages)
			if !errors.Is(err, tc.is) || n == 0 || n >= 16<<20 {
				t.Errorf("%d bytes, then %v", n, err)
			}
			if open, idle := pipes.inUse(); open != idle {
				t.Errorf("%d pipes are open, %d idle", open, idle)
			}
			x, y := testkit.Pair(t)
			want := bytes.Clone(m[:65536])
			if _, err := NewSocket(x).WritePages([][]byte{m[:65536]}, []PagesPart{{Index: 0}}); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, 65536)
			if _, err := io.ReadFull(y, got); err != nil || !bytes.Equal(got, want) {
				t.Errorf("the next connection gets other bytes: %v", err)
			}
		})
	}
}

// BBR makes pages dearer than a copy, so a Gather copies.
func TestGatherCopiesForBBR(t *testing.T) {
	for control, want := range map[string]bool{"reno": true, "cubic": true, "bbr": false} {
		a, _ := testkit.Pair(t)
		raw, err := a.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		raw.Control(func(fd uintptr) { err = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, control) })
		if err != nil {
			t.Logf("the kernel has no %s: %v", control, err)
			continue
		}
		var g Gather
		g.SetConn(a)
		for range 2 {
			if got := g.RefersPages(); got != want {
				t.Errorf("%s: %t", control, got)
			}
		}
	}
	var g Gather
	p, _ := net.Pipe()
	if g.SetConn(p); g.RefersPages() {
		t.Error("what is no socket has pages")
	}
}

// file returns an open file with n bytes of stream.
func file(t *testing.T, n int) *os.File {
	t.Helper()
	f, err := os.Create(t.TempDir() + "/file")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.Write(stream(n)); err != nil {
		t.Fatal(err)
	}
	return f
}

// fill makes p refer to n bytes of f at off.
func fill(t testing.TB, p *Pipe, f *os.File, off int64, n int) {
	t.Helper()
	for in, done := p.In(), 0; done < n; {
		k, err := unix.Splice(int(f.Fd()), &off, in, nil, n-done, 0)
		if err != nil || k == 0 {
			t.Fatal(k, err)
		}
		done += int(k)
	}
	p.Filled(n)
}

// A Gather writes what Pipes have at their places among headers, short data and pages, each in pieces. The peer gets what the file has when it reads, so the
// kernel has not copied it. The Pipes are empty then, and stay open.
func TestGatherRefersToPipes(t *testing.T) {
	const size = 256 << 10
	a, b := testkit.Pair(t)
	testkit.Unpaced(t, a)
	f, m := file(t, 4*size), mapped(t, 64<<10)
	var g Gather
	g.SetConn(a)
	g.Slab, g.iov = make([]byte, 0, slabLen), make([][]byte, 0, iovLen+2)
	if !g.RefersPages() {
		t.Fatal("no pages")
	}
	var want []byte
	var used []*Pipe
	header := func(n int) {
		g.Slab = append(g.Slab, stream(n)...)
		want = append(want, stream(n)...)
	}
	for i, cut := range []int{size, 100_000, 4096, 1} {
		p := TakePipe(size, 0)
		fill(t, p, f, int64(i)*size, size)
		used = append(used, p)
		for done, pieces := 0, 0; done < size; pieces++ {
			n := min(cut, size-done)
			if pieces == 3 {
				n = size - done
			}
			header(48)
			g.ReferPipe(p, n)
			want = append(want, stream(4 * size)[i*size+done:][:n]...)
			done += n
		}
		header(3)
		g.ReferPages(m)
		want = append(want, m...)
	}
	if g.Long() != 4*size+4*len(m) {
		t.Errorf("%d bytes are long", g.Long())
	}
	sent := make(chan error, 1)
	go func() { sent <- g.Flush() }()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(b, got); err != nil {
		t.Fatal(err)
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("other bytes came")
	}
	for _, p := range used {
		if p.left != 0 {
			t.Errorf("a pipe has %d bytes", p.left)
		}
		p.Release()
	}
	p := TakePipe(size, 0)
	defer p.Release()
	fill(t, p, f, 0, 64<<10)
	g.ReferPipe(p, 64<<10)
	if err := g.Flush(); err != nil { // with nothing else
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{^stream(1000)[999]}, 999); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(b, got[:64<<10]); err != nil {
		t.Fatal(err)
	}
	if got[999] == stream(1000)[999] {
		t.Error("the data was copied")
	}
	if n := testing.AllocsPerRun(100, func() {
		p := TakePipe(size, 0)
		fill(t, p, f, 4097, 100_000)
		g.Slab = append(g.Slab, want[:48]...)
		g.ReferPipe(p, 50_000)
		g.ReferPipe(p, 50_000)
		g.Flush()
		p.Release()
		io.ReadFull(b, got[:100_048])
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// A Pipe that was not written entirely, or was filled in part, is closed: nobody else gets what is in it. Read empties one.
func TestPipesWithRests(t *testing.T) {
	f := file(t, 128<<10)
	state := func() [2]int { open, idle := pipes.inUse(); return [2]int{open, idle} }
	p := TakePipe(64<<10, 0)
	before := state()
	fill(t, p, f, 0, 64<<10)
	got := make([]byte, 100<<10)
	if n, err := io.ReadFull(p, got[:64<<10]); err != nil || !bytes.Equal(got[:n], stream(n)) {
		t.Fatal(n, err)
	}
	p.Release()
	if now := state(); now != [2]int{before[0], before[1] + 1} {
		t.Errorf("%d pipes, %d idle after one that is empty; before, %d", now[0], now[1], before)
	}
	for name, rest := range map[string]func(p *Pipe){
		"not known": func(p *Pipe) { p.In() },
		"not taken": func(p *Pipe) { fill(t, p, f, 0, 100) },
		"a failure": func(p *Pipe) {
			fill(t, p, f, 0, 100)
			a, _ := testkit.Pair(t)
			a.Close()
			if _, err := NewSocket(a).WritePages([][]byte{nil}, []PagesPart{{0, p, 100}}); !errors.Is(err, net.ErrClosed) {
				t.Error(err)
			}
		},
	} {
		p := TakePipe(64<<10, 0)
		before := state()
		rest(p)
		p.Release()
		if now := state(); now != [2]int{before[0] - 1, before[1]} {
			t.Errorf("%s: %d pipes, %d idle; before, %d", name, now[0], now[1], before)
		}
	}
	if p := TakePipe(pipeSize, 0); p != nil {
		t.Error("a pipe for pages that do not begin where the data does is too small")
	}
}

// Where half of the pipes are in use, a connection that has some gets no more.
func TestPipesAreLeftForOthers(t *testing.T) {
	var list []*Pipe
	take := func(have int) bool {
		p := TakePipe(1, have)
		if p != nil {
			list = append(list, p)
		}
		return p != nil
	}
	defer func() {
		for _, p := range list {
			p.Release()
		}
	}()
	for i := range maxPipes / 2 {
		if !take(i) {
			t.Fatalf("no pipe after %d", i)
		}
	}
	if take(maxPipes / 2) {
		t.Error("one connection gets more than half of the pipes")
	}
	for i := range maxPipes / 2 {
		if !take(i % fewPipes) {
			t.Fatalf("no pipe for others after %d", i)
		}
	}
	if take(0) {
		t.Errorf("more than %d pipes", maxPipes)
	}
}
