package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/handover"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A detachingIPsec is a driver that has something installed, and notes what becomes of it.
type detachingIPsec struct {
	fakeIPsec
	callsMu sync.Mutex
	done    []string
}

func (f *detachingIPsec) note(call string) error {
	f.callsMu.Lock()
	defer f.callsMu.Unlock()
	f.done = append(f.done, call)
	return nil
}

func (f *detachingIPsec) noted() []string {
	f.callsMu.Lock()
	defer f.callsMu.Unlock()
	return slices.Clone(f.done)
}

func (f *detachingIPsec) Detach() error                { return f.note("detach") }
func (f *detachingIPsec) Attach(context.Context) error { return f.note("attach") }
func (f *detachingIPsec) Close() error                 { return f.note("close") }

func (f *detachingIPsec) hooks() ipsecHooks {
	h := f.fakeIPsec.hooks()
	h.newDriver = func(*config.Config) (ipsec.Driver, error) { return f, nil }
	return h
}

// A process that cannot continue what another one does leaves the SAs and policies of that one in the kernel. Once it serves they are its own,
// and it removes them at its end.
func TestSuccessorLeavesIPsec(t *testing.T) {
	text := fmt.Sprintf("state_dir: \"\"\nportals: [{listen: %q, ipsec: required}]\ntargets: [{name: %s, initiators: ['*'], luns: [{id: 0, backend: memory, size: 1MiB}]}]\n",
		freePort(t), store)
	path := write(t, "c.yaml", text)
	doc, err := config.OpenDocument(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name  string
		lacks []error
		state handover.State
		fault string
	}{
		{"a driver that lacks something", []error{errors.New("CAP_NET_ADMIN is missing")}, handover.State{}, "CAP_NET_ADMIN is missing"},
		{"a session that cannot continue", nil, handover.State{Sessions: []iscsi.SessionState{{Target: store, Conns: make([]iscsi.ConnState, 1)}}}, "its socket is missing"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			fake := &detachingIPsec{fakeIPsec: fakeIPsec{lacks: tc.lacks}}
			_, err := New(doc, Options{Path: path, LogTo: &testkit.Log{}, ipsec: fake.hooks(), Received: &handover.Received{State: tc.state}})
			if err == nil || !strings.Contains(err.Error(), tc.fault) {
				t.Errorf("%v, want %q", err, tc.fault)
			}
			if got := fake.noted(); !slices.Equal(got, []string{"detach", "close"}) || fake.blocks.closed != "leaves them" {
				t.Errorf("calls %q; of the policies that block clear text it %s", got, fake.blocks.closed)
			}
		})
	}
	for _, received := range []*handover.Received{nil, {}} {
		fake := &detachingIPsec{}
		_, end := run(t, path, Options{LogTo: &testkit.Log{}, ipsec: fake.hooks(), Received: received})
		if err := end(); err != nil {
			t.Error(err)
		}
		if got := fake.noted(); !slices.Equal(got, []string{"close"}) || fake.blocks.closed != "removes them" {
			t.Errorf("after serving, received %v: calls %q", received != nil, got)
		}
	}
}
