package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/api/apitest"
	"github.com/iser-target/iser-target/cmd/iser-target/cli"
)

// Commands go to the target of the context that they name, or of the current one, and nowhere else if that is gone.
func TestContexts(t *testing.T) {
	ca := apitest.New(t)
	ca.Server("server")
	ca.Client("client")
	s, address := newRemote(t, ca, "server")
	other := newStation(t, func(text string) string { return strings.ReplaceAll(text, storeName, storeName+".other") })
	home := t.TempDir()
	t.Setenv("XDG_CONFIG_HOME", home)
	socket := s.socket
	s.socket = "" // of the variable
	t.Setenv("ISER_TARGET_CONTROL_SOCKET", "")

	s.says(t, cli.ExitOK, "NAME", "context", "list")
	s.says(t, cli.ExitUsage, "one of --socket and --address", "context", "add", "here")
	s.says(t, cli.ExitUsage, "--address requires --tls-cert", "context", "add", "here", "--address", address)
	s.says(t, cli.ExitUsage, "is not a name", "context", "add", "a b", "--socket", socket)
	s.says(t, cli.ExitOK, "", "context", "add", "tcp", "--address", address, "--tls-cert", ca.Path("client.pem"), "--tls-key", ca.Path("client.key"), "--tls-ca", ca.Path("ca.pem"))
	s.says(t, cli.ExitOK, "", "context", "add", "other", "--socket", other.socket)
	s.says(t, cli.ExitOK, storeName, "target", "list")
	s.says(t, cli.ExitOK, storeName+".other", "target", "list", "--context", "other")
	s.says(t, cli.ExitOK, "", "context", "use", "other")
	s.says(t, cli.ExitOK, storeName+".other", "target", "list")
	s.says(t, cli.ExitOK, "*        other", "context", "list")
	s.says(t, cli.ExitError, `context "none" does not exist`, "context", "use", "none")
	s.says(t, cli.ExitError, `context "none" does not exist`, "target", "list", "--context", "none")
	s.says(t, cli.ExitUsage, "--context excludes", "target", "list", "--context", "other", "--socket", socket)
	s.says(t, cli.ExitOK, "other", "__complete", "target", "list", "--context", "o")
	t.Setenv("ISER_TARGET_CLIENT_CONTEXT", "tcp")
	if out := s.ok(t, "target", "list"); strings.Contains(out, ".other") {
		t.Errorf("the variable does not count:\n%s", out)
	}
	s.says(t, cli.ExitOK, storeName+".other", "target", "list", "--socket", other.socket)
	t.Setenv("ISER_TARGET_CLIENT_CONTEXT", "")

	file := filepath.Join(home, "iser-target", "contexts.yaml")
	if fi, err := os.Stat(file); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("file %v, %v", fi, err)
	}
	if err := os.Chmod(file, 0o622); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitError, file+": other users can write to it", "target", "list")
	if err := os.Chmod(file, 0o600); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitOK, "", "context", "remove", "other")
	if out := s.ok(t, "context", "list"); strings.Contains(out, "other") || strings.Contains(out, "*") {
		t.Errorf("after the removal:\n%s", out)
	}
	for text, want := range map[string]string{
		"current: gone\n":                          `current: "gone" is not one of the contexts`,
		"contexts: {a: {}}\n":                      "contexts.a: one of socket and address is required",
		"contexts: {a: {address: 'h:1'}}\n":        "contexts.a: address requires tls_cert and tls_key",
		"contexts: {a: {socket: /s, adress: h}}\n": "adress",
		"contexts: {'a b': {socket: /s}}\n":        `"a b" is not a name`,
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		s.says(t, cli.ExitError, want, "target", "list")
	}
	s.socket = socket
}
