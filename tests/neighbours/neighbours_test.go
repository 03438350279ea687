// Package neighbours measures what an honest initiator keeps while another one, or a stranger,
// attacks the target. The measure is the same load on a bare socket, which answers commands without
// executing them: what the attack itself costs the machine is not the target's fault.
package neighbours

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	// go test must not take a result of another program for today's
	_ "github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

var measure = flag.Bool("measure", false, "measure in several rounds, and require that the neighbour keeps keeps %")

const (
	keeps    = 80 // % of what the neighbour has during the same attack on a bare socket
	rounds   = 5
	slice    = time.Second     // of measuring
	ramp     = time.Second / 4 // from the begin of an attack to that of the measuring
	answered = 5 * time.Second // an answer that takes longer is a failure in any run
	depth    = 8               // commands that the neighbour has in flight
)

func TestMain(m *testing.M) {
	code := m.Run()
	harness.Cleanup()
	os.Exit(code)
}

const targets = `
  - name: ` + iqn + `
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 1GiB}
      - {id: 1, backend: memory, size: 1GiB}
  - name: ` + locked + `
    initiators: ["*"]
    auth: {method: chap, users: [{name: somebody, secret: "0123456789abcdef"}]}
    luns:
      - {id: 0, backend: memory, size: 1MiB}`

// TestNeighbours runs each attack next to an honest session that reads 4 KiB at a time. All of its
// commands are answered soon, and another honest initiator gets in. With -measure it also keeps its
// share.
func TestNeighbours(t *testing.T) {
	d := harness.Start(t, targets)
	target := site{addr: fmt.Sprintf("127.0.0.1:%d", d.Port), ended: new(atomic.Int64)}
	bare := site{addr: bareSocket(t), bare: true}
	var table strings.Builder
	for _, a := range attacks {
		t.Run(a.name, func(t *testing.T) {
			if !*measure {
				alongside(t, target, a, target, ramp)
				return
			}
			var free, attacked []float64
			var slowest time.Duration
			for range rounds {
				before := target.ended.Load()
				n, took := alongside(t, target, a, target, slice)
				attacked = append(attacked, n)
				slowest = max(slowest, took)
				bare.rate = float64(target.ended.Load()-before) / (ramp + slice).Seconds()
				n, _ = alongside(t, target, a, bare, slice)
				free = append(free, n)
			}
			share := 100 * median(attacked) / median(free)
			fmt.Fprintf(&table, "| %s | %.0f | %.0f | %.0f %% | %.0f ms |\n", a.name, median(free), median(attacked), share,
				slowest.Seconds()*1000)
			if share < keeps {
				t.Errorf("the neighbour keeps %.0f %%, want %d %%", share, keeps)
			}
		})
	}
	if *measure {
		fmt.Printf("| attack | IOPS next to it on a bare socket | on the target | kept | slowest answer |\n"+
			"|---|---|---|---|---|\n%s", table.String())
	}
}

func median(x []float64) float64 {
	slices.Sort(x)
	return x[len(x)/2]
}

// alongside measures the honest session for that time while a attacks at. It returns the commands per
// second and the slowest answer.
func alongside(t *testing.T, target site, a attack, at site, d time.Duration) (iops float64, slowest time.Duration) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	p, err := target.login(ctx, honest, iqn, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.run(ctx, at); err != nil {
		t.Fatal(err)
	}
	time.Sleep(ramp)
	n, slowest, err := p.readFor(d)
	if err != nil {
		t.Fatalf("the honest session: %v", err)
	}
	if slowest > answered {
		t.Errorf("an answer took %v, want at most %v", slowest, answered)
	}
	begun := time.Now()
	second, err := target.login(ctx, honest+"2", iqn, 2)
	if err != nil {
		t.Errorf("another honest initiator: %v", err)
	} else if _, err := second.do(&command{cdb: cdb.Read16(0, 1), read: true, edtl: 512}); err != nil {
		t.Errorf("another honest initiator: %v", err)
	}
	if took := time.Since(begun); took > answered {
		t.Errorf("the login of another honest initiator took %v", took)
	}
	return float64(n) / d.Seconds(), slowest
}

// readFor keeps depth READs in flight for that time.
func (p *peer) readFor(d time.Duration) (n int, slowest time.Duration, err error) {
	read := &command{cdb: cdb.Read16(0, 8), read: true, edtl: 4096}
	sent := map[uint32]time.Time{}
	start := func() error {
		err := p.start(read)
		sent[p.ITT] = time.Now()
		return err
	}
	for range depth {
		if err := start(); err != nil {
			return 0, 0, err
		}
	}
	for end := time.Now().Add(d); len(sent) > 0; {
		p.SetReadDeadline(time.Now().Add(2 * answered))
		h, _, err := p.receive(nil)
		if err != nil {
			return n, slowest, err
		}
		if h.Opcode() != pdu.SCSIResponse && (h.Opcode() != pdu.DataIn || h.Flags()&pdu.FlagS == 0) {
			continue
		}
		if h.Status() != 0 && h.Status() != 0x02 { // a unit attention is possible
			return n, slowest, fmt.Errorf("status %#x", h.Status())
		}
		p.ExpStatSN = h.StatSN() + 1
		slowest = max(slowest, time.Since(sent[h.ITT()]))
		delete(sent, h.ITT())
		if n++; time.Now().Before(end) {
			if err := start(); err != nil {
				return n, slowest, err
			}
		}
	}
	return n, slowest, nil
}

// bareSocket listens on an address where everything is read, and each SCSI Command gets a response.
func bareSocket(t *testing.T) (addr string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			go answer(newPeer(nc, ""))
		}
	}()
	return l.Addr().String()
}

// answer answers the SCSI Commands of a connection until it ends.
func answer(p *peer) {
	defer p.Close()
	for {
		h, _, err := p.receive(nil)
		if err != nil {
			return
		}
		if h.Opcode() == pdu.SCSICommand {
			itt := h.ITT()
			h.Reset(pdu.SCSIResponse, pdu.FlagF)
			h.SetITT(itt)
			p.send(h, nil)
		}
	}
}
