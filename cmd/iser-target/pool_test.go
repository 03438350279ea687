package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/cmd/iser-target/api/apitest"
	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/testkit"
)

// lun create --pool with a directory: the target creates the file, and no command takes one that exists.
func TestPoolDirectory(t *testing.T) {
	at := t.TempDir()
	s := newStation(t)
	in := []string{"lun", "create", storeName, "--pool", "dir:" + at, "--size", "1MiB"}
	file := filepath.Join(at, "store-lun1.img")
	s.says(t, cli.ExitOK, "add LUN 1 of "+storeName, append(in, "--dry-run")...)
	if left, _ := os.ReadDir(at); len(left) != 0 {
		t.Errorf("a dry run made %v", left)
	}
	s.says(t, cli.ExitOK, "note: made volume "+file, in...)
	if l := read[schema.LUNState](t, s, "lun", "show", "1"); l.State != schema.Ready || l.Path != file || l.Size != 1<<20 {
		t.Errorf("%+v", l)
	}
	s.says(t, cli.ExitError, "exists: LUN 1 of "+storeName+" uses it. Nothing was changed", append(in, "--volume", "store-lun1.img")...)
	s.says(t, cli.ExitRefused, "LUN 1 is on file", "lun", "delete", "1", "--delete-volume")
	s.ok(t, "lun", "delete", "1")
	s.says(t, cli.ExitError, file+" exists, and was not touched", in...)
	s.says(t, cli.ExitOK, "note: made volume "+filepath.Join(at, "other"), append(in, "--volume", "other", "--preallocate")...)

	for want, args := range map[string][]string{
		"--pool excludes --path":                       append(in, "--path", file),
		"--pool excludes --from":                       append(in, "--from", file),
		"--volume requires --pool":                     {"lun", "create", storeName, "--volume", "a"},
		"--pool requires --size":                       {"lun", "create", storeName, "--pool", "dir:" + at},
		"--volume: \"-x\"":                             append(in, "--volume=-x"),
		"--pool: \"fast\" is not the name of a pool":   {"lun", "create", storeName, "--pool", "fast", "--size", "1MiB"},
		"--preallocate requires a pool dir:/DIRECTORY": {"lun", "create", storeName, "--pool", "lvm:a/b", "--size", "1MiB", "--preallocate"},
		"--size: \"1Q\"":                               {"lun", "create", storeName, "--pool", "lvm:a/b", "--size", "1Q"},
		"--checksums requires --checksums-path":        {"lun", "create", storeName, "--pool", "lvm:a/b", "--size", "1MiB", "--checksums"},
	} {
		s.says(t, cli.ExitUsage, want, args...)
	}
	s.says(t, cli.ExitError, "no such file or directory. Nothing was changed", "lun", "create", storeName, "--pool", "dir:"+at+"/none", "--size", "1MiB")
}

// A fakeLVM has programs with the names of those of LVM, which keep the tags of volumes as files below a directory.
type fakeLVM struct{ dir, group string }

// newFakeLVM puts the programs first in PATH. A new volume is a link to device.
func newFakeLVM(t *testing.T, device string) *fakeLVM {
	t.Helper()
	f := &fakeLVM{t.TempDir(), fmt.Sprintf("isertest%d", os.Getpid())}
	if err := os.Mkdir(f.in("lv"), 0o700); err != nil {
		t.Fatal(err)
	}
	head := "#!/bin/sh\ncd " + f.in("lv") + "\necho \"${0##*/} $*\" >>../calls\n"
	for name, script := range map[string]string{
		"lvs": `printf '{"report":[{"lv":[{"lv_name":"thin","lv_attr":"twi-","lv_tags":"","data_percent":"91.00","metadata_percent":"1.00"}'
for v in *; do [ -e "$v" ] && printf ',{"lv_name":"%s","origin":"%s","lv_attr":"Vwi-","lv_tags":"%s","lv_size":"1048576","lv_time":"2026-11-27 18:00:00 +0000","data_percent":"25","metadata_percent":""}' "$v" "$(cat ../origin.$v 2>/dev/null)" "$(cat "$v")"; done
echo ']}]}'`,
		"lvcreate": `[ "$1" = --test ] && exit 0
[ -e ../fails ] && { echo '  Insufficient free space.' >&2; exit 5; }
device=` + device + `
while [ $# -gt 1 ]; do case $1 in --name) name=$2;; --addtag) tag=$2;; --snapshot) snapshot=1;; --setactivationskip) skip=$2;; esac; shift; done
echo "$tag" >"$name"
[ "$snapshot" ] && echo "${1#*/}" >"../origin.$name" && device=$(cat ../clones)
[ "$skip" = y ] && exit 0
mkdir -p /dev/` + f.group + ` && ln -s $device "/dev/` + f.group + `/$name"
[ -e ../die ] && kill -9 $PPID
[ -e ../slow ] && sleep 3
exit 0`,
		"lvremove": `[ -e ../busy ] && { echo '  Logical volume in use.' >&2; exit 5; }
rm -f "${2#*/}" "../origin.${2#*/}" "/dev/$2"`,
	} {
		if err := os.WriteFile(f.in(name), []byte(head+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", f.dir+":"+os.Getenv("PATH"))
	t.Cleanup(func() { os.RemoveAll("/dev/" + f.group) })
	return f
}

func (f *fakeLVM) in(name string) string { return filepath.Join(f.dir, name) }

// volumes returns the names of the volumes.
func (f *fakeLVM) volumes(t *testing.T) string {
	t.Helper()
	list, err := os.ReadDir(f.in("lv"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range list {
		names = append(names, e.Name())
	}
	return strings.Join(names, " ")
}

func (f *fakeLVM) touch(t *testing.T, name string) {
	t.Helper()
	if err := os.WriteFile(f.in(name), nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

// lun snapshot and lun clone of a LUN on a volume make and remove snapshots and volumes, and tell what they did. A LUN on a file next to it keeps its own way.
func TestPoolSnapshots(t *testing.T) {
	device, _ := backendtest.LoopDevice(t, make([]byte, 1<<20), 512, false)
	other, _ := backendtest.LoopDevice(t, make([]byte, 1<<20), 512, false)
	lvm := newFakeLVM(t, device)
	if err := os.WriteFile(lvm.in("clones"), []byte(other+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := newStation(t)
	s.ok(t, "lun", "create", storeName, "--pool", "lvm:"+lvm.group+"/thin", "--size", "1MiB")
	first, snap := "/dev/"+lvm.group+"/store-lun1", lvm.group+"/store-lun1-snap-daily"

	s.says(t, cli.ExitOK, "make snapshot daily of LUN 1 of "+storeName+": "+snap, "lun", "snapshot", "create", "1", "daily", "--dry-run")
	s.says(t, cli.ExitNotFound, "has no snapshot daily", "lun", "clone", "1@daily")
	if got := lvm.volumes(t); got != "store-lun1" {
		t.Fatalf("volumes %s", got)
	}
	lvm.touch(t, "fails")
	s.says(t, cli.ExitError, "lvcreate: Insufficient free space. Nothing was changed", "lun", "snapshot", "create", "1", "daily")
	os.Remove(lvm.in("fails"))
	s.says(t, cli.ExitOK, "snapshot daily of LUN 1 of "+storeName+": "+snap+", 1MiB", "lun", "snapshot", "create", "1", "daily")
	s.says(t, cli.ExitError, snap+": it exists. Nothing was changed", "lun", "snapshot", "create", "1", "daily")
	list := read[[]schema.Snapshot](t, s, "lun", "snapshot", "list")
	if len(list) != 1 || list[0].LUN != 1 || list[0].Name != "daily" || list[0].Path != snap || list[0].Size != 1<<20 || list[0].Used != 1<<18 || list[0].Created.Unix() != 1795802400 {
		t.Errorf("%+v", list)
	}

	s.says(t, cli.ExitOK, "note: makes volume /dev/"+lvm.group+"/test (1MiB)", "lun", "clone", "1@daily", "--volume", "test", "--dry-run")
	s.says(t, cli.ExitOK, "note: made volume /dev/"+lvm.group+"/test", "lun", "clone", "1@daily", "--volume", "test", "--read-only")
	l := read[schema.LUNState](t, s, "lun", "show", "2")
	if l.State != schema.Ready || l.Backend != "block" || !l.ReadOnly || l.Size != 1<<20 {
		t.Errorf("%+v", l)
	}
	calls, _ := os.ReadFile(lvm.in("calls"))
	for _, want := range []string{"--name store-lun1-snap-daily " + lvm.group + "/store-lun1\n", "--name test " + snap + "\n"} {
		if !strings.Contains(string(calls), want) {
			t.Errorf("no call with %q in\n%s", want, calls)
		}
	}
	s.says(t, cli.ExitError, "/dev/"+lvm.group+"/test exists: LUN 2 of "+storeName+" uses it", "lun", "clone", "1", "--volume", "test")
	s.ok(t, "lun", "delete", "2", "--delete-volume")
	// The target refuses a LUN that exists: the volume goes again.
	s.says(t, cli.ExitError, "is LUN 1 already", "lun", "clone", "1", "--volume", "test", "--id", "1")
	s.says(t, cli.ExitOK, "note: made volume /dev/"+lvm.group+"/store-lun2", "lun", "clone", "1")
	s.ok(t, "lun", "delete", "2", "--delete-volume")

	s.says(t, cli.ExitRefused, first+" has snapshots, daily for example. Nothing was changed", "lun", "delete", "1", "--delete-volume")
	s.says(t, cli.ExitOK, "delete snapshot daily of LUN 1 of "+storeName+": "+snap, "lun", "snapshot", "delete", "1", "daily", "--dry-run")
	lvm.touch(t, "busy")
	s.says(t, cli.ExitError, "lvremove: Logical volume in use. Nothing was changed", "lun", "snapshot", "delete", "1", "daily")
	os.Remove(lvm.in("busy"))
	s.ok(t, "lun", "snapshot", "delete", "1", "daily")
	s.says(t, cli.ExitNotFound, "has no snapshot daily", "lun", "snapshot", "delete", "1", "daily")
	if got := lvm.volumes(t); got != "store-lun1" {
		t.Errorf("volumes %s", got)
	}
	if list := read[[]schema.Snapshot](t, s, "lun", "snapshot", "list"); len(list) != 0 {
		t.Errorf("%+v", list)
	}

	for want, args := range map[string][]string{
		"LUN 1 is on a volume, and its clone will be, too": {"lun", "clone", "1", "--path", first + "x"},
		"--path excludes --volume":                         {"lun", "clone", "1", "--path", first + "x", "--volume", "a"},
		"--copy is for LUNs on files":                      {"lun", "clone", "1@daily", "--copy"},
		"--volume is for LUNs on volumes":                  {"lun", "clone", "0", "--volume", "a"},
		"--path is required":                               {"lun", "clone", "0"},
	} {
		s.says(t, cli.ExitUsage, want, args...)
	}
}

// lun create --pool and lun delete --delete-volume make and remove a logical volume, or leave all as it was.
func TestPoolLVM(t *testing.T) {
	device, _ := backendtest.LoopDevice(t, make([]byte, 1<<20), 512, false)
	lvm := newFakeLVM(t, device)
	s := newStation(t)
	in := []string{"lun", "create", storeName, "--pool", "lvm:" + lvm.group + "/thin", "--size", "1MiB"}
	path := "/dev/" + lvm.group + "/store-lun1"

	// Nothing is made by a dry run, and for a LUN that the target refuses without a look at the device.
	s.says(t, cli.ExitOK, "note: makes volume "+path, append(in, "--dry-run")...)
	s.says(t, cli.ExitError, "is LUN 0 already", append(in, "--id", "0")...)
	if got := lvm.volumes(t); got != "" {
		t.Fatalf("volumes %s", got)
	}
	// The target refuses this one when it sees the device. A volume that cannot be removed again is named.
	s.says(t, cli.ExitError, "The volume was removed again", append(in, "--checksums", "--checksums-path", lvm.in("none/sums"))...)
	if got := lvm.volumes(t); got != "" {
		t.Fatalf("volumes %s", got)
	}
	lvm.touch(t, "busy")
	s.says(t, cli.ExitError, "was not removed: lvremove: Logical volume in use. Remove it with lvremove "+lvm.group+"/kept", append(in, "--checksums", "--checksums-path", lvm.in("none/sums"), "--volume", "kept")...)
	os.Remove(lvm.in("busy"))
	if got := lvm.volumes(t); got != "kept" {
		t.Fatalf("volumes %s", got)
	}

	s.says(t, cli.ExitOK, "is 91% full", in...)
	l := read[schema.LUNState](t, s, "lun", "show", "1")
	if l.State != schema.Ready || l.Backend != "block" || l.Path != path || l.Size != 1<<20 {
		t.Errorf("%+v", l)
	}
	if got := lvm.volumes(t); got != "kept store-lun1" {
		t.Errorf("volumes %s", got)
	}
	s.says(t, cli.ExitError, path+" exists: LUN 1 of "+storeName+" uses it", append(in, "--volume", "store-lun1")...)
	s.says(t, cli.ExitOK, "note: removes volume "+path+" with its data", "lun", "delete", "1", "--delete-volume", "--dry-run")
	lvm.touch(t, "busy")
	s.says(t, cli.ExitError, "LUN 1 was deleted, and the volume stays. Remove it with lvremove", "lun", "delete", "1", "--delete-volume")
	os.Remove(lvm.in("busy"))
	s.says(t, cli.ExitError, "a lun create made it for LUN 1 of "+storeName, in...)
	s.ok(t, "lun", "create", storeName, "--backend", "block", "--path", path)
	s.says(t, cli.ExitOK, "note: removed volume "+path, "lun", "delete", "1", "--delete-volume")
	if got := lvm.volumes(t); got != "kept" {
		t.Errorf("volumes %s", got)
	}

	// A volume of somebody else stays.
	if err := os.WriteFile(lvm.in("lv/foreign"), []byte("backup"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(device, "/dev/"+lvm.group+"/foreign"); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitError, "foreign exists, and was not touched", append(in, "--volume", "foreign")...)
	s.ok(t, "lun", "create", storeName, "--backend", "block", "--path", "/dev/"+lvm.group+"/foreign")
	s.says(t, cli.ExitRefused, "lun create --pool did not make", "lun", "delete", "1", "--delete-volume")
	if got := lvm.volumes(t); got != "foreign kept" {
		t.Errorf("volumes %s", got)
	}
	if l := read[schema.LUNState](t, s, "lun", "show", "0"); l.State != schema.Ready {
		t.Errorf("the neighbor: %+v", l)
	}
}

// A command that kill -9 ends between the volume and the LUN leaves a volume that the next one names, with what to do.
func TestPoolKilled(t *testing.T) {
	if testkit.Race {
		t.Skip("the command runs in the process of the test, see station.run")
	}
	device, _ := backendtest.LoopDevice(t, make([]byte, 1<<20), 512, false)
	lvm := newFakeLVM(t, device)
	s := newStation(t)
	in := []string{"lun", "create", storeName, "--pool", "lvm:" + lvm.group + "/thin", "--size", "1MiB"}
	lvm.touch(t, "die")
	if _, _, code := s.run(t, in...); code != -1 {
		t.Fatalf("exit code %d of a command that was killed", code)
	}
	os.Remove(lvm.in("die"))
	path := "/dev/" + lvm.group + "/store-lun1"
	if got := read[[]schema.LUNState](t, s, "lun", "list"); len(got) != 1 {
		t.Errorf("LUNs %+v", got)
	}
	out := s.says(t, cli.ExitError, path+" exists: a lun create made it for LUN 1 of "+storeName+", and no LUN of this target process uses it", in...)
	for _, want := range []string{"--backend block --path " + path, "lvremove " + lvm.group + "/store-lun1"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in %s", want, out)
		}
	}
	s.ok(t, "lun", "create", storeName, "--backend", "block", "--path", path)
	s.says(t, cli.ExitOK, "note: removed volume "+path, "lun", "delete", "1", "--delete-volume")
}

// A command that a signal interrupts while lvcreate runs removes the volume that was made meanwhile.
func TestPoolInterrupted(t *testing.T) {
	device, _ := backendtest.LoopDevice(t, make([]byte, 1<<20), 512, false)
	lvm := newFakeLVM(t, device)
	s := newStation(t)
	lvm.touch(t, "slow")
	cmd := s.command(t, "lun", "create", storeName, "--pool", "lvm:"+lvm.group+"/thin", "--size", "1MiB")
	var said bytes.Buffer
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if _, err := os.Lstat("/dev/" + lvm.group + "/store-lun1"); err == nil {
			break
		}
	}
	if got := lvm.volumes(t); got != "store-lun1" {
		t.Errorf("volumes %q before the signal", got)
	}
	cmd.Process.Signal(os.Interrupt)
	if err := cmd.Wait(); err == nil || !strings.Contains(said.String(), "lvcreate: interrupted. The volume was removed again") {
		t.Errorf("%v: %s", err, said.String())
	}
	if got := lvm.volumes(t); got != "" {
		t.Errorf("volumes %s", got)
	}
	if got := read[[]schema.LUNState](t, s, "lun", "list"); len(got) != 1 {
		t.Errorf("LUNs %+v", got)
	}
}

// The command makes volumes on its own machine, so it refuses a target on another one, whose API it reaches by TCP.
func TestPoolRemote(t *testing.T) {
	ca := apitest.New(t)
	ca.Server("server")
	ca.Client("client")
	s, address := newRemote(t, ca, "server")
	flags := []string{"--address", address, "--tls-cert", ca.Path("client.pem"), "--tls-key", ca.Path("client.key"), "--tls-ca", ca.Path("ca.pem")}
	at := t.TempDir()
	s.says(t, cli.ExitUsage, "run the command there, or make the volume there", append([]string{"lun", "create", storeName, "--pool", "dir:" + at, "--size", "1MiB"}, flags...)...)
	s.says(t, cli.ExitUsage, "run the command there", append([]string{"lun", "delete", storeName, "0", "--delete-volume"}, flags...)...)
	if left, _ := os.ReadDir(at); len(left) != 0 {
		t.Errorf("%v was made", left)
	}
}
