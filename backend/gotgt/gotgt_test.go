//go:build !nogotgt

package gotgt_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gostor/gotgt/pkg/api"
	"github.com/gostor/gotgt/pkg/scsi"
	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/backend/gotgt"
)

func open(t *testing.T, c gotgt.Config) backend.Store {
	t.Helper()
	s, err := gotgt.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func newFile(t *testing.T, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "lun.img")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// gotgt's own file store keeps the contract, although its Unmap does nothing.
func TestFileStore(t *testing.T) {
	for name, c := range map[string]gotgt.Config{
		"512":   {},
		"4096":  {BlockSize: 4096},
		"Unmap": {Unmap: true},
	} {
		t.Run(name, func(t *testing.T) {
			backendtest.Run(t, func(t *testing.T) backend.Store {
				c.Plugin, c.Path = "file", newFile(t, make([]byte, 2<<20))
				return open(t, c)
			})
		})
	}
	t.Run("ReadOnly", func(t *testing.T) {
		backendtest.RunReadOnly(t, func(t *testing.T, content []byte) backend.Store {
			return open(t, gotgt.Config{Plugin: "file", Path: newFile(t, content), ReadOnly: true})
		})
	})
}

func TestInfo(t *testing.T) {
	path := newFile(t, make([]byte, 8192))
	want := backend.Info{Size: 8192, BlockSize: 512, PhysicalBlockSize: 512, VolatileCache: true}
	if got := open(t, gotgt.Config{Plugin: "file", Path: path, Size: 8192}).Info(); got != want {
		t.Errorf("Info() = %+v, want %+v", got, want)
	}
	want.DiscardGranularity = 512
	if got := open(t, gotgt.Config{Plugin: "file", Path: path, Unmap: true}).Info(); got != want {
		t.Errorf("with Unmap, Info() = %+v, want %+v", got, want)
	}
}

// A plugin is a store of gotgt that fails as a test requires.
type plugin struct {
	api.BackingStore // the methods that the tests do not expect
	data             []byte
	options          string
	calls            []string
	unmapped         []api.UnmapBlockDescriptor
	fail             map[string]error
	panics           map[string]bool
	short            bool
	size             uint64
}

func (p *plugin) called(name string) error {
	p.calls = append(p.calls, name)
	if p.panics[name] {
		panic("oops")
	}
	return p.fail[name]
}

func (p *plugin) Init(_ *api.SCSILu, options string) error {
	p.options = options
	return p.called("Init")
}
func (p *plugin) Open(*api.SCSILu, string) error  { return p.called("Open") }
func (p *plugin) Close(*api.SCSILu) error         { return p.called("Close") }
func (p *plugin) Exit(*api.SCSILu) error          { return p.called("Exit") }
func (p *plugin) DataSync(off, n int64) error     { return p.called("DataSync") }
func (p *plugin) Write(b []byte, off int64) error { copy(p.data[off:], b); return p.called("Write") }

func (p *plugin) Size(*api.SCSILu) uint64 {
	if p.called("Size"); p.size != 0 {
		return p.size
	}
	return uint64(len(p.data))
}

func (p *plugin) Read(off, n int64) ([]byte, error) {
	if p.short {
		n--
	}
	return bytes.Clone(p.data[off : off+n]), p.called("Read")
}

// Unmap leaves other data than zeros, like some disks.
func (p *plugin) Unmap(d []api.UnmapBlockDescriptor) error {
	p.unmapped = append(p.unmapped, d...)
	for _, r := range d {
		for i := range r.TL {
			p.data[r.Offset+uint64(i)] = 0xff
		}
	}
	return p.called("Unmap")
}

// register registers a new plugin under the name "test".
func register() *plugin {
	p := &plugin{data: make([]byte, 4<<20), fail: map[string]error{}, panics: map[string]bool{}}
	scsi.RegisterBackingStore("test", func() (api.BackingStore, error) { return p, p.called("New") })
	return p
}

var config = gotgt.Config{Plugin: "test", Path: "some/where", Options: "a=b", Unmap: true}

func TestPlugin(t *testing.T) {
	backendtest.Run(t, func(t *testing.T) backend.Store {
		register()
		return open(t, config)
	})
}

func TestPluginLife(t *testing.T) {
	p := register()
	s := open(t, config)
	if err := s.Discard(1<<20, 5<<19); err != nil {
		t.Fatal(err)
	}
	var got uint64
	for _, d := range p.unmapped {
		if d.Offset != 1<<20+got {
			t.Errorf("Unmap at %d, want %d", d.Offset, 1<<20+got)
		}
		got += uint64(d.TL)
	}
	if got != 5<<19 {
		t.Errorf("%d bytes were unmapped, want %d", got, 5<<19)
	}
	p.unmapped = nil
	if err := s.Discard(100, 1000); err != nil {
		t.Fatal(err)
	}
	if want := (api.UnmapBlockDescriptor{Offset: 512, TL: 512}); len(p.unmapped) != 1 || p.unmapped[0] != want {
		t.Errorf("of bytes 100 to 1100, %+v was unmapped, want %+v", p.unmapped, want)
	}
	p.calls = p.calls[:4]
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Join(p.calls, " "), "New Init Open Size DataSync Close Exit"; got != want {
		t.Errorf("the plug-in was called as %s, want %s", got, want)
	}
	if p.options != "a=b" {
		t.Errorf("Init got the options %q", p.options)
	}
}

func TestOpenRefusals(t *testing.T) {
	for _, c := range []struct {
		name  string
		c     gotgt.Config
		spoil func(p *plugin)
		want  string
		calls string // of the plug-in, the last ones
	}{
		{"NoPlugin", gotgt.Config{Path: "x"}, nil, "no plug-in is named", ""},
		{"UnknownPlugin", gotgt.Config{Plugin: "absent"}, nil, "absent is not found", ""},
		{"BlockSize", gotgt.Config{Plugin: "test", BlockSize: 1000}, nil, "block size 1000", ""},
		{"AbsentFile", gotgt.Config{Plugin: "file", Path: "/absent"}, nil, "no such file", ""},
		{"NullStoreHasNoSize", gotgt.Config{Plugin: "null", Path: "x"}, nil, "size 0", ""},
		{"OtherSize", gotgt.Config{Plugin: "test", Size: 512}, nil, "has 4194304 bytes, but 512 are configured", "Size Close Exit"},
		{"NegativeSize", gotgt.Config{Plugin: "test", Size: -512}, nil, "has 4194304 bytes, but -512", "Size Close Exit"},
		{"NoMultiple", gotgt.Config{Plugin: "test"}, func(p *plugin) { p.size = 1000 }, "not a multiple", "Size Close Exit"},
		{"Huge", gotgt.Config{Plugin: "test"}, func(p *plugin) { p.size = 1 << 63 }, "too many", "Size Close Exit"},
		{"NewFails", gotgt.Config{Plugin: "test"}, func(p *plugin) { p.fail["New"] = io.ErrNoProgress }, "multiple Read calls", "New"},
		{"InitFails", gotgt.Config{Plugin: "test"}, func(p *plugin) { p.fail["Init"] = io.ErrNoProgress }, "multiple Read calls", "Init"},
		{"OpenFails", gotgt.Config{Plugin: "test"}, func(p *plugin) { p.fail["Open"] = io.ErrNoProgress }, "multiple Read calls", "Open Exit"},
		{"NewPanics", gotgt.Config{Plugin: "test"}, func(p *plugin) { p.panics["New"] = true }, "panicked in New", "New"},
		{"InitPanics", gotgt.Config{Plugin: "test"}, func(p *plugin) { p.panics["Init"] = true }, "panicked in Init", "Init"},
		{"OpenPanics", gotgt.Config{Plugin: "test"}, func(p *plugin) { p.panics["Open"] = true }, "panicked in Open", "Open"},
		{"SizePanics", gotgt.Config{Plugin: "test"}, func(p *plugin) { p.panics["Size"] = true }, "panicked in Size", "Size"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := register()
			if c.spoil != nil {
				c.spoil(p)
			}
			s, err := gotgt.Open(c.c)
			if err == nil || s != nil {
				t.Fatalf("Open: %v, %v, want an error alone", s, err)
			}
			if !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %q, want %q in it", err, c.want)
			}
			if got := strings.Join(p.calls, " "); !strings.HasSuffix(got, c.calls) {
				t.Errorf("the plug-in was called as %s, want %s at the end", got, c.calls)
			}
		})
	}
}

func TestPluginErrors(t *testing.T) {
	calls := map[string]func(s backend.Store) error{
		"Read":     func(s backend.Store) error { return s.ReadAt(make([]byte, 10), 5) },
		"Write":    func(s backend.Store) error { return s.WriteAt(make([]byte, 10), 5) },
		"DataSync": backend.Store.Sync,
		"Unmap":    func(s backend.Store) error { return s.Discard(512, 512) },
	}
	for name, call := range calls {
		p := register()
		s := open(t, config)
		p.fail[name] = io.ErrNoProgress
		if err := call(s); !errors.Is(err, io.ErrNoProgress) {
			t.Errorf("%s: %v, want the plug-in's error", name, err)
		}
		delete(p.fail, name)
		want := error(nil)
		if name == "DataSync" {
			want = backend.ErrUnsynced // a failed sync is final
		}
		if err := call(s); !errors.Is(err, want) {
			t.Errorf("%s healed: %v, want %v", name, err, want)
		}

		// After a panic the plug-in gets no more calls.
		p = register()
		s = open(t, config)
		p.panics[name] = true
		p.calls = nil
		if err := call(s); err == nil || !strings.Contains(err.Error(), "panicked in "+name+" and is no longer used: oops") {
			t.Errorf("%s panics: %v", name, err)
		}
		n := len(p.calls)
		for other, call := range calls {
			if err := call(s); err == nil {
				t.Errorf("%s after a panic in %s succeeds", other, name)
			}
		}
		if err := s.Close(); err == nil {
			t.Errorf("Close after a panic in %s succeeds", name)
		}
		if len(p.calls) != n {
			t.Errorf("after a panic in %s the plug-in was called: %v", name, p.calls[n:])
		}
	}

	p := register()
	s := open(t, config)
	p.short = true
	if err := s.ReadAt(make([]byte, 10), 0); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a short read: %v, want ErrUnexpectedEOF", err)
	}
	p.short = false
	p.fail["Write"] = &os.PathError{Op: "write", Path: "x", Err: unix.ENOSPC}
	if err := s.WriteAt([]byte{1}, 0); !errors.Is(err, backend.ErrNoSpace) {
		t.Errorf("a full medium: %v, want ErrNoSpace", err)
	}
	delete(p.fail, "Write")
	p.fail["DataSync"] = io.ErrNoProgress
	if err := s.WriteDurable([]byte{1}, 0); !errors.Is(err, io.ErrNoProgress) {
		t.Errorf("WriteDurable: %v, want the plug-in's error", err)
	}
	delete(p.fail, "DataSync")
	if err := s.WriteDurable([]byte{1}, 0); !errors.Is(err, backend.ErrUnsynced) {
		t.Errorf("WriteDurable afterwards: %v, want ErrUnsynced", err)
	}
	if err := s.Close(); !errors.Is(err, backend.ErrUnsynced) {
		t.Errorf("Close: %v, want ErrUnsynced", err)
	}
	if got := p.calls[len(p.calls)-2:]; strings.Join(got, " ") != "Close Exit" {
		t.Errorf("the plug-in was called last as %v, want Close Exit", got)
	}
}

// gotgt's file store logs a failed write; the caller has the error already.
// logrus keeps the stderr of its initialization, so the test runs another process.
func TestNothingOnStderr(t *testing.T) {
	const child = "ISER_TARGET_TEST_CHILD"
	if os.Getenv(child) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestNothingOnStderr$")
		cmd.Env = append(os.Environ(), child+"=1")
		var stdout, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		if err := cmd.Run(); err != nil {
			t.Fatalf("%v\n%s", err, &stdout)
		}
		if stderr.Len() != 0 {
			t.Errorf("stderr got %q", &stderr)
		}
		return
	}
	// A file that can be opened for writing, but not written to.
	fd, err := unix.MemfdCreate("lun", unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(fd, 8192); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); err != nil {
		t.Fatal(err)
	}
	s := open(t, gotgt.Config{Plugin: "file", Path: fmt.Sprintf("/proc/self/fd/%d", fd)})
	if err := s.WriteAt([]byte{1}, 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("WriteAt: %v, want EPERM", err)
	}
}
