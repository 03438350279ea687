package daemon

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/iser-target/iser-target/security/ipsec/exec"
	"github.com/iser-target/iser-target/security/ipsec/static"
	"github.com/iser-target/iser-target/security/ipsec/vici"
	"github.com/iser-target/iser-target/security/ipsec/xfrm"
)

// defaultIPsecHooks are those of a target.
var defaultIPsecHooks = ipsecHooks{newDriver: newIPsecDriver, listener: xfrm.SocketPolicy, pin: xfrm.PinPolicy, clear: clearPolicies, blocks: newBlocks}

func newBlocks(failed func(error)) blocker { return xfrm.NewBlocks(failed) }

// newIPsecDriver returns the driver that cfg names.
func newIPsecDriver(cfg *config.Config) (ipsec.Driver, error) {
	switch c := &cfg.IPsec; c.Driver {
	case xfrm.Name:
		return xfrm.New(), nil
	case "vici":
		d := vici.New(xfrm.New(), vici.Options{Socket: c.VICI.Socket, Timeout: min(viciRequest, callTime(c)*2/5)})
		if !c.VICI.Initiate {
			return passive{d}, nil
		}
		return d, nil
	case static.Name:
		ctx, cancel := context.WithTimeout(context.Background(), staticWait)
		defer cancel()
		return static.New(ctx, staticConfig(&c.Static))
	case exec.Name:
		return exec.New(exec.Options{Command: c.Exec.Command, Timeout: c.Exec.Timeout, Kernel: xfrm.New(), ClearText: c.Exec.ClearText})
	}
	return nil, fmt.Errorf("there is no driver %q", cfg.IPsec.Driver)
}

// viciRequest is the longest time of a request to strongSwan. A call of the driver has time for two, so that what the kernel knows counts while
// strongSwan does not answer.
const viciRequest = 2 * time.Second

// staticWait is how long the driver static waits for the process that it follows.
const staticWait = 5 * time.Second

// staticConfig returns c in the form of package static. The configuration is valid.
func staticConfig(c *config.IPsecStatic) (out static.Config) {
	for _, sa := range c.SAs {
		out.SAs = append(out.SAs, static.SA{
			SPI: uint32(sa.SPI), Source: addressOf(sa.Source), Destination: addressOf(sa.Destination), ReqID: sa.ReqID, Mode: ipsec.Mode(sa.Mode),
			Suite: sa.Suite, KeyFile: sa.KeyFile, ESN: sa.ESN, ReplayWindow: sa.ReplayWindow,
		})
	}
	for _, p := range c.Policies {
		out.Policies = append(out.Policies, static.Policy{
			Direction: p.Direction, Source: networkOf(p.Source), Destination: networkOf(p.Destination), Port: p.Port, Mode: ipsec.Mode(p.Mode), ReqID: p.ReqID,
			TunnelSource: addressOf(p.TunnelSource), TunnelDestination: addressOf(p.TunnelDestination),
		})
	}
	return out
}

// addressOf returns a valid address; the zero value for an empty one.
func addressOf(s string) netip.Addr {
	a, err := netip.ParseAddr(s)
	if err != nil {
		return netip.Addr{}
	}
	return a
}

// networkOf returns a valid network, or that of a single address.
func networkOf(s string) netip.Prefix {
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(a, a.BitLen())
	}
	n, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}
	}
	return n
}

// A detacher is a driver that can leave what it has installed to another process, and take it back.
type detacher interface {
	Detach() error
	Attach(context.Context) error
}

// detach leaves what the driver has installed to the next process. After an error, and if that process does not continue, attach
// follows.
func (x *protection) detach() error {
	x.mu.Lock()
	d, ok := x.driver.(detacher)
	x.left = true
	x.mu.Unlock()
	if !ok {
		return nil
	}
	return d.Detach()
}

// attach takes back what detach has left.
func (x *protection) attach() error {
	x.mu.Lock()
	d, ok := x.driver.(detacher)
	x.left = false
	x.mu.Unlock()
	if !ok {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), staticWait)
	defer cancel()
	return d.Attach(ctx)
}

// forget ends the driver in this process, after another process has taken over what detach has left. The keys leave the memory of this process,
// which may live on as a supervisor.
func (x *protection) forget() {
	x.mu.Lock()
	d, ok := x.driver.(detacher)
	driver, limit := x.driver, x.options(&x.settings).Timeout
	x.mu.Unlock()
	if err := x.blocks.Close(true); err != nil {
		x.d.log.Warn("IPsec driver did not end cleanly", eventKey, "ipsec", "reason", err)
	}
	if !ok {
		return
	}
	err := d.Detach() // so that nothing is removed, whatever came before
	if err == nil {
		err = closeDriver(driver, limit)
	}
	if err != nil {
		x.d.log.Warn("IPsec driver did not end cleanly", eventKey, "ipsec", "reason", err)
	}
}

// passive is a driver that does not negotiate keys.
type passive struct{ ipsec.Driver }

// clearPolicies removes the policies of a socket in both directions.
func clearPolicies(fd, family int) error {
	level, option := unix.IPPROTO_IP, unix.IP_XFRM_POLICY
	if family == unix.AF_INET6 {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_XFRM_POLICY
	}
	if err := unix.SetsockoptString(fd, level, option, ""); err != nil {
		return fmt.Errorf("cannot remove the policy of a socket: %w", err)
	}
	return nil
}
