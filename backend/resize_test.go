package backend

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/tests/testkit"
	"golang.org/x/sys/unix"
)

// A store is resized during writes: data within its size is never lost, and added bytes read
// as zeros.
func TestMemoryResizeUnderWrites(t *testing.T) {
	s, err := OpenMemory(MemoryConfig{Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	m := s.(*Memory)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for w := range 2 {
		wg.Go(func() {
			p, q := make([]byte, 4096), make([]byte, 4096)
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				// Within the first MiB, and beyond its end.
				for j := range p {
					p[j] = byte(i)
				}
				off := int64(w) << 19
				if err := m.WriteAt(p, off); err != nil {
					t.Error(err)
					return
				}
				if err := m.ReadAt(q, off); err != nil || !bytes.Equal(p, q) {
					t.Errorf("what was written is not what was read: %v", err)
					return
				}
				if err := m.WriteAt(p, 65<<20+off); err != nil && !errors.Is(err, ErrRange) {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 200 {
		for _, size := range []int64{200 << 20, 1 << 20, 70 << 20, 1 << 20} {
			if err := m.Resize(size); err != nil || m.Info().Size != size {
				t.Fatalf("Resize(%d): %v", size, err)
			}
		}
	}
	close(stop)
	wg.Wait()
	if err := m.Close(); err != nil || !errors.Is(m.Resize(2<<20), ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}

// Resize checks size and state first; a failure leaves the old size.
func TestFileResize(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk")
	s, _, err := OpenFile(FileConfig{Path: path, Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	d := s.(*disk)
	for _, size := range []int64{0, -512, 513} {
		if err := d.Resize(size); err == nil || d.Info().Size != 1<<20 {
			t.Errorf("Resize(%d): %v", size, err)
		}
	}
	fd := d.fd
	d.fd = failingTruncate{fd}
	if err := d.Resize(2 << 20); !errors.Is(err, unix.ENOSPC) || d.Info().Size != 1<<20 {
		t.Errorf("a truncate that fails: %v, %d bytes", err, d.Info().Size)
	}
	d.fd = fd
	d.regular = false
	if err := d.Resize(2 << 20); !errors.Is(err, ErrFixedSize) {
		t.Errorf("a device: %v", err)
	}
	d.regular = true
	if err := d.Resize(2 << 20); err != nil || d.Info().Size != 2<<20 {
		t.Errorf("%v, %d bytes", err, d.Info().Size)
	}
	if err := d.Close(); err != nil || !errors.Is(d.Resize(1<<20), ErrClosed) {
		t.Errorf("closed: %v", err)
	}
	if s, _, err = OpenFile(FileConfig{Path: path, Size: 2 << 20, ReadOnly: true}); err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.(Resizer).Resize(1 << 20); !errors.Is(err, ErrReadOnly) {
		t.Errorf("read-only: %v", err)
	}
}

// A Resize that hangs in the file system holds up no other call within the size, of this store or
// another one.
func TestResizeHoldsUpNothing(t *testing.T) {
	for _, hangs := range []string{"truncate", "fdatasync"} {
		for _, size := range []int64{2 << 20, 512 << 10} {
			t.Run(fmt.Sprintf("%s to %d", hangs, size), func(t *testing.T) {
				open := func() Store {
					s, _, err := OpenFile(FileConfig{Path: filepath.Join(t.TempDir(), "disk"), Size: 1 << 20})
					if err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { s.Close() })
					return s
				}
				s, other := open(), open()
				hanging, goOn := make(chan struct{}), make(chan struct{})
				var once sync.Once
				hang := func() error {
					once.Do(func() { close(hanging) })
					<-goOn
					return nil
				}
				h := &Hooks{}
				if hangs == "truncate" {
					h.Truncate = hang
				} else {
					h.Fdatasync = func(description int) error {
						if description == 0 {
							return hang()
						}
						return nil
					}
				}
				Intercept(s, h)
				resized := make(chan error, 1)
				go func() { resized <- s.(Resizer).Resize(size) }()
				<-hanging
				p := make([]byte, 4096)
				for name, s := range map[string]Store{"the same store": s, "another store": other} {
					done := make(chan error, 1)
					go func() {
						done <- errors.Join(s.WriteAt(p, 0), s.ReadAt(p, 0), s.WriteDurable(p, 0), s.Discard(0, 4096), s.Zero(0, 4096),
							s.ReadAt(p, 512<<10-4096))
					}()
					select {
					case err := <-done:
						if err != nil {
							t.Errorf("%s: %v", name, err)
						}
					case <-time.After(time.Minute):
						t.Errorf("%s: calls wait for the Resize", name)
					}
				}
				if err := s.WriteAt(p, min(size, 1<<20)); !errors.Is(err, ErrRange) {
					t.Errorf("a write behind the end of both sizes: %v, want ErrRange", err)
				}
				close(goOn)
				if err := <-resized; err != nil || s.Info().Size != size {
					t.Errorf("Resize: %v, %d bytes", err, s.Info().Size)
				}
			})
		}
	}
}

// A shrink waits for the writes in progress: one behind the new end would extend the file again. It
// waits for no later ones, so it ends although there is always a write in progress.
func TestShrinkWaitsForEarlierWrites(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		s, _, err := OpenFile(FileConfig{Path: filepath.Join(t.TempDir(), "disk"), Size: 4 << 20})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		goOn, finish := map[int64]chan struct{}{}, map[int64]func(){} // by offset
		for _, off := range []int64{0, 512, 1024, 2048, 3072, 3 << 20} {
			c := make(chan struct{})
			goOn[off], finish[off] = c, sync.OnceFunc(func() { close(c) })
			defer finish[off]()
		}
		Intercept(s, &Hooks{Pwrite: func(p []byte, off int64, flags int, below func([]byte, int64, int) (int, error)) (int, error) {
			<-goOn[off]
			return below(p, off, flags)
		}})
		write := func(off int64) {
			go func() {
				if err := s.WriteAt(make([]byte, 512), off); err != nil {
					t.Error(err)
				}
			}()
			synctest.Wait()
		}
		for i, size := range []int64{2 << 20, 1 << 20} { // the second one, after writes with the first size
			write(int64(i) * 1024)
			late := int64(3 << 20)
			if i > 0 {
				late = 512
			}
			write(late)
			var resized atomic.Bool
			go func() {
				if err := s.(Resizer).Resize(size); err != nil {
					t.Error(err)
				}
				resized.Store(true)
			}()
			synctest.Wait()
			write(int64(i)*1024 + 2048) // begins later
			finish[int64(i)*1024]()
			synctest.Wait()
			if resized.Load() {
				t.Fatalf("the file was cut to %d bytes during a write at %d", size, late)
			}
			finish[late]()
			synctest.Wait()
			if !resized.Load() {
				t.Fatalf("the shrink to %d bytes waits for a write that began after it", size)
			}
			finish[int64(i)*1024+2048]()
			synctest.Wait()
			end, err := s.(*disk).fd.seek(0, io.SeekEnd)
			if err != nil || end != size || s.Info().Size != size {
				t.Fatalf("%v: the file has %d bytes, the store %d, want %d", err, end, s.Info().Size, size)
			}
		}
	})
}

type failingTruncate struct{ osFile }

func (failingTruncate) truncate(int64) error { return unix.ENOSPC }

// Inspect says what somebody else did to the file, and that a sync has failed.
func TestInspect(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk")
	s, _, err := OpenFile(FileConfig{Path: path, Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	d := s.(*disk)
	look := func(what string, want error) {
		t.Helper()
		if err := d.Inspect(); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	look("at first", nil)
	must(d.Resize(1 << 19))
	look("after a shrink", nil)
	must(os.Truncate(path, 512))
	look("cut short", ErrCut)
	must(os.Truncate(path, 1<<20))
	look("longer than the store", nil)
	must(os.Rename(path, path+".away"))
	look("renamed", ErrDeleted)
	must(os.WriteFile(path, nil, 0o600))
	look("another file", ErrReplaced)
	must(os.Rename(path+".away", path))
	look("back again", nil)
	must(os.Remove(path))
	look("deleted", ErrDeleted)
	must(os.WriteFile(path+".x", nil, 0o600))
	d.path = path + ".x"
	look("another name", ErrReplaced)
	must(os.Remove(path + ".x"))
	must(d.Close())
	look("closed", ErrClosed)
}

// Inspect of a store whose sync has failed says so.
func TestInspectAfterAFailedSync(t *testing.T) {
	s, _, err := OpenFile(FileConfig{Path: filepath.Join(t.TempDir(), "disk"), Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	d := s.(*disk)
	d.fd = failingSync{d.fd}
	if err := d.WriteAt(make([]byte, 512), 0); err != nil {
		t.Fatal(err)
	}
	if err := d.Sync(); !errors.Is(err, unix.EIO) {
		t.Errorf("%v, want EIO", err)
	}
	if err := d.Inspect(); !errors.Is(err, ErrUnsynced) {
		t.Errorf("%v, want ErrUnsynced", err)
	}
}

type failingSync struct{ osFile }

func (failingSync) fdatasync() error { return unix.EIO }
