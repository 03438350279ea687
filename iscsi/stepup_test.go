package iscsi

import (
	"errors"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
	"github.com/iser-target/iser-target/tests/testkit/header"
)

// A streamMover is a fakeMover without RDMA that can be upgraded.
type streamMover struct {
	*fakeMover
	upgrade func() (net.Conn, []byte, error)
}

func (m *streamMover) Upgrade() (net.Conn, []byte, error) { return m.upgrade() }

// A stepUp is a connection whose login is on the byte stream, and what the core
// calls on the way to RDMA mode.
type stepUp struct {
	*testConn
	stream, rdma              *fakeMover
	allocate, upgrade, enable error         // what these calls return
	upgrading                 func()        // called by Upgrade, unless nil
	entered                   chan struct{} // EnableDatamover has been called
	leave                     chan struct{} // it may return
	calls                     []string      // with how many PDUs had left before
	timeout                   time.Duration // of EnableDatamover
}

func newStepUp(t *testing.T, change ...func(*stepUp)) *stepUp {
	n := newTestNode(t, func(o *Options) { o.LoginTimeout = time.Minute })
	s := &stepUp{stream: newFakeMover(), rdma: newFakeMover(), entered: make(chan struct{}), leave: make(chan struct{})}
	s.stream.rdma = false
	for _, f := range change {
		f(s)
	}
	s.testConn = &testConn{testNode: n, m: s.stream, isid: [6]byte{0, 2, 0x3d, 0, 0, 1},
		Numbers: header.Numbers{CmdSN: 1, ITT: 0x100}, result: make(chan error, 1)}
	note := func(call string) {
		s.stream.mu.Lock()
		defer s.stream.mu.Unlock()
		s.calls = append(s.calls, call+strings.Repeat(" after a PDU", len(s.stream.sent)))
	}
	n.portal.StepUp = func(p Params, tasks int) (EnableDatamover, error) {
		note("allocate")
		if !p.RDMAExtensions || p.HeaderDigest || p.DataDigest || tasks == 0 {
			t.Errorf("%+v, %d tasks", p, tasks)
		}
		return func(_ net.Conn, prefix []byte, timeout time.Duration) (Datamover, error) {
			note("enable with " + string(prefix))
			s.timeout = timeout
			close(s.entered)
			<-s.leave
			if s.enable != nil {
				return nil, s.enable
			}
			return s.rdma, nil
		}, s.allocate
	}
	m := &streamMover{s.stream, func() (net.Conn, []byte, error) {
		note("upgrade")
		if s.upgrading != nil {
			s.upgrading()
		}
		return nil, []byte("prefix"), s.upgrade
	}}
	go func() { s.result <- n.portal.Serve(m, ServeOptions{}) }()
	t.Cleanup(func() { s.stream.Close(); s.rdma.Close() })
	s.writeLogin(s.loginRequest(true, 1, 3), append(slices.Clone(names), linuxKeys...)...)
	return s
}

// The steps of RFC 7145, section 5.1.2, in their order.
func TestStepUp(t *testing.T) {
	for _, tt := range []struct {
		id                        string
		allocate, upgrade, enable error
		status                    pdu.LoginStatus
	}{
		{id: "ISER-10.1.3.1-2 ISER-10.1.3.1-3 no resources", allocate: errors.New("no room"),
			status: pdu.LoginOutOfResources},
		{id: "the final Login Response has not left", upgrade: errors.New("no room")},
		{id: "ISER-10.1.1.1-2 no MPA", enable: errors.New("no room")},
	} {
		bubble(t, tt.id, func(t *testing.T) {
			s := newStepUp(t, func(s *stepUp) { s.allocate, s.upgrade, s.enable = tt.allocate, tt.upgrade, tt.enable })
			close(s.leave)
			s.wantLogin(tt.status)
			s.close()
			if err := s.wait(); err == nil || !strings.Contains(err.Error(), "no room") {
				t.Error(err)
			}
			if !s.stream.closed {
				t.Error("the connection is not closed")
			}
		})
	}
	for _, enable := range []error{nil, net.ErrClosed} {
		bubble(t, "ended by another login before RDMA mode", func(t *testing.T) {
			s := newStepUp(t, func(s *stepUp) { s.enable = enable })
			<-s.entered
			s.wantLogin(pdu.LoginSuccess)
			tc := s.connect()
			tc.writeLogin(tc.loginRequest(true, 1, 3), append(slices.Clone(names), linuxKeys...)...)
			synctest.Wait()
			if !s.stream.isClosed() {
				t.Error("the other login has not closed the connection")
			}
			close(s.leave)
			if err := s.wait(); !errors.Is(err, errReinstated) {
				t.Error(err)
			}
			if enable == nil && !s.rdma.closed {
				t.Error("the new Datamover is not closed")
			}
			tc.loggedIn()
			tc.close()
			tc.wait()
		})
	}
}

// The target allocates resources (ISER-5.1.2-1), sends its last Login Response, and enables the
// new Datamover (ISER-5.1.2-7, ISER-3.1.6-1).
func TestStepUpChangesTheDatamoverAfterLogin(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		s := newStepUp(t)
		<-s.entered
		want := []string{"allocate", "upgrade after a PDU", "enable with prefix after a PDU"}
		if !slices.Equal(s.calls, want) {
			t.Errorf("calls %q, want %q", s.calls, want)
		}
		if s.timeout <= time.Minute-10*time.Second || s.timeout > time.Minute {
			t.Errorf("%v are left of LoginTimeout", s.timeout)
		}
		_, answers := s.wantLogin(pdu.LoginSuccess)
		if !slices.Contains(answers, "RDMAExtensions=Yes") ||
			slices.ContainsFunc(answers, func(a string) bool {
				return strings.HasPrefix(a,
					"MaxRecvDataSegmentLength")
			}) {
			t.Errorf("ISER-6.2-1: answers %q", answers)
		}
		// Others can ask for PDUs now: there is no Datamover for them yet.
		s.Node.mu.Lock()
		var c *conn
		for c = range s.Node.conns {
		}
		s.Node.mu.Unlock()
		c.sendNOPIn(true)
		if c.askLogout(time.Second) {
			t.Error("asked for a logout before the full feature phase")
		}
		s.wantNothing()
		close(s.leave)
		after := *s.testConn
		after.m = s.rdma
		for range 2 { // unit attentions
			after.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
			after.want(pdu.SCSIResponse)
		}
		s.stream.mu.Lock()
		if s.stream.closed || len(s.stream.sent) > 0 {
			t.Error("the Datamover of login is still in use")
		}
		s.stream.mu.Unlock()
		if s.rdma.full != 0 { // EnableDatamover has done that
			t.Error("EnterFullFeature after EnableDatamover")
		}
		after.close()
		if err := after.wait(); !errors.Is(err, errPeerClosed) {
			t.Error(err)
		}
	})
}

// ISER-6.3-2, ISER-3.3-2: a portal without iSER answers RDMAExtensions=No.
func TestStepUpIsRefusedAtAPortalWithoutIt(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := &testConn{testNode: n, m: newFakeMover(), isid: [6]byte{1}, Numbers: header.Numbers{CmdSN: 1},
			result: make(chan error, 1)}
		tc.m.rdma = false
		go func() { tc.result <- n.portal.Serve(&streamMover{fakeMover: tc.m}, ServeOptions{}) }()
		tc.writeLogin(tc.loginRequest(true, 1, 3), append(slices.Clone(names), linuxKeys...)...)
		if _, answers := tc.wantLogin(pdu.LoginSuccess); !slices.Contains(answers, "RDMAExtensions=No") {
			t.Errorf("%q", answers)
		}
		tc.close()
		tc.wait()
	})
}

// A login that another one replaces ends with that reason, not with the error of the closed socket.
func TestStepUpReplacedWhileTheResponseLeaves(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		entered, leave := make(chan struct{}), make(chan struct{})
		s := newStepUp(t, func(s *stepUp) {
			s.upgrade = net.ErrClosed // the other login has closed the socket
			s.upgrading = func() { close(entered); <-leave }
		})
		<-entered
		s.wantLogin(pdu.LoginSuccess)
		tc := s.connect()
		tc.writeLogin(tc.loginRequest(true, 1, 3), append(slices.Clone(names), linuxKeys...)...)
		synctest.Wait()
		close(leave)
		if err := s.wait(); !errors.Is(err, errReinstated) {
			t.Error(err)
		}
		if l := s.log.Lines("outcome=refused"); len(l) != 1 || !strings.Contains(l[0], errReinstated.Error()) {
			t.Errorf("no reason in %q", l)
		}
		tc.loggedIn()
		tc.close()
		tc.wait()
	})
}
