package rdma

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/rdma/wire/vectors"
)

// TestRefusals sends each bad message and checks everything that follows.
func TestRefusals(t *testing.T) {
	for _, tt := range slices.Concat(vectors.Refusals, vectors.RegionRefusals, vectors.LengthRefusals) {
		t.Run(tt.ID, func(t *testing.T) {
			domain := NewDomain()
			p, c := responder(t, Options{MaxSend: 64, IRD: 2, Domain: domain})
			_, other := responder(t, Options{Domain: domain})
			var mem [5][]byte
			guarded := func(i int) []byte {
				mem[i] = bytes.Repeat([]byte{0xee}, 48)
				return mem[i][16:32]
			}
			expose(c, 0x100, guarded(0), 0x1000, RemoteRead|RemoteWrite)
			expose(c, 0x200, guarded(1), 0x1000, RemoteRead)
			expose(c, 0x300, guarded(2), 0x1000, RemoteWrite)
			expose(other, 0x400, guarded(3), 0x1000, RemoteRead|RemoteWrite)
			c.Deregister(expose(c, 0x500, guarded(4), 0x1000, RemoteRead|RemoteWrite))

			p.send(append(tt.ULPDUs, "4143 00000000 00000000 00000001 00000000 77")...)
			events := serve(c)
			// The Terminate, byte by byte: RDMAP-6.2.1-1, DDP-7.2-1, RDMAP-4.8-1, RDMAP-4.8-2,
			// RDMAP-4.8-4, RDMAP-4.8-5, RDMAP-4.8-6, RDMAP-4.8-9, RDMAP-4.8-10, RDMAP-4.8-11,
			// RDMAP-3.1-7, DDP-7.1-16. Nothing follows it: DDP-7.1-18, RDMAP-5.4-8, DDP-6.2.2-5.
			p.wantTerminate(tt.Terminate)
			p.nc.Close() // TCP is open until now: DDP-6.2-1, DDP-6.2.2-6, MPA-8-11
			// The ULP learns of the error (RDMAP-7.1-1, DDP-7-1), and gets no Event for the good
			// Send after the bad message (DDP-7.1-17, MPA-8-10).
			se := asFault(t, next(t, events).err, tt.Reason, false)
			if b := unhex(tt.ULPDUs[0]); tt.Reason.Layer == wire.LayerDDP && tt.Reason.EType == 1 && wire.VersionOK(b) {
				// DDP-8.3-5: the ULP learns STag and TO.
				h, _ := wire.ParseTagged(b)
				if s := se.Error(); !strings.Contains(s, fmt.Sprintf("STag %#x", h.STag)) ||
					!strings.Contains(s, fmt.Sprintf("TO %#x", h.TO)) {
					t.Error(s)
				}
			}
			for i, m := range mem {
				if !bytes.Equal(m, bytes.Repeat([]byte{0xee}, 48)) {
					t.Errorf("memory %d was written: %x", i, m)
				}
			}
			// Nothing can be posted: RDMAP-7-3, DDP-3-8, DDP-3-9, RDMAP-7-2.
			asFault(t, c.Post(&WorkRequest{Op: Send}), tt.Reason, false)
			if other.mem.find(0x400) == nil {
				t.Error("another stream lost its STag")
			}
			// RDMAP-4.8-3, RDMAP-4.8-8, DDP-7.2-14: the values of the RFCs.
			term, err := wire.ParseTerminate(unhex(tt.Terminate))
			if err != nil || term.Reason != tt.Reason || strings.HasPrefix(tt.Reason.String(), "unknown") {
				t.Errorf("%+v, %v", term, err)
			}
			n := domain.Counts()
			faults := uint64(0)
			if tt.Reason.EType == 1 { // remote protection errors and errors of tagged buffers
				faults = 1
			}
			if tt.Reason == wire.ReasonTaggedVersion {
				faults = 0
			}
			if n.STagFaults != faults || n.CRCErrors != 0 || len(n.TerminatesSent) != 1 ||
				n.TerminatesSent[tt.Reason] != 1 || len(n.TerminatesReceived) != 0 {
				t.Errorf("counts %+v", n)
			}
		})
	}
}

// MPA-4.4-18, MPA-8-4, MPA-8-12, RDMAP-4.8-4, DDP-6.2.2-2: a bad CRC causes Terminate 2/0/02
// without headers (V-RDMAP-6), and the FPDU has no effect.
func TestBadCRC(t *testing.T) {
	for _, n := range []int{1, 100, 16 << 10} { // MPA-6-1: read in the window, and placed before the CRC has come
		p, c := responder(t, Options{MaxSend: 20 << 10})
		b := frame(append(unhex("4143 00000000 00000000 00000001 00000000"), make([]byte, n)...))
		b[len(b)-1] ^= 1
		p.write(b)
		p.send("4143 00000000 00000000 00000001 00000000 77")
		events := serve(c)
		p.wantTerminate("20020000")
		p.nc.Close()
		asFault(t, next(t, events).err, wire.ReasonCRC, false)
		// The one FPDU that counts is the RTR.
		if n := c.opt.Domain.Counts(); n.CRCErrors != 1 || n.STagFaults != 0 ||
			n.TerminatesSent[wire.ReasonCRC] != 1 || n.Received.FPDUs != 1 || n.Received.Writes != 1 ||
			n.Received.Sends != 0 {
			t.Errorf("counts %+v", n)
		}
	}
}

// MPA-7.1.2-14: before the first good FPDU a Responder must not even send a Terminate. It ends
// the stream.
func TestNoTerminateBeforeTheFirstFPDU(t *testing.T) {
	p, c, _ := respondTo(t, reqKey+"40010000", Options{}, Answer{})
	b := frame(unhex("c140 00000001 0000000000000000"))
	b[5] ^= 0x80
	p.write(b)
	events := serve(c)
	p.wantEOF()
	p.nc.Close()
	asFault(t, next(t, events).err, wire.ReasonCRC, false)
}

// RDMAP-7.1-5: of two errors the first one is reported.
func TestFirstErrorCounts(t *testing.T) {
	p, c := responder(t, Options{})
	p.send("c140 deadbeef 0000000000001000 0102", "4103 00000000 00000000 00000001 00000000")
	events := serve(c)
	p.want("RDMAP-7.1-5", "4147 00000000 00000002 00000001 00000000 1100c000 0010 c140 deadbeef 0000000000001000")
	c.Terminate(wire.ReasonLocalCatastrophic, errors.New("too late"))
	p.wantEOF()
	p.nc.Close()
	asFault(t, next(t, events).err, wire.ReasonInvalidSTag, false)
}

// RDMAP-7.1-2, RDMAP-4.8-16, MPA2-8-1: a failure that no message has caused is reported without
// headers.
func TestLocalFailure(t *testing.T) {
	for _, tt := range []struct {
		id        string
		reason    wire.Reason
		terminate string
	}{
		{"RDMAP-4.8-12", wire.ReasonLocalCatastrophic, "00000000"},
		{"DDP-7.2-2", wire.ReasonDDPCatastrophic, "10000000"},
		{"MPA2-9.3-3", wire.ReasonMPACatastrophic, "20050000"},
	} {
		t.Run(tt.id, func(t *testing.T) {
			p, c := initiator(t, Options{Rev: 1}, repKey+"40010000")
			c.Terminate(tt.reason, io.ErrShortBuffer)
			p.wantTerminate(tt.terminate)
			if err := c.Post(&WorkRequest{Op: Send}); !errors.Is(err, io.ErrShortBuffer) {
				t.Fatalf("Post: %v", err)
			}
		})
	}
}

// The ULP learns the content of the peer's Terminate, and nothing answers it.
func TestTerminateReceived(t *testing.T) {
	const ddp = "4147 00000000 00000002 00000001 00000000"
	for _, tt := range []struct {
		id, ulpdu string
		reason    wire.Reason
		headers   string // DDP and Read Request
	}{
		// Untagged, on queue 2: RDMAP-5.4-1, RDMAP-5.4-2
		{"RDMAP-5.4-5 V-RDMAP-4", ddp + "1202c000 0076 4143 00000000 00000000 00000009 00000000",
			wire.ReasonNoBuffer, "4143 00000000 00000000 00000009 00000000"},
		{"RDMAP-4.8-13 V-RDMAP-5",
			ddp + "0100e000 002e 4141 00000000 00000001 00000001 00000000 11111111 2222222233333333 00001000 " +
				"44444444 5555555566666666",
			wire.ReasonReadInvalidSTag,
			"4141 00000000 00000001 00000001 00000000 11111111 2222222233333333 00001000 44444444 5555555566666666"},
		{"siw, swapped 1/2/05", ddp + "21050300 0064 4143 00000000 00000000 00000009 00000000", wire.ReasonTooLong,
			"4143 00000000 00000000 00000009 00000000"},
		// MPA2-8-3
		{"siw, swapped CRC error", ddp + "02020000", wire.ReasonCRC, ""},
		{"siw, too many Reads", ddp + "20070000", wire.ReasonRTR, ""}, // ambiguous: RDMAP interop notes
		{"adapters, LLP type 3", ddp + "23020000", wire.Reason{Layer: 2, EType: 3, Code: 2}, ""},
		{"MPA2-8-2 5", ddp + "20050000", wire.ReasonMPACatastrophic, ""},
		{"MPA2-8-2 6", ddp + "20060000", wire.ReasonIRD, ""},
		{"MPA2-8-2 7", ddp + "20070000", wire.ReasonRTR, ""},
		{"RDMAP-4.8-16", ddp + "00ff0000", wire.Reason{Code: 0xff}, ""},
		{"RDMAP-4.8-17", ddp + "01000000", wire.ReasonReadInvalidSTag, ""},
		{"RDMAP-4.8-18", ddp + "01010000", wire.ReasonReadBounds, ""},
		{"RDMAP-4.8-19", ddp + "01020000", wire.ReasonReadAccess, ""},
		{"RDMAP-4.8-20", ddp + "01030000", wire.ReasonReadStream, ""},
		{"RDMAP-4.8-21", ddp + "01040000", wire.ReasonReadWrap, ""},
		{"RDMAP-4.8-22", ddp + "02090000", wire.ReasonNotInvalidatedOp, ""},
		{"RDMAP-4.8-24", ddp + "02050000", wire.ReasonRDMAPVersion, ""},
		{"RDMAP-4.8-25", ddp + "02060000", wire.ReasonOpcode, ""},
		{"RDMAP-4.8-8 reserved bits", ddp + "10001fff", wire.ReasonDDPCatastrophic, ""},
		{"RDMAP-4.8-23", ddp + "02ff0000", wire.ReasonOperation, ""},
		{"RDMAP-4.8-26", ddp + "02080000", wire.ReasonGlobal, ""},
		{"extra zeros", ddp + "20020000" + strings.Repeat("00", 48), wire.ReasonCRC, ""},
		{"RDMAP-4.1-10 Invalidate STag is ignored", "4147 00000100 00000002 00000001 00000000 20020000",
			wire.ReasonCRC, ""},
		{"RDMAP-5.4-3 MSN 2", "4147 00000000 00000002 00000002 00000000 20020000", wire.ReasonOperation, ""},
		{"RDMAP-5.4-6 queue 1", "4147 00000000 00000001 00000001 00000000 20020000", wire.ReasonOperation, ""},
		{"RDMAP-5.4-6 MO 4", "4147 00000000 00000002 00000001 00000004 20020000", wire.ReasonOperation, ""},
		{"RDMAP-5.4-6 tagged", "c147 00000000 0000000000000000", wire.ReasonOperation, ""},
		{"RDMAP-5.4-6 cut short", ddp + "1202c0", wire.ReasonOperation, ""},
		{"RDMAP-5.4-6 header cut short", ddp + "1202c000 0076 4143", wire.ReasonOperation, ""},
		{"RDMAP-5.4-6 too long", ddp + strings.Repeat("00", 9000), wire.ReasonOperation, ""},
	} {
		t.Run(tt.id, func(t *testing.T) {
			// MPA2-8-4: as the first FPDU. RDMAP-5.4-4: it needs no buffer.
			p, c, _ := respondTo(t, reqKey+"40010000", Options{MaxSend: 1}, Answer{})
			var mem [16]byte
			expose(c, 0x100, mem[:], 0, RemoteWrite)
			done := make(sent, 1)
			p.send(tt.ulpdu)
			var ev Event
			se := asFault(t, c.Receive(&ev), tt.reason, true)
			if !strings.HasPrefix(se.Error(), "peer terminated") {
				t.Error(se)
			}
			if tt.headers != "" &&
				!bytes.Equal(append(se.Terminate.DDP, se.Terminate.ReadRequest...), unhex(tt.headers)) {
				t.Errorf("headers %x %x", se.Terminate.DDP, se.Terminate.ReadRequest)
			}
			// RDMAP-5.4-9: nothing more is sent.
			if err := c.Post(&WorkRequest{Op: Send, Done: done}); err == nil {
				t.Error("Post after the peer's Terminate")
			}
			if c.mem.find(0x100) == nil {
				t.Error("RDMAP-4.1-10: a Terminate has invalidated an STag")
			}
			c.Close()
			p.wantEOF()
		})
	}
}

// RDMAP-6.2.1-2, DDP-6.2.2-1, MPA-8-3, MPA-8-2, MPA-8-1: a reset, also inside of an FPDU, ends
// the stream with MPA's code 1.
func TestReset(t *testing.T) {
	for _, part := range []int{0, 10, 9000} {
		p, c := responder(t, Options{})
		var buf [64 << 10]byte
		expose(c, 0x100, buf[:], 0, RemoteWrite)
		p.write(frame(append(unhex("c140 00000100 0000000000000000"), make([]byte, 20000)...))[:part])
		p.nc.(*net.TCPConn).SetLinger(0)
		events := serve(c)
		p.nc.Close()
		asFault(t, next(t, events).err, wire.ReasonClosed, false)
	}
}

// MPA-7.2-2, MPA-3-11, DDP-3-10, DDP-3-11, MPA-7.1.1-19: the end of the stream is orderly between
// messages, and code 1 elsewhere.
func TestEndOfStream(t *testing.T) {
	send := frame(unhex("4143 00000000 00000000 00000001 00000000 0102"))
	half := frame(unhex("0143 00000000 00000000 00000001 00000000 0102"))
	long := frame(append(unhex("c140 00000100 0000000000000000"), make([]byte, 20000)...))
	for _, tt := range []struct {
		name string
		raw  []byte
		want error
	}{
		{"between FPDUs", nil, io.EOF},
		{"MPA-6-7 in ULPDU_Length", send[:1], io.ErrUnexpectedEOF},
		{"MPA-6-7 in the header", send[:10], io.ErrUnexpectedEOF},
		{"MPA-6-7 before the last byte", send[:len(send)-1], io.ErrUnexpectedEOF},
		{"between segments of a Send", half, io.ErrUnexpectedEOF},
		{"in a long payload", long[:10000], io.ErrUnexpectedEOF},
		{"in the CRC of a long FPDU", long[:len(long)-2], io.ErrUnexpectedEOF},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, c := responder(t, Options{})
			var buf [20000]byte
			expose(c, 0x100, buf[:], 0, RemoteWrite)
			p.write(tt.raw)
			p.nc.(*net.TCPConn).CloseWrite()
			var ev Event
			err := c.Receive(&ev)
			if !errors.Is(err, tt.want) {
				t.Fatal(err)
			}
			var se *StreamError
			if err != io.EOF && (!errors.As(err, &se) || se.Reason != wire.ReasonClosed) {
				t.Fatal(err)
			}
			// DDP-6.2.1-4: an orderly end leaves our direction open.
			if perr := c.Post(&WorkRequest{Op: Send}); (perr == nil) != (err == io.EOF) {
				t.Fatalf("Post after %v: %v", err, perr)
			}
			if err == io.EOF {
				c.Flush()
				p.want("DDP-6.2.1-4", "4143 00000000 00000000 00000001 00000000")
				if err := c.Post(&WorkRequest{Op: Read, Data: buf[:]}); !errors.Is(err, io.EOF) {
					t.Fatalf("a Read that nobody can answer: %v", err)
				}
			}
			c.Close()
			p.wantEOF() // DDP-6.2.1-5
		})
	}
}
