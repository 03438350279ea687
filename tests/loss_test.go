package tests

import (
	"bytes"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// The same initiator port logs in again while its commands are under way: the
// old session ends with all that it was about to do.
func TestReinstatement(t *testing.T) {
	t.Run("in the data phase", func(t *testing.T) {
		tg := startTarget(t, targetOptions{})
		o := initiator.Options{}
		o.RDMA.IRD = 4
		p := tg.rawLogin(t, o, 0)
		var reads []wire.ReadRequest
		for i := range 32 {
			p.writeCommand(uint64(8*i), 8)
		}
		for range 4 {
			reads = append(reads, p.wantRead())
		}
		s := tg.login(t, initiator.Options{})
		if st := tg.node.Stats(); st.Sessions != 1 || st.SessionsFinished != 1 {
			t.Errorf("%+v", st)
		}
		tg.log.wantLine(`"session ended"`, "replaced by a new login")
		p.nc.Write(fpdu(tagged(wire.OpReadResponse, true, reads[0].SinkSTag, 0, random(4096)))) // may fail
		p.wantEnd()
		tg.untouched(t, 32)
		want := random(4096)
		do(t, s, &initiator.Command{CDB: cdb.Write16(0, 8), Out: want})
		if !bytes.Equal(tg.stored(t, 0, 4096), want) {
			t.Error("the new session cannot write")
		}
	})
	t.Run("in the backend", func(t *testing.T) {
		tg := startTarget(t, targetOptions{})
		p := tg.rawLogin(t, initiator.Options{}, 0)
		gate := tg.store.Shut()
		defer gate.Open()
		const n = 32
		for i := range n {
			block := cdb.Read16(uint64(8*i), 8)
			p.send(sink(wire.STag(i+1), 0), p.scsi(pdu.FlagR, 4096, block), nil)
		}
		for range n {
			<-gate.Entered
		}
		second := make(chan *raw)
		go func() {
			q := tg.dial(t, initiator.Options{Target: targetName})
			bhs, data := q.o.LoginRequest()
			q.nc.Write(q.message(pduBytes(sink(0, 0), bhs, data)))
			second <- q
		}()
		q := <-second
		p.wantEnd() // without a response
		if st := tg.node.Stats(); st.LoginsAccepted != 1 {
			t.Errorf("the new session begins while tasks of the old one run: %+v", st)
		}
		gate.Open()
		if rsp := pdu.ParseLoginResponse(q.want(pdu.LoginResp).bhs); rsp.Status != 0 {
			t.Errorf("%+v", rsp)
		}
		q.nc.Close()
	})
}

// A connection that is lost, in whatever way, with 32 commands under way leaves
// nothing behind: not a task, buffer, STag or goroutine.
func TestConnectionLoss(t *testing.T) {
	const n = 32
	for _, tt := range []struct {
		id     string
		end    func(p *raw, r wire.ReadRequest)
		reason string
	}{
		{"ISER-10.1.1-1 ISER-10.1.1.2-1 ISER-4.2-1 ISER-5.2.3.2-3 RST",
			func(p *raw, _ wire.ReadRequest) { p.reset() }, "connection failed"},
		{"ISER-5.2.3.2-1 ISER-5.2.3.2-3 ISER-3.2.4-1 ISER-5.2.3.2-2 FIN",
			func(p *raw, _ wire.ReadRequest) { p.nc.Close() }, "initiator closed the connection"},
		{"half a FIN", func(p *raw, _ wire.ReadRequest) { p.nc.(*net.TCPConn).CloseWrite() },
			"initiator closed the connection"},
		{"ISER-7.1-4 ISER-3.1.7-1 inside a Read Response", func(p *raw, r wire.ReadRequest) {
			p.write(fpdu(tagged(wire.OpReadResponse, true, r.SinkSTag, 0, random(64<<10)))[:33000])
			p.nc.Close()
		}, "connection failed"},
		{"ISER-10.1.2.1-1 ISER-10.1.2.1-2 bad CRC", func(p *raw, r wire.ReadRequest) {
			b := fpdu(tagged(wire.OpReadResponse, true, r.SinkSTag, 0, random(64<<10)))
			b[len(b)-1] ^= 1
			p.write(b)
			p.wantTerminate(wire.ReasonCRC)
		}, "CRC mismatch"},
		{"ISER-10.1.3.3-3 iSER format error", func(p *raw, _ wire.ReadRequest) {
			p.sendRaw(make([]byte, 76))
			p.wantTerminate(wire.ReasonOperation)
		}, "iSER message with opcode 0"},
	} {
		t.Run("ISER-5.2.3.1-2 "+tt.id, func(t *testing.T) {
			tg := startTarget(t, targetOptions{})
			o := initiator.Options{}
			o.RDMA.IRD = 4
			p := tg.rawLogin(t, o, 0)
			var first wire.ReadRequest
			for i := range n {
				p.writeCommand(uint64(128*i), 128)
				if i == 0 {
					first = p.wantRead()
				}
			}
			for range 3 {
				p.wantRead()
			}
			testkit.Eventually(t, "all commands under way", func() bool { return tg.node.Stats().BuffersOut == n })
			tt.end(p, first)
			tg.log.wantLine(`"session ended"`, tt.reason)
			tg.waitIdle(t)
			if !bytes.Equal(tg.stored(t, 0, n*64<<10), make([]byte, n*64<<10)) {
				t.Error("data that did not come is stored")
			}
		})
	}
	t.Run("RST with READs in the backend", func(t *testing.T) {
		tg := startTarget(t, targetOptions{})
		streams := rdma.ReadStats().Conns
		p := tg.rawLogin(t, initiator.Options{}, 0)
		gate := tg.store.Shut()
		defer gate.Open()
		for i := range n {
			block := cdb.Read16(0, 8)
			p.send(sink(wire.STag(i+1), 0), p.scsi(pdu.FlagR, 4096, block), nil)
		}
		for range n {
			<-gate.Entered
		}
		p.reset()
		testkit.Eventually(t, "the end of the stream", func() bool { return rdma.ReadStats().Conns == streams })
		if st := tg.node.Stats(); st.Sessions != 1 || st.TasksInFlight < n {
			t.Errorf("the session ends before its tasks: %+v", st)
		}
		gate.Open()
		tg.log.wantLine(`"session ended"`, "connection failed")
		tg.waitIdle(t)
	})
	t.Run("RST with answers that nobody reads", func(t *testing.T) {
		tg := startTarget(t, targetOptions{node: iscsi.Options{ConnectionMemory: 4 << 20}})
		p := tg.rawLogin(t, initiator.Options{}, 0)
		for i := range n {
			block := cdb.Read16(0, 2048)
			p.send(sink(wire.STag(i+1), 0), p.scsi(pdu.FlagR, 1<<20, block), nil)
		}
		testkit.Eventually(t, "buffers in use", func() bool { return tg.node.Stats().BufferOctets >= 4<<20 })
		p.reset()
		tg.log.wantLine(`"session ended"`) // whether reading or writing sees it first
		tg.waitIdle(t)
	})
}

// Sessions come and go, with and without a farewell, while others work.
func TestChurn(t *testing.T) {
	tg := startTarget(t, targetOptions{})
	s := tg.login(t, initiator.Options{ISID: [6]byte{1}})
	do(t, s, &initiator.Command{})
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		w := &initiator.Command{CDB: cdb.Write16(8192, 512), Out: random(256 << 10)}
		r := &initiator.Command{CDB: cdb.Read16(8192, 512), In: make([]byte, 256<<10)}
		for {
			select {
			case <-stop:
				return
			default:
			}
			if s.Do(w) != nil || s.Do(r) != nil || w.Status != 0 || r.Status != 0 || !bytes.Equal(r.In, w.Out) {
				t.Error("the session that stays suffers")
				return
			}
		}
	}()
	for i := range 30 {
		p := tg.rawLogin(t, initiator.Options{ISID: [6]byte{2}}, 0)
		for j := range 8 {
			p.writeCommand(uint64(128*j), 128)
		}
		p.wantRead()
		switch i % 3 {
		case 0:
			p.reset()
		case 1:
			p.nc.Close()
		} // else the next login replaces the session
	}
	close(stop)
	wg.Wait()
}

// The mover's limits of time: a peer that says nothing during login.
func TestLoginTimeout(t *testing.T) {
	tg := startTarget(t, targetOptions{node: iscsi.Options{LoginTimeout: 20 * time.Millisecond}})
	p := tg.dial(t, initiator.Options{Target: targetName})
	p.wantEnd()
	tg.log.wantLine("login", "outcome=refused", `stage="before login"`, "timeout")
}

// The initiator's own engine sees the end, too.
func TestTargetCloses(t *testing.T) {
	t.Run("ISER-4.1-10", func(t *testing.T) {
		tg := startTarget(t, targetOptions{node: iscsi.Options{LogoutWait: 200 * time.Millisecond}})
		s := tg.login(t, initiator.Options{RDMA: rdma.Options{IRD: 4}})
		do(t, s, &initiator.Command{})
		if err := tg.node.Shutdown(testContext(t)); err != nil {
			t.Error(err)
		}
		if s.Err() == nil {
			t.Error("no end")
		}
	})
}
