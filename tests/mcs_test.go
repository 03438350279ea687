package tests

import (
	"bytes"
	"errors"
	"sync"
	"testing"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// Two iSER connections of one session share its CmdSN window, whatever the order
// in which their commands come; a third is refused.
func TestTwoISERConnections(t *testing.T) {
	tg := startTarget(t, targetOptions{node: iscsi.Options{Limits: keys.Limits{MaxConnections: 2}}})
	a := tg.login(t, initiator.Options{Connections: 4})
	if got := a.Key("MaxConnections"); got != "2" {
		t.Fatalf("MaxConnections=%s", got)
	}
	b := tg.login(t, initiator.Options{Join: a, CID: 1})
	_, err := initiator.Login(t.Context(), tg.addr, initiator.Options{Target: targetName, Join: a, CID: 2})
	var refused *initiator.LoginError
	if !errors.As(err, &refused) || refused.Status != pdu.LoginTooManyConnections {
		t.Errorf("third connection: %v", err)
	}
	do(t, b, &initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)})
	var wg sync.WaitGroup
	for i, s := range []*initiator.Session{a, b, a, b} {
		wg.Go(func() {
			w := &initiator.Command{CDB: cdb.Write16(uint64(i)*1024, 256), Out: random(128 << 10)}
			r := &initiator.Command{CDB: cdb.Read16(uint64(i)*1024, 256), In: make([]byte, 128<<10)}
			for range 50 {
				for _, c := range []*initiator.Command{w, r} {
					if err := s.Do(c); err != nil || c.Status != 0 {
						t.Errorf("status %d, %v", c.Status, err)
						return
					}
				}
				if !bytes.Equal(w.Out, r.In) {
					t.Error("wrong data")
					return
				}
			}
		})
	}
	wg.Wait()
	if s := tg.node.Stats(); s.Sessions != 1 || s.Connections != 2 {
		t.Errorf("%+v", s)
	}
	// ISCSI-7.1.4-1: at ErrorRecoveryLevel 0 both go.
	a.Close()
	p, err := b.Next(t.Context())
	if err != nil || p.BHS.Opcode() != pdu.AsyncMessage || p.BHS.AsyncEvent() != pdu.AsyncSessionDropped {
		t.Errorf("%x, %v", []byte(p.BHS), err)
	}
	<-b.Done()
}
