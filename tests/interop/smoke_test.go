package interop_test

import (
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/interop/vm"
)

// The tests of this file hold the machine itself to what the others build on.

func TestScripts(t *testing.T) {
	v := boot(t)
	t.Run("output", func(t *testing.T) {
		r := v.Try(t, `printf 'one\ntwo'; echo three >&2; exit 7`, time.Minute)
		if want := (vm.Result{Stdout: "one\ntwo", Stderr: "three\n", Status: 7}); r != want {
			t.Errorf("got %+v, want %+v", r, want)
		}
	})
	t.Run("failure ends a script", func(t *testing.T) {
		if r := v.Try(t, "false | true\necho still here", time.Minute); r.Status != 1 || r.Stdout != "" {
			t.Errorf("got %+v, want status 1 and no output", r)
		}
	})
	t.Run("time limit", func(t *testing.T) {
		begun := time.Now()
		r := v.Try(t, "echo before; sleep 600", 2*time.Second)
		if r.Status != 128+9 || r.Stdout != "before\n" || time.Since(begun) > time.Minute {
			t.Errorf("got %+v after %v, want status 137", r, time.Since(begun))
		}
	})
	t.Run("files", func(t *testing.T) {
		const text = "from the guest\n"
		v.Run(t, "echo from the guest >"+vm.Files+"/file", time.Minute)
		if b, err := os.ReadFile(filepath.Join(v.Files(), "file")); err != nil || string(b) != text {
			t.Errorf("got %q, %v", b, err)
		}
	})
	t.Run("the host is not written to", func(t *testing.T) {
		v.Run(t, "echo x >/usr/iser-target-interop", time.Minute)
		if _, err := os.Stat("/usr/iser-target-interop"); !os.IsNotExist(err) {
			t.Errorf("the guest's file is on the host: %v", err)
		}
	})
}

func TestInitiatorIsReady(t *testing.T) {
	v := boot(t)
	for _, c := range []struct{ name, script, want string }{
		{"siw link", "rdma link show siw0/1", "state ACTIVE"},
		{"ib_iser", "cat /sys/class/iscsi_transport/iser/caps /proc/modules", "ib_iser "},
		{"iscsid", "iscsiadm -m iface -I iser", "iface.transport_name = iser"},
		{"verbs", "ibv_devinfo -d siw0", "PORT_ACTIVE"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := v.Run(t, c.script, time.Minute); !strings.Contains(got, c.want) {
				t.Errorf("%s does not print %q", c.script, c.want)
			}
		})
	}
	t.Run("the way to the host", func(t *testing.T) {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		go func() {
			if c, err := ln.Accept(); err == nil {
				io.WriteString(c, "hello")
				c.Close()
			}
		}()
		_, port, _ := net.SplitHostPort(ln.Addr().String())
		if got := v.Run(t, "cat </dev/tcp/"+vm.HostAddr+"/"+port, time.Minute); got != "hello" {
			t.Errorf("got %q", got)
		}
	})
}
