package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/tests/testkit"
)

// needsRoot makes a test unavailable that other users cannot run.
func needsRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		backendtest.Unavailable(t, "only root has rights to give up")
	}
}

// rights returns fields of /proc/PID/status, with capabilities as numbers.
func rights(t *testing.T, pid int) func(key string) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	return func(key string) string {
		found := regexp.MustCompile(`(?m)^` + key + `:\s*(.*)$`).FindSubmatch(b)
		if found == nil {
			t.Fatalf("/proc/%d/status has no %s", pid, key)
		}
		return string(found[1])
	}
}

// capabilities returns a field of capabilities.
func capabilities(t *testing.T, field string) uint64 {
	t.Helper()
	n, err := strconv.ParseUint(field, 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// one returns the process that serves.
func (s *station) one(t *testing.T) int {
	t.Helper()
	pids := s.processes(t)
	if len(pids) != 1 {
		t.Fatalf("processes that serve: %v", pids)
	}
	return pids[0]
}

// never are capabilities that a target has no use for.
const never = 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_SYS_MODULE | 1<<unix.CAP_SYS_PTRACE | 1<<unix.CAP_SYS_RAWIO | 1<<unix.CAP_MKNOD |
	1<<unix.CAP_SETUID | 1<<unix.CAP_SETGID | 1<<unix.CAP_SETPCAP | 1<<unix.CAP_SYS_BOOT | 1<<unix.CAP_BPF

// A target that root starts has no capability that it never needs, in none of its threads, and no program that it starts gets one. It
// continues to do what it did: sessions, a port below 1024, files of other users, upgrades.
func TestRootKeepsOnlyWhatIsNeeded(t *testing.T) {
	needsRoot(t)
	dir := t.TempDir()
	s := &station{dir: dir}
	s.configure(t, withFile(dir))
	s.startProgram(t, executable(t))
	check := func() {
		t.Helper()
		pid := s.one(t)
		status := rights(t, pid)
		for _, key := range []string{"CapPrm", "CapEff", "CapBnd", "CapInh", "CapAmb"} {
			if has := capabilities(t, status(key)); has&never != 0 {
				t.Errorf("%s: %x", key, has&never)
			}
		}
		if status("NoNewPrivs") != "1" || !strings.HasPrefix(status("Uid"), "0\t") {
			t.Errorf("NoNewPrivs %s, Uid %s", status("NoNewPrivs"), status("Uid"))
		}
		own, err := strconv.Atoi(rights(t, os.Getpid())("Seccomp_filters"))                                     // of a container
		if n := status("Seccomp_filters"); err != nil || status("Seccomp") != "2" || n != strconv.Itoa(own+1) { // one, also after an upgrade
			t.Errorf("Seccomp %s, %s filters, %d of this process, %v", status("Seccomp"), n, own, err)
		}
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
		if err != nil || len(threads) < 2 {
			t.Fatalf("threads: %q, %v", threads, err)
		}
		for _, thread := range threads {
			b, err := os.ReadFile(thread)
			if err == nil && !bytes.Contains(b, []byte("CapEff:\t"+status("CapEff"))) {
				t.Errorf("%s has other capabilities than %s", thread, status("CapEff"))
			}
		}
	}
	check()
	other := filepath.Join(dir, "other.img")
	if err := os.WriteFile(other, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(other, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	s.ok(t, "lun", "create", storeName, "--path", other, "--size", "1MiB", "--id", "9")
	s.says(t, cli.ExitOK, "ready", "lun", "list")
	load := newTraffic(t, s.addr)
	s.ok(t, "portal", "add", "127.8.9.1:861")
	load.flows(t)
	s.says(t, cli.ExitOK, "sessions 2 continue", "upgrade")
	check()
	load.flows(t)
	load.end(t)
}

// A configuration from a pipe, which cannot be read twice, survives that the program executes itself.
func TestConfigurationFromAPipe(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	go func() {
		defer w.Close()
		fmt.Fprintf(w, "state_dir: \"\"\ncontrol: {socket: \"\"}\nportals: [{listen: \"127.0.0.1:0\"}]\ntargets: [{name: %s, initiators: [\"*\"], luns: [{id: 0, backend: memory, size: 1MiB}]}]\n", storeName)
	}()
	cmd := exec.Command(executable(t), "serve", "--config", "/dev/fd/3")
	cmd.ExtraFiles = []*os.File{r}
	p := launch(t, cmd)
	logIn(t, p.wait(t, `msg=serving portal=(\S+)`))
}

// place makes a directory that others can read, with a copy of the program in it.
func place(t *testing.T) (dir, program string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "restrict")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	for _, d := range []string{"", "bin", "etc", "luns", "out", "state"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	from, err := os.Open(executable(t))
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	program = filepath.Join(dir, "bin", "iser-target")
	to, err := os.OpenFile(program, os.O_WRONLY|os.O_CREATE, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	if _, err := io.Copy(to, from); err != nil {
		t.Fatal(err)
	}
	return dir, program
}

// As another user, and with paths, the target loses what it does not need, and keeps what live changes need: files in its
// directories, portals below 1024, its configuration, upgrades. A link out of the directories leads nowhere, although the
// file modes permit it. The sessions of both initiators work throughout.
func TestUserAndPaths(t *testing.T) {
	needsRoot(t)
	const uid = 65534
	dir, program := place(t)
	in := func(name string) string { return filepath.Join(dir, name) }
	s := &station{dir: dir, file: in("etc/c.yaml"), socket: in("state/s")}
	for path, data := range map[string]string{
		in("out/secret.img"):  strings.Repeat("x", 1<<20),
		in("luns/source.img"): strings.Repeat("y", 1<<20),
		s.file: fmt.Sprintf(`state_dir: %[1]s/state
control: {socket: %[1]s/state/s}
process: {paths: [%[1]s/luns]}
portals: [{listen: "127.0.0.1:0"}]
targets:
  - name: %[2]s
    initiators: ["*"]
    luns:
      - {id: 0, backend: file, path: %[1]s/luns/0.img, size: 4MiB}
      - {id: 1, backend: file, path: %[1]s/luns/link.img, size: 1MiB}
      - {id: 2, backend: file, path: %[1]s/luns/2.img, size: 4MiB}
`, dir, storeName),
	} {
		if err := os.WriteFile(path, []byte(data), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(in("out/secret.img"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(s.file, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../out/secret.img", in("luns/link.img")); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{s.file, in("etc"), in("luns"), in("state")} {
		if err := os.Chown(path, uid, uid); err != nil {
			t.Fatal(err)
		}
	}
	if testkit.Race {
		s.environment(t)
	}
	cmd := exec.Command(program, "serve", "--config", s.file)
	cmd.Env = append(os.Environ(), "ISER_TARGET_PROCESS_USER="+strconv.Itoa(uid))
	s.process = launch(t, cmd)
	t.Cleanup(func() { s.killAll(t) })
	s.addr = s.wait(t, `msg=serving portal=(\S+)`)
	check := func() {
		t.Helper()
		status := rights(t, s.one(t))
		if want := fmt.Sprintf("%[1]d\t%[1]d\t%[1]d\t%[1]d", uid); status("Uid") != want || status("Gid") != want {
			t.Errorf("Uid %s, Gid %s", status("Uid"), status("Gid"))
		}
		for _, key := range []string{"CapPrm", "CapEff", "CapBnd"} {
			if has := capabilities(t, status(key)); has != 1<<unix.CAP_NET_BIND_SERVICE {
				t.Errorf("%s: %x", key, has)
			}
		}
	}
	check()
	s.says(t, cli.ExitOK, "link.img: open: permission denied", "lun", "list")
	s.ok(t, "lun", "create", storeName, "--path", in("luns/new.img"), "--size", "1MiB", "--preallocate", "--id", "8")
	s.ok(t, "lun", "create", storeName, "--path", in("luns/copy.img"), "--from", in("luns/source.img"), "--id", "9")
	s.ok(t, "lun", "resize", storeName, "9", "2MiB")
	load := newTraffic(t, s.addr)
	s.ok(t, "portal", "add", "127.8.9.1:862")
	s.says(t, cli.ExitError, "secret.img: permission denied", "lun", "create", storeName, "--path", in("luns/stolen.img"), "--from", in("out/secret.img"))
	s.says(t, cli.ExitUsage, "is not in a directory of process.paths", "lun", "create", storeName, "--path", in("out/x.img"), "--size", "1MiB")
	load.flows(t)
	s.says(t, cli.ExitOK, "sessions 2 continue", "upgrade")
	check()
	load.flows(t)
	s.says(t, cli.ExitOK, "link.img: open: permission denied", "lun", "list")
	load.end(t)
	s.ok(t, "lun", "create", storeName, "--path", in("luns/after.img"), "--size", "1MiB", "--id", "10")
	if list := s.ok(t, "lun", "list"); strings.Count(list, "  ready ") != 5 || strings.Count(list, "not ready") != 1 {
		t.Error(list)
	}
}

// A process that cannot lose rights as the configuration says does not start, and says what is missing.
func TestRestrictionsThatCannotBe(t *testing.T) {
	for _, tt := range []struct{ process, want string }{
		{"{user: no-such-user}", `process.user: there is no user "no-such-user" on this machine`},
		{"{user: root}", "process.user: must be another user than root"},
		{"{capabilities: [CAP_NOTHING]}", "process.capabilities[0]: CAP_NOTHING is not a capability"},
		{"{capabilities: [SYS_ADMIN]}", "process.capabilities[0]: must be a name of capabilities(7)"},
		{"{paths: [/no/such/directory]}", "process.paths: open /no/such/directory: no such file or directory"},
		{"{paths: [luns]}", "process.paths[0]: must be an absolute path"},
	} {
		cmd := exec.Command(executable(t), "serve", "--config", serviceConfig(t, "process: "+tt.process, "127.0.0.1:0"))
		cmd.Env = append(os.Environ(), "BE_ISER_TARGET=1")
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), tt.want) {
			t.Errorf("%s: %v, %s", tt.process, err, out)
		}
	}
	needsRoot(t)
	dir, program := place(t)
	config := filepath.Join(dir, "etc", "c.yaml")
	if err := os.WriteFile(config, []byte("state_dir: \"\"\ncontrol: {socket: \"\"}\nprocess: {user: daemon}\nportals: [{listen: \"127.0.0.1:0\"}]\ntargets: []\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "serve", "--config", config)
	cmd.Env = append(os.Environ(), "BE_ISER_TARGET=1")
	cmd.SysProcAttr = &unix.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "without CAP_SETUID and CAP_SETGID, and cannot become daemon") {
		t.Errorf("as another user: %v, %s", err, out)
	}
}

// A target that root starts, and that stays root, says so and how to change that, once over upgrades.
func TestTargetThatStaysRootSaysSo(t *testing.T) {
	needsRoot(t)
	s := &station{dir: t.TempDir()}
	s.configure(t)
	if testkit.Race { // see run
		s.environment(t)
	}
	s.process = launch(t, exec.Command(executable(t), "serve", "--config", s.file))
	t.Cleanup(func() { s.killAll(t) })
	s.wait(t, `(warning: the target stays root\. Set process\.user)`)
	s.addr = s.wait(t, `msg=serving portal=(\S+)`)
	s.ok(t, "upgrade")
	s.wait(t, `(upgraded: another process continues)`)
	if n := strings.Count(s.output.all.String(), "stays root"); n != 1 {
		t.Errorf("said %d times", n)
	}
}
