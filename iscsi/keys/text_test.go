package keys

import (
	"encoding/base64"
	"errors"
	"slices"
	"strings"
	"testing"
)

func TestParseText(t *testing.T) {
	for _, tc := range []struct {
		name, in string
		want     []Pair
	}{
		{"empty", "", nil},
		{"ISCSI-6.1-2 each pair ends with one NUL", "A=1\x00B=2\x00", []Pair{{"A", "1"}, {"B", "2"}}},
		{"more NULs", "\x00A=1\x00\x00\x00", []Pair{{"A", "1"}}},
		{"empty value", "A=\x00", []Pair{{"A", ""}}},
		{"the first = splits", "A=b=c\x00", []Pair{{"A", "b=c"}}},
		{"ISCSI-6.1-3 63 characters", "K" + strings.Repeat("k", 62) + "=v\x00",
			[]Pair{{"K" + strings.Repeat("k", 62), "v"}}},
		{"ISCSI-6.1-3 all of the character set", "Az09.-+@_=\x00", []Pair{{"Az09.-+@_", ""}}},
		{"X#NodeArchitecture", "X#NodeArchitecture=a\x00", []Pair{{"X#NodeArchitecture", "a"}}},
		{"UTF-8", "InitiatorAlias=Gerät\x00", []Pair{{"InitiatorAlias", "Gerät"}}},
		{"ISCSI-6.1-4 long values are for the key to judge", "CHAP_R=0x" + strings.Repeat("0", 2048) + "\x00",
			[]Pair{{"CHAP_R", "0x" + strings.Repeat("0", 2048)}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := ParseText([]byte(tc.in))
			if err != nil || !slices.Equal(got, tc.want) {
				t.Fatalf("ParseText(%q) = %q, %v; want %q", tc.in, got, err, tc.want)
			}
		})
	}
}

func TestParseTextRefuses(t *testing.T) {
	for _, tc := range []struct{ name, in, reason string }{
		{"ISCSI-6.1-3 64 characters", "K" + strings.Repeat("k", 63) + "=v\x00", "longer than 63"},
		{"ISCSI-6.1-3 leading digit", "1K=v\x00", "does not begin with a letter"},
		{"ISCSI-6.1-3 no =", "InitialR2T\x00", `has no "="`},
		{"ISCSI-6.1-3 no key", "=v\x00", "is empty"},
		{"ISCSI-6.1-3 wrong character", "Initial R2T=Yes\x00", `contains ' '`},
		{"ISCSI-6.1-2 no NUL at the end", "A=1\x00B=2", "does not end with NUL"},
		{"ISCSI-6.1-1 not UTF-8", "InitiatorAlias=\xff\x00", "not UTF-8"},
		{"ISCSI-6.1-5 text above the limit", "A=" + strings.Repeat("x", MaxText) + "\x00", "longer than 16384"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := ParseText([]byte(tc.in))
			var e *Error
			if !errors.As(err, &e) || e.Status != 0x0200 || !strings.Contains(err.Error(), tc.reason) {
				t.Fatalf("ParseText = %q, %v; want status 0200 and %q", got, err, tc.reason)
			}
			if len(err.Error()) > 200 {
				t.Errorf("error of %d bytes", len(err.Error()))
			}
		})
	}
}

// ISCSI-6.1-2: the C bit may cut a pair anywhere. The caller joins the parts before it parses them. A part alone is an
// error.
func TestEveryPrefix(t *testing.T) {
	const whole = "InitialR2T=Yes\x00MaxBurstLength=0x10000\x00"
	for i := 1; i < len(whole); i++ {
		pairs, err := ParseText([]byte(whole[:i]))
		if (err == nil) != (whole[i-1] == 0) {
			t.Errorf("prefix of %d bytes: %q, %v", i, pairs, err)
		}
	}
}

// ISCSI-6.1-5: 8192 bytes of key data are accepted.
func TestTextOf8192Octets(t *testing.T) {
	b := []byte{}
	for i := 0; len(b) < 8192-80; i++ {
		b = AppendPair(b, Pair{"X-com.example." + strings.Repeat("k", i%40) + "." + strings.Repeat("i", i/40), "1"})
	}
	pairs, err := ParseText(b)
	if err != nil {
		t.Fatal(err)
	}
	n := NewLogin(Limits{})
	for _, p := range pairs {
		if _, err := n.Offer(Operational, p, nil); err != nil {
			t.Fatal(err)
		}
	}
}

func FuzzText(f *testing.F) {
	for _, s := range []string{
		"InitiatorName=iqn.1993-08.org.debian:01:a\x00SessionType=Discovery\x00HeaderDigest=None\x00",
		"InitiatorName=iqn.1993-08.org.debian:01:a\x00TargetName=iqn.2026-11.io.example:t\x00" +
			"RDMAExtensions=Yes\x00MaxBurstLength=0x10000\x00",
		"InitiatorName=iqn.1993-08.org.debian:01:a\x00TargetName=iqn.2026-11.io.example:t\x00MaxBurstLength=10000\x00",
		"AuthMethod=CHAP,None\x00", "FirstBurstLength=512~1024\x00", "A=\x00\x00", "=\x00", "X-a=Reject\x00",
		"MaxAHSLength=1\x00", "OFMarkInt=1~65535\x00",
	} {
		f.Add([]byte(s), uint8(1), true)
		f.Add([]byte(s), uint8(0), false)
		f.Add([]byte(s), uint8(3), false)
	}
	f.Fuzz(func(t *testing.T, b []byte, stage uint8, rdma bool) {
		pairs, err := ParseText(b)
		if err != nil {
			var e *Error
			if !errors.As(err, &e) {
				t.Fatalf("%v is no *Error", err)
			}
			return
		}
		var again []byte
		for _, p := range pairs {
			again = AppendPair(again, p)
		}
		if got, err := ParseText(again); err != nil || !slices.Equal(got, pairs) {
			t.Fatalf("%q came back as %q, %v", pairs, got, err)
		}

		n := NewLogin(Limits{RDMA: rdma, Digests: true})
		if Stage(stage) == FullFeature {
			n = NewText(Limits{RDMA: rdma}, Params{})
		}
		var answers []Pair
		for _, p := range pairs {
			before := len(answers)
			if answers, err = n.Offer(Stage(stage), p, answers); err != nil {
				break
			}
			if len(answers) > before+1 || len(answers) > before && answers[before].Key != p.Key {
				t.Fatalf("%q answered with %q", p, answers[before:])
			}
		}
		got, err2 := n.Finish()
		if err != nil && err2 != err {
			t.Fatalf("%v was followed by %+v, %v", err, got, err2)
		}
		unsolicited := got.ImmediateData || !got.InitialR2T
		if err2 == nil && got.FirstBurstLength > got.MaxBurstLength && unsolicited && n.hasCome("FirstBurstLength") { // else its default stands: see Finish
			t.Fatalf("agreed on %+v", got)
		}
		text := appendAll(nil, answers) // NotUnderstood can be longer than what it answers
		if _, err := ParseText(text); err != nil && len(text) <= MaxText {
			t.Fatalf("answers %q: %v", answers, err)
		}
	})
}

func appendAll(dst []byte, pairs []Pair) []byte {
	for _, p := range pairs {
		dst = AppendPair(dst, p)
	}
	return dst
}

// ISCSI-6.1-4, ISCSI-12.1.3-3: binary-values. V-ISCSI-15 in both encodings.
func TestParseBinary(t *testing.T) {
	long := strings.Repeat("\x00", MaxBinary)
	for in, want := range map[string]string{
		"0x000102030405060708090a0b0c0d0e0f":    "\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f",
		"0bAAECAwQFBgcICQoLDA0ODw==":            "\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f",
		"0X0aFf":                                "\x0a\xff",
		"0BCv8=":                                "\x0a\xff",
		"0xabc":                                 "\x0a\xbc",
		"0x1":                                   "\x01",
		"0x" + strings.Repeat("0", 2*MaxBinary): long,
		"0x" + strings.Repeat("0", 2*MaxBinary-1):                         long,
		"0b" + base64.StdEncoding.EncodeToString(make([]byte, MaxBinary)): long,
	} {
		if got, err := ParseBinary(in); err != nil || string(got) != want {
			t.Errorf("ParseBinary(%.40q) = %.20x, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "0", "0x", "0b", "x", "12345678901234567890", "00", "1x00", "0x0g", "0x-1",
		"0b===", "0bA", "0bAAE", "0bAAE\n=", "0bAA\r\nE=", "0bAA E=",
		"0x" + strings.Repeat("0", 2*MaxBinary+1),
		"0b" + base64.StdEncoding.EncodeToString(make([]byte, MaxBinary+1)), "Reject"} {
		if got, err := ParseBinary(in); err == nil {
			t.Errorf("ParseBinary(%.40q) = %x", in, got)
		}
	}
}
