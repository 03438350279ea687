package backendtest

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Unavailable skips the test because the machine lacks something. It fails the test if the
// environment requires all tests (ISER_TARGET_REQUIRE_INTEROP=1).
func Unavailable(t testing.TB, format string, args ...any) {
	t.Helper()
	if os.Getenv("ISER_TARGET_REQUIRE_INTEROP") == "1" {
		t.Fatalf(format, args...)
	}
	t.Skipf(format, args...)
}

// LoopDevice creates a block device on a new file with content and returns the paths of both.
// The device disappears when the test ends, or the test process.
func LoopDevice(t testing.TB, content []byte, sector uint32, readOnly bool) (device, file string) {
	t.Helper()
	if os.Geteuid() != 0 {
		Unavailable(t, "only root can create loop devices")
	}
	file = filepath.Join(t.TempDir(), "loop.img")
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	device, detach := AttachLoop(t, f, sector, readOnly)
	t.Cleanup(detach)
	return device, file
}

// AttachLoop creates a block device on a file, with sectors of that many bytes. detach removes it when nobody else uses
// it; so does the end of the test process.
func AttachLoop(t testing.TB, f *os.File, sector uint32, readOnly bool) (device string, detach func()) {
	t.Helper()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		Unavailable(t, "no loop devices: %v", err)
	}
	defer control.Close()
	config := unix.LoopConfig{Fd: uint32(f.Fd()), Size: sector}
	config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR
	if readOnly {
		config.Info.Flags |= unix.LO_FLAGS_READ_ONLY
	}
	for range 100 { // other processes take free devices, too
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			Unavailable(t, "no free loop device: %v", err)
		}
		device = fmt.Sprintf("/dev/loop%d", n)
		fd, err := unix.Open(device, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			Unavailable(t, "loop device: %v", err)
		}
		switch err := unix.IoctlLoopConfigure(fd, &config); err {
		case nil:
			return device, func() { unix.Close(fd) } // the last close clears it
		case unix.EBUSY:
			unix.Close(fd)
		default:
			unix.Close(fd)
			Unavailable(t, "configuring %s: %v", device, err)
		}
	}
	Unavailable(t, "no free loop device")
	return "", nil
}
