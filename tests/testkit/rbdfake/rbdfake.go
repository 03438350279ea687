// Package rbdfake is a stand-in for Ceph's RBD, for tests of the target where Ceph is not installed. A test binary plays its programs: rbd, rados, ceph, ceph-conf, and a
// qemu-storage-daemon that hands everything to the real one, but opens files in place of images. An image has an exclusive lock, which
// a daemon that is killed leaves behind, as with Ceph. A client that comes on the blocklist is killed.
package rbdfake

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend/backendtest"
	"golang.org/x/sys/unix"
)

const (
	daemon = "qemu-storage-daemon"

	envDir  = "RBDFAKE_DIR"  // where the images are
	envReal = "RBDFAKE_REAL" // path of the real daemon
)

// Install makes PATH lead to the programs for the time of a test, and returns the directory of the images: those of pool p are files in
// its directory p.
func Install(t testing.TB, pools ...string) (dir string) {
	t.Helper()
	path, err := exec.LookPath(daemon)
	if err != nil {
		backendtest.Unavailable(t, "%v. apt-get install qemu-system-common", err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir, bin := t.TempDir(), t.TempDir()
	for _, p := range append(pools, ".watchers", ".locks") {
		if err := os.Mkdir(filepath.Join(dir, p), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{daemon, "rbd", "rados", "ceph", "ceph-conf"} {
		if err := os.Symlink(self, filepath.Join(bin, name)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	t.Setenv(envDir, dir)
	t.Setenv("GORACE", "atexit_sleep_ms=0") // each run of rbd would take a second longer
	t.Setenv(envReal, path)
	return dir
}

// Main plays the program that this process was called as, and ends the process. It returns if that is neither. TestMain calls it first.
func Main() {
	dir := os.Getenv(envDir)
	if dir == "" {
		return
	}
	var err error
	switch filepath.Base(os.Args[0]) {
	case daemon:
		err = (&proxy{dir: dir}).run()
	case "rbd":
		err = client(dir, os.Args[1:])
	case "rados":
		err = rados(dir, os.Args[1:])
	case "ceph":
		err = blocklist(dir, os.Args[1:])
	case "ceph-conf":
		err = confValue(os.Args[1:])
	default:
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "rbd:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// A Fault is something that is wrong with the cluster.
type Fault string

// The Faults.
const (
	NoDriver     Fault = ".no-driver"     // of QEMU for RBD
	MuteMonitors Fault = ".mute-monitors" // do not answer
	MuteOSDs     Fault = ".mute-osds"     // do not answer rbd
	WrongKey     Fault = ".wrong-key"     // in the keyring
	NoCaps       Fault = ".no-caps"       // of the user for the pool
)

// Break begins a Fault in the directory that Install has returned, and returns a function that ends it.
func Break(t testing.TB, dir string, f Fault) (mend func()) {
	t.Helper()
	path := filepath.Join(dir, string(f))
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return func() { os.Remove(path) }
}

// has reports whether a Fault has begun.
func has(dir string, f Fault) bool {
	_, err := os.Stat(filepath.Join(dir, string(f)))
	return err == nil
}

// Muted is the file that a program makes in the directory of the images when it begins to wait for a cluster that does not answer.
const Muted = ".muted"

// wait waits for a cluster that does not answer.
func wait(dir string) error {
	if err := os.WriteFile(filepath.Join(dir, Muted), nil, 0o600); err != nil {
		return err
	}
	time.Sleep(5 * time.Minute)
	return errors.New("error connecting: Connection timed out")
}

// option returns the value of an argument like --NAME=VALUE.
func option(args []string, name string) string {
	for _, a := range args {
		if v, ok := strings.CutPrefix(a, "--"+name+"="); ok {
			return v
		}
	}
	return ""
}

// keyring returns the keyring that a ceph.conf names, as the whole value of its first key keyring.
func keyring(conf string) (string, error) {
	text, err := os.ReadFile(conf)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		if k, v, _ := strings.Cut(line, "="); strings.TrimSpace(k) == "keyring" {
			return strings.TrimSpace(v), nil
		}
	}
	return conf + ".keyring", nil
}

// rados plays rados lspools. Only a conf that is not Ceph's own has to exist.
func rados(dir string, args []string) error {
	if conf := option(args, "conf"); conf != "/etc/ceph/ceph.conf" {
		path, err := keyring(conf)
		if err != nil {
			return fmt.Errorf("global_init: unable to open config file from search list %s", conf)
		}
		if _, err := os.ReadFile(path); err != nil {
			return fmt.Errorf("auth: unable to find a keyring on %s: %w", path, err)
		}
	}
	if has(dir, MuteMonitors) {
		return wait(dir)
	}
	if has(dir, WrongKey) {
		return errors.New("monclient(hunting): handle_auth_bad_method server allowed_methods [2] but i only support [2,1]")
	}
	list, err := os.ReadDir(dir)
	for _, e := range list {
		if !strings.HasPrefix(e.Name(), ".") {
			fmt.Println(e.Name())
		}
	}
	return err
}

// confValue plays ceph-conf -c CONF --name NAME --show-config-value KEY.
func confValue(args []string) error {
	value := "[v2:192.0.2.1:3300/0]"
	if args[len(args)-1] == "keyring" {
		var err error
		if value, err = keyring(args[1]); err != nil {
			return err
		}
	}
	fmt.Println(value)
	return nil
}

// addressPrefix is before the process of a daemon in the address of a client.
const addressPrefix = "192.0.2.1:0/"

// blocklist plays ceph osd blocklist add ADDRESS.
func blocklist(dir string, args []string) error {
	if len(args) < 4 || !slices.Equal(args[:3], []string{"osd", "blocklist", "add"}) || !strings.HasPrefix(args[3], addressPrefix) {
		return fmt.Errorf("unknown command %q", args)
	}
	client := strings.TrimPrefix(args[3], addressPrefix)
	pid, err := strconv.Atoi(client)
	if err != nil {
		return err
	}
	watches, err := filepath.Glob(filepath.Join(dir, ".watchers", "*,"+client))
	if err != nil || len(watches) == 0 { // it has ended, and the number may be that of another process
		return err
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil && err != unix.ESRCH {
		return err
	}
	locks, err := filepath.Glob(filepath.Join(dir, ".locks", "*"))
	for _, name := range append(watches, locks...) {
		if owner, _ := os.ReadFile(name); slices.Contains(watches, name) || string(owner) == client {
			err = errors.Join(err, os.Remove(name))
		}
	}
	return err
}

// flat returns the name of the file that is about an image.
func flat(image string) string { return strings.ReplaceAll(image, "/", "+") }

// client plays rbd with these arguments.
func client(dir string, args []string) error {
	args = slices.DeleteFunc(args, func(a string) bool { return strings.HasPrefix(a, "--") && !strings.HasPrefix(a, "--size=") })
	var out any
	switch {
	case args[0] == "ls":
		list, err := os.ReadDir(filepath.Join(dir, args[1]))
		if err != nil {
			return fmt.Errorf("error opening pool '%s'", args[1])
		}
		names := []string{}
		for _, e := range list {
			names = append(names, e.Name())
		}
		out = names
	case args[0] == "create":
		size, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimPrefix(args[2], "--size="), "B"), 10, 64)
		if err != nil {
			return err
		}
		f, err := os.OpenFile(filepath.Join(dir, args[1]), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		return errors.Join(f.Truncate(size), f.Close())
	case args[0] == "rm":
		return os.Remove(filepath.Join(dir, args[1]))
	case args[0] == "info" && has(dir, MuteOSDs):
		return wait(dir)
	case args[0] == "info" && has(dir, NoCaps):
		return errors.New("error opening image: (1) Operation not permitted")
	case args[0] == "info":
		fi, err := os.Stat(filepath.Join(dir, args[1]))
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("error opening image %s: (2) No such file or directory", filepath.Base(args[1]))
		}
		if err != nil {
			return err
		}
		out = map[string]int64{"size": fi.Size()}
	case args[0] == "status":
		list, err := filepath.Glob(filepath.Join(dir, ".watchers", flat(args[1])+",*"))
		if err != nil {
			return err
		}
		watchers := []map[string]any{}
		for _, w := range list {
			n, _ := strconv.Atoi(w[strings.LastIndexByte(w, ',')+1:])
			watchers = append(watchers, map[string]any{"client": n, "address": fmt.Sprint(addressPrefix, n)})
		}
		out = map[string]any{"watchers": watchers}
	case args[0] == "lock" && args[1] == "ls":
		locks := []map[string]string{}
		if owner, err := os.ReadFile(filepath.Join(dir, ".locks", flat(args[2]))); err == nil {
			locks = append(locks, map[string]string{"id": "auto 1", "locker": "client." + string(owner)})
		}
		out = locks
	case args[0] == "lock" && args[1] == "rm":
		lock := filepath.Join(dir, ".locks", flat(args[2]))
		if owner, err := os.ReadFile(lock); err != nil || "client."+string(owner) != args[4] || args[3] != "auto 1" {
			return fmt.Errorf("no lock %q of %s", args[3], args[4])
		}
		return os.Remove(lock)
	default:
		return fmt.Errorf("unknown command %q", args)
	}
	return json.NewEncoder(os.Stdout).Encode(out)
}

// A proxy is a qemu-storage-daemon. Its descriptor 3 is the listener of the export, and 4 the monitor.
type proxy struct {
	dir   string
	mu    sync.Mutex
	marks []string // files that a daemon which ends in order removes
}

func (p *proxy) run() error {
	if slices.Contains(os.Args, "--blockdev") { // a trial of the driver
		if has(p.dir, NoDriver) {
			return errors.New("--blockdev: Unknown driver 'rbd'")
		}
		return errors.New("error reading conf file")
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	theirs := os.NewFile(uintptr(fds[1]), "")
	cmd := exec.Command(os.Getenv(envReal), os.Args[1:]...)
	cmd.ExtraFiles = []*os.File{os.NewFile(3, ""), theirs}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	theirs.Close()
	inner, err := net.FileConn(os.NewFile(uintptr(fds[0]), ""))
	if err != nil {
		return err
	}
	outer, err := net.FileConn(os.NewFile(4, ""))
	if err != nil {
		return err
	}
	go io.Copy(outer, inner)
	go func() {
		for r := bufio.NewScanner(outer); r.Scan(); {
			if line, err := p.translate(r.Bytes()); err != nil {
				fmt.Fprintf(outer, `{"error": {"class": "GenericError", "desc": %q}}`+"\n", err)
			} else {
				inner.Write(append(line, '\n'))
			}
		}
	}()
	if err := cmd.Wait(); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.marks {
		os.Remove(m)
	}
	return nil
}

// translate returns a command with a file in place of an image.
func (p *proxy) translate(line []byte) ([]byte, error) {
	var c struct {
		Execute   string         `json:"execute"`
		Arguments map[string]any `json:"arguments,omitempty"`
	}
	if err := json.Unmarshal(line, &c); err != nil {
		return nil, err
	}
	a := c.Arguments
	if c.Execute != "blockdev-add" || a["driver"] != "rbd" {
		return line, nil
	}
	image := fmt.Sprint(a["pool"], "/", a["image"])
	path := filepath.Join(p.dir, image)
	if _, err := os.Stat(filepath.Dir(path)); err != nil {
		return nil, fmt.Errorf("error opening pool %s: No such file or directory", a["pool"])
	}
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("error reading header from %s: No such file or directory", a["image"])
	}
	if a["read-only"] != true {
		p.lock(image)
	}
	for _, k := range []string{"pool", "image", "conf", "user", "namespace", "cache"} {
		delete(a, k)
	}
	a["driver"], a["filename"], a["locking"] = "file", path, "off"
	return json.Marshal(c)
}

// lock takes the exclusive lock of an image: at once from a daemon that runs, otherwise after half a minute.
func (p *proxy) lock(image string) {
	lock := filepath.Join(p.dir, ".locks", flat(image))
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		b, err := os.ReadFile(lock)
		owner, _ := strconv.Atoi(string(b))
		if err != nil || unix.Kill(owner, 0) == nil {
			break
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	me := fmt.Sprint(os.Getpid())
	watch := filepath.Join(p.dir, ".watchers", flat(image)+","+me)
	for name, text := range map[string]string{lock: me, watch: ""} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		p.marks = append(p.marks, name)
	}
}
