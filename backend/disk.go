package backend

import (
	"errors"
	"fmt"
	"io"
	"math/bits"
	"strconv"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A disk is a Store over a file descriptor: what regular files and block
// devices have in common, which is nearly everything. I/O goes through the
// page cache, so that accesses need no alignment.
//
// The kernel reports a failed write-back once and then forgets it: the pages
// are marked clean although the medium does not hold them, and the next fsync
// answers that all is well. Hence failed: after one failure nobody is told
// again that data is safe.
//
// "Once" means once per open file description (errseq_t in the kernel's
// Documentation/core-api/errseq.rst). If two syncs shared a description, one
// could eat the error that the other one is owed. Hence flushers: every sync
// has a description to itself while it runs.
type disk struct {
	info    Info // Size is guarded by mu
	path    string
	through bool  // WriteAt, Discard and Zero return when all is stable
	regular bool  // it is a file, and can have another size
	align   int64 // fallocate wants offset and length as multiples of this

	fd       osFile
	flushers chan osFile // descriptions that no sync is using; fd is one of them
	failed   atomic.Bool // a sync has failed

	refused [len(eraseModes)]atomic.Bool // the medium does not know the mode
	noDsync atomic.Bool                  // the kernel does not know RWF_DSYNC
	noMap   atomic.Bool                  // the file system does not know FIEMAP
	number  uint64                       // in the order of opening

	mu     sync.RWMutex // held for reading by calls, for writing by Close, Grow and Resize
	closed bool         // guarded by mu
}

// maxFlushers bounds the descriptors that a disk opens, and with them the
// syncs that run at the same time.
const maxFlushers = 8

// osFile is what a disk wants from the kernel; tests put a failing one in its
// place. Errors are errno values; transfers may be short.
type osFile interface {
	pread(p []byte, off int64) (int, error)
	pwrite(p []byte, off int64, flags int) (int, error) // flags of pwritev2(2)
	fallocate(mode uint32, off, n int64) error
	fdatasync() error
	seek(off int64, whence int) (int64, error)
	// extent is the first extent in [off, off+n) that blocks are allocated for,
	// with data or not; n is 0 if there is none.
	extent(off, n int64) (at, length int64, err error)
	usage() (used, free int64, err error) // octets of the file, and of its file system
	willNeed(off, n int64) error
	copyFrom(off int64, src osFile, srcOff, n int64) (int64, error) // may be short
	truncate(size int64) error
	close() error
}

// disks counts the disks that were opened.
var disks atomic.Uint64

// newDisk makes a disk of the open descriptor fd and owns it from then on.
func newDisk(path string, fd int, info Info, align int64, through bool) *disk {
	info.VolatileCache = !through
	d := &disk{
		info:     info,
		path:     path,
		through:  through,
		align:    align,
		fd:       sysFile(fd),
		flushers: make(chan osFile, maxFlushers),
		number:   disks.Add(1),
	}
	d.flushers <- d.fd
	for !info.ReadOnly && len(d.flushers) < maxFlushers {
		// Unlike dup, this opens the file anew. Where /proc is missing, syncs
		// share what descriptions there are and wait for one another.
		extra, err := unix.Open("/proc/self/fd/"+strconv.Itoa(fd), unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			break
		}
		d.flushers <- sysFile(extra)
	}
	return d
}

// Info implements Store.
func (d *disk) Info() Info {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.info
}

// Grow implements Grower: the file was extended, or the device was (lvextend(8)).
// What is behind the last whole block does not count.
func (d *disk) Grow() (int64, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return 0, ErrClosed
	}
	end, err := d.fd.seek(0, io.SeekEnd)
	if err != nil {
		return 0, fmt.Errorf("look for the end of %s: %w", d.path, err)
	}
	d.info.Size = max(d.info.Size, end&^int64(d.info.BlockSize-1))
	return d.info.Size, nil
}

// Resize implements Resizer for regular files. It waits for the calls that are under
// way.
func (d *disk) Resize(size int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.closed:
		return ErrClosed
	case d.info.ReadOnly:
		return ErrReadOnly
	case !d.regular:
		return ErrFixedSize
	case size <= 0 || size%int64(d.info.BlockSize) != 0:
		return fmt.Errorf("size %d: want a positive multiple of the block size %d", size, d.info.BlockSize)
	}
	if err := d.fd.truncate(size); err != nil {
		return fmt.Errorf("give %s %d octets: %w", d.path, size, err)
	}
	d.info.Size = size
	if err := d.fd.fdatasync(); err != nil {
		d.failed.Store(true)
		return fmt.Errorf("%s has %d octets now, but %w: %w", d.path, size, ErrUnsynced, err)
	}
	return nil
}

// Allocate implements Allocator for regular files, of which no part is behind the end: a
// Resize waits.
func (d *disk) Allocate(off, n int64) error {
	if !d.regular {
		return ErrNoAllocate
	}
	if err := d.enter(off, n, true); err != nil {
		return err
	}
	defer d.mu.RUnlock()
	if n == 0 {
		return nil // which fallocate refuses
	}
	switch err := d.fd.fallocate(0, off, n); err {
	case unix.EOPNOTSUPP, unix.ENOSYS:
		return fmt.Errorf("%s: %w", d.path, ErrNoAllocate)
	default:
		return d.writeError(off, err)
	}
}

// enter begins a call on [off, off+n). The caller has to call d.mu.RUnlock
// unless enter fails.
func (d *disk) enter(off, n int64, changes bool) error {
	d.mu.RLock()
	var err error
	switch {
	case d.closed:
		err = ErrClosed
	case changes && d.info.ReadOnly:
		err = ErrReadOnly
	default:
		err = d.info.CheckRange(off, n)
	}
	if err != nil {
		d.mu.RUnlock()
	}
	return err
}

// ReadAt implements Store.
func (d *disk) ReadAt(p []byte, off int64) error {
	if err := d.enter(off, int64(len(p)), false); err != nil {
		return err
	}
	defer d.mu.RUnlock()
	for len(p) > 0 {
		n, err := d.fd.pread(p, off)
		if err == nil && n == 0 {
			err = fmt.Errorf("the medium is smaller than when it was opened: %w", io.ErrUnexpectedEOF)
		}
		if err != nil {
			return fmt.Errorf("read %s at %d: %w", d.path, off, err)
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// WriteAt implements Store.
func (d *disk) WriteAt(p []byte, off int64) error {
	if d.through {
		return d.WriteDurable(p, off)
	}
	if err := d.enter(off, int64(len(p)), true); err != nil {
		return err
	}
	defer d.mu.RUnlock()
	return d.writeError(off, writeAll(d.fd, p, off, 0))
}

// WriteDurable implements Store. It syncs no more than p where the kernel can.
func (d *disk) WriteDurable(p []byte, off int64) error {
	if err := d.enter(off, int64(len(p)), true); err != nil {
		return err
	}
	defer d.mu.RUnlock()
	f := <-d.flushers
	defer func() { d.flushers <- f }()
	if d.failed.Load() {
		return ErrUnsynced
	}
	if !d.noDsync.Load() {
		err := writeAll(f, p, off, unix.RWF_DSYNC)
		switch {
		case err == nil:
			return nil
		case err == unix.EOPNOTSUPP || err == unix.ENOSYS:
			d.noDsync.Store(true)
		case isNoSpace(err):
			// Either there was no room for p, which is no reason to distrust
			// the medium, or write-back found none for what it had taken
			// earlier, which is. The former happens again without a sync.
			if again := writeAll(f, p, off, 0); isNoSpace(again) {
				return d.writeError(off, again)
			}
			return d.fail(err)
		default:
			return d.fail(err)
		}
	}
	if err := writeAll(f, p, off, 0); err != nil {
		return d.writeError(off, err)
	}
	return d.flush(f)
}

// Sync implements Store.
func (d *disk) Sync() error {
	if err := d.enter(0, 0, false); err != nil {
		return err
	}
	defer d.mu.RUnlock()
	return d.sync()
}

// sync is Sync for those that have entered.
func (d *disk) sync() error {
	if d.info.ReadOnly {
		return nil
	}
	f := <-d.flushers
	defer func() { d.flushers <- f }()
	return d.flush(f)
}

// flush syncs through f, which the caller has taken from d.flushers.
func (d *disk) flush(f osFile) error {
	if d.failed.Load() {
		return ErrUnsynced
	}
	if err := f.fdatasync(); err != nil {
		return d.fail(err)
	}
	return nil
}

// fail records that a sync failed with err. Not even a lack of space is
// reported as one here: what it hit was acknowledged before.
func (d *disk) fail(err error) error {
	d.failed.Store(true)
	return fmt.Errorf("sync %s: %w", d.path, err)
}

// eraseModes are the modes of fallocate that make a range read as zeros, in
// the order in which Discard tries them; Zero starts at eraseZero. The kernel
// promises the zeros for regular files (fallocate(2)) and for block devices
// (blkdev_fallocate: PUNCH_HOLE is a write of zeros that may unmap, and fails
// where the device cannot). BLKDISCARD promises nothing about later reads.
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

// erase makes a range read as zeros by the first of eraseModes[mode:] that
// the medium knows, and by writing zeros otherwise.
func (d *disk) erase(off, n int64, mode int) error {
	if err := d.enter(off, n, true); err != nil {
		return err
	}
	defer d.mu.RUnlock()
	end := off + n
	first, last := (off+d.align-1)/d.align*d.align, end/d.align*d.align
	if first >= last {
		first, last = end, end // all of it is ragged
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
		return nil // which fallocate refuses
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
			// Not this range, or not now (a block device whose pages others
			// are writing, before Linux 5.16).
		default:
			return d.writeError(off, err)
		}
	}
	return d.writeZeros(off, end)
}

// zeros is never written to. It costs no memory: only reads touch it.
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

// Extent implements Mapper with what the file system tells. Of a block device,
// and where holes are unknown, all takes space.
func (d *disk) Extent(off int64) (mapped bool, n int64, err error) {
	if err := d.enter(off, 1, false); err != nil {
		return false, 0, err
	}
	defer d.mu.RUnlock()
	left := d.info.Size - off
	// Nothing else uses the offset of the description.
	data, err := d.fd.seek(off, unix.SEEK_DATA)
	switch {
	case err == unix.EINVAL, err == unix.EOPNOTSUPP:
		return true, left, nil
	case err == unix.ENXIO: // no data from off on
		end, err := d.fd.seek(0, io.SeekEnd)
		switch {
		case err != nil:
			return false, 0, fmt.Errorf("look for the end of %s: %w", d.path, err)
		case end <= off: // somebody else has made the file shorter, which ReadAt will meet
			return true, left, nil
		}
		return d.hole(off, min(end-off, left))
	case err != nil:
		return false, 0, fmt.Errorf("look for data in %s at %d: %w", d.path, off, err)
	case data > off:
		return d.hole(off, min(data-off, left))
	}
	hole, err := d.fd.seek(off, unix.SEEK_HOLE)
	switch {
	case err == unix.ENXIO: // meanwhile
		return true, left, nil
	case err != nil:
		return false, 0, fmt.Errorf("look for a hole in %s at %d: %w", d.path, off, err)
	}
	return true, min(max(hole-off, 1), left), nil
}

// Usage implements Gauge for files with what their file system tells.
func (d *disk) Usage() (used, free int64, err error) {
	if err := d.enter(0, 0, false); err != nil {
		return 0, 0, err
	}
	defer d.mu.RUnlock()
	if !d.regular {
		return 0, 0, errors.ErrUnsupported
	}
	if used, free, err = d.fd.usage(); err != nil {
		return 0, 0, fmt.Errorf("look for the space of %s: %w", d.path, err)
	}
	return used, free, nil
}

// hole is Extent for octets [off, off+n), which have no data. Blocks may be
// allocated for them all the same: what Zero has left, which can hold on the
// medium what was there before. FIEMAP tells of them; it is not asked about data,
// because some file systems tell it of data late.
func (d *disk) hole(off, n int64) (mapped bool, _ int64, err error) {
	if d.noMap.Load() {
		return false, n, nil
	}
	at, length, err := d.fd.extent(off, n)
	switch {
	case err == unix.EOPNOTSUPP, err == unix.ENOTTY, err == unix.ENOSYS, err == unix.EPERM:
		d.noMap.Store(true)
		return false, n, nil
	case err != nil:
		return false, 0, fmt.Errorf("look for allocated blocks in %s at %d: %w", d.path, off, err)
	case length == 0 || at >= off+n:
		return false, n, nil
	case at > off:
		return false, at - off, nil
	}
	return true, max(min(at+length-off, n), 1), nil
}

// CopyFrom implements Copier with copy_file_range(2), which shares the blocks of
// both ranges where the file system can (reflink), and otherwise copies within
// the kernel.
func (d *disk) CopyFrom(off int64, from Store, srcOff, n int64) (done int64, err error) {
	src, ok := from.(*disk)
	if !ok {
		return 0, nil
	}
	switch {
	case src == d:
		if err := d.enter(off, n, true); err != nil {
			return 0, err
		}
		defer d.mu.RUnlock()
		if err := d.info.CheckRange(srcOff, n); err != nil {
			return 0, err
		}
	case src.number < d.number: // always in this order, or two copies and two Closes could wait for one another
		if err := src.enter(srcOff, n, false); err != nil {
			return 0, err
		}
		defer src.mu.RUnlock()
		if err := d.enter(off, n, true); err != nil {
			return 0, err
		}
		defer d.mu.RUnlock()
	default:
		if err := d.enter(off, n, true); err != nil {
			return 0, err
		}
		defer d.mu.RUnlock()
		if err := src.enter(srcOff, n, false); err != nil {
			return 0, err
		}
		defer src.mu.RUnlock()
	}
	for done < n {
		k, err := d.fd.copyFrom(off+done, src.fd, srcOff+done, n-done)
		switch err {
		case nil:
		case unix.EINVAL, unix.EXDEV, unix.EOPNOTSUPP, unix.ENOSYS, unix.EPERM:
			k = 0 // not of these: block devices, two file systems, an old kernel, a sandbox
		default:
			return done, fmt.Errorf("copy from %s at %d: %w", src.path, srcOff+done, d.writeError(off+done, err))
		}
		if k == 0 { // at the end of the file, too, which ReadAt will meet
			break
		}
		done += k
	}
	if done > 0 && d.through {
		return done, d.sync()
	}
	return done, nil
}

// Prefetch implements Prefetcher: the kernel reads ahead, as much as it likes.
func (d *disk) Prefetch(off, n int64) error {
	if err := d.enter(off, n, false); err != nil {
		return err
	}
	defer d.mu.RUnlock()
	if n == 0 {
		return nil // to fadvise, this is the rest of the file
	}
	if err := d.fd.willNeed(off, n); err != nil && err != unix.EINVAL && err != unix.ENOSYS {
		return fmt.Errorf("read %s ahead at %d: %w", d.path, off, err)
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
	for len(d.flushers) > 0 { // nobody else is left to take or return one
		err = errors.Join(err, (<-d.flushers).close())
	}
	return err
}

// writeError describes err, which a write at off met; nil stays nil.
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

// writeAll writes p, in as many steps as the kernel likes.
func writeAll(f osFile, p []byte, off int64, flags int) error {
	for len(p) > 0 {
		n, err := f.pwrite(p, off, flags)
		if err != nil {
			return err
		}
		if n == 0 {
			return unix.EIO // or this would never end
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// sysFile is the real osFile: a descriptor.
type sysFile int

func (f sysFile) pread(p []byte, off int64) (n int, err error) {
	for {
		if n, err = unix.Pread(int(f), p, off); err != unix.EINTR {
			return n, err
		}
	}
}

func (f sysFile) pwrite(p []byte, off int64, flags int) (n int, err error) {
	for {
		if flags == 0 {
			n, err = unix.Pwrite(int(f), p, off)
		} else {
			n, err = unix.Pwritev2(int(f), [][]byte{p}, off, flags)
		}
		if err != unix.EINTR {
			return n, err
		}
	}
}

func (f sysFile) fallocate(mode uint32, off, n int64) error {
	return retry(func() error { return unix.Fallocate(int(f), mode, off, n) })
}

func (f sysFile) seek(off int64, whence int) (at int64, err error) {
	err = retry(func() (err error) {
		at, err = unix.Seek(int(f), off, whence)
		return err
	})
	return at, err
}

// extent asks FIEMAP (Documentation/filesystems/fiemap.rst).
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
	for {
		k, err := unix.CopyFileRange(int(in), &srcOff, int(f), &off, int(min(n, 1<<30)), 0)
		if err != unix.EINTR {
			return int64(k), err
		}
	}
}

func (f sysFile) fdatasync() error {
	return retry(func() error { return unix.Fdatasync(int(f)) })
}

func (f sysFile) truncate(size int64) error {
	return retry(func() error { return unix.Ftruncate(int(f), size) })
}

// close is not retried: Linux has released the descriptor even after EINTR.
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

// blockSizeOf turns a block size that the kernel reported into one that fits
// Info: a power of two, at least blockSize and at most limit.
func blockSizeOf(reported int64, blockSize, limit uint32) uint32 {
	if reported <= int64(blockSize) || reported > int64(limit) || bits.OnesCount64(uint64(reported)) != 1 {
		return blockSize
	}
	return uint32(reported)
}
