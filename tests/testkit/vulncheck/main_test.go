package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A database is there if it has an index. One that does not answer counts as missing after the time limit.
func TestReach(t *testing.T) {
	end := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/good/index/db.json":
		case "/slow/index/db.json":
			<-end
		default:
			http.NotFound(w, r)
		}
	}))
	defer server.Close()
	defer close(end)
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "good", "index"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "good", "index", "db.json"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	for db, want := range map[string]string{
		server.URL + "/good": "", server.URL + "/good/": "", "file://" + dir + "/good": "",
		server.URL + "/bad": "404", server.URL + "/slow": "Timeout", "file://" + dir + "/bad": "no such file",
		"ftp://example.com": "neither a file nor a web address", "https://no-such-host.invalid": "no-such-host.invalid", "": "neither a file", "://": "parse",
	} {
		limit := 20 * time.Second
		if want == "Timeout" {
			limit = 200 * time.Millisecond
		}
		err := reach(db, limit)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", db, err, want)
		}
	}
}
