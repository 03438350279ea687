package config

import (
	"cmp"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/security/ipsec"
)

// IPsec configures how the target learns which SAs and policies cover a connection, and what is good enough
// (RFC 7146).
type IPsec struct {
	Driver string        `key:"driver"` // one of ipsecDrivers
	Grace  time.Duration `key:"grace"`  // time that a session has to get keys after its keys are gone
	// DriverTimeout is for how long a session keeps its verdict while the driver does not answer. One call may take half of it.
	DriverTimeout time.Duration  `key:"driver_timeout"`
	Profiles      []IPsecProfile `key:"profiles"`
	VICI          IPsecVICI      `key:"vici"`
	Exec          IPsecExec      `key:"exec"`
	Static        IPsecStatic    `key:"static"`
}

// An IPsecProfile says which protection is good enough. The comments of ipsec.Profile have the defaults.
type IPsecProfile struct {
	Name            string          `key:"name"`
	Mode            string          `key:"mode"`   // tunnel or transport; empty: both
	Suites          []string        `key:"suites"` // like aes128gcm16; empty: those of RFC 7146 with encryption
	MinKeyBits      int             `key:"min_key_bits"`
	NullEncryption  bool            `key:"null_encryption"`
	ESN             ESNPolicy       `key:"esn"`
	MinReplayWindow int             `key:"min_replay_window"` // packets
	MaxLifetime     time.Duration   `key:"max_lifetime"`      // 0: not checked
	ManualKeys      bool            `key:"manual_keys"`
	Identities      []IPsecIdentity `key:"identities"`
}

// An IPsecIdentity ties IKE identities to initiators.
type IPsecIdentity struct {
	Initiator string `key:"initiator"` // pattern of iSCSI names
	ID        string `key:"id"`        // IKE identity; * matches any characters
}

// IPsecVICI configures the driver vici.
type IPsecVICI struct {
	Socket   string `key:"socket"`   // path of charon's socket
	Initiate bool   `key:"initiate"` // ask for keys when a connection has none
}

// IPsecExec configures the driver exec.
type IPsecExec struct {
	Command []string      `key:"command"` // absolute path of the program, and its arguments
	Timeout time.Duration `key:"timeout"` // of one question
	// ClearText lets packets without ESP reach portals under required, because the program may know of other protection.
	ClearText bool `key:"clear_text"`
}

// IPsecStatic has what the driver static installs.
type IPsecStatic struct {
	SAs      []IPsecSA     `key:"sas"`
	Policies []IPsecPolicy `key:"policies"`
}

// An IPsecSA is an SA whose keys are in a file.
type IPsecSA struct {
	SPI          int    `key:"spi"` // 256 to 2^32-1
	Source       string `key:"source"`
	Destination  string `key:"destination"`
	ReqID        int    `key:"reqid"`
	Mode         string `key:"mode"`
	Suite        string `key:"suite"`
	KeyFile      string `key:"key_file"` // one line: the keys in hexadecimal
	ESN          bool   `key:"esn"`
	ReplayWindow int    `key:"replay_window"` // packets; 0: 32
}

// An IPsecPolicy demands ESP for packets in one direction.
type IPsecPolicy struct {
	Direction   string `key:"direction"`   // in or out
	Source      string `key:"source"`      // network of the packets
	Destination string `key:"destination"` // the same
	Port        int    `key:"port"`        // TCP port of the target; 0: all packets
	Mode        string `key:"mode"`
	ReqID       int    `key:"reqid"`
	// TunnelSource and TunnelDestination are the ends of a tunnel; empty: those of Source and Destination, which
	// are single addresses then.
	TunnelSource      string `key:"tunnel_source"`
	TunnelDestination string `key:"tunnel_destination"`
}

// Drops reports whether portals under required drop packets without ESP.
func (c *IPsec) Drops() bool { return c.Driver != "exec" || !c.Exec.ClearText }

const (
	maxIPsecGrace       = 10 * time.Minute
	minIPsecTimeout     = 2 * time.Second
	maxIPsecTimeout     = 10 * time.Minute
	maxIPsecExecTimeout = 30 * time.Second

	maxReplayWindow = 4096 // of the kernel (XFRMA_REPLAY_ESN_MAX)
	minSPI          = 256  // RFC 4303, section 2.1
	maxSPI          = 1<<32 - 1
)

var (
	ipsecDrivers = []string{"xfrm", "vici", "static", "exec"}
	ipsecModes   = []string{string(ipsec.Tunnel), string(ipsec.Transport)}
)

// defaultProfile is the profile of portals and targets that name none.
const defaultProfile = "default"

// Profile returns the profile of that name. For an empty name that is the one with the name default and, if c has none, one
// that asks for nothing beyond RFC 7146. It is nil if c has no such profile.
func (c *IPsec) Profile(name string) *ipsec.Profile {
	i := slices.IndexFunc(c.Profiles, func(p IPsecProfile) bool { return p.Name == cmp.Or(name, defaultProfile) })
	switch {
	case i >= 0:
		return c.Profiles[i].profile()
	case name == "":
		return &ipsec.Profile{Name: defaultProfile, ESNAuto: true}
	}
	return nil
}

// profile returns p in the form of package ipsec.
func (p *IPsecProfile) profile() *ipsec.Profile {
	out := &ipsec.Profile{
		Name: p.Name, Mode: ipsec.Mode(p.Mode), Suites: p.Suites, MinKeyBits: p.MinKeyBits, NullEncryption: p.NullEncryption,
		ESN: p.ESN == ESNOn, ESNAuto: p.ESN == ESNAuto, MinReplayWindow: p.MinReplayWindow, MaxLifetime: p.MaxLifetime, ManualKeys: p.ManualKeys,
	}
	for _, id := range p.Identities {
		out.Identities = append(out.Identities, ipsec.IdentityRule{Initiator: id.Initiator, ID: id.ID})
	}
	return out
}

// faults returns what err, of Profile.Validate, joins.
func faults(err error) (list []*ipsec.FieldError) {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return nil
	}
	for _, err := range joined.Unwrap() {
		if fault, ok := err.(*ipsec.FieldError); ok {
			list = append(list, fault)
		}
	}
	return list
}

// Demand returns what p requires of its connections.
func (p Portal) Demand() ipsec.Demand { return cmp.Or(ipsec.Demand(p.IPsec), ipsec.Off) }

// Demand returns what t requires of its sessions.
func (t *Target) Demand() ipsec.Demand { return cmp.Or(ipsec.Demand(t.IPsec), ipsec.Off) }

// UsesIPsec reports whether a portal or target requires something of IPsec.
func (c *Config) UsesIPsec() bool { return c.ipsecOf(ipsec.Audit) || c.ipsecOf(ipsec.Required) }

// RequiresIPsec reports whether a portal or target is required to be protected.
func (c *Config) RequiresIPsec() bool { return c.ipsecOf(ipsec.Required) }

func (c *Config) ipsecOf(d ipsec.Demand) bool {
	return slices.ContainsFunc(c.Portals, func(p Portal) bool { return p.Demand() == d }) ||
		slices.ContainsFunc(c.Targets, func(t Target) bool { return t.Demand() == d })
}

// checkIPsec checks the section ipsec and the keys of portals and targets that refer to it.
func (c *Config) checkIPsec(errs *errorList) {
	s := &c.IPsec
	if !slices.Contains(ipsecDrivers, s.Driver) {
		errs.addf("ipsec.driver", "must be xfrm, vici, static or exec, not %q", s.Driver)
	}
	if s.Grace < 0 || s.Grace > maxIPsecGrace {
		errs.addf("ipsec.grace", "must be 0 to %s, not %v", FormatDuration(maxIPsecGrace), s.Grace)
	}
	if s.DriverTimeout < minIPsecTimeout || s.DriverTimeout > maxIPsecTimeout {
		errs.addf("ipsec.driver_timeout", "must be %s to %s, not %v", FormatDuration(minIPsecTimeout), FormatDuration(maxIPsecTimeout), s.DriverTimeout)
	}
	names := firsts[string]{}
	for i, p := range s.Profiles {
		key := index("ipsec.profiles", i)
		if p.Name == "" {
			errs.addf(key+".name", "is required: what ipsec_profile of a portal or target refers to")
		} else if first, ok := names.taken(p.Name, key); ok {
			errs.addf(key+".name", "%q is the name of %s", p.Name, first)
		}
		for _, fault := range faults(p.profile().Validate()) {
			errs.addf(key+"."+fault.Field, "%s", fault.Problem)
		}
	}
	s.checkDrivers(errs)
	for i := range c.Portals {
		p := &c.Portals[i]
		c.checkDemand(index("portals", i), p.IPsec, p.IPsecProfile, errs)
		if p.Demand() == ipsec.Required {
			if addr, reason := parseAddress(p.Listen, true); reason == "" && addr.port == 0 {
				errs.addf(index("portals", i, "listen"), "must have a port: ipsec: required opens one socket for IPv4 and one for IPv6, which share it")
			}
		}
	}
	for i := range c.Targets {
		t := &c.Targets[i]
		c.checkDemand(index("targets", i), t.IPsec, t.IPsecProfile, errs)
	}
}

// checkDemand checks the keys ipsec and ipsec_profile below key.
func (c *Config) checkDemand(key, demand, profile string, errs *errorList) {
	if _, err := ipsec.ParseDemand(demand); err != nil {
		errs.addf(key+".ipsec", "must be off, audit or required, not %q", demand)
	}
	switch {
	case profile == "":
	case c.IPsec.Profile(profile) == nil:
		errs.addf(key+".ipsec_profile", "ipsec.profiles has no profile %q", profile)
	case cmp.Or(demand, string(ipsec.Off)) == string(ipsec.Off):
		errs.addf(key+".ipsec_profile", "requires ipsec: audit or ipsec: required")
	}
}

// checkDrivers checks the sections of drivers.
func (s *IPsec) checkDrivers(errs *errorList) {
	if p := s.VICI.Socket; !filepath.IsAbs(p) || len(p) > maxSocket || strings.ContainsRune(p, 0) {
		errs.addf("ipsec.vici.socket", "must be an absolute path of at most %d bytes, like /run/charon.vici", maxSocket)
	}
	switch cmd := s.Exec.Command; {
	case len(cmd) == 0 && s.Driver == "exec":
		errs.addf("ipsec.exec.command", "is required: the program that decides, and its arguments, like [/usr/local/bin/verdict]")
	case len(cmd) > 0 && !filepath.IsAbs(cmd[0]):
		errs.addf("ipsec.exec.command[0]", "must be an absolute path, not %q", cmd[0])
	}
	for i, arg := range s.Exec.Command {
		if strings.ContainsRune(arg, 0) {
			errs.addf(index("ipsec.exec.command", i), "has a NUL")
		}
	}
	if s.Exec.Timeout < 100*time.Millisecond || s.Exec.Timeout > maxIPsecExecTimeout {
		errs.addf("ipsec.exec.timeout", "must be 100ms to %s, not %v", FormatDuration(maxIPsecExecTimeout), s.Exec.Timeout)
	}
	if s.Driver == "static" && len(s.Static.SAs) == 0 {
		errs.addf("ipsec.static.sas", "is required: the SAs that the target installs")
	}
	if s.Driver == "static" && len(s.Static.Policies) == 0 {
		errs.addf("ipsec.static.policies", "is required: the policies that the target installs")
	}
	if s.Driver != "static" && len(s.Static.SAs)+len(s.Static.Policies) > 0 {
		errs.addf("ipsec.static", "requires ipsec.driver: static")
	}
	s.Static.check(errs)
}

// check checks the SAs and policies of the driver static.
func (s *IPsecStatic) check(errs *errorList) {
	type name struct {
		spi         int
		destination string
	}
	sas := firsts[name]{}
	reqids := map[int]bool{}
	for i := range s.SAs {
		sa, key := &s.SAs[i], index("ipsec.static.sas", i)
		checkRange(errs, key+".spi", sa.SPI, minSPI, maxSPI)
		source, destination := checkIP(key+".source", sa.Source, errs), checkIP(key+".destination", sa.Destination, errs)
		checkFamilies(key+".destination", source, destination, errs)
		if first, ok := sas.taken(name{sa.SPI, sa.Destination}, key); ok && destination.IsValid() {
			errs.addf(key+".spi", "%d to %s is the SPI of %s", sa.SPI, sa.Destination, first)
		}
		checkReqID(key, sa.ReqID, errs)
		reqids[sa.ReqID] = true
		checkIPsecMode(key+".mode", sa.Mode, errs)
		switch suite, err := ipsec.ParseSuite(sa.Suite); {
		case err != nil:
			errs.addf(key+".suite", "%v", err)
		case suite.Counter():
			errs.addf(key+".suite", "%s must not have keys that are set by hand (RFC 3723, section 5.9). Use a suite like aes256-sha256", sa.Suite)
		}
		if !filepath.IsAbs(sa.KeyFile) {
			errs.addf(key+".key_file", "is required: the absolute path of a file of mode 0600 with the keys in hexadecimal")
		}
		checkRange(errs, key+".replay_window", sa.ReplayWindow, 0, maxReplayWindow)
		if !sa.ESN && sa.ReplayWindow > 32 {
			errs.addf(key+".replay_window", "must be at most 32 without esn: true, not %d", sa.ReplayWindow)
		}
	}
	for i := range s.Policies {
		p, key := &s.Policies[i], index("ipsec.static.policies", i)
		if p.Direction != "in" && p.Direction != "out" {
			errs.addf(key+".direction", "must be in or out, not %q", p.Direction)
		}
		source, destination := checkNetwork(key+".source", p.Source, errs), checkNetwork(key+".destination", p.Destination, errs)
		checkFamilies(key+".destination", source.Addr(), destination.Addr(), errs)
		checkRange(errs, key+".port", p.Port, 0, 65535)
		checkIPsecMode(key+".mode", p.Mode, errs)
		checkReqID(key, p.ReqID, errs)
		if p.ReqID > 0 && !reqids[p.ReqID] {
			errs.addf(key+".reqid", "no SA has the reqid %d: the policy would drop all packets", p.ReqID)
		}
		for _, end := range []struct {
			key, value string
			of         netip.Prefix
		}{{"tunnel_source", p.TunnelSource, source}, {"tunnel_destination", p.TunnelDestination, destination}} {
			switch key := key + "." + end.key; {
			case end.value != "" && p.Mode == string(ipsec.Transport):
				errs.addf(key, "requires mode: tunnel")
			case end.value != "":
				checkIP(key, end.value, errs)
			case p.Mode == string(ipsec.Tunnel) && end.of.IsValid() && !end.of.IsSingleIP():
				errs.addf(key, "is required: %v is more than one address", end.of)
			}
		}
	}
}

func checkReqID(key string, id int, errs *errorList) {
	if id < 1 || id > 0x7fff {
		errs.addf(key+".reqid", "is required: 1 to %d, which ties SAs to policies", 0x7fff)
	}
}

func checkIPsecMode(key, mode string, errs *errorList) {
	if !slices.Contains(ipsecModes, mode) {
		errs.addf(key, "must be tunnel or transport, not %q", mode)
	}
}

// checkIP parses an address.
func checkIP(key, s string, errs *errorList) netip.Addr {
	a, err := netip.ParseAddr(s)
	if err != nil || a.Is4In6() || a.Zone() != "" || a.IsUnspecified() {
		errs.addf(key, "%q is not an IP address, like 192.0.2.1", s)
		return netip.Addr{}
	}
	return a
}

// checkNetwork parses a network, or an address.
func checkNetwork(key, s string, errs *errorList) netip.Prefix {
	if a, err := netip.ParseAddr(s); err == nil && !a.Is4In6() && a.Zone() == "" {
		return netip.PrefixFrom(a, a.BitLen())
	}
	n, err := netip.ParsePrefix(s)
	if err != nil || n.Addr().Is4In6() {
		errs.addf(key, "%q is not a network, like 192.0.2.0/24 or 192.0.2.1", s)
		return netip.Prefix{}
	}
	if n != n.Masked() {
		errs.addf(key, "%s has bits beyond its prefix: it is the network %v", s, n.Masked())
	}
	return n
}

// checkFamilies refuses two addresses of different families.
func checkFamilies(key string, a, b netip.Addr, errs *errorList) {
	if a.IsValid() && b.IsValid() && a.Is4() != b.Is4() {
		errs.addf(key, "must be of the address family of source")
	}
}

// checkShortSecrets refuses secrets below 96 bits where a portal that leads to their target does not ensure IPsec encryption
// (RFC 7143, section 9.2.1; RFC 3723, section 2.4.1).
func (c *Config) checkShortSecrets(errs *errorList) {
	for i := range c.Targets {
		t := &c.Targets[i]
		for _, s := range t.Auth.secrets(index("targets", i, "auth")) {
			c.checkShort(s, t.ServedBy, errs)
		}
	}
	for _, s := range c.DiscoveryAuth.secrets("discovery_auth") {
		c.checkShort(s, func(Portal) bool { return true }, errs)
	}
}

// checkShort checks one secret that initiators may use through the portals that leads accepts.
func (c *Config) checkShort(s secretRef, leads func(Portal) bool, errs *errorList) {
	if *s.secret == "" || !s.secret.Short() {
		return
	}
	for i, p := range c.Portals {
		if !leads(p) {
			continue
		}
		why := ""
		switch profile := c.IPsec.Profile(p.IPsecProfile); {
		case p.Demand() != ipsec.Required:
			why = "does not require IPsec"
		case profile != nil && profile.NullEncryption:
			why = fmt.Sprintf("does not require encryption: its profile %q has null_encryption: true", profile.Name)
		default:
			continue
		}
		field := s.field
		if s.file != "" {
			field += "_file"
		}
		errs.addf(s.key+"."+field, "secret has %d bytes, less than %d (96 bits), and portals[%d] (%s) %s", len(*s.secret), security.MinSecret, i, p.Listen, why)
		return
	}
}
