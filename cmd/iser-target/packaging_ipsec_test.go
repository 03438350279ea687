package main

import (
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/backend/backendtest"
)

// swanctlKeys returns the keys of a profile of packaging/ipsec by their paths, like connections.iser-target.version.
func swanctlKeys(t *testing.T, name string) map[string]string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("../../packaging/ipsec", name))
	if err != nil {
		t.Fatal(err)
	}
	keys := map[string]string{}
	var path []string
	for line := range strings.Lines(string(b)) {
		line = strings.TrimSpace(line)
		switch key, value, ok := strings.Cut(line, " = "); {
		case line == "" || strings.HasPrefix(line, "#"):
		case line == "}":
			path = path[:len(path)-1]
		case strings.HasSuffix(line, " {"):
			path = append(path, strings.TrimSuffix(line, " {"))
		case ok:
			keys[strings.Join(append(path, key), ".")] = value
		default:
			t.Fatalf("%s: %q is neither a section nor a key", name, line)
		}
	}
	if len(path) != 0 {
		t.Fatalf("%s: section %q does not end", name, path)
	}
	return keys
}

// strength is the number of bits of security of what proposals name (NIST SP 800-57, part 1, table 2).
var strength = map[string]int{
	"aes128gcm16": 128, "aes256gcm16": 256,
	"prfsha256": 256, "prfsha384": 384,
	"modp1024": 80, "modp1536": 90, "modp2048": 112, "modp3072": 128, "modp4096": 152, "modp8192": 200,
	"ecp256": 128, "ecp384": 192, "ecp521": 256, "x25519": 128,
}

// The profiles for strongSwan keep what RFC 7146 asks of an IKE daemon.
func TestIPsecProfiles(t *testing.T) {
	host := regexp.MustCompile(`^(\*\.)?[a-z0-9-]+(\.[a-z0-9-]+)+$`)
	for _, name := range []string{"target.conf", "initiator.conf"} {
		t.Run(name, func(t *testing.T) {
			const ike, child = "connections.iser-target.", "connections.iser-target.children.iscsi."
			keys := swanctlKeys(t, name)
			if keys[ike+"version"] != "2" {
				t.Errorf("version = %s, want IKEv2", keys[ike+"version"])
			}
			for _, key := range []string{ike + "proposals", child + "esp_proposals"} {
				proposals := strings.Split(keys[key], ",")
				for _, p := range proposals {
					words := strings.Split(p, "-")
					i := slices.IndexFunc(words, func(w string) bool { return strings.HasPrefix(w, "modp") || strings.HasPrefix(w, "ecp") })
					// SEC-7146.3-3: a group of 2048 bits at least, 112 bits of security. SEC-7146.3.2-1: in CREATE_CHILD_SA, too.
					if i < 0 || strength[words[i]] < 112 {
						t.Errorf("%s: %s has no group of 2048 bits or more", key, p)
						continue
					}
					// SEC-7146.4-1: comparable strength. A group of 192 bits goes with AES-256 in suites of NIST and others.
					cipher := strength[words[0]]
					if got := strength[words[i]]; cipher == 0 || got < min(cipher, 192) {
						t.Errorf("%s: in %s the group has %d bits of security, and the cipher %d", key, p, got, cipher)
					}
					if key == ike+"proposals" && strength[words[1]] < min(2*cipher, 384) {
						t.Errorf("%s: in %s the PRF is weaker than the cipher", key, p)
					}
				}
				if key == child+"esp_proposals" && !strings.HasSuffix(proposals[0], "-esn") {
					t.Errorf("%s: the first proposal is %s, want ESN", key, proposals[0])
				}
			}
			for _, end := range []string{"local.", "remote."} {
				id := keys[ike+end+"id"]
				// SEC-7146.3.1-5: a host name or an address. SEC-7146.3.1-6: no KEY_ID, which strongSwan writes as keyid: or @#,
				// or takes a name without dots for.
				if _, err := netip.ParseAddr(id); err != nil && !host.MatchString(id) {
					t.Errorf("the identity of %s is %q, want a host name or an address", end, id)
				}
			}
			if keys[child+"mode"] != "tunnel" { // RFC 7146, section 2: the mode that each implementation has
				t.Errorf("mode = %s", keys[child+"mode"])
			}
			for _, key := range []string{"rekey_time", "life_time", "rekey_bytes", "life_bytes", "replay_window"} {
				if keys[child+key] == "" {
					t.Errorf("no %s", key)
				}
			}
			portal, peer := "local_ts", "remote_ts"
			if name == "initiator.conf" {
				portal, peer = peer, portal
			}
			if !strings.HasSuffix(keys[child+portal], "[tcp/3260]") || !strings.HasSuffix(keys[child+peer], "[tcp]") {
				t.Errorf("the selectors are %s and %s, want TCP port 3260 of the target", keys[child+portal], keys[child+peer])
			}
			if name == "initiator.conf" && keys[child+"start_action"] != "trap" {
				t.Errorf("start_action = %s: clear text can leave before there are keys", keys[child+"start_action"])
			}
		})
	}
}

// systemd accepts the drop-in for IPsec, which adds one capability and one address family.
func TestUnitWithIPsec(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		backendtest.Unavailable(t, "%v (tests/interop/setup.sh installs it)", err)
	}
	read := func(name string) string {
		b, err := os.ReadFile(filepath.Join("../../packaging", name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	dir := t.TempDir()
	unit := filepath.Join(dir, "iser-target.service")
	text := strings.ReplaceAll(read("systemd/iser-target.service"), "/usr/bin/iser-target", executable(t)) + read("ipsec/ipsec.conf")
	if err := os.WriteFile(unit, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(analyze, "verify", "--man=no", unit).CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	out, err := exec.Command(analyze, "security", "--offline=true", "--threshold=30", unit).CombinedOutput()
	if err != nil {
		t.Errorf("systemd-analyze security: %v\n%s", err, out)
	}
	for _, c := range []string{"SYS_ADMIN", "SYS_PTRACE", "SYS_MODULE", "(DAC_*|FOWNER|IPC_OWNER)", "SET(UID|GID|PCAP)"} {
		if !strings.Contains(string(out), "✓ CapabilityBoundingSet=~CAP_"+c+" ") {
			t.Errorf("the service may have CAP_%s:\n%s", c, out)
		}
	}
}
