package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// init writes what the flags say, once, and serve serves it.
func TestInitWritesAConfiguration(t *testing.T) {
	dir := t.TempDir()
	path, disk := filepath.Join(dir, "c.yaml"), filepath.Join(dir, "disk.img")
	s := &station{dir: dir}
	s.says(t, cli.ExitOK, path+" written", "init", path, "--path", disk, "--size", "1.5M", "--listen", "192.0.2.1", "--allow", hostName, "--allow", "*:two", "--target", storeName)
	want := `portals:
  - listen: 192.0.2.1:3260
targets:
  - name: ` + storeName + `
    initiators: ['` + hostName + `', "*:two"]
    luns:
      - {id: 0, backend: file, path: ` + disk + `, size: 1536KiB}
`
	if os.Geteuid() != 0 {
		want = "" // it has state_dir, too
	}
	b, err := os.ReadFile(path)
	if err != nil || want != "" && string(b) != want {
		t.Errorf("%v\n%s\nwant\n%s", err, b, want)
	}
	if c, err := config.Load(path); err != nil || len(c.Targets) != 1 || len(c.Targets[0].LUNs) != 1 {
		t.Errorf("%+v, %v", c, err)
	}
	s.says(t, cli.ExitError, path+": exists. Nothing was changed", "init", path)
	s.says(t, cli.ExitError, "create the directory (mkdir "+filepath.Join(s.dir, "etc")+") or name another FILE", "init", filepath.Join(s.dir, "etc", "c.yaml"))
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, b) {
		t.Errorf("%v\n%s", err, after)
	}
	s.says(t, cli.ExitOK, "backend: memory, size: 1GiB", "init", "-")
	s.says(t, cli.ExitOK, `state_dir: ""`, "init", "-")
}

// What is wrong with a flag names it.
func TestServeNamesFlags(t *testing.T) {
	dir := t.TempDir()
	s := &station{dir: dir}
	none := filepath.Join(dir, "none.img")
	for _, tt := range []struct {
		want string
		args []string
	}{
		{"--size is required: " + none + " does not exist", []string{"--path", none}},
		{"--size: 3 is not a multiple of the block size, 512", []string{"--path", none, "--size", "3"}},
		{"--size: \"1x\" is not a size", []string{"--size", "1x"}},
		{"--path: " + dir + " is neither a file nor a block device", []string{"--path", dir}},
		{"--path: stat " + dir + "/no: no such file or directory", []string{"--path", dir + "/no/disk.img", "--size", "1M"}},
		{"--allow is required, because others reach 192.0.2.1:3260", []string{"--listen", "192.0.2.1"}},
		{"--allow is required, because others reach :3260", []string{"--listen", ":3260"}},
		{"--allow: iSCSI name \"^\"", []string{"--allow", "^"}},
		{"--listen: ", []string{"--listen", "192.0.2.1:x", "--allow", "*"}},
		{"--target: iSCSI name \"store\"", []string{"--target", "store"}},
		{"--config cannot be combined with", []string{"--config", none, "--size", "1M"}},
	} {
		s.says(t, cli.ExitUsage, "iser-target: "+tt.want, append([]string{"serve"}, tt.args...)...)
	}
	if list, err := os.ReadDir(dir); err != nil || len(list) != 0 {
		t.Errorf("%v, %v", list, err)
	}
}

// Without a file, flags describe the target. A file of a LUN keeps its data and its identity, and a process that continues
// serves the same.
func TestServeByFlags(t *testing.T) {
	s := &station{dir: t.TempDir()}
	disk := filepath.Join(s.dir, "disk.img")
	t.Setenv("ISER_TARGET_STATE_DIR", filepath.Join(s.dir, "state"))
	s.socket = filepath.Join(s.dir, "s")
	t.Setenv("ISER_TARGET_CONTROL_SOCKET", s.socket)
	lun := func(size ...string) schema.LUNState {
		t.Helper()
		s.process = start(t, append([]string{"serve", "--path", disk, "--listen", "127.0.0.1:0", "--target", storeName, "--allow", hostName}, size...)...)
		defer func() { // by its API, because a signal that comes before the supervisor has begun ends only that
			s.ok(t, "drain")
			ended := make(chan error, 1)
			go func() { ended <- s.cmd.Wait() }()
			select {
			case err := <-ended:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(30 * time.Second):
				t.Fatal("the target has not ended")
			}
		}()
		s.ok(t, "upgrade")
		l := read[schema.LUNState](t, s, "lun", "show", "0")
		if l.State != "ready" || l.Size != 3<<20 || l.Path != disk || l.Target != storeName {
			t.Errorf("%+v", l)
		}
		s.says(t, cli.ExitOK, "admitted", "explain", "--initiator", hostName, "--target", "store")
		s.says(t, cli.ExitError, "refused", "explain", "--initiator", hostName+"2", "--target", "store")
		return l
	}
	first := lun("--size", "3M")
	if again := lun(); again.NAA != first.NAA || strings.TrimLeft(again.NAA, "0") == "" { // the file has a size
		t.Errorf("NAA %s, then %s", first.NAA, again.NAA)
	}
}
