package initiator

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
)

// A Target is what discovery finds.
type Target struct {
	Name    string
	Portals []Portal
}

// A Portal is an address of a target.
type Portal struct {
	Address string // HOST:PORT
	Group   int    // TargetPortalGroupTag
}

// Discover returns the targets that the portal at addr, HOST:PORT, offers to cfg.Name (RFC 7143, appendix C).
func Discover(ctx context.Context, addr string, cfg Config) ([]Target, error) {
	cfg, err := cfg.complete(true)
	if err != nil {
		return nil, err
	}
	if cfg.HeaderDigest || cfg.DataDigest {
		cfg.HeaderDigest, cfg.DataDigest = false, false // keys of normal sessions
	}
	s, err := connect(ctx, addr, cfg, true)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	pairs, err := s.sendTargets(ctx, "All")
	if err != nil {
		return nil, fmt.Errorf("%s: discovery: %w", addr, err)
	}
	var found []Target
	for _, p := range pairs {
		switch {
		case p.Key == "TargetName":
			found = append(found, Target{Name: p.Value})
		case p.Key == "TargetAddress" && len(found) > 0:
			portal, err := parsePortal(p.Value)
			if err != nil {
				return nil, fmt.Errorf("%s: discovery: %w", addr, err)
			}
			t := &found[len(found)-1]
			t.Portals = append(t.Portals, portal)
		case p.Key == "TargetAddress":
			return nil, fmt.Errorf("%s: discovery: the target returned an address before a name", addr)
		}
	}
	s.Logout(ctx) // the list is complete: an error does not matter
	return found, nil
}

// parsePortal parses a TargetAddress: host[:port],group.
func parsePortal(v string) (p Portal, err error) {
	addr, group, ok := strings.Cut(v, ",")
	if ok {
		if p.Group, err = strconv.Atoi(group); err != nil || p.Group < 0 || p.Group > 65535 {
			return p, fmt.Errorf("TargetAddress=%q: the portal group is not a number up to 65535", v)
		}
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		host, port = strings.Trim(addr, "[]"), DefaultPort
	}
	if host == "" {
		return p, fmt.Errorf("TargetAddress=%q has no host", v)
	}
	p.Address = net.JoinHostPort(host, port)
	return p, nil
}
