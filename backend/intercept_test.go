package backend

// Hooks stand between a file or block store and the kernel. A nil hook lets
// the call through.
type Hooks struct {
	Pread     func(p []byte, off int64, below func([]byte, int64) (int, error)) (int, error)
	Pwrite    func(p []byte, off int64, flags int, below func([]byte, int64, int) (int, error)) (int, error)
	Fallocate func(mode uint32) error // nil lets the call through
	// Fdatasync gets the number of the file description that is synced.
	Fdatasync func(description int) error // nil lets the call through
}

// Modes of fallocate that Fallocate sees.
var (
	PunchHole = eraseModes[erasePunch]
	ZeroRange = eraseModes[eraseZero]
)

// Intercept puts h below s, which no goroutine may be using yet.
func Intercept(s Store, h *Hooks) {
	d := s.(*disk)
	for n := range len(d.flushers) {
		f := <-d.flushers
		hooked := &hookedFile{f, h, n}
		if f == d.fd {
			d.fd = hooked
		}
		d.flushers <- hooked
	}
}

type hookedFile struct {
	osFile
	h *Hooks
	n int
}

func (f *hookedFile) pread(p []byte, off int64) (int, error) {
	if f.h.Pread != nil {
		return f.h.Pread(p, off, f.osFile.pread)
	}
	return f.osFile.pread(p, off)
}

func (f *hookedFile) pwrite(p []byte, off int64, flags int) (int, error) {
	if f.h.Pwrite != nil {
		return f.h.Pwrite(p, off, flags, f.osFile.pwrite)
	}
	return f.osFile.pwrite(p, off, flags)
}

func (f *hookedFile) fallocate(mode uint32, off, n int64) error {
	if f.h.Fallocate != nil {
		if err := f.h.Fallocate(mode); err != nil {
			return err
		}
	}
	return f.osFile.fallocate(mode, off, n)
}

func (f *hookedFile) fdatasync() error {
	if f.h.Fdatasync != nil {
		if err := f.h.Fdatasync(f.n); err != nil {
			return err
		}
	}
	return f.osFile.fdatasync()
}
