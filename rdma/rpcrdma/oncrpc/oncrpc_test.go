package oncrpc

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"github.com/iser-target/iser-target/tests/testkit"
)

var unhex = testkit.Unhex

// The examples of RFC 4506 and the pictures of RFC 5531, field by field.
func TestGolden(t *testing.T) {
	for _, tt := range []struct {
		name string
		put  func(e *Encoder)
		want string
	}{
		{"unsigned integers", func(e *Encoder) { e.Uint32(0xdeadbeef); e.Uint64(1 << 40) }, "deadbeef 0000010000000000"},
		{"booleans", func(e *Encoder) { e.Bool(true); e.Bool(false) }, "00000001 00000000"},
		{"opaque data with its count", func(e *Encoder) { e.Opaque([]byte{1, 2, 3, 4, 5}) },
			"00000005 0102030405000000"},
		{"opaque data of known length", func(e *Encoder) { e.Fixed([]byte{1, 2, 3}) }, "01020300"},
		{"a string, RFC 4506, section 7: filename", func(e *Encoder) { e.String("sillyprog") },
			"00000009 73696c6c7970726f67000000"},
		{"a call of procedure 0, AUTH_NONE", func(e *Encoder) {
			(&CallHeader{XID: 0x12345678, Program: 100003, Version: 4}).Append(e)
		}, "12345678 00000000 00000002 000186a3 00000004 00000000 00000000 00000000 00000000 00000000"},
		{"an accepted reply", func(e *Encoder) { (&ReplyHeader{XID: 0x12345678}).Append(e) },
			"12345678 00000001 00000000 00000000 00000000 00000000"},
		{"PROG_MISMATCH", func(e *Encoder) { (&ReplyHeader{XID: 1, Status: ProgMismatch, Low: 3, High: 4}).Append(e) },
			"00000001 00000001 00000000 00000000 00000000 00000002 00000003 00000004"},
		{"RPC_MISMATCH", func(e *Encoder) { (&ReplyHeader{XID: 1, Status: RPCMismatch, Low: 2, High: 2}).Append(e) },
			"00000001 00000001 00000001 00000000 00000002 00000002"},
		{"AUTH_ERROR", func(e *Encoder) { (&ReplyHeader{XID: 1, Status: AuthError, Why: 5}).Append(e) },
			"00000001 00000001 00000001 00000001 00000005"},
		{"AUTH_SYS", func(e *Encoder) {
			a := (&Sys{Stamp: 7, Machine: "host", UID: 1000, GID: 100, GIDs: []uint32{100, 4}}).Auth()
			a.append(e)
		}, "00000001 00000020 00000007 00000004 686f7374 000003e8 00000064 00000002 00000064 00000004"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var e Encoder
			tt.put(&e)
			if want := unhex(tt.want); !bytes.Equal(e.Bytes(), want) || e.Len() != len(want) {
				t.Fatalf("%x, want %x", e.Bytes(), want)
			}
		})
	}
}

func TestHeadersRoundTrip(t *testing.T) {
	auth := Auth{AuthSys, []byte{1, 2, 3, 4, 5}}
	call := CallHeader{XID: 9, Program: 1, Version: 2, Procedure: 3, Credential: auth, Verifier: Auth{AuthGSS, []byte{7}}}
	var e Encoder
	call.Append(&e)
	if e.Len() != call.Size() {
		t.Errorf("Size is %d, the header has %d bytes", call.Size(), e.Len())
	}
	var d Decoder
	d.Reset(e.Bytes(), nil)
	var got CallHeader
	if err := got.Parse(&d); err != nil || d.End() != nil || got.XID != 9 || got.Procedure != 3 ||
		!bytes.Equal(got.Credential.Body, auth.Body) || got.Verifier.Flavor != AuthGSS {
		t.Errorf("%+v, %v", got, err)
	}
	for _, h := range []ReplyHeader{{XID: 1, Verifier: auth}, {XID: 2, Status: ProcUnavail}, {XID: 3, Status: ProgMismatch, Low: 1, High: 4},
		{XID: 4, Status: RPCMismatch, Low: 2, High: 2}, {XID: 5, Status: AuthError, Why: 2}} {
		e.Reset()
		h.Append(&e)
		if e.Len() > MaxReplyHeader {
			t.Errorf("%d bytes are more than MaxReplyHeader", e.Len())
		}
		d.Reset(e.Bytes(), nil)
		var got ReplyHeader
		if err := got.Parse(&d); err != nil || d.End() != nil || got.XID != h.XID || got.Status != h.Status ||
			got.Low != h.Low || got.High != h.High || got.Why != h.Why || !bytes.Equal(got.Verifier.Body, h.Verifier.Body) {
			t.Errorf("%+v, want %+v, %v", got, h, err)
		}
	}
}

// What does not follow RFC 5531 is refused, each with the error that its answer depends on.
func TestRefusals(t *testing.T) {
	for _, tt := range []struct {
		name, wire string
		parse      func(d *Decoder) error
		want       error
	}{
		{"a reply where a call is due", "00000001 00000001 00000002", parseCall, ErrGarbage},
		{"message type 2", "00000001 00000002 00000002", parseCall, ErrGarbage},
		{"version 3 of RPC", "00000001 00000000 00000003 00000000 00000000 00000000", parseCall, ErrRPCVersion},
		{"a credential of 401 bytes", "00000001 00000000 00000002 00000001 00000001 00000000 00000001 00000191", parseCall, ErrGarbage},
		{"a call that ends in its verifier", "00000001 00000000 00000002 00000001 00000001 00000000 00000000 00000000 00000000", parseCall, ErrGarbage},
		{"a call where a reply is due", "00000001 00000000 00000000", parseReply, ErrGarbage},
		{"reply_stat 2", "00000001 00000001 00000002", parseReply, ErrGarbage},
		{"accept_stat 6", "00000001 00000001 00000000 00000000 00000000 00000006", parseReply, ErrGarbage},
		{"reject_stat 2", "00000001 00000001 00000001 00000002", parseReply, ErrGarbage},
		{"reject_stat with bit 31", "00000001 00000001 00000001 80000001 00000000", parseReply, ErrGarbage},
		{"a truncated PROG_MISMATCH", "00000001 00000001 00000000 00000000 00000000 00000002 00000003", parseReply, ErrGarbage},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var d Decoder
			d.Reset(unhex(tt.wire), nil)
			if err := tt.parse(&d); err != tt.want {
				t.Fatalf("%v, want %v", err, tt.want)
			}
		})
	}
}

func parseCall(d *Decoder) error { return new(CallHeader).Parse(d) }

func parseReply(d *Decoder) error { return new(ReplyHeader).Parse(d) }

func TestSys(t *testing.T) {
	want := Sys{Stamp: 7, Machine: "host", UID: 1000, GID: 100, GIDs: []uint32{100, 4}}
	got, err := ParseSys(want.Auth())
	if err != nil || got.UID != 1000 || got.Machine != "host" || !slices.Equal(got.GIDs, want.GIDs) {
		t.Errorf("%+v, %v", got, err)
	}
	for name, a := range map[string]Auth{
		"another flavor":   {AuthNone, nil},
		"17 groups":        (&Sys{GIDs: make([]uint32, 17)}).Auth(),
		"one byte too few": {AuthSys, want.Auth().Body[:31]},
		"a word too many":  {AuthSys, append(want.Auth().Body, 0, 0, 0, 0)},
	} {
		if s, err := ParseSys(a); !errors.Is(err, ErrGarbage) {
			t.Errorf("%s: %+v, %v", name, s, err)
		}
	}
}

func TestProtects(t *testing.T) {
	for _, tt := range []struct {
		auth Auth
		want bool
	}{
		{Auth{AuthGSS, unhex("00000001 00000000 00000001 00000001")}, false}, // authentication only
		{Auth{AuthGSS, unhex("00000001 00000000 00000001 00000002")}, true},
		{Auth{AuthGSS, unhex("00000001 00000000 00000001 00000003 00000000")}, true},
		{Auth{AuthSys, unhex("00000001 00000000 00000001 00000003")}, false},
		{Auth{AuthGSS, unhex("00000001")}, false},
	} {
		if got := tt.auth.Protects(); got != tt.want {
			t.Errorf("%+v: %t", tt.auth, got)
		}
	}
}

// stream returns a message with a word, an item of 5 bytes, a word, an item of 8 bytes and a word.
func stream() (e Encoder) {
	e.Uint32(1)
	e.Item([]byte("12345"))
	e.Uint32(2)
	e.Item([]byte("12345678"))
	e.Uint32(3)
	return e
}

// decode decodes stream and returns why that failed.
func decode(b []byte, chunks []Chunk) error {
	var d Decoder
	d.Reset(b, chunks)
	a, first, b2, second, c := d.Uint32(), d.Item(100), d.Uint32(), d.Item(100), d.Uint32()
	if err := d.End(); err != nil {
		return err
	}
	if a != 1 || string(first) != "12345" || b2 != 2 || string(second) != "12345678" || c != 3 {
		return errors.New("other data")
	}
	return nil
}

// Items may be in the message or in chunks: RFC 8166, sections 3.4.4 and 3.4.5.
func TestItems(t *testing.T) {
	e := stream()
	if len(e.Items()) != 2 || e.Len() != 12+8+8+8 {
		t.Fatalf("%d items, %d bytes", len(e.Items()), e.Len())
	}
	whole := e.Append(nil)
	const firstInline = "00000001 00000005 3132333435000000 00000002 00000008 00000003"
	const secondInline = "00000001 00000005 00000002 00000008 3132333435363738 00000003"
	five, eight, padded := []byte("12345"), []byte("12345678"), []byte("12345\x00\x00\x00")
	at := func(pos uint32, b []byte) Chunk { return Chunk{pos, b} }
	reply := func(b []byte) Chunk { return Chunk{AnyPosition, b} }
	for _, tt := range []struct {
		name   string
		b      []byte
		chunks []Chunk
		want   error
	}{
		{"no chunks", whole, nil, nil},
		{"RPCRDMA-3.4.4.1-1 RPCRDMA-3.4.4.4-2 RPCRDMA-3.4.5-1 both reduced; the second position includes the first item and its padding",
			e.Bytes(), []Chunk{at(8, five), at(24, eight)}, nil},
		{"RPCRDMA-3.4.5.2-1 the first chunk includes its padding", e.Bytes(), []Chunk{at(8, padded), at(24, eight)}, nil},
		{"only the first reduced", unhex(secondInline), []Chunk{at(8, five)}, nil},
		{"only the second reduced", unhex(firstInline), []Chunk{at(24, eight)}, nil},
		{"RPCRDMA-3.4.5.2-2 a chunk of 6 bytes for 5", e.Bytes(), []Chunk{at(8, []byte("123456")), at(24, eight)}, ErrGarbage},
		{"RPCRDMA-3.4.5.2-2 a chunk of 12 bytes for 5", e.Bytes(), []Chunk{at(8, make([]byte, 12)), at(24, eight)}, ErrGarbage},
		{"RPCRDMA-3.4.4.4-1 two items in one chunk", unhex("00000001 00000005 00000003"),
			[]Chunk{at(8, append(padded, unhex("00000002 00000008 3132333435363738")...))}, ErrGarbage},
		{"RPCRDMA-6.1-1 RPCRDMA-3.4.2-1 RPCRDMA-3.4.4.3-1 a word that is not an item is reduced", e.Bytes(), []Chunk{at(0, five)}, ErrNotEligible},
		{"RPCRDMA-3.4.4.2-1 a count is reduced", e.Bytes(), []Chunk{at(4, five)}, ErrNotEligible},
		{"RPCRDMA-3.4.5-4 a position inside an item", whole, []Chunk{at(12, five)}, ErrNotEligible},
		{"RPCRDMA-3.4.5-4 a position after the stream", whole, []Chunk{at(1000, five)}, ErrNotEligible},
		{"reply: both in write chunks", e.Bytes(), []Chunk{reply(five), reply(eight)}, nil},
		{"RPCRDMA-4.3.2-3 reply: more items than chunks", unhex(secondInline), []Chunk{reply(five)}, nil},
		{"RPCRDMA-4.3.2.3-1 reply: an empty chunk", unhex(firstInline), []Chunk{reply(nil), reply(eight)}, nil},
		{"RPCRDMA-6.1-2 reply: an item is in the message in spite of its chunk", whole, []Chunk{reply(five[:0]), reply(eight[:0])}, ErrNotReduced},
		{"RPCRDMA-3.4.6.2-2 reply: a chunk with padding", e.Bytes(), []Chunk{reply(padded), reply(eight)}, ErrGarbage},
		{"RPCRDMA-6.1-2 reply: a third chunk is filled", e.Bytes(), []Chunk{reply(five), reply(eight), reply(eight)}, ErrNotEligible},
		{"reply: a third chunk is unused", e.Bytes(), []Chunk{reply(five), reply(eight), reply(eight[:0])}, nil},
		{"a word too many", append(e.Append(nil), 0, 0, 0, 0), nil, ErrGarbage},
		{"a word too few", whole[:len(whole)-4], nil, ErrGarbage},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := decode(tt.b, tt.chunks); err != tt.want {
				t.Fatalf("%v, want %v", err, tt.want)
			}
		})
	}
}

func TestDecoderBounds(t *testing.T) {
	var d Decoder
	for name, f := range map[string]func(){
		"a count above the limit":                      func() { d.Opaque(4) },
		"an array whose elements do not fit":           func() { d.Count(1<<30, 8) },
		"an item above the limit":                      func() { d.Item(4) },
		"a boolean of 5":                               func() { d.Bool() },
		"opaque data that ends in its padding":         func() { d.Opaque(5) },
		"fixed data that is longer than the message":   func() { d.Fixed(10) },
		"a hyper integer after a word of the same one": func() { d.Uint32(); d.Uint64() },
	} {
		d.Reset(unhex("00000005 3132333435")[:9], nil)
		if f(); d.Err() != ErrGarbage {
			t.Errorf("%s: %v", name, d.Err())
		}
		if d.Uint32() != 0 || d.Opaque(1) != nil || d.String(1) != "" {
			t.Errorf("%s: the decoder returns data after its error", name)
		}
	}
}

// FuzzMessage decodes arbitrary bytes as both kinds of message. What is accepted encodes to the same
// bytes, and what an item returns comes from the message or from its chunk.
func FuzzMessage(f *testing.F) {
	e := stream()
	f.Add(e.Bytes())
	f.Add(unhex("12345678 00000000 00000002 000186a3 00000004 00000000 00000000 00000000 00000000 00000000"))
	f.Add(unhex("00000001 00000001 00000000 00000000 00000000 00000002 00000003 00000004"))
	f.Add(unhex("00000001 00000001 00000001 00000001 00000005"))
	f.Add((&Sys{Machine: "host", GIDs: []uint32{1, 2}}).Auth().Body)
	testkit.FuzzBytes(f, func(t testing.TB, b []byte) {
		var d Decoder
		d.Reset(b, nil)
		var call CallHeader
		if call.Parse(&d) == nil {
			check(t, b[:len(b)-len(d.Rest())], func(e *Encoder) { call.Append(e) })
		}
		d.Reset(b, nil)
		var reply ReplyHeader
		if reply.Parse(&d) == nil {
			check(t, b[:len(b)-len(d.Rest())], func(e *Encoder) { reply.Append(e) })
		}
		if s, err := ParseSys(Auth{AuthSys, b}); err == nil {
			if again, err := ParseSys(s.Auth()); err != nil || again.UID != s.UID || len(again.GIDs) != len(s.GIDs) {
				t.Fatalf("%+v, %v", again, err)
			}
		}
		for _, pos := range []uint32{8, AnyPosition} {
			chunk := []byte("chunk")
			d.Reset(b, []Chunk{{pos, chunk}})
			d.Uint32()
			if v := d.Item(1 << 20); len(v) > max(len(b), len(chunk)) {
				t.Fatalf("%d bytes of %d", len(v), len(b))
			}
			d.Uint32()
			d.End()
		}
	})
}

// check encodes a header again and compares it, except for the padding, which may have any content.
func check(t testing.TB, want []byte, put func(e *Encoder)) {
	t.Helper()
	var e Encoder
	put(&e)
	if len(e.Bytes()) != len(want) {
		t.Fatalf("%x, want %x", e.Bytes(), want)
	}
}

func TestNoAllocations(t *testing.T) {
	var e Encoder
	var d Decoder
	var h CallHeader
	data := make([]byte, 100)
	step := func() {
		e.Reset()
		h = CallHeader{XID: 1, Program: 2, Version: 3}
		h.Append(&e)
		e.Item(data)
		d.Reset(e.Bytes(), nil)
		if h.Parse(&d) != nil {
			t.Fatal(d.Err())
		}
	}
	step()
	if n := testing.AllocsPerRun(100, step); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
