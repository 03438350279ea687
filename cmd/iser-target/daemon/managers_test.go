package daemon

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/tunnel"
	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/iser-target/iser-target/tests/testkit"
)

// What a portal requires of IPsec holds for managers, too, also when keys vanish. Initiators at another portal notice nothing.
func TestManagersRequireIPsec(t *testing.T) {
	g := newGuardedLab(t, func(g *guardedLab) {
		g.portals = fmt.Sprintf(`{listen: "127.0.0.1:0"}, {listen: %q, ipsec: required, control: true}`, g.safe)
		g.more += "\ncontrol: {socket: '', tls: {cert: c, key: k, client_ca: a}, access: [{ou: monitoring, role: read}]}"
	})
	s := g.login("stays", store)
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	if _, err := tunnel.Dial(ctx, g.safe); !errors.Is(err, tunnel.ErrNoChannel) {
		t.Errorf("without a control API: %v", err)
	}
	managers := make(chan *Manager, 1)
	g.ServeManagers(func(m *Manager) error {
		m.Authenticated()
		managers <- m
		return nil
	})
	c, err := tunnel.Dial(ctx, g.safe)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	m := <-managers
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 10)
	if n, err := m.Read(b); string(b[:n]) != "hello" || err != nil {
		t.Errorf("read %q, %v", b[:n], err)
	}

	g.fake.set(ipsec.Policy, ipsec.Protection{})
	select {
	case <-c.Done():
	case <-time.After(testkit.Patience):
		t.Fatal("a manager in clear text stays")
	}
	testkit.Eventually(t, "an event says why", func() bool {
		for _, e := range g.Events(0) {
			if e.Event == "control" && e.Text == "manager was disconnected" {
				return strings.Contains(fmt.Sprint(e.Attrs["reason"]), "IPsec")
			}
		}
		return false
	})
	if _, err := tunnel.Dial(ctx, g.safe); !errors.Is(err, tunnel.ErrNoRDMA) {
		t.Errorf("in clear text: %v", err)
	}
	g.serves(s)
}
