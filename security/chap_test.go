package security

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
)

const goodSecret = Secret("0123456789abcdef")

// V-ISCSI-14: Response returns the hash of every algorithm.
func TestResponse(t *testing.T) {
	challenge, err := hex.DecodeString("000102030405060708090a0b0c0d0e0f")
	if err != nil {
		t.Fatal(err)
	}
	for a, want := range map[CHAPAlgorithm]string{
		5: "0fbee2a235349701655e644832d106bf", // ISCSI-12.1.3-2
		6: "5617a555f0045171364ed82310b9c08c4d48faeb",
		7: "d8c3aedd13f3e0017b09becc2da9c74a6d001ab22424256ad456063e668f5d14",
		8: "972a2f638a858f5d97206e79fdf525a79b427550f3b79af445c6664fea05b508",
	} {
		ch := CHAPChallenge{Algorithm: a, ID: 0x2a, Octets: string(challenge)}
		if got := hex.EncodeToString(ch.Response(goodSecret)); got != want {
			t.Errorf("algorithm %d: %s, want %s", a, got, want)
		}
	}
}

// A challenge has at least 16 bytes (ISCSI-12.1.3-3) and never repeats (SEC-7143.9.2.1-13).
// The identifier varies, too.
func TestChallengesDiffer(t *testing.T) {
	all, ids := map[string]bool{}, map[uint8]bool{}
	for range 1000 {
		ch := NewCHAPChallenge(CHAPMD5)
		if all[ch.Octets] || len(ch.Octets) < 16 {
			t.Fatalf("challenge %x", ch.Octets)
		}
		all[ch.Octets], ids[ch.ID] = true, true
	}
	if len(ids) < 200 { // of 256; 5 are missing on average
		t.Errorf("%d identifiers in 1000 challenges", len(ids))
	}
}

func TestParseSecret(t *testing.T) {
	for in, want := range map[string]Secret{
		"0123456789ab":                       "0123456789ab",
		"0x00112233445566778899aabbccddeeff": "\x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff", // SEC-7143.9.2.1-2
		"0X1234567890abcdef":                 "0X1234567890abcdef",                                               // text
		strings.Repeat("s", MaxSecret):       Secret(strings.Repeat("s", MaxSecret)),
		"0x" + strings.Repeat("00", 256):     Secret(strings.Repeat("\x00", 256)),
	} {
		if got, err := ParseSecret(in); err != nil || got != want {
			t.Errorf("ParseSecret(%q): %x, %v", in, string(got), err)
		}
	}
	for in, reason := range map[string]string{
		"":                                  "0 bytes, less than 1",
		"0x":                                "0 bytes, less than 1",
		"0x0":                               "even number of hexadecimal digits",
		"0x00112233445566778899aabbccddeef": "even number of hexadecimal digits", // SEC-7143.9.2.1-5
		"0xfeedfacecafebeefnothex":          "even number of hexadecimal digits",
		strings.Repeat("s", MaxSecret+1):    "257 bytes, more than 256",
		"0x" + strings.Repeat("0", 2*257):   "257 bytes, more than 256",
	} {
		_, err := ParseSecret(in)
		if err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("ParseSecret(%q): %v, want %q", in, err, reason)
		} else if len(in) > 3 && strings.Contains(err.Error(), in[2:]) {
			t.Errorf("secret in the error: %v", err)
		}
	}
}

// SEC-3723.5.8-2: no way to print or log a secret shows it.
func TestSecretsAreHidden(t *testing.T) {
	user := CHAPUser{CHAPIdentity: CHAPIdentity{"alice", goodSecret}, Target: CHAPIdentity{"store", goodSecret}}
	var out bytes.Buffer
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%T"} {
		fmt.Fprintf(&out, verb+"\n", goodSecret)
		fmt.Fprintf(&out, verb+"\n", user)
	}
	slog.New(slog.NewTextHandler(&out, nil)).Info("user", "user", user, "secret", goodSecret)
	slog.New(slog.NewJSONHandler(&out, nil)).Info("user", "user", user, "secret", goodSecret)
	if err := json.NewEncoder(&out).Encode(user); err != nil {
		t.Error(err)
	}
	for _, s := range []string{string(goodSecret), hex.EncodeToString([]byte(goodSecret)), fmt.Sprint([]byte(goodSecret))} {
		if strings.Contains(strings.ToLower(out.String()), s) {
			t.Errorf("%s shows in\n%s", s, out.String())
		}
	}
	if !strings.Contains(out.String(), hidden) {
		t.Errorf("no %s in\n%s", hidden, out.String())
	}
}

func TestParseCHAPAlgorithms(t *testing.T) {
	for in, want := range map[string][]CHAPAlgorithm{"": {8, 7, 6, 5}, "md5": {5}, "sha1 sha256 sha3-256 md5": {6, 7, 8, 5}} {
		if got, err := ParseCHAPAlgorithms(strings.Fields(in)); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %v, %v; want %v", in, got, err, want)
		}
	}
	for in, reason := range map[string]string{"md4": `"md4" is not one of sha3-256, sha256, sha1, md5`, "MD5": "is not one of", "md5 sha1 md5": "twice"} {
		if _, err := ParseCHAPAlgorithms(strings.Fields(in)); err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("%q: %v", in, err)
		}
	}
}

// good returns a configuration with users and a target.
func good() CHAPConfig {
	return CHAPConfig{
		Algorithms: []CHAPAlgorithm{CHAPSHA256, CHAPMD5},
		Users:      []CHAPUser{{CHAPIdentity: CHAPIdentity{"alice", goodSecret}}, {CHAPIdentity: CHAPIdentity{"bob", "bob's own secret"}}},
		Target:     CHAPIdentity{"store", "the target's secret"},
	}
}

// NewCHAP refuses wrong configurations, with an error that does not show a secret.
func TestNewCHAPRefuses(t *testing.T) {
	for reason, change := range map[string]func(*CHAPConfig){
		"requires at least one algorithm and one user": func(c *CHAPConfig) { c.Users = nil },
		"one algorithm and one user":                   func(c *CHAPConfig) { c.Algorithms = nil },
		"CHAP algorithm 9 is not known":                func(c *CHAPConfig) { c.Algorithms[1] = 9 },
		"name must have 1 to 255 bytes":                func(c *CHAPConfig) { c.Users[1].Name = "" },
		"1 to 255 bytes":                               func(c *CHAPConfig) { c.Target.Name = strings.Repeat("n", 256) },
		"and no NUL":                                   func(c *CHAPConfig) { c.Users[0].Name = "a\x00b" },
		`"bob": secret has 0 bytes`:                    func(c *CHAPConfig) { c.Users[1].Secret = "" },
		`"store": secret has 0 bytes`:                  func(c *CHAPConfig) { c.Target.Secret = "" },
		`user "alice" appears twice`:                   func(c *CHAPConfig) { c.Users[1].Name = "alice" },
		`user "alice": pattern`:                        func(c *CHAPConfig) { c.Users[0].Initiator = "a b*" }, // ISCSI-9.2-4
		`"alice" and the target, "store"`:              func(c *CHAPConfig) { c.Target.Secret = goodSecret },  // SEC-7143.9.2.1-6
		`"alice" and the target, "carl"`:               func(c *CHAPConfig) { c.Users[1].Target = CHAPIdentity{"carl", goodSecret} },
	} {
		cfg := good()
		change(&cfg)
		if c, err := NewCHAP(cfg); c != nil || err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("%v, %v; want %q", c != nil, err, reason)
		} else if strings.Contains(err.Error(), string(goodSecret)) {
			t.Errorf("secret in the error: %v", err)
		}
	}
}

// Authenticate admits the right users, and returns the identity of the target for each.
func TestAuthenticate(t *testing.T) {
	cfg := good()
	cfg.Users[0].Initiator = "IQN.1993-08.org.debian:*"
	cfg.Users[1].Target = CHAPIdentity{"store for bob", "a secret between us"}
	c, err := NewCHAP(cfg)
	if err != nil {
		t.Fatal(err)
	}
	const host = "iqn.1993-08.org.debian:01:a"
	ch := NewCHAPChallenge(CHAPSHA256)
	for _, tc := range []struct {
		user      string
		secret    Secret
		initiator string
		target    string
		reason    string
	}{
		{"alice", goodSecret, host, "store", ""},
		{"bob", "bob's own secret", "iqn.2001-04.com.example:x", "store for bob", ""}, // SEC-7143.9.2.1-12
		{"alice", "bob's own secret", host, "", `user "alice" is wrong`},              // ISCSI-9.2-3
		{"alice", "the target's secret", host, "", "is wrong"},                        // SEC-7143.9.2.1-7
		{"alice", c.decoy, host, "", "is wrong"},
		{"carol", c.decoy, host, "", `CHAP user "carol" is not known`},
		{"Alice", goodSecret, host, "", "is not known"},
		{"", "", host, "", "is not known"},
		{"alice", goodSecret, "iqn.2001-04.com.example:x", "", "this initiator may not be"}, // ISCSI-9.2-4
	} {
		login, err := c.Authenticate(ch, tc.user, ch.Response(tc.secret), tc.initiator)
		id := login.Target
		if id.Name != tc.target || (err == nil) != (tc.reason == "") || err != nil && !strings.Contains(err.Error(), tc.reason) {
			t.Errorf("%q: %v, %v; want %q, %q", tc.user, id, err, tc.target, tc.reason)
		}
	}
	right := ch.Response(goodSecret)
	for _, response := range [][]byte{nil, right[1:], append(right, 0), ch.Response(goodSecret)[:16]} {
		if _, err := c.Authenticate(ch, "alice", response, host); err == nil {
			t.Errorf("response of %d bytes was accepted", len(response))
		}
	}
}

// A user may have two secrets at a time. Excludes says which sessions could not log in again, and a proof does
// not fit another user, or another secret.
func TestTwoSecrets(t *testing.T) {
	const host = "iqn.1993-08.org.debian:01:a"
	before, err := NewCHAP(good())
	if err != nil {
		t.Fatal(err)
	}
	cfg := good()
	cfg.Users[0].Previous, cfg.Users[0].Secret = cfg.Users[0].Secret, "another secret of alice"
	both, err := NewCHAP(cfg)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Users[0].Previous = ""
	after, err := NewCHAP(cfg)
	if err != nil {
		t.Fatal(err)
	}
	prove := func(c *CHAP, secret Secret) (CHAPProof, error) {
		ch := NewCHAPChallenge(CHAPSHA256)
		login, err := c.Authenticate(ch, "alice", ch.Response(secret), host)
		return login.Proof, err
	}
	old, err := prove(before, goodSecret)
	if err != nil {
		t.Fatal(err)
	}
	if p, err := prove(both, goodSecret); err != nil || p != old {
		t.Errorf("the previous secret: %q, %v, want %q", p, err, old)
	}
	new, err := prove(both, "another secret of alice")
	if err != nil || new == old || new == "" {
		t.Errorf("the new secret: %q, %v", new, err)
	}
	if _, err := prove(after, goodSecret); err == nil {
		t.Error("the previous secret is valid after its end")
	}
	for _, tc := range []struct {
		name string
		c    *CHAP
		user string
		p    CHAPProof
		want string
	}{
		{"the same", before, "alice", old, ""},
		{"old with both", both, "alice", old, ""},
		{"new with both", both, "alice", new, ""},
		{"old after the end", after, "alice", old, "secret of its CHAP user is no longer valid"},
		{"new after the end", after, "alice", new, ""},
		{"of another user", both, "bob", new, "secret of its CHAP user is no longer valid"},
		{"no user", both, "", "", "session has not authenticated itself, which the target requires now"},
		{"a user that is gone", both, "carol", old, "CHAP user is no longer among those of the target"},
	} {
		if got := tc.c.Excludes(tc.user, tc.p, host); got != tc.want {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
	}
	cfg.Users[0].Previous = Secret(strings.Repeat("s", 257))
	if _, err := NewCHAP(cfg); err == nil || !strings.Contains(err.Error(), "previous secret has 257 bytes") {
		t.Errorf("a long previous secret: %v", err)
	}
	cfg.Users[0].Previous = cfg.Target.Secret
	if _, err := NewCHAP(cfg); err == nil || !strings.Contains(err.Error(), "have the same secret") {
		t.Errorf("the secret of the target as a previous one: %v", err)
	}
}

// Choose returns the most preferred algorithm that is offered.
func TestChoose(t *testing.T) {
	c, err := NewCHAP(good())
	if err != nil {
		t.Fatal(err)
	}
	for want, offer := range map[CHAPAlgorithm][]CHAPAlgorithm{7: {8, 5, 7}, 5: {6, 5}, 0: {6, 8}} {
		if got, ok := c.Choose(offer); got != want || ok != (want != 0) {
			t.Errorf("%d of %v, want %d", got, offer, want)
		}
	}
}
