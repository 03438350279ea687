package daemon

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// Initiators write their own blocks with all commands that write, over both transports,
// while sessions end, task sets are cleared, and the LUN is reset, resized and opened again.
// Writes with status GOOD are on the LUN; others are or are not, block by block; and a
// command that has ended changes nothing later (RFC 7143, sections 4.2.3.3, 6.3.5 and 11.5.1;
// SAM-5, section 8.6).
func TestNothingIsLostOrLate(t *testing.T) {
	for _, backend := range []string{"file", "memory"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			nothingIsLostOrLate(t, backend)
		})
	}
}

// nothingIsLostOrLate runs the model on a LUN with that backend.
func nothingIsLostOrLate(t *testing.T, kind string) {
	const duration = 3 * time.Second
	l := newLab(t, func(l *lab) { l.resets, l.luns, l.more = `"*"`, "", "drain: 0s" })
	l.openStore = func(c *config.LUN) (backend.Store, error) {
		s, err := l.openBackend(c)
		return unevenStore{s}, err
	}
	size, more := 4, ""
	change := func(o ChangeOptions) {
		l.luns = fmt.Sprintf("{id: 0, backend: %s, size: %dMiB%s}", kind, size, more)
		if kind == "file" {
			l.luns = strings.TrimSuffix(l.luns, "}") + ", path: " + filepath.Join(l.dir, "disk.img") + "}"
		}
		o.Disrupt, o.AllowShrink = true, true
		l.ok(o)
	}
	change(ChangeOptions{})

	ctx, cancel := context.WithTimeout(t.Context(), duration)
	defer cancel()
	var wg sync.WaitGroup
	var done atomic.Int64
	for i, kind := range []string{"tcp", "iser", queued, "tcp", "iser", queued} {
		w := &modelWorker{t: t, l: l, n: i, kind: kind, rnd: rand.New(rand.NewPCG(uint64(i), 0))}
		wg.Go(func() {
			for w.connect() && ctx.Err() == nil && w.step() {
			}
			w.last += ", the last one"
			w.verify()
			w.close()
			done.Add(int64(w.done))
		})
	}
	evil := &modelWorker{t: t, l: l, n: 99, kind: "tcp"}
	defer evil.close()
	disturb := []func(){
		func() { evil.function(pdu.LogicalUnitReset) },
		func() { evil.function(pdu.ClearTaskSet) },
		func() { evil.function(pdu.TargetWarmReset) },
		func() {
			if all := l.node.Sessions(); len(all) > 0 {
				l.KillSession(ctx, all[rand.IntN(len(all))].TSIH, "test") // it may have ended
			}
		},
		func() {
			size = 4 + rand.IntN(3)
			change(ChangeOptions{})
		},
		func() {
			more = []string{"", ", removable: true", ", write_through: true"}[rand.IntN(3)]
			change(ChangeOptions{Drain: time.Duration(rand.IntN(2)) * 100 * time.Millisecond})
		},
	}
	for ctx.Err() == nil && !t.Failed() {
		disturb[rand.IntN(len(disturb))]()
		time.Sleep(time.Duration(rand.IntN(40)) * time.Millisecond)
	}
	wg.Wait()
	if done.Load() == 0 {
		t.Error("no command has ended with GOOD")
	}
}

// An unevenStore delays some calls.
type unevenStore struct{ backend.Store }

func (unevenStore) pause() {
	if rand.IntN(8) == 0 {
		time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond)
	}
}

func (s unevenStore) ReadAt(p []byte, off int64) error { s.pause(); return s.Store.ReadAt(p, off) }
func (s unevenStore) WriteAt(p []byte, off int64) error {
	s.pause()
	defer s.pause()
	return s.Store.WriteAt(p, off)
}
func (s unevenStore) WriteDurable(p []byte, off int64) error {
	s.pause()
	return s.Store.WriteDurable(p, off)
}
func (s unevenStore) Discard(off, n int64) error { s.pause(); return s.Store.Discard(off, n) }
func (s unevenStore) Resize(size int64) error    { return s.Store.(backend.Resizer).Resize(size) }

const (
	modelBlocks = 256 // that each worker has
	modelDepth  = 8   // commands at a time, of a worker that is queued
	queued      = "queued"
	// modelPatience is how long a command may take. Each is answered, also when another nexus aborts it
	// (TAS 1), or its session ends.
	modelPatience = testkit.Patience
	taskAborted   = "status 0x40"
)

// A modelWorker knows the content of its blocks: the number of the command that wrote a
// block last, in each 8 bytes of it, or 0.
type modelWorker struct {
	t    *testing.T
	l    *lab
	n    int
	kind string // what Dial takes, or queued
	rnd  *rand.Rand

	d *initiator.Dialog  // one of both,
	s *initiator.Session // or none: there is no session

	number uint64 // of the last command
	has    [modelBlocks]uint64
	last   string // what was done last
	done   int    // commands that have ended with GOOD
}

// A modelChange is a command and the content of its blocks, from at on, afterwards.
type modelChange struct {
	name string
	cdb  [16]byte
	out  []byte
	at   int
	will []uint64
}

func (w *modelWorker) close() {
	if w.d != nil {
		w.d.Close()
	}
	if w.s != nil {
		w.s.Close()
	}
	w.d, w.s = nil, nil
}

// connect logs in if the worker has no session. The ISID is that of the session before, so
// that its tasks end.
func (w *modelWorker) connect() bool {
	for end := time.Now().Add(time.Minute); w.d == nil && w.s == nil; time.Sleep(3 * time.Millisecond) {
		if time.Now().After(end) {
			w.t.Errorf("worker %d: no login", w.n)
		}
		if w.t.Failed() {
			return false
		}
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		o := initiator.Options{Name: fmt.Sprint(prefix, "w", w.n), Target: store, ISID: [6]byte{0x80, 5: byte(w.n)}}
		if w.kind == queued {
			w.s, _ = initiator.Login(ctx, w.l.addr(), o)
			cancel()
			continue
		}
		d, err := initiator.Dial(context.Background(), w.kind, w.l.addr(), o)
		if err == nil {
			stop := context.AfterFunc(ctx, func() { d.Close() })
			if err = d.LogIn(nil); err != nil || !stop() {
				d.Close()
			} else {
				w.d = d
			}
		}
		cancel()
	}
	return true
}

// function sends a task management function for the LUN and ignores its outcome.
func (w *modelWorker) function(f byte) {
	if !w.connect() {
		return
	}
	d := w.d
	late := w.lateAfter(d.Close)
	defer late.Stop()
	if _, err := d.TMF(f, [8]byte{}); err != nil {
		w.close()
	}
}

var errModelLate = errors.New("no answer")

// lateAfter fails the test and calls end when a command has had modelPatience.
func (w *modelWorker) lateAfter(end func() error) *time.Timer {
	last := w.last
	return time.AfterFunc(modelPatience, func() {
		w.t.Errorf("worker %d, %s: %v after %s", w.n, w.kind, errModelLate, last)
		end()
	})
}

// do runs a command and returns its outcome, as the function do does. An error ends the
// session.
func (w *modelWorker) do(cdb [16]byte, out []byte, in int) (result string, data []byte, err error) {
	if w.s != nil {
		c := &initiator.Command{CDB: cdb, Out: out}
		if in > 0 {
			c.In = make([]byte, in)
		}
		for {
			if err := w.s.Start(c); err != nil {
				w.close()
				return "", nil, err
			}
			if result, err = w.await(c); err != nil || !strings.HasPrefix(result, "6/") {
				return result, c.In, err
			}
		}
	}
	d := w.d
	late := w.lateAfter(d.Close)
	defer late.Stop()
	status, sense, data, err := d.Do([8]byte{}, cdb[:], out, in)
	if err != nil {
		w.close()
		return "", nil, err
	}
	return outcome(&initiator.Command{Status: status, Sense: sense}), data, nil
}

// await waits for a command in progress and returns its outcome.
func (w *modelWorker) await(c *initiator.Command) (string, error) {
	s := w.s
	late := w.lateAfter(s.Close)
	err := c.Wait()
	if !late.Stop() || err != nil && !errors.Is(err, initiator.ErrAborted) {
		w.close()
		return "", errors.Join(errModelLate, err)
	}
	return outcome(c), err
}

// again reports whether a command with that outcome may have another one when repeated.
func again(outcome string) bool {
	return outcome == "2/04/01" || outcome == taskAborted // IN PROCESS OF BECOMING READY
}

// verify reads all blocks. Each has the content that the worker knows, or that of one of
// the unsure commands, which did not succeed.
func (w *modelWorker) verify(unsure ...*modelChange) bool {
	for w.connect() {
		got, data, err := w.do(cdb.Read16(w.lba(0), modelBlocks), nil, modelBlocks*512)
		switch {
		case err != nil:
			continue
		case again(got):
			time.Sleep(time.Millisecond)
			continue
		case got != "":
			w.t.Errorf("worker %d: READ: %s", w.n, got)
			return false
		}
		for b := range w.has {
			block := data[b*512:][:512]
			v := binary.LittleEndian.Uint64(block)
			for j := 8; j < len(block); j += 8 {
				if binary.LittleEndian.Uint64(block[j:]) != v {
					w.t.Errorf("worker %d, %s: block %d is torn after %s", w.n, w.kind, b, w.last)
					return false
				}
			}
			for _, c := range unsure {
				if b >= c.at && b < c.at+len(c.will) && v == c.will[b-c.at] {
					w.has[b] = v
				}
			}
			if v != w.has[b] {
				w.t.Errorf("worker %d, %s: block %d has %d and not %d after %s", w.n, w.kind, b, v, w.has[b], w.last)
				return false
			}
		}
		return true
	}
	return false
}

// lba returns the LBA of a block of the worker.
func (w *modelWorker) lba(at int) uint64 { return uint64(w.n*modelBlocks + at) }

// step runs one command, or several at a time.
func (w *modelWorker) step() bool {
	if w.s != nil && w.rnd.IntN(2) == 0 {
		return w.batch()
	}
	if w.d != nil && w.rnd.IntN(60) == 0 { // perhaps while another does the same
		w.function([]byte{pdu.LogicalUnitReset, pdu.ClearTaskSet}[w.rnd.IntN(2)])
		return true
	}
	c := w.invent(w.rnd.IntN(modelBlocks-16), 1+w.rnd.IntN(15))
	w.last = c.name
	got, _, err := w.do(c.cdb, c.out, 0)
	switch {
	case err == nil && got == "":
		w.done++
		copy(w.has[c.at:], c.will)
		return w.rnd.IntN(3) > 0 || w.verify()
	case err == nil && !again(got) && !strings.HasPrefix(got, "a/"): // COPY ABORTED: it cannot be copied from the LUN now
		w.t.Errorf("worker %d, %s: %s: %s", w.n, w.kind, c.name, got)
		return false
	}
	w.last = fmt.Sprintf("%s: %s, %v", c.name, got, err)
	return w.verify(c)
}

// batch runs several commands at a time and aborts some.
func (w *modelWorker) batch() bool {
	const each = modelBlocks / modelDepth
	s := w.s
	var changes [modelDepth]*modelChange
	var cmds [modelDepth]*initiator.Command
	for i := range changes {
		changes[i] = w.writing(i*each+w.rnd.IntN(each/2), 1+w.rnd.IntN(each/2))
		cmds[i] = &initiator.Command{CDB: changes[i].cdb, Out: changes[i].out, Ordered: w.rnd.IntN(12) == 0}
		if w.rnd.IntN(2) == 0 {
			cmds[i].Immediate = min(len(cmds[i].Out), 4096)
		}
		if s.Start(cmds[i]) != nil {
			changes[i] = nil // it was not sent
		}
	}
	for i, c := range cmds {
		if changes[i] != nil && w.rnd.IntN(6) == 0 {
			ctx, cancel := context.WithTimeout(context.Background(), modelPatience)
			if _, err := s.Abort(ctx, c); err != nil {
				s.Close()
			}
			cancel()
		}
	}
	w.last = "several commands"
	var unsure []*modelChange
	for i, c := range changes {
		if c == nil {
			continue
		}
		var got string
		var err error
		if w.s == s {
			got, err = w.await(cmds[i])
		} else if err = cmds[i].Wait(); err == nil { // it was answered before the session ended
			got = outcome(cmds[i])
		}
		if err == nil && got == "" {
			w.done++
			copy(w.has[c.at:], c.will)
			continue
		}
		w.last += fmt.Sprintf("; %s: %s, %v", c.name, got, err)
		if err != nil || !strings.HasPrefix(got, "6/") {
			unsure = append(unsure, c)
		}
	}
	return w.verify(unsure...)
}

// writing returns a WRITE of n blocks.
func (w *modelWorker) writing(at, n int) *modelChange {
	w.number++
	c := &modelChange{name: fmt.Sprintf("WRITE of %d to %d", n, at), cdb: cdb.Write16(w.lba(at), uint32(n)), out: make([]byte, n*512), at: at, will: make([]uint64, n)}
	for i := range c.will {
		c.will[i] = w.number
	}
	for i := 0; i < len(c.out); i += 8 {
		binary.LittleEndian.PutUint64(c.out[i:], w.number)
	}
	return c
}

// invent returns a random command that changes n blocks.
func (w *modelWorker) invent(at, n int) *modelChange {
	c := w.writing(at, n)
	as := func(name string, op, flags byte) {
		c.name, c.cdb[0], c.cdb[1] = fmt.Sprintf("%s of %d to %d", name, n, at), op, flags
	}
	switch w.rnd.IntN(8) {
	case 0:
	case 1:
		as("WRITE with FUA", 0x8a, 0x08)
	case 2:
		as("WRITE AND VERIFY", 0x8e, 0x02) // BYTCHK 01b
	case 3:
		as("WRITE SAME", 0x93, 0)
		c.out = c.out[:512]
	case 4:
		as("WRITE SAME with UNMAP", 0x93, 0x08)
		c.out, c.will = make([]byte, 512), make([]uint64, n)
	case 5:
		as("UNMAP", 0x42, 0)
		c.cdb, c.out, c.will = [16]byte{0: 0x42, 8: 24}, make([]byte, 24), make([]uint64, n)
		c.out[1], c.out[3] = 22, 16
		binary.BigEndian.PutUint64(c.out[8:], w.lba(at))
		binary.BigEndian.PutUint32(c.out[16:], uint32(n))
	case 6:
		n = min(n, 7)
		c = w.writing(at, n)
		as("COMPARE AND WRITE", 0x89, 0)
		c.cdb = [16]byte{0: 0x89, 13: byte(n)}
		binary.BigEndian.PutUint64(c.cdb[2:], w.lba(at))
		expected := make([]byte, n*512)
		for i := 0; i < len(expected); i += 8 {
			binary.LittleEndian.PutUint64(expected[i:], w.has[at+i/512])
		}
		c.out = append(expected, c.out...)
	case 7:
		to := w.rnd.IntN(modelBlocks - 16)
		if w.rnd.IntN(2) == 0 {
			to = min(at+w.rnd.IntN(4), modelBlocks-16) // the ranges overlap
		}
		const header, cscd, segment = 16, 32, 28
		p := make([]byte, header+cscd+segment)
		p[0], p[3], p[11] = 1, cscd, segment
		p[16], p[20], p[21], p[23], p[46] = 0xe4, 0x01, 0x03, 8, 512>>8
		naa, err := hex.DecodeString(w.l.State().Targets[0].LUNs[0].NAA)
		if err != nil {
			w.t.Error(err)
		}
		copy(p[24:], naa)
		p[48], p[51], p[59] = 0x02, segment-4, byte(n)
		binary.BigEndian.PutUint64(p[60:], w.lba(at))
		binary.BigEndian.PutUint64(p[68:], w.lba(to))
		c.name, c.cdb, c.out = fmt.Sprintf("EXTENDED COPY of %d from %d to %d", n, at, to), [16]byte{0: 0x83, 13: byte(len(p))}, p
		c.at, c.will = to, append([]uint64(nil), w.has[at:at+n]...)
	}
	return c
}
