package security

import (
	"strings"
	"testing"
	"time"
)

// NormalizeName returns good names in the form in which they are compared.
func TestNormalizeName(t *testing.T) {
	long := "iqn.2026-11.io.example:" + strings.Repeat("x", MaxName-len("iqn.2026-11.io.example:"))
	for in, want := range map[string]string{
		"iqn.2001-04.com.example:storage:diskarrays-sn-a8675309": "iqn.2001-04.com.example:storage:diskarrays-sn-a8675309",
		"iqn.2001-04.com.example":                                "iqn.2001-04.com.example",
		"IQN.2001-04.COM.Example:Disk":                           "iqn.2001-04.com.example:disk", // ISCSI-4.2.7-3
		"iqn.1993-08.org.debian:01:abcdef":                       "iqn.1993-08.org.debian:01:abcdef",
		"eui.02004567A425678D":                                   "eui.02004567a425678d", // ISCSI-4.2.7-4
		"naa.52004567BA64678D":                                   "naa.52004567ba64678d",
		"naa.62004567BA64678D0123456789ABCDEF":                   "naa.62004567ba64678d0123456789abcdef",
		"iqn.2001-04.com.example:GERÄT":                          "iqn.2001-04.com.example:gerät",
		long:                                                     long, // ISCSI-4.2.7-1
	} {
		if got, err := NormalizeName(in); got != want || err != nil {
			t.Errorf("NormalizeName(%q) = %q, %v; want %q", in, got, err, want)
		}
	}
}

// NormalizeName refuses bad names and says why.
func TestNormalizeNameRefuses(t *testing.T) {
	for in, reason := range map[string]string{
		"":                                          "does not begin with",
		"iqn":                                       "does not begin with",
		"disk":                                      "does not begin with",
		"wwn.2001-04.com.example":                   "does not begin with", // ISCSI-4.2.7-4
		"iqn.":                                      "a date",
		"iqn.2001-04":                               "a date",
		"iqn.2001-13.com.example":                   "a date",
		"iqn.2001-00.com.example":                   "a date",
		"iqn.201-004.com.example":                   "a date",
		"iqn.20010-4.com.example":                   "a date",
		"iqn.2001-4.com.example":                    "a date",
		"iqn.2001-04.":                              "empty label",
		"iqn.2001-04.com..example":                  "empty label",
		"iqn.2001-04.:disk":                         "empty label",
		"iqn.2001-04.com.example:a b":               "contains ' '", // ISCSI-4.2.7-3
		"iqn.2001-04.com.example:a_b":               "contains '_'",
		"iqn.2001-04.com.example:*":                 "contains '*'",
		"iqn.2001-04.com.example:a\x00":             `contains '\x00'`,
		"iqn.2001-04.com.example:\u3000":            `contains '\u3000'`,
		"iqn.2001-04.com.example:\xff":              "not UTF-8",
		"eui.02004567A425678":                       "16 hexadecimal digits",
		"eui.02004567A425678G":                      "16 hexadecimal digits",
		"eui.02004567A425678D0":                     "16 hexadecimal digits",
		"naa.52004567BA64678":                       "16 or 32 hexadecimal digits",
		"naa.52004567BA64678D0123":                  "16 or 32 hexadecimal digits",
		"iqn." + strings.Repeat("x", 220):           "has 224 bytes", // ISCSI-4.2.7-1
		strings.Repeat("iqn.", 1<<20):               "bytes, more than 223",
		"iqn.2001-04.b:" + strings.Repeat("Ⱥ", 104): "in lower case", // 2 bytes, 3 in lower case
	} {
		if got, err := NormalizeName(in); err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("NormalizeName(%.60q) = %q, %v; want an error with %q", in, got, err, reason)
		}
	}
}

func TestPatterns(t *testing.T) {
	const host = "iqn.1993-08.org.debian:01:abc"
	for _, tc := range []struct {
		patterns []string
		name     string
		want     bool
	}{
		{nil, host, false},
		{[]string{"*"}, host, true},
		{[]string{host}, host, true},
		{[]string{strings.ToUpper(host)}, host, true},
		{[]string{host}, strings.ToUpper(host), true},
		{[]string{host}, host + "d", false},
		{[]string{host}, host[:len(host)-1], false},
		{[]string{"iqn.1993-08.org.debian:*"}, host, true},
		{[]string{"iqn.1993-08.org.debian:*"}, "x" + host, false},
		{[]string{"iqn.1993-08.org.debian:*"}, "iqn.1993-08.org.debian:", true},
		{[]string{"iqn.1993-08.org.debian*"}, "iqn.1993-08.org.debianx.evil", true},
		{[]string{"*:abc"}, host, true},
		{[]string{"*:ab"}, host, false},
		{[]string{"*:01:*c"}, host, true},
		{[]string{"iqn.????-??.org.*"}, host, true},
		{[]string{"iqn.????-?.org.*"}, host, false},
		{[]string{host + "?"}, host, false},
		{[]string{"iqn.1993-08.org.suse:*", "*:abc"}, host, true},
		{[]string{"iqn.2001-04.com.example:ger?t"}, "iqn.2001-04.com.example:gerät", true},
		{[]string{"*"}, "", true},
		{[]string{"*"}, strings.Repeat("x", MaxName+1), false},
		{[]string{"*"}, "iqn.\xff", false},
	} {
		p, err := Compile(tc.patterns)
		if err != nil {
			t.Errorf("Compile(%q): %v", tc.patterns, err)
		} else if got := p.Match(tc.name); got != tc.want {
			t.Errorf("%q matches %q: %v, want %v", tc.patterns, tc.name, got, tc.want)
		}
	}
}

func TestCompileRefuses(t *testing.T) {
	for _, s := range []string{"", "host", "iqn.1993-08.org.debian:a b*", "iqn.[ab]*", "*\xff", strings.Repeat("*", MaxName+1)} {
		p, err := Compile([]string{"*", s})
		if err == nil {
			t.Errorf("%q was taken", s)
		}
		if p.Match("iqn.1993-08.org.debian:01:abc") {
			t.Errorf("%q: patterns match in spite of the error", s)
		}
	}
}

// A hostile name cannot make a pattern slow.
func TestMatchIsNotExponential(t *testing.T) {
	p, err := Compile([]string{strings.Repeat("*a", 100) + "*b"})
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	for range 100 {
		if p.Match(strings.Repeat("a", MaxName)) {
			t.Fatal("matches")
		}
	}
	if d := time.Since(start); d > 5*time.Second {
		t.Errorf("took %v", d)
	}
}
