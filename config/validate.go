package config

import (
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/iser-target/iser-target/backend/nbd/nbduri"
	"github.com/iser-target/iser-target/backend/rbd/rbduri"
	"github.com/iser-target/iser-target/security"
)

// A backendKeys lists the keys that a backend requires and accepts, in addition to id and the
// switches, which all backends have.
type backendKeys struct {
	needs     []string
	takes     []string
	blockSize bool // block_size may be configured, and has a default
}

var backends = map[string]backendKeys{
	"memory": {needs: []string{"size"}, takes: []string{"block_size"}, blockSize: true},
	"file":   {needs: []string{"path", "size"}, takes: []string{"block_size"}, blockSize: true},
	"block":  {needs: []string{"path"}},
	"nbd":    {needs: []string{"path"}, takes: []string{"block_size"}, blockSize: true},
	"rbd":    {needs: []string{"path"}, takes: []string{"size", "block_size"}, blockSize: true},
	"gotgt":  {needs: []string{"path", "plugin"}, takes: []string{"options", "block_size"}, blockSize: true},
}

var transports = []string{"iser", "tcp"}

const (
	maxLUN   = 16383 // flat space addressing: SAM-5, section 4.7
	maxAlias = 255   // bytes of a value: RFC 7143, section 6.1
	// A tag is 16 bits (RFC 7143, section 13.9), and as a relative target port
	// identifier not 0 (SPC-4, section 7.8.6.7).
	maxTPGT = 65535
	// maxGroups bounds the target ports of a target port group (SPC-4, section 6.37).
	maxGroups = 255
	// maxSocket is the length of sun_path without its NUL (unix(7)).
	maxSocket = 107
	// maxDrain bounds drain: service managers stop a process that takes too long.
	maxDrain = 10 * time.Minute
)

// Validate returns an error that joins one *Error, without a source, for each problem of c.
// It checks only c, not the files, devices or addresses of the machine.
func (c *Config) Validate() error { return c.check(len(c.Targets)).join() }

// maxErrors bounds the errors about one configuration.
const maxErrors = 100

// join returns the errors as one error; nil for an empty list.
func (l errorList) join() error {
	var errs []error
	for _, e := range l[:min(len(l), maxErrors)] {
		errs = append(errs, e)
	}
	if more := len(l) - maxErrors; more > 0 {
		errs = append(errs, &Error{Source: l[0].Source, Reason: fmt.Sprintf("and %d more errors", more)})
	}
	return errors.Join(errs...)
}

// firsts has the first key of the configuration that has each value.
type firsts[T comparable] map[T]string

// taken returns the key that has the value already. If no key has it, key has it from then on.
func (f firsts[T]) taken(value T, key string) (first string, ok bool) {
	if first, ok = f[value]; !ok {
		f[value] = key
	}
	return first, ok
}

// checkRange refuses a value that is not in [least, most].
func checkRange[T cmp.Ordered](errs *errorList, key string, v, least, most T) {
	if v < least || v > most {
		errs.addf(key, "must be %v to %v, not %v", least, most, v)
	}
}

// check returns the errors of c. The targets from number own on are those of a cluster.
func (c *Config) check(own int) errorList {
	var errs errorList
	c.checkPortals(&errs)
	c.checkTargets(own, &errs)
	c.checkSharedTargets(own, &errs)
	c.checkSecrets(&errs)
	c.checkIPsec(&errs)
	c.checkShortSecrets(&errs)
	c.DiscoveryAuth.check("discovery_auth", &errs)
	c.Limits.check(&errs)
	c.MPA.check(&errs)
	if c.StateDir == "" {
		for i, t := range c.Targets {
			for j, l := range t.LUNs {
				if l.Backend != "memory" {
					errs.addf("state_dir", "is required: %s keeps its data after the process ends, and state_dir keeps its identity", index("targets", i, "luns", j))
				}
			}
		}
	}
	if c.Debug.Listen != "" {
		if addr, reason := parseAddress(c.Debug.Listen, true); reason != "" {
			errs.addf("debug.listen", "%s", reason)
		} else if !addr.loopback() {
			errs.addf("debug.listen", "must be a loopback address, not %q: any host that can connect to it can read the memory of the target", c.Debug.Listen)
		}
	}
	if _, ok := levels[c.Log.Level]; !ok {
		errs.addf("log.level", "must be debug, info, warn or error, not %q", c.Log.Level)
	}
	if c.Log.Format != "text" && c.Log.Format != "json" {
		errs.addf("log.format", "must be text or json, not %q", c.Log.Format)
	}
	if s := c.Log.SlowIO; s != 0 && (s < 100*time.Microsecond || s > time.Hour) {
		errs.addf("log.slow_io", "must be 100us to 1h, or 0 to log no slow commands, not %v", FormatDuration(s))
	}
	c.checkCluster(&errs)
	c.checkControl(&errs)
	c.checkProcess(&errs)
	c.checkListener("metrics.listen", c.Metrics.Listen, &errs)
	c.checkListener("dashboard.listen", c.Dashboard.Listen, &errs)
	for _, w := range c.WebConfigs() {
		if strings.ContainsRune(w.File, 0) {
			errs.addf(w.Key, "must not have a NUL")
		}
	}
	if c.Drain < 0 || c.Drain > maxDrain {
		errs.addf("drain", "must be 0 to %s, not %v", FormatDuration(maxDrain), c.Drain)
	}
	if c.DrainTo != "" {
		c.checkElsewhere("drain_to", c.DrainTo, "the target", &errs)
		if c.Drain == 0 {
			errs.addf("drain_to", "requires drain, the time in which initiators go there")
		}
	}
	return errs
}

func (c *Config) checkCluster(errs *errorList) {
	g := &c.Cluster
	switch {
	case g.Name == "" && len(g.Etcd) > 0:
		errs.addf("cluster.name", "is required with cluster.etcd: a name that no other gateway has")
	case g.Name != "" && len(g.Etcd) == 0:
		errs.addf("cluster.etcd", "is required with cluster.name: the members of etcd, like [http://127.0.0.1:2379]")
	}
	if len(g.Name) > 63 || strings.ContainsFunc(g.Name, func(r rune) bool { return r <= ' ' || r > '~' || r == '/' }) {
		errs.addf("cluster.name", "must have up to 63 printable ASCII characters, without spaces and slashes, not %q", g.Name)
	}
	secure := false
	for i, e := range g.Etcd {
		u, err := url.Parse(e)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.Port() == "" || u.Path != "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
			errs.addf(index("cluster.etcd", i), "must be http://HOST:PORT or https://HOST:PORT, not %q", e)
			continue
		}
		if i == 0 {
			secure = u.Scheme == "https"
		} else if secure != (u.Scheme == "https") {
			errs.addf(index("cluster.etcd", i), "must be http or https like the others, not %q", e)
		}
	}
	if !strings.HasPrefix(g.Prefix, "/") || strings.Trim(g.Prefix, "/") == "" || strings.ContainsFunc(g.Prefix, func(r rune) bool { return r <= ' ' || r > '~' }) {
		errs.addf("cluster.prefix", "must be a slash and a name of printable ASCII characters, like /iser-target, not %q", g.Prefix)
	}
	for _, f := range []struct{ key, path string }{{"ca", g.TLS.CA}, {"cert", g.TLS.Cert}, {"key", g.TLS.Key}} {
		if f.path != "" && !secure {
			errs.addf("cluster.tls."+f.key, "requires https in cluster.etcd")
		}
	}
	if (g.TLS.Cert == "") != (g.TLS.Key == "") {
		errs.addf("cluster.tls", "must have both cert and key, or neither")
	}
	if g.Lease < 2*time.Second || g.Lease > time.Minute {
		errs.addf("cluster.lease", "must be 2s to 1m, not %v", FormatDuration(g.Lease))
	}
	if g.Failback < 0 || g.Failback > 24*time.Hour {
		errs.addf("cluster.failback", "must be 0 to 24h, not %v", FormatDuration(g.Failback))
	}
	if p := g.FenceProgram; p != "" && (!filepath.IsAbs(p) || strings.ContainsRune(p, 0)) {
		errs.addf("cluster.fence_program", "must be an absolute path, not %q", p)
	}
	for i, t := range c.Targets {
		for j, l := range t.LUNs {
			if key := index(index("targets", i)+".luns", j); l.Shared {
				l.checkShared(key, g, errs)
			}
		}
	}
}

// checkShared checks a LUN that gateways share.
func (l *LUN) checkShared(key string, g *Cluster, errs *errorList) {
	switch {
	case g.Name == "":
		errs.addf(key+".shared", "requires cluster.name and cluster.etcd, the group that shares the LUN")
	case l.Backend != "rbd" && l.Backend != "nbd":
		errs.addf(key+".shared", "cannot be set for backend %s: gateways can only share what each of them reaches by rbd or nbd", l.Backend)
	case l.Backend != "rbd" && g.FenceProgram == "":
		errs.addf(key+".shared", "requires cluster.fence_program for backend %s: it keeps a gateway that seems dead from writing to the medium that another one has", l.Backend)
	}
	if l.NAA == "" {
		errs.addf(key+".naa", "is required with shared: the same on all gateways, or initiators take the paths for different disks")
	}
	for _, f := range []struct {
		key string
		set bool
	}{{"removable", l.Removable}, {"checksums", l.Checksums}, {"protection", l.Protection != 0}} {
		if f.set {
			errs.addf(key+"."+f.key, "cannot be set together with shared: the gateways do not share what it keeps")
		}
	}
}

func (c *Config) checkControl(errs *errorList) {
	if s := c.Control.Socket; len(s) > maxSocket || strings.ContainsRune(s, 0) {
		errs.addf("control.socket", "must have at most %d bytes and no NUL", maxSocket)
	}
	c.checkCallers(errs)
	for i, p := range c.Control.Paths {
		if !filepath.IsAbs(p) || filepath.Clean(p) != p {
			errs.addf(index("control.paths", i), "must be an absolute path without . and .., and without a slash at its end, not %q", p)
		}
	}
	c.checkListener("control.listen", c.Control.Listen, errs)
	with := c.remoteControl()
	if with == "" {
		return
	}
	for _, f := range []struct{ key, path string }{
		{"cert", c.Control.TLS.Cert},
		{"key", c.Control.TLS.Key},
		{"client_ca", c.Control.TLS.ClientCA},
	} {
		if f.path == "" {
			errs.addf("control.tls."+f.key, "is required with %s: the path of a PEM file", with)
		}
	}
}

// checkCallers checks the roles of callers. It refuses an address that nobody could use.
func (c *Config) checkCallers(errs *errorList) {
	local, remote := false, false
	for i, a := range c.Control.Access {
		key, named := index("control.access", i), 0
		for _, f := range []struct {
			key, value string
			kind       *bool
		}{
			{"user", a.User, &local}, {"group", a.Group, &local}, {"certificate", a.Certificate, &remote}, {"ou", a.OU, &remote},
		} {
			if f.value == "" {
				continue
			}
			*f.kind = true
			named++
			if f.kind == &local && c.Control.SocketGroup == "" {
				errs.addf(key+"."+f.key, "requires control.socket_group, a group that may connect to the socket and that the callers are in")
			}
		}
		if named != 1 {
			errs.addf(key, "must name one of user, group, certificate and ou")
		}
		if !slices.Contains(Roles, a.Role) {
			errs.addf(key+".role", "must be read, operate or admin, not %q", a.Role)
		}
	}
	if g := c.Control.SocketGroup; g != "" && !local {
		errs.addf("control.socket_group", "gives its members no role. Add one: control.access: [{group: %s, role: read}]", g)
	}
	if with := c.remoteControl(); with != "" && !remote {
		errs.addf("control.access", "is required with %s: no certificate has a role. Add one: control.access: [{certificate: NAME, role: admin}]", with)
	}
}

// remoteControl returns the first key by which callers with certificates reach the control API, or the empty string.
func (c *Config) remoteControl() string {
	if c.Control.Listen != "" {
		return "control.listen"
	}
	if i := slices.IndexFunc(c.Portals, func(p Portal) bool { return p.Control }); i >= 0 {
		return index("portals", i) + ".control"
	}
	return ""
}

// listeners returns the listen addresses other than portals, by key.
func (c *Config) listeners() map[string]string {
	return map[string]string{"debug.listen": c.Debug.Listen, "control.listen": c.Control.Listen, "dashboard.listen": c.Dashboard.Listen, "metrics.listen": c.Metrics.Listen}
}

// A WebConfig is a web configuration file that a configuration names.
type WebConfig struct {
	Key, File string
}

// WebConfigs returns the web configuration files that c names, by their keys.
func (c *Config) WebConfigs() (list []WebConfig) {
	for _, w := range []WebConfig{{"metrics.web_config", c.Metrics.WebConfig}, {"dashboard.web_config", c.Dashboard.WebConfig}} {
		if w.File != "" {
			list = append(list, w)
		}
	}
	return list
}

// checkListener checks a listen address that is not a portal; empty: no listener.
func (c *Config) checkListener(key, listen string, errs *errorList) {
	if listen == "" {
		return
	}
	addr, reason := parseAddress(listen, true)
	if reason != "" {
		errs.addf(key, "%s", reason)
		return
	}
	others := c.listeners()
	delete(others, key)
	for i, p := range c.Portals {
		others[index("portals", i)] = p.Listen
	}
	for _, full := range slices.Sorted(maps.Keys(others)) {
		other, reason := parseAddress(others[full], true)
		switch name := strings.TrimSuffix(full, ".listen"); {
		case reason != "":
		case other == addr && addr.port != 0:
			errs.addf(key, "%q is the address of %s already", listen, name)
			return
		case addr.takes(other) || other.takes(addr):
			errs.addf(key, overlapReason, listen, others[full], name)
			return
		}
	}
}

// overlapReason is the reason of an error about an address that the kernel refuses while the other listens.
const overlapReason = "%q and %q, the address of %s, share a port of the same address. Use one of them, or another port"

func (c *Config) checkPortals(errs *errorList) {
	if len(c.Portals) == 0 {
		errs.addf("portals", "is required: where to listen, like [{listen: 127.0.0.1:3260}]")
	}
	seen := firsts[address]{}
	groups := map[int]bool{}
	for i, p := range c.Portals {
		key := index("portals", i)
		groups[p.TPGT] = true
		switch {
		case p.TPGT < 1 || p.TPGT > maxTPGT:
			errs.addf(key+".tpgt", "must be 1 to %d, not %d", maxTPGT, p.TPGT)
		case len(groups) > maxGroups:
			errs.addf(key+".tpgt", "%d is one portal group too many: at most %d are allowed", p.TPGT, maxGroups)
		}
		if addr, reason := parseAddress(p.Listen, true); reason != "" {
			errs.addf(key+".listen", "%s", reason)
		} else if first, ok := seen.taken(addr, key); ok && addr.port == 0 {
			errs.addf(key+".listen", "%q is the address of %s, too. Give one of them a port or another address", p.Listen, first)
		} else if ok {
			errs.addf(key+".listen", "%q is the address of %s already", p.Listen, first)
		} else {
			for j := range i {
				if other, reason := parseAddress(c.Portals[j].Listen, true); reason == "" && (addr.takes(other) || other.takes(addr)) {
					errs.addf(key+".listen", overlapReason, p.Listen, c.Portals[j].Listen, index("portals", j))
					break
				}
			}
		}
		for j, name := range p.Transports {
			switch key := index(key+".transports", j); {
			case !slices.Contains(transports, name):
				errs.addf(key, "must be iser or tcp, not %q", name)
			case slices.Contains(p.Transports[:j], name):
				errs.addf(key, "%q appears twice", name)
			}
		}
		if p.Control && !p.Serves("iser") {
			errs.addf(key+".control", "requires the transport iser, which %s.transports does not have", key)
		}
		advertised := map[address]bool{}
		for j, a := range p.Advertise {
			key := index(key+".advertise", j)
			addr, reason := parseAddress(a, false)
			switch {
			case reason != "":
				errs.addf(key, "%s", reason)
			case advertised[addr]:
				errs.addf(key, "%q appears twice", a)
			}
			advertised[addr] = true
		}
	}
}

// checkTargets checks the targets. Those from number own on may name portal groups of other gateways.
func (c *Config) checkTargets(own int, errs *errorList) {
	if c.Targets == nil { // could be a mistake, and would remove all targets
		errs.addf("targets", "is required: a list of targets, or [] for no target")
	}
	names, paths, lunNames := firsts[string]{}, firsts[string]{}, firsts[string]{}
	for i, t := range c.Targets {
		key := index("targets", i)
		if name, err := security.NormalizeName(t.Name); t.Name == "" {
			errs.addf(key+".name", "is required: an iSCSI name like iqn.2026-11.io.example:store")
		} else if err != nil {
			errs.addf(key+".name", "%v", err)
		} else if first, ok := names.taken(name, key); ok {
			errs.addf(key+".name", "%q is the name of %s", t.Name, first)
		}
		if len(t.Alias) > maxAlias || strings.ContainsRune(t.Alias, 0) {
			errs.addf(key+".alias", "must have at most %d bytes and no NUL", maxAlias)
		}
		if len(t.Initiators) == 0 {
			errs.addf(key+".initiators", `is required: the initiators that may log in. initiators: ["*"] admits all`)
		}
		checkPatterns(key+".initiators", t.Initiators, errs)
		checkNetworks(key+".networks", t.Networks, errs)
		checkPatterns(key+".resets_for", t.ResetsFor, errs)
		if t.PortalGroups != nil && len(t.PortalGroups) == 0 {
			errs.addf(key+".portal_groups", "is empty: no portal would lead to the target. Remove the key to use all portals")
		}
		for j, tag := range t.PortalGroups {
			switch key := index(key+".portal_groups", j); {
			case slices.Contains(t.PortalGroups[:j], tag):
				errs.addf(key, "%d appears twice", tag)
			case i >= own && (tag < 1 || tag > maxTPGT):
				errs.addf(key, "must be 1 to %d, not %d", maxTPGT, tag)
			case i < own && !slices.ContainsFunc(c.Portals, func(p Portal) bool { return p.TPGT == tag }):
				errs.addf(key, "no portal has the tpgt %d", tag)
			}
		}
		t.checkNegotiation(key, errs)
		t.Auth.check(key+".auth", errs)
		c.checkRedirect(key+".redirect", &t.Redirect, errs)
		checkLUNs(key+".luns", t.LUNs, paths, lunNames, errs)
	}
}

// checkNegotiation checks what a login agrees on at most: RFC 7143, sections 13.12 to 13.14 and 13.17.
func (t *Target) checkNegotiation(key string, errs *errorList) {
	const shortest, longest, mostR2Ts = 512, 1<<24 - 1, 65535
	for _, f := range []struct {
		key string
		v   Size
	}{
		{".first_burst_length", t.FirstBurst},
		{".max_burst_length", t.MaxBurst},
		{".max_recv_data_segment_length", t.MaxRecvSegment},
	} {
		if f.v < shortest || f.v > longest {
			errs.addf(key+f.key, "must be %d to %d bytes, not %d", shortest, longest, f.v)
		}
	}
	if t.MaxOutstandingR2T < 1 || t.MaxOutstandingR2T > mostR2Ts {
		errs.addf(key+".max_outstanding_r2t", "must be 1 to %d, not %d", mostR2Ts, t.MaxOutstandingR2T)
	}
	if t.FirstBurst > t.MaxBurst && t.FirstBurst <= longest && t.MaxBurst >= shortest {
		errs.addf(key+".first_burst_length", "is %d, more than max_burst_length, %d", t.FirstBurst, t.MaxBurst)
	}
}

// checkLUNs checks the LUNs of a target. paths and names are those of all targets.
func checkLUNs(key string, luns []LUN, paths, names firsts[string], errs *errorList) {
	ids := firsts[int]{}
	for i, l := range luns {
		key := index(key, i)
		if l.ID == unset {
			errs.addf(key+".id", "is required: 0 to %d", maxLUN)
		} else if l.ID < 0 || l.ID > maxLUN {
			errs.addf(key+".id", "must be 0 to %d, not %d", maxLUN, l.ID)
		} else if first, ok := ids.taken(l.ID, key); ok {
			errs.addf(key+".id", "%d is the id of %s", l.ID, first)
		}
		l.check(key, errs)
		l.checkNames(key, names, errs)
		l.checkAccess(key, errs)
		l.checkRates(key, errs)
		l.checkThresholds(key, errs)
		side := ".checksums_path"
		if l.Protection != 0 {
			side = ".protection"
		}
		for _, of := range []struct{ key, path string }{{".path", l.Path}, {side, l.SumsPath()}} {
			if of.path == "" {
				continue
			}
			path := of.path
			if i, err := rbduri.Parse(path); err == nil && l.Backend == "rbd" {
				path = "rbd:" + i.Conf + ":" + i.String() // another user of Ceph would open the same image
			} else if abs, err := filepath.Abs(path); err == nil {
				path = abs
			}
			if first, ok := paths.taken(path, key); ok {
				errs.addf(key+of.key, "%q is the path of %s", of.path, first)
			}
		}
	}
}

func (c *Config) checkRedirect(key string, r *Redirect, errs *errorList) {
	if *r == (Redirect{}) {
		return
	}
	c.checkElsewhere(key+".to", r.To, "this target", errs)
}

// checkElsewhere checks an address that initiators are sent to.
func (c *Config) checkElsewhere(key, address, whose string, errs *errorList) {
	to, reason := parseAddress(address, false)
	if reason != "" {
		errs.addf(key, "%s", reason)
		return
	}
	for i, p := range c.Portals {
		for _, a := range append([]string{p.Listen}, p.Advertise...) {
			if own, reason := parseAddress(a, true); reason == "" && own == to {
				errs.addf(key, "%q is portals[%d] of %s: the redirect would loop", address, i, whose)
				return
			}
		}
	}
}

// CheckElsewhere checks an address that initiators are sent to while the target is drained: HOST:PORT, and not
// one of its portals. The error names it by key.
func (c *Config) CheckElsewhere(key, address string) error {
	var errs errorList
	c.checkElsewhere(key, address, "the target", &errs)
	if len(errs) > 0 {
		return errs[0]
	}
	return nil
}

func checkPatterns(key string, patterns []string, errs *errorList) {
	for i, p := range patterns {
		if _, err := security.Compile([]string{p}); err != nil {
			errs.addf(index(key, i), "%v", err)
		}
	}
}

func checkNetworks(key string, networks []string, errs *errorList) {
	if networks != nil && len(networks) == 0 {
		errs.addf(key, "is empty: no initiator could log in. Remove the key to admit all addresses")
	}
	for i, n := range networks {
		if _, err := security.ParseNetworks([]string{n}); err != nil {
			errs.addf(index(key, i), "%v", err)
		} else if slices.Contains(networks[:i], n) {
			errs.addf(index(key, i), "%s appears twice", n)
		}
	}
}

// checkAccess checks the lists of initiators.
func (l *LUN) checkAccess(key string, errs *errorList) {
	if l.Initiators != nil && len(l.Initiators) == 0 {
		errs.addf(key+".initiators", "is empty: no initiator would see the LUN. Remove the key to show it to all that may log in")
	}
	checkPatterns(key+".initiators", l.Initiators, errs)
	if l.ReadOnly && len(l.ReadOnlyFor) > 0 {
		errs.addf(key+".read_only_for", "cannot be combined with read_only, which is for all initiators")
	}
	checkPatterns(key+".read_only_for", l.ReadOnlyFor, errs)
}

// The ranges of rates.
const (
	maxIOPS = 100_000_000
	// minBandwidth lets a command of 16 MiB end before initiators give up on it.
	minBandwidth = 1 << 20
	maxBandwidth = 1 << 40
	maxBurst     = time.Minute
)

// checkRates checks the rates of the LUN and of its initiators.
func (l *LUN) checkRates(key string, errs *errorList) {
	all := l.Rate()
	all.check(key, errs)
	for i := range l.Rates {
		r, key := &l.Rates[i], index(key+".rates", i)
		if len(r.Initiators) == 0 {
			errs.addf(key+".initiators", `is required: the initiators that have this rate. initiators: ["*"] is each one`)
		}
		checkPatterns(key+".initiators", r.Initiators, errs)
		r.check(key, errs)
		if r.IOPS == 0 && r.Bandwidth == 0 && r.MinIOPS == 0 && r.MinBandwidth == 0 {
			errs.addf(key, "has no rate: set iops, bandwidth, min_iops or min_bandwidth")
		}
		if l.IOPS > 0 && r.MinIOPS > l.IOPS {
			errs.addf(key+".min_iops", "must be at most iops of the LUN, %d, not %d", l.IOPS, r.MinIOPS)
		}
		if l.Bandwidth > 0 && r.MinBandwidth > l.Bandwidth {
			errs.addf(key+".min_bandwidth", "must be at most bandwidth of the LUN, %v, not %v", l.Bandwidth, r.MinBandwidth)
		}
	}
}

// check checks the values of r, whose keys are below key.
func (r *Rate) check(key string, errs *errorList) {
	checkRange(errs, key+".iops", r.IOPS, 0, maxIOPS)
	checkRange(errs, key+".min_iops", r.MinIOPS, 0, maxIOPS)
	for _, f := range []struct {
		key   string
		v     Size
		least Size
	}{{"bandwidth", r.Bandwidth, minBandwidth}, {"min_bandwidth", r.MinBandwidth, 1}} {
		if f.v != 0 && (f.v < f.least || f.v > maxBandwidth) {
			errs.addf(key+"."+f.key, "must be %v to %v per second, or 0, not %v", f.least, Size(maxBandwidth), f.v)
		}
	}
	switch {
	case r.Burst < 0 || r.Burst > maxBurst:
		errs.addf(key+".burst", "must be 0 to %s, not %v", FormatDuration(maxBurst), r.Burst)
	case r.Burst > 0 && r.IOPS == 0 && r.Bandwidth == 0:
		errs.addf(key+".burst", "requires iops or bandwidth")
	}
	if r.IOPS > 0 && r.MinIOPS > r.IOPS {
		errs.addf(key+".min_iops", "must be at most iops, %d, not %d", r.IOPS, r.MinIOPS)
	}
	if r.Bandwidth > 0 && r.MinBandwidth > r.Bandwidth {
		errs.addf(key+".min_bandwidth", "must be at most bandwidth, %v, not %v", r.Bandwidth, r.MinBandwidth)
	}
}

// checkThresholds checks the keys of thresholds.
func (l *LUN) checkThresholds(key string, errs *errorList) {
	for _, f := range []struct {
		key   string
		value Size
	}{{".threshold_available", l.ThresholdAvailable}, {".threshold_used", l.ThresholdUsed}} {
		switch {
		case f.value == 0:
		case l.Backend != "memory" && l.Backend != "file":
			errs.addf(key+f.key, "cannot be set for backend %s: only files and memory know the space that they take", l.Backend)
		case f.value < 64<<10:
			errs.addf(key+f.key, "must be at least 64KiB, not %v", f.value)
		}
	}
	if l.Size > 0 && l.ThresholdUsed > l.Size {
		errs.addf(key+".threshold_used", "must be at most size, %v, not %v", l.Size, l.ThresholdUsed)
	}
}

// checkChecksums checks the keys of checksums.
func (l *LUN) checkChecksums(key string, errs *errorList) {
	file, block := l.Backend == "file", l.Backend == "block"
	switch {
	case l.Checksums && l.Backend == "memory":
		errs.addf(key+".checksums", "cannot be set for backend memory: its data ends with the process, and is never read from a disk")
	case l.Checksums && !file && !block:
		errs.addf(key+".checksums", "cannot be set for backend %s: only files and block devices have checksums", l.Backend)
	case l.Checksums && block && l.ChecksumsPath == "":
		errs.addf(key+".checksums_path", "is required for checksums of a block device: the file that gets them, on another file system than one of the device")
	case !l.Checksums && l.ChecksumsPath != "":
		errs.addf(key+".checksums_path", "requires checksums: true")
	}
}

// checkProtection checks the key of protection information.
func (l *LUN) checkProtection(key string, errs *errorList) {
	switch {
	case l.Protection == 0:
	case l.Protection != 1 && l.Protection != 3:
		errs.addf(key+".protection", "must be 0 for none, 1 or 3, not %d", l.Protection)
	case l.Backend != "file" && l.Backend != "memory":
		errs.addf(key+".protection", "cannot be set for backend %s: only files and memory keep protection information. Put a file system on the device and a file in it, or leave protection out", l.Backend)
	case l.Checksums:
		errs.addf(key+".protection", "cannot be set together with checksums: protection information has a CRC of each block already. Leave checksums out")
	}
}

// SumsPath returns the path of the side file, or an empty string without checksums and protection information.
func (l *LUN) SumsPath() string {
	switch {
	case l.Protection != 0 && l.Backend == "file":
		return l.Path + ".pi"
	case !l.Checksums:
		return ""
	case l.ChecksumsPath != "":
		return l.ChecksumsPath
	}
	return l.Path + ".sums"
}

// checkNames checks what the LUN is called towards initiators. Multipath takes two LUNs with one name for one disk, so
// no other of names may have it.
func (l *LUN) checkNames(key string, names firsts[string], errs *errorList) {
	for _, f := range []struct {
		key, value string
		most       int
	}{{"serial", l.Serial, 64}, {"vendor", l.Vendor, 8}, {"product", l.Product, 16}} {
		if len(f.value) > f.most || strings.TrimSpace(f.value) != f.value || strings.ContainsFunc(f.value, func(r rune) bool { return r < ' ' || r > '~' }) {
			errs.addf(key+"."+f.key, "must have up to %d printable ASCII characters, without spaces at the ends, not %q", f.most, f.value)
		}
	}
	naa, err := ParseNAA(l.NAA)
	if err != nil {
		errs.addf(key+".naa", "%v", err)
	}
	for _, f := range []struct{ key, value string }{{"serial", l.Serial}, {"naa", string(naa)}} {
		if f.value == "" {
			continue
		}
		if first, ok := names.taken(f.key+" "+f.value, key); ok {
			errs.addf(key+"."+f.key, "is that of %s: initiators would take the two for one disk", first)
		}
	}
}

// ParseNAA returns the bytes of an NAA designator (SPC-4, section 7.8.6.6) in hexadecimal digits, with or without naa. before
// them; none for an empty text.
func ParseNAA(text string) ([]byte, error) {
	b, err := hex.DecodeString(strings.TrimPrefix(strings.ToLower(text), "naa."))
	if text == "" || err == nil && (len(b) == 16 && b[0]>>4 == 6 || len(b) == 8 && (b[0]>>4 == 2 || b[0]>>4 == 3 || b[0]>>4 == 5)) {
		return b, nil
	}
	return nil, fmt.Errorf("must be 32 hexadecimal digits that begin with 6, or 16 that begin with 2, 3 or 5, not %q", text)
}

// check checks the keys of the backend.
func (l *LUN) check(key string, errs *errorList) {
	b, ok := backends[l.Backend]
	if !ok {
		names := slices.Sorted(maps.Keys(backends))
		known := strings.Join(names, ", ")
		if l.Backend == "" {
			errs.addf(key+".backend", "is required: %s", known)
		} else {
			errs.addf(key+".backend", "must be one of %s, not %q%s", known, l.Backend, suggest(l.Backend, names))
		}
		return
	}
	for _, f := range []struct {
		key string
		set bool
	}{
		{"path", l.Path != ""},
		{"size", l.Size != 0},
		{"block_size", l.BlockSize != 0},
		{"plugin", l.Plugin != ""},
		{"options", l.Options != ""},
	} {
		needed := slices.Contains(b.needs, f.key)
		switch {
		case needed && !f.set:
			errs.addf(key+"."+f.key, "is required for backend %s", l.Backend)
		case f.set && !needed && !slices.Contains(b.takes, f.key):
			errs.addf(key+"."+f.key, "cannot be set for backend %s", l.Backend)
		}
	}
	if l.Backend == "nbd" && l.Path != "" {
		if _, err := nbduri.Parse(l.Path); err != nil {
			errs.addf(key+".path", "%v", err)
		}
	}
	if l.Backend == "rbd" && l.Path != "" {
		if _, err := rbduri.Parse(l.Path); err != nil {
			errs.addf(key+".path", "%v", err)
		}
	}
	switch {
	case l.Identity == "":
	case l.Identity != IdentityFile && l.Identity != IdentityNew:
		errs.addf(key+".identity", "must be %s or %s, not %q", IdentityFile, IdentityNew, l.Identity)
	case l.Backend != "file":
		errs.addf(key+".identity", "cannot be set for backend %s: only files have marks", l.Backend)
	}
	l.checkChecksums(key, errs)
	l.checkProtection(key, errs)
	if !b.blockSize {
		return
	}
	block := cmp.Or(l.BlockSize, 512)
	switch {
	case block != 512 && block != 4096:
		errs.addf(key+".block_size", "must be 512 or 4096, not %d", block)
	case l.Size < 0 || l.Size%Size(block) != 0:
		errs.addf(key+".size", "%d is not a multiple of the block size, %d", l.Size, block)
	}
}

// MaxORD bounds the RDMA Reads that the target has at a time on a connection. siw takes up to 128.
const MaxORD = 128

func (m *MPA) check(errs *errorList) { checkRange(errs, "mpa.unstated_ord", m.UnstatedORD, 1, MaxORD) }

func (l *Limits) check(errs *errorList) {
	checkRange(errs, "limits.queue_depth", l.QueueDepth, 1, 1024)
	checkRange(errs, "limits.max_fpdu", l.MaxFPDU, 512, 64768)
	checkRange(errs, "limits.lost_sessions", l.LostSessions, 1, 1024)
	checkRange(errs, "limits.lost_sessions_per_initiator", l.LostSessionsByName, 1, 1024)
	checkRange(errs, "limits.tokens", l.Tokens, 1, 16384)
	checkRange(errs, "limits.tokens_per_initiator", l.TokensByName, 1, 16384)
	checkRange(errs, "limits.max_connections", l.MaxConnections, 1, 65536)
	checkRange(errs, "limits.reserved_connections", l.Reserved, 0, 65535)
	if l.Reserved > 0 && l.Reserved >= l.MaxConnections {
		errs.addf("limits.reserved_connections", "must be less than max_connections, which is %d, not %d", l.MaxConnections, l.Reserved)
	}
	checkRange(errs, "limits.connections_per_address", l.PerAddress, 0, 65536)
	checkRange(errs, "limits.connections_per_portal", l.PerPortal, 0, 65536)
	checkRange(errs, "limits.sessions_per_initiator", l.Sessions, 1, 65536)
	checkRange(errs, "limits.sessions_per_user", l.PerUser, 0, 65536)
	checkRange(errs, "limits.discovery_per_address", l.Discoveries, 1, 65536)
	checkRange(errs, "limits.log_lines_per_address", l.LogLines, 1, 10000)
	checkRange(errs, "limits.connections_per_session", l.PerSession, 1, 64)
	checkRange(errs, "limits.error_recovery_level", l.ErrorRecoveryLevel, 0, 2)
	checkRange(errs, "limits.registrations_per_initiator", l.Registrations, 1, 512)
	checkRange(errs, "limits.backend_calls", l.BackendCalls, 0, 4096)
	checkRange(errs, "limits.backend_calls_per_lun", l.BackendCallsPerLUN, 1, 1024)
	checkRange(errs, "limits.heavy_commands", l.HeavyCommands, 0, 1024)
	checkRange(errs, "limits.connection_memory", l.ConnectionMemory, 4<<20, 64<<30)
	if least, most := Size(16<<20), Size(1<<44); (l.Memory < least || l.Memory > most) && l.Memory != 0 {
		errs.addf("limits.memory", "must be %v to %v, or 0, not %v", least, most, l.Memory)
	}
	for _, f := range []struct {
		key       string
		v         time.Duration
		low, high time.Duration
		never     bool // 0 is allowed
	}{
		{"login_timeout", l.LoginTimeout, time.Second, time.Hour, false},
		{"nop_interval", l.NOPInterval, time.Second, time.Hour, true},
		{"nop_timeout", l.NOPTimeout, time.Second, time.Hour, false},
		{"poll_time", l.PollTime, time.Microsecond, time.Millisecond, true},
		{"max_time2wait", l.MaxTime2Wait, 2 * time.Second, time.Hour, false},
		{"max_time2retain", l.MaxTime2Retain, time.Second, time.Hour, false},
		{"order_timeout", l.OrderTimeout, time.Second, time.Hour, false},
		{"data_timeout", l.DataTimeout, time.Second, time.Hour, false},
		{"send_timeout", l.SendTimeout, time.Second, time.Hour, false},
		{"task_wait", l.TaskWait, time.Second, time.Hour, false},
		{"state_timeout", l.StateTimeout, time.Second, time.Hour, false},
		{"fence_timeout", l.FenceTimeout, 100 * time.Millisecond, 30 * time.Second, false},
		{"store_timeout", l.StoreTimeout, time.Second, time.Hour, false},
	} {
		if (f.v < f.low || f.v > f.high) && !(f.never && f.v == 0) {
			errs.addf("limits."+f.key, "must be %v to %v%s, not %v", FormatDuration(f.low), FormatDuration(f.high), map[bool]string{true: ", or 0"}[f.never], f.v)
		}
	}
	if l.Descriptors != 0 {
		checkRange(errs, "limits.descriptors", l.Descriptors, 128, 1<<30)
	}
}

// An address is a host:port. host is an IP address in its canonical form, a
// DNS name in lower case, or empty.
type address struct {
	host string
	port uint16
}

func (a address) loopback() bool { return Loopback(a.host) }

// Loopback reports whether only the machine itself reaches an IP address, or localhost.
func Loopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.Unmap().IsLoopback()
}

// takes reports whether a listener on a listens on b, too: a is all addresses of the family of b. A socket on all IPv6
// addresses may leave out IPv4, if a service manager passes it.
func (a address) takes(b address) bool {
	if a.port == 0 || a.port != b.port || a.host == b.host {
		return false
	}
	if a.host == "" {
		return true
	}
	all, err := netip.ParseAddr(a.host)
	one, err2 := netip.ParseAddr(b.host)
	return err == nil && err2 == nil && all.IsUnspecified() && all.Is4() == one.Unmap().Is4()
}

// parseAddress parses an address to listen on, or to connect to, and returns what is wrong
// with it, or "".
func parseAddress(s string, listen bool) (address, string) {
	if s == "" {
		return address{}, "is required: an address like 192.0.2.1:3260"
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		if _, err := netip.ParseAddr(strings.Trim(s, "[]")); err == nil || strings.Count(s, ":") > 1 {
			return address{}, strconv.Quote(s) + " is not host:port. Put an IPv6 address in brackets, like [2001:db8::1]:3260"
		}
		return address{}, strconv.Quote(s) + " is not host:port"
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 && !listen {
		return address{}, strconv.Quote(s) + " has no port from 1 to 65535"
	}
	addr := address{strings.ToLower(host), uint16(n)}
	ip, err := netip.ParseAddr(host)
	switch {
	case err == nil:
		addr.host = ip.String()
		if !listen && ip.IsUnspecified() {
			return address{}, strconv.Quote(s) + " is an address that initiators cannot reach"
		}
		if !listen && ip.Zone() != "" {
			return address{}, strconv.Quote(s) + " has a zone, which means nothing to other hosts"
		}
	case host == "":
		if !listen {
			return address{}, strconv.Quote(s) + " has no host"
		}
	case !isDNSName(addr.host):
		return address{}, strconv.Quote(s) + " has neither an IP address nor a DNS name as its host"
	}
	return addr, ""
}

// isDNSName reports whether s has labels of letters, digits and hyphens (RFC 1123). It
// refuses names of digits and dots, which are wrong IPv4 addresses.
func isDNSName(s string) bool {
	if len(s) > 253 || strings.Trim(s, "0123456789.") == "" {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' ||
			strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
			return false
		}
	}
	return true
}

// index returns the key list[i].list[i]... for its parts.
func index(parts ...any) string {
	var b strings.Builder
	for _, p := range parts {
		switch p := p.(type) {
		case string:
			if b.Len() > 0 {
				b.WriteByte('.')
			}
			b.WriteString(p)
		case int:
			b.WriteString("[" + strconv.Itoa(p) + "]")
		}
	}
	return b.String()
}
