package iscsi

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// A sentPDU is what the target has sent.
type sentPDU struct {
	h    pdu.BHS
	data []byte
}

// A fakeMover is a Datamover without a network: the test is its peer. Data
// moves between buffers of the target and the initiator's memory, which is
// found by task tag.
type fakeMover struct {
	rdma    bool
	maxSend int

	mu        sync.Mutex
	cond      sync.Cond
	in        []Notice
	host      byte     // says which address the initiator has
	queue     []func() // what Flush does
	sent      []sentPDU
	gets      []*Task // GetDatas that the test holds back
	asked     []*Task // of these, those that have reached the initiator
	holdGets  bool
	holdFlush bool // the network takes nothing
	eof       bool
	finSent   bool
	closed    bool
	deadline  time.Time
	timer     *time.Timer
	source    map[uint32][]byte // by ITT: what a write gets its data from
	sink      map[uint32][]byte // by ITT: what a read puts its data into
	bound     map[*Task]uint32  // ITT
	unsol     map[uint32]uint32 // by ITT: unsolicited, as told to Bind
	puts      [][2]int          // offset and length of each PutData that has left
	getRanges [][2]int
	flushes   int
	flushing  bool
	slots     int
	full      int          // tasks of EnterFullFeature
	progress  Progress     // what Detach returns
	resumed   []Resumption // what Rebind was told
	bindErr   error
	enterErr  error
	violation []string
	data      map[*Task][]byte
	dataOff   map[*Task]uint32
}

func newFakeMover() *fakeMover {
	m := &fakeMover{rdma: true, maxSend: loginDataLength,
		source: map[uint32][]byte{}, sink: map[uint32][]byte{}, bound: map[*Task]uint32{}, unsol: map[uint32]uint32{},
		data: map[*Task][]byte{}, dataOff: map[*Task]uint32{}}
	m.cond.L = &m.mu
	return m
}

func (m *fakeMover) Transport() string { return "fake" }
func (m *fakeMover) LocalAddr() net.Addr {
	return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 3260}
}
func (m *fakeMover) RemoteAddr() net.Addr {
	return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 2+m.host), Port: 50000}
}
func (m *fakeMover) RDMA() bool { return m.rdma }
func (m *fakeMover) MaxSendSegment() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.maxSend
}

func (m *fakeMover) Receive(n *Notice) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for {
		switch {
		case len(m.in) > 0 && (!m.closed || m.in[0].Task != nil):
			*n = m.in[0]
			m.in = m.in[1:]
			return nil
		case m.closed && len(m.in) > 0:
			m.in = m.in[1:]
		case m.closed:
			return net.ErrClosed
		case m.eof:
			return io.EOF
		case !m.deadline.IsZero() && !time.Now().Before(m.deadline):
			return os.ErrDeadlineExceeded
		default:
			m.cond.Wait()
		}
	}
}

func (m *fakeMover) SetReceiveDeadline(t time.Time) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.deadline = t
	if m.timer != nil {
		m.timer.Stop()
		m.timer = nil
	}
	if !t.IsZero() {
		m.timer = time.AfterFunc(time.Until(t), func() {
			m.mu.Lock() // or Receive, having seen that it is not yet time, would not hear
			defer m.mu.Unlock()
			m.cond.Broadcast()
		})
	}
	return nil
}

func (m *fakeMover) NewTask() any {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.slots++
	return m
}

func (m *fakeMover) Bind(t *Task, unsolicited uint32) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.bindErr != nil {
		return m.bindErr
	}
	if _, ok := m.bound[t]; ok {
		m.violation = append(m.violation, "Bind of a bound task")
	}
	itt := t.Request().ITT()
	m.bound[t], m.unsol[itt] = itt, unsolicited
	return nil
}

func (m *fakeMover) Unbind(t *Task) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.bound[t]; !ok {
		m.violation = append(m.violation, "Unbind of a task that is not bound")
	}
	if m.data[t] != nil {
		m.violation = append(m.violation, "Unbind with a GetData outstanding")
	}
	delete(m.bound, t)
}

func (m *fakeMover) Detach(t *Task) Progress {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.data[t] != nil {
		m.violation = append(m.violation, "Detach with a GetData outstanding")
	}
	delete(m.bound, t)
	return m.progress
}

func (m *fakeMover) Advertised(t *Task) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bound[t] = t.Request().ITT()
}

func (m *fakeMover) Rebind(t, by *Task, at Resumption) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.bindErr != nil {
		return m.bindErr
	}
	if _, ok := m.bound[by]; !ok && !at.Done {
		m.violation = append(m.violation, "Rebind without Advertised")
	}
	m.bound[t] = t.Request().ITT()
	m.resumed = append(m.resumed, at)
	return nil
}

func (m *fakeMover) PutData(t *Task, off uint32, data []byte, b *Buffer) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return net.ErrClosed
	}
	itt, ok := m.bound[t]
	if !ok {
		m.violation = append(m.violation, "PutData of a task that is not bound")
	}
	m.queue = append(m.queue, func() {
		if !m.closed {
			sink := m.sink[itt]
			if int(off)+len(data) > len(sink) {
				m.violation = append(m.violation, "PutData beyond the sink")
			} else {
				copy(sink[off:], data)
			}
			m.puts = append(m.puts, [2]int{int(off), len(data)})
		}
		b.Release()
	})
	return nil
}

func (m *fakeMover) GetData(t *Task, off uint32, data []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return net.ErrClosed
	}
	if _, ok := m.bound[t]; !ok {
		m.violation = append(m.violation, "GetData of a task that is not bound")
	}
	if m.data[t] != nil {
		m.violation = append(m.violation, "second GetData of a task")
	}
	m.data[t], m.dataOff[t] = data, off
	m.gets = append(m.gets, t)
	m.queue = append(m.queue, func() {
		m.getRanges = append(m.getRanges, [2]int{int(off), len(data)})
		if m.holdGets {
			m.asked = append(m.asked, t)
		} else {
			m.endGet(t, nil)
		}
	})
	return nil
}

// endGet moves the data of t's GetData and notifies its end.
func (m *fakeMover) endGet(t *Task, err error) {
	i := slices.Index(m.gets, t)
	if i < 0 {
		return // notified when the connection was closed
	}
	m.gets = slices.Delete(m.gets, i, i+1)
	if err == nil {
		src := m.source[m.bound[t]]
		if off := int(m.dataOff[t]); off+len(m.data[t]) > len(src) {
			m.violation = append(m.violation,
				fmt.Sprintf("GetData beyond the source: %d+%d of %d, bound %x", off, len(m.data[t]), len(src),
					m.bound[t]))
		} else {
			copy(m.data[t], src[off:])
		}
	}
	delete(m.data, t)
	m.in = append(m.in, Notice{Task: t, Err: err})
	m.cond.Broadcast()
}

// releaseGets ends the GetDatas that were held back, and holds back no more.
func (m *fakeMover) releaseGets() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.holdGets, m.asked = false, nil
	for len(m.gets) > 0 {
		m.endGet(m.gets[0], nil)
	}
}

func (m *fakeMover) SendControl(t *Task) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return net.ErrClosed
	}
	if t.Mover != any(m) {
		m.violation = append(m.violation, "a slot of another Datamover")
	}
	h := pdu.BHS(t.Header[:])
	limit := m.maxSend
	if h.Opcode() == pdu.LoginResp { // the last one follows EnterFullFeature
		limit = loginDataLength - 1
	}
	if h.DataSegmentLength() != len(t.Segment) || len(t.Segment) > limit {
		m.violation = append(m.violation, "data segment of "+h.Opcode().String()+" is too long")
	}
	if h.Opcode() == pdu.SCSIResponse {
		if m.data[t] != nil {
			m.violation = append(m.violation, "SCSI Response with a GetData outstanding")
		}
		maps.DeleteFunc(m.bound, func(_ *Task, itt uint32) bool { return itt == h.ITT() }) // t or its predecessor
	}
	m.queue = append(m.queue, func() {
		if !m.closed {
			m.sent = append(m.sent, sentPDU{bytes.Clone(t.Header[:]), bytes.Clone(t.Segment)})
			m.cond.Broadcast()
		}
		t.Sent()
	})
	return nil
}

func (m *fakeMover) Flush() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.flushes++
	if m.flushing { // the one that flushes does it for all
		return
	}
	m.flushing = true
	for m.holdFlush && !m.closed {
		m.cond.Wait()
	}
	m.drain()
	m.flushing = false
}

// hold sets whether the initiator keeps back its data, and whether the network takes nothing.
func (m *fakeMover) hold(gets, flush bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.holdGets, m.holdFlush = gets, flush
	if !gets {
		for _, t := range m.asked {
			m.endGet(t, nil)
		}
		m.asked = nil
	}
	m.cond.Broadcast()
}

// sendOne lets the network take one thing although it takes nothing. It tells
// whether there was one.
func (m *fakeMover) sendOne() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.queue) == 0 {
		return false
	}
	f := m.queue[0]
	m.queue = m.queue[1:]
	f()
	return true
}

func (m *fakeMover) drain() {
	for len(m.queue) > 0 {
		f := m.queue[0]
		m.queue = m.queue[1:]
		f()
	}
}

func (m *fakeMover) EnterFullFeature(p Params, tasks int) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.enterErr != nil {
		return m.enterErr
	}
	m.full = tasks
	if m.rdma && !p.Discovery {
		m.maxSend = 128
	}
	return nil
}

func (m *fakeMover) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil
	}
	m.closed = true
	if m.timer != nil {
		m.timer.Stop()
	}
	for len(m.gets) > 0 {
		m.endGet(m.gets[0], net.ErrClosed)
	}
	m.drain()
	m.cond.Broadcast()
	return nil
}

func (m *fakeMover) isClosed() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.closed
}

func (m *fakeMover) CloseWrite() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.rdma {
		m.violation = append(m.violation, "CloseWrite with RDMA")
	}
	m.finSent = true
	return nil
}

// getting returns how many GetDatas are outstanding.
func (m *fakeMover) getting() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.gets)
}

var _ Datamover = (*fakeMover)(nil)

// waiting returns how many PDUs the test has not taken.
func (m *fakeMover) waiting() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.sent)
}
