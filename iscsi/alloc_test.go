package iscsi

import (
	"net"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A loopMover is a Datamover that feeds the core one command after the other
// and allocates nothing: a login, then whatever run asks for.
type loopMover struct {
	mu      sync.Mutex
	cond    sync.Cond
	login   []byte // data of the Login Request; nil when it has been sent
	cmd     [pdu.BHSLen]byte
	data    []byte
	credit  int // commands to be sent
	pending int // commands without response
	done    *Task
	closed  bool
	full    chan struct{}
	put     *Buffer
	ctl     *Task
	bad     int // responses without GOOD
}

func (m *loopMover) Transport() string                  { return "loop" }
func (m *loopMover) LocalAddr() net.Addr                { return &net.TCPAddr{} }
func (m *loopMover) RemoteAddr() net.Addr               { return &net.TCPAddr{} }
func (m *loopMover) RDMA() bool                         { return true }
func (m *loopMover) SetReceiveDeadline(time.Time) error { return nil }
func (m *loopMover) NewTask() any                       { return nil }
func (m *loopMover) Bind(*Task, uint32) error           { return nil }
func (m *loopMover) Unbind(*Task)                       {}
func (m *loopMover) MaxSendSegment() int                { return loginDataLength }
func (m *loopMover) EnterFullFeature(Params, int) error { return nil }
func (m *loopMover) CloseWrite() error                  { return nil }

func (m *loopMover) Receive(n *Notice) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for {
		switch {
		case m.done != nil:
			n.Task, m.done = m.done, nil
			return nil
		case m.closed:
			return net.ErrClosed
		case m.login != nil:
			n.BHS, n.Data, m.login = pdu.LoginRequest{Transit: true, CSG: 1, NSG: 3}.Append(nil), m.login, nil
			pdu.BHS(n.BHS).SetDataSegmentLength(len(n.Data))
			return nil
		case m.credit > 0 && m.pending == 0:
			m.credit--
			m.pending++
			n.BHS, n.Data = m.cmd[:], m.data
			return nil
		}
		m.cond.Wait()
	}
}

func (m *loopMover) PutData(_ *Task, _ uint32, _ []byte, b *Buffer) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.put = b
	return nil
}

func (m *loopMover) GetData(t *Task, _ uint32, _ []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.done = t
	m.cond.Broadcast()
	return nil
}

func (m *loopMover) SendControl(t *Task) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ctl = t
	return nil
}

func (m *loopMover) Flush() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.put != nil {
		m.put.Release()
		m.put = nil
	}
	t := m.ctl
	if t == nil {
		return
	}
	m.ctl = nil
	h := pdu.BHS(t.Header[:])
	if h.Opcode() == pdu.LoginResp {
		close(m.full)
	} else {
		if h.Status() != 0 {
			m.bad++
		}
		m.pending--
	}
	t.Sent()
	m.cond.Broadcast()
}

func (m *loopMover) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	m.cond.Broadcast()
	return nil
}

// run lets the core execute n commands one after the other.
func (m *loopMover) run(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for range n {
		m.credit++
		m.cond.Broadcast()
		for m.credit > 0 || m.pending > 0 {
			m.cond.Wait()
		}
		h := pdu.BHS(m.cmd[:])
		h.SetCmdSN(h.CmdSN() + 1)
		h.SetITT(h.ITT() + 1)
	}
}

// loopPaths are the paths of a command that must not allocate.
var loopPaths = []struct {
	name      string
	flags     byte
	edtl      uint32
	cdb       [16]byte
	immediate int
}{
	{"TEST UNIT READY", pdu.FlagF, 0, cdb.TestUnitReady, 0},
	{"READ 4 KiB", readF, 4096, cdb.Read10(0, 8), 0},
	{"WRITE 4 KiB immediate", writeF, 4096, cdb.Write10(0, 8), 4096},
	{"WRITE 4 KiB fetched", writeF, 4096, cdb.Write10(0, 8), 0},
	{"WRITE 64 KiB with 8 KiB immediate", writeF, 65536, cdb.Write10(0, 128), 8192},
	{"READ 4 MiB in pieces", readF, 4 << 20, cdb.Read10(0, 8192), 0},
}

// loop runs f with a mover that has logged in, for each path.
func loop(tb testing.TB, i int, f func(m *loopMover)) {
	n := newTestNode(tb)
	m := &loopMover{login: text(append(slices.Clone(names), linuxKeys...)...), full: make(chan struct{})}
	m.cond.L = &m.mu
	result := make(chan error, 1)
	go func() { result <- n.portal.Serve(m, ServeOptions{}) }()
	<-m.full
	p := loopPaths[i]
	h := pdu.BHS(m.cmd[:])
	m.mu.Lock()
	h.Reset(pdu.SCSICommand, p.flags)
	h.SetITT(1)
	h.SetEDTL(p.edtl)
	h.SetCDB(p.cdb[:])
	h.SetDataSegmentLength(p.immediate)
	m.data = make([]byte, p.immediate)
	m.mu.Unlock()
	m.run(20) // warm up; among them the unit attentions
	m.mu.Lock()
	m.bad = 0
	m.mu.Unlock()
	f(m)
	if m.bad > 0 {
		tb.Errorf("%d commands failed", m.bad)
	}
	m.Close()
	<-result
}

// No command allocates, from its PDU to its response.
func TestNoAllocations(t *testing.T) {
	if testkit.Race {
		t.Skip("the race detector makes sync.Pool forget at random")
	}
	for i, p := range loopPaths {
		t.Run(p.name, func(t *testing.T) {
			loop(t, i, func(m *loopMover) {
				defer debug.SetGCPercent(debug.SetGCPercent(-1)) // a collection empties the Buffer pool
				// On a busy machine the runtime allocates now and then for goroutines
				// that wait. What a command allocates is there every time.
				var n float64
				for range 3 {
					if n = testing.AllocsPerRun(200, func() { m.run(1) }); n == 0 {
						return
					}
				}
				t.Errorf("%v allocations per command", n)
			})
		})
	}
}

func BenchmarkCommand(b *testing.B) {
	for i, p := range loopPaths {
		b.Run(p.name, func(b *testing.B) {
			loop(b, i, func(m *loopMover) {
				b.ReportAllocs()
				b.SetBytes(int64(p.edtl))
				runtime.GC()
				b.ResetTimer()
				m.run(b.N)
				b.StopTimer()
			})
		})
	}
}
