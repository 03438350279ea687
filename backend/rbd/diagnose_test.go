package rbd

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/tests/testkit/rbdfake"
)

// longTime is more than a program of rbdfake takes on any machine.
const longTime = time.Minute

// diagnose requires one Trouble with these texts, or none if want is empty.
func diagnose(ctx context.Context, t *testing.T, uri, want, mend string) {
	t.Helper()
	list := Diagnose(ctx, []string{uri}, nil, longTime)
	if want == "" {
		if len(list) != 0 {
			t.Errorf("%s: %+v, want no trouble", uri, list)
		}
		return
	}
	if len(list) != 1 || !strings.Contains(list[0].Text, want) || !strings.Contains(list[0].Mend, mend) {
		t.Errorf("%s: %+v, want %q and %q", uri, list, want, mend)
	}
}

// Each thing that an image requires has its own finding with the command that mends it, and nothing is found after that.
func TestDiagnose(t *testing.T) {
	images := rbdfake.Install(t, "p")
	dir := t.TempDir()
	conf, keyring := filepath.Join(dir, "ceph.conf"), filepath.Join(dir, "keyring")
	uri := makeImage(t, "a")
	uri, _, _ = strings.Cut(uri, "?")
	with := uri + "?id=x&conf=" + conf
	diagnose(t.Context(), t, with, "the configuration of Ceph "+conf+" does not exist", "ceph config generate-minimal-conf")
	must(t, "WriteFile", os.WriteFile(conf, []byte("[global]\nkeyring = "+keyring+"\n"), 0o600))
	diagnose(t.Context(), t, with, "no keyring for client.x. Ceph looks for "+keyring, "ceph auth get-or-create client.x mon 'profile rbd' osd 'profile rbd pool=p' > "+keyring)
	must(t, "WriteFile", os.WriteFile(keyring, nil, 0o600))
	diagnose(t.Context(), t, with, "", "")
	for _, tt := range []struct {
		fault      rbdfake.Fault
		want, mend string
	}{
		{rbdfake.NoDriver, "has no driver for RBD", "apt-get install qemu-block-extra"},
		{rbdfake.MuteMonitors, "([v2:192.0.2.1:3300/0]) do not answer within 1m0s", "systemctl start ceph-mon.target"},
		{rbdfake.MuteOSDs, "the OSDs of pool p do not within 1m0s", "systemctl start ceph-osd.target"},
		{rbdfake.WrongKey, "the cluster refuses client.x", "ceph auth get-or-create client.x"},
		{rbdfake.NoCaps, "client.x lacks capabilities for pool p", "ceph auth caps client.x mon 'profile rbd' osd 'profile rbd pool=p'"},
	} {
		mend := rbdfake.Break(t, images, tt.fault)
		muted := filepath.Join(images, rbdfake.Muted)
		ctx, over := context.WithCancel(t.Context()) // as after the limit, but the program has begun to wait on any machine
		go func() {
			for ctx.Err() == nil {
				if _, err := os.Stat(muted); err == nil {
					over()
				}
				time.Sleep(10 * time.Millisecond)
			}
		}()
		diagnose(ctx, t, with, tt.want, tt.mend)
		over()
		os.Remove(muted)
		mend()
	}
	diagnose(t.Context(), t, with, "", "")
	diagnose(t.Context(), t, strings.Replace(with, "rbd:p", "rbd:q", 1), "the cluster has no pool q", "ceph osd pool create q && rbd pool init q")
	diagnose(t.Context(), t, strings.Replace(with, "/a", "/b", 1), "the pool p has no image b", "rbd create p/b --size SIZE")
	if list := Diagnose(t.Context(), []string{with, strings.Replace(with, "/a", "/b", 1), "rbd:x"}, nil, longTime); len(list) != 2 ||
		!strings.Contains(list[0].URI, "p/b") || list[1].URI != "rbd:x" {
		t.Errorf("of three images, two with trouble: %+v", list)
	}
	path := os.Getenv("PATH")
	t.Setenv("PATH", t.TempDir())
	list := Diagnose(t.Context(), []string{with}, nil, longTime)
	if len(list) != 2 || !strings.Contains(list[0].Mend, "qemu-system-common qemu-block-extra") || !strings.Contains(list[1].Mend, "ceph-common") {
		t.Errorf("without programs: %+v", list)
	}
	t.Setenv("PATH", path)
}

// A file that another user may not read is told from one in a directory that it may not enter.
func TestReadable(t *testing.T) {
	if os.Geteuid() != 0 {
		backendtest.Unavailable(t, "only root can act as another user")
	}
	dir, err := os.MkdirTemp("/tmp", "readable")
	must(t, "MkdirTemp", err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	sub := filepath.Join(dir, "sub")
	file := filepath.Join(sub, "keyring")
	must(t, "Mkdir", os.Mkdir(sub, 0o700))
	must(t, "Chmod", os.Chmod(dir, 0o755))
	must(t, "WriteFile", os.WriteFile(file, nil, 0o600))
	const uid, gid = 65534, 65533
	x := &examiner{as: &syscall.Credential{Uid: uid, Gid: gid}, limit: longTime}
	look := func(want, mend string) {
		t.Helper()
		tr := x.readable(t.Context(), file, "the keyring")
		if want == "" {
			if tr != nil {
				t.Errorf("%+v, want no trouble", tr)
			}
		} else if tr == nil || !strings.Contains(tr.Text, want) || tr.Mend != mend {
			t.Errorf("%+v, want %q and %q", tr, want, mend)
		}
	}
	look("a directory that uid 65534 may not enter: "+sub, "chmod o+x "+sub)
	must(t, "Chmod", os.Chmod(sub, 0o701))
	look("is not readable for uid 65534", fmt.Sprintf("chgrp %d %s && chmod g+r %s", gid, file, file))
	must(t, "Chown", os.Chown(file, 0, gid))
	must(t, "Chmod", os.Chmod(file, 0o640))
	look("", "")
	must(t, "Remove", os.Remove(file))
	look("does not exist", "")
}
