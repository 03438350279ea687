package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/handover"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/security/ipsec"
)

// secondName is how the name of the second listener of a portal ends.
const secondName = " IPv4"

// openListeners opens the listeners of p as c describes it. A portal on all addresses that requires IPsec has one for each address
// family: the policy of a socket is of one family. The kernel has the policies before it accepts a connection.
func (d *Daemon) openListeners(p *portal, c config.Portal, policy listenerPolicy) error {
	first, second := "tcp", ""
	p.policy = policy
	if policy.on && everywhere(c.Listen) {
		first, second = "tcp6", "tcp4"
	}
	l, err := d.openListener(p, c, portalName+c.Listen, first)
	if second != "" && noIPv6(err) {
		l, err = d.openListener(p, c, portalName+c.Listen, second)
		second = ""
	}
	if err != nil {
		return err
	}
	p.l, p.v4 = l, nil
	if second == "" || p.passed && !d.hasSecond(c) { // the service manager may have passed one of one family alone
		return nil
	}
	if p.v4, err = d.openListener(p, c, portalName+c.Listen+secondName, second); err != nil {
		p.v4 = nil
		return errors.Join(err, l.Close())
	}
	return nil
}

// hasSecond reports whether the service manager, or the process before, passed a second socket for the portal.
func (d *Daemon) hasSecond(c config.Portal) bool {
	return d.listeners.Received(portalName+c.Listen+secondName) || slices.ContainsFunc(d.manager.Sockets, d.manager.Matches(c.Listen))
}

// openListener opens one listener of p.
func (d *Daemon) openListener(p *portal, c config.Portal, name, network string) (*handover.Listener, error) {
	l, received, err := d.listeners.Listen(name, func() (net.Listener, error) {
		s := d.manager.Match(c.Listen)
		if s == nil {
			lc := net.ListenConfig{Control: func(network, _ string, raw syscall.RawConn) error {
				if p.policy.on && network == "tcp6" { // it would take IPv4, too, if it were on all addresses
					if err := onSocket(raw, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1) }); err != nil {
						return err
					}
				}
				return d.prepare(raw, p.policy)
			}}
			return lc.Listen(context.Background(), network, c.Listen)
		}
		p.passed = true
		return s.Listener, nil
	})
	if err != nil {
		return nil, err
	}
	if received && slices.Contains(d.received.Passed, c.Listen) {
		p.passed = true
	}
	if received || p.passed { // others have made the socket
		raw, err := l.Listener.(*net.TCPListener).SyscallConn()
		if err == nil && p.policy.on {
			err = oneFamily(raw)
		}
		if err == nil {
			err = d.prepare(raw, p.policy)
		}
		if err != nil {
			return nil, errors.Join(err, l.Close())
		}
	}
	return l, nil
}

// everywhere reports whether a portal with that address listens on all addresses, as net.Listen has it.
func everywhere(listen string) bool {
	host, _, err := net.SplitHostPort(listen)
	if err != nil {
		return false
	}
	ip, err := netip.ParseAddr(host)
	return host == "" || err == nil && ip.IsUnspecified()
}

// noIPv6 reports whether err says that the machine has no IPv6.
func noIPv6(err error) bool {
	return errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EADDRNOTAVAIL)
}

// A listenerPolicy is the policy of the sockets of a portal. The zero value is none.
type listenerPolicy struct {
	on   bool
	mode ipsec.Mode
}

// policyOf returns the policy that the sockets of a portal have by cfg.
func policyOf(cfg *config.Config, c config.Portal) listenerPolicy {
	if c.Demand() != ipsec.Required || !cfg.IPsec.Drops() {
		return listenerPolicy{}
	}
	return listenerPolicy{true, cmp.Or(cfg.IPsec.Profile(c.IPsecProfile).Mode, ipsec.Tunnel)}
}

// prepare sets the options and the policy of the socket of a portal, which accepted connections inherit.
func (d *Daemon) prepare(raw syscall.RawConn, p listenerPolicy) error {
	if err := setOptions("", "", raw); err != nil || !p.on {
		return err
	}
	return d.ipsec.setListener(raw, p)
}

// setListener sets or clears the policy of the socket of a portal.
func (x *protection) setListener(raw syscall.RawConn, p listenerPolicy) error {
	err := onSocket(raw, func(fd int) error {
		family, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
		switch {
		case err != nil:
			return err
		case !p.on:
			return x.clear(fd, family)
		}
		return x.listener(fd, family, p.mode)
	})
	if err != nil {
		return fmt.Errorf("ipsec: %s: %w", either(p.on, "required", "off"), err)
	}
	return nil
}

var errBothFamilies = errors.New("ipsec: required: the socket is for IPv4 and IPv6 at once, and the kernel checks packets of one of them only. " +
	"Give the socket unit BindIPv6Only=ipv6-only, and a second ListenStream= with the address 0.0.0.0 and the same port")

// oneFamily returns an error if a socket that listens takes connections over IPv4 and IPv6.
func oneFamily(raw syscall.RawConn) error {
	return onSocket(raw, func(fd int) error {
		family, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
		if err != nil || family != unix.AF_INET6 {
			return err
		}
		only, err := unix.GetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY)
		if err == nil && only == 0 {
			err = errBothFamilies
		}
		return err
	})
}

// refreshListeners gives the sockets of portals the policies of the next configuration. A socket for both address families is
// replaced by one for each.
func (c *change) refreshListeners() error {
	for _, p := range c.d.served.portals {
		pc := portalOf(c.cfg, p.cur.Load().cfg.Listen)
		if pc == nil {
			continue
		}
		was, next := p.policy, policyOf(c.cfg, *pc)
		if was == next {
			continue
		}
		if err := c.setPolicy(p, *pc, next); err != nil {
			return fmt.Errorf("portal %s: %w", pc.Listen, err)
		}
		c.onUndo(func() error { return c.setPolicy(p, *pc, was) })
	}
	return nil
}

// setPolicy gives the sockets of p another policy. After an error they have the one before.
func (c *change) setPolicy(p *portal, pc config.Portal, next listenerPolicy) error {
	var raws []syscall.RawConn
	for _, l := range p.listeners() {
		raw, err := l.Listener.(*net.TCPListener).SyscallConn()
		if err != nil {
			return err
		}
		raws = append(raws, raw)
	}
	if next.on {
		switch err := oneFamily(raws[0]); {
		case errors.Is(err, errBothFamilies) && !p.passed:
			return c.replaceListeners(p, pc, next)
		case err != nil:
			return err
		}
	}
	for i, raw := range raws {
		if err := c.d.ipsec.setListener(raw, next); err != nil {
			for _, done := range raws[:i] {
				err = errors.Join(err, c.d.ipsec.setListener(done, p.policy))
			}
			return err
		}
	}
	p.policy = next
	return nil
}

// replaceListeners closes the listeners of p and opens others with that policy. Connections stay.
func (c *change) replaceListeners(p *portal, pc config.Portal, next listenerPolicy) error {
	if err := p.close(); err != nil {
		return err
	}
	fresh := &portal{}
	err := c.d.openListeners(fresh, pc, next)
	if err != nil {
		err = errors.Join(err, c.d.openListeners(fresh, pc, p.policy))
	}
	if fresh.l == nil {
		return err
	}
	c.write(func() { p.l, p.v4, p.policy = fresh.l, fresh.v4, fresh.policy })
	c.accept(p)
	return err
}
