package nbd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/nbd/nbduri"
)

// Config describes a Store.
type Config struct {
	URI       string // see nbduri.Parse
	BlockSize uint32 // of the LUN, in bytes: 512 or 4096; 0: 512
	ReadOnly  bool
	// Once says that others may change the export after the connection is lost. So the Store does not connect again, nothing is written
	// twice, and all calls fail with backend.ErrClosed from then on. Each write is on stable storage when it returns.
	Once bool
	// Stable says that the server answers a write only when it is on stable storage. It is used with Once.
	Stable bool

	// Ready returns when the server can be reached, or why it cannot. It is called before each attempt to connect again; nil: always.
	Ready func(context.Context) error

	// What is told about the connection, from a goroutine that has no other work; nil: nothing.
	Lost func(reason error)        // it broke, or the Store cannot connect again for another reason than before
	Back func(after time.Duration) // the Store is connected again, and the server has all changes
}

const (
	connectTime  = 10 * time.Second // for a handshake
	growTime     = 3 * time.Second  // for one that only asks for the size
	firstWait    = 50 * time.Millisecond
	longestWait  = time.Second // between two attempts to connect
	closeTime    = 5 * time.Second
	maxShutdowns = 3       // a server that is not about to end answers ESHUTDOWN as often, such as one whose store is another's now
	maxZeros     = 1 << 30 // bytes of a request about zeros or the status of blocks
)

// ErrShutdown is the reason of a lost connection whose server refused to do more (NBD_ESHUTDOWN).
var ErrShutdown = errors.New("the server is about to end")

// A Store is an export. See the package.
type Store struct {
	c     Config
	a     *nbduri.Address
	e     export       // as the first connection found it
	info  backend.Info // without its Size
	size  atomic.Int64 // bytes
	piece int64        // bytes of the longest read or write

	partial sync.RWMutex // held for writing while a part of a block is changed
	gate    sync.RWMutex // held for reading by each call
	closed  atomic.Bool
	quit    context.CancelFunc // ends attempts to connect
	ended   chan struct{}      // closed when no goroutine is left

	mu       sync.Mutex
	conn     *conn // nil: none
	cookie   uint64
	pending  map[uint64]*request // by cookie
	journal  journal
	kept     int64      // bytes of the journal, and of changes that are under way
	changing int        // changes that are under way
	room     *sync.Cond // kept or changing has become less
	flushing bool       // somebody makes room
	failed   error      // of the sync that has failed; nil: none has
	lost     error      // why there is no connection
	since    time.Time  // since when
	gaveUp   bool       // Close does not wait for the server any longer
	left     int        // changes that were not flushed then
	over     bool       // no other connection is wanted
}

// Open connects to the server and opens the export. It gives up after 10 s.
func Open(c Config) (backend.Store, error) {
	s, err := open(c)
	if err != nil {
		return nil, fmt.Errorf("nbd store %s: %w", c.URI, err)
	}
	return s, nil
}

// Probe returns the error that Open would return, or nil.
func Probe(c Config) error {
	s, err := Open(c)
	if err != nil {
		return err
	}
	return s.Close()
}

func open(c Config) (backend.Store, error) {
	a, err := nbduri.Parse(c.URI)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), connectTime)
	defer cancel()
	nc, e, err := dial(ctx, a)
	if err != nil {
		return nil, err
	}
	info, err := c.describe(&e)
	if err != nil {
		nc.Close()
		return nil, err
	}
	quitting, quit := context.WithCancel(context.Background())
	s := &Store{
		c: c, a: a, e: e, info: info, piece: min(maxPiece, int64(e.maximum&^(e.minimum-1))),
		quit: quit, ended: make(chan struct{}), pending: map[uint64]*request{},
	}
	s.room = sync.NewCond(&s.mu)
	s.size.Store(info.Size)
	s.conn = newConn(s, nc, e)
	go s.run(quitting, s.conn)
	if e.status {
		return &mapper{s}, nil
	}
	return s, nil
}

// describe returns what the LUN learns about the export.
func (c *Config) describe(e *export) (backend.Info, error) {
	block := cmp.Or(c.BlockSize, 512)
	i := backend.Info{
		Size: e.size - e.size%int64(block), BlockSize: block, PhysicalBlockSize: max(block, min(e.preferred, 4096)),
		ReadOnly: c.ReadOnly, VolatileCache: !c.ReadOnly,
	}
	switch {
	case i.Size == 0:
		return i, fmt.Errorf("the export has %d bytes, less than a block of %d", e.size, block)
	case e.minimum > block:
		return i, fmt.Errorf("the export has blocks of %d bytes, larger than block_size %d. Set block_size: 4096, or use another server", e.minimum, block)
	case !c.ReadOnly && e.flags&flagReadOnly != 0:
		return i, errors.New("the export is read-only. Set read_only: true, or let the server permit writes")
	case !c.ReadOnly && e.flags&flagSendFlush == 0:
		return i, errors.New("the server has no flush (NBD_FLAG_SEND_FLUSH), so data would be lost with it. Let it have one (flush = true of nbd-server), or set read_only: true")
	}
	if c.Once {
		if i.VolatileCache = false; !c.ReadOnly && !c.Stable && e.flags&flagSendFUA == 0 {
			return i, errors.New("the server has no FUA (NBD_FLAG_SEND_FUA), which LUNs need that gateways share")
		}
	}
	if e.flags&flagSendWriteZeroes != 0 && !c.ReadOnly {
		i.DiscardGranularity = max(block, min(e.preferred, 1<<20))
	}
	return i, i.Validate()
}

// run receives from the server, and connects again, until Close.
func (s *Store) run(ctx context.Context, c *conn) {
	defer close(s.ended)
	err := c.receive()
	for {
		began := s.lose(err)
		if ctx.Err() != nil {
			return
		}
		if s.c.Once {
			s.stop()
		}
		if s.c.Lost != nil {
			s.c.Lost(err)
		}
		if s.c.Once {
			return
		}
		received := s.reconnect(ctx)
		if received == nil {
			return
		}
		if s.c.Back != nil {
			s.c.Back(time.Since(began))
		}
		err = <-received
	}
}

// stop ends all calls, because there will be no other connection.
func (s *Store) stop() {
	s.mu.Lock()
	s.gaveUp = true
	s.kept -= s.journal.discard()
	s.room.Broadcast()
	list := s.takePending()
	s.mu.Unlock()
	s.abort(list)
}

// lose notes that there is no connection for that reason.
func (s *Store) lose(reason error) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conn, s.lost, s.since = nil, reason, time.Now()
	return s.since
}

// reconnect connects again. received gets the reason when that connection ends; it is nil when Close does not wait any longer.
func (s *Store) reconnect(ctx context.Context) (received chan error) {
	told := ""
	for wait := firstWait; ; wait = min(2*wait, longestWait) {
		c, received, err := s.tryConnect(ctx)
		if err == nil {
			if !s.resume(c) {
				c.nc.Close()
				<-received
				return nil
			}
			return received
		}
		if ctx.Err() != nil {
			return nil
		}
		s.mu.Lock()
		s.lost = err
		s.mu.Unlock()
		if text := err.Error(); text != told && s.c.Lost != nil {
			told = text
			s.c.Lost(err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
	}
}

// tryConnect connects, and sends the changes that are not flushed.
func (s *Store) tryConnect(quitting context.Context) (*conn, chan error, error) {
	ctx, cancel := context.WithTimeout(quitting, connectTime)
	defer cancel()
	if s.c.Ready != nil {
		if err := s.c.Ready(ctx); err != nil {
			return nil, nil, err
		}
	}
	nc, e, err := dial(ctx, s.a)
	if err != nil {
		return nil, nil, err
	}
	if err := s.same(&e); err != nil {
		nc.Close()
		return nil, nil, err
	}
	c, received := newConn(s, nc, e), make(chan error, 1)
	go func() { received <- c.receive() }()
	stop := context.AfterFunc(quitting, func() { nc.Close() }) // replay may wait for a server that does not answer
	defer stop()
	if err := s.replay(c, received); err != nil {
		return nil, nil, err
	}
	return c, received, nil
}

// same returns an error unless e is like the export that was opened.
func (s *Store) same(e *export) error {
	must := s.e.flags & (flagSendFlush | flagSendFUA | flagSendWriteZeroes)
	switch {
	case s.usable(e) < s.size.Load():
		return fmt.Errorf("the export is smaller now: %d bytes, and the LUN has %d. Restore it, or delete the LUN and create it again", e.size, s.size.Load())
	case !s.info.ReadOnly && e.flags&flagReadOnly != 0:
		return errors.New("the export is read-only now. Let the server permit writes")
	case e.flags&must != must, s.e.status && !e.status, e.minimum > s.e.minimum, e.maximum < uint32(s.piece):
		return errors.New("the server offers less than before, which the LUN relies on. Start the server as before, or delete the LUN and create it again")
	}
	return nil
}

// batch is how many changes are replayed at a time.
const batch = 64

// replay makes the changes of the journal again, in their order, and flushes.
func (s *Store) replay(c *conn, received <-chan error) error {
	s.mu.Lock()
	list := slices.Clone(s.journal.list) // nobody adds or drops anything while there is no connection
	end := s.journal.end()
	s.mu.Unlock()
	if len(list) == 0 {
		return nil
	}
	var sent []*request
	finish := func() error {
		for i, r := range sent {
			select {
			case <-r.done:
			case err := <-received:
				s.forget(sent[i:])
				sent = nil
				return err
			}
		}
		for _, r := range sent {
			r.free()
		}
		sent = sent[:0]
		return nil
	}
	for i := range list {
		e := &list[i]
		if len(sent) == batch || slices.ContainsFunc(sent, func(r *request) bool { return e.overlaps(r.off, r.n) }) {
			if err := finish(); err != nil {
				return err
			}
		}
		r := newRequest(cmdWriteZeroes, e.flags, e.off, e.n, nil)
		if e.data != nil {
			r.command, r.p = cmdWrite, e.data.b
		}
		r.replayed = true
		sent = append(sent, r)
		c.send(r, s.enlist(r))
	}
	if err := finish(); err != nil {
		return err
	}
	r := newRequest(cmdFlush, 0, 0, 0, nil)
	r.replayed = true
	sent = append(sent, r)
	cookie := s.enlist(r)
	r.mark = end
	c.send(r, cookie)
	return finish()
}

// enlist gives r a cookie, and returns it.
func (s *Store) enlist(r *request) uint64 {
	r.sending.Lock()
	defer r.sending.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cookie++
	r.cookie = s.cookie
	r.got, r.answer, r.run, r.after = 0, nil, 0, false
	r.mark = s.journal.end()
	s.pending[r.cookie] = r
	return r.cookie
}

// forget forgets changes that were replayed on a connection that is gone. They stay in the journal.
func (s *Store) forget(list []*request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range list {
		delete(s.pending, r.cookie)
	}
}

// resume makes c the connection, and sends what the server has not answered. It returns false if Close does not wait any longer.
func (s *Store) resume(c *conn) bool {
	s.mu.Lock()
	if s.gaveUp || s.over {
		s.mu.Unlock()
		return false
	}
	s.conn, s.lost = c, nil
	again := make([]*request, 0, len(s.pending))
	for _, r := range s.pending {
		r.got, r.answer, r.run, r.after = 0, nil, 0, false // nobody receives for it
		again = append(again, r)
	}
	slices.SortFunc(again, func(a, b *request) int { return cmp.Compare(a.cookie, b.cookie) })
	cookies := make([]uint64, len(again))
	for i, r := range again {
		cookies[i] = r.cookie
	}
	s.mu.Unlock()
	for i, r := range again {
		c.send(r, cookies[i])
	}
	return true
}

// do sends r and waits for the answer.
func (s *Store) do(r *request) error {
	cookie := s.enlist(r)
	s.mu.Lock()
	c, gaveUp := s.conn, s.gaveUp
	if gaveUp {
		delete(s.pending, cookie)
	}
	s.mu.Unlock()
	if gaveUp {
		return backend.ErrClosed
	}
	if c != nil {
		c.send(r, cookie)
	}
	<-r.done
	return r.err
}

// find returns the request that an answer is for; nil: none.
func (s *Store) find(cookie uint64) *request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pending[cookie]
}

// complete ends r after the last part of its answer. It returns false if the server is about to end, and r goes to the next one.
func (s *Store) complete(r *request) bool {
	if r.again() {
		r.shutdowns++
		return false
	}
	r.sending.Lock()
	err := r.outcome()
	s.mu.Lock()
	delete(s.pending, r.cookie)
	s.note(r, err)
	s.mu.Unlock()
	r.err, r.cookie = err, 0
	r.sending.Unlock()
	r.done <- struct{}{}
	return true
}

// note puts what r has changed in the journal. Preconditions: s.mu is held.
func (s *Store) note(r *request, err error) {
	switch {
	case r.command == cmdFlush && err == nil:
		s.kept -= s.journal.drop(r.mark)
		s.room.Broadcast()
	case r.command == cmdFlush, r.replayed && err != nil:
		s.fail(err)
	case r.replayed:
	case r.command == cmdWrite && r.copy != nil:
		s.changing--
		if err == nil && s.failed == nil {
			s.journal.add(change{r.off, r.n, r.copy, 0})
		} else { // the caller knows, or nothing is kept any longer
			s.kept -= r.copy.size()
			r.copy.free()
		}
		s.room.Broadcast()
	case r.command == cmdWriteZeroes:
		s.changing--
		if err == nil && s.failed == nil {
			s.journal.add(change{r.off, r.n, nil, r.flags})
		}
		s.room.Broadcast()
	}
}

// fail notes that data may be lost. Preconditions: s.mu is held.
func (s *Store) fail(err error) {
	if s.failed == nil {
		s.failed = err
	}
	s.kept -= s.journal.discard()
	s.room.Broadcast()
}

// reserve waits until the journal has room for n bytes more and one more change, which note adds.
func (s *Store) reserve(n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		entries := len(s.journal.list) + s.changing
		if len(s.journal.list) > 0 && !s.flushing && (s.kept+n > maxJournal/2 || entries >= maxEntries/2) {
			s.flushing = true
			go s.makeRoom()
		}
		if s.kept+n <= maxJournal && entries < maxEntries || s.gaveUp {
			break
		}
		s.room.Wait()
	}
	s.kept += n
	s.changing++
}

// makeRoom flushes. Changes continue meanwhile, as long as the journal has room for them.
func (s *Store) makeRoom() {
	_ = s.flush() // a failure empties the journal
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flushing = false
	s.room.Broadcast()
}

// flush makes the server flush.
func (s *Store) flush() error {
	r := newRequest(cmdFlush, 0, 0, 0, nil)
	defer r.free()
	return s.do(r)
}

// enter begins a call. After it has returned nil, leave must be called.
func (s *Store) enter(off, n int64, change bool) error {
	if s.closed.Load() {
		return backend.ErrClosed
	}
	if change && s.info.ReadOnly {
		return backend.ErrReadOnly
	}
	if err := s.Info().CheckRange(off, n); err != nil {
		return err
	}
	s.gate.RLock()
	if s.closed.Load() {
		s.gate.RUnlock()
		return backend.ErrClosed
	}
	return nil
}

func (s *Store) leave() { s.gate.RUnlock() }

// Info implements backend.Store.
func (s *Store) Info() backend.Info {
	i := s.info
	i.Size = s.size.Load()
	return i
}

// usable returns how many bytes of an export are whole blocks of the LUN.
func (s *Store) usable(e *export) int64 { return e.size - e.size%int64(s.info.BlockSize) }

// Grow implements backend.Grower. A connection keeps the size that the export had when it began. So Grow asks for the size with another connection, and
// connects again if it is larger.
func (s *Store) Grow() (size int64, err error) {
	if s.closed.Load() {
		return 0, backend.ErrClosed
	}
	ctx, cancel := context.WithTimeout(context.Background(), growTime)
	defer cancel()
	nc, e, err := dial(ctx, s.a)
	if err != nil {
		return 0, fmt.Errorf("the NBD server does not tell its size on a second connection, which it may have to permit (--shared=0 of qemu-nbd): %w", err)
	}
	nc.Close()
	size = s.usable(&e)
	if size <= s.size.Load() {
		return s.size.Load(), nil
	}
	for since := time.Now(); ; time.Sleep(firstWait) {
		s.mu.Lock()
		c := s.conn
		s.mu.Unlock()
		switch {
		case s.closed.Load():
			return 0, backend.ErrClosed
		case c != nil && s.usable(&c.e) >= size:
			s.size.Store(size)
			return size, nil
		case time.Since(since) > connectTime:
			return 0, fmt.Errorf("an export of %d bytes was not reached within %v", size, connectTime)
		case c != nil:
			c.nc.Close() // run connects again
		}
	}
}

// SetSize gives the Store another size, in bytes, before its owner makes the export smaller. Nothing beyond may be in progress, or unsettled.
func (s *Store) SetSize(size int64) { s.size.Store(size) }

// whole reports whether a range has whole blocks of the server only.
func (s *Store) whole(off, n int64) bool { return (off|n)&int64(s.e.minimum-1) == 0 }

// around returns the blocks of the server that have bytes of a range.
func (s *Store) around(off, n int64) (first, length int64) {
	mask := int64(s.e.minimum) - 1
	first = off &^ mask
	return first, (off+n+mask)&^mask - first
}

// ReadAt implements backend.Store.
func (s *Store) ReadAt(p []byte, off int64) error {
	if err := s.enter(off, int64(len(p)), false); err != nil {
		return err
	}
	defer s.leave()
	return s.read(p, off)
}

func (s *Store) read(p []byte, off int64) error {
	if !s.whole(off, int64(len(p))) && len(p) > 0 {
		first, n := s.around(off, int64(len(p)))
		b := make([]byte, n)
		if err := s.read(b, first); err != nil {
			return err
		}
		copy(p, b[off-first:])
		return nil
	}
	for len(p) > 0 {
		n := min(int64(len(p)), s.piece)
		r := newRequest(cmdRead, 0, off, n, p[:n])
		err := s.do(r)
		r.free()
		if err != nil {
			return err
		}
		p, off = p[n:], off+n
	}
	return nil
}

// WriteAt implements backend.Store.
func (s *Store) WriteAt(p []byte, off int64) error {
	if err := s.enter(off, int64(len(p)), true); err != nil {
		return err
	}
	defer s.leave()
	return s.write(p, off, s.always())
}

// always returns the flags of all changes.
func (s *Store) always() uint16 {
	if s.c.Once && !s.c.Stable {
		return cmdFUA
	}
	return 0
}

// WriteDurable implements backend.Store.
func (s *Store) WriteDurable(p []byte, off int64) error {
	if err := s.enter(off, int64(len(p)), true); err != nil {
		return err
	}
	defer s.leave()
	if s.SyncFailed() {
		return backend.ErrUnsynced
	}
	if s.e.flags&flagSendFUA != 0 {
		return s.write(p, off, cmdFUA)
	}
	if err := s.write(p, off, 0); err != nil {
		return err
	}
	return s.sync()
}

func (s *Store) write(p []byte, off int64, flags uint16) error {
	if len(p) == 0 {
		return nil
	}
	if s.e.minimum > 1 {
		if !s.whole(off, int64(len(p))) {
			return s.writePart(p, off, flags)
		}
		s.partial.RLock()
		defer s.partial.RUnlock()
	}
	return s.writeBlocks(p, off, flags)
}

// writePart writes a range that begins or ends within a block of the server.
func (s *Store) writePart(p []byte, off int64, flags uint16) error {
	s.partial.Lock()
	defer s.partial.Unlock()
	first, n := s.around(off, int64(len(p)))
	b := make([]byte, n)
	if err := s.read(b, first); err != nil {
		return err
	}
	copy(b[off-first:], p)
	return s.writeBlocks(b, first, flags)
}

func (s *Store) writeBlocks(p []byte, off int64, flags uint16) error {
	for len(p) > 0 {
		n := min(int64(len(p)), s.piece)
		r := newRequest(cmdWrite, flags, off, n, p[:n])
		if !s.c.Once && (flags&cmdFUA == 0 || s.overwrites(off, n)) {
			s.keep(r)
		}
		err := s.do(r)
		r.free()
		if err != nil {
			return err
		}
		p, off = p[n:], off+n
	}
	return nil
}

// overwrites reports whether the journal has an older change of a range, which must not be made again without the newer one.
func (s *Store) overwrites(off, n int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.journal.overlaps(off, n)
}

// keep copies the data of r for the journal.
func (s *Store) keep(r *request) {
	s.reserve(smallest << class(len(r.p)))
	r.copy = newBuffer(r.p)
}

// Sync implements backend.Store.
func (s *Store) Sync() error {
	if s.closed.Load() {
		return backend.ErrClosed
	}
	if s.info.ReadOnly {
		return nil
	}
	if err := s.enter(0, 0, false); err != nil {
		return err
	}
	defer s.leave()
	return s.sync()
}

func (s *Store) sync() error {
	if s.SyncFailed() {
		return backend.ErrUnsynced
	}
	if err := s.flush(); err != nil {
		return err
	}
	if s.SyncFailed() { // meanwhile, on another connection
		return backend.ErrUnsynced
	}
	return nil
}

// Settle implements backend.Settler.
func (s *Store) Settle() error {
	s.mu.Lock()
	settled := len(s.journal.list) == 0
	s.mu.Unlock()
	if settled {
		return nil
	}
	return s.Sync()
}

// SyncFailed implements backend.SyncFailer.
func (s *Store) SyncFailed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failed != nil
}

// Discard implements backend.Store. It does not use NBD_CMD_TRIM, after which a range need not read as zeros.
func (s *Store) Discard(off, n int64) error { return s.erase(off, n, 0) }

// Zero implements backend.Store.
func (s *Store) Zero(off, n int64) error { return s.erase(off, n, cmdNoHole) }

var zeros [maxPiece]byte

func (s *Store) erase(off, n int64, flags uint16) error {
	if err := s.enter(off, n, true); err != nil {
		return err
	}
	defer s.leave()
	mask := int64(s.e.minimum) - 1
	first, end := (off+mask)&^mask, (off+n)&^mask
	if first >= end || s.e.flags&flagSendWriteZeroes == 0 {
		return s.writeZeros(off, n)
	}
	if err := s.writeZeros(off, first-off); err != nil {
		return err
	}
	if err := s.eraseBlocks(first, end, flags|s.always()); err != nil {
		return err
	}
	return s.writeZeros(end, off+n-end)
}

// writeZeros writes zeros as data.
func (s *Store) writeZeros(off, n int64) error {
	for n > 0 {
		m := min(n, maxPiece)
		if err := s.write(zeros[:m], off, s.always()); err != nil {
			return err
		}
		off, n = off+m, n-m
	}
	return nil
}

func (s *Store) eraseBlocks(off, end int64, flags uint16) error {
	if s.e.minimum > 1 {
		s.partial.RLock()
		defer s.partial.RUnlock()
	}
	for off < end {
		n := min(end-off, maxZeros)
		s.reserve(0)
		r := newRequest(cmdWriteZeroes, flags, off, n, nil)
		err := s.do(r)
		r.free()
		if err != nil {
			return err
		}
		off += n
	}
	return nil
}

// A mapper is a Store of a server that tells the status of blocks.
type mapper struct{ *Store }

// Extent implements backend.Mapper.
func (m *mapper) Extent(off int64) (mapped bool, n int64, err error) {
	s := m.Store
	if err := s.enter(off, 1, false); err != nil {
		return false, 0, err
	}
	defer s.leave()
	first, _ := s.around(off, 1)
	length := min(s.size.Load()-first, maxZeros)
	r := newRequest(cmdBlockStatus, 0, first, length, nil)
	err = s.do(r)
	mapped, n = r.mapped, min(r.run, length)-(off-first)
	r.free()
	if err != nil {
		return false, 0, err
	}
	if n <= 0 {
		return true, min(int64(s.e.minimum), s.size.Load()-off), nil
	}
	return mapped, n, nil
}

// Inspect implements backend.Inspector.
func (s *Store) Inspect() error {
	if s.closed.Load() {
		return backend.ErrClosed
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.failed != nil:
		return backend.ErrUnsynced
	case s.conn == nil:
		return fmt.Errorf("no connection to the NBD server for %v, and commands wait: %w", time.Since(s.since).Round(time.Second), s.lost)
	}
	return nil
}

// Device implements backend.Recoverer. Stores of one server have the same number.
func (s *Store) Device() uint64 {
	h := fnv.New64a()
	h.Write([]byte(s.a.Network + " " + s.a.Host))
	return h.Sum64()
}

// Recover implements backend.Recoverer.
func (s *Store) Recover() error {
	if s.closed.Load() {
		return backend.ErrClosed
	}
	if s.info.ReadOnly {
		return nil
	}
	s.gate.Lock()
	defer s.gate.Unlock()
	if s.closed.Load() {
		return backend.ErrClosed
	}
	s.mu.Lock()
	before, connected, lost := s.failed, s.conn != nil, s.lost
	s.failed = nil
	s.mu.Unlock()
	err := lost
	if connected {
		b := make([]byte, s.info.BlockSize)
		if err = s.read(b, 0); err == nil {
			err = s.write(b, 0, 0)
		}
		if err == nil {
			err = s.flush()
		}
	}
	if err != nil {
		s.mu.Lock()
		s.fail(cmp.Or(before, err))
		s.mu.Unlock()
	}
	return err
}

// Close implements backend.Store. If the server cannot be reached for 5 s, calls in progress fail, and what is not flushed is lost.
func (s *Store) Close() error {
	if s.closed.Swap(true) {
		return backend.ErrClosed
	}
	finished := make(chan error, 1)
	go func() {
		s.gate.Lock() // calls in progress
		defer s.gate.Unlock()
		if s.info.ReadOnly {
			finished <- nil
			return
		}
		finished <- s.sync()
	}()
	begun, tick := time.Now(), time.NewTicker(50*time.Millisecond)
	defer tick.Stop()
	var err error
	for waits := true; waits; {
		select {
		case err = <-finished:
			waits = false
		case <-tick.C:
			s.giveUp(begun)
		}
	}
	s.quit()
	s.mu.Lock()
	s.over = true
	c := s.conn
	if s.gaveUp {
		err = nil
		if s.c.Once {
			err = fmt.Errorf("the connection is lost, and what was under way may still happen: %w", s.lost)
		} else if s.left > 0 {
			err = fmt.Errorf("%w: the NBD server cannot be reached, and has not flushed %d changes: %w", backend.ErrUnsynced, s.left, s.lost)
		}
	}
	s.kept -= s.journal.discard()
	s.mu.Unlock()
	if c != nil {
		r := newRequest(cmdDisconnect, 0, 0, 0, nil)
		c.send(r, s.enlist(r)) // without an answer
		c.nc.Close()
	}
	<-s.ended
	s.mu.Lock()
	s.gaveUp = true
	list := s.takePending()
	s.mu.Unlock()
	s.abort(list) // makeRoom
	return err
}

// giveUp ends calls if there has been no connection for closeTime since then.
func (s *Store) giveUp(since time.Time) {
	s.mu.Lock()
	if s.conn != nil || time.Since(since) < closeTime || time.Since(s.since) < closeTime || s.gaveUp {
		s.mu.Unlock()
		return
	}
	s.gaveUp, s.left = true, len(s.journal.list)+s.changing
	s.room.Broadcast()
	list := s.takePending()
	s.mu.Unlock()
	s.abort(list)
}

// takePending takes away what a caller waits for. Preconditions: s.mu is held.
func (s *Store) takePending() (list []*request) {
	for cookie, r := range s.pending {
		if !r.replayed && r.command != cmdDisconnect {
			list = append(list, r)
			delete(s.pending, cookie)
		}
	}
	return list
}

// abort ends requests that nobody receives for.
func (s *Store) abort(list []*request) {
	for _, r := range list {
		r.sending.Lock()
		s.mu.Lock()
		s.note(r, backend.ErrClosed)
		s.mu.Unlock()
		r.err, r.cookie = backend.ErrClosed, 0
		r.sending.Unlock()
		r.done <- struct{}{}
	}
}
