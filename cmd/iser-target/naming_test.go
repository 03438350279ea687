package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
)

// A target has its full name, its alias, and the ends of its name that no other target has. One that is alone needs no name.
func TestTargetsHaveShortNames(t *testing.T) {
	s := newStation(t)
	for _, args := range [][]string{
		{"lun", "show", "0"}, {"lun", "show", "store", "0"}, {"luns", "show", "STORE", "0"}, {"lun", "show", "example:store", "0"},
	} {
		s.says(t, cli.ExitOK, storeName, args...)
	}
	s.says(t, cli.ExitOK, storeName, "target", "show")
	s.says(t, cli.ExitOK, "set alias", "target", "set", "alias=vault")
	s.says(t, cli.ExitOK, storeName, "lun", "show", "vault", "0")
	s.says(t, cli.ExitOK, "add LUN", "lun", "create", "--backend", "memory", "--size", "1.5M")
	s.says(t, cli.ExitOK, "1572864 bytes", "lun", "show", "1")
	s.says(t, cli.ExitOK, `"*:more"`, "initiator", "allow", "*:more")
	s.says(t, cli.ExitOK, "initiators", "explain", "--initiator", hostName, "--target", "vault")

	// Nobody deletes a target that has no name in the command.
	s.says(t, cli.ExitUsage, "wrong number of arguments", "target", "delete")

	s.ok(t, "target", "create", secondName, "--initiator", hostName)
	s.says(t, cli.ExitUsage, "name the target: there are 2 ("+storeName+", "+secondName+")", "lun", "show", "0")
	s.says(t, cli.ExitOK, storeName, "lun", "show", "store", "0") // the other one ends in store2
	s.says(t, cli.ExitOK, secondName, "target", "show", "2")
	s.ok(t, "target", "create", storeName+"-2", "--initiator", hostName)
	s.says(t, cli.ExitError, "2 may be 2 targets: "+secondName+", "+storeName+"-2", "target", "show", "2")
	s.says(t, cli.ExitOK, "remove target "+secondName, "target", "rm", "store2")
}

// What does not exist is answered with what may be meant.
func TestNotFoundSuggests(t *testing.T) {
	s := newStation(t)
	s.says(t, cli.ExitNotFound, "not found; did you mean "+storeName+"?", "lun", "show", "stroe", "0")
	s.says(t, cli.ExitNotFound, "not found; did you mean "+storeName+"?", "lun", "show", storeName[:len(storeName)-1], "0")
	s.says(t, cli.ExitNotFound, "See iser-target target list.", "lun", "show", "elsewhere", "0")
	s.says(t, cli.ExitNotFound, "See iser-target lun list.", "lun", "show", "99")
	s.says(t, cli.ExitNotFound, "See iser-target session list.", "session", "show", "99")
	s.says(t, cli.ExitUsage, "did you mean delete?", "lun", "delte", "store", "0")
	s.says(t, cli.ExitUsage, "did you mean list", "portal", "lst")
}

// A portal without a port has that of iSCSI, and LUNs can grow by a difference.
func TestDefaultsOfArguments(t *testing.T) {
	s := newStation(t)
	s.says(t, cli.ExitOK, "add portal 127.0.0.7:3260", "portal", "add", "127.0.0.7", "--dry-run")
	s.says(t, cli.ExitOK, "add portal [::1]:3260", "portal", "add", "::1", "--dry-run")
	s.says(t, cli.ExitOK, "add portal [::1]:3260", "portal", "create", "[::1]", "--dry-run")
	s.says(t, cli.ExitError, `"host" is not`, "portal", "add", "host", "--dry-run")
	s.ok(t, "lun", "create", "--id", "9", "--path", "nine.img", "--size", "1M")
	s.says(t, cli.ExitOK, "1MiB -> 3MiB", "lun", "resize", "9", "+2M")
	s.says(t, cli.ExitOK, "3MiB -> 3584KiB", "lun", "resize", "store", "9", "+0.5m")
	s.says(t, cli.ExitUsage, "is not a size", "lun", "resize", "9", "+")
	s.says(t, cli.ExitNotFound, "LUN 8", "lun", "resize", "8", "+1M")
}

// What is wrong with a flag names the flag, not a place in the configuration, and is an error of usage.
func TestErrorsNameFlags(t *testing.T) {
	s := newStation(t)
	s.says(t, cli.ExitUsage, "--path is required for backend file\n--size is required for backend file\n", "lun", "create")
	s.says(t, cli.ExitUsage, "--size is required for backend file\n", "lun", "create", "--path", "none.img", "--dry-run")
	s.says(t, cli.ExitUsage, "--size: 3 is not a multiple of the block size, 512\n", "lun", "create", "--path", "none.img", "--size", "3")
	s.says(t, cli.ExitUsage, "iser-target: --block-size must be 512 or 4096, not 7\n--naa must be 32 hex", "lun", "create", "--path", "none.img", "--size", "1M", "--block-size", "7", "--naa", "x")
	s.says(t, cli.ExitUsage, "iser-target: size: 7 is not a multiple", "lun", "set", "0", "size=7")
	s.says(t, cli.ExitUsage, "iser-target: SIZE: 7 is not a multiple", "lun", "resize", "0", "7")
	s.says(t, cli.ExitUsage, "--alias must have", "target", "create", secondName, "--initiator", "*", "--alias", strings.Repeat("a", 300))
	if out := s.ok(t, "lun", "list"); strings.Contains(out, "none.img") {
		t.Error(out)
	}
}

// A file that is there gives its LUN its size.
func TestLUNTakesSizeOfFile(t *testing.T) {
	s := newStation(t)
	path := filepath.Join(s.dir, "old.img")
	if err := os.WriteFile(path, bytes.Repeat([]byte("old data"), 384), 0o600); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitOK, "add LUN 7", "lun", "create", "--id", "7", "--path", path, "--dry-run")
	s.says(t, cli.ExitOK, "add LUN 7", "lun", "create", "--id", "7", "--path", path)
	s.says(t, cli.ExitOK, "3072 bytes", "lun", "show", "7")
	s.ok(t, "lun", "delete", "7")
	if b, err := os.ReadFile(path); err != nil || len(b) != 3072 || !bytes.HasPrefix(b, []byte("old data")) {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	if err := os.Truncate(path, 3000); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitUsage, "--size: 3000 is not a multiple of the block size, 512", "lun", "create", "--path", path)
}

// A LUN on a file with data does not get another size than the file: nothing extends it without a word.
func TestLUNKeepsSizeOfFile(t *testing.T) {
	s := newStation(t)
	path := filepath.Join(s.dir, "old.img")
	if err := os.WriteFile(path, bytes.Repeat([]byte("old data"), 256<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	for size, want := range map[string]string{
		"3MiB": path + " exists and is 2MiB (2097152 bytes), but --size is 3MiB (3145728 bytes). Nothing was changed\n" +
			"Leave out --size to use the file as it is, and extend it then with iser-target lun resize " + storeName + " LUN 3MiB.\n",
		"1536": path + " exists and is 2MiB (2097152 bytes), but --size is 1536 bytes. Nothing was changed\n" +
			"Leave out --size to use the file as it is; truncate -s 1536 PATH makes it smaller, and loses the data beyond that.\n",
	} {
		for _, more := range [][]string{nil, {"--dry-run"}} {
			s.says(t, cli.ExitError, want, append([]string{"lun", "create", "--id", "7", "--path", path, "--size", size}, more...)...)
		}
	}
	if fi, err := os.Stat(path); err != nil || fi.Size() != 2<<20 {
		t.Errorf("%v, %v", fi, err)
	}
	s.ok(t, "lun", "create", "--id", "7", "--path", path, "--size", "2MiB")
	s.ok(t, "lun", "resize", "7", "3MiB")
	if fi, err := os.Stat(path); err != nil || fi.Size() != 3<<20 {
		t.Errorf("%v, %v", fi, err)
	}
	empty := filepath.Join(s.dir, "empty.img")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s.ok(t, "lun", "create", "--id", "8", "--path", empty, "--size", "1MiB")
}

// connect prints commands that a shell can read, for a user whose name has characters of shells, and never a secret.
func TestConnectPrintsCommands(t *testing.T) {
	const secret, ours = "a secret of host", "another secret 1"
	s := &station{dir: t.TempDir()}
	s.configure(t, func(text string) string {
		return strings.Replace(text, "    initiators:", `    auth:
      method: chap
      algorithms: [sha256]
      users: [{name: "it's $HOME", secret: `+secret+`}]
      mutual: {name: "; ls", secret: `+ours+`}
    initiators:`, 1)
	})
	s.startProgram(t, executable(t))
	for _, tt := range []struct {
		platform string
		want     []string
	}{
		{"linux", []string{`set_node username 'it'\''s $HOME'` + "\n", "set_node username_in '; ls'\n", "set_node chap_algs SHA256\n", "-p " + s.addr + " --login\n", "Only this machine reaches 127.0.0.1"}},
		{"linux-iser", []string{"-p " + s.addr + " -I iser -o new\n", "modprobe ib_iser\n", " -I iser -o update -n 'node.conn[0].iscsi.MaxXmitDataSegmentLength' -v 65536\n"}},
		{"esxi", []string{`--authname='it'\''s $HOME' `, "--authname='; ls' ", "--address=" + s.addr + " --name=" + storeName, "does not accept MD5"}},
		{"proxmox", []string{"pvesm add iscsi store --portal " + s.addr + " --target " + storeName}},
		{"windows", []string{"-ChapUsername 'it''s $HOME' ", "-AuthenticationType MUTUALCHAP"}},
		{"k8s", []string{"lun: 0\n", "iqn: " + storeName + "\n", "chapAuthSession: true\n"}},
		{"k8s-iser", []string{"iscsiInterface: iser\n"}},
	} {
		out := s.ok(t, "connect", "--for", tt.platform)
		for _, want := range append(tt.want, "# The target admits an initiator with any name.\n") {
			if !strings.Contains(out, want) {
				t.Errorf("%s: no %q in\n%s", tt.platform, want, out)
			}
		}
		if strings.Contains(out, secret) || strings.Contains(out, ours) {
			t.Errorf("%s: a secret in\n%s", tt.platform, out)
		}
		switch tt.platform {
		case "linux", "linux-iser", "esxi", "proxmox":
			shell := exec.Command("bash", "-n")
			shell.Stdin = strings.NewReader(out)
			if b, err := shell.CombinedOutput(); err != nil {
				t.Errorf("%s: %v: %s in\n%s", tt.platform, err, b, out)
			}
		case "k8s", "k8s-iser":
			d := yaml.NewDecoder(strings.NewReader(out))
			volumes := 0
			for ; ; volumes++ {
				var v struct {
					Spec struct {
						ISCSI struct {
							TargetPortal string `yaml:"targetPortal"`
						} `yaml:"iscsi"`
					}
				}
				if err := d.Decode(&v); err == io.EOF {
					break
				} else if err != nil || v.Spec.ISCSI.TargetPortal != s.addr {
					t.Fatalf("%+v, %v in\n%s", v, err, out)
				}
			}
			if volumes == 0 {
				t.Error("no volume")
			}
		}
	}
	s.says(t, cli.ExitOK, "-p [2001:db8::1]:3260 --login", "connect", "--portal", "2001:db8::1")
	s.says(t, cli.ExitOK, "-p san.example.com:3261 --login", "connect", "--portal", "san.example.com:3261")
	s.says(t, cli.ExitUsage, "--portal must be an address", "connect", "--portal", "$(reboot)")
	s.says(t, cli.ExitUsage, "--portal must be an address", "connect", "--portal", "192.0.2.1:0")
	s.says(t, cli.ExitUsage, "--for must be one of linux, ", "connect", "--for", "plan9")
	s.ok(t, "target", "create", secondName, "--initiator", hostName)
	s.says(t, cli.ExitOK, "# The name of the initiator must match "+hostName+".\n", "connect", "store2")
	s.ok(t, "target", "set", secondName, "redirect.to=192.0.2.9:3260")
	s.says(t, cli.ExitRefused, "redirects initiators to 192.0.2.9:3260", "connect", "store2")
}
