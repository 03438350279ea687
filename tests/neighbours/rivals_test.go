package neighbours

import (
	"context"
	"io"
	"log/slog"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iscsi/tcp"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

const (
	rivalA = "iqn.2026-11.io.example:a"
	rivalB = "iqn.2026-11.io.example:b" // may only read

	contested = 0 // the LUN that all see
	own       = 1 // the LUN that only the neighbour sees

	soon        = time.Second // an answer to the neighbour
	maxOps      = 48          // of one input
	maxRoutines = 2000        // goroutines of the process during an input
)

// An arena is a target with two LUNs in this process, two rivals and a neighbour.
type arena struct {
	site
	node *iscsi.Node
	l    net.Listener
	wg   sync.WaitGroup
	luns *lun.Inventory
}

// newArena serves the target until the test ends.
func newArena(t testing.TB) *arena {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	a := &arena{l: l, luns: lun.NewInventory(), site: site{addr: l.Addr().String()}}
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	a.node = iscsi.NewNode(iscsi.Options{QueueDepth: 16, ConnectionMemory: 4 << 20, LogoutWait: 50 * time.Millisecond, Logger: quiet})
	a.add(t, contested, func(name string) lun.Access {
		if name == rivalB {
			return lun.ReadOnly
		}
		return lun.ReadWrite
	})
	a.add(t, own, func(name string) lun.Access {
		if name == honest {
			return lun.ReadWrite
		}
		return lun.NoAccess
	})
	who, err := security.Compile([]string{"*"})
	if err != nil {
		t.Fatal(err)
	}
	if err := a.node.AddTarget(iscsi.TargetConfig{Name: iqn, Initiators: who, LUNs: a.luns}); err != nil {
		t.Fatal(err)
	}
	portal := a.node.AddPortal(iscsi.PortalConfig{Listen: a.addr, TPGT: 1})
	a.wg.Go(func() { a.accept(portal) })
	t.Cleanup(func() { a.end(t) })
	return a
}

// add adds a memory LUN of 1 MiB.
func (a *arena) add(t testing.TB, id uint16, m lun.Mask) {
	t.Helper()
	s, err := backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20, BlockSize: 512})
	if err != nil {
		t.Fatal(err)
	}
	name, err := state.Ephemeral().Get("test")
	if err != nil {
		t.Fatal(err)
	}
	u, err := lun.New(s, lun.Options{Identity: name, Events: func(lun.Event) {}})
	if err != nil {
		t.Fatal(err)
	}
	if err := a.luns.AddMasked(id, u, m); err != nil {
		t.Fatal(err)
	}
}

// accept serves connections until the listener is closed.
func (a *arena) accept(p *iscsi.Portal) {
	for {
		nc, err := a.l.Accept()
		if err != nil {
			return
		}
		a.wg.Go(func() { p.Serve(tcp.New(nc, tcp.Options{}), iscsi.ServeOptions{}) })
	}
}

// end ends the target, of which nothing may be left.
func (a *arena) end(t testing.TB) {
	a.l.Close()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	if err := a.node.Shutdown(ctx); err != nil {
		t.Errorf("shutdown: %v", err)
	}
	a.wg.Wait()
	if err := a.luns.Close(); err != nil {
		t.Error(err)
	}
}

// A rival does what the fuzzer says, and looks at no answer.
type rival struct {
	*peer
	a    *arena
	ctx  context.Context
	name string
	tags []uint32 // of its last commands

}

// logIn begins a session, which replaces the one that it has.
func (r *rival) logIn() {
	p, err := r.a.login(r.ctx, r.name, iqn, 1)
	if err != nil {
		return // refused, or out of places: the rest meets the old connection
	}
	if r.peer != nil {
		r.peer.Close()
	}
	r.peer = p
	go p.drain()
}

// command sends a SCSI Command.
func (r *rival) command(attr byte, block [16]byte, out []byte, edtl int, read bool) {
	r.start(&command{attr: attr, cdb: block, out: out, edtl: edtl, read: read, id: contested})
	r.tags = append(r.tags, r.ITT)
}

// function sends a task management function.
func (r *rival) function(f, which byte) {
	h := r.Request(pdu.TaskMgmtReq, pdu.FlagF|f, true)
	h.SetReferencedTaskTag(pdu.ReservedTag)
	if n := len(r.tags); n > 0 {
		h.SetReferencedTaskTag(r.tags[int(which)%n])
	}
	h.SetRefCmdSN(r.CmdSN - 1)
	r.send(h, nil)
}

// reserveOut sends PERSISTENT RESERVE OUT with keys that the rivals share.
func (r *rival) reserveOut(action, param byte) {
	list := make([]byte, 24)
	list[7], list[15] = param&1, param>>1&1
	r.command(pdu.AttrSimple, [16]byte{0: 0x5f, 1: action & 7, 2: 1 + param>>2&7, 8: 24}, list, 0, false)
}

// attrs are the task attributes (RFC 7143, section 11.3.1).
var attrs = [...]byte{pdu.AttrSimple, pdu.AttrOrdered, pdu.AttrHeadOfQueue, pdu.AttrUntagged}

// do takes one step: op says what, param how.
func (r *rival) do(op, param byte) {
	attr, lba := attrs[param&3], uint64(param>>2)
	block := make([]byte, 512)
	switch op % 16 {
	case 0:
		r.command(attr, [16]byte{}, nil, 0, false)
	case 1:
		r.command(attr, cdb.Read16(lba, 8), nil, 4096, true)
	case 2:
		r.command(attr, cdb.Write16(lba, 1), block, 512, false)
	case 3: // the data never comes
		r.command(attr, cdb.Write16(lba, 16), nil, 8192, false)
	case 4:
		r.command(attr, [16]byte{0: 0x89, 9: byte(lba), 13: 1}, append(block, block...), 1024, false)
	case 5:
		r.reserveOut(param>>5, param)
	case 6:
		r.command(attr, [16]byte{0: 0x16 + param>>7}, nil, 0, false) // RESERVE(6) or RELEASE(6)
	case 7:
		r.function([...]byte{pdu.AbortTask, pdu.AbortTaskSet, pdu.ClearTaskSet, pdu.LogicalUnitReset, pdu.TargetWarmReset,
			pdu.TargetColdReset, pdu.ITNexusReset, pdu.QueryTask}[param&7], param>>3)
	case 8: // MODE SELECT: control page with SWP, or caching page without WCE
		r.command(attr, [16]byte{0: 0x15, 1: 0x10, 4: 16}, append([]byte{3: 0, 4: 0x0a, 5: 0x0a, 8: param & 8}, 0, 0, 0, 0, 0, 0, 0), 0, false)
	case 9: // START STOP UNIT
		r.command(attr, [16]byte{0: 0x1b, 4: param & 3}, nil, 0, false)
	case 10:
		h := r.Request(pdu.LogoutReq, pdu.FlagF, param&1 == 0)
		r.send(h, nil)
	case 11:
		r.peer.Close()
	case 12:
		r.logIn()
	case 13:
		r.send(r.Request(pdu.NOPOut, pdu.FlagF, true), block[:param])
	case 14: // a gap in the CmdSNs
		r.CmdSN++
	case 15:
		h := r.Request(pdu.TextReq, pdu.FlagF, false)
		h.SetTTT(pdu.ReservedTag)
		r.send(h, []byte("SendTargets=\x00"))
	}
}

// FuzzRivals lets two initiators do whatever the input says with a LUN that they share with a third:
// ORDERED tasks, tasks whose data never comes, reservations, preemption, resets, mode parameters,
// stops, logouts, reinstatement. A rival with the right to write can keep the third from the LUN,
// but whatever comes, the third is answered within a second, its other LUN works and keeps its data,
// the number of goroutines stays bounded, and nothing is left of the rivals when they have gone.
func FuzzRivals(f *testing.F) {
	f.Add([]byte{0, 12, 0, 1, 12, 0, 0, 3, 1, 1, 1, 0})                   // an ORDERED WRITE without data
	f.Add([]byte{0, 12, 0, 1, 12, 0, 0, 5, 0x02, 1, 5, 0x02, 0, 5, 0xa0}) // registrations, PREEMPT AND ABORT
	f.Add([]byte{0, 12, 0, 0, 3, 0, 1, 12, 0, 1, 7, 3, 0, 7, 2, 0, 7, 5}) // resets
	f.Add([]byte{1, 12, 0, 1, 8, 8, 1, 9, 0, 1, 6, 0})                    // a reader that stops the LUN
	f.Add([]byte{0, 12, 0, 0, 14, 0, 0, 2, 0, 0, 12, 0, 0, 10, 0})        // reinstatement with a gap
	a := newArena(f)
	third, err := a.login(f.Context(), honest, iqn, 1)
	if err != nil {
		f.Fatal(err)
	}
	write := &command{cdb: cdb.Write16(0, 1), out: make([]byte, 512), id: own}
	read := &command{cdb: cdb.Read16(0, 1), read: true, edtl: 512, id: own}
	turn := byte(0)

	f.Fuzz(func(t *testing.T, b []byte) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		rivals := [2]*rival{{a: a, ctx: ctx, name: rivalA}, {a: a, ctx: ctx, name: rivalB}}
		for n := 0; len(b) >= 3 && n < maxOps; n++ {
			r := rivals[b[0]&1]
			if r.peer == nil {
				r.logIn()
			}
			if r.peer != nil {
				r.do(b[1], b[2])
			}
			b = b[3:]
		}
		turn++
		write.out[0] = turn
		begun := time.Now()
		third.SetReadDeadline(begun.Add(testkit.Patience))
		if err := third.answeredOnce(&command{cdb: cdb.Read16(0, 1), read: true, edtl: 512, id: contested}); err != nil {
			t.Fatal("the contested LUN: ", err)
		}
		if _, err := third.do(write); err != nil {
			t.Fatal("the neighbour's own LUN: ", err)
		}
		in, err := third.do(read)
		if err != nil || len(in) != 512 || in[0] != turn {
			t.Fatalf("the neighbour's own LUN: %v, % x", err, in[:min(len(in), 4)])
		}
		if took := time.Since(begun); took > soon {
			t.Errorf("the neighbour waited %v, want at most %v", took, soon)
		}
		if n := runtime.NumGoroutine(); n > maxRoutines {
			t.Errorf("%d goroutines", n)
		}
		cancel()
		for _, r := range rivals {
			if r.peer != nil {
				r.peer.Close()
			}
		}
		testkit.Eventually(t, "nothing is left of the rivals", func() bool {
			st := a.node.Stats()
			return st.Connections == 1 && st.TasksInFlight == 0 && st.BuffersOut == 0
		})
	})
}

// answeredOnce sends c and waits for its status, whatever it is.
func (p *peer) answeredOnce(c *command) error {
	if err := p.start(c); err != nil {
		return err
	}
	for {
		h, _, err := p.receive(nil)
		if err != nil {
			return err
		}
		if h.Opcode() == pdu.SCSIResponse || h.Opcode() == pdu.DataIn && h.Flags()&pdu.FlagS != 0 {
			return nil
		}
	}
}
