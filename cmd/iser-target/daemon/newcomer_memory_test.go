//go:build !race

package daemon

import (
	"bytes"
	"io"
	"net"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A bareClient is the end of a connection without memory of the Go runtime, so that the measurement is of
// the target alone.
type bareClient int

func dialBare(t *testing.T, to *net.TCPAddr) bareClient {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	a := unix.SockaddrInet4{Port: to.Port}
	copy(a.Addr[:], to.IP.To4())
	if err := unix.Connect(fd, &a); err != nil {
		t.Fatal(err)
	}
	return bareClient(fd)
}

func (c bareClient) Write(b []byte) (int, error) { return unix.Write(int(c), b) }

func (c bareClient) Read(b []byte) (int, error) { return unix.Read(int(c), b) }

// inUse returns the bytes that the process uses for objects of the heap, for stacks of goroutines, and for the records of the runtime
// about sockets (OtherSys). Sockets of the kernel are not among them.
func inUse() int64 {
	for range 3 { // pools keep what they have for two rounds
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse + m.StackInuse + m.OtherSys)
}

// SEC-5042.6.4.2-2, ISER-5.1.2-2: a connection costs little memory until its initiator has logged in. Its
// windows, slabs and tables get their full size afterwards. A half-open connection, whose first frame or PDU has not
// come, costs at most 4 KiB, and one in the middle of a login 16 KiB besides the text that it has sent. The race detector makes stacks larger.
func TestMemoryOfNewcomers(t *testing.T) {
	const (
		n        = 1000
		halfOpen = 4 << 10
		midLogin = 16 << 10
	)
	login := func() (pdu.BHS, []byte) {
		return initiator.Options{Name: prefix + "half", Target: store}.Complete().LoginRequest()
	}
	first, text := login()
	pdu.BHS(first).SetFlags(pdu.BHS(first).Flags() &^ 0x80) // without T: the login continues
	stream := slices.Concat(first, text, make([]byte, pdu.Padded(len(text))-len(text)))
	mpa, err := (&wire.Startup{Rev: 2, CRC: true, Enhanced: true, Depths: wire.Depths{IRD: 128, ORD: 128},
		Private: []byte{0x80, 0, 0, 0}}).Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	header := make([]byte, iser.HeaderLen)
	iser.Header{}.Put(header)
	frame := func(msn uint32, last bool, message []byte) []byte { // a Send, or its first segment
		u := make([]byte, wire.UntaggedLen)
		wire.Untagged{Last: last, ULP: wire.OpSend.Control(), QN: wire.QNSend, MSN: msn}.Put(u)
		u = append(u, message...)
		b := slices.Concat([]byte{byte(len(u) >> 8), byte(len(u))}, u, make([]byte, wire.Pad(len(u))))
		return wire.AppendCRC(b, wire.UpdateCRC(0, b))
	}
	fpdu := frame(1, true, slices.Concat(header, stream))
	long, _ := login() // with the longest data segment, and C: more text follows
	pdu.BHS(long).SetFlags(pdu.BHS(long).Flags()&^0x80 | 0x40)
	pdu.BHS(long).SetDataSegmentLength(maxLoginText)
	longest := slices.Concat(long, make([]byte, maxLoginText))
	most := func(b []byte) []byte { return b[:len(b)-1] }
	longFPDU := func(msn uint32) []byte { return frame(msn, true, slices.Concat(header, longest)) }
	reply := len(mpa)
	for _, tt := range []struct {
		name  string
		says  [][]byte
		hears []int // bytes after each of says; -1: a PDU
		most  int64
	}{
		{"silent", nil, nil, halfOpen},
		{"half a Login Request", [][]byte{stream[:30]}, []int{0}, halfOpen},
		{"all but the last byte of a Login Request", [][]byte{stream[:len(stream)-1]}, []int{0}, halfOpen},
		{"19 of 20 bytes of MPA", [][]byte{mpa[:19]}, []int{0}, halfOpen},
		{"all but the last byte of an MPA Request", [][]byte{mpa[:len(mpa)-1]}, []int{0}, halfOpen},
		{"MPA done", [][]byte{mpa}, []int{reply}, midLogin},
		{"in the middle of a login over iSER", [][]byte{mpa, fpdu}, []int{reply, 100}, midLogin},
		{"in the middle of a login over TCP", [][]byte{stream}, []int{48}, midLogin},
		{"half an FPDU in the middle of a login over iSER", [][]byte{mpa, fpdu, fpdu[:50]}, []int{reply, 100, 0}, midLogin},
		{"half a Login Request in the middle of a login over TCP", [][]byte{stream, stream[:50]}, []int{48, 0}, midLogin},
		{"all but the last byte of the longest Login Request", [][]byte{most(longest)}, []int{0}, halfOpen},
		{"the longest text over TCP, and most of the next one", [][]byte{longest, most(longest)}, []int{48, 0}, midLogin + maxLoginText},
		{"the longest text over iSER, and most of the next one", [][]byte{mpa, longFPDU(1), most(longFPDU(2))}, []int{reply, 100, 0},
			midLogin + maxLoginText},
		{"most of the longest Login Request in the middle of a login over TCP", [][]byte{stream, most(longest)}, []int{48, 0}, midLogin},
		{"most of the longest Login Request in the middle of a login over iSER", [][]byte{mpa, fpdu, most(longFPDU(2))}, []int{reply, 100, 0},
			midLogin},
		{"the first segment of a Send", [][]byte{mpa, frame(1, false, make([]byte, maxLoginText))}, []int{reply, 0}, midLogin + maxLoginText},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := newLab(t, func(l *lab) {
				l.more = "mpa: {crc: on}\nlimits: {memory: 1GiB, max_connections: 4096, connections_per_address: 4000, login_timeout: 10m}"
			})
			addr, err := net.ResolveTCPAddr("tcp", l.addr())
			if err != nil {
				t.Fatal(err)
			}
			begin := func(n int) {
				var buf bytes.Buffer
				for range n {
					c := dialBare(t, addr)
					for i, b := range tt.says {
						if _, err := c.Write(b); err != nil {
							t.Fatal(err)
						}
						buf.Reset()
						if _, err := io.CopyN(&buf, c, int64(tt.hears[i])); err != nil {
							t.Fatal(err)
						}
					}
				}
			}
			waits := func(n int) {
				testkit.Eventually(t, "all have come, and wait", func() bool {
					return l.net.limits.Connections.Used() == int64(n) && l.net.waiting.Len() == n
				})
				time.Sleep(200 * time.Millisecond) // the target has read the rest
			}
			begin(20)
			waits(20)
			before := inUse()
			begin(n)
			waits(20 + n)
			each := (inUse() - before) / n
			t.Logf("%s: %d bytes each", tt.name, each)
			if each > tt.most {
				t.Errorf("%d bytes each, want at most %d", each, tt.most)
			}
		})
	}
}
