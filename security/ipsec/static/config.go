package static

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/iser-target/iser-target/security/ipsec"
)

// ReqIDBase and MaxReqID are the ReqIDs of what the driver installs: a ReqID of the configuration plus ReqIDBase. IKE daemons count from 1.
const (
	ReqIDBase = 0x69530000
	MaxReqID  = 0x7fff
)

// own reports whether the driver gives SAs and templates this ReqID.
func own(reqID int) bool { return reqID > ReqIDBase && reqID <= ReqIDBase+MaxReqID }

// Directions of a Policy.
const (
	In  = "in"
	Out = "out"
)

// Config has what the driver installs.
type Config struct {
	SAs      []SA
	Policies []Policy
}

// An SA is a security association for packets in one direction.
type SA struct {
	SPI                 uint32 // at least 256 (RFC 4303, section 2.1)
	Source, Destination netip.Addr
	ReqID               int // 1 to MaxReqID
	Mode                ipsec.Mode
	Suite               string // without a counter mode: aes256-sha256
	KeyFile             string // one line: the key of the encryption, followed by that of the integrity, in hexadecimal
	ESN                 bool
	ReplayWindow        int // packets; 0: 32. Above 32 it requires ESN
}

// A Policy demands ESP for packets in one direction.
type Policy struct {
	Direction           string // In or Out
	Source, Destination netip.Prefix
	Port                int // TCP port of the target; 0: all packets
	Mode                ipsec.Mode
	ReqID               int // that of SAs
	// TunnelSource and TunnelDestination are the ends of a tunnel. They may be left out if Source and Destination are single addresses.
	TunnelSource, TunnelDestination netip.Addr
}

// Validate checks the configuration, except for the files. The error names each fault by its key.
func (c Config) Validate() error {
	var errs []error
	for i, sa := range c.SAs {
		for _, why := range sa.faults() {
			errs = append(errs, fmt.Errorf("sas[%d].%s", i, why))
		}
		if j := slices.IndexFunc(c.SAs, func(o SA) bool { return o.SPI == sa.SPI && o.Destination == sa.Destination }); j < i {
			errs = append(errs, fmt.Errorf("sas[%d].spi: 0x%x to %v is the SPI of sas[%d], too", i, sa.SPI, sa.Destination, j))
		}
	}
	for i, p := range c.Policies {
		for _, why := range p.faults() {
			errs = append(errs, fmt.Errorf("policies[%d].%s", i, why))
		}
		if !slices.ContainsFunc(c.SAs, func(sa SA) bool { return sa.ReqID == p.ReqID }) {
			errs = append(errs, fmt.Errorf("policies[%d].reqid: no SA has %d, so the policy would drop all packets", i, p.ReqID))
		}
		same := func(o Policy) bool {
			return o.Direction == p.Direction && o.Source == p.Source && o.Destination == p.Destination && o.Port == p.Port
		}
		if j := slices.IndexFunc(c.Policies, same); j < i {
			errs = append(errs, fmt.Errorf("policies[%d]: it is for the same packets as policies[%d]", i, j))
		}
	}
	return errors.Join(errs...)
}

func (sa SA) faults() (all []string) {
	fault := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	if sa.SPI < 256 {
		fault("spi: %d is reserved. Use 256 or more", sa.SPI)
	}
	if !usable(sa.Source) || !usable(sa.Destination) || sa.Source.Is4() != sa.Destination.Is4() {
		fault("source: %v and %v are not two addresses of one family", sa.Source, sa.Destination)
	}
	if sa.ReqID < 1 || sa.ReqID > MaxReqID {
		fault("reqid: %d is outside of the range from 1 to %d", sa.ReqID, MaxReqID)
	}
	if sa.Mode != ipsec.Tunnel && sa.Mode != ipsec.Transport {
		fault("mode: %q is not tunnel or transport", string(sa.Mode))
	}
	if s, err := ipsec.ParseSuite(sa.Suite); err != nil {
		fault("suite: %v", err)
	} else if s.Counter() {
		fault("suite: %s must not have keys that are set by hand: sequence numbers repeat when the SA is installed again, which breaks it "+
			"(RFC 3723, section 5.9). Use one of %s", sa.Suite, strings.Join(suites(), ", "))
	}
	if window := sa.window(); window < 1 || window > 4096 {
		fault("replay_window: %d is outside of the range from 1 to 4096 packets", sa.ReplayWindow)
	} else if window > 32 && !sa.ESN {
		fault("replay_window: %d requires esn: true; without it at most 32 are possible", window)
	}
	if sa.KeyFile == "" {
		fault("key_file: it is empty")
	}
	return all
}

func (sa SA) window() int {
	if sa.ReplayWindow == 0 {
		return 32
	}
	return sa.ReplayWindow
}

// suites returns the suites that can have keys which are set by hand.
func suites() (names []string) {
	for _, name := range ipsec.Suites() {
		if s, err := ipsec.ParseSuite(name); err == nil && !s.Counter() {
			names = append(names, name)
		}
	}
	return names
}

func usable(a netip.Addr) bool {
	return a.IsValid() && !a.Is4In6() && !a.IsUnspecified() && !a.IsMulticast() && a.Zone() == ""
}

func (p Policy) faults() (all []string) {
	fault := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	if p.Direction != In && p.Direction != Out {
		fault("direction: %q is not in or out", p.Direction)
	}
	if !p.Source.IsValid() || !p.Destination.IsValid() || p.Source.Addr().Is4() != p.Destination.Addr().Is4() {
		fault("source: %v and %v are not two networks of one family", p.Source, p.Destination)
		return all
	}
	if p.Port < 0 || p.Port > 65535 {
		fault("port: %d is outside of the range from 0 to 65535", p.Port)
	}
	source, destination := p.ends()
	switch {
	case p.Mode == ipsec.Transport && (p.TunnelSource.IsValid() || p.TunnelDestination.IsValid()):
		fault("tunnel_source: it requires mode: tunnel")
	case p.Mode == ipsec.Transport:
	case p.Mode != ipsec.Tunnel:
		fault("mode: %q is not tunnel or transport", string(p.Mode))
	case !usable(source) || !usable(destination) || source.Is4() != destination.Is4():
		fault("tunnel_source: a tunnel needs two addresses of one family, not %v and %v", source, destination)
	}
	return all
}

// ends returns the ends of the tunnel.
func (p Policy) ends() (source, destination netip.Addr) {
	source, destination = p.TunnelSource, p.TunnelDestination
	if !source.IsValid() && p.Source.IsSingleIP() {
		source = p.Source.Addr()
	}
	if !destination.IsValid() && p.Destination.IsSingleIP() {
		destination = p.Destination.Addr()
	}
	return source, destination
}
