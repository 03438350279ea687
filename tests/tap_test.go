package tests

import (
	"bytes"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A tap sees the operational primitives that pass between the iSCSI core and an
// iser.Conn (RFC 7145, section 3).
type tap struct {
	*iser.Conn
	mu    sync.Mutex
	calls map[string]int
	pdus  []string // BHS, AHS and data of what Receive has returned
	gets  map[*iscsi.Task]int
	wrong []string
}

func (tp *tap) on(c *iser.Conn) iscsi.Datamover {
	tp.Conn, tp.calls, tp.gets = c, map[string]int{}, map[*iscsi.Task]int{}
	return tp
}

func (tp *tap) note(call string, ok bool, format string, args ...any) {
	tp.mu.Lock()
	defer tp.mu.Unlock()
	tp.calls[call]++
	if !ok {
		tp.wrong = append(tp.wrong, fmt.Sprintf(call+": "+format, args...))
	}
}

func (tp *tap) EnterFullFeature(p iscsi.Params, tasks int) error {
	tp.note("Notice_Key_Values", p.RDMAExtensions, "%+v", p)
	return tp.Conn.EnterFullFeature(p, tasks)
}

func (tp *tap) Bind(t *iscsi.Task, unsolicited uint32) error {
	tp.note("Bind", true, "")
	return tp.Conn.Bind(t, unsolicited)
}

func (tp *tap) Unbind(t *iscsi.Task) {
	tp.note("Deallocate_Task_Resources", true, "")
	tp.Conn.Unbind(t)
}

func (tp *tap) SendControl(t *iscsi.Task) error {
	tp.note("Send_Control", true, "")
	return tp.Conn.SendControl(t)
}

func (tp *tap) PutData(t *iscsi.Task, off uint32, data []byte, b *iscsi.Buffer) error {
	tp.note("Put_Data", len(data) > 0, "no data")
	return tp.Conn.PutData(t, off, data, b)
}

func (tp *tap) GetData(t *iscsi.Task, off uint32, data []byte) error {
	tp.mu.Lock()
	tp.gets[t]++
	outstanding := tp.gets[t]
	tp.mu.Unlock()
	tp.note("Get_Data", outstanding == 1, "%d outstanding", outstanding)
	return tp.Conn.GetData(t, off, data)
}

func (tp *tap) Close() error {
	tp.note("Connection_Terminate", true, "")
	return tp.Conn.Close()
}

func (tp *tap) Receive(n *iscsi.Notice) error {
	err := tp.Conn.Receive(n)
	switch {
	case err != nil:
		tp.note("Connection_Terminate_Notify", true, "")
	case n.Task != nil:
		tp.mu.Lock()
		tp.gets[n.Task]--
		outstanding := tp.gets[n.Task]
		tp.mu.Unlock()
		tp.note("Data_Completion_Notify", outstanding == 0 && n.Err == nil &&
			n.BHS == nil, "%d outstanding, %v", outstanding, n.Err)
	default:
		tp.mu.Lock()
		tp.pdus = append(tp.pdus, fmt.Sprintf("%x %x %x", n.BHS, n.AHS, n.Data))
		tp.mu.Unlock()
		tp.note("Control_Notify", n.Reject == 0, "ISER-10.1.4.2-1: a digest error")
	}
	return err
}

// The primitives of RFC 7145, sections 3.1 and 3.2, in the form that Datamover
// gives them, and how often they are used. GetData has a Data_Completion_Notify
// each, tied to its task, of which one Get_Data can be outstanding; PutData has
// none, and Data_ACK_Notify, for which nobody asks, does not exist.
func TestPrimitives(t *testing.T) {
	tp := &tap{}
	tg := startTarget(t, targetOptions{tap: tp, node: iscsi.Options{MaxTransferPiece: 64 << 10}})
	s := tg.login(t, initiator.Options{})
	const pieces, size = 8, 8 * 64 << 10
	want := random(size)
	do(t, s, &initiator.Command{}) // takes the unit attention
	do(t, s, &initiator.Command{CDB: cdb.Write16(0, size/512), Out: want})
	r := &initiator.Command{CDB: cdb.Read16(0, size/512), In: make([]byte, size)}
	do(t, s, r)
	if !bytes.Equal(r.In, want) {
		t.Error("other bytes are read")
	}
	// EDTL is too small: no more than that
	bad := &initiator.Command{CDB: cdb.Read16(0, size/512), In: make([]byte, 512), EDTL: 512}
	if err := s.Do(bad); err != nil {
		t.Error(err)
	}
	if err := s.Logout(testContext(t)); err != nil {
		t.Error(err)
	}
	tg.waitIdle(t)
	tp.mu.Lock()
	defer tp.mu.Unlock()
	for _, tt := range []struct {
		id, call string
		min, max int
	}{
		{"ISER-3.1-1 ISER-7.3-1", "Send_Control", 7, 8}, // Login, 4 or 5 SCSI Responses, Logout
		{"ISER-3.1-1", "Put_Data", pieces + 1, pieces + 1},
		{"ISER-3.1-1", "Get_Data", pieces, pieces},
		{"ISER-3.2.2-1 ISER-7.1-2 ISER-7.1-3 ISER-7.3.5-8 ISER-7.3.6-11", "Data_Completion_Notify", pieces, pieces},
		{"ISER-3.1-1", "Bind", 3, 5},
		{"ISER-3.1-1 ISER-3.1.8-1", "Notice_Key_Values", 1, 1},
		{"ISER-3.1-1", "Connection_Terminate", 1, 3},
		{"ISER-3.2-1", "Control_Notify", 7, 8},
		{"ISER-3.2-1", "Connection_Terminate_Notify", 1, 10},
	} {
		if n := tp.calls[tt.call]; n < tt.min || n > tt.max {
			t.Errorf("%s: %s %d times, %d to %d are due", tt.id, tt.call, n, tt.min, tt.max)
		}
	}
	for _, w := range tp.wrong {
		t.Error(w)
	}
}

// Every PDU is passed up, in order, with exactly what came with it.
func TestEveryPDUIsPassedUp(t *testing.T) {
	tp := &tap{}
	tg := startTarget(t, targetOptions{tap: tp})
	p := tg.rawLogin(t, initiator.Options{}, 0)
	p.ping()
	tp.mu.Lock()
	tp.pdus = nil
	tp.mu.Unlock()
	var sent []string
	var octets []byte
	for i := range 40 {
		h := p.Request(pdu.NOPOut, pdu.FlagF, i%2 == 0)
		h.SetTTT(pdu.ReservedTag)
		var ahs []byte
		if i%3 == 0 {
			ahs = bytes.Repeat([]byte{0, 5, 1, byte(i), 0, 0, 0, 0}, 1+i%4)
			h.SetTotalAHSLength(len(ahs))
		}
		data := random(i * 37)
		h.SetDataSegmentLength(len(data))
		b := make([]byte, iser.HeaderLen)
		iser.Header{}.Put(b)
		pad := make([]byte, min(i%4, pdu.Padded(len(data))-len(data))) // with all, some or no padding
		octets = append(octets, p.message(slices.Concat(b, h, ahs, data, pad))...)
		sent = append(sent, fmt.Sprintf("%x %x %x", []byte(h), ahs, data))
	}
	p.write(octets) // ISER-10.1.4.2-1: without digests
	for range sent {
		p.want(pdu.NOPIn)
	}
	tp.mu.Lock()
	if !slices.Equal(tp.pdus, sent) { // ISER-7.2-2, ISER-3.2.1-1, ISER-4.1-6
		t.Errorf("%d PDUs of %d, or others", len(tp.pdus), len(sent))
	}
	for _, w := range tp.wrong {
		t.Error(w)
	}
	tp.mu.Unlock()
	p.logout()
}
