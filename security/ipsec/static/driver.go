package static

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/iser-target/iser-target/security/ipsec/xfrm"
	"golang.org/x/sys/unix"
)

// Name is the value of ipsec.driver.
const Name = "static"

// lockName is an abstract socket, which each network namespace has for itself and the kernel removes when the process ends.
const lockName = "@iser-target/ipsec-static"

// A Driver has SAs and policies in the kernel until Close.
type Driver struct {
	*xfrm.Driver
	kernel kernel
	lock   net.Listener

	mu       sync.Mutex // is held while SAs and policies change
	states   []installed
	policies []demand
	detached bool // another process may have the lock
	gone     bool // Close was called
}

// New installs what c says. What a process before it left, and is the same, stays as it is, so that sequence numbers continue; the rest of that is
// removed. After an error all of that stays, as far as the kernel allows, and nothing new of c is installed: the process before may continue.
// New waits until another process in the network namespace has closed or detached the driver, or ctx ends.
func New(ctx context.Context, c Config) (*Driver, error) { return open(ctx, linux{}, c) }

func open(ctx context.Context, k kernel, c Config) (*Driver, error) {
	lock, err := acquire(ctx)
	if err != nil {
		return nil, err
	}
	d := &Driver{Driver: xfrm.New(), kernel: k, lock: lock}
	if err = d.find(); err == nil {
		err = d.Apply(c)
	}
	if err != nil {
		return nil, errors.Join(err, d.leave())
	}
	return d, nil
}

// find takes what a process before has left for what the driver has installed.
func (d *Driver) find() error {
	states, err := d.kernel.states()
	if err != nil {
		return fmt.Errorf("ipsec driver static: %w", err)
	}
	for _, s := range states {
		if own(s.ReqID) {
			d.states = append(d.states, s)
		} else {
			s.keys.wipe()
		}
	}
	policies, err := d.kernel.policies()
	if err != nil {
		return fmt.Errorf("ipsec driver static: %w", err)
	}
	d.policies = slices.DeleteFunc(policies, func(p demand) bool { return !own(p.ReqID) })
	return nil
}

func acquire(ctx context.Context) (net.Listener, error) {
	for {
		lock, err := net.Listen("unix", lockName)
		if err == nil {
			return lock, nil
		}
		if !errors.Is(err, unix.EADDRINUSE) {
			return nil, fmt.Errorf("ipsec driver static: lock: %w", err)
		}
		t := time.NewTimer(20 * time.Millisecond)
		select {
		case <-ctx.Done():
			t.Stop()
			return nil, errors.New("ipsec driver static: another process in this network namespace has it. Stop that process first")
		case <-t.C:
		}
	}
}

// Name returns "static".
func (*Driver) Name() string { return Name }

// Apply replaces what is installed by what c says. What both have stays as it is. After an error the driver has what it had before, as far as the
// kernel allows.
func (d *Driver) Apply(c Config) error {
	if err := c.Validate(); err != nil {
		return fmt.Errorf("ipsec.static: %w", err)
	}
	states, err := c.states()
	if err != nil {
		return fmt.Errorf("ipsec.static: %w", err)
	}
	var policies []demand
	for _, p := range c.Policies {
		policies = append(policies, demandOf(p))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gone || d.detached {
		return errors.New("ipsec driver static: it is closed, or another process has it")
	}
	if err := d.become(states, policies); err != nil {
		return fmt.Errorf("ipsec driver static: %w", errors.Join(err, d.become(d.states, d.policies)))
	}
	wipe(d.states)
	d.states, d.policies = states, policies
	return nil
}

func wipe(list []installed) {
	for _, s := range list {
		s.keys.wipe()
	}
}

// states reads the keys.
func (c Config) states() ([]installed, error) {
	var all []installed
	for i, sa := range c.SAs {
		suite, err := ipsec.ParseSuite(sa.Suite)
		if err != nil {
			return nil, fmt.Errorf("sas[%d]: %w", i, err)
		}
		k, err := readKeys(sa.KeyFile, suite)
		if err != nil {
			return nil, fmt.Errorf("sas[%d]: %w", i, err)
		}
		// A packet must not fit the SA of the other direction, too.
		if j := slices.IndexFunc(all, func(o installed) bool { return o.keys.equal(k) }); j >= 0 {
			return nil, fmt.Errorf("sas[%d]: key file %s has the keys of sas[%d]. Each SA needs its own", i, sa.KeyFile, j)
		}
		all = append(all, installed{keys: k, SA: ipsec.SA{
			SPI: sa.SPI, Source: sa.Source, Destination: sa.Destination, ReqID: ReqIDBase + sa.ReqID, Mode: sa.Mode,
			Encryption: suite.Encryption, Authentication: suite.Authentication, ESN: sa.ESN, ReplayWindow: sa.window(),
		}})
	}
	return all, nil
}

// become makes what the kernel has of this driver equal to states and policies. Policies come before SAs and leave after them, so that no
// packet leaves in clear text meanwhile. Preconditions: d.mu is held.
func (d *Driver) become(states []installed, policies []demand) error {
	haveStates, err := d.kernel.states()
	defer wipe(haveStates)
	if err != nil {
		return err
	}
	havePolicies, err := d.kernel.policies()
	if err != nil {
		return err
	}
	for _, p := range policies {
		if slices.Contains(havePolicies, p) {
			continue
		}
		// One of this driver for the same packets, but with another template, makes room.
		for _, h := range havePolicies {
			if own(h.ReqID) && h.String() == p.String() {
				if err := d.kernel.removePolicy(h); err != nil {
					return xfrm.Explain("remove the policy "+h.String(), err)
				}
			}
		}
		if err := d.kernel.addPolicy(p); errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("policy %v: another program has one for the same packets. Run: ip xfrm policy delete %v", p, p)
		} else if err != nil {
			return xfrm.Explain("add the policy "+p.String(), err)
		}
	}
	for _, h := range haveStates {
		if own(h.ReqID) && !slices.ContainsFunc(states, h.same) {
			if err := d.kernel.removeState(h); err != nil {
				return xfrm.Explain(fmt.Sprintf("remove the SA 0x%x to %v", h.SPI, h.Destination), err)
			}
		}
	}
	for _, s := range states {
		if slices.ContainsFunc(haveStates, s.same) {
			continue
		}
		if err := d.kernel.addState(s); errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("SA 0x%x to %v: another program has one with this SPI. Run: ip xfrm state delete src %v dst %v proto esp spi 0x%x",
				s.SPI, s.Destination, s.Source, s.Destination, s.SPI)
		} else if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.ENOSYS) {
			return errors.Join(append([]error{fmt.Errorf("cannot add the SA 0x%x to %v with %s: %w", s.SPI, s.Destination, s.SA.String(), err)}, xfrm.Check()...)...)
		} else if err != nil {
			return xfrm.Explain(fmt.Sprintf("add the SA 0x%x to %v", s.SPI, s.Destination), err)
		}
	}
	for _, h := range havePolicies {
		if own(h.ReqID) && !slices.Contains(policies, h) && !slices.ContainsFunc(policies, func(p demand) bool { return p.String() == h.String() }) {
			if err := d.kernel.removePolicy(h); err != nil {
				return xfrm.Explain("remove the policy "+h.String(), err)
			}
		}
	}
	return nil
}

// Check returns what the kernel lacks, and what of the driver somebody removed. The driver does not install that again: the peer has seen the sequence
// numbers that would follow.
func (d *Driver) Check(ctx context.Context) []error {
	missing := d.Driver.Check(ctx)
	d.mu.Lock()
	defer d.mu.Unlock()
	states, err := d.kernel.states()
	defer wipe(states)
	if err != nil {
		return append(missing, err)
	}
	policies, err := d.kernel.policies()
	if err != nil {
		return append(missing, err)
	}
	for _, s := range d.states {
		if !slices.ContainsFunc(states, s.same) {
			missing = append(missing, fmt.Errorf("the SA 0x%x to %v of ipsec.static is gone: another program removed it. "+
				"Give both hosts new keys, and run: systemctl restart iser-target", s.SPI, s.Destination))
		}
	}
	for _, p := range d.policies {
		if !slices.Contains(policies, p) {
			missing = append(missing, fmt.Errorf("the policy %v of ipsec.static is gone: another program removed it. Run: systemctl restart iser-target", p))
		}
	}
	return missing
}

// Close removes what the driver installed, unless Detach left it to another process.
func (d *Driver) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gone {
		return nil
	}
	var err error
	if !d.detached {
		err = d.become(nil, nil)
	}
	return errors.Join(err, d.leave())
}

// Detach leaves what the driver installed to the next process, which takes it over as it is. Look and Watch work as before, because that
// process may fail. Then Attach follows, and otherwise Close.
func (d *Driver) Detach() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gone || d.detached {
		return nil
	}
	d.detached = true
	return d.lock.Close()
}

// Attach ends what Detach began. It installs again what is missing, with the keys that were read before: the process may have lost the right to the
// files. It waits until the other process has ended or closed the driver, or ctx ends.
func (d *Driver) Attach(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gone || !d.detached {
		return nil
	}
	lock, err := acquire(ctx)
	if err != nil {
		return err
	}
	d.lock, d.detached = lock, false
	if err := d.become(d.states, d.policies); err != nil {
		return fmt.Errorf("ipsec driver static: %w", err)
	}
	return nil
}

// leave gives the lock up, and installs or removes nothing. Preconditions: d.mu is held, or nobody else knows d.
func (d *Driver) leave() error {
	d.gone = true
	wipe(d.states)
	d.states, d.policies = nil, nil
	err := d.Driver.Close()
	if !d.detached {
		err = errors.Join(err, d.lock.Close())
	}
	return err
}
