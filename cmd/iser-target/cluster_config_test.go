package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
	"github.com/iser-target/iser-target/tests/testkit/etcdserver"
	"github.com/iser-target/iser-target/tests/testkit/rbdfake"
)

// Two gateways in processes of their own have a target in etcd. Commands change it through either, also the size of a LUN that the other one
// serves. An upgrade keeps it, with its sessions. What is wrong is refused, and the file of no gateway changes.
func TestClusterConfigOfProcesses(t *testing.T) {
	rbdfake.Install(t, "p")
	member := etcdserver.Start(t, 1)[0]
	start := func(name string, tag int) *station {
		s := &station{dir: t.TempDir()}
		s.configure(t, func(text string) string {
			text = strings.Replace(text, `{listen: "127.0.0.1:0"}`, fmt.Sprintf(`{listen: "127.0.0.1:0", tpgt: %d}`, tag), 1)
			return text + fmt.Sprintf("cluster: {name: %s, etcd: [%q], lease: 6s, failback: 1h}\n", name, member.Endpoint())
		})
		s.startProgram(t, executable(t))
		return s
	}
	a, b := start("a", 1), start("b", 2)
	const all = "iqn.2026-11.io.example:all"
	file := filepath.Join(t.TempDir(), "cluster.yaml")
	apply := func(s *station, code int, want, text string, flags ...string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		s.says(t, code, want, append([]string{"cluster", "config", "apply", file}, flags...)...)
	}
	const text = "# of all\ntargets:\n  - name: " + all + "\n    initiators: [\"*\"]\n    luns:\n      - {id: 1, backend: rbd, path: \"rbd:p/disk\", size: 1MiB, shared: true, naa: \"3000000000000001\"}\n"
	apply(a, cli.ExitError, file+":7:1: portals: does not belong to the configuration of a cluster", text+"portals: []\n")
	apply(a, cli.ExitError, "luns[0].shared: must be true", strings.Replace(text, "shared: true, ", "", 1))
	apply(a, cli.ExitError, "is the name of targets[0] of "+a.file, strings.Replace(text, all, storeName, 1))
	apply(a, cli.ExitOK, "add target "+all, text, "--dry-run")
	a.says(t, cli.ExitOK, "targets: []", "cluster", "config", "show")
	apply(a, cli.ExitOK, "add target "+all, text)

	sizes := func(lun string) string {
		show := func(s *station) string {
			out, _, _ := s.run(t, "lun", "show", all, lun, "-o", "jsonpath=$.size")
			return strings.TrimSpace(out)
		}
		return show(a) + " " + show(b)
	}
	testkit.Eventually(t, "both gateways have the LUN", func() bool { return sizes("1") == "1048576 1048576" })
	b.ok(t, "lun", "create", all, "--id", "2", "--backend", "rbd", "--path", "rbd:p/two", "--size", "1MiB", "--shared", "--naa", "3000000000000002")
	testkit.Eventually(t, "both gateways have the second LUN", func() bool { return sizes("2") == "1048576 1048576" })
	for _, s := range []*station{a, b} {
		s.says(t, cli.ExitOK, "# of all", "cluster", "config", "show")
		if c := read[schema.ClusterConfig](t, s, "cluster", "config", "show"); c.Revision == 0 || c.Newest != c.Revision || c.Reason != "" || !strings.Contains(c.Text, "rbd:p/two") {
			t.Errorf("cluster config show: %+v", c)
		}
	}
	testkit.Eventually(t, "the gateways know each other", func() bool { return len(read[schema.ClusterState](t, b, "cluster", "status").Gateways) == 2 })
	a.ok(t, "cluster", "handover", all, "1", "b")
	a.ok(t, "lun", "resize", all, "1", "2MiB") // the other gateway serves it
	testkit.Eventually(t, "both gateways have the new size", func() bool { return sizes("1") == "2097152 2097152" })
	a.says(t, cli.ExitUsage, "--shared must be true: gateways share all LUNs", "lun", "create", all, "--backend", "memory", "--size", "1MiB")
	a.ok(t, "target", "create", all+"2", "--initiator", "*", "--cluster")
	testkit.Eventually(t, "both gateways have the second target", func() bool {
		_, _, code := b.run(t, "target", "show", all+"2")
		return code == cli.ExitOK
	})
	b.ok(t, "target", "delete", all+"2")

	session := a.login(t)
	a.ok(t, "upgrade")
	if got := sizes("1"); got != "2097152 2097152" {
		t.Errorf("after an upgrade the sizes are %s", got)
	}
	if err := session.Do(&initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)}); err != nil {
		t.Errorf("the session is over: %v", err)
	}
	testkit.Eventually(t, "the state of the cluster has the revision of both gateways", func() bool {
		st := read[schema.ClusterState](t, b, "cluster", "status")
		return len(st.Gateways) == 2 && st.Config > 0 && st.Gateways[0].Config == st.Config && st.Gateways[1].Config == st.Config
	})
	for _, s := range []*station{a, b} {
		now, err := os.ReadFile(s.file)
		if err != nil || strings.Contains(string(now), all) {
			t.Errorf("the file of a gateway has the target: %v\n%s", err, now)
		}
	}
}
