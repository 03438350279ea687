package main

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
)

// free returns an address that is not in use.
func free(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func get(t *testing.T, url string) (body string, err error) {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 20 * time.Second}
	resp, err := client.Get(url)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s, %v: %s", url, resp.Status, err, b)
	}
	return string(b), nil
}

// A change of the configuration starts, moves and stops the dashboard of a running target. A
// change that fails leaves it.
func TestDashboardFollowsTheConfiguration(t *testing.T) {
	s := newStation(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	without := s.text(t)
	if log := s.output.all.String(); strings.Contains(log, "dashboard") {
		t.Errorf("a dashboard that is not configured:\n%s", log)
	}
	apply := func(code int, want, listen string) {
		t.Helper()
		text := without
		if listen != "" {
			text += "dashboard: {listen: \"" + listen + "\"}\n"
		}
		if err := os.WriteFile(s.file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		s.says(t, code, want, "config", "apply", s.file)
	}
	shown := func(addr string) {
		t.Helper()
		page, err := get(t, "http://"+addr+"/")
		if err != nil || !strings.Contains(page, "<title>iser-target</title>") {
			t.Fatalf("%v: %s", err, page)
		}
		body, err := get(t, "http://"+addr+"/api/state")
		if err != nil {
			t.Fatal(err)
		}
		var a struct {
			Version string
			Started time.Time
			Targets int
			LUNs    struct{ All int }
		}
		if err := json.Unmarshal([]byte(body), &a); err != nil || a.Version == "" || a.Targets != 1 || a.LUNs.All != 1 ||
			time.Since(a.Started) < 0 || time.Since(a.Started) > time.Hour {
			t.Errorf("%v: %s", err, body)
		}
	}
	gone := func(addr string) {
		t.Helper()
		if body, err := get(t, "http://"+addr+"/"); err == nil {
			t.Errorf("%s answers: %s", addr, body)
		}
	}

	one, two := free(t), free(t)
	apply(cli.ExitOK, "dashboard", one)
	shown(one)
	apply(cli.ExitOK, one+" -> "+two, two)
	gone(one)
	shown(two)
	apply(cli.ExitError, "dashboard "+taken.Addr().String()+": listen tcp "+taken.Addr().String()+": bind: address already in use", taken.Addr().String())
	shown(two) // as before
	apply(cli.ExitOK, "dashboard", "")
	gone(two)
	session := s.login(t)
	apply(cli.ExitOK, "dashboard", one)
	shown(one)
	select {
	case <-session.Done():
		t.Errorf("the session ended: %v", session.Err())
	default:
	}
}
