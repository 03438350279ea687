package daemon

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/initiator"
)

// A change of a portal ends its sessions only if the portal is removed.
func TestRemovedPortalEndsItsSessions(t *testing.T) {
	l := newLab(t)
	load(t, l.login("stays", store))
	// Port 0 twice would be the same portal twice: the second is another address.
	l.portals = `{listen: "127.0.0.1:0"}, {listen: "127.0.0.2:0", tpgt: 2}`
	l.ok(ChangeOptions{})
	st := l.State()
	if len(st.Portals) != 2 || !slices.Equal(st.Targets[0].PortalGroups, []int{1, 2}) {
		t.Fatalf("portals %+v, groups %v", st.Portals, st.Targets[0].PortalGroups)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	s, err := initiator.Login(ctx, st.Portals[1].Address, initiator.Options{Name: prefix + "a", Target: store})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	attentions(t, s, 0)
	rtpg := &initiator.Command{In: make([]byte, 64), CDB: [16]byte{0: 0xa3, 1: 0x0a, 9: 64}}
	if got := do(t, s, rtpg); got != "" || binary.BigEndian.Uint32(rtpg.In) != 2*12 {
		t.Errorf("REPORT TARGET PORT GROUPS: %s, % x", got, rtpg.In)
	}

	// Sessions stay when the portal no longer has their transport.
	l.portals = `{listen: "127.0.0.1:0"}, {listen: "127.0.0.2:0", tpgt: 2, transports: [tcp]}`
	l.ok(ChangeOptions{})
	if got := testUnitReady(t, s, 0); got != "" {
		t.Errorf("the earlier session: %s", got)
	}
	if _, err := initiator.Login(ctx, st.Portals[1].Address, initiator.Options{Name: prefix + "b", Target: store}); err == nil {
		t.Error("login over a transport that the portal does not have")
	}

	l.portals = `{listen: "127.0.0.1:0"}`
	var refused *ErrRefused
	if p, err := l.apply(ChangeOptions{}); !errors.As(err, &refused) || !strings.Contains(strings.Join(p.Steps[0].Disturbs, " "), prefix+"a") {
		t.Fatalf("%+v, %v", p, err)
	}
	l.ok(ChangeOptions{Disrupt: true, Now: true})
	<-s.Done()
	if _, err := initiator.Login(ctx, st.Portals[1].Address, initiator.Options{Name: prefix + "a", Target: store}); err == nil {
		t.Error("login at a portal that was removed")
	}
	if got := l.State().Targets[0].PortalGroups; !slices.Equal(got, []int{1}) {
		t.Errorf("groups %v", got)
	}
}
