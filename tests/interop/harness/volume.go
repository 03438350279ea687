package harness

import (
	"bufio"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/tests/testkit"
)

// A Volume is an ext4 file system of this machine, on a loop device, that can hang: while it is frozen,
// each system call that changes something there waits in the kernel, and not even SIGKILL ends it.
type Volume struct {
	Dir string // where it is mounted

	orders io.WriteCloser // to the keeper
	said   *bufio.Reader  // what the keeper answers
	frozen bool
}

// keeper mounts the volume $1 at $2, and carries out orders until its standard input ends. That is also
// the end of the process of the test, however it comes: no volume stays frozen or mounted.
const keeper = `
trap '' INT TERM HUP
truncate -s "$3" "$1" && mkfs.ext4 -q -F "$1" && mount -o loop "$1" "$2" || exit
echo ready
while read -r option; do
	fsfreeze "$option" "$2" && echo done
done
fsfreeze -u "$2" 2>/dev/null
umount "$2" || umount -l "$2"`

// NewVolume makes a volume of size bytes that lives as long as t. The error says why this machine cannot.
// A test that freezes it defers Thaw, so that what it has started can end.
func NewVolume(t testing.TB, size int64) (*Volume, error) {
	t.Helper()
	for _, tool := range []string{"mkfs.ext4", "mount", "fsfreeze"} {
		if _, err := exec.LookPath(tool); err != nil {
			return nil, err
		}
	}
	v := &Volume{Dir: t.TempDir()}
	image := filepath.Join(t.TempDir(), "volume.img")
	cmd := exec.Command("sh", "-c", keeper, "keeper", image, v.Dir, fmt.Sprint(size))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	var stderr testkit.Log
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if v.orders, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	v.said = bufio.NewReader(out)
	if said, err := v.said.ReadString('\n'); said != "ready\n" {
		cmd.Wait()
		return nil, fmt.Errorf("no file system on a loop device: %w: %s", err, strings.TrimSpace(stderr.String()))
	}
	t.Cleanup(func() {
		v.orders.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("the end of the volume: %v: %s", err, stderr.String())
		}
	})
	return v, nil
}

// order makes the keeper call fsfreeze.
func (v *Volume) order(t testing.TB, option string) {
	t.Helper()
	fmt.Fprintln(v.orders, option)
	if said, err := v.said.ReadString('\n'); said != "done\n" {
		t.Fatalf("fsfreeze %s: %q, %v", option, said, err)
	}
	v.frozen = option == "-f"
}

// Freeze makes the volume hang.
func (v *Volume) Freeze(t testing.TB) {
	t.Helper()
	v.order(t, "-f")
}

// Thaw ends that, if it is so.
func (v *Volume) Thaw(t testing.TB) {
	t.Helper()
	if v.frozen {
		v.order(t, "-u")
	}
}
