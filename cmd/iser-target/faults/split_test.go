package faults

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/tests/testkit"
)

// all splits b and returns the kinds of the units, their bytes one after the other, and the first error.
func all(s *Splitter, b []byte) (kinds []Kind, passed []byte, err error) {
	for {
		u, need, err := s.Split(b)
		if err != nil || need > 0 {
			return kinds, passed, err
		}
		kinds, passed, b = append(kinds, u.Kind), append(passed, u.Bytes...), b[len(u.Bytes):]
	}
}

// An MPA Request Frame without private data, and a Reply Frame with 4 bytes (RFC 5044, section 7.1).
var (
	mpaRequest = testkit.Unhex("4d504120494420526571204672616d65 40 01 0000")          // key, flags C, revision, PD_Length
	mpaReply   = testkit.Unhex("4d504120494420526570204672616d65 40 01 0004 80000000") // with private data
)

// FPDUs (RFC 5044, section 4).
var (
	send = testkit.Unhex(`
		0014       // ULPDU_Length
		41 43      // DDP: untagged, last; RDMAP: Send
		00000000 00000000 00000001 00000000 // reserved, queue, MSN, MO
		abcd       // payload
		0000       // pad
		11223344   // CRC`)
	rdmaWrite    = testkit.Unhex("0010 c1 40 00000001 0000000000000000 abcd 0000 11223344")
	readResponse = testkit.Unhex("0010 c1 42 00000001 0000000000000000 abcd 0000 11223344")
	empty        = testkit.Unhex("0000 0000 11223344")
)

func TestSplitMPA(t *testing.T) {
	to, from := NewSplitters()
	if kinds, _, err := all(to, slices.Concat(mpaRequest, send, readResponse, empty)); err != nil || !slices.Equal(kinds, []Kind{Startup, FPDU, ReadResponse, FPDU}) {
		t.Errorf("to the target: %q, %v", kinds, err)
	}
	if kinds, _, err := all(from, slices.Concat(mpaReply, rdmaWrite, send[:7])); err != nil || !slices.Equal(kinds, []Kind{Startup, RDMAWrite}) {
		t.Errorf("from the target: %q, %v", kinds, err)
	}
	to, _ = NewSplitters()
	to.Split(mpaRequest)
	for _, tt := range []struct {
		b      []byte
		header int
	}{{send, 20}, {rdmaWrite, 16}, {empty, 2}} {
		if u, _, _ := to.Split(tt.b); u.Header != tt.header || len(u.Bytes) != len(tt.b) {
			t.Errorf("% x: header of %d bytes, want %d, %d bytes in all", tt.b, u.Header, tt.header, len(u.Bytes))
		}
	}
}

// header returns the first bytes of a PDU with data.
func header(opcode, flags byte, data string) []byte {
	b := make([]byte, 48)
	b[0], b[1], b[7] = opcode, flags, byte(len(data))
	return append(append(b, data...), make([]byte, (4-len(data)%4)%4)...)
}

// Login PDUs (RFC 7143, sections 11.12 and 11.13): the request, and the answer that ends the login.
const loginRequest, loginResponse, transit = 0x43, 0x23, 0x87

func TestSplitPDUs(t *testing.T) {
	command, response := header(0x01, 0x80, "abc"), header(0x21, 0x80, "")
	for _, tt := range []struct {
		name, answer string
		header, data int // bytes of digests
	}{
		{"without digests", "HeaderDigest=None\x00DataDigest=None\x00", 0, 0},
		{"with digests", "HeaderDigest=CRC32C\x00DataDigest=CRC32C\x00", 4, 4},
		{"header digest", "HeaderDigest=CRC32C\x00", 4, 0},
		{"data digest", "DataDigest=CRC32C\x00", 0, 4},
	} {
		t.Run(tt.name, func(t *testing.T) {
			to, from := NewSplitters()
			if kinds, _, err := all(to, header(loginRequest, transit, "a=b")); err != nil || !slices.Equal(kinds, []Kind{Login}) {
				t.Fatalf("%q, %v", kinds, err)
			}
			if kinds, _, err := all(from, header(loginResponse, transit, tt.answer)); err != nil || !slices.Equal(kinds, []Kind{Login}) {
				t.Fatalf("%q, %v", kinds, err)
			}
			b := slices.Concat(command[:48], make([]byte, tt.header), command[48:], make([]byte, tt.data))
			u, need, err := to.Split(slices.Concat(b, b[:10]))
			if err != nil || need != 0 || u.Kind != PDU || u.Header != 48+tt.header || !bytes.Equal(u.Bytes, b) {
				t.Errorf("%+v, %d, %v", u, need, err)
			}
			b = slices.Concat(response, make([]byte, tt.header))
			if u, _, err = from.Split(b); err != nil || !bytes.Equal(u.Bytes, b) {
				t.Errorf("%+v, %v", u, err)
			}
		})
	}
	t.Run("step-up", func(t *testing.T) { // RFC 7145, section 5.1
		to, from := NewSplitters()
		all(to, header(loginRequest, transit, ""))
		all(from, header(loginResponse, transit, "RDMAExtensions=Yes\x00"))
		if kinds, _, err := all(to, slices.Concat(mpaRequest, send)); err != nil || !slices.Equal(kinds, []Kind{Startup, FPDU}) {
			t.Errorf("%q, %v", kinds, err)
		}
	})
	t.Run("refused login", func(t *testing.T) {
		to, from := NewSplitters()
		all(to, header(loginRequest, transit, ""))
		b := header(loginResponse, transit, "DataDigest=CRC32C\x00")
		b[36] = 2 // status class: initiator error
		if kinds, _, err := all(from, slices.Concat(b, b)); err != nil || !slices.Equal(kinds, []Kind{Login, Login}) {
			t.Errorf("%q, %v", kinds, err)
		}
	})
}

func TestSplitRefuses(t *testing.T) {
	markers := slices.Clone(mpaRequest)
	markers[16] |= 0x80
	long := slices.Clone(mpaRequest)
	long[18] = 0xff
	for want, b := range map[string][]byte{
		"neither an MPA Request":    []byte("GET /"),
		"where an MPA Request":      []byte("MPA rest"),
		"asks for markers":          markers,
		"65280 bytes of private":    long,
		"first byte 0x01: neither ": header(0x01, 0x80, ""),
	} {
		to, _ := NewSplitters()
		if _, _, err := all(to, b); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("% x: %v, want %q", b, err, want)
		}
	}
	_, from := NewSplitters()
	if _, _, err := all(from, mpaReply); err == nil {
		t.Error("the target may begin")
	}
}

// FuzzSplit feeds both directions whole, and byte by byte: the units are the same, nothing is lost,
// and Split asks only for what it needs.
func FuzzSplit(f *testing.F) {
	f.Add(slices.Concat(mpaRequest, send, readResponse), slices.Concat(mpaReply, rdmaWrite))
	f.Add(slices.Concat(header(loginRequest, transit, "a"), header(1, 0x80, "abc")), slices.Concat(header(loginResponse, transit, "DataDigest=CRC32C\x00"), header(0x21, 0x80, "")))
	f.Add(header(loginRequest, transit, ""), slices.Concat(header(loginResponse, transit, "RDMAExtensions=Yes\x00"), mpaReply, send))
	f.Fuzz(func(t *testing.T, toTarget, fromTarget []byte) {
		to, from := NewSplitters()
		slowTo, slowFrom := NewSplitters()
		for i, tt := range []struct {
			b          []byte
			fast, slow *Splitter
		}{{toTarget, to, slowTo}, {fromTarget, from, slowFrom}} {
			kinds, passed, err := all(tt.fast, tt.b)
			if !bytes.HasPrefix(tt.b, passed) {
				t.Fatalf("direction %d: the units are not what came", i)
			}
			var slowKinds []Kind
			var slowErr error
			rest := 0
			for n := 1; n <= len(tt.b) && slowErr == nil; n++ {
				var u Unit
				var need int
				u, need, slowErr = tt.slow.Split(tt.b[rest:n])
				switch {
				case slowErr != nil:
				case need > 0:
					if need <= n-rest {
						t.Fatalf("direction %d: %d bytes are needed, and %d are there", i, need, n-rest)
					}
				case len(u.Bytes) != n-rest || u.Header > len(u.Bytes):
					t.Fatalf("direction %d: a unit of %d bytes, header %d, is ready after %d", i, len(u.Bytes), u.Header, n-rest)
				default:
					slowKinds, rest = append(slowKinds, u.Kind), n
				}
			}
			if !slices.Equal(kinds, slowKinds) || rest != len(passed) || (err == nil) != (slowErr == nil) {
				t.Fatalf("direction %d: %q, %d bytes, %v; byte by byte %q, %d bytes, %v", i, kinds, len(passed), err, slowKinds, rest, slowErr)
			}
		}
	})
}
