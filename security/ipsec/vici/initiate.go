package vici

import (
	"context"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/strongswan/govici/vici"
)

// initiateTime bounds a key exchange if the context of Initiate does not.
const initiateTime = 30 * time.Second

// Initiate asks strongSwan to negotiate keys for f, with the connection whose remote_addrs name the initiator and whose child
// covers the flow. It returns when the keys are installed.
func (d *Driver) Initiate(ctx context.Context, f ipsec.Flow) error {
	ctx, cancel := context.WithTimeout(ctx, initiateTime)
	defer cancel()
	s, err := dial(ctx, d.socket, d.timeout) // of its own: the exchange takes its time
	if err != nil {
		return d.explain(err)
	}
	defer s.end()
	var conns []*vici.Message
	err = s.within(ctx, d.timeout, func() (err error) {
		conns, err = s.StreamedCommandRequest("list-conns", "list-conn", vici.NewMessage())
		return err
	})
	if err != nil {
		return d.explain(err)
	}
	ike, child := choose(conns, f)
	if child == "" {
		return fmt.Errorf("strongSwan has no connection that can ask %v for keys: remote_addrs of a connection must name it, and "+
			"the traffic selectors of its child must cover port %d. Add one to swanctl.conf, or let the initiator ask", f.Remote.Addr(), f.Local.Port())
	}
	deadline, _ := ctx.Deadline()
	left := time.Until(deadline)
	m := vici.NewMessage()
	for _, kv := range []struct{ key, value string }{
		{"ike", ike}, {"child", child}, {"timeout", strconv.FormatInt(left.Milliseconds(), 10)}, {"loglevel", "-1"},
	} {
		if err := m.Set(kv.key, kv.value); err != nil {
			return err
		}
	}
	err = s.within(ctx, left, func() error {
		_, err := s.CommandRequest("initiate", m)
		return err
	})
	if err != nil {
		return fmt.Errorf("strongSwan: keys for %v by connection %s: %w. Look at the log of charon on both hosts", f.Remote.Addr(), ike, err)
	}
	return nil
}

// choose returns connection and child for f, or "".
func choose(conns []*vici.Message, f ipsec.Flow) (ike, child string) {
	for _, m := range conns {
		for _, ike := range m.Keys() {
			conn, ok := m.Get(ike).(*vici.Message)
			if !ok || !names(list(conn, "remote_addrs"), f.Remote.Addr()) {
				continue
			}
			children, ok := conn.Get("children").(*vici.Message)
			if !ok {
				continue
			}
			for _, name := range children.Keys() {
				c, ok := children.Get(name).(*vici.Message)
				if ok && covers(list(c, "local-ts"), f.Local) && covers(list(c, "remote-ts"), f.Remote) {
					return ike, name
				}
			}
		}
	}
	return "", ""
}

// names reports whether a is one of addrs. A key exchange requires one address, not a network or %any.
func names(addrs []string, a netip.Addr) bool {
	for _, s := range addrs {
		if other, err := netip.ParseAddr(s); err == nil && other.Unmap() == a {
			return true
		}
	}
	return false
}

// covers reports whether one of the traffic selectors, as charon prints them, has a.
func covers(selectors []string, a netip.AddrPort) bool {
	for _, s := range selectors {
		network, rest, ported := strings.Cut(s, "[")
		if network != "dynamic" {
			prefix, err := netip.ParsePrefix(network)
			if err != nil || !prefix.Contains(a.Addr()) {
				continue
			}
		}
		if !ported || coversPort(strings.TrimSuffix(rest, "]"), a.Port()) {
			return true
		}
	}
	return false
}

// coversPort reports whether the part of a selector in brackets, like tcp/3260, allows the port. charon prints the name of a
// port that it knows.
func coversPort(s string, port uint16) bool {
	protocol, name, ported := strings.Cut(s, "/")
	if protocol != "tcp" && protocol != "6" {
		return false
	}
	if !ported || name == "any" {
		return true
	}
	if low, high, ok := strings.Cut(name, "-"); ok {
		from, err1 := strconv.ParseUint(low, 10, 16)
		to, err2 := strconv.ParseUint(high, 10, 16)
		if err1 == nil && err2 == nil {
			return from <= uint64(port) && uint64(port) <= to
		}
	}
	n, err := strconv.ParseUint(name, 10, 16)
	if err != nil {
		return name == "iscsi-target" && port == 3260
	}
	return n == uint64(port)
}
