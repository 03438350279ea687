package tests

import (
	"net"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// Commands that have come together are answered together, and so is data asked for. On one
// processor they come so.
func TestAnswersShareAWrite(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	const rounds, commands = 20, 16
	for _, tt := range []struct {
		name  string
		write bool
		most  int64 // system calls; a WRITE takes two messages
	}{{"READ", false, rounds * commands / 2}, {"WRITE", true, rounds * commands}} {
		t.Run(tt.name, func(t *testing.T) {
			var writes atomic.Int64
			tg := startTarget(t,
				targetOptions{wrap: func(nc net.Conn) net.Conn {
					return testkit.WriteCounter{Conn: nc,
						Writes: &writes}
				}})
			s := tg.login(t, initiator.Options{})
			var cmds [commands]initiator.Command
			for i := range cmds {
				if tt.write {
					cmds[i].CDB, cmds[i].Out = cdb.Write16(0, 1), random(512)
				} else {
					cmds[i].CDB, cmds[i].In = cdb.Read16(0, 1), make([]byte, 512)
				}
			}
			do(t, s, &cmds[0])
			writes.Store(0)
			for range rounds {
				for i := range cmds {
					if err := s.Start(&cmds[i]); err != nil {
						t.Fatal(err)
					}
				}
				for i := range cmds {
					if err := cmds[i].Wait(); err != nil || cmds[i].Status != 0 {
						t.Fatal(err, cmds[i].Status)
					}
				}
			}
			if n := writes.Load(); n > tt.most {
				t.Errorf("%d commands took %d system calls", rounds*commands, n)
			}
		})
	}
}

// An answer does not wait for a later command that waits for its store.
func TestAnswerBeforeASlowCommand(t *testing.T) {
	tg := startTarget(t, targetOptions{luns: 2})
	s := tg.login(t, initiator.Options{})
	for _, lun := range []byte{0, 1} {
		do(t, s, &initiator.Command{LUN: lun, CDB: cdb.Read16(0, 1), In: make([]byte, 512)})
	}
	for range 50 {
		gate := tg.store.Shut()
		quick := &initiator.Command{LUN: 1, CDB: cdb.Read16(0, 1), In: make([]byte, 512)}
		slow := &initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)}
		for _, c := range []*initiator.Command{quick, slow} {
			if err := s.Start(c); err != nil {
				t.Fatal(err)
			}
		}
		if err := quick.Wait(); err != nil || quick.Status != 0 {
			t.Fatal(err, quick.Status)
		}
		gate.Open()
		if err := slow.Wait(); err != nil || slow.Status != 0 {
			t.Fatal(err, slow.Status)
		}
	}
}
