package conformance

import (
	"fmt"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/conformance/cu"
	"github.com/iser-target/iser-target/tests/interop/harness"
)

// A wiretap passes connections on to a target, and counts what initiators send.
type wiretap struct {
	l  net.Listener
	to string
	wg sync.WaitGroup

	mu          sync.Mutex
	immediate   int // commands with immediate data; guarded by mu, like the next three
	unsolicited int // Data-Out PDUs without an R2T
	solicited   int // Data-Out PDUs for an R2T
	longest     int // bytes of unsolicited data of one command
}

// newWiretap returns a wiretap before the target at that address.
func newWiretap(t *testing.T, to string) *wiretap {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &wiretap{l: l, to: to}
	w.wg.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			w.wg.Go(func() { w.pass(t, in) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		w.wg.Wait()
	})
	return w
}

// pass passes one connection on.
func (w *wiretap) pass(t *testing.T, in net.Conn) {
	defer in.Close()
	out, err := net.Dial("tcp", w.to)
	if err != nil {
		t.Error(err)
		return
	}
	w.wg.Go(func() {
		io.Copy(in, out)
		in.Close()
	})
	defer out.Close()
	for {
		h := pdu.BHS(make([]byte, pdu.BHSLen))
		if _, err := io.ReadFull(in, h); err != nil {
			return
		}
		size := h.DataSegmentLength()
		rest := make([]byte, int(h[4])*4+pdu.Padded(size))
		if _, err := io.ReadFull(in, rest); err != nil {
			return
		}
		w.count(h, size)
		if _, err := out.Write(append(h, rest...)); err != nil {
			return
		}
	}
}

// count counts a PDU with a data segment of that many bytes.
func (w *wiretap) count(h pdu.BHS, size int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case h.Opcode() == pdu.SCSICommand && h.Write() && size > 0:
		w.immediate++
		w.longest = max(w.longest, size)
	case h.Opcode() == pdu.DataOut && h.TTT() == pdu.ReservedTag:
		w.unsolicited++
		w.longest = max(w.longest, int(h.BufferOffset())+size)
	case h.Opcode() == pdu.DataOut:
		w.solicited++
	}
}

// ISCSI-13.10-1: libiscsi sends unsolicited data where a target has initial_r2t false, in PDUs as long as the target takes them, up to
// first_burst_length. It gets R2Ts of max_burst_length for the rest. Where the key is not set it sends none.
func TestUnsolicitedDataOfLibiscsi(t *testing.T) {
	need(t, cu.Program)
	const keys = `
    initial_r2t: false
    first_burst_length: 16KiB
    max_burst_length: 32KiB
    max_recv_data_segment_length: 4KiB
    max_outstanding_r2t: 4`
	for _, c := range []struct {
		name, keys  string
		unsolicited bool
	}{{"initial_r2t false", keys, true}, {"default", "", false}} {
		t.Run(c.name, func(t *testing.T) {
			d := harness.Config{
				Targets: "\n  - name: " + iqn + c.keys + "\n    initiators: [\"*\"]\n    luns:\n      - {id: 0, backend: memory, size: 100MiB}",
				More:    "limits: {error_recovery_level: 0}",
			}.Start(t)
			w := newWiretap(t, fmt.Sprintf("127.0.0.1:%d", d.Port))
			device := fmt.Sprintf("iscsi://%s/%s/0", w.l.Addr(), iqn)
			// These write many lengths, and OrWrite.Verify and the last two compare what is read with it.
			for _, name := range []string{"Write16.Simple", "WriteVerify16.Simple", "OrWrite.Verify", "CompareAndWrite.Simple", "ExtendedCopy.Simple"} {
				if o := run(cu.Of(name), device); o.Result != cu.Pass {
					t.Errorf("%s: %s: %s", name, o.Result, o.Reason)
				}
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			t.Logf("%d commands with immediate data, %d unsolicited and %d solicited Data-Out PDUs, at most %d bytes of a command unsolicited",
				w.immediate, w.unsolicited, w.solicited, w.longest)
			if (w.unsolicited > 0) != c.unsolicited || w.immediate == 0 {
				t.Error("that is not what was agreed on")
			}
			if c.unsolicited && (w.longest != 16<<10 || w.solicited == 0) {
				t.Error("libiscsi did not reach first_burst_length, and go on with an R2T")
			}
		})
	}
}
