package backend

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A Splicer is a Store in the page cache of the kernel. Its methods follow the rules of Store's methods.
type Splicer interface {
	// CanSplice reports whether Splice may succeed.
	CanSplice() bool

	// Splice makes a pipe, which has room for that, refer to the pages of n bytes at off. What is in the pipe, and on its way from there, may change
	// with the range. Splice fails with ErrNoSplice if the medium cannot do that; then the pipe has nothing. After another error it may have a part.
	Splice(pipe int, off, n int64) error

	// Freeze ends that for what pipes refer to in the range, which the Store forgets: it has the same data in other pages then. The
	// caller keeps others from changing or reading the range meanwhile, and the pages at both of its ends.
	Freeze(off, n int64) error
}

// FreezeAlign is a multiple of the length in bytes of pages, at whose multiples Freeze begins and ends.
const FreezeAlign = 64 << 10

var (
	// ErrNoSplice reports a medium to which a pipe cannot refer.
	ErrNoSplice = errors.New("a pipe cannot refer to the medium")
	// errCached reports that the page cache has kept pages in spite of direct I/O.
	errCached = errors.New("the file system has kept pages in its cache in spite of direct I/O")
)

// Pour copies n bytes at off of s to a pipe, which has room for them, through buf.
func Pour(s Store, pipe int, off, n int64, buf []byte) error {
	for n > 0 {
		p := buf[:min(int64(len(buf)), n)]
		if err := s.ReadAt(p, off); err != nil {
			return err
		}
		off, n = off+int64(len(p)), n-int64(len(p))
		for len(p) > 0 {
			k, err := retryValue(func() (int, error) { return unix.Write(pipe, p) })
			if err != nil {
				return fmt.Errorf("write to a pipe: %w", err)
			}
			p = p[k:]
		}
	}
	return nil
}

// CanSplice implements Splicer.
func (d *disk) CanSplice() bool { return !d.noPipe.Load() }

// Splice implements Splicer.
func (d *disk) Splice(pipe int, off, n int64) error {
	v, err := d.enter(off, n, false)
	if err != nil {
		return err
	}
	defer v.leave()
	if d.noPipe.Load() {
		return ErrNoSplice
	}
	for done := int64(0); done < n; {
		k, err := d.fd.splice(pipe, off+done, int(n-done))
		switch {
		case err == unix.EINVAL && done == 0:
			d.noPipe.Store(true)
			return ErrNoSplice
		case err == nil && k == 0:
			err = d.ended(off+done, n-done)
		}
		if err != nil {
			return d.readError(off+done, err)
		}
		done += int64(k)
	}
	return nil
}

// freezes reports whether the file system of fd is one whose direct I/O takes pages out of the page cache, as that of block devices does. Others
// may keep them, as tmpfs and btrfs do.
func freezes(fd int) bool {
	var sfs unix.Statfs_t
	err := retry(func() error { return unix.Fstatfs(fd, &sfs) })
	return err == nil && (sfs.Type == unix.EXT4_SUPER_MAGIC || sfs.Type == unix.XFS_SUPER_MAGIC) // ext2 and ext3 have that of ext4
}

// freezeTries bounds the tries of Freeze: the kernel may have read ahead meanwhile.
const freezeTries = 3

// Freeze implements Splicer. Direct I/O takes pages out of the page cache even if something refers to them, so Freeze writes by it what the medium
// has. If that does not work here, as with data=journal, the disk splices no longer.
func (d *disk) Freeze(off, n int64) error {
	end := min((off+n+FreezeAlign-1)&^(FreezeAlign-1), d.size.Load())
	off &^= FreezeAlign - 1
	v, err := d.enter(off, end-off, true)
	if err != nil {
		return err
	}
	defer v.leave()
	f, err := d.direct()
	if err == nil {
		defer f.close()
		for range freezeTries {
			if err = d.rewrite(f, off, end-off); err != errCached {
				break
			}
		}
	}
	switch err {
	case nil:
		return nil
	case errCached, unix.EINVAL, unix.EOPNOTSUPP: // others may not happen again
		d.noPipe.Store(true)
	}
	return fmt.Errorf("take %d bytes at %d of %s out of the page cache: %w", end-off, off, d.path, err)
}

// rewrite writes by f, which is for direct I/O, what the n bytes at off are. It fails with an errCached if the page cache has pages of them afterwards.
func (d *disk) rewrite(f osFile, off, n int64) error {
	buffer := directBuffers.Get().(*[]byte)
	defer directBuffers.Put(buffer)
	for done := int64(0); done < n; {
		p := (*buffer)[:min(int64(len(*buffer)), n-done)]
		if err := d.readAll(p, off+done); err != nil {
			return err
		}
		if err := writeAll(f, p, off+done, 0); err != nil {
			return err
		}
		done += int64(len(p))
	}
	cached, err := d.fd.cached(off, n)
	if err == nil && cached {
		return errCached
	}
	return err
}

func (f sysFile) splice(pipe int, off int64, n int) (int, error) {
	k, err := retryValue(func() (int64, error) { return unix.Splice(int(f), &off, pipe, nil, n, unix.SPLICE_F_NONBLOCK) })
	return int(k), err
}

func (f sysFile) cached(off, n int64) (bool, error) {
	m, err := unix.Mmap(int(f), off, int(n), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return false, err
	}
	defer unix.Munmap(m)
	pages := make([]byte, (len(m)+unix.Getpagesize()-1)/unix.Getpagesize())
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&m[0])), uintptr(len(m)), uintptr(unsafe.Pointer(&pages[0]))); errno != 0 {
		return false, errno
	}
	for _, p := range pages {
		if p&1 != 0 {
			return true, nil
		}
	}
	return false, nil
}
