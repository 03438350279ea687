package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

const (
	blockSize  = 512
	laneBlocks = 128              // blocks that a lane has for itself
	patience   = 60 * time.Second // for one command or login
	pause      = 3 * time.Millisecond
)

// A conn is a session over one of the transports.
type conn interface {
	do(lun byte, cdb [16]byte, out []byte, in int) (status byte, sense, data []byte, err error)
	Close() error
}

type iserConn struct{ *initiator.Session }

func (c iserConn) do(lun byte, cdb [16]byte, out []byte, in int) (byte, []byte, []byte, error) {
	k := &initiator.Command{LUN: lun, CDB: cdb, Out: out, In: make([]byte, in)}
	err := c.Do(k)
	return k.Status, k.Sense, k.In, err
}

type tcpConn struct{ *initiator.Dialog }

func (c tcpConn) do(lun byte, cdb [16]byte, out []byte, in int) (byte, []byte, []byte, error) {
	return c.Do([8]byte{1: lun}, cdb[:], out, in)
}

// login logs in over a transport, "iser" or "tcp". The session ends with ctx.
func login(ctx context.Context, transport, addr, name, target string) (conn, error) {
	o := initiator.Options{Name: name, Target: target}
	if transport == "tcp" {
		d, err := initiator.Dial(ctx, "tcp", addr, o)
		if err != nil {
			return nil, err
		}
		late := time.AfterFunc(patience, func() { d.Close() })
		defer late.Stop()
		if err := d.LogIn(nil); err != nil {
			d.Close()
			return nil, err
		}
		return tcpConn{d}, nil
	}
	s, err := initiator.Connect(ctx, addr, o)
	if err != nil {
		return nil, err
	}
	late := time.AfterFunc(patience, func() { s.Close() })
	defer late.Stop()
	if err := s.Login(ctx); err != nil {
		s.Close()
		return nil, err
	}
	go func() {
		for {
			select {
			case p := <-s.Other:
				if p.BHS.Opcode() == pdu.AsyncMessage && p.BHS.AsyncEvent() != pdu.AsyncSCSIEvent {
					s.Close() // the target asks for a logout, or announces the end
				}
			case <-s.Done():
				return
			}
		}
	}()
	return iserConn{s}, nil
}

// The kinds of workers.
const (
	neighbour = "neighbour" // no fault hits its LUN or its connection
	faulty    = "faulty"    // its LUN has injected faults
	victim    = "victim"    // its connections are reset and its sessions killed
)

// A worker is an initiator with one session and verified load on one LUN.
type worker struct {
	world     *world
	kind      string
	name      string
	transport string
	addr      string
	target    string
	lun       byte
	memory    bool // the LUN is empty after a start
	lanes     []*lane

	mu     sync.Mutex
	conn   conn
	gen    atomic.Int64 // number of the session
	doomed atomic.Int64 // the last session that may end
	epoch  int64        // of the world at the login
}

// A lane is the part of a worker that has one command in flight.
type lane struct {
	w       *worker
	rng     *rand.Rand
	first   uint64
	cells   [laneBlocks]cell
	version uint64
	epoch   int64
}

// A cell is what a block may hold: the version that was acknowledged last, or one of those whose outcome is unknown.
type cell struct {
	acked uint64
	maybe []uint64
}

func content(lba, version uint64) []byte {
	b := make([]byte, blockSize)
	for i := 0; i < len(b) && version > 0; i += 16 {
		binary.BigEndian.PutUint64(b[i:], lba)
		binary.BigEndian.PutUint64(b[i+8:], version)
	}
	return b
}

// errStopped is the end of a lane without a failure.
var errStopped = errors.New("stopped")

// session returns the session after the one with number lost, and its number. why is how that ended.
func (w *worker) session(lost int64, why error) (conn, int64, int64, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.conn != nil && w.gen.Load() != lost {
		return w.conn, w.gen.Load(), w.epoch, nil
	}
	if w.conn != nil {
		w.conn.Close()
		w.conn = nil
		if w.kind != victim && w.doomed.Load() < lost && w.world.ctx.Err() == nil {
			return nil, 0, 0, fmt.Errorf("the session ended without a cause: %w", why)
		}
		w.world.count.lost.Add(1)
	}
	w.world.gate.RLock()
	defer w.world.gate.RUnlock()
	for end := time.Now().Add(patience); ; {
		c, err := login(w.world.ctx, w.transport, w.addr, w.name, w.target)
		switch {
		case err == nil:
			w.world.count.logins.Add(1)
			w.conn, w.epoch = c, w.world.epoch.Load()
			return c, w.gen.Add(1), w.epoch, nil
		case w.world.ctx.Err() != nil:
			return nil, 0, 0, errStopped
		case w.kind != victim || time.Now().After(end): // resets also hit logins of victims
			return nil, 0, 0, fmt.Errorf("login: %w", err)
		}
		time.Sleep(pause)
	}
}

// close drops the session.
func (w *worker) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.conn != nil {
		w.conn.Close()
	}
}

// run puts load on the LUN until stop is closed, and then reads all blocks.
func (l *lane) run(stop <-chan struct{}) {
	err := l.load(stop)
	if err != nil && !errors.Is(err, errStopped) {
		l.w.world.fail("%s LUN %d of %s over %s: %v", l.w.kind, l.w.lun, l.w.target, l.w.transport, err)
	}
}

func (l *lane) load(stop <-chan struct{}) error {
	for {
		select {
		case <-stop:
			for at := uint64(0); at < laneBlocks; at += 16 {
				if err := l.read(at, 16); err != nil {
					return err
				}
			}
			return nil
		case <-time.After(time.Duration(l.rng.Int64N(int64(2 * pause)))):
		}
		n := 1 + l.rng.Uint64N(8)
		at := l.rng.Uint64N(laneBlocks - n + 1)
		var err error
		switch k := l.rng.IntN(100); {
		case k < 2:
			_, _, err = l.do([16]byte{0x35}, nil, 0, nil) // SYNCHRONIZE CACHE(10)
			l.w.world.count.syncs.Add(1)
		case k < 50:
			err = l.write(at, n)
		default:
			err = l.read(at, n)
		}
		if err != nil {
			return err
		}
	}
}

// write writes n blocks from at on, in a new version.
func (l *lane) write(at, n uint64) error {
	l.version++
	v := l.version
	var out []byte
	for i := range n {
		out = append(out, content(l.first+at+i, v)...)
	}
	unknown := func() {
		for i := range n {
			l.cells[at+i].maybe = append(l.cells[at+i].maybe, v)
		}
	}
	_, ok, err := l.do(cdb.Write16(l.first+at, uint32(n)), out, 0, unknown)
	if err != nil {
		return err
	}
	if !ok {
		unknown()
		return nil
	}
	for i := range n {
		l.cells[at+i] = cell{acked: v}
	}
	l.w.world.count.writes.Add(1)
	return nil
}

// read reads n blocks from at on and compares them with what they may hold.
func (l *lane) read(at, n uint64) error {
	data, ok, err := l.do(cdb.Read16(l.first+at, uint32(n)), nil, int(n)*blockSize, nil)
	if err != nil || !ok {
		return err
	}
	if len(data) != int(n)*blockSize {
		return fmt.Errorf("READ of LBA %d returns %d bytes, want %d", l.first+at, len(data), n*blockSize)
	}
	for i := range n {
		c, b := &l.cells[at+i], data[i*blockSize:][:blockSize]
		lba, v := l.first+at+i, binary.BigEndian.Uint64(b[8:])
		if !slices.Equal(b, content(lba, v)) || v != c.acked && !slices.Contains(c.maybe, v) {
			return fmt.Errorf("READ of LBA %d returns other data: % x, want version %d or one of %d", lba, b[:16], c.acked, c.maybe)
		}
		*c = cell{acked: v}
	}
	l.w.world.count.reads.Add(1)
	return nil
}

// do executes a command, again after each loss of the session, before which it calls lost. ok reports GOOD.
func (l *lane) do(block [16]byte, out []byte, in int, lost func()) (data []byte, ok bool, err error) {
	w, world := l.w, l.w.world
	var gen int64
	var why error
	begun, label, faults := time.Now(), world.label.Load().(string), world.faults.Load()
	for {
		c, g, epoch, err := w.session(gen, why)
		if err != nil {
			return nil, false, err
		}
		gen = 0 // what follows ends no session
		if epoch != l.epoch {
			if l.epoch = epoch; w.memory {
				l.cells = [laneBlocks]cell{}
			}
		}
		var late atomic.Bool
		watchdog := time.AfterFunc(patience, func() { late.Store(true); c.Close() })
		status, sense, data, err := c.do(w.lun, block, out, in)
		watchdog.Stop()
		switch {
		case world.ctx.Err() != nil:
			return nil, false, errStopped
		case late.Load():
			return nil, false, fmt.Errorf("no answer to CDB % x within %v", block, patience)
		case err != nil:
			if lost != nil {
				lost()
			}
			gen, why = g, err
			continue
		case status == 0:
			if now := world.label.Load().(string); now != calm {
				label = now
			}
			if w.kind == neighbour && block[0] != 0x35 {
				world.latencies[label].add(time.Since(begun))
			}
			return data, true, nil
		}
		key := byte(0)
		if len(sense) > 2 {
			key = sense[2] & 0x0f
		}
		switch {
		case status == 0x02 && key == 6: // a unit attention
		case status == 0x08 && time.Since(begun) < patience: // BUSY while a store is at work
			time.Sleep(pause)
		case w.kind == faulty && status == 0x02 && (faults%2 == 1 || faults != world.faults.Load()):
			world.count.medium.Add(1)
			return nil, false, nil
		default:
			return nil, false, fmt.Errorf("CDB % x: status %#x, sense % x", block, status, sense)
		}
	}
}
