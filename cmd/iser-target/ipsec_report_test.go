package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/security/ipsec/xfrm"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// audited returns a station whose portal audits IPsec with a driver. what precedes the command line of the target.
func audited(t *testing.T, more string, what ...string) *station {
	t.Helper()
	s := &station{dir: t.TempDir()}
	s.configure(t, func(text string) string {
		return strings.Replace(text, `{listen: "127.0.0.1:0"}`, `{listen: "127.0.0.1:0", ipsec: audit}`, 1) + more
	})
	if testkit.Race { // see run
		s.environment(t)
	}
	args := append(what, executable(t), "serve", "--config", s.file)
	s.process = launch(t, exec.Command(args[0], args[1:]...))
	t.Cleanup(func() { s.killAll(t) })
	s.addr = s.wait(t, `msg=serving portal=(\S+)`)
	return s
}

// lines returns the lines of an output with runs of spaces as one.
func lines(text string) string {
	return regexp.MustCompile(` +`).ReplaceAllString(text, " ")
}

// reports checks that doctor and ipsec status each say something.
func (s *station) reports(t *testing.T, code int, doctor, status string) {
	t.Helper()
	out, errOut, got := s.run(t, "doctor")
	if got != code || !strings.Contains(lines(out), doctor) {
		t.Errorf("doctor: exit code %d, want %d with\n%s\nin\n%s%s", got, code, doctor, out, errOut)
	}
	if out := lines(s.ok(t, "ipsec", "status")); !strings.Contains(out, status) {
		t.Errorf("ipsec status: want\n%s\nin\n%s", status, out)
	}
}

// lacking returns what the kernel of this machine lacks by the driver xfrm.
func lacking(t *testing.T) (texts []string, code int) {
	t.Helper()
	for _, err := range xfrm.Check() {
		if !strings.Contains(err.Error(), "Run: modprobe esp") {
			backendtest.Unavailable(t, "the kernel lacks more than ESP: %v", err)
		}
		texts = append(texts, err.Error())
	}
	if len(texts) > 0 {
		return texts, cli.ExitError
	}
	return nil, cli.ExitOK
}

// What the machine lacks is named with the command that mends it: modules of the kernel, a capability, the socket of strongSwan.
func TestReportsOfWhatIPsecLacks(t *testing.T) {
	if !testkit.InNamespace(t) {
		return
	}
	kernel, code := lacking(t)
	t.Run("kernel", func(t *testing.T) {
		s := audited(t, "")
		for _, text := range kernel {
			s.reports(t, code, "problem ipsec the driver xfrm cannot enforce it: "+text+"\n see iser-target ipsec status", "missing "+text+"\n")
		}
		if len(kernel) == 0 {
			s.reports(t, code, "ok ipsec driver xfrm, 0 connections protected", "driver xfrm\n")
		}
	})
	t.Run("capability", func(t *testing.T) {
		s := audited(t, "", "setpriv", "--bounding-set", "-net_admin", "--inh-caps", "-net_admin", "--")
		const lacks = "operation not permitted: CAP_NET_ADMIN is missing. Run: systemctl edit iser-target, and add AmbientCapabilities=CAP_NET_ADMIN below [Service]"
		s.reports(t, cli.ExitError, "problem ipsec the driver xfrm cannot enforce it: cannot read SAs and policies: "+lacks, "missing cannot read SAs and policies: "+lacks)
		s.reports(t, cli.ExitError, "problem ipsec the driver fails: driver xfrm: changes of keys are not noticed:", "failure driver xfrm: changes of keys are not noticed:")
	})
	t.Run("strongSwan", func(t *testing.T) {
		socket := filepath.Join(t.TempDir(), "no.vici")
		s := audited(t, fmt.Sprintf("\nipsec: {driver: vici, vici: {socket: %s}}\n", socket))
		lacks := "strongSwan: " + socket + ": dial unix " + socket + ": connect: no such file or directory. Start strongSwan (systemctl start strongswan), or set ipsec.vici.socket"
		s.reports(t, cli.ExitError, "problem ipsec the driver vici cannot enforce it: "+lacks, "missing "+lacks)
	})
}

// A session without policies, and one whose policies have no SAs, is shown with the reason and the command that mends it, by the driver xfrm of this kernel.
func TestReportsOfSessionsWithoutIPsec(t *testing.T) {
	if !testkit.InNamespace(t) {
		return
	}
	_, code := lacking(t)
	s := audited(t, "")
	s.login(t)
	_, port, err := net.SplitHostPort(s.addr)
	if err != nil {
		t.Fatal(err)
	}
	const name = "warning ipsec session 1 of iqn.2026-11.io.example:host is not protected as required: "
	clear := "packets between 127.0.0.1 and 127.0.0.1 are in clear text: no IPsec policy covers them. Set up IPsec for TCP port " + port + " of 127.0.0.1 on both hosts"
	s.reports(t, code, name+clear+"\n load the policies on both hosts: swanctl --load-all (docs/ipsec.md), and look at them: ip xfrm policy\n",
		"\n mark: "+clear+"\n policies: in no, out no\n")

	host := &net.IPNet{IP: net.IPv4(127, 0, 0, 1).To4(), Mask: net.CIDRMask(32, 32)}
	number := 0
	if _, err := fmt.Sscan(port, &number); err != nil {
		t.Fatal(err)
	}
	policy := func(dir netlink.Dir, sport, dport int) {
		t.Helper()
		if err := netlink.XfrmPolicyAdd(&netlink.XfrmPolicy{Src: host, Dst: host, Proto: unix.IPPROTO_TCP, SrcPort: sport, DstPort: dport, Dir: dir, Priority: 100,
			Tmpls: []netlink.XfrmPolicyTmpl{{Src: host.IP, Dst: host.IP, Proto: netlink.XFRM_PROTO_ESP, Mode: netlink.XFRM_MODE_TUNNEL, Reqid: 7}}}); err != nil {
			t.Fatal(err)
		}
	}
	says := func(doctor, status string) {
		t.Helper()
		testkit.Eventually(t, "the report of the session follows the kernel", func() bool {
			return strings.Contains(lines(s.ok(t, "ipsec", "status")), status)
		})
		s.reports(t, code, doctor, status)
	}
	policy(netlink.XFRM_DIR_IN, 0, number)
	one := "packets from 127.0.0.1 to 127.0.0.1 may be in clear text: no IPsec policy covers this direction. Add a policy that requires ESP for them"
	says(name+one+"\n load the policies on both hosts: swanctl --load-all (docs/ipsec.md), and look at them: ip xfrm policy\n", "\n mark: "+one+"\n policies: in yes, out no\n")
	policy(netlink.XFRM_DIR_OUT, number, 0)
	keys := "no SA for packets from 127.0.0.1 to 127.0.0.1: a policy requires ESP, but the keys are missing. Look at the IKE daemon of both hosts, or install the keys"
	says(name+keys+"\n negotiate keys: swanctl --initiate --child NAME, and look at them: swanctl --list-sas\n", "\n mark: "+keys+"\n policies: in yes, out yes\n")
	if b, err := os.ReadFile("/proc/self/net/xfrm_stat"); err == nil { // for a look at a failure
		t.Log(string(b))
	}
}

// With clear_text, the program of the driver exec decides about connections that a portal under required would drop, and no kernel with
// ESP is necessary. An initiator that it refuses changes nothing for the one that it permits.
func TestProgramKnowsOfOtherProtection(t *testing.T) {
	s := &station{dir: t.TempDir()}
	program := filepath.Join(s.dir, "verdict")
	const text = `#!/bin/sh
read -r question
case $question in
*'"initiator":"` + hostName + `2"'*) echo '{"action":"deny","reason":"the host is not on the MACsec network. Move it there"}' ;;
*) echo '{"action":"permit","suite":"macsec","identity":"port7"}' ;;
esac
`
	if err := os.WriteFile(program, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
	s.configure(t, func(text string) string {
		return strings.Replace(text, `{listen: "127.0.0.1:0"}`, `{listen: "`+freeAddress(t)+`", ipsec: required}`, 1) +
			"ipsec: {driver: exec, exec: {command: [" + program + "], timeout: 20s, clear_text: true}}\n"
	})
	s.startProgram(t, executable(t))
	in := s.login(t)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if other, err := initiator.Login(ctx, s.addr, initiator.Options{Name: hostName + "2", Target: storeName}); err == nil {
		other.Close()
		t.Error("an initiator that the program refuses has logged in")
	}
	if err := in.Do(&initiator.Command{CDB: cdb.TestUnitReady}); err != nil {
		t.Errorf("the neighbour: %v", err)
	}
	if out := lines(s.ok(t, "session", "list")); !strings.Contains(out, "macsec") || !strings.Contains(out, "port7") {
		t.Errorf("session list:\n%s", out)
	}
	s.says(t, cli.ExitOK, "not on the MACsec network", "events", "--since", "0")
}
