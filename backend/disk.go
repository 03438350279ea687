package backend

import (
	"errors"
	"fmt"
	"io"
	"math/bits"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A disk is a Store on a file descriptor, for regular files and block devices. I/O goes
// through the page cache, so accesses need no alignment.
//
// The kernel reports a failed write-back once and then forgets it: it marks the pages clean
// although the medium does not have them, and the next fsync succeeds. Hence failed: after
// one failure no call reports again that data is safe. flush.go says which description a sync uses.
type disk struct {
	info    Info // apart from Size: see size
	size    atomic.Int64
	path    string
	through bool          // WriteAt, Discard and Zero return when all data is stable
	regular bool          // a regular file, which can be resized
	device  atomic.Uint64 // see Recoverer
	align   int64         // fallocate requires multiples of this as offset and length

	direct func() (osFile, error) // opens a description for direct I/O
	fd     osFile
	syncs  rounds      // the only user of fd for syncs
	spares spares      // of fd, for durable writes
	failed atomic.Bool // a sync has failed

	refused [len(eraseModes)]atomic.Bool // the medium does not support the mode
	noDsync atomic.Bool                  // the kernel does not support RWF_DSYNC
	noMap   atomic.Bool                  // the file system does not support FIEMAP
	noPipe  atomic.Bool                  // the file system does not support splice(2), or Freeze
	number  uint64                       // ascends in the order of opening

	mu       sync.RWMutex // held for reading by calls, for writing by Close
	closed   bool         // guarded by mu
	resizing sync.Mutex   // held by Grow and Resize, which change size; before mu
	changes  changes      // the calls that change the medium
}

// osFile has the system calls of a disk; tests replace it by one that fails. Errors are errno
// values; transfers may be short.
type osFile interface {
	pread(p []byte, off int64) (int, error)
	pwrite(p []byte, off int64, flags int) (int, error) // flags of pwritev2(2)
	splice(pipe int, off int64, n int) (int, error)
	cached(off, n int64) (bool, error) // whether the page cache has a page of [off, off+n); off is at the beginning of one
	fallocate(mode uint32, off, n int64) error
	fdatasync() error
	seek(off int64, whence int) (int64, error)
	// extent returns the first extent in [off, off+n) that has allocated blocks, with data or
	// not; length is 0 if no blocks are allocated.
	extent(off, n int64) (at, length int64, err error)
	usage() (used, free int64, err error) // bytes of the file, and free bytes of its file system
	willNeed(off, n int64) error
	copyFrom(off int64, src osFile, srcOff, n int64) (int64, error) // may be short
	truncate(size int64) error
	cloneTo(fd int, n int64) error // FICLONERANGE to another file; n 0: all
	stat() (unix.Stat_t, error)
	close() error
}

// disks counts the disks that were opened.
var disks atomic.Uint64

// newDisk returns a disk on the open descriptor fd, which it owns from then on.
func newDisk(path string, fd int, info Info, align int64, through bool) *disk {
	if !info.ReadOnly {
		info.AtomicUnit, info.AtomicWrite = atomicLimits(fd, info.BlockSize)
	}
	d := newDiskOn(path, sysFile(fd), func() (osFile, error) { return reopen(fd) }, info, align, through)
	d.direct = func() (osFile, error) { return openDirect(fd) }
	return d
}

// newDiskOn returns a disk on f. reopen returns another description of the same file.
func newDiskOn(path string, f osFile, reopen func() (osFile, error), info Info, align int64, through bool) *disk {
	info.VolatileCache = !through
	d := &disk{info: info, path: path, through: through, align: align, fd: f, number: disks.Add(1)}
	d.size.Store(info.Size)
	d.spares.init(reopen)
	return d
}

// Info implements Store.
func (d *disk) Info() Info {
	info := d.info
	info.Size = d.size.Load()
	return info
}

// Grow implements Grower, for a file or device that was extended (lvextend(8)). It ignores
// bytes after the last whole block.
func (d *disk) Grow() (int64, error) {
	d.resizing.Lock()
	defer d.resizing.Unlock()
	v, err := d.enter(0, 0, false)
	if err != nil {
		return 0, err
	}
	defer v.leave()
	end, err := d.fd.seek(0, io.SeekEnd)
	if err != nil {
		return 0, fmt.Errorf("find the end of %s: %w", d.path, err)
	}
	d.size.Store(max(d.size.Load(), end&^int64(d.info.BlockSize-1)))
	return d.size.Load(), nil
}

// Resize implements Resizer for regular files. Other calls continue meanwhile. Before it cuts the
// medium off, it waits for the changes in progress: one behind the new end would extend the medium again.
func (d *disk) Resize(size int64) error {
	d.resizing.Lock()
	defer d.resizing.Unlock()
	v, err := d.enter(0, 0, false)
	if err != nil {
		return err
	}
	defer v.leave()
	switch {
	case d.info.ReadOnly:
		return ErrReadOnly
	case !d.regular:
		return ErrFixedSize
	case size <= 0 || size%int64(d.info.BlockSize) != 0:
		return fmt.Errorf("size %d: must be a positive multiple of the block size %d", size, d.info.BlockSize)
	}
	old := d.size.Load()
	st, err := d.fd.stat()
	switch {
	case err != nil:
		return fmt.Errorf("look at %s: %w", d.path, err)
	case st.Size < min(old, size): // the missing data would look like zeros
		return fmt.Errorf("%w: it has %d bytes, and the LUN %d", ErrCut, st.Size, old)
	}
	if size < old {
		d.size.Store(size) // from here on no call goes beyond the new end
		d.changes.wait()
	}
	if err := d.fd.truncate(size); err != nil {
		d.size.Store(old)
		return fmt.Errorf("resize %s to %d bytes: %w", d.path, size, err)
	}
	err = d.sync()
	d.size.Store(size)
	if err != nil {
		return fmt.Errorf("%s was resized to %d bytes, but %w: %w", d.path, size, ErrUnsynced, err)
	}
	return nil
}

// Allocate implements Allocator for regular files. A Resize waits for it, so it does not
// allocate blocks after the end of the file.
func (d *disk) Allocate(off, n int64) error {
	if !d.regular {
		return ErrNoAllocate
	}
	v, err := d.enter(off, n, true)
	if err != nil {
		return err
	}
	defer v.leave()
	if n == 0 {
		return nil // fallocate refuses an empty range
	}
	switch err := d.fd.fallocate(0, off, n); err {
	case unix.EOPNOTSUPP, unix.ENOSYS:
		return fmt.Errorf("%s: %w", d.path, ErrNoAllocate)
	default:
		return d.writeError(off, err)
	}
}

// enter begins a call on [off, off+n) and holds d.mu for reading. The caller must call leave of the
// visit unless enter fails.
func (d *disk) enter(off, n int64, changes bool) (visit, error) {
	d.mu.RLock()
	v := visit{d, -1}
	if changes {
		v.turn = d.changes.begin() // before the size is read: see changes
		for p := d.changes.paused.Load(); p != nil; p = d.changes.paused.Load() {
			v.leave()
			<-p.over
			d.mu.RLock()
			v.turn = d.changes.begin()
		}
	}
	var err error
	switch {
	case d.closed:
		err = ErrClosed
	case changes && d.info.ReadOnly:
		err = ErrReadOnly
	default:
		err = checkRange(d.size.Load(), off, n)
	}
	if err != nil {
		v.leave()
	}
	return v, err
}

// A visit is a call of a disk in progress.
type visit struct {
	d    *disk
	turn int // of d.changes; -1: it changes nothing
}

// leave ends the call.
func (v visit) leave() {
	if v.turn >= 0 {
		v.d.changes.end(v.turn)
	}
	v.d.mu.RUnlock()
}

// changes count the calls in progress that change a medium, so that a shrink can wait for those that
// began before it, without stopping those that begin later. They count in turns, as SRCU of the kernel
// does: calls begin in one of two turns, and the shrink waits for the other one. The zero value is ready.
type changes struct {
	turn    atomic.Uint32
	calls   [2]atomic.Int64
	waiting atomic.Bool
	paused  atomic.Pointer[pause] // nil: changes may begin

	mu    sync.Mutex
	ended sync.Cond // a turn has no calls, or a pause is late; its L is mu
}

// begin counts a call, which must read the size of the medium afterwards, and returns its turn.
func (c *changes) begin() int {
	turn := int(c.turn.Load() & 1)
	c.calls[turn].Add(1)
	return turn
}

// end forgets a call of that turn.
func (c *changes) end(turn int) {
	if c.calls[turn].Add(-1) == 0 && c.waiting.Load() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.ended.Broadcast()
	}
}

// wait returns when all calls that began before it have ended. Only one goroutine may wait.
func (c *changes) wait() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended.L = &c.mu
	c.waiting.Store(true)
	defer c.waiting.Store(false)
	turn := c.turn.Load() & 1
	c.empty(1 - turn) // of calls that had read the turn when the last wait ended it, and then counted themselves
	c.turn.Store(1 - turn)
	c.empty(turn)
}

// empty waits until a turn has no calls.
//
// Preconditions: c.mu is held.
func (c *changes) empty(turn uint32) {
	held(&c.mu)
	for c.calls[turn].Load() != 0 {
		c.ended.Wait()
	}
}

// ReadAt implements Store.
func (d *disk) ReadAt(p []byte, off int64) error {
	v, err := d.enter(off, int64(len(p)), false)
	if err != nil {
		return err
	}
	defer v.leave()
	return d.readAll(p, off)
}

// readAll fills p from off. The caller has entered d.
func (d *disk) readAll(p []byte, off int64) error {
	for len(p) > 0 {
		n, err := d.fd.pread(p, off)
		if err == nil && n == 0 {
			err = d.ended(off, int64(len(p)))
		}
		if err != nil {
			return d.readError(off, err)
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// ended returns why the medium has nothing of the n bytes at off.
func (d *disk) ended(off, n int64) error {
	if err := checkRange(d.size.Load(), off, n); err != nil {
		return err // a Resize has cut it off meanwhile
	}
	return fmt.Errorf("the medium is smaller than when it was opened: %w", io.ErrUnexpectedEOF)
}

// readError wraps the error of a read at off.
func (d *disk) readError(off int64, err error) error {
	if errors.Is(err, ErrRange) {
		return err
	}
	return fmt.Errorf("read %s at %d: %w", d.path, off, err)
}

// WriteAt implements Store.
func (d *disk) WriteAt(p []byte, off int64) error {
	if d.through {
		return d.WriteDurable(p, off)
	}
	v, err := d.enter(off, int64(len(p)), true)
	if err != nil {
		return err
	}
	defer v.leave()
	return d.writeError(off, writeAll(d.fd, p, off, 0))
}

// WriteDurable implements Store. It syncs only p if the kernel can.
func (d *disk) WriteDurable(p []byte, off int64) error {
	v, err := d.enter(off, int64(len(p)), true)
	if err != nil {
		return err
	}
	defer v.leave()
	if d.failed.Load() {
		return ErrUnsynced
	}
	if !d.noDsync.Load() {
		if f := d.spares.take(); f != nil {
			defer d.spares.give(f)
			err := writeAll(f, p, off, unix.RWF_DSYNC)
			switch {
			case err == nil:
				return nil
			case err == unix.EOPNOTSUPP || err == unix.ENOSYS:
				d.noDsync.Store(true)
			case isNoSpace(err) || err == unix.EROFS:
				// Either the medium has no space for p, or is read-only, or write-back met that with
				// earlier data, which is then lost. Only the former happens again without a sync.
				if again := writeAll(f, p, off, 0); isNoSpace(again) || again == unix.EROFS {
					return d.writeError(off, again)
				}
				return d.fail(err)
			default:
				return d.fail(err)
			}
		}
	}
	if err := writeAll(d.fd, p, off, 0); err != nil {
		return d.writeError(off, err)
	}
	return d.sync()
}

// Sync implements Store.
func (d *disk) Sync() error {
	v, err := d.enter(0, 0, false)
	if err != nil {
		return err
	}
	defer v.leave()
	return d.sync()
}

// fail records that a sync failed with err. It does not return ErrNoSpace even for a lack of
// space: that hit data of writes that had succeeded.
func (d *disk) fail(err error) error {
	d.failed.Store(true)
	return fmt.Errorf("sync %s: %w", d.path, err)
}

// eraseModes are the modes of fallocate that make a range read as zeros, in the order in which
// Discard tries them; Zero begins with eraseZero. The kernel promises the zeros for regular
// files (fallocate(2)) and for block devices (blkdev_fallocate: PUNCH_HOLE writes zeros and
// may unmap, and fails if the device cannot). BLKDISCARD promises nothing about later reads.
var eraseModes = [...]uint32{
	erasePunch: unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE,
	eraseZero:  unix.FALLOC_FL_ZERO_RANGE | unix.FALLOC_FL_KEEP_SIZE,
}

const (
	erasePunch = iota
	eraseZero
)

// Discard implements Store.
func (d *disk) Discard(off, n int64) error { return d.erase(off, n, erasePunch) }

// Zero implements Store.
func (d *disk) Zero(off, n int64) error { return d.erase(off, n, eraseZero) }

// erase makes a range read as zeros with the first of eraseModes[mode:] that the medium
// supports, otherwise with writes of zeros.
func (d *disk) erase(off, n int64, mode int) error {
	v, err := d.enter(off, n, true)
	if err != nil {
		return err
	}
	defer v.leave()
	end := off + n
	first, last := (off+d.align-1)/d.align*d.align, end/d.align*d.align
	if first >= last {
		first, last = end, end // the range has no aligned part
	}
	if err := d.writeZeros(off, first); err != nil {
		return err
	}
	if err := d.eraseAligned(first, last, mode); err != nil {
		return err
	}
	if err := d.writeZeros(last, end); err != nil {
		return err
	}
	if d.through {
		return d.sync()
	}
	return nil
}

func (d *disk) eraseAligned(off, end int64, mode int) error {
	if off == end {
		return nil // fallocate refuses an empty range
	}
	for ; mode < len(eraseModes); mode++ {
		if d.refused[mode].Load() {
			continue
		}
		switch err := d.fd.fallocate(eraseModes[mode], off, end-off); err {
		case nil:
			return nil
		case unix.EOPNOTSUPP, unix.ENOSYS, unix.ENODEV:
			d.refused[mode].Store(true)
		case unix.EINVAL, unix.EBUSY:
			// Not for this range, or not now (before Linux 5.16, a block device whose
			// pages are being written).
		default:
			return d.writeError(off, err)
		}
	}
	return d.writeZeros(off, end)
}

// zeros is never written to, so it costs no memory.
var zeros [256 << 10]byte

// writeZeros writes zeros to [off, end).
func (d *disk) writeZeros(off, end int64) error {
	for off < end {
		n := min(end-off, int64(len(zeros)))
		if err := writeAll(d.fd, zeros[:n], off, 0); err != nil {
			return d.writeError(off, err)
		}
		off += n
	}
	return nil
}

// Extent implements Mapper with SEEK_DATA and SEEK_HOLE. All bytes of a block device, and of a
// file system that does not report holes, take space.
func (d *disk) Extent(off int64) (mapped bool, n int64, err error) {
	v, err := d.enter(off, 1, false)
	if err != nil {
		return false, 0, err
	}
	defer v.leave()
	left := d.size.Load() - off
	// Nothing else uses the offset of the description.
	data, err := d.fd.seek(off, unix.SEEK_DATA)
	switch {
	case err == unix.EINVAL, err == unix.EOPNOTSUPP:
		return true, left, nil
	case err == unix.ENXIO: // no data from off on
		end, err := d.fd.seek(0, io.SeekEnd)
		switch {
		case err != nil:
			return false, 0, fmt.Errorf("find the end of %s: %w", d.path, err)
		case end <= off: // another process has truncated the file; ReadAt reports that
			return true, left, nil
		}
		return d.hole(off, min(end-off, left))
	case err != nil:
		return false, 0, fmt.Errorf("find data in %s at %d: %w", d.path, off, err)
	case data > off:
		return d.hole(off, min(data-off, left))
	}
	hole, err := d.fd.seek(off, unix.SEEK_HOLE)
	switch {
	case err == unix.ENXIO: // truncated meanwhile
		return true, left, nil
	case err != nil:
		return false, 0, fmt.Errorf("find a hole in %s at %d: %w", d.path, off, err)
	}
	return true, min(max(hole-off, 1), left), nil
}

// Usage implements Gauge for regular files.
func (d *disk) Usage() (used, free int64, err error) {
	v, err := d.enter(0, 0, false)
	if err != nil {
		return 0, 0, err
	}
	defer v.leave()
	if !d.regular {
		return 0, 0, errors.ErrUnsupported
	}
	if used, free, err = d.fd.usage(); err != nil {
		return 0, 0, fmt.Errorf("space of %s: %w", d.path, err)
	}
	return used, free, nil
}

// hole implements Extent for the bytes [off, off+n), which have no data. They may have
// allocated blocks: those that Zero has left, which may have old data on the medium. FIEMAP
// reports them. Extent does not use FIEMAP for data, which some file systems report late.
//
// Preconditions: d.mu is held, at least for reading.
func (d *disk) hole(off, n int64) (mapped bool, _ int64, err error) {
	held(&d.mu)
	if d.noMap.Load() {
		return false, n, nil
	}
	at, length, err := d.fd.extent(off, n)
	switch {
	case err == unix.EOPNOTSUPP, err == unix.ENOTTY, err == unix.ENOSYS, err == unix.EPERM:
		d.noMap.Store(true)
		return false, n, nil
	case err != nil:
		return false, 0, fmt.Errorf("find allocated blocks in %s at %d: %w", d.path, off, err)
	case length == 0 || at >= off+n:
		return false, n, nil
	case at > off:
		return false, at - off, nil
	}
	return true, max(min(at+length-off, n), 1), nil
}

// CopyFrom implements Copier with copy_file_range(2), which shares the blocks of both ranges
// if the file system can (reflink), and otherwise copies within the kernel.
func (d *disk) CopyFrom(off int64, from Store, srcOff, n int64) (done int64, err error) {
	src, ok := from.(*disk)
	if !ok {
		return 0, nil
	}
	if src.number < d.number { // always lock in this order, or two copies and two Closes could deadlock
		v, err := src.enter(srcOff, n, false)
		if err != nil {
			return 0, err
		}
		defer v.leave()
	}
	v, err := d.enter(off, n, true)
	if err != nil {
		return 0, err
	}
	defer v.leave()
	if src == d {
		if err := checkRange(d.size.Load(), srcOff, n); err != nil {
			return 0, err
		}
	} else if src.number > d.number {
		v, err := src.enter(srcOff, n, false)
		if err != nil {
			return 0, err
		}
		defer v.leave()
	}
	for done < n {
		k, err := copyRange(d.fd, off+done, src.fd, srcOff+done, n-done)
		if err != nil {
			return done, fmt.Errorf("copy from %s at %d: %w", src.path, srcOff+done, d.writeError(off+done, err))
		}
		if k == 0 { // also at the end of a truncated file; ReadAt reports that
			break
		}
		done += k
	}
	if done > 0 && d.through {
		return done, d.sync()
	}
	return done, nil
}

// copyRange calls copy_file_range(2), and returns 0 if that cannot copy: for block devices, two
// file systems, with an old kernel or in a sandbox.
func copyRange(to osFile, off int64, from osFile, srcOff, n int64) (int64, error) {
	k, err := to.copyFrom(off, from, srcOff, n)
	switch err {
	case unix.EINVAL, unix.EXDEV, unix.EOPNOTSUPP, unix.ENOSYS, unix.EPERM:
		return 0, nil
	}
	return k, err
}

// Prefetch implements Prefetcher with fadvise(2).
func (d *disk) Prefetch(off, n int64) error {
	v, err := d.enter(off, n, false)
	if err != nil {
		return err
	}
	defer v.leave()
	if n == 0 {
		return nil // for fadvise, 0 means the rest of the file
	}
	if err := d.fd.willNeed(off, n); err != nil && err != unix.EINVAL && err != unix.ENOSYS {
		return fmt.Errorf("prefetch %s at %d: %w", d.path, off, err)
	}
	return nil
}

// Close implements Store.
func (d *disk) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return ErrClosed
	}
	d.closed = true
	err := d.sync()
	d.spares.close() // no call is left to use one
	closed := d.fd.close()
	if closed != nil {
		d.failed.Store(true)
	}
	return errors.Join(err, closed)
}

// writeError wraps the error of a write at off; nil stays nil.
func (d *disk) writeError(off int64, err error) error {
	switch {
	case err == nil:
		return nil
	case isNoSpace(err):
		return fmt.Errorf("write %s at %d: %w: %w", d.path, off, ErrNoSpace, err)
	}
	return fmt.Errorf("write %s at %d: %w", d.path, off, err)
}

func isNoSpace(err error) bool { return err == unix.ENOSPC || err == unix.EDQUOT }

// writeAll writes all of p.
func writeAll(f osFile, p []byte, off int64, flags int) error {
	for len(p) > 0 {
		n, err := f.pwrite(p, off, flags)
		if err != nil {
			return err
		}
		if n == 0 {
			return unix.EIO // or the loop would not end
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// A sysFile is a file descriptor. It implements osFile with system calls.
type sysFile int

func (f sysFile) pread(p []byte, off int64) (int, error) {
	return retryValue(func() (int, error) { return unix.Pread(int(f), p, off) })
}

func (f sysFile) pwrite(p []byte, off int64, flags int) (int, error) {
	return retryValue(func() (int, error) {
		if flags == 0 {
			return unix.Pwrite(int(f), p, off)
		}
		return unix.Pwritev2(int(f), [][]byte{p}, off, flags)
	})
}

func (f sysFile) fallocate(mode uint32, off, n int64) error {
	return retry(func() error { return unix.Fallocate(int(f), mode, off, n) })
}

func (f sysFile) seek(off int64, whence int) (int64, error) {
	return retryValue(func() (int64, error) { return unix.Seek(int(f), off, whence) })
}

func (f sysFile) stat() (st unix.Stat_t, err error) {
	err = retry(func() error { return unix.Fstat(int(f), &st) })
	return st, err
}

// extent calls FIEMAP (Documentation/filesystems/fiemap.rst).
func (f sysFile) extent(off, n int64) (at, length int64, err error) {
	var m struct {
		start, length             uint64
		flags, mapped, count, pad uint32
		extent                    struct {
			logical, physical, length uint64
			reserved                  [2]uint64
			flags                     uint32
			reserved2                 [3]uint32
		}
	}
	const fsIocFiemap = 0xc020660b
	m.start, m.length, m.count = uint64(off), uint64(n), 1
	if err := retry(func() error { return ioctl(int(f), fsIocFiemap, unsafe.Pointer(&m)) }); err != nil || m.mapped == 0 {
		return 0, 0, err
	}
	return int64(m.extent.logical), int64(m.extent.length), nil
}

func (f sysFile) usage() (used, free int64, err error) {
	var st unix.Stat_t
	var fs unix.Statfs_t
	if err := retry(func() error { return unix.Fstat(int(f), &st) }); err != nil {
		return 0, 0, err
	}
	if err := retry(func() error { return unix.Fstatfs(int(f), &fs) }); err != nil {
		return 0, 0, err
	}
	return st.Blocks * 512, int64(fs.Bavail) * fs.Frsize, nil
}

func (f sysFile) willNeed(off, n int64) error {
	return retry(func() error { return unix.Fadvise(int(f), off, n, unix.FADV_WILLNEED) })
}

func (f sysFile) copyFrom(off int64, src osFile, srcOff, n int64) (int64, error) {
	in, ok := src.(sysFile)
	if !ok {
		return 0, unix.EXDEV
	}
	k, err := retryValue(func() (int, error) {
		return unix.CopyFileRange(int(in), &srcOff, int(f), &off, int(min(n, 1<<30)), 0)
	})
	return int64(k), err
}

func (f sysFile) fdatasync() error {
	return retry(func() error { return unix.Fdatasync(int(f)) })
}

func (f sysFile) truncate(size int64) error {
	return retry(func() error { return unix.Ftruncate(int(f), size) })
}

// close closes the descriptor. It does not retry: Linux releases it even with EINTR.
func (f sysFile) close() error {
	if err := unix.Close(int(f)); err != unix.EINTR {
		return err
	}
	return nil
}

// retry calls f until no signal interrupts it.
func retry(f func() error) error {
	for {
		if err := f(); err != unix.EINTR {
			return err
		}
	}
}

// retryValue calls f until no signal interrupts it.
func retryValue[T any](f func() (T, error)) (T, error) {
	for {
		if v, err := f(); err != unix.EINTR {
			return v, err
		}
	}
}

// blockSizeOf returns a block size that the kernel reported if it suits Info: a power of two,
// at least blockSize and at most limit. Otherwise it returns blockSize.
func blockSizeOf(reported int64, blockSize, limit uint32) uint32 {
	if reported <= int64(blockSize) || reported > int64(limit) || bits.OnesCount64(uint64(reported)) != 1 {
		return blockSize
	}
	return uint32(reported)
}
