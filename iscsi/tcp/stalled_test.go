package tcp

import (
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A stallingConn is a connection whose initiator takes nothing while it is stalled.
type stallingConn struct {
	net.Conn
	stalled atomic.Bool
	waiting atomic.Bool // a Write waits
	closed  chan struct{}
	once    sync.Once
}

func (s *stallingConn) Write(p []byte) (int, error) {
	if s.stalled.Load() {
		s.waiting.Store(true)
		<-s.closed
		return 0, net.ErrClosed
	}
	return s.Conn.Write(p)
}

func (s *stallingConn) Close() error {
	s.once.Do(func() { close(s.closed) })
	return s.Conn.Close()
}

// A READ of several pieces whose initiator takes no data does not hold up LOGICAL UNIT RESET and
// CLEAR TASK SET of another one.
func TestStalledReaderHoldsUpNobody(t *testing.T) {
	for name, fence := range map[string]func(c *client){
		"LOGICAL UNIT RESET": func(c *client) {
			c.tmf(pdu.LogicalUnitReset, pdu.ReservedTag, 0)
			c.wantFunctionComplete()
		},
		"CLEAR TASK SET": func(c *client) {
			c.tmf(pdu.ClearTaskSet, pdu.ReservedTag, 0)
			c.wantFunctionComplete()
		},
	} {
		t.Run(name, func(t *testing.T) {
			var stalled atomic.Pointer[stallingConn] // the first connection
			tg := startTarget(t, func(tg *target, _ *iscsi.Options) {
				tg.wrap = func(nc net.Conn) net.Conn {
					c := &stallingConn{Conn: nc, closed: make(chan struct{})}
					if stalled.CompareAndSwap(nil, c) {
						return c
					}
					return nc
				}
			})
			victim := tg.login(t)
			other := tg.login(t)
			stalling := stalled.Load()
			stalling.stalled.Store(true)
			const blocks = 4 << 20 / 512
			victim.send(victim.scsi(pdu.FlagF|pdu.FlagR, cdb.Read10(0, blocks), 4<<20), nil)
			testkit.Eventually(t, "the READ waits for its initiator", stalling.waiting.Load)
			ordered := victim.scsi(pdu.FlagF|pdu.FlagR, cdb.Read10(0, 1), 512)
			ordered.SetFlags(pdu.FlagF | pdu.FlagR | pdu.AttrOrdered)
			victim.send(ordered, nil) // is answered at once, and nobody takes that
			testkit.Eventually(t, "two tasks", func() bool { return tg.node.Stats().TasksInFlight == 2 })
			fence(other)
			other.command(pdu.FlagF, cdb.TestUnitReady, 0) // takes the unit attention of the reset
			other.read(0, 8, 262144)
			stalling.Close()
		})
	}
}
