package tests

import (
	"go/parser"
	"go/token"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/iser-target/iser-target"

// mayImport is the import rule of ARCHITECTURE.md: which packages of this
// module, and which modules of others, the packages of a room may import
// besides the standard library. A room is a directory with all below it; the
// one that lies deepest counts. Imports point one way, so nothing but cmd knows
// all, and iscsi knows nothing of rdma.
var mayImport = map[string][]string{
	"cmd": {"cmd", "config", "security", "iser", "iscsi", "lun", "backend", "rdma", "github.com/HdrHistogram/hdrhistogram-go", "github.com/spf13/cobra", "github.com/cpuguy83/go-md2man/v2", "github.com/ohler55/ojg", "github.com/aymanbagabas/go-udiff",
		"go.yaml.in/yaml/v3", "golang.org/x/sys", "golang.org/x/term"},
	// A client of the control API does not need the target.
	"cmd/iser-target/api/client": {"cmd/iser-target/schema", "cmd/iser-target/tunnel"},
	"cmd/iser-target/tunnel":     {"rdma"},
	"cmd/iser-target/schema":     {"config/terms"},
	"config/terms":               {},
	"cmd/iser-target/httpd":      {"security/limits", "github.com/prometheus/exporter-toolkit", "go.yaml.in/yaml/v3", "golang.org/x/crypto"},
	"cmd/iser-target/privilege":  {"golang.org/x/sys"},
	"cmd/iser-target/probe":      {"backend", "config"},
	"cmd/iser-target/systemd":    {"github.com/coreos/go-systemd/v22", "golang.org/x/sys"},
	"cmd/iser-target/capture":    {"cmd/iser-target/schema", "rdma/crc32c", "rdma/llp", "github.com/gopacket/gopacket"},
	"cmd/iser-target/metrics":    {"iscsi", "lun", "rdma", "security/limits", "github.com/prometheus/client_golang", "go.yaml.in/yaml/v3"},
	"iser":                       {"iscsi", "lun/invariant", "rdma"},
	"iser/vectors":               {"iser", "iscsi/pdu", "rdma/wire"},
	"iser/initiator":             {"iser", "iscsi/initiator", "iscsi/keys", "iscsi/pdu", "rdma"},
	"iscsi":                      {"iscsi/fifo", "iscsi/pdu", "iscsi/keys", "lun", "security"},
	"iscsi/fifo":                 {"lun/invariant"},
	"iscsi/pdu":                  {},
	"iscsi/keys":                 {},
	"iscsi/vectors":              {"iscsi/pdu"},
	"iscsi/initiator":            {"iscsi/keys", "iscsi/pdu", "rdma/crc32c", "rdma/llp", "security"},
	"iscsi/tcp":                  {"iscsi", "iscsi/fifo", "iscsi/pdu", "lun/invariant", "rdma/crc32c", "rdma/llp"},
	"lun":                        {"backend", "lun/fair", "lun/invariant", "lun/state", "security/limits"},
	"lun/fair":                   {"lun/invariant", "security/limits"},
	"lun/invariant":              {},
	"lun/state":                  {"backend/handed", "lun/invariant"},
	"lun/owner":                  {"lun/state"},
	"lun/state/hometest":         {"lun/state"},
	"lun/state/etcd":             {"lun/state", "go.etcd.io/etcd/api/v3", "go.etcd.io/etcd/client/v3", "go.uber.org/zap", "google.golang.org/grpc"},
	"rdma":                       {"rdma/llp", "rdma/wire", "golang.org/x/sys"},
	"rdma/crc32c":                {"golang.org/x/sys"},
	"rdma/llp":                   {"golang.org/x/sys"},
	"rdma/wire":                  {"rdma/crc32c"},
	"rdma/wire/vectors":          {"rdma/wire"},
	"rdma/rpcrdma":               {"rdma", "rdma/wire", "rdma/rpcrdma/oncrpc", "rdma/rpcrdma/wire"},
	"rdma/rpcrdma/oncrpc":        {},
	"rdma/rpcrdma/wire":          {},
	"backend":                    {"backend", "golang.org/x/sys"},
	"backend/checked":            {"backend", "rdma/crc32c"},
	// gotgt logs by logrus.
	"backend/gotgt": {"backend", "github.com/gostor/gotgt", "github.com/sirupsen/logrus"},
	// Go initializes it before gotgt, so it imports nothing that takes longer to be ready.
	"backend/gotgt/gostorenv": {},
	"backend/nbd/nbduri":      {},
	"backend/rbd/rbduri":      {},
	"security":                {},
	"security/limits":         {},
	"security/ipsec":          {"security", "security/ipsec", "golang.org/x/sys", "github.com/vishvananda/netlink"},
	"security/ipsec/vici":     {"security/ipsec", "github.com/strongswan/govici"},
	"config":                  {"backend/nbd/nbduri", "backend/rbd/rbduri", "config/terms", "security", "github.com/spf13/viper", "go.yaml.in/yaml/v3", "golang.org/x/sys"},
	"tests": {"cmd", "config", "security", "iser", "iscsi", "lun", "backend", "rdma", "tests",
		"golang.org/x/crypto", "golang.org/x/sys", "github.com/chromedp", "github.com/hanwen/go-fuse"},
	"tests/deploy": {"config", "github.com/compose-spec/compose-go", "go.yaml.in/yaml/v3", "k8s.io/api", "sigs.k8s.io/yaml"},
}

// Tests may also import what they have in common, the suite that every store
// has to pass, what the packages below import (a unit needs a store), and those of the
// program an initiator, and policies of the kernel. Those of config validate by its schema. Those of the client of the control API serve a target. The example of iscsi needs a Datamover, and an initiator a target.
var testsMayImport = map[string][]string{"": {"backend/backendtest", "tests/testkit"}, "cmd": {"tests/initiator", "github.com/vishvananda/netlink", "golang.org/x/crypto"},
	"cmd/iser-target/httpd":      {"cmd/iser-target/api/apitest"},
	"cmd/iser-target/api/client": {"cmd/iser-target/api", "cmd/iser-target/daemon", "config"},
	"config":                     {"github.com/santhosh-tekuri/jsonschema/v6"}, "iscsi": {"iscsi/tcp", "iscsi/vectors"},
	"lun/state": {"lun/state/hometest"}, "iscsi/initiator": {"iscsi", "lun", "backend"}, "iser/initiator": {"iscsi", "lun", "backend"}}

// TestImports reads the files itself, whatever their build tags: what another
// process reads would be unknown to the cache of test results.
func TestImports(t *testing.T) {
	rooms := map[string]bool{}
	walkTree(t, ".go", func(path, name string) error {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		pkg := module + "/" + filepath.ToSlash(filepath.Dir(name))
		if r, ok := room(pkg); ok {
			rooms[r] = true
		} else {
			t.Errorf("%s is in no room of the import rule", path)
		}
		for _, spec := range file.Imports {
			imp, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			if !allowed(pkg, imp, strings.HasSuffix(path, "_test.go")) {
				t.Errorf("%s must not import %s", name, local(imp))
			}
		}
		return nil
	})
	for r := range mayImport {
		if !rooms[r] {
			t.Errorf("there is nothing in %s", r)
		}
	}
}

// The rule itself refuses what it is there to refuse.
func TestImportRule(t *testing.T) {
	for _, tc := range []struct {
		from, to string
		test, ok bool
	}{
		{"cmd/iser-target", "rdma", false, true},
		{"cmd/iser-target/api/client", "cmd/iser-target/schema", false, true},
		{"cmd/iser-target/api/client", "cmd/iser-target/daemon", false, false},
		{"cmd/iser-target/api/client", "iscsi", false, false},
		{"cmd/iser-target/schema", "cmd/iser-target/daemon", false, false},
		{"cmd/iser-target/schema", "lun", false, false},
		{"iser", "iscsi/pdu", false, true},
		{"iser", "rdma/wire", false, true},
		{"iser", "backend", false, false},
		{"iser", "lun", false, false},
		{"iscsi", "rdma", false, false},
		{"iscsi", "rdma/wire", false, false},
		{"iscsi", "rdma", true, false},
		{"iscsi", "iser", false, false},
		{"iscsi", "iscsi/tcp", false, false},
		{"iscsi/tcp", "iscsi", false, true},
		{"iscsi/tcp", "rdma", false, false},
		{"iscsi/tcp", "rdma/llp", false, true},
		{"iscsi", "rdma/llp", false, false},
		{"iscsi/tcp", "lun", false, false},
		{"iscsi", "backend", false, false},
		{"iscsi", "backend", true, true},
		{"cmd/iser-target", "tests/initiator", true, true},
		{"cmd/iser-target", "tests/initiator", false, false},
		{"iscsi", "lun", false, true},
		{"iscsi", "iscsi/keys", false, true},
		{"iscsi", "iscsi/vectors", false, false},
		{"iscsi", "iscsi/vectors", true, true},
		{"iscsi/keys", "iscsi/pdu", false, false},
		{"iscsi/initiator", "rdma", false, false},
		{"iscsi/initiator", "iscsi", false, false},
		{"iscsi/initiator", "lun", true, true},
		{"iser/initiator", "iscsi/initiator", false, true},
		{"iscsi/keys", "security", false, false},
		{"iscsi/fifo", "iscsi", false, false},
		{"rdma", "iscsi/fifo", false, false},
		{"lun", "backend", false, true},
		{"lun", "backend/gotgt", false, true},
		{"lun", "iscsi", false, false},
		{"lun", "security", false, false},
		{"backend/file", "backend", false, true},
		{"backend", "lun", false, false},
		{"iscsi/tcp", "lun/invariant", false, true},
		{"lun", "lun/invariant", false, true},
		{"lun", "lun/state", false, true},
		{"lun", "lun/state/etcd", false, false},
		{"lun/state", "lun/state/etcd", false, false},
		{"lun/state/etcd", "lun/state", false, true},
		{"cmd/iser-target", "lun/state/etcd", false, true},
		{"lun/invariant", "lun", false, false},
		{"lun/state", "lun", false, false},
		{"config", "lun/state", false, false},
		{"rdma", "lun/invariant", false, false},
		{"lun", "backend/backendtest", false, false},
		{"lun", "backend/backendtest", true, true},
		{"iscsi", "backend/backendtest", true, true},
		{"rdma", "iscsi/pdu", false, false},
		{"rdma", "rdma/rpcrdma/wire", false, false},
		{"rdma", "rdma/rpcrdma", false, false},
		{"rdma/rpcrdma", "rdma", false, true},
		{"rdma/rpcrdma", "iser", false, false},
		{"rdma/rpcrdma/wire", "rdma", false, false},
		{"rdma", "iser", true, false},
		{"config", "security", false, true},
		{"config", "lun", false, false},
		{"security", "config", false, false},
		{"iscsi", "cmd/iser-target", false, false},
		{"tests", "rdma", true, true},
		{"rdma", "tests/initiator", true, false},
		{"rdma", "tests/testkit", true, true},
		{"lun", "tests/testkit/cdb", true, true},
		{"iscsi", "tests/testkit/header", true, true},
		{"iscsi/pdu", "tests/testkit/cdb", false, false},
		{"rdma", "tests/testkit", false, false},
	} {
		if got := allowed(module+"/"+tc.from, module+"/"+tc.to, tc.test); got != tc.ok {
			t.Errorf("%s imports %s (test: %v): allowed is %v, want %v", tc.from, tc.to, tc.test, got, tc.ok)
		}
	}
	for _, tc := range []struct {
		from, to string
		ok       bool
	}{
		{"rdma", "encoding/binary", true},
		{"rdma", "golang.org/x/sys/unix", true},
		{"rdma", "golang.org/x/net/ipv4", false},
		{"iscsi", "github.com/gostor/gotgt/pkg/api", false},
		{"backend/file", "github.com/gostor/gotgt/pkg/api", false},
		{"backend/gotgt", "github.com/gostor/gotgt/pkg/api", true},
		{"config", "github.com/spf13/viper", true},
		{"security", "github.com/spf13/viper", false},
	} {
		if got := allowed(module+"/"+tc.from, tc.to, false); got != tc.ok {
			t.Errorf("%s imports %s: allowed is %v, want %v", tc.from, tc.to, got, tc.ok)
		}
	}
}

// allowed reports whether package from, or its tests, may import package to.
func allowed(from, to string, test bool) bool {
	if first, _, _ := strings.Cut(to, "/"); !strings.Contains(first, ".") {
		return true // standard library
	}
	from, to = local(from), local(to)
	if from == to {
		return true // an external test package
	}
	r, ok := room(module + "/" + from)
	if test && ok && testAllowed(r, to) {
		return true
	}
	if within(to, "lun/state/etcd") && !within(from, "cmd") && !within(from, "tests") {
		return false // the client of etcd is a third of a small program
	}
	if !ok || within(to, "backend/backendtest") && !within(from, "backend") && !within(from, "tests") {
		return false
	}
	for _, room := range mayImport[r] {
		if within(to, room) {
			return true
		}
	}
	return false
}

// testAllowed reports whether the tests in a room may import a package that the room itself may
// not.
func testAllowed(r, to string) bool {
	for _, also := range [][]string{testsMayImport[""], testsMayImport[r]} {
		for _, dir := range also {
			if within(to, dir) {
				return true
			}
		}
	}
	for _, below := range mayImport[r] {
		if within(to, below) {
			return true
		}
		if next, ok := room(module + "/" + below); ok && next != r && testAllowed(next, to) {
			return true
		}
	}
	return false
}

// room finds the room of a package of this module.
func room(pkg string) (string, bool) {
	for r := local(pkg); ; {
		if _, ok := mayImport[r]; ok {
			return r, true
		}
		i := strings.LastIndexByte(r, '/')
		if i < 0 {
			return "", false
		}
		r = r[:i]
	}
}

// local shortens the path of a package of this module.
func local(pkg string) string { return strings.TrimPrefix(pkg, module+"/") }

// within reports whether a package is in a directory or module.
func within(pkg, dir string) bool { return pkg == dir || strings.HasPrefix(pkg, dir+"/") }
