package main

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
)

// status says what is served, and its exit code whether that is healthy.
func TestStatus(t *testing.T) {
	s := newStation(t)
	end := func() {
		t.Helper()
		if err := errors.Join(s.cmd.Process.Signal(syscall.SIGTERM), s.cmd.Wait()); err != nil {
			t.Fatal(err)
		}
	}
	in := s.login(t)
	defer in.Close()
	got := read[cli.Status](t, s, "status")
	if !got.Healthy || got.Uptime <= 0 || got.LUNs["ready"] != 1 || len(got.LUNs) != 1 || len(got.Findings) != 0 ||
		len(got.Portals) != 1 || got.Portals[0].Address != s.addr || got.Portals[0].Connections != 1 ||
		len(got.Targets) != 1 || got.Targets[0].Name != storeName || got.Targets[0].Sessions != 1 ||
		len(got.Sessions) != 1 || got.Sessions[0].Target != storeName || got.Config != s.file {
		t.Errorf("%+v", got)
	}
	page := s.ok(t, "status")
	for _, want := range []string{"\nLUNs           1 ready\n", s.addr, storeName, got.Sessions[0].Initiator, s.file} {
		if !strings.Contains(page, want) {
			t.Errorf("no %q in\n%s", want, page)
		}
	}

	// A file that is gone after a restart is a LUN that is not ready. A warning alone changes no exit code.
	s.ok(t, "target", "create", storeName+"2", "--initiator", hostName)
	s.says(t, cli.ExitOK, "has no LUNs", "status")
	image := filepath.Join(s.dir, "one.img")
	s.ok(t, "lun", "create", storeName+"2", "--path", image, "--size", "1M")
	in.Close()
	end()
	if err := os.Remove(image); err != nil {
		t.Fatal(err)
	}
	s.process = start(t, "serve", "--config", s.file)
	s.says(t, cli.ExitError, "1 ready, 1 not ready", "status")
	out, errOut, code := s.run(t, "status", "-o", "json")
	got = cli.Status{}
	if err := json.Unmarshal([]byte(out), &got); err != nil || code != cli.ExitError || got.Healthy || got.LUNs["not ready"] != 1 || got.LUNs["ready"] != 1 ||
		len(got.Findings) != 1 || got.Findings[0].Severity != "problem" || !strings.Contains(errOut, "not healthy") {
		t.Errorf("exit code %d, error %v, %s, %+v", code, err, errOut, got)
	}
	end()
	s.says(t, cli.ExitUnreachable, "no target answers", "status")
}
