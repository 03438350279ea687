package llp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/testkit"
)

// window returns a Window on stream, of which one read returns at most chunk bytes.
func window(stream []byte, chunk int) *Window {
	r := bytes.NewReader(stream)
	w := new(Window)
	w.Init(func(p []byte) (int, error) { return r.Read(p[:min(len(p), chunk)]) }, nil)
	return w
}

func stream(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * 7)
	}
	return b
}

// Messages of a header and data come out as they went in, however the stream is cut,
// and Unread reports the rest of the present message.
func TestWindowKeepsTheStream(t *testing.T) {
	const header, data, trailer = 10, 20000, 4
	for _, chunk := range []int{1 << 20, 4096, 1001} {
		for _, thin := range []bool{false, true} {
			want := stream(10 * (header + data + trailer))
			w := window(want, chunk)
			var got []byte
			for range 10 {
				w.Inside, w.Thin = false, thin
				if err := w.Fill(header); err != nil {
					t.Fatal(err)
				}
				got = append(got, w.TakeHeader(header, data+trailer)...)
				w.Inside = true
				p := make([]byte, data)
				for n := 0; n < data; {
					k, err := w.Read(p[n:])
					if err != nil {
						t.Fatal(err)
					}
					n += k
					if _, rest := w.Unread(); rest != data+trailer-n {
						t.Fatalf("%d bytes of data remain, Unread says %d", data+trailer-n, rest)
					}
				}
				got = append(got, p...)
				if err := w.Fill(trailer); err != nil {
					t.Fatal(err)
				}
				got = append(got, w.TakeTrailer(trailer)...)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("chunks of %d bytes, thin %t: other bytes came", chunk, thin)
			}
		}
	}
}

// While long data comes, Fill reads little more than it has to.
func TestThinWindowReadsLittle(t *testing.T) {
	w := window(stream(1<<20), 1<<20)
	w.Thin = true
	if err := w.Fill(100); err != nil || w.Len() > thinRead {
		t.Errorf("%d bytes in the window, error %v", w.Len(), err)
	}
}

// The end of the stream is io.EOF between two messages and ErrTruncated inside of one.
func TestWindowEnds(t *testing.T) {
	w := window(stream(5), 5)
	if err := w.Fill(6); err != ErrTruncated || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("part of a message in the window: %v", err)
	}
	w.Take(5)
	if err := w.Fill(1); err != io.EOF {
		t.Errorf("between two messages: %v", err)
	}
	w.Inside = true
	if err := w.Fill(1); err != ErrTruncated {
		t.Errorf("after a header: %v", err)
	}
	if _, err := w.Read(make([]byte, 1)); err != ErrTruncated {
		t.Errorf("inside of data: %v", err)
	}
	w.Lose()
	if unread, rest := w.Unread(); len(unread) != 0 || rest != math.MaxInt {
		t.Errorf("after Lose: %d bytes, rest %d", len(unread), rest)
	}
}

// Skip consumes a message that is longer than the Window.
func TestWindowSkips(t *testing.T) {
	want := stream(5 * WindowLen)
	w := window(want, 9999)
	if err := w.Skip(4 * WindowLen); err != nil {
		t.Fatal(err)
	}
	if err := w.Fill(100); err != nil || !bytes.Equal(w.Peek(100), want[4*WindowLen:][:100]) {
		t.Errorf("after Skip: %v, or other bytes", err)
	}
}

// Drop consumes data that the Window has, and has the rest dropped.
func TestWindowDrops(t *testing.T) {
	const data = 3 * WindowLen
	r := bytes.NewReader(stream(2 * data))
	w := new(Window)
	w.Init(r.Read, nil)
	w.Thin = true
	if err := w.Fill(100); err != nil {
		t.Fatal(err)
	}
	w.TakeHeader(100, data)
	var drops []int
	drop := func(n int) (int, error) {
		n = min(n, 50_000)
		drops = append(drops, n)
		m, err := r.Seek(int64(n), io.SeekCurrent)
		if m > r.Size() {
			return 0, io.EOF
		}
		return n, err
	}
	had := w.Len()
	if err := w.Drop(data, drop); err != nil {
		t.Fatal(err)
	}
	if sum := had + drops[0] + drops[1] + drops[2] + drops[3]; had == 0 || len(drops) != 4 || sum != data {
		t.Errorf("%d bytes were in the window, then it dropped %v", had, drops)
	}
	if unread, rest := w.Unread(); len(unread) > 0 || rest != 0 {
		t.Errorf("%d bytes are unread, and %d of the message are missing", len(unread), rest)
	}
	if err := w.Fill(100); err != nil || !bytes.Equal(w.Take(100), stream(2 * data)[100+data:][:100]) {
		t.Errorf("the next message: %v, or other bytes", err)
	}
	if err := w.Drop(w.Len(), nil); err != nil {
		t.Error(err)
	}
	if err := w.Drop(data, drop); !errors.Is(err, ErrTruncated) {
		t.Errorf("a stream that ends: %v", err)
	}
	broken := errors.New("broken")
	if err := w.Drop(1, func(int) (int, error) { return 0, broken }); err != broken {
		t.Errorf("a stream that fails: %v", err)
	}
}

// A Gather writes headers and data in the order in which they were added.
func TestGatherKeepsTheOrder(t *testing.T) {
	a, b := net.Pipe()
	var g Gather
	g.SetConn(a)
	var want []byte
	for n := 0; g.Room(CopyBelow); n++ {
		short, long := stream(n%CopyBelow), stream(CopyBelow+n)
		g.Slab = append(g.Slab, short...)
		g.Refer(long)
		want = append(append(want, short...), long...)
	}
	done := make(chan error, 1)
	go func() { done <- g.Flush(); a.Close() }()
	got, err := io.ReadAll(b)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes of %d, error %v, or another order", len(got), len(want), err)
	}
	if err := <-done; err != nil || g.Long() != 0 || !g.Room(slabLen) {
		t.Errorf("after Flush: %v, %d bytes remain", err, g.Long())
	}
}

// A Gather has memory from the first Room to Release, whatever is written in between, and keeps it after Keep.
func TestGatherReleases(t *testing.T) {
	a, b := net.Pipe()
	go io.Copy(io.Discard, b)
	defer a.Close()
	var g Gather
	g.SetConn(a)
	for _, keeps := range []bool{false, true} {
		if keeps {
			g.Keep()
		}
		if !g.Room(100) {
			t.Fatal("no room")
		}
		g.Slab = append(g.Slab, 1)
		if g.Release(); cap(g.Slab) == 0 {
			t.Fatal("Release takes memory in use")
		}
		for range 2 {
			if err := g.Flush(); err != nil {
				t.Fatal(err)
			}
			if cap(g.Slab)-len(g.Slab) < CopyBelow {
				t.Fatal("a Flush takes the memory")
			}
			g.Slab = append(g.Slab, 2)
			g.Refer(make([]byte, CopyBelow))
		}
		if err := g.Flush(); err != nil {
			t.Fatal(err)
		}
		if g.Release(); cap(g.Slab) > 0 != keeps {
			t.Errorf("after Release %d bytes, keeps: %t", cap(g.Slab), keeps)
		}
	}
}

// Taken shows what the peer's TCP has not acknowledged, and that it does when the peer reads.
func TestTaken(t *testing.T) {
	b, a := testkit.Pair(t)
	const size = 16 << 20
	done := make(chan error, 1)
	go func() {
		_, err := a.Write(stream(size))
		done <- err
	}()
	var taken, owed uint64
	testkit.Eventually(t, "a peer that takes no more", func() bool {
		before := taken
		var ok bool
		if taken, owed, ok = Taken(a); !ok {
			t.Fatal("not a socket")
		}
		return taken > 0 && taken == before && owed > 0
	})
	if _, err := io.CopyN(io.Discard, b, size); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "all taken", func() bool {
		now, owed, ok := Taken(a)
		return ok && now > taken && now >= size && owed == 0
	})
	if _, _, ok := Taken(struct{ net.Conn }{a}); ok {
		t.Error("the size of a stream that is no socket")
	}
	a.Close()
	if _, _, ok := Taken(a); ok {
		t.Error("the size of a closed socket")
	}
}

// A Socket fills two places with one call, and fails as the Read of the connection does.
func TestSocketReads(t *testing.T) {
	a, b := testkit.Pair(t)
	one, read := Readers(a)
	if _, both := Readers(struct{ net.Conn }{a}); read == nil || both != nil {
		t.Fatal("a socket can be read to two places, another stream cannot")
	}
	want := stream(150)
	write := func(n int) {
		t.Helper()
		if _, err := b.Write(want[:n]); err != nil {
			t.Fatal(err)
		}
	}
	for _, size := range []int{100, 150, 90} {
		write(size)
		p, q := make([]byte, 100), make([]byte, 1000)
		if n, err := read(p, q); n != size || err != nil {
			t.Fatalf("%d bytes, error %v, want %d", n, err, size)
		}
		if !bytes.Equal(append(p[:min(size, 100)], q[:max(size-100, 0)]...), want[:size]) {
			t.Errorf("of %d bytes, other bytes came", size)
		}
	}
	p, q := make([]byte, 100), make([]byte, 100)
	write(150)
	if n, err := one(p); n != 100 || err != nil || !bytes.Equal(p, want[:100]) {
		t.Errorf("%d bytes, error %v, or others than were sent", n, err)
	}
	if n, err := one(p); n != 50 || err != nil || !bytes.Equal(p[:50], want[100:150]) {
		t.Errorf("%d bytes, error %v, or others than were sent", n, err)
	}
	if n := testing.AllocsPerRun(100, func() {
		write(150)
		read(p, q)
		write(50)
		one(p)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	fails := func(is error) {
		t.Helper()
		_, want := a.Read(p)
		_, got := read(p, q)
		sameError(t, got, want, is)
		_, got = one(p)
		sameError(t, got, want, is)
	}
	a.SetReadDeadline(time.Unix(1, 0))
	fails(os.ErrDeadlineExceeded)
	a.SetReadDeadline(time.Time{})
	b.Close()
	fails(io.EOF)
	a.Close()
	fails(net.ErrClosed)

	a, b = testkit.Pair(t)
	_, read = Readers(a)
	b.(*net.TCPConn).SetLinger(0)
	b.Close()
	if _, err := read(p, q); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after a reset the error is %v", err)
	}
}

// A Socket writes all that it is given, in order, even what the peer takes late, and fails as the Write of the connection does.
func TestSocketWrites(t *testing.T) {
	a, b := testkit.Pair(t)
	s := NewSocket(a)
	want := stream(8 << 20)
	var parts [][]byte
	for rest, n := want, 0; len(rest) > 0; n = (n + 7919) % 20011 { // some parts are empty
		k := min(n, len(rest))
		parts, rest = append(parts, rest[:k]), rest[k:]
	}
	sent := make(chan error, 1)
	go func() {
		n, err := s.WriteBuffers(parts)
		if err == nil && n != int64(len(want)) {
			err = fmt.Errorf("%d bytes written", n)
		}
		sent <- errors.Join(err, func() error { _, err := s.Write(want[:100]); return err }())
	}()
	select {
	case err := <-sent:
		t.Fatalf("all is written although nobody reads: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	got := make([]byte, len(want)+100)
	if _, err := io.ReadFull(b, got); err != nil {
		t.Fatal(err)
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, append(want, want[:100]...)) {
		t.Error("other bytes came")
	}
	if n := testing.AllocsPerRun(100, func() {
		s.WriteBuffers(parts[1:4])
		s.Write(want[:100])
		io.ReadFull(b, got[:100+size(parts[1:4])])
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	fails := func(is error) {
		t.Helper()
		_, want := a.Write(got)
		_, err := s.Write(got)
		sameError(t, err, want, is)
		if _, err := s.WriteBuffers(parts); !errors.Is(err, is) {
			t.Errorf("the error is %v", err)
		}
	}
	a.SetWriteDeadline(time.Unix(1, 0))
	fails(os.ErrDeadlineExceeded)
	a.SetWriteDeadline(time.Time{})
	a.CloseWrite()
	fails(syscall.EPIPE)
	a.Close()
	fails(net.ErrClosed)

	a, b = testkit.Pair(t)
	s = NewSocket(a)
	b.(*net.TCPConn).SetLinger(0)
	go func() {
		time.Sleep(20 * time.Millisecond)
		b.Close()
	}()
	if _, err := s.WriteBuffers(parts); !errors.Is(err, syscall.ECONNRESET) { // it waits for room, and the peer resets the connection
		t.Errorf("after a reset the error is %v", err)
	}
}

// sameError checks that an error of a Socket is the one of the connection, want, which is a kind of is.
func sameError(t *testing.T, got, want, is error) {
	t.Helper()
	if !errors.Is(got, is) || want == nil || got.Error() != want.Error() {
		t.Errorf("the error is %v, that of the connection %v", got, want)
	}
}

func size(parts [][]byte) (n int) {
	for _, p := range parts {
		n += len(p)
	}
	return n
}

// scattered returns a Window on b that reads to two places, and counts its reads.
func scattered(b []byte) (w *Window, calls *int) {
	r := bytes.NewReader(b)
	w, calls = new(Window), new(int)
	w.Init(func(p []byte) (int, error) { *calls++; return r.Read(p) }, nil)
	w.Grow()
	w.Scatter(func(p, q []byte) (int, error) {
		*calls++
		n, err := io.ReadFull(r, p)
		if err == nil {
			m, _ := r.Read(q)
			n += m
		}
		return n, err
	})
	return w, calls
}

// While no long data comes, Read fills the Window, so that many short messages cost one system call.
func TestWindowReadsAhead(t *testing.T) {
	const header, data, messages = 48, 4096, 2 * WindowLen / (48 + 4096)
	w, calls := scattered(stream(messages * (header + data)))
	for i := range messages {
		if err := w.Fill(header); err != nil {
			t.Fatal(err)
		}
		w.Take(header)
		p := make([]byte, data)
		if _, err := io.ReadFull(w, p); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(p, stream((i + 1) * (header + data))[i*(header+data)+header:]) {
			t.Fatalf("message %d is another one", i)
		}
	}
	if *calls != 2 {
		t.Errorf("%d calls for %d messages, want 2", *calls, messages)
	}
}

// Read brings the header of the next message, so that a stream of messages costs one system call for each.
func TestWindowReadsBoth(t *testing.T) {
	const header, data = 10, 60000
	want := stream(10 * (header + data))
	w, calls := scattered(want)
	w.Thin = true
	var got []byte
	for range 10 {
		if err := w.Fill(header); err != nil {
			t.Fatal(err)
		}
		got = append(got, w.TakeHeader(header, data)...)
		p := make([]byte, data)
		for n := 0; n < data; {
			k, err := w.Read(p[n:])
			if err != nil {
				t.Fatal(err)
			}
			n += k
			if _, rest := w.Unread(); rest != data-n {
				t.Fatalf("%d bytes of data remain, Unread says %d", data-n, rest)
			}
		}
		got = append(got, p...)
	}
	if !bytes.Equal(got, want) || *calls != 11 {
		t.Errorf("%d calls, want 11; the bytes are equal: %t", *calls, bytes.Equal(got, want))
	}
	if _, err := w.Read(make([]byte, 1)); err != ErrTruncated {
		t.Errorf("at the end of the stream inside a message: %v", err)
	}
}

// While a Window may not wait, it leaves in the socket what does not fit, and gives back the memory of the last message.
func TestImpatientWindowKeepsLittle(t *testing.T) {
	errImpatient := errors.New("not yet")
	const short, long = 10, 9000
	want := stream(long + long)
	r := bytes.NewReader(want[:long+short])
	w := window(nil, 0)
	came := func() int { return r.Len() }
	w.read = func(p []byte) (int, error) { return r.Read(p) }
	w.Patience = func(missing int) error {
		if came() < missing {
			return errImpatient
		}
		return nil
	}
	if err := w.Fill(long); err != nil || !bytes.Equal(w.Take(long), want[:long]) {
		t.Fatalf("the first message: %v", err)
	}
	if err := w.Fill(short); err != nil {
		t.Fatal(err)
	}
	if err := w.Fill(long); err != errImpatient || w.Missing() != long-short || len(w.buf) != firstLen {
		t.Errorf("%v, %d bytes missing, %d bytes of memory", err, w.Missing(), len(w.buf))
	}
	r.Reset(want[long+short:])
	if err := w.Fill(long); err != nil || !bytes.Equal(w.Take(long), want[long:]) {
		t.Errorf("the second message: %v", err)
	}
	r.Reset(nil)
	if err := w.Fill(1); err != errImpatient || len(w.buf) != firstLen {
		t.Errorf("%v, %d bytes of memory", err, len(w.buf))
	}
}

// Come counts what waits in the socket, and knows the end of the stream.
func TestCome(t *testing.T) {
	ours, peer := testkit.Pair(t)
	raw, err := ours.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if Ready(raw, 1) {
		t.Error("nothing has come")
	}
	if _, err := peer.Write(make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "100 bytes", func() bool { return Ready(raw, 100) })
	if !Ready(raw, 1) || Ready(raw, 101) {
		t.Error("100 bytes have come")
	}
	peer.Close()
	testkit.Eventually(t, "the end", func() bool { return Ready(raw, 101) })
	ours.Close()
	if !Ready(raw, 1) {
		t.Error("a closed connection waits for nothing")
	}
}

// A socket that is full is as good as one that has the whole message, which would never come otherwise.
func TestComeWithoutRoom(t *testing.T) {
	ours, peer := testkit.Pair(t)
	raw, err := ours.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		peer.Write(make([]byte, 64<<20)) // until the connection is closed
	}()
	testkit.Eventually(t, "the socket is full", func() bool { return Ready(raw, 64<<20) })
	ours.Close()
	<-done
}
