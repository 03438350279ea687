package wire

import (
	"bytes"
	"encoding/binary"
	"reflect"
	"testing"

	"github.com/iser-target/iser-target/tests/testkit"
)

var unhex = testkit.Unhex

const nullCall = "12345678 00000000 00000002 000186a3 00000004 00000000 00000000 00000000 00000000 00000000"

// golden holds the vectors of the tables: derived bytes, and the header that they stand for.
var golden = []struct {
	name    string // row ids
	wire    string
	header  Header
	payload string
}{
	{"V-RPCRDMA-1 RPCRDMA-3.2-1 RPCRDMA-3.2-2 RPCRDMA-3.5.1-1 a call",
		"12345678 00000001 00000020 00000000 00000000 00000000 00000000",
		Header{XID: 0x12345678, Version: 1, Credits: 32}, nullCall},
	{"V-RPCRDMA-3 a reply", "12345678 00000001 00000020 00000000 00000000 00000000 00000000",
		Header{XID: 0x12345678, Version: 1, Credits: 32}, "12345678 00000001 00000000 00000000 00000000 00000000"},
	{"V-RPCRDMA-4 RPCRDMA-3.4.5-3 a read chunk in two segments",
		"12345678 00000001 00000020 00000000" +
			"00000001 00000094 00005501 00001000 ffff888010000000" + // 1 P H L OO
			"00000001 00000094 00005502 00000389 ffff888020000000" +
			"00000000 00000000 00000000",
		Header{XID: 0x12345678, Version: 1, Credits: 32, Reads: []ReadSegment{
			{0x94, Segment{0x5501, 4096, 0xffff888010000000}}, {0x94, Segment{0x5502, 905, 0xffff888020000000}}}}, ""},
	{"V-RPCRDMA-5 RPCRDMA-3.4.6-4 a write chunk and a reply chunk",
		"12345678 00000001 00000020 00000000 00000000" +
			"00000001 00000002 00006601 00001000 0000000000001000 00006602 00001000 0000000000009000 00000000" +
			"00000001 00000001 00007701 00002000 0000000000020000",
		Header{XID: 0x12345678, Version: 1, Credits: 32,
			Writes: []Chunk{{{0x6601, 4096, 0x1000}, {0x6602, 4096, 0x9000}}}, Reply: Chunk{{0x7701, 8192, 0x20000}},
			HasReply: true}, ""},
	{"V-RPCRDMA-6 the header of its reply",
		"12345678 00000001 00000020 00000000 00000000" +
			"00000001 00000002 00006601 00001000 0000000000001000 00006602 00000389 0000000000009000 00000000" +
			"00000001 00000001 00007701 00000000 0000000000020000",
		Header{XID: 0x12345678, Version: 1, Credits: 32,
			Writes: []Chunk{{{0x6601, 4096, 0x1000}, {0x6602, 905, 0x9000}}}, Reply: Chunk{{0x7701, 0, 0x20000}},
			HasReply: true}, ""},
	{"V-RPCRDMA-7 RPCRDMA-3.5.3-2 a long call",
		"12345678 00000001 00000020 00000001" +
			"00000001 00000000 00005503 00000800 0000000000003000 00000000 00000000 00000000",
		Header{XID: 0x12345678, Version: 1, Credits: 32, Proc: NoMsg,
			Reads: []ReadSegment{{0, Segment{0x5503, 2048, 0x3000}}}}, ""},
	{"V-RPCRDMA-8 RPCRDMA-4.5-5 ERR_VERS", "12345678 00000007 00000020 00000004 00000001 00000001 00000001",
		Header{XID: 0x12345678, Version: 7, Credits: 32, Proc: Error, Code: CodeVersion, Low: 1, High: 1}, ""},
	{"V-RPCRDMA-9 RPCRDMA-4.5-5 ERR_CHUNK", "12345678 00000001 00000020 00000004 00000002",
		Header{XID: 0x12345678, Version: 1, Credits: 32, Proc: Error, Code: CodeChunk}, ""},
	{"RPCRDMA-2.3.2-1 RPCRDMA-4.4.3-1 the largest handle and offset",
		"00000001 00000001 00000001 00000000 00000001 00000004 ffffffff ffffffff ffffffffffffffff 00000000 00000000 00000000",
		Header{XID: 1, Version: 1, Credits: 1, Reads: []ReadSegment{{4, Segment{1<<32 - 1, 1<<32 - 1, 1<<64 - 1}}}}, ""},
	{"V-BRPC-1 BRPC-5.1-3 a call in the reverse direction", "12345678 00000001 00000010 00000000 00000000 00000000 00000000",
		Header{XID: 0x12345678, Version: 1, Credits: 16},
		"12345678 00000000 00000002 40000000 00000001 00000000 00000000 00000000 00000000 00000000"},
	{"V-BRPC-2 a reply in the reverse direction", "12345678 00000001 00000010 00000000 00000000 00000000 00000000",
		Header{XID: 0x12345678, Version: 1, Credits: 16}, "12345678 00000001 00000000 00000000 00000000 00000000"},
	{"V-BRPC-3 chunks are refused", "12345678 00000001 00000010 00000004 00000002",
		Header{XID: 0x12345678, Version: 1, Credits: 16, Proc: Error, Code: CodeChunk}, ""},
	{"empty and unused write chunks, two lists", // RFC 8166, section 4.7, without a picture of its own
		"00000001 00000001 00000001 00000000 00000000" +
			"00000001 00000000 00000001 00000001 00000002 00000000 0000000000000003 00000000 00000001 00000000",
		Header{XID: 1, Version: 1, Credits: 1, Writes: []Chunk{{}, {{2, 0, 3}}}, Reply: Chunk{}, HasReply: true}, ""},
}

// RPCRDMA-4-1 RPCRDMA-4.1.2-1: headers are XDR, as in the pictures of RFC 8166, section 4.
func TestGolden(t *testing.T) {
	for _, tt := range golden {
		t.Run(tt.name, func(t *testing.T) {
			want := unhex(tt.wire)
			if got := tt.header.Append(nil); !bytes.Equal(got, want) || tt.header.Size() != len(want) {
				t.Fatalf("encoded %x, size %d, want %x", got, tt.header.Size(), want)
			}
			var h Header
			payload, err := h.Parse(append(bytes.Clone(want), unhex(tt.payload)...))
			if err != nil || !bytes.Equal(payload, unhex(tt.payload)) {
				t.Fatalf("payload %x, %v", payload, err)
			}
			if !same(&h, &tt.header) {
				t.Fatalf("decoded %+v, want %+v", h, tt.header)
			}
			// Truncation at each byte ends in an error, with the rules of RFC 8166, section 4.5.
			for n := range want {
				_, err := h.Parse(want[:n])
				switch {
				case err == nil:
					t.Fatalf("accepted %d of %d bytes", n, len(want))
				case n >= fixedLen && tt.header.Proc == Error && err != ErrBadError,
					n < fixedLen && err != ErrTooShort,
					n >= fixedLen && n < MinLen && tt.header.Proc != Error && err != ErrTooShort,
					n >= MinLen && tt.header.Proc != Error && err != ErrTruncated:
					t.Fatalf("%d of %d bytes: %v", n, len(want), err)
				}
			}
		})
	}
}

// same compares what the wire carries.
func same(a, b *Header) bool {
	chunks := func(h *Header) (all [][]Segment) {
		for _, c := range h.Writes {
			all = append(all, append([]Segment{}, c...))
		}
		return append(all, append([]Segment{}, h.Reply...))
	}
	return a.XID == b.XID && a.Version == b.Version && a.Credits == b.Credits && a.Proc == b.Proc && a.Code == b.Code &&
		a.Low == b.Low && a.High == b.High && a.HasReply == b.HasReply &&
		reflect.DeepEqual(append([]ReadSegment{}, a.Reads...), append([]ReadSegment{}, b.Reads...)) &&
		reflect.DeepEqual(chunks(a), chunks(b))
}

const fixed = "00000001 00000001 00000001"

func TestRefusals(t *testing.T) {
	many := func(n int, proc string, unit string) string {
		b := fixed + proc
		for range n {
			b += unit
		}
		return b
	}
	const read = "00000001 00000004 00000001 00000001 0000000000000001"
	for _, tt := range []struct {
		name, wire string
		want       error
	}{
		{"RPCRDMA-4.5-1 27 bytes", fixed + "00000000 00000000 00000000 000000", ErrTooShort},
		{"RPCRDMA-4.5.1-1 version 0", "00000001 00000000 00000001 00000000 00000000 00000000 00000000", ErrVersion},
		{"RPCRDMA-4.5.1-1 BRPC-5-1 version 2", "00000001 00000002 00000001 00000000 00000000 00000000 00000000", ErrVersion},
		{"RPCRDMA-4.5.2-1 rdma_proc 5", fixed + "00000005 00000000 00000000 00000000", ErrProc},
		{"RPCRDMA-4.6.1-2 RDMA_MSGP", fixed + "00000002 00000000 00000000 00000000", ErrProc},
		{"RPCRDMA-4.6.2-2 RDMA_DONE", fixed + "00000003 00000000 00000000 00000000", ErrProc},
		{"RPCRDMA-4.1.2-2 a flag of 2 in the read list", fixed + "00000000 00000002 00000000 00000000", ErrFlag},
		{"RPCRDMA-4.1.2-2 a flag of 2 in the write list", fixed + "00000000 00000000 00000002 00000000", ErrFlag},
		{"RPCRDMA-4.1.2-2 a flag of 2 before the reply chunk", fixed + "00000000 00000000 00000000 00000002", ErrFlag},
		{"RPCRDMA-4.1.2-3 a count of 2^32-1", fixed + "00000000 00000000 00000001 ffffffff", ErrTruncated},
		{"RPCRDMA-4.1.2-3 1025 read segments", many(1025, "00000000", read) + "000000000000000000000000", ErrSegments},
		{"RPCRDMA-4.1.2-3 1025 empty write chunks", many(1025, "0000000000000000", "0000000100000000") + "0000000000000000", ErrSegments},
		{"RPCRDMA-3.4.5-2 position 0x95", fixed + "00000000 00000001 00000095 00000001 00000001 0000000000000001 00000000 00000000 00000000", ErrPosition},
		{"RPCRDMA-3.4.5-4 positions that do not ascend",
			fixed + "00000000" + read[:9] + "00000008" + read[17:] + read + "00000000 00000000 00000000", ErrOrder},
		{"RPCRDMA-4.2.4-1 RDMA_NOMSG with empty lists", fixed + "00000001 00000000 00000000 00000000", ErrNoPayload},
		{"RPCRDMA-4.2.4-1 RDMA_NOMSG with only a write list",
			fixed + "00000001 00000000 00000001 00000001 00000001 00000001 0000000000000001 00000000 00000000", ErrNoPayload},
		{"RPCRDMA-4.2.4-1 RDMA_NOMSG without a read chunk at position 0", fixed + "00000001" + read + "00000000 00000000 00000000", ErrNoPayload},
		{"RDMA_NOMSG with a payload", fixed + "00000001 00000001 00000000 00000001 00000001 0000000000000001 00000000 00000000 00000000 12345678", ErrLong},
		{"RDMA_MSG with a read chunk at position 0", fixed + "00000000 00000001 00000000 00000001 00000001 0000000000000001 00000000 00000000 00000000", ErrTwice},
		{"RPCRDMA-4.5-6 rdma_err 3", fixed + "00000004 00000003", ErrBadError},
		{"RPCRDMA-4.5-6 ERR_VERS without versions", fixed + "00000004 00000001", ErrBadError},
		{"RPCRDMA-7-1 ERR_CHUNK of version 2", "00000001 00000002 00000001 00000004 00000002", ErrBadError},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var h Header
			payload, err := h.Parse(unhex(tt.wire))
			if err != tt.want || payload != nil && err != ErrLong && err != ErrNoPayload && err != ErrTwice {
				t.Fatalf("%v, want %v", err, tt.want)
			}
			if len(unhex(tt.wire)) >= MinLen && h.XID != 1 {
				t.Fatalf("RPCRDMA-4.2-1: XID %d", h.XID)
			}
		})
	}
}

// RPCRDMA-3.4.4-2: the length of a chunk is the sum of its segments, which may exceed 32 bits.
func TestChunkLen(t *testing.T) {
	if n := (Chunk{{Length: 1<<32 - 1}, {Length: 1<<32 - 1}}).Len(); n != 2*(1<<32-1) {
		t.Errorf("%d bytes", n)
	}
}

// RPCRDMA-4.6.1-1 RPCRDMA-4.6.2-1: there is no way to send RDMA_MSGP or RDMA_DONE.
func TestAppendRefuses(t *testing.T) {
	for _, p := range []Proc{MsgP, Done, 5} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%v was encoded", p)
				}
			}()
			(&Header{Proc: p}).Append(nil)
		}()
	}
}

func TestNames(t *testing.T) {
	if Msg.String() != "RDMA_MSG" || Error.String() != "RDMA_ERROR" || Proc(9).String() != "rdma_proc 9" ||
		CodeVersion.String() != "ERR_VERS" || CodeChunk.String() != "ERR_CHUNK" || Code(7).String() != "rdma_err 7" {
		t.Error("names of RFC 8166")
	}
}

func TestPrivate(t *testing.T) {
	for _, tt := range []struct {
		p    Private
		wire string
	}{
		{Private{true, 4096, 4096}, "f6ab0e18 01010303"}, // V-RPCRDMA-10 RPCRDMA-8797.4-1
		{Private{false, 4096, 4096}, "f6ab0e18 01000303"},
		{Private{true, 1024, 262144}, "f6ab0e18 010100ff"}, // RPCRDMA-8797.4.2-1
		{Private{false, 65536, 2048}, "f6ab0e18 01003f01"},
	} {
		b := unhex(tt.wire)
		if got := tt.p.Append(nil); !bytes.Equal(got, b) {
			t.Errorf("%+v: %x, want %x", tt.p, got, b)
		}
		// RPCRDMA-8797.5.2-1: the identifier may be anywhere.
		for _, at := range []int{0, 1, 4, 13} {
			if got, ok := FindPrivate(append(make([]byte, at), b...)); !ok || got != tt.p {
				t.Errorf("%x at %d: %+v, %t", b, at, got, ok)
			}
		}
	}
	if b := (Private{Send: 1, Receive: 1 << 20}).Append(nil); b[6] != 0 || b[7] != 255 {
		t.Errorf("sizes out of range: %x", b)
	}
	for _, tt := range []struct {
		name, wire string
		want       Private
	}{
		{"RPCRDMA-8797.5.1-1 nothing", "", DefaultPrivate()},
		{"RPCRDMA-8797.5.1-1 7 bytes", "f6ab0e18 010103", DefaultPrivate()},
		{"RPCRDMA-8797.5.1-1 another identifier", "f6ab0e19 01010303", DefaultPrivate()},
		{"RPCRDMA-8797.5.1-1 RPCRDMA-8797.6-1 version 2", "f6ab0e18 02010303", DefaultPrivate()},
		{"RPCRDMA-8797.5.2-2 the identifier in the last 4 bytes", "00000000 f6ab0e18", DefaultPrivate()},
		{"RPCRDMA-8797.4-2 reserved bits", "f6ab0e18 01ff0303", Private{true, 4096, 4096}},
		{"RPCRDMA-8797.4-2 reserved bits without R", "f6ab0e18 01fe0303", Private{false, 4096, 4096}},
		{"RPCRDMA-8797.6-1 bytes of a later format follow", "f6ab0e18 01010303 0102030405060708", Private{true, 4096, 4096}},
	} {
		if got, ok := FindPrivate(unhex(tt.wire)); got != tt.want || ok != (tt.want != DefaultPrivate()) {
			t.Errorf("%s: %+v, %t", tt.name, got, ok)
		}
	}
}

// RPCRDMA-8797.4.2-2: the smaller of what one sends and the other receives.
func TestThreshold(t *testing.T) {
	for _, tt := range []struct{ send, receive, want int }{{1024, 1024, 1024}, {1024, 4096, 1024}, {4096, 1024, 1024},
		{4096, 4096, 4096}} {
		if got := Threshold(Private{Send: tt.send, Receive: 1 << 18}, Private{Send: 1 << 18, Receive: tt.receive}); got != tt.want {
			t.Errorf("%+v: %d", tt, got)
		}
	}
}

// FuzzHeader decodes arbitrary bytes. What is accepted encodes to the same bytes, and memory depends
// on the input only.
func FuzzHeader(f *testing.F) {
	for _, tt := range golden {
		f.Add(append(unhex(tt.wire), unhex(tt.payload)...))
	}
	f.Add(unhex("00000001 00000001 00000001 00000000 00000000 00000001 ffffffff"))
	f.Add(unhex("f6ab0e18 01010303"))
	var h Header
	testkit.FuzzBytes(f, func(t testing.TB, b []byte) {
		payload, err := h.Parse(b)
		if err == nil {
			n := len(b) - len(payload)
			if h.Proc == Error {
				n = h.Size() // what follows is ignored
			}
			if got := h.Append(nil); !bytes.Equal(got, b[:n]) || h.Size() != n {
				t.Fatalf("%x, want %x", got, b[:n])
			}
		}
		if len(h.Reads) > MaxSegments || len(h.segments)+len(h.counts) > 2*MaxSegments {
			t.Fatalf("%d and %d segments", len(h.Reads), len(h.segments))
		}
		if xid, _, _, _, ok := Peek(b); ok && xid != binary.BigEndian.Uint32(b) {
			t.Fatal("RPCRDMA-4.2-1: the XID")
		}
		if p, ok := FindPrivate(b); ok {
			if again, ok := FindPrivate(p.Append(nil)); !ok || again != p {
				t.Fatalf("%+v, %+v", p, again)
			}
		}
	})
}

func TestNoAllocations(t *testing.T) {
	var h Header
	b := make([]byte, 0, 4096)
	all := make([][]byte, len(golden))
	for i, tt := range golden {
		all[i] = append(unhex(tt.wire), unhex(tt.payload)...)
	}
	step := func() {
		for _, m := range all {
			if _, err := h.Parse(m); err != nil {
				t.Fatal(err)
			}
			b = h.Append(b[:0])
		}
	}
	step()
	if n := testing.AllocsPerRun(100, step); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
