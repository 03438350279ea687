package checked

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/backend/protection"
)

const testSize = 40 << 20 // three regions, the last of which is cut off

// memory returns a memory store.
func memory(t testing.TB, size int64, bs uint32) backend.Store {
	t.Helper()
	s, err := backend.OpenMemory(backend.MemoryConfig{Size: size, BlockSize: bs})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// openOn opens a Store without its keeper.
func openOn(below, side backend.Store, c Config) (*Store, error) {
	return kinds[c.Protection].openOn(below, side, c)
}

// types are the kinds of side files, by name.
var types = map[string]protection.Type{"checksums": protection.None, "type 1": protection.Type1, "type 3": protection.Type3}

// openFiles opens a Store on the file lun.img of dir, and its side file.
func openFiles(t testing.TB, dir, id string, c backend.FileConfig) (*Store, string) {
	t.Helper()
	return openFilesOf(t, protection.None, dir, id, c)
}

// openFilesOf does what openFiles does for any kind of side file.
func openFilesOf(t testing.TB, typ protection.Type, dir, id string, c backend.FileConfig) (*Store, string) {
	t.Helper()
	c.Path = filepath.Join(dir, "lun.img")
	below, _, err := backend.OpenFile(c)
	if err != nil {
		t.Fatal(err)
	}
	create := id == ""
	if create {
		id = NewID()
	}
	s, err := Open(below, Config{Path: c.Path + Suffix, ID: id, Create: create, Protection: typ})
	if err != nil {
		t.Fatal(errors.Join(err, below.Close()))
	}
	t.Cleanup(func() { s.Close() })
	return s, id
}

// settle waits until no region is stale.
func settle(t testing.TB, s *Store) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); s.Counts().Stale > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d bytes are still stale", s.Counts().Stale)
		}
	}
}

func must(t testing.TB, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func pattern(n int, seed uint64) []byte {
	p := make([]byte, n)
	r := rand.New(rand.NewPCG(seed, 1))
	for i := range p {
		p[i] = byte(r.Uint32()) | 1
	}
	return p
}

// flip changes one bit of the file of data.
func flip(t testing.TB, dir string, off int64) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, "lun.img"), os.O_RDWR, 0)
	must(t, "open", err)
	defer f.Close()
	b := make([]byte, 1)
	_, err = f.ReadAt(b, off)
	must(t, "read", err)
	b[0] ^= 0x10
	_, err = f.WriteAt(b, off)
	must(t, "write", err)
}

// The contract of backend.Store holds, and no block is found corrupt, also while checksums are computed.
func TestStore(t *testing.T) {
	for name, c := range map[string]backend.FileConfig{
		"512":           {Size: testSize},
		"4096":          {Size: testSize, BlockSize: 4096},
		"write through": {Size: testSize, WriteThrough: true},
	} {
		t.Run(name, func(t *testing.T) {
			backendtest.Run(t, func(t *testing.T) backend.Store {
				s, _ := openFiles(t, t.TempDir(), "", c)
				t.Cleanup(func() {
					if n := s.Counts(); n.Mismatches != 0 {
						t.Errorf("%d false mismatches", n.Mismatches)
					}
				})
				if !strings.HasSuffix(t.Name(), "Operations") { // one test meets the keeper at its work
					settle(t, s)
				}
				return s
			})
		})
	}
}

func TestReadOnlyStore(t *testing.T) {
	backendtest.RunReadOnly(t, func(t *testing.T, content []byte) backend.Store {
		dir := t.TempDir()
		s, id := openFiles(t, dir, "", backend.FileConfig{Size: int64(len(content))})
		must(t, "WriteAt", s.WriteAt(content, 0))
		settle(t, s)
		must(t, "Close", s.Close())
		s, _ = openFiles(t, dir, id, backend.FileConfig{ReadOnly: true})
		return s
	})
}

// A flipped bit ends in an error with the first bad block, for each way to read it. Other blocks are fine, a
// write of a part of the block does not make it look good, and a write of the block mends it.
func TestFlippedBit(t *testing.T) {
	for _, bs := range []uint32{512, 4096} {
		t.Run(fmt.Sprint(bs), func(t *testing.T) {
			dir := t.TempDir()
			s, id := openFiles(t, dir, "", backend.FileConfig{Size: testSize, BlockSize: bs})
			data := pattern(1<<20, 1)
			must(t, "WriteAt", s.WriteAt(data, 4096))
			settle(t, s)
			must(t, "Close", s.Close())
			bad := int64(4096 * 20)
			flip(t, dir, bad+100)
			flip(t, dir, bad+4096*2)
			var reported []int64
			below, _, err := backend.OpenFile(backend.FileConfig{Path: filepath.Join(dir, "lun.img"), BlockSize: bs})
			must(t, "OpenFile", err)
			s, err = Open(below, Config{Path: filepath.Join(dir, "lun.img.sums"), ID: id, Corrupt: func(off int64, _ uint64) { reported = append(reported, off) }})
			must(t, "Open", err)
			defer s.Close()
			wantBad := func(what string, err error, at int64) {
				t.Helper()
				var c *backend.CorruptError
				if !errors.As(err, &c) || c.Offset != at || !errors.Is(err, backend.ErrCorrupt) {
					t.Errorf("%s: %v, want a CorruptError at %d", what, err, at)
				}
			}
			buf := make([]byte, 1<<20)
			wantBad("read of all", s.ReadAt(buf, 4096), bad)
			wantBad("read behind the first", s.ReadAt(buf[:4096*3], bad+4096), bad+8192)
			wantBad("read of a part", s.ReadAt(buf[:3], bad+1), bad)
			wantBad("read of the end", s.ReadAt(buf[:5], bad-2), bad)
			wantBad("write of a part", s.WriteAt([]byte{1, 2, 3}, bad+7), bad)
			wantBad("discard of a part", s.Discard(bad+1, 8), bad)
			wantBad("still", s.ReadAt(buf[:bs], bad), bad)
			if err := s.Inspect(); !errors.Is(err, backend.ErrCorrupt) || !strings.Contains(err.Error(), fmt.Sprintf("2 blocks, the first has LBA %d", bad/int64(bs))) {
				t.Errorf("Inspect: %v", err)
			}
			if len(reported) != 1 || reported[0] != bad {
				t.Errorf("reported %v, want %d once", reported, bad)
			}
			must(t, "read before", s.ReadAt(buf[:bad-4096], 4096))
			must(t, "read between", s.ReadAt(buf[:4096], bad+4096))
			n, err := s.Scrub(buf, 0)
			if n != 2 || err != nil {
				t.Errorf("Scrub finds %d, %v, want 2", n, err)
			}
			must(t, "WriteAt", s.WriteAt(pattern(int(bs), 2), bad))
			must(t, "Zero", s.Zero(bad+8192, int64(bs)))
			must(t, "mended", s.ReadAt(buf, 4096))
			if n, err := s.Scrub(buf, 0); n != 0 || err != nil {
				t.Errorf("Scrub of the mended finds %d, %v", n, err)
			}
			must(t, "Inspect", s.Inspect())
			if n := s.Counts(); n.Bad != 0 || n.Mismatches < 6 || n.Verified == 0 {
				t.Errorf("counts %+v", n)
			}
		})
	}
}

// Data that was there before the side file gets its checksums in the background, and is found corrupt from then on.
func TestAdopt(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "lun.img")
	data := pattern(testSize, 3)
	clear(data[5<<20 : 30<<20]) // not a hole of the file
	must(t, "WriteFile", os.WriteFile(path, data, 0o600))
	s, id := openFiles(t, dir, "", backend.FileConfig{})
	buf := make([]byte, testSize)
	must(t, "read at once", s.ReadAt(buf, 0))
	settle(t, s)
	must(t, "Close", s.Close())
	flip(t, dir, 39<<20)
	s, _ = openFiles(t, dir, id, backend.FileConfig{})
	if s.Counts().Stale != 0 {
		t.Error("stale after a Close")
	}
	must(t, "read", s.ReadAt(buf[:39<<20], 0))
	if err := s.ReadAt(buf, 0); !errors.Is(err, backend.ErrCorrupt) {
		t.Errorf("a flipped bit: %v", err)
	}
}

// The process that continues with the files of a Store at rest trusts what that trusted: corruption in a region that was
// written a moment ago is found. Without that knowledge, as after a crash, such regions are stale.
func TestRested(t *testing.T) {
	const regions = 5
	below, side := memory(t, regions*regionSpan, 512), memory(t, kinds[0].sideSize(regions*regionSpan, 512), 512)
	c := Config{ID: NewID(), Create: true}
	open := func(what string) *Store {
		s, err := openOn(below, side, c)
		must(t, what, err)
		return s
	}
	s := open("create")
	for s.intent.stale.Load() > 0 {
		must(t, "adopt", s.adoptAll(make([]byte, adoptStep)))
	}
	must(t, "Sync", s.syncBoth())
	must(t, "clean", s.intent.cleanAll())
	for r := range int64(regions - 1) { // the last gets its bit in advance
		must(t, "write", s.WriteAt(pattern(1024, 1), r*regionSpan))
	}
	s.intent.makeStale(2, 3)
	must(t, "damage", below.WriteAt(pattern(1024, 2), 0))
	p := make([]byte, 512)
	if err := s.ReadAt(p, 512); !errors.Is(err, backend.ErrCorrupt) {
		t.Fatal(err)
	}
	must(t, "Rest", s.Rest(time.Second))
	text, err := json.Marshal(s.AtRest())
	must(t, "encode", err)
	if want := `{"stale":[{"first":2,"last":3}],"bad":[512]}`; string(text) != want {
		t.Errorf("at rest: %s, want %s", text, want)
	}
	c.Create = false
	must(t, "decode", json.Unmarshal(text, &c.Rested))
	next := open("next")
	if n := next.Counts(); n.Stale != 2*regionSpan || n.Bad != 1 {
		t.Errorf("the next one: %+v", n)
	}
	if err := next.ReadAt(p, 0); !errors.Is(err, backend.ErrCorrupt) {
		t.Errorf("a block that the first one did not read: %v", err)
	}
	must(t, "damage", below.WriteAt(p, 2*regionSpan))
	must(t, "read of a stale region", next.ReadAt(p, 2*regionSpan))
	// The bits are still set for a loss of power.
	c.Rested = nil
	if n := open("after a crash").Counts(); n.Stale != regions*regionSpan || n.Bad != 0 {
		t.Errorf("after a crash: %+v", n)
	}
	// What another LUN or size has is harmless.
	c.Rested = &Rested{Stale: []Span{{-3, -1}, {1, 1}, {4, 1 << 50}}, Bad: []int64{-512, 7, regions * regionSpan}}
	if n := open("with nonsense").Counts(); n.Stale != 2*regionSpan || n.Bad != 0 {
		t.Errorf("with nonsense: %+v", n)
	}
}

// Each damage of the side file ends in an error that says what to do, and the data stays as it is.
func TestDamagedSideFile(t *testing.T) {
	truncate := func(n int64) func(string) error { return func(path string) error { return os.Truncate(path, n) } }
	put := func(off int64, p ...byte) func(string) error {
		return func(path string) error {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = f.WriteAt(p, off)
			return err
		}
	}
	for name, c := range map[string]struct {
		damage func(path string) error
		want   string
	}{
		"missing":     {os.Remove, "not found, but the LUN had one"},
		"empty":       {truncate(0), "it is empty"},
		"half":        {truncate(sumsAt / 2), "too few for any checksums"},
		"short":       {truncate(sumsAt + 512), "too few for the checksums of 41943040 bytes"},
		"ragged":      {truncate(sumsAt + 513), "not a multiple"},
		"other magic": {put(0, 'X'), "not a file of checksums"},
		"header":      {put(17, 0xff, 0xfe, 0xfd), "it is damaged: the header"},
		"no header":   {put(0, make([]byte, 512)...), "not a file of checksums"},
		"map":         {put(mapAt+9, 0x5a), "it is damaged: the map of regions, sector 0"},
		"directory": {func(path string) error {
			if err := os.Remove(path); err != nil {
				return err
			}
			return os.Mkdir(path, 0o700)
		}, "directory"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s, id := openFiles(t, dir, "", backend.FileConfig{Size: testSize})
			settle(t, s)
			must(t, "Close", s.Close())
			path := filepath.Join(dir, "lun.img")
			must(t, "damage", c.damage(path+Suffix))
			below, _, err := backend.OpenFile(backend.FileConfig{Path: path})
			must(t, "OpenFile", err)
			defer below.Close()
			if _, err := Open(below, Config{Path: path + Suffix, ID: id}); err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), path+Suffix) {
				t.Errorf("Open: %v, want %q", err, c.want)
			}
			must(t, "the store below is open", below.ReadAt(make([]byte, 512), 0))
		})
	}
	t.Run("foreign", func(t *testing.T) {
		dirs := [2]string{t.TempDir(), t.TempDir()}
		var ids [2]string
		for i, dir := range dirs {
			var s *Store
			s, ids[i] = openFiles(t, dir, "", backend.FileConfig{Size: testSize})
			must(t, "Close", s.Close())
		}
		must(t, "Rename", os.Rename(filepath.Join(dirs[0], "lun.img.sums"), filepath.Join(dirs[1], "lun.img.sums")))
		below := memory(t, testSize, 512)
		if _, err := Open(below, Config{Path: filepath.Join(dirs[1], "lun.img.sums"), ID: ids[1]}); err == nil || !strings.Contains(err.Error(), "belongs to other data") {
			t.Errorf("Open: %v", err)
		}
		if _, err := Open(below, Config{Path: filepath.Join(dirs[1], "lun.img.sums"), ID: NewID(), Create: true}); err == nil || !strings.Contains(err.Error(), "it is there already") {
			t.Errorf("Open to create: %v", err)
		}
	})
	t.Run("block size", func(t *testing.T) {
		dir := t.TempDir()
		s, id := openFiles(t, dir, "", backend.FileConfig{Size: testSize})
		must(t, "Close", s.Close())
		if _, err := Open(memory(t, testSize, 4096), Config{Path: filepath.Join(dir, "lun.img.sums"), ID: id}); err == nil || !strings.Contains(err.Error(), "blocks of 512 bytes, and the LUN has blocks of 4096") {
			t.Errorf("Open: %v", err)
		}
	})
}

// The checksums follow each change of the size, and a LUN that grows again reads as zeros.
func TestResize(t *testing.T) {
	dir := t.TempDir()
	s, id := openFiles(t, dir, "", backend.FileConfig{Size: testSize})
	settle(t, s)
	must(t, "WriteAt", s.WriteAt(pattern(testSize, 1), 0))
	read := func(size int64) {
		t.Helper()
		if s.Info().Size != size {
			t.Fatalf("size %d, want %d", s.Info().Size, size)
		}
		must(t, "ReadAt", s.ReadAt(make([]byte, size), 0))
	}
	for _, size := range []int64{20<<20 + 512, 100 << 20, 1 << 20, 1<<20 + 512, testSize} {
		must(t, fmt.Sprintf("Resize to %d", size), s.Resize(size))
		read(size)
	}
	must(t, "WriteAt", s.WriteAt(pattern(1<<20, 2), testSize-1<<20))
	must(t, "Close", s.Close())
	path := filepath.Join(dir, "lun.img")
	// The process ended within a Resize: the data has another size than the side file knows.
	for _, size := range []int64{60 << 20, 10 << 20, 50 << 20} {
		must(t, "Truncate", os.Truncate(path, size))
		s, _ = openFiles(t, dir, id, backend.FileConfig{})
		settle(t, s)
		read(size)
		if n := s.Counts(); n.Mismatches != 0 {
			t.Errorf("%d mismatches", n.Mismatches)
		}
		must(t, "Close", s.Close())
	}
	// Somebody extends the file, with other data than zeros.
	s, _ = openFiles(t, dir, id, backend.FileConfig{})
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	must(t, "OpenFile", err)
	_, err = f.WriteAt(pattern(1<<20, 4), 50<<20)
	must(t, "WriteAt", errors.Join(err, f.Close()))
	if size, err := s.Grow(); size != 51<<20 || err != nil {
		t.Fatalf("Grow = %d, %v", size, err)
	}
	read(51 << 20)
	settle(t, s)
	flip(t, dir, 50<<20+77)
	if err := s.ReadAt(make([]byte, 512), 50<<20); !errors.Is(err, backend.ErrCorrupt) {
		t.Errorf("a flipped bit behind the old end: %v", err)
	}
}

// A write that fails, in the data or in the side file, leaves no block that is falsely corrupt.
func TestFailedWrites(t *testing.T) {
	boom := errors.New("boom")
	for name, typ := range types {
		for _, where := range []string{"data", "sums", "map", "half"} {
			t.Run(name+", "+where, func(t *testing.T) { testFailedWrites(t, typ, where, boom) })
		}
	}
}

func testFailedWrites(t *testing.T, typ protection.Type, where string, boom error) {
	below := &backendtest.Faulty{Store: memory(t, testSize, 512)}
	side := &backendtest.Faulty{Store: memory(t, kinds[typ].sideSize(testSize, 512), 512)}
	s, err := openOn(below, resizable{side}, Config{ID: NewID(), Create: true, Protection: typ})
	must(t, "openOn", err)
	s.idle = time.Hour
	go s.keep()
	defer s.Close()
	settle(t, s)
	old := pattern(1<<20, 1)
	must(t, "WriteAt", s.WriteAt(old, 0))
	switch where {
	case "data":
		below.Fail(backendtest.WriteAt, boom)
	case "sums":
		side.Fail(backendtest.WriteAt, boom)
	case "map":
		side.Fail(backendtest.WriteDurable, boom)
	case "half": // of the data
		below.Hook(func(op backendtest.Op, off, n int64) error {
			if op != backendtest.WriteAt || n < 8192 {
				return nil
			}
			return errors.Join(boom, below.Store.WriteAt(pattern(4096, 2), off))
		})
	}
	at := int64(0)
	if where == "map" {
		at = 39 << 20 // a region that is clean
		must(t, "clean", s.intent.clean([]int64{}, s.sums.WriteAt))
		s.intent.word(2).Store(0)
		s.intent.mu.Lock()
		s.intent.setBit(2, false)
		s.intent.mu.Unlock()
	}
	if err := s.WriteAt(pattern(64<<10, 2), at); !errors.Is(err, boom) {
		t.Fatalf("WriteAt: %v", err)
	}
	below.Hook(nil)
	for _, f := range []*backendtest.Faulty{below, side} {
		f.Fail(backendtest.WriteAt, nil)
		f.Fail(backendtest.WriteDurable, nil)
	}
	must(t, "ReadAt", s.ReadAt(make([]byte, testSize), 0))
	must(t, "WriteAt", s.WriteAt(pattern(64<<10, 2), at))
	must(t, "ReadAt", s.ReadAt(make([]byte, testSize), 0))
	if n := s.Counts(); n.Mismatches != 0 {
		t.Errorf("%d mismatches", n.Mismatches)
	}
}

// resizable is a store of fixed size that may be resized to its size.
type resizable struct{ backend.Store }

// Resize implements backend.Resizer.
func (r resizable) Resize(size int64) error {
	if size != r.Info().Size {
		return backend.ErrFixedSize
	}
	return nil
}

// A scrub during writes of the same blocks finds nothing.
func TestScrubDuringWrites(t *testing.T) {
	s, _ := openFiles(t, t.TempDir(), "", backend.FileConfig{Size: testSize})
	settle(t, s)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 0))
			p := pattern(256<<10, uint64(w))
			for {
				select {
				case <-stop:
					return
				default:
				}
				n := 1 + r.IntN(len(p))
				off := r.Int64N(2<<20 - int64(n))
				switch r.IntN(8) {
				case 0:
					must(t, "Discard", s.Discard(off, int64(n)))
				case 1:
					must(t, "ReadAt", s.ReadAt(make([]byte, n), off))
				default:
					must(t, "WriteAt", s.WriteAt(p[:n], off))
				}
			}
		})
	}
	buf := make([]byte, 1<<20)
	for range 20 {
		for off := range int64(2) {
			if n, err := s.Scrub(buf, off<<20); n != 0 || err != nil {
				t.Fatalf("Scrub: %d, %v", n, err)
			}
		}
	}
	close(stop)
	wg.Wait()
	if n := s.Counts(); n.Mismatches != 0 || n.Untrusted != 0 {
		t.Errorf("counts %+v", n)
	}
}

func BenchmarkStore(b *testing.B) {
	for _, checked := range []bool{false, true} {
		for _, bs := range []uint32{512, 4096} {
			for _, size := range []int{4096, 64 << 10, 1 << 20} {
				for _, write := range []bool{false, true} {
					name := fmt.Sprintf("checked=%v/bs=%d/size=%d/write=%v", checked, bs, size, write)
					b.Run(name, func(b *testing.B) { benchmark(b, checked, bs, size, write) })
				}
			}
		}
	}
}

// benchmark reads or writes at random offsets from all cores.
func benchmark(b *testing.B, checked bool, bs uint32, size int, write bool) {
	const span = 256 << 20
	c := backend.FileConfig{Size: span, BlockSize: bs}
	var s backend.Store
	if checked {
		s, _ = openFiles(b, b.TempDir(), "", c)
		settle(b, s.(*Store))
	} else {
		var err error
		c.Path = filepath.Join(b.TempDir(), "lun.img")
		s, _, err = backend.OpenFile(c)
		must(b, "OpenFile", err)
	}
	defer s.Close()
	p := pattern(1<<20, 1)
	for off := int64(0); off < span; off += 1 << 20 {
		must(b, "WriteAt", s.WriteAt(p, off))
	}
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		p := pattern(size, 1)
		r := rand.New(rand.NewPCG(rand.Uint64(), 0))
		for pb.Next() {
			off := r.Int64N(int64(span/size)) * int64(size)
			var err error
			if write {
				err = s.WriteAt(p, off)
			} else {
				err = s.ReadAt(p, off)
			}
			must(b, "I/O", err)
		}
	})
}
