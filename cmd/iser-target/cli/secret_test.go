package cli

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/security"
)

// A secret is long enough, differs each time, and its file is new and for its owner alone.
func TestSecretGenerate(t *testing.T) {
	seen := map[string]bool{}
	for range 100 {
		var b strings.Builder
		if err := makeSecret(&b, "", secretBytes); err != nil || !regexp.MustCompile(`^[0-9a-f]{32}\n$`).MatchString(b.String()) || seen[b.String()] {
			t.Fatalf("%q, %v", b.String(), err)
		}
		seen[b.String()] = true
		if _, err := security.ParseSecret(strings.TrimSpace(b.String())); err != nil {
			t.Error(err)
		}
	}
	path := filepath.Join(t.TempDir(), "host1.secret")
	var b strings.Builder
	if err := makeSecret(&b, path, minSecretBytes); err != nil || b.Len() > 0 {
		t.Fatalf("%q, %v", b.String(), err)
	}
	fi, err := os.Stat(path)
	if err != nil || fi.Mode() != 0o600 {
		t.Errorf("file %v, %v", fi.Mode(), err)
	}
	first, err := os.ReadFile(path)
	if err != nil || len(first) != 2*minSecretBytes+1 {
		t.Errorf("%q, %v", first, err)
	}
	if err := makeSecret(&b, path, minSecretBytes); err == nil || !strings.Contains(err.Error(), "file exists. No secret was written") {
		t.Errorf("for a file that exists: %v", err)
	}
	if again, err := os.ReadFile(path); string(again) != string(first) {
		t.Errorf("the file has changed: %q, %v", again, err)
	}
}
