package api

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// fuzzed are the requests of FuzzControlDuringIO: whatever their bodies say, the LUN that the initiator
// uses stays. So those for the whole configuration are dry runs.
var fuzzed = [...]struct{ method, path string }{
	{"GET", "/v1/state"}, {"GET", "/v1/limits"}, {"GET", "/v1/config"}, {"GET", "/v1/events?since=0"},
	{"PATCH", "/v1/limits?dry_run=true"}, {"PUT", "/v1/config?dry_run=true"},
	{"POST", "/v1/targets"}, {"PATCH", "/v1/targets/" + other}, {"DELETE", "/v1/targets/" + other},
	{"POST", "/v1/targets/" + other + "/luns"}, {"PATCH", "/v1/targets/" + other + "/luns/0"},
	{"DELETE", "/v1/targets/" + other + "/luns/0"}, {"POST", "/v1/captures"}, {"DELETE", "/v1/sessions/9"},
}

const other = store + ":other"

// FuzzControlDuringIO sends requests with arbitrary bodies to the control API while an initiator uses a
// LUN. Each request is answered, in JSON if it is wrong, and the initiator is answered within a second,
// with the data that it has written.
func FuzzControlDuringIO(f *testing.F) {
	for i, body := range []string{
		`{"name": "` + other + `", "initiators": ["*"]}`,
		`{"id": 0, "backend": "memory", "size": "1MiB"}`,
		`{"size": 2097152, "iops": 100}`,
		`{"alias": "x", "resets_for": ["*"]}`,
		`{"max_connections": "3", "memory": "1GiB"}`,
		"portals: []\ntargets: []\n",
		`{"id": -1, "backend": 7}`, `[`, ``,
	} {
		f.Add(byte(i+4), body)
	}
	socket := filepath.Join(f.TempDir(), "s")
	d := serve(f, config.Control{Socket: socket}, io.Discard)
	c := overSocket(socket)
	session, err := initiator.Dial(f.Context(), "tcp", d.State().Portals[0].Address, initiator.Options{Target: store})
	if err != nil {
		f.Fatal(err)
	}
	if err := session.LogIn(nil); err != nil {
		f.Fatal(err)
	}
	write, read := cdb.Write10(0, 1), cdb.Read10(0, 1)
	block := make([]byte, 512)

	f.Fuzz(func(t *testing.T, which byte, body string) {
		block[0]++
		if status, sense, _, err := session.Do([8]byte{}, write[:], block, 0); err != nil || status != 0 {
			t.Fatalf("WRITE: status %#x, sense % x, %v", status, sense, err)
		}
		request := fuzzed[int(which)%len(fuzzed)]
		if !bytes.Contains([]byte(body), []byte("/")) { // no files
			ask(t, c, request.method, request.path, body)
		}
		begun := time.Now()
		status, sense, in, err := session.Do([8]byte{}, read[:], nil, 512)
		if err != nil || status != 0 || !bytes.Equal(in, block) {
			t.Fatalf("READ: status %#x, sense % x, %v, or other data", status, sense, err)
		}
		if took := time.Since(begun); took > 10*time.Second { // a busy machine
			t.Errorf("the initiator waited %v", took)
		}
	})
}

// ask sends a request and checks the form of the answer.
func ask(t *testing.T, c *http.Client, method, path, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://target"+path, bytes.NewReader([]byte(body)))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	if res.StatusCode == http.StatusInternalServerError || res.StatusCode >= 400 && !json.Valid(b) {
		t.Errorf("%s %s: %s\n%s", method, path, res.Status, b)
	}
}
