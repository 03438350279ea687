package crash

import (
	"context"
	"maps"
	"math/rand/v2"
	"sync"
	"syscall"

	fusefs "github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// pageLen is the number of bytes that a medium writes entirely or not at all: its blocks have 4096 bytes.
const pageLen = 4096

// A page is what a block of a medium has. Nobody changes it.
type page *[pageLen]byte

// pages are the blocks of a medium by their offsets. Those that are absent are zeros.
type pages map[int64]page

// A note is a write of one block, or a flush, which has no page.
type note struct {
	at   int64
	page page
}

// A medium is a disk with a volatile cache, in the memory of the test, that notes each write and flush. The kernel sees
// it as a file of FUSE, and that as a loop device.
type medium struct {
	fusefs.Inode
	size int64

	mu   sync.Mutex
	now  pages // what is read
	base pages // what it had when the notes began
	log  []note
}

func newMedium(size int64) *medium { return &medium{size: size, now: pages{}, base: pages{}} }

// begin forgets the notes.
func (m *medium) begin() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.base, m.log = maps.Clone(m.now), nil
}

// position returns the number of notes. What was acknowledged by then has its flushes among them.
func (m *medium) position() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.log)
}

// cut returns what the medium has after a loss of power behind that many notes: all that was flushed, and of the rest
// a random part. With lies, nothing was flushed.
func (m *medium) cut(at int, rng *rand.Rand, lies bool) pages {
	flushed := at
	for flushed > 0 && (lies || m.log[flushed-1].page != nil) {
		flushed--
	}
	p := maps.Clone(m.base)
	keep := []float64{0, 1, rng.Float64()}[rng.IntN(3)]
	if lies {
		keep = rng.Float64()
	}
	for i, n := range m.log[:at] {
		if n.page != nil && (i < flushed || rng.Float64() < keep) {
			p[n.at] = n.page
		}
	}
	return p
}

// OnAdd implements fusefs.NodeOnAdder of the directory that has the medium.
func (d *mediumDir) OnAdd(ctx context.Context) {
	d.AddChild(mediumName, d.NewPersistentInode(ctx, d.m, fusefs.StableAttr{Mode: syscall.S_IFREG}), false)
}

const mediumName = "disk"

// A mediumDir is a directory with a medium in it.
type mediumDir struct {
	fusefs.Inode
	m *medium
}

// Getattr implements fusefs.NodeGetattrer.
func (m *medium) Getattr(_ context.Context, _ fusefs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	out.Mode, out.Size, out.Nlink, out.Blksize = syscall.S_IFREG|0o600, uint64(m.size), 1, pageLen
	return 0
}

// Open implements fusefs.NodeOpener. The kernel caches nothing, so a write is noted when the loop device makes it.
func (m *medium) Open(context.Context, uint32) (fusefs.FileHandle, uint32, syscall.Errno) {
	return nil, fuse.FOPEN_DIRECT_IO, 0
}

// Read implements fusefs.NodeReader.
func (m *medium) Read(_ context.Context, _ fusefs.FileHandle, p []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	p = p[:max(0, min(int64(len(p)), m.size-off))]
	m.mu.Lock()
	defer m.mu.Unlock()
	for n := 0; n < len(p); {
		at, in := (off+int64(n))/pageLen*pageLen, (off+int64(n))%pageLen
		if from := m.now[at]; from != nil {
			n += copy(p[n:], from[in:])
		} else {
			k := min(len(p)-n, int(pageLen-in))
			clear(p[n:][:k])
			n += k
		}
	}
	return fuse.ReadResultData(p), 0
}

// Write implements fusefs.NodeWriter.
func (m *medium) Write(_ context.Context, _ fusefs.FileHandle, p []byte, off int64) (uint32, syscall.Errno) {
	if off%pageLen != 0 || len(p)%pageLen != 0 || off+int64(len(p)) > m.size {
		return 0, syscall.EINVAL
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for n := 0; n < len(p); n += pageLen {
		next := [pageLen]byte(p[n:])
		at := off + int64(n)
		to := page(&next)
		if next == *zeroPage {
			to = zeroPage
		}
		m.now[at] = to
		m.log = append(m.log, note{at, to})
	}
	return uint32(len(p)), 0
}

var zeroPage = page(new([pageLen]byte))

// Fsync implements fusefs.NodeFsyncer.
func (m *medium) Fsync(context.Context, fusefs.FileHandle, uint32) syscall.Errno {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.log = append(m.log, note{})
	return 0
}
