package backend

import "golang.org/x/sys/unix"

// A MediumReader is a Store that can read past the caches of the kernel.
type MediumReader interface {
	// ReadMedium does what ReadAt does, but reads from the medium. Changes that were made before the call
	// are read, too. If that is not possible, for example for a p that is not aligned, it reads like ReadAt.
	ReadMedium(p []byte, off int64) error
}

// ReadMedium calls s.ReadMedium if s is a MediumReader, otherwise s.ReadAt.
func ReadMedium(s Store, p []byte, off int64) error {
	if m, ok := s.(MediumReader); ok {
		return m.ReadMedium(p, off)
	}
	return s.ReadAt(p, off)
}

// ReadMedium implements MediumReader with O_DIRECT.
func (d *disk) ReadMedium(p []byte, off int64) error {
	v, err := d.enter(off, int64(len(p)), false)
	if err != nil {
		return err
	}
	n := d.readDirect(p, off)
	v.leave()
	if n == len(p) {
		return nil
	}
	return d.ReadAt(p[n:], off+int64(n)) // also for the error
}

// readDirect reads from the medium, and returns how many bytes it has read.
//
// Preconditions: d.mu is held, at least for reading.
func (d *disk) readDirect(p []byte, off int64) (n int) {
	held(&d.mu)
	file, ok := d.fd.(sysFile)
	if !ok {
		return 0
	}
	fd, err := retryValue(func() (int, error) {
		return unix.Open(descriptorPath(int(file)), unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	for n < len(p) {
		k, err := sysFile(fd).pread(p[n:], off+int64(n))
		if err != nil || k == 0 {
			break
		}
		n += k
	}
	return n
}
