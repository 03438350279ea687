package tcp

import (
	"net"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// Commands that have come together are answered together. One processor makes them come together.
func TestAnswersShareAWrite(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	const rounds, commands = 20, 16
	for _, write := range []bool{false, true} {
		t.Run(map[bool]string{false: "READ", true: "WRITE"}[write], func(t *testing.T) {
			var writes atomic.Int64
			tg := startTarget(t, func(tg *target, _ *iscsi.Options) {
				tg.wrap = func(nc net.Conn) net.Conn { return testkit.WriteCounter{Conn: nc, Writes: &writes} }
			})
			c := tg.login(t)
			writes.Store(0)
			for range rounds {
				var b []byte
				for range commands {
					if write {
						b = append(b,
							c.encode(c.scsi(pdu.FlagW, cdb.Write16(0, 1), blockLen), nil, random(blockLen))...)
					} else {
						b = append(b, c.encode(c.scsi(pdu.FlagR, cdb.Read16(0, 1), blockLen), nil, nil)...)
					}
				}
				c.write(b)
				for answers := 0; answers < commands; {
					p := c.any()
					if p.h.Opcode() == pdu.DataIn && p.h.Flags()&pdu.FlagS == 0 {
						continue // it was being sent when the status came
					}
					if p.h.Status() != 0 {
						t.Fatal(p)
					}
					answers++
				}
			}
			if n := writes.Load(); n > rounds*commands/2 {
				t.Errorf("%d answers took %d system calls", rounds*commands, n)
			}
		})
	}
}

// An answer does not wait for a later command that waits for its backend.
func TestAnswerBeforeASlowCommand(t *testing.T) {
	tg := startTarget(t)
	c := tg.login(t)
	for range 50 {
		gate := tg.store.ShutFrom(100*blockLen, backendtest.ReadAt)
		quick, slow := c.scsi(pdu.FlagR, cdb.Read16(0, 1), blockLen), c.scsi(pdu.FlagR, cdb.Read16(100, 1), blockLen)
		c.write(append(c.encode(quick, nil, nil), c.encode(slow, nil, nil)...))
		c.readData(quick, blockLen)
		<-gate.Entered
		gate.Open()
		c.readData(slow, blockLen)
	}
}
