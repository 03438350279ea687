package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/fio"
	"github.com/iser-target/iser-target/tests/testkit/loopback"
)

// fio reads the jobs of examples/fio, each says whether it overwrites the disk, and each does its I/O on a LUN in a short run. QEMU is the initiator,
// by libiscsi, so that the test needs no kernel initiator.
func TestFioExamples(t *testing.T) {
	files, err := filepath.Glob("../examples/fio/*.fio")
	if err != nil || len(files) < 6 {
		t.Fatalf("%v, %v", files, err)
	}
	program, noFio := exec.LookPath("fio")
	for _, path := range files {
		t.Run(filepath.Base(path), func(t *testing.T) {
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			text := string(b)
			writes := regexp.MustCompile(`(?m)^rw=(rand)?(rw|write)$`).MatchString(text)
			if writes != strings.Contains(text, "It OVERWRITES the disk.") {
				t.Errorf("it writes: %v, and its comment says otherwise", writes)
			}
			if !strings.Contains(text, "DISK=/dev/sdX fio examples/fio/"+filepath.Base(path)) {
				t.Error("its comment does not say how to run it")
			}
			if noFio != nil {
				backendtest.Unavailable(t, "%v (tests/interop/setup.sh installs it)", noFio)
			}
			dir := t.TempDir()
			disk := filepath.Join(dir, "disk")
			run := func(args ...string) []byte {
				cmd := exec.Command(program, args...)
				cmd.Env = append(os.Environ(), "DISK="+disk)
				out, err := cmd.Output()
				if err != nil {
					t.Fatalf("fio %v: %v: %s", args, err, out)
				}
				return out
			}
			run("--parse-only", path)
			export(t, disk)
			jobs, err := fio.Parse(text)
			if err != nil {
				t.Fatal(err)
			}
			job := filepath.Join(dir, "short.fio")
			if err := os.WriteFile(job, []byte(jobs.Short(time.Second, 0).String()), 0o600); err != nil {
				t.Fatal(err)
			}
			results, failed, err := fio.Results(run("--output-format=json", job))
			if err != nil || len(failed) > 0 || len(results) != len(jobs) {
				t.Errorf("%d jobs, %d results, failed: %v, %v", len(jobs), len(results), failed, err)
			}
		})
	}
}

// export serves a LUN in memory and makes file its disk, by FUSE, until the test ends.
func export(t *testing.T, file string) {
	t.Helper()
	const program = "qemu-storage-daemon"
	if _, err := exec.LookPath(program); err != nil {
		backendtest.Unavailable(t, "%v (tests/interop/setup.sh installs it)", err)
	}
	if _, err := os.Stat("/dev/fuse"); err != nil || os.Geteuid() != 0 {
		backendtest.Unavailable(t, "a mount by FUSE requires root and /dev/fuse: %v", err)
	}
	const size = 32 << 20
	target := loopback.Serve(t, loopback.Config{Transport: "tcp", LUNs: map[uint16]backend.Store{0: loopback.Memory(t, size)}})
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var log testkit.Log
	cmd := exec.Command(program, "--blockdev", "driver=iscsi,node-name=lun,transport=tcp,lun=0,portal="+target.Addr+",target="+loopback.Name,
		"--export", "type=fuse,id=disk,node-name=lun,writable=on,mountpoint="+file)
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM) // it unmounts the file
		if err := <-ended; err != nil {
			t.Errorf("%s: %v: %s", program, err, log.String())
		}
	})
	testkit.Eventually(t, "the LUN is a file", func() bool {
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("%s: %v: %s", program, err, log.String())
		default:
		}
		info, err := os.Stat(file)
		return err == nil && info.Size() == size
	})
}
