package xfrm

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// What distinguishes the policies of Blocks from all others of the machine.
const (
	blockPriority = math.MaxUint32 // the weakest one: each other policy wins
	// blockIndex is the index of the first one, and others have one that is up to maxBlocks higher. The last 3 bits are the direction. The kernel takes another
	// index if one is in use.
	blockIndex = 0x69540000 | dirOut
	// maxBlocks bounds the addresses of a machine that portals on all addresses have policies for.
	maxBlocks = 4096
	blockTry  = 5 // times that Blocks reads the addresses of the machine while they change
)

// Blocks are policies of the machine that let no packet of a portal leave which no other policy takes: not the answer to a SYN that came in ESP before the
// policies of the machine were removed, and no RST. They have the weakest priority, so that each policy of an IKE daemon or an administrator wins. A policy is of one
// address of the machine, because packets that it forwards for others with the same port are none of its business. The kernel's notices keep them current: of
// policies that are removed, and of addresses.
type Blocks struct {
	failed func(error)

	mu      sync.Mutex
	portals []netip.AddrPort
	have    map[netip.AddrPort]struct{} // addresses of the machine and ports with policies
	made    int                         // policies
	sockets []*os.File                  // of notices; nil: no policy is wanted
	loops   sync.WaitGroup
}

// NewBlocks returns Blocks without policies. It calls failed when the kernel refuses to restore one.
func NewBlocks(failed func(error)) *Blocks {
	return &Blocks{failed: failed, have: map[netip.AddrPort]struct{}{}}
}

// Add installs the policies of portals. An unspecified address stands for all of its family. The error names the missing capability or
// kernel option.
func (b *Blocks) Add(portals []netip.AddrPort) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	next := slices.Clone(b.portals)
	for _, p := range portals {
		if !slices.Contains(next, p) {
			next = append(next, p)
		}
	}
	return b.set(next)
}

// Keep removes the policies of all portals but those, and installs theirs.
func (b *Blocks) Keep(portals []netip.AddrPort) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	err := b.set(slices.Clone(portals))
	sockets := b.sockets
	if len(portals) == 0 {
		b.sockets = nil
		for _, s := range sockets {
			s.Close()
		}
	}
	return err
}

// Clear removes the policies of portals that a process has left which was killed. It does nothing where the kernel has no policies, or the process has no right
// to change them.
func (b *Blocks) Clear(portals []netip.AddrPort) error {
	if len(portals) == 0 || !loaded() {
		return nil
	}
	stale := Blocks{portals: portals}
	list, err := stale.addresses()
	if powerless(err) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, a := range list {
		for _, p := range blockPolicies(a) {
			switch err := netlink.XfrmPolicyDel(p); {
			case err == nil, errors.Is(err, unix.ENOENT):
			case powerless(err):
				return nil
			default:
				return explain("remove the policy that blocks clear text from "+a.String(), err)
			}
		}
	}
	return nil
}

// powerless reports whether err says that the process has no right to look at policies, or to change them. EAFNOSUPPORT is what a
// service manager that restricts the address families lets sockets of netlink fail with.
func powerless(err error) bool {
	return errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EAFNOSUPPORT)
}

// loaded reports whether the kernel has its module xfrm_user. Without it there are no policies, and a socket for them would load it.
func loaded() bool {
	b, err := os.ReadFile("/proc/self/net/netlink")
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		// The second field is the protocol, and the third one the port, which is 0 for a socket of the kernel.
		if f := strings.Fields(line); len(f) > 2 && f[1] == strconv.Itoa(unix.NETLINK_XFRM) && f[2] == "0" {
			return true
		}
	}
	return false
}

// Close ends the watch over the policies. With leave it leaves them to another process, otherwise it removes them.
func (b *Blocks) Close(leave bool) error {
	var err error
	if leave {
		b.mu.Lock()
		for _, s := range b.sockets {
			s.Close()
		}
		b.sockets, b.portals = nil, nil
		clear(b.have)
		b.mu.Unlock()
	} else {
		err = b.Keep(nil)
	}
	b.loops.Wait()
	return err
}

// set makes portals those that have policies. Preconditions: b.mu is held.
func (b *Blocks) set(portals []netip.AddrPort) error {
	if len(portals) > 0 && b.sockets == nil {
		if err := b.watch(); err != nil {
			return err
		}
	}
	b.portals = portals
	return b.install(false)
}

// install makes the kernel's policies those of b.portals. With again it also installs those that should be there. Preconditions: b.mu is held.
func (b *Blocks) install(again bool) error {
	want, err := b.addresses()
	if err != nil {
		return err
	}
	for _, a := range want {
		if _, had := b.have[a]; had && !again {
			continue
		}
		for _, p := range blockPolicies(a) {
			p.Index = blockIndex + 8*b.made%maxBlocks
			b.made++
			if err := netlink.XfrmPolicyUpdate(p); err != nil {
				return explain("block clear text from "+a.String(), err)
			}
		}
		b.have[a] = struct{}{}
	}
	for a := range b.have {
		if slices.Contains(want, a) {
			continue
		}
		for _, p := range blockPolicies(a) {
			if e := netlink.XfrmPolicyDel(p); e != nil && !errors.Is(e, unix.ENOENT) {
				err = errors.Join(err, explain("remove the policy that blocks clear text from "+a.String(), e))
			}
		}
		delete(b.have, a)
	}
	return err
}

// addresses returns the addresses and ports of b.portals. Preconditions: b.mu is held.
func (b *Blocks) addresses() (want []netip.AddrPort, err error) {
	for _, p := range b.portals {
		if !p.Addr().IsUnspecified() {
			want = append(want, p)
			continue
		}
		family := netlink.FAMILY_V6
		if p.Addr().Is4() {
			family = netlink.FAMILY_V4
		}
		list, err := addressesOf(family)
		if err != nil {
			return nil, err
		}
		for _, a := range list {
			want = append(want, netip.AddrPortFrom(a, p.Port()))
		}
	}
	slices.SortFunc(want, netip.AddrPort.Compare)
	want = slices.Compact(want)
	if len(want) > maxBlocks {
		return nil, fmt.Errorf("the portals have %d addresses, more than %d. Let them listen on single addresses", len(want), maxBlocks)
	}
	return want, nil
}

// addressesOf returns the addresses of the machine in a family, without those of the loopback, whose packets the kernel does not encrypt.
func addressesOf(family int) (list []netip.Addr, err error) {
	var all []netlink.Addr
	for range blockTry {
		if all, err = netlink.AddrList(nil, family); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	if err != nil {
		return nil, explain("read the addresses of the machine", err)
	}
	for _, x := range all {
		if a, ok := netip.AddrFromSlice(x.IP); ok && !a.Unmap().IsLoopback() {
			list = append(list, a.Unmap())
		}
	}
	return list, nil
}

// blockPolicies returns the policies for packets from one address and port. There are two, each for one half of all destinations, so that neither has the
// selector of another program's policy: the kernel has one policy of each selector.
func blockPolicies(from netip.AddrPort) (list []*netlink.XfrmPolicy) {
	a := from.Addr()
	size := a.BitLen()
	for _, first := range []byte{0, 0x80} {
		half := make(net.IP, size/8)
		half[0] = first
		list = append(list, &netlink.XfrmPolicy{
			Src: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(size, size)}, Dst: &net.IPNet{IP: half, Mask: net.CIDRMask(1, size)},
			Proto: unix.IPPROTO_TCP, SrcPort: int(from.Port()), Dir: netlink.XFRM_DIR_OUT, Priority: blockPriority, Action: netlink.XFRM_POLICY_BLOCK,
		})
	}
	return list
}

// watch restores policies that are removed, and follows the addresses of the machine, until the sockets are closed. Preconditions: b.mu is held.
func (b *Blocks) watch() error {
	policies, err := subscribeTo(unix.NETLINK_XFRM, nl.XFRMNLGRP_POLICY)
	if err != nil {
		return err
	}
	addresses, err := subscribeTo(unix.NETLINK_ROUTE, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		policies.Close()
		return err
	}
	b.sockets = []*os.File{policies, addresses}
	b.loops.Go(func() { b.follow(policies, removesBlock) })
	b.loops.Go(func() { b.follow(addresses, func([]byte) bool { return false }) })
	return nil
}

// follow reads notices and installs what they show to be missing. again reports whether a datagram says that policies were removed.
func (b *Blocks) follow(socket *os.File, again func([]byte) bool) {
	raw, err := socket.SyscallConn()
	buffer := make([]byte, 64<<10)
	for err == nil {
		var n int
		var lost bool
		n, lost, err = receiveFrom(raw, buffer)
		if err != nil || n == 0 && !lost {
			continue
		}
		gone := lost || again(buffer[:n])
		b.mu.Lock()
		var failure error
		if slices.Contains(b.sockets, socket) {
			failure = b.install(gone)
		}
		b.mu.Unlock()
		if failure != nil && b.failed != nil {
			b.failed(failure)
		}
	}
	b.mu.Lock()
	open := slices.Contains(b.sockets, socket)
	b.mu.Unlock()
	if open && b.failed != nil {
		b.failed(fmt.Errorf("notices of the kernel: %w", err))
	}
}

// removesBlock reports whether a datagram says that a policy of Blocks was removed, or does not say which one was.
func removesBlock(datagram []byte) bool {
	messages, err := syscall.ParseNetlinkMessage(datagram)
	if err != nil {
		return true
	}
	return slices.ContainsFunc(messages, func(m syscall.NetlinkMessage) bool {
		switch m.Header.Type {
		case nl.XFRM_MSG_FLUSHPOLICY:
			return true
		case nl.XFRM_MSG_DELPOLICY:
			const sizeID = 64 // xfrm_userpolicy_id; the policy follows as an attribute
			weakest := true
			if len(m.Data) < sizeID {
				return true
			}
			if err := attributes(m.Data[sizeID:], func(kind uint16, v []byte) error {
				if kind != nl.XFRMA_POLICY {
					return nil
				}
				p, err := parsePolicy(v)
				weakest = err != nil || p.priority == blockPriority
				return nil
			}); err != nil {
				return true
			}
			return weakest
		}
		return false
	})
}
