package tests

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iscsi/tcp"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A successor is a node that continues the sessions of another one, as the node of another process does.
type successor struct {
	node   *iscsi.Node
	portal *iscsi.Portal
	wg     sync.WaitGroup
}

// newSuccessor returns a node with the target of tg.
func (tg *target) newSuccessor(t testing.TB, o iscsi.Options) *successor {
	t.Helper()
	s := &successor{node: iscsi.NewNode(o)}
	who, err := security.Compile([]string{"iqn.2026-11.io.github.*"})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.node.AddTarget(iscsi.TargetConfig{Name: targetName, Initiators: who, ResetsFor: who, LUNs: tg.inventories[0]}); err != nil {
		t.Fatal(err)
	}
	s.portal = s.node.AddPortal(iscsi.PortalConfig{Listen: tg.addr, TPGT: 1})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
		defer cancel()
		if err := s.node.Shutdown(ctx); err != nil {
			t.Errorf("shutdown of the successor: %v", err)
		}
		s.wg.Wait()
		if st := s.node.Stats(); st.Connections != 0 || st.TasksInFlight != 0 || st.BuffersOut != 0 {
			t.Errorf("left behind: %+v", st)
		}
	})
	return s
}

// take continues the sessions of r on copies of their sockets, after their states went through JSON and nothing
// of them is left in the other node.
func (s *successor) take(t testing.TB, r *iscsi.Rest) {
	t.Helper()
	list, err := r.Sessions()
	if err != nil {
		t.Fatal(err)
	}
	var sockets []net.Conn
	for _, st := range list {
		for _, c := range st.Conns {
			f, err := c.Socket.(*net.TCPConn).File()
			if err != nil {
				t.Fatal(err)
			}
			nc, err := net.FileConn(f)
			if err != nil {
				t.Fatal(err)
			}
			f.Close()
			sockets = append(sockets, nc)
		}
	}
	text, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Release(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &list); err != nil {
		t.Fatal(err)
	}
	for _, st := range list {
		var ends []iscsi.End
		for _, c := range st.Conns {
			dm, err := continueMover(sockets[0], c)
			if err != nil {
				t.Fatal(err)
			}
			sockets = sockets[1:]
			ends = append(ends, iscsi.End{Portal: s.portal, Mover: dm})
		}
		run, err := s.node.Continue(st, ends)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range run {
			s.wg.Go(func() { f() })
		}
	}
}

// continueMover returns the mover of c on nc.
func continueMover(nc net.Conn, c iscsi.ConnState) (iscsi.Datamover, error) {
	if c.Transport == "tcp" {
		var st tcp.State
		if err := json.Unmarshal(c.Mover, &st); err != nil {
			return nil, err
		}
		return tcp.Continue(nc, st)
	}
	var st iser.State
	if err := json.Unmarshal(c.Mover, &st); err != nil {
		return nil, err
	}
	return iser.Continue(nc, iser.Options{}, st)
}

// Sessions under load go from node to node twenty times: over iSER with commands in flight, over TCP, and after a
// step-up. Initiators notice nothing: no command fails, no data is lost, no session ends.
func TestHandOver(t *testing.T) {
	tg := startTarget(t, targetOptions{stream: rdmaFirst, quiet: true})
	handOverUnderLoad(t, tg, "iser", 3)
}

// The same for connections that begin on the byte stream.
func TestHandOverOfTCP(t *testing.T) {
	t.Run("tcp", func(t *testing.T) {
		handOverUnderLoad(t, startTarget(t, targetOptions{stream: loginFirst, quiet: true}), "tcp", 4)
	})
	t.Run("step-up", func(t *testing.T) {
		handOverUnderLoad(t, startTarget(t, targetOptions{stream: loginFirst, quiet: true}), "step-up", 4)
	})
}

func handOverUnderLoad(t *testing.T, tg *target, transport string, sessions int) {
	const moves = 20
	stop := make(chan struct{})
	var load sync.WaitGroup
	var done atomic.Int64
	failed := make(chan error, sessions)
	var live []func() error // whether a session is still the first one
	for i := range sessions {
		o := initiator.Options{Target: targetName, Name: fmt.Sprintf("iqn.2026-11.io.github.host:%d", i)}
		r := &initiator.Region{First: uint64(1000 * i)}
		if transport == "iser" {
			s := tg.login(t, o)
			ready := &initiator.Command{CDB: cdb.TestUnitReady}
			if err := s.Do(ready); err != nil || ready.Status != 2 { // the unit attention of the login
				t.Fatalf("TEST UNIT READY: %v, status %#x", err, ready.Status)
			}
			live = append(live, func() error {
				select {
				case <-s.Done():
					return s.Err()
				default:
					return nil
				}
			})
			load.Go(func() { failed <- r.Pipeline(s, stop, &done) })
			continue
		}
		d, err := initiator.Dial(testContext(t), transport, tg.addr, o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		if err := d.LogIn(nil); err != nil {
			t.Fatal(err)
		}
		load.Go(func() { failed <- r.Steps(d, stop, &done) })
	}
	node := tg.node
	var slowest time.Duration
	requests := 0 // that had come and not begun
	for i := range moves {
		before := done.Load()
		testkit.Eventually(t, "commands between two hand-overs", func() bool {
			return done.Load() > before+int64(10*sessions) || len(failed) > 0
		})
		if i%4 == 3 { // no successor takes them
			node.Pause(t.Context()).Resume()
			continue
		}
		next := tg.newSuccessor(t, iscsi.Options{Logger: slog.New(slog.DiscardHandler)})
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
		r := node.Pause(ctx)
		cancel()
		list, err := r.Sessions()
		if err != nil || len(list) != sessions {
			t.Fatalf("%d sessions at rest, want %d: %v", len(list), sessions, err)
		}
		for _, s := range list {
			requests += len(s.Conns[0].Requests)
		}
		next.take(t, r)
		slowest = max(slowest, time.Since(began))
		node = next.node
	}
	close(stop)
	load.Wait()
	for range sessions {
		if err := <-failed; err != nil {
			t.Error(err)
		}
	}
	for _, f := range live {
		if err := f(); err != nil {
			t.Errorf("a session has ended: %v", err)
		}
	}
	t.Logf("%d commands, %d requests handed over, slowest hand-over %v", done.Load(), requests, slowest)
}

// An initiator that owes data delays a hand-over until ctx ends. Its session ends, and is not handed over. Its
// neighbour is, with its unit attentions and its RESERVE, and logins are refused meanwhile.
func TestHandOverOfNeighbour(t *testing.T) {
	tg := startTarget(t, targetOptions{luns: 2, quiet: true})
	neighbour := tg.login(t, initiator.Options{Target: targetName, Name: "iqn.2026-11.io.github.host:n"})
	do := func(c *initiator.Command, want byte, sense ...byte) {
		t.Helper()
		if err := neighbour.Do(c); err != nil || c.Status != want {
			t.Fatalf("status %#x, want %#x, %v", c.Status, want, err)
		}
		if len(sense) > 0 && (len(c.Sense) < 14 || !bytes.Equal(c.Sense[12:14], sense)) {
			t.Errorf("sense % x, want % x", c.Sense, sense)
		}
	}
	do(&initiator.Command{CDB: cdb.TestUnitReady}, 2, 0x29, 0x00)
	do(&initiator.Command{CDB: [16]byte{0x56}}, 0) // RESERVE(10)
	tg.inventories[0].SetPorts([]uint16{1, 2}, nil)
	do(&initiator.Command{CDB: cdb.TestUnitReady}, 2, 0x2a, 0x06)

	p := tg.rawLogin(t, initiator.Options{Name: "iqn.2026-11.io.github.host:silent"}, 0)
	next := tg.newSuccessor(t, iscsi.Options{Logger: slog.New(slog.DiscardHandler)})
	write := func(lun byte) {
		t.Helper()
		h := p.scsi(pdu.FlagW, 512, cdb.Write16(9, 1))
		h.SetLUN([8]byte{1: lun})
		p.send(source(1, 0), h, nil)
	}
	write(1)
	p.want(pdu.SCSIResponse) // the unit attention of LUN 1
	write(1)
	p.wantRead() // and no answer

	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	r := tg.node.Pause(ctx)
	list, err := r.Sessions()
	if err != nil || len(list) != 1 || list[0].Initiator != "iqn.2026-11.io.github.host:n" {
		t.Fatalf("%d sessions at rest, want the neighbour's: %v", len(list), err)
	}
	if _, err := initiator.Login(testContext(t), tg.addr, initiator.Options{Target: targetName}); err == nil {
		t.Error("a login in a hand-over")
	}
	if n, err := r.EndOthers(testContext(t)); n != 1 || err != nil {
		t.Errorf("%d sessions ended: %v", n, err)
	}
	// The neighbour sends what begins in the other node.
	data := bytes.Repeat([]byte{7}, 512)
	late := &initiator.Command{CDB: cdb.Write16(1, 1), Out: data, Immediate: 512}
	if err := neighbour.Start(late); err != nil {
		t.Fatal(err)
	}
	next.take(t, r)
	if err := late.Wait(); err != nil || late.Status != 0 {
		t.Errorf("a WRITE in the hand-over: status %#x, %v", late.Status, err)
	}
	if b := tg.stored(t, 1, 512); !bytes.Equal(b, data) {
		t.Error("its data is not stored")
	}
	do(&initiator.Command{LUN: 1, CDB: cdb.TestUnitReady}, 2, 0x29, 0x00)
	do(&initiator.Command{LUN: 1, CDB: cdb.TestUnitReady}, 2, 0x2a, 0x06)
	do(&initiator.Command{LUN: 1, CDB: cdb.TestUnitReady}, 0)
	if !bytes.Equal(tg.stored(t, 9, 512), make([]byte, 512)) {
		t.Error("the WRITE without data is stored")
	}
}
