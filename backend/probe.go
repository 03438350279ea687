package backend

import (
	"errors"
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// ProbeFile returns the error that OpenFile would return for c, or nil. It neither creates nor changes a file that has a name.
func ProbeFile(c FileConfig) error {
	if err := probeFile(c); err != nil {
		return fmt.Errorf("file store %s: %w", c.Path, err)
	}
	return nil
}

func probeFile(c FileConfig) error {
	if err := c.complete().Validate(); err != nil {
		return err
	}
	absent, err := checkFile(c)
	if err != nil {
		return err
	}
	if absent {
		return probeDir(filepath.Dir(c.Path), c.Size)
	}
	c2 := c
	c2.Size = 0 // creates nothing if the file disappears
	fd, err := openLocked(c2)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("stat: %w", err)
	}
	_, err = fileSize(c, &st)
	return err
}

// ProbeSize returns an error if a file in the directory of path cannot have that size in bytes.
func ProbeSize(path string, size int64) error {
	if err := probeDir(filepath.Dir(path), size); err != nil {
		return fmt.Errorf("file store %s: %w", path, err)
	}
	return nil
}

// probeDir makes a file of that size without a name in dir. On a file system that cannot have one, it only checks the permission.
func probeDir(dir string, size int64) error {
	fd, err := retryValue(func() (int, error) { return unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600) })
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EISDIR) {
		err = unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK|unix.X_OK, unix.AT_EACCESS)
		if err != nil {
			return fmt.Errorf("create in %s: %w", dir, err)
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("create in %s: %w", dir, err)
	}
	defer unix.Close(fd)
	if err := sysFile(fd).truncate(size); err != nil {
		return fmt.Errorf("create with %d bytes: %w", size, err)
	}
	return nil
}

// ProbeBlock returns the error that OpenBlock would return for c, or nil.
func ProbeBlock(c BlockConfig) error {
	s, err := OpenBlock(c)
	if err != nil {
		return err
	}
	return s.Close()
}

// ProbeMemory returns the error that OpenMemory would return for c, or nil.
func ProbeMemory(c MemoryConfig) error {
	_, err := c.info()
	return err
}
