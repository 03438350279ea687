package tcp

import (
	"bytes"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/security/limits"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// greed is what each kind of greedy initiator sends, as often as the target takes it. It takes no
// answer.
var greed = []func(c *client) (pdu.BHS, []byte){
	func(c *client) (pdu.BHS, []byte) { // WRITEs whose data never comes
		return c.scsi(pdu.FlagW, cdb.Write16(0, 2048), 1<<20), nil
	},
	func(c *client) (pdu.BHS, []byte) { // pings
		return c.nopOut(), long
	},
	func(c *client) (pdu.BHS, []byte) { // immediate data behind a CmdSN gap
		if c.CmdSN == firstCmdSN+4 {
			c.CmdSN++
		}
		return c.scsi(pdu.FlagW, cdb.Write16(0, 128), 64<<10), long[:64<<10]
	},
	func(c *client) (pdu.BHS, []byte) { // READs
		return c.scsi(pdu.FlagR, cdb.Read16(0, 2048), 1<<20), nil
	},
}

var long = make([]byte, 256<<10)

// crowd logs initiators in, and lets them be greedy, or idle. It returns when they can send no more.
func crowd(t *testing.T, tg *target, n int, greedy bool) (leave func()) {
	var clients []*client
	var wg, full sync.WaitGroup
	for i := range n {
		c := tg.login(t, "MaxRecvDataSegmentLength=262144")
		clients = append(clients, c)
		if !greedy {
			continue
		}
		full.Add(1)
		wg.Go(func() {
			var out bytes.Buffer
			blocked := false
			for k := 0; k < 400; k++ {
				h, data := greed[i%len(greed)](c)
				out.Reset()
				out.Write(c.encode(h, nil, data))
				for !blocked && out.Len() > 0 {
					c.nc.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
					n, err := c.nc.Write(out.Bytes())
					out.Next(n)
					blocked = err != nil
				}
			}
			full.Done()
		})
	}
	full.Wait()
	return func() {
		for _, c := range clients {
			c.nc.Close()
		}
		wg.Wait()
		testkit.Eventually(t, "their sessions end", func() bool { return tg.node.Stats().Connections <= 1 })
	}
}

// rounds counts how often an honest initiator writes and reads back in that time.
func rounds(t *testing.T, c *client, d time.Duration) (n int) {
	t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); n++ {
		data := random(16 << 10)
		c.send(c.scsi(pdu.FlagW, cdb.Write16(4096, 32), len(data)), data)
		if p := c.want(pdu.SCSIResponse); p.h.Status() != 0 {
			t.Fatalf("WRITE: status %#x", p.h.Status())
		}
		c.send(c.scsi(pdu.FlagR, cdb.Read16(4096, 32), len(data)), nil)
		if p := c.want(pdu.DataIn); !bytes.Equal(p.data, data) || p.h.Status() != 0 {
			t.Fatalf("READ: %d other bytes, status %#x", len(p.data), p.h.Status())
		}
	}
	return n
}

// inUse returns the bytes of heap and stacks that are in use.
func inUse() int64 {
	var m runtime.MemStats
	runtime.GC()
	debug.FreeOSMemory()
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse + m.StackInuse)
}

// Greedy initiators take no more memory than limits.memory says, and an honest one next to them keeps
// its throughput (without that bound they took 1.8 GiB).
func TestGreedyInitiatorsStayWithinTheMemory(t *testing.T) {
	if testkit.Race {
		t.Skip("the race detector makes memory and speed those of something else")
	}
	const crowdSize, bound, beside = 40, 64 << 20, 24 << 20
	shared := limits.New()
	shared.Memory.SetMax(bound)
	shared.Sessions.SetMax(2 * crowdSize) // all have one name
	tg := startTarget(t, func(_ *target, o *iscsi.Options) { o.Shared = shared })
	honest := tg.login(t, "MaxRecvDataSegmentLength=262144")
	window := 100 * time.Millisecond

	leave := crowd(t, tg, crowdSize, false)
	before, alone := inUse(), 0
	for range 5 {
		alone = max(alone, rounds(t, honest, window))
	}
	leave()

	leave = crowd(t, tg, crowdSize, true)
	more := inUse() - before
	t.Logf("%d MiB more in use, %d MiB of limits.memory, reached %d times", more>>20, shared.Memory.Used()>>20,
		shared.Memory.State().Bites)
	if more > bound+beside {
		t.Errorf("%d bytes more in use, the bound is %d", more, bound)
	}
	if used := shared.Memory.Used(); used > bound+bound/8 || used < bound/4 {
		t.Errorf("limits.memory has %d in use of %d", used, bound)
	}
	with := 0
	for range 300 { // until the machine is as idle as it was
		if with = max(with, rounds(t, honest, window)); with*10 >= alone*8 {
			break
		}
	}
	t.Logf("%d rounds alone, %d with the greedy ones", alone, with)
	if with*10 < alone*8 {
		t.Errorf("the honest initiator has %d rounds instead of %d", with, alone)
	}
	leave()
	testkit.Eventually(t, "the memory is given back", func() bool { return shared.Memory.Used() < 4<<20 })
	if rest := inUse() - before; rest > beside {
		t.Errorf("%d bytes are still in use", rest)
	}
}

// A connection before login takes less than limits.memory counts for it, 48 KiB.
func TestConnectionsBeforeLoginAreSmall(t *testing.T) {
	if testkit.Race {
		t.Skip("the race detector makes memory that of something else")
	}
	const n = 200
	tg := startTarget(t)
	tg.connect(t).login()
	before := inUse()
	for range n {
		c := tg.connect(t)
		h := pdu.LoginRequest{Transit: true, CSG: 1, NSG: 3, ISID: newISID()}.Append(nil)
		pdu.BHS(h).SetDataSegmentLength(100)
		c.write(h) // the text never comes
	}
	testkit.Eventually(t, "all are served", func() bool { return tg.node.Stats().Connections == n+1 })
	each := (inUse() - before) / n
	t.Logf("%d bytes for each connection, with the initiator's end", each)
	if each > 48<<10 {
		t.Errorf("%d bytes for each connection", each)
	}
}
