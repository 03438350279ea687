package iscsi

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// A READ or WRITE of a few blocks that are in memory ends sooner than another goroutine is awake. So the goroutine that
// runs such a command wakes nobody to receive meanwhile, and receives the next command itself afterwards. That saves two
// switches of goroutines for each command, and answers to commands that have come together leave with one system call
// (see putOffFlush).
//
// Nobody knows before whether the store or the network will make the goroutine wait. So the whole rule is:
//
//   - A READ of up to maxPutOffData bytes, or a WRITE of up to maxBriefWrite, over RDMA also of up to maxPutOffData, is brief if
//     the store did not take longer than briefTime for those before it, on the average.
//   - While one runs, the baton is free and nobody is woken (baton.leave).
//   - If it is still so a moment later, lookout wakes a goroutine that waits for the baton. Then the next
//     commands are not brief.
const (
	// maxBriefWrite is less than for a READ: over TCP, another goroutine receives the data of the next WRITE while a longer one is stored.
	maxBriefWrite = 16 << 10

	// briefTime is longer than a copy from or to the page cache takes, and shorter than an access to a disk.
	briefTime = 40 * time.Microsecond
	// longestCounted bounds what one command adds to the average, and is the average of a new connection. Some 130 commands
	// that are fast enough bring it below briefTime.
	longestCounted = 2 * time.Millisecond
	// averagedOver is the weight of the average: each command moves it by this fraction.
	averagedOver = 32

	// lookEvery is how often lookout looks. A goroutine is woken 1 to 2 times that after the baton was left.
	lookEvery = 2 * time.Millisecond
	// looksInVain is how often lookout looks at a connection on which nothing comes.
	looksInVain = 25
)

// brevity says whether the next command is brief.
type brevity struct {
	average atomic.Int64 // time that the store took, ns. Concurrent updates may lose one
	watched atomic.Bool  // lookout has the connection

	// Of lookout:
	received uint64 // conn.received at the last look
	vain     int    // looks since that changed
}

// note adds the time that the store took for a command that could have been brief.
func (b *brevity) note(took time.Duration) {
	average := b.average.Load()
	b.average.Store(average + (int64(min(took, longestCounted))-average)/averagedOver)
}

// readsOrWrites has a true for the operation codes of READ and WRITE.
var readsOrWrites = [256]bool{0x08: true, 0x0a: true, 0x28: true, 0x2a: true, 0x88: true, 0x8a: true, 0xa8: true, 0xaa: true}

// small reports whether t is a READ or WRITE that may be brief.
func (t *Task) small() bool {
	h := t.header()
	if t.fromTarget || h.Opcode() != pdu.SCSICommand || !readsOrWrites[h.CDB()[0]] {
		return false
	}
	out, in := t.expected()
	return in <= maxPutOffData && (out <= maxBriefWrite || out <= maxPutOffData && t.conn.dm.RDMA())
}

// brief reports whether t will end soon.
//
// Preconditions: c.baton is held.
func (c *conn) brief(t *Task) bool {
	return c.brevity.average.Load() < int64(briefTime) && !t.mayWait && t.small()
}

// leaveBaton gives the baton away without waking anybody, for a brief command.
func (c *conn) leaveBaton() {
	c.baton.leave()
	if !c.brevity.watched.Load() { // read after leave: see look
		c.node.lookout.watch(c)
	}
}

// lookout wakes a goroutine to receive where one that runs a brief command has to wait. Its timer runs
// while commands are brief.
type lookout struct {
	mu    sync.Mutex
	conns []*conn
	timer *time.Timer // nil before the first
}

// watch adds a connection.
func (l *lookout) watch(c *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.brevity.watched.Swap(true) {
		return
	}
	c.brevity.vain = 0
	l.conns = append(l.conns, c)
	switch {
	case l.timer == nil:
		l.timer = time.AfterFunc(lookEvery, l.look)
	case len(l.conns) == 1:
		l.timer.Reset(lookEvery)
	}
}

// look looks at all connections once.
func (l *lookout) look() {
	l.mu.Lock()
	defer l.mu.Unlock()
	kept := l.conns[:0]
	for _, c := range l.conns {
		if c.look() {
			kept = append(kept, c)
		}
	}
	clear(l.conns[len(kept):])
	l.conns = kept
	if len(kept) > 0 {
		l.timer.Reset(lookEvery)
	}
}

// look wakes a goroutine if the baton has been left since the last look, and reports whether lookout has to look again.
//
// Preconditions: lookout.mu is held.
func (c *conn) look() bool {
	b := &c.brevity
	if c.baton.remind() {
		b.average.Store(int64(longestCounted))
	}
	if n := c.received.Load(); n != b.received {
		b.received, b.vain = n, 0
		return true
	}
	if b.vain++; b.vain < looksInVain {
		return true
	}
	// Who leaves the baton sees that it is not watched, or is seen here.
	b.watched.Store(false)
	return c.baton.isLeft() && !b.watched.Swap(true)
}
