package tests

import (
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/security/limits"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// neighbour starts a session that reads without a pause. stop fails the test if a READ failed.
func (tg *target) neighbour(t *testing.T) (stop func()) {
	t.Helper()
	s := tg.login(t, initiator.Options{ISID: [6]byte{1}})
	read := func() error {
		c := &initiator.Command{CDB: cdb.Read16(0, 8), In: make([]byte, 4096)}
		if err := s.Do(c); err != nil || c.Status != 0 {
			return fmt.Errorf("READ: status %#x, sense % x, error %v", c.Status, c.Sense, err)
		}
		return nil
	}
	read() // may meet a unit attention
	quit, done := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			err := read()
			select {
			case <-quit:
				done <- err
				return
			default:
				if err != nil {
					done <- err
					return
				}
			}
		}
	}()
	return func() {
		t.Helper()
		close(quit)
		if err := <-done; err != nil {
			t.Errorf("neighbour: %v", err)
		}
	}
}

// A Read Response that does not come, or not as a whole, ends the connection of its initiator and no
// other. Nothing of it is written, and its memory is free.
func TestReadResponseThatDoesNotCome(t *testing.T) {
	for _, part := range []int{0, 1024, -1} { // -1: nothing comes, and the initiator aborts the tasks
		t.Run(fmt.Sprintf("%d bytes come", part), func(t *testing.T) {
			bounds := limits.New()
			bounds.DataTimeout.SetMax(int64(500 * time.Millisecond))
			tg := startTarget(t, targetOptions{node: iscsi.Options{Shared: bounds}})
			stop := tg.neighbour(t)
			p := tg.rawLogin(t, initiator.Options{}, 0)
			hs, reads := p.held(3)
			if part > 0 {
				p.write(fpdu(tagged(wire.OpReadResponse, false, reads[0].SinkSTag, reads[0].SinkTO, random(part))))
			}
			if part < 0 {
				// The answer to ABORT TASK waits for the data, but not for ever.
				p.tmf(pdu.AbortTask, 0, hs[0].ITT(), hs[0].CmdSN())
				p.tmf(pdu.AbortTaskSet, 0, pdu.ReservedTag, 0)
			}
			began := time.Now()
			p.wantEnd()
			if d := time.Since(began); d < 400*time.Millisecond {
				t.Errorf("ended after %v", d)
			}
			testkit.Eventually(t, "no Buffers in use but the neighbour's", func() bool { return tg.node.Stats().BuffersOut <= 1 })
			tg.log.wantLine(`"session ended"`, fmt.Sprintf("RDMA Read Response for the SCSI Command with ITT %#x", hs[0].ITT()),
				"to LUN 0 has not come, 4096 bytes are missing: limits.data_timeout is 500ms")
			tg.untouched(t, 3)
			stop()
		})
	}
}

// An initiator that asks for data over RDMA, pings, and takes nothing, loses its connection.
func TestAnswersThatAreNotTaken(t *testing.T) {
	bounds := limits.New()
	bounds.SendTimeout.SetMax(int64(time.Second))
	tg := startTarget(t, targetOptions{node: iscsi.Options{Shared: bounds}})
	stop := tg.neighbour(t)
	p := tg.rawLogin(t, initiator.Options{}, 0)
	if err := p.nc.(*net.TCPConn).SetReadBuffer(64 << 10); err != nil {
		t.Fatal(err)
	}
	for range 24 {
		p.send(sink(7, 0), p.scsi(pdu.FlagR, 1<<20, cdb.Read16(0, 2048)), nil)
	}
	ended := func() bool { return len(tg.log.Lines(`msg="session ended"`)) > 0 }
	for began := time.Now(); !ended() && time.Since(began) < testkit.Patience; time.Sleep(10 * time.Millisecond) {
		h := p.Request(pdu.NOPOut, pdu.FlagF, true)
		h.SetITT(pdu.ReservedTag)
		h.SetTTT(pdu.ReservedTag)
		p.nc.Write(p.message(pduBytes(iser.Header{}, h, nil))) // fails at the end, which the log shows
	}
	tg.log.wantLine(`"session ended"`, "initiator takes no answers", "limits.send_timeout is 1s")
	testkit.Eventually(t, "no Buffers in use but the neighbour's", func() bool { return tg.node.Stats().BuffersOut <= 1 })
	stop()
}
