package nbd

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/tests/testkit"
	"golang.org/x/sys/unix"
)

const size = backendtest.MinSize + 3*512

func mustOpen(t *testing.T, c Config) backend.Store {
	t.Helper()
	s, err := Open(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// core returns the Store of s.
func core(s backend.Store) *Store {
	if m, ok := s.(*mapper); ok {
		return m.Store
	}
	return s.(*Store)
}

func must(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func want(t *testing.T, s backend.Store, off int64, content []byte) {
	t.Helper()
	b := make([]byte, len(content))
	must(t, "ReadAt", s.ReadAt(b, off))
	if !bytes.Equal(b, content) {
		t.Fatalf("%d bytes at %d differ", len(b), off)
	}
}

func fill(n int, c byte) []byte { return bytes.Repeat([]byte{c}, n) }

// The contract of backend.Store, with what servers may lack.
func TestContract(t *testing.T) {
	for name, change := range map[string]func(*server){
		"everything":    func(*server) {},
		"the least":     func(s *server) { s.simple, s.flags = true, s.flags&^(flagSendFUA|flagSendWriteZeroes) },
		"two chunks":    func(s *server) { s.readsInTwo, s.flags = true, s.flags&^flagSendDF },
		"blocks of 512": func(s *server) { s.minimum, s.noStatus = 512, true },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			backendtest.Run(t, func(t *testing.T) backend.Store {
				s := newServer(t, size)
				change(s)
				return mustOpen(t, Config{URI: s.uri()})
			})
		})
	}
	backendtest.RunReadOnly(t, func(t *testing.T, content []byte) backend.Store {
		s := newServer(t, int64(len(content)))
		copy(s.cache, content)
		s.flags = flagHasFlags | flagReadOnly
		return mustOpen(t, Config{URI: s.uri(), ReadOnly: true})
	})
}

// A server that is killed again and again, and loses its cache each time, loses nothing that a caller was told, flushed or not. Each writer has a part of
// the disk, so that it knows what must be there.
func TestKilledServer(t *testing.T) {
	s := newServer(t, size)
	store := mustOpen(t, Config{URI: s.uri()})
	const writers, part = 8, 128 << 10
	var stop atomic.Bool
	var writes, reads atomic.Int64
	var wg sync.WaitGroup
	for w := range int64(writers) {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(1, uint64(w)))
			model := make([]byte, part)
			for !stop.Load() {
				off := rnd.Int64N(part/512) * 512
				n := min(part-off, 512*(1+rnd.Int64N(64)))
				m := model[off : off+n]
				var err error
				switch rnd.IntN(6) {
				case 0:
					clear(m)
					err = store.Discard(w*part+off, n)
				case 1, 2:
					copy(m, fill(int(n), byte(1+rnd.IntN(255))))
					err = store.WriteAt(m, w*part+off)
				case 3:
					copy(m, fill(int(n), byte(1+rnd.IntN(255))))
					err = store.WriteDurable(m, w*part+off)
				case 4:
					err = store.Sync()
				default:
					b := make([]byte, n)
					if err = store.ReadAt(b, w*part+off); err == nil && !bytes.Equal(b, m) {
						t.Errorf("writer %d: %d bytes at %d differ", w, n, off)
						return
					}
					reads.Add(1)
				}
				if err != nil {
					t.Errorf("writer %d: %v", w, err)
					return
				}
				writes.Add(1)
			}
			b := make([]byte, part)
			if err := store.ReadAt(b, w*part); err != nil || !bytes.Equal(b, model) {
				t.Errorf("writer %d: the content differs at the end (%v)", w, err)
			}
		})
	}
	rnd := rand.New(rand.NewPCG(2, 2))
	for range 30 {
		from := writes.Load()
		more := rnd.Int64N(200)
		testkit.Eventually(t, "calls end", func() bool { return writes.Load() > from+more || t.Failed() })
		if rnd.IntN(3) == 0 {
			s.set(func() { s.early = true })
			continue
		}
		s.kill()
		time.Sleep(time.Duration(rnd.IntN(30)) * time.Millisecond)
		s.start()
	}
	before := writes.Load()
	testkit.Eventually(t, "calls go on", func() bool { return writes.Load() > before+100 || t.Failed() })
	stop.Store(true)
	wg.Wait()
	t.Logf("%d calls, %d of them reads", writes.Load(), reads.Load())
	must(t, "Sync", store.Sync())
	must(t, "Close", store.Close())
	s.set(func() {
		if !bytes.Equal(s.cache, s.disk) {
			t.Error("the disk differs from the cache after Close")
		}
	})
}

// An older change that was not flushed does not come back over a newer one that was written durably.
func TestDurableAfterCached(t *testing.T) {
	s := newServer(t, size)
	store := mustOpen(t, Config{URI: s.uri()})
	must(t, "WriteAt", store.WriteAt(fill(8192, 1), 0))
	must(t, "WriteDurable", store.WriteDurable(fill(4096, 2), 4096))
	must(t, "Discard", store.Discard(512, 512))
	s.kill()
	s.start()
	b := append(append(append(fill(512, 1), make([]byte, 512)...), fill(3072, 1)...), fill(4096, 2)...)
	want(t, store, 0, b)
}

// A Store keeps no more than its bound. Then it flushes by itself.
func TestJournalIsBounded(t *testing.T) {
	s := newServer(t, 8<<20)
	store := mustOpen(t, Config{URI: s.uri()})
	p := fill(1<<20, 3)
	var wg sync.WaitGroup
	for i := range int64(8) {
		wg.Go(func() {
			for range 10 {
				if err := store.WriteAt(p, i<<20); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	s.set(func() {
		if s.flushes < 2 {
			t.Errorf("%d flushes after 80 MiB", s.flushes)
		}
	})
	c := core(store)
	for range 3000 {
		must(t, "WriteAt", store.WriteAt(p[:512], 0))
	}
	c.mu.Lock()
	kept, sum := c.kept, int64(0)
	for _, e := range c.journal.list {
		sum += e.data.size()
	}
	c.mu.Unlock()
	if kept > maxJournal || kept != sum {
		t.Errorf("%d bytes are kept, and %d counted", sum, kept)
	}
	must(t, "Sync", store.Sync())
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.kept != 0 || len(c.journal.list) != 0 || c.changing != 0 {
		t.Errorf("after Sync %d bytes are kept, %d changes, %d under way", c.kept, len(c.journal.list), c.changing)
	}
}

// While the server is away calls wait, Inspect says why, and the callbacks are called.
func TestServerIsAway(t *testing.T) {
	s := newServer(t, size)
	lost, back := make(chan error, 10), make(chan time.Duration, 10)
	store := mustOpen(t, Config{URI: s.uri(), Lost: func(err error) { lost <- err }, Back: func(d time.Duration) { back <- d }})
	must(t, "Inspect", core(store).Inspect())
	s.kill()
	if err := <-lost; err == nil {
		t.Error("no reason")
	}
	if err := <-lost; !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.ENOENT) {
		t.Errorf("reason %v", err)
	}
	read := make(chan error, 1)
	go func() { read <- store.ReadAt(make([]byte, 512), 0) }()
	testkit.Eventually(t, "Inspect names the reason", func() bool {
		err := core(store).Inspect()
		return err != nil && strings.Contains(err.Error(), "connect: ")
	})
	select {
	case err := <-read:
		t.Errorf("a read ended: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	s.start()
	must(t, "ReadAt", <-read)
	<-back
	must(t, "Inspect", core(store).Inspect())
	if len(lost) > 0 {
		t.Errorf("told again: %v", <-lost)
	}
}

// A server that comes back with another export is not used.
func TestAnotherExport(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*server)
		reason string
	}{
		"smaller":   {func(s *server) { s.size -= 512 }, "smaller now"},
		"read-only": {func(s *server) { s.flags |= flagReadOnly }, "read-only now"},
		"no flush":  {func(s *server) { s.flags &^= flagSendFlush }, "offers less"},
		"no status": {func(s *server) { s.noStatus = true }, "offers less"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t, size)
			before, flags := s.size, s.flags
			store := mustOpen(t, Config{URI: s.uri()})
			must(t, "WriteAt", store.WriteAt(fill(512, 1), 0))
			s.kill()
			tt.change(s)
			s.start()
			testkit.Eventually(t, "Inspect names the reason", func() bool {
				err := core(store).Inspect()
				return err != nil && strings.Contains(err.Error(), tt.reason)
			})
			s.set(func() { s.size, s.flags, s.noStatus = before, flags, false })
			want(t, store, 0, fill(512, 1))
		})
	}
}

// An export that grows, with the same server or another one, keeps its size for the LUN until Grow. Writes continue meanwhile.
func TestGrow(t *testing.T) {
	s := newServer(t, size)
	store := mustOpen(t, Config{URI: s.uri()})
	grower := store.(backend.Grower)
	grow := func(n int64) {
		s.set(func() {
			s.cache, s.disk = append(s.cache, make([]byte, n)...), append(s.disk, make([]byte, n)...)
			s.size += n
		})
	}
	is := func(want int64) {
		t.Helper()
		if n := store.Info().Size; n != want {
			t.Errorf("%d bytes, want %d", n, want)
		}
		if err := store.WriteAt(fill(512, 1), want); !errors.Is(err, backend.ErrRange) {
			t.Errorf("a write behind the end: %v", err)
		}
	}
	var stop atomic.Bool
	written := make(chan error, 1)
	go func() {
		var err error
		for b := fill(4096, 7); err == nil && !stop.Load(); {
			err = store.WriteAt(b, 0)
		}
		written <- err
	}()
	if n, err := grower.Grow(); n != size || err != nil {
		t.Errorf("nothing has grown: %d, %v", n, err)
	}
	grow(8192)
	is(size)
	if n, err := grower.Grow(); n != size+8192 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	is(size + 8192)
	must(t, "a write to what was added", store.WriteAt(fill(8192, 2), size))
	s.kill()
	grow(4096 + 1)
	s.start()
	want(t, store, size, fill(8192, 2))
	is(size + 8192)
	if n, err := grower.Grow(); n != size+8192+4096 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	is(size + 8192 + 4096)
	stop.Store(true)
	must(t, "the writes", <-written)
	s.kill()
	if _, err := grower.Grow(); err == nil {
		t.Error("a server that is away tells its size")
	}
	s.start()
}

// Errors of the server are those of the call only.
func TestServerErrors(t *testing.T) {
	for _, simple := range []bool{false, true} {
		s := newServer(t, size)
		s.simple = simple
		store := mustOpen(t, Config{URI: s.uri()})
		for errno, is := range map[unix.Errno]error{unix.EIO: unix.EIO, unix.ENOSPC: backend.ErrNoSpace, unix.EPERM: backend.ErrReadOnly, unix.Errno(999): unix.Errno(999)} {
			for _, command := range []uint16{cmdRead, cmdWrite, cmdWriteZeroes} {
				s.set(func() {
					s.answers = func(c uint16, off int64, _ uint32) (uint32, bool) {
						if c == command && off == 4096 {
							return uint32(errno), false
						}
						return 0, false
					}
				})
				call := map[uint16]func(off int64) error{
					cmdRead:        func(off int64) error { return store.ReadAt(make([]byte, 512), off) },
					cmdWrite:       func(off int64) error { return store.WriteAt(make([]byte, 512), off) },
					cmdWriteZeroes: func(off int64) error { return store.Discard(off, 512) },
				}[command]
				if err := call(4096); !errors.Is(err, is) {
					t.Errorf("command %d: %v, want %v", command, err, is)
				} else if command == cmdRead && !simple && !strings.Contains(err.Error(), `"why"`) {
					t.Errorf("%v lacks the text of the server", err)
				}
				must(t, "another call", call(0))
			}
		}
		must(t, "Sync", store.Sync())
	}
}

// A sync that fails is final, until Recover.
func TestFailedSync(t *testing.T) {
	s := newServer(t, size)
	store := mustOpen(t, Config{URI: s.uri()})
	fail := func(c uint16, _ int64, _ uint32) (uint32, bool) {
		if c == cmdFlush {
			return uint32(unix.EIO), false
		}
		return 0, false
	}
	s.set(func() { s.answers = fail })
	must(t, "WriteAt", store.WriteAt(fill(512, 1), 0))
	if err := store.Sync(); !errors.Is(err, unix.EIO) {
		t.Errorf("first Sync: %v", err)
	}
	if err := core(store).Recover(); !errors.Is(err, unix.EIO) {
		t.Errorf("Recover: %v", err)
	}
	s.set(func() { s.answers = nil })
	for what, err := range map[string]error{"Sync": store.Sync(), "WriteDurable": store.WriteDurable(fill(512, 1), 0), "Inspect": core(store).Inspect()} {
		if !errors.Is(err, backend.ErrUnsynced) {
			t.Errorf("%s: %v, want ErrUnsynced", what, err)
		}
	}
	must(t, "WriteAt", store.WriteAt(fill(512, 2), 0))
	must(t, "Recover", core(store).Recover())
	must(t, "Sync", store.Sync())
	want(t, store, 0, fill(512, 2))
	must(t, "Close", store.Close())
}

// The memory of changes that are given up is not used for other data: replay may be about to send it.
func TestDiscardedMemoryIsNotUsedAgain(t *testing.T) {
	store := mustOpen(t, Config{URI: newServer(t, size).uri()})
	c := core(store)
	for range 100 {
		must(t, "WriteAt", store.WriteAt(fill(4096, 1), 0))
		c.mu.Lock()
		old := c.journal.list[0].data
		c.fail(unix.EIO)
		c.failed = nil
		c.mu.Unlock()
		if b := newBuffer(fill(4096, 2)); b == old {
			t.Fatal("another write has the memory")
		}
	}
}

// A change that the server refuses when it is made again is lost: syncs fail.
func TestReplayFails(t *testing.T) {
	s := newServer(t, size)
	store := mustOpen(t, Config{URI: s.uri()})
	must(t, "WriteAt", store.WriteAt(fill(512, 1), 0))
	s.kill()
	s.answers = func(c uint16, _ int64, _ uint32) (uint32, bool) {
		if c == cmdWrite {
			return uint32(unix.EIO), false
		}
		return 0, false
	}
	s.start()
	testkit.Eventually(t, "the failure is known", func() bool { return core(store).SyncFailed() })
	if err := store.Sync(); !errors.Is(err, backend.ErrUnsynced) {
		t.Errorf("Sync: %v", err)
	}
	if err := store.Close(); !errors.Is(err, backend.ErrUnsynced) {
		t.Errorf("Close: %v", err)
	}
}

// A server that answers ESHUTDOWN is about to end: the request goes to the next one. A server that does so for ever has another reason.
func TestShutdown(t *testing.T) {
	s := newServer(t, size)
	store := mustOpen(t, Config{URI: s.uri()})
	left := 2
	s.set(func() {
		s.answers = func(uint16, int64, uint32) (uint32, bool) {
			if left--; left >= 0 {
				return uint32(unix.ESHUTDOWN), false
			}
			return 0, false
		}
	})
	must(t, "WriteAt", store.WriteAt(fill(512, 1), 0))
	s.set(func() {
		s.answers = func(uint16, int64, uint32) (uint32, bool) { return uint32(unix.ESHUTDOWN), false }
	})
	must(t, "Sync", func() error { s.set(func() { s.answers = nil }); return store.Sync() }())
	s.set(func() {
		s.answers = func(uint16, int64, uint32) (uint32, bool) { return uint32(unix.ESHUTDOWN), false }
	})
	if err := store.ReadAt(make([]byte, 512), 0); !errors.Is(err, unix.ESHUTDOWN) {
		t.Errorf("ReadAt: %v", err)
	}
	s.set(func() { s.answers = nil })
	must(t, "ReadAt", store.ReadAt(make([]byte, 512), 0))
}

// A Store of an export that others may change after the connection does not connect again, and writes nothing twice. All that it has
// answered is on stable storage.
func TestOnce(t *testing.T) {
	t.Run("contract", func(t *testing.T) {
		backendtest.Run(t, func(t *testing.T) backend.Store {
			return mustOpen(t, Config{URI: newServer(t, size).uri(), Once: true})
		})
	})
	s, lost := newServer(t, size), make(chan error, 1)
	store := mustOpen(t, Config{URI: s.uri(), Once: true, Lost: func(reason error) { lost <- reason }})
	if store.Info().VolatileCache {
		t.Error("the Store says that it has a cache")
	}
	must(t, "WriteAt", store.WriteAt(fill(512, 1), 0))
	must(t, "Zero", store.Zero(512, 512))
	must(t, "Discard", store.Discard(1024, 512))
	s.set(func() {
		if s.disk[0] != 1 || s.fua != 3 {
			t.Errorf("the write is not on the disk, and %d requests of 3 had FUA", s.fua)
		}
		s.answers = func(uint16, int64, uint32) (uint32, bool) { return 0, true }
	})
	held := make(chan error, 1)
	go func() { held <- store.WriteAt(fill(512, 2), 4096) }()
	for {
		core(store).mu.Lock()
		n := len(core(store).pending)
		core(store).mu.Unlock()
		if n == 1 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	s.kill()
	if err := <-held; !errors.Is(err, backend.ErrClosed) {
		t.Errorf("the call in progress: %v", err)
	}
	if err := <-lost; err == nil {
		t.Error("Lost was called without a reason")
	}
	s.answers = nil
	s.start()
	for what, err := range map[string]error{"WriteAt": store.WriteAt(fill(512, 3), 0), "ReadAt": store.ReadAt(make([]byte, 512), 0), "Sync": store.Sync()} {
		if !errors.Is(err, backend.ErrClosed) {
			t.Errorf("%s after the connection: %v", what, err)
		}
	}
	if err := store.Close(); err == nil { // so that the export is fenced
		t.Error("Close says that nothing is under way")
	}
	s.set(func() {
		if s.disk[0] != 1 || s.cache[4096] != 0 {
			t.Error("something was written again")
		}
	})
	must(t, "Close", mustOpen(t, Config{URI: s.uri(), Once: true}).Close())
	s.kill()
	s.flags &^= flagSendFUA
	s.start()
	if _, err := Open(Config{URI: s.uri(), Once: true}); err == nil || !strings.Contains(err.Error(), "FUA") {
		t.Errorf("Open without FUA: %v", err)
	}
	mustOpen(t, Config{URI: s.uri(), Once: true, Stable: true})
}

// Close without a server ends in bounded time. It says what is lost, if anything is.
func TestCloseWithoutServer(t *testing.T) {
	for name, dirty := range map[string]bool{"clean": false, "dirty": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newServer(t, size)
			store := mustOpen(t, Config{URI: s.uri()})
			must(t, "WriteAt", store.WriteAt(fill(512, 1), 0))
			if !dirty {
				must(t, "Sync", store.Sync())
			}
			s.kill()
			read := make(chan error, 1)
			go func() { read <- store.ReadAt(make([]byte, 512), 0) }()
			within(t, 3*closeTime, "Close", func() {
				if err := store.Close(); errors.Is(err, backend.ErrUnsynced) != dirty || !dirty && err != nil {
					t.Errorf("Close: %v", err)
				}
			})
			if err := <-read; !errors.Is(err, backend.ErrClosed) {
				t.Errorf("the call in progress: %v", err)
			}
		})
	}
	t.Run("hung replay", func(t *testing.T) {
		t.Parallel()
		s := newServer(t, size)
		store := mustOpen(t, Config{URI: s.uri()})
		must(t, "WriteAt", store.WriteAt(fill(512, 1), 0))
		s.kill()
		s.answers = func(uint16, int64, uint32) (uint32, bool) { return 0, true }
		s.start()
		within(t, 3*closeTime, "Close", func() {
			if err := store.Close(); !errors.Is(err, backend.ErrUnsynced) {
				t.Errorf("Close: %v", err)
			}
		})
	})
	t.Run("the server is back in time", func(t *testing.T) {
		t.Parallel()
		s := newServer(t, size)
		store := mustOpen(t, Config{URI: s.uri()})
		must(t, "WriteAt", store.WriteAt(fill(512, 1), 0))
		s.kill()
		time.AfterFunc(time.Second, s.start)
		must(t, "Close", store.Close())
		s.set(func() {
			if s.disk[0] != 1 {
				t.Error("the write is lost")
			}
		})
	})
}

// What a Store needs of an export, and what a server may say in the handshake.
func TestOpenErrors(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*server)
		config func(*Config)
		want   string
	}{
		"no flush":     {func(s *server) { s.flags &^= flagSendFlush }, nil, "flush = true"},
		"read-only":    {func(s *server) { s.flags |= flagReadOnly }, nil, "read_only: true"},
		"other export": {nil, func(c *Config) { c.URI = strings.Replace(c.URI, "/disk", "/dusk", 1) }, `no export "dusk" ("no dusk")`},
		"large blocks": {func(s *server) { s.minimum = 4096 }, nil, "block_size: 4096"},
		"no blocks":    {func(s *server) { s.minimum = 0 }, nil, "the least block has 0 bytes"},
		"odd blocks":   {func(s *server) { s.minimum = 3 }, nil, "the least block has 3 bytes"},
		"empty":        {func(s *server) { s.size = 100 }, nil, "less than a block"},
		"huge":         {func(s *server) { s.size = -1 }, nil, "the export has 18446744073709551615 bytes"},
		"no TLS":       {nil, func(c *Config) { c.URI = strings.Replace(c.URI, "nbd+", "nbds+", 1) }, "refuses TLS"},
		"no server":    {nil, func(c *Config) { c.URI += "x" }, "no such file"},
		"no URI":       {nil, func(c *Config) { c.URI = "/dev/nbd0" }, "not a URI"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t, size)
			if tt.change != nil {
				tt.change(s)
			}
			c := Config{URI: s.uri()}
			if tt.config != nil {
				tt.config(&c)
			}
			store, err := Open(c)
			if err == nil {
				store.Close()
				t.Fatal("no error")
			}
			if !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
}

// A request does not allocate.
func TestNoAllocations(t *testing.T) {
	s := newServer(t, size)
	store := mustOpen(t, Config{URI: s.uri()})
	c := core(store)
	// The server of this test allocates: count what this side does without it.
	p := fill(4096, 1)
	r := newRequest(cmdWrite, 0, 0, 4096, p)
	if n := testing.AllocsPerRun(100, func() {
		c.keep(r)
		c.mu.Lock()
		c.note(r, nil)
		c.kept -= c.journal.drop(c.journal.end())
		c.mu.Unlock()
		r.copy = nil
		r.free()
		r = newRequest(cmdWrite, 0, 0, 4096, p)
	}); n > 0 && !testkit.Race {
		t.Errorf("%v allocations", n)
	}
}
