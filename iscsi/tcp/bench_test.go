package tcp

import (
	"bufio"
	"fmt"
	"io"
	"runtime/debug"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A driver is an initiator that allocates nothing. It keeps up to depth commands of one kind in
// flight and checks only opcode and status.
type driver struct {
	tb     testing.TB
	c      *client
	r      *bufio.Reader
	cmd    pdu.BHS
	data   []byte // of a WRITE
	solic  bool   // data goes in one Data-Out per R2T
	out    []byte // that PDU
	head   [pdu.BHSLen]byte
	digest int // bytes after a header, and after data
}

// ioPaths are the kinds of commands that are measured and must not allocate.
var ioPaths = []struct {
	name      string
	write     bool
	size      int
	solicited bool
	level     uint8
	lent      string // see target.lends
}{
	{"READ/4KiB", false, 4 << 10, false, 0, ""},
	{"READ/64KiB", false, 64 << 10, false, 0, ""},
	{"READ/64KiB/lent", false, 64 << 10, false, 0, "memory"},
	{"READ/256KiB", false, 256 << 10, false, 0, ""},
	{"READ/256KiB/lent", false, 256 << 10, false, 0, "memory"},
	{"READ/64KiB/file", false, 64 << 10, false, 0, "file"},
	{"READ/256KiB/file", false, 256 << 10, false, 0, "file"},
	{"READ/64KiB/ERL1", false, 64 << 10, false, 1, ""},
	{"WRITE/4KiB", true, 4 << 10, false, 0, ""},
	{"WRITE/4KiB-R2T", true, 4 << 10, true, 0, ""},
	{"WRITE/64KiB-R2T", true, 64 << 10, true, 0, ""},
	{"WRITE/64KiB-R2T/ERL1", true, 64 << 10, true, 1, ""},
}

func newDriver(tb testing.TB, path int, digests bool) *driver {
	p := ioPaths[path]
	tg := startTarget(tb, func(tg *target, o *iscsi.Options) { o.Limits.ErrorRecoveryLevel, tg.lends = p.level, p.lent })
	keys := []string{"MaxRecvDataSegmentLength=262144", fmt.Sprintf("ErrorRecoveryLevel=%d", p.level)}
	d := &driver{tb: tb, solic: p.solicited}
	if digests {
		keys = append(keys, "HeaderDigest=CRC32C", "DataDigest=CRC32C")
		d.digest = digestLen
	}
	d.c = tg.login(tb, keys...)
	d.r = bufio.NewReaderSize(d.c.nc, 256<<10)
	if p.write {
		d.cmd, d.data = d.c.scsi(pdu.FlagW, cdb.Write16(0, uint32(p.size/blockLen)), p.size), random(p.size)
	} else {
		if err := tg.store.WriteAt(random(p.size), 0); err != nil { // what was never written is cheaper to read
			tb.Fatal(err)
		}
		d.cmd = d.c.scsi(pdu.FlagR, cdb.Read16(0, uint32(p.size/blockLen)), p.size)
	}
	return d
}

// start sends a command.
func (d *driver) start() {
	h := d.cmd
	if d.data == nil || d.solic {
		d.send(h, nil)
	} else {
		d.send(h, d.data)
	}
	h.SetCmdSN(h.CmdSN() + 1)
	h.SetITT(h.ITT() + 1)
}

func (d *driver) send(h pdu.BHS, data []byte) {
	h.SetDataSegmentLength(len(data))
	d.out = append(d.out[:0], h...)
	crc := func(b []byte) {
		if d.digest > 0 {
			c := updateDigest(0, b)
			d.out = append(d.out, byte(c), byte(c>>8), byte(c>>16), byte(c>>24))
		}
	}
	crc(h)
	if len(data) > 0 {
		d.out = append(d.out, data...)
		crc(data)
	}
	if _, err := d.c.nc.Write(d.out); err != nil {
		d.tb.Fatal(err)
	}
}

// finish answers R2Ts until one command has ended.
func (d *driver) finish() {
	h := pdu.BHS(d.head[:])
	for {
		if _, err := io.ReadFull(d.r, h); err != nil {
			d.tb.Fatal(err)
		}
		n := d.digest
		if h.DataSegmentLength() > 0 {
			n += pdu.Padded(h.DataSegmentLength()) + d.digest
		}
		if _, err := d.r.Discard(n); err != nil {
			d.tb.Fatal(err)
		}
		switch op := h.Opcode(); {
		case op == pdu.R2T:
			itt, ttt := h.ITT(), h.TTT()
			h.Reset(pdu.DataOut, pdu.FlagF)
			h.SetITT(itt)
			h.SetTTT(ttt)
			d.send(h, d.data)
		case op == pdu.SCSIResponse && h.Status() == 0, op == pdu.DataIn && h.Flags()&pdu.FlagS != 0:
			d.cmd.SetExpStatSN(h.StatSN() + 1)
			return
		case op != pdu.DataIn:
			d.tb.Fatalf("%v: %x", op, []byte(h))
		}
	}
}

// No READ or WRITE allocates, from its PDU to its response.
func TestNoAllocations(t *testing.T) {
	if testkit.Race {
		t.Skip("the race detector makes sync.Pool forget at random")
	}
	for i, p := range ioPaths {
		for _, digests := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/digests=%t", p.name, digests), func(t *testing.T) {
				d := newDriver(t, i, digests)
				d.c.nc.SetReadDeadline(time.Time{})
				one := func() { d.start(); d.finish() }
				for range 50 {
					one()
				}
				defer debug.SetGCPercent(debug.SetGCPercent(-1)) // a collection empties the Buffer pool
				if n := testing.AllocsPerRun(500, one); n != 0 {
					t.Errorf("%v allocations per command", n)
				}
			})
		}
	}
}

// BenchmarkIO measures READs and WRITEs over loopback to a memory LUN, including the initiator, like
// the benchmark of that name for iSER.
func BenchmarkIO(b *testing.B) {
	for i, p := range ioPaths {
		for _, depth := range []int{1, 32} {
			for _, digests := range []bool{false, true} {
				b.Run(fmt.Sprintf("%s/QD%d/digests=%t", p.name, depth, digests), func(b *testing.B) {
					d := newDriver(b, i, digests)
					d.c.nc.SetReadDeadline(time.Time{})
					b.SetBytes(int64(p.size))
					b.ReportAllocs()
					b.ResetTimer()
					before := cpuTime(b)
					for i := range b.N {
						if i >= depth {
							d.finish()
						}
						d.start()
					}
					for range min(depth, b.N) {
						d.finish()
					}
					b.ReportMetric(float64((cpuTime(b)-before).Nanoseconds())/float64(b.N), "cpu-ns/op")
				})
			}
		}
	}
}

// cpuTime returns the CPU time of both ends so far.
func cpuTime(tb testing.TB) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		tb.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
