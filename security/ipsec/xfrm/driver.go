package xfrm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Name is the value of ipsec.driver.
const Name = "xfrm"

// A Driver reads SAs and policies from the kernel. While Watch runs it keeps what it read until the kernel reports a change, so one
// dump serves all flows.
type Driver struct {
	mu       sync.Mutex // is held during a dump, so that others wait for its result
	kept     *snapshot  // nil: read again
	read     time.Time  // when kept was read
	notices  *os.File   // the socket of Watch; nil: Watch does not run
	dumps    uint64
	closed   bool
	watching sync.Mutex
	links    links
}

// young is the age up to which a dump says what is missing, unless there is a notice. When the keys of hundreds of connections are
// gone, a few dumps serve all of them.
const young = 20 * time.Millisecond

// New returns a Driver. It opens nothing yet.
func New() *Driver { return &Driver{} }

// Name returns "xfrm".
func (*Driver) Name() string { return Name }

// Check tries what the driver needs. It changes nothing.
func (*Driver) Check(context.Context) []error { return Check() }

// Close ends nothing that runs: Watch ends with its context.
func (d *Driver) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed, d.kept = true, nil
	return nil
}

// Look returns what protects f now. The kernel does not say IKE identities. SA.IKE is an inference: an SA with a lifetime in time counts as made
// by a key exchange, because IKE daemons set one and manual keys have none.
func (d *Driver) Look(ctx context.Context, f ipsec.Flow) (ipsec.Protection, error) {
	p, err := d.look(ctx, f)
	if err == nil {
		p.Link = d.links.of(f.Local.Addr().Unmap().WithZone(""))
	}
	return p, err
}

// look does what Look says about SAs and policies.
func (d *Driver) look(ctx context.Context, f ipsec.Flow) (ipsec.Protection, error) {
	if err := ctx.Err(); err != nil {
		return ipsec.Protection{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return ipsec.Protection{}, os.ErrClosed
	}
	if d.kept != nil && !d.pending() {
		p := d.kept.look(f)
		// Between a new SA and its notice a packet can arrive. So only a young dump shows that something is missing.
		if p.InPolicy && p.OutPolicy && len(p.In) > 0 && len(p.Out) > 0 || time.Since(d.read) < young {
			return p, nil
		}
	}
	began := time.Now()
	s, err := dump()
	if err != nil {
		d.kept = nil
		return ipsec.Protection{}, err
	}
	d.dumps++
	d.kept = nil
	if d.notices != nil {
		d.kept, d.read = s, began
	}
	return s.look(f), nil
}

// pending reports whether the kernel has queued notices that Watch has not read. Preconditions: d.mu is held.
func (d *Driver) pending() bool {
	if d.notices == nil {
		return true
	}
	raw, err := d.notices.SyscallConn()
	if err != nil {
		return true
	}
	pending := true
	if err := raw.Control(func(fd uintptr) {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 0)
		pending = err != nil || n != 0
	}); err != nil {
		return true
	}
	return pending
}

// Watch calls changed after the kernel reported a change, until ctx ends. Notices about SAs in transport mode name both addresses, since
// one of them is the peer's. Those in tunnel mode may affect each flow.
func (d *Driver) Watch(ctx context.Context, changed func(ipsec.Change)) error {
	d.watching.Lock()
	defer d.watching.Unlock()
	socket, err := subscribe()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { socket.Close() })
	defer func() {
		d.mu.Lock()
		d.notices, d.kept = nil, nil
		d.mu.Unlock()
		stop()
		socket.Close()
	}()
	raw, err := socket.SyscallConn()
	if err != nil {
		return err
	}
	d.mu.Lock()
	d.notices, d.kept = socket, nil
	d.mu.Unlock()
	// What changed before the subscription is unknown.
	changed(ipsec.Change{Kind: ipsec.Lost})
	buffer := make([]byte, 64<<10)
	for {
		changes, err := receive(raw, buffer)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return fmt.Errorf("notices of the kernel: %w", err)
		}
		if len(changes) == 0 {
			continue
		}
		d.mu.Lock()
		d.kept = nil
		d.mu.Unlock()
		for _, c := range changes {
			changed(c)
		}
	}
}

// subscribe opens a socket for the kernel's notices.
func subscribe() (*os.File, error) {
	return subscribeTo(unix.NETLINK_XFRM, nl.XFRMNLGRP_ACQUIRE, nl.XFRMNLGRP_EXPIRE, nl.XFRMNLGRP_SA, nl.XFRMNLGRP_POLICY)
}

// subscribeTo opens a socket for notices of groups of a protocol of netlink.
func subscribeTo(protocol int, groups ...uint) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return nil, explain("open a netlink socket", err)
	}
	var mask uint32
	for _, g := range groups {
		mask |= 1 << (g - 1)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: mask}); err != nil {
		unix.Close(fd)
		return nil, explain("subscribe to notices", err)
	}
	return os.NewFile(uintptr(fd), "notices of the kernel"), nil
}

// receive waits for a datagram of the kernel and returns what it says. The result is empty for one that says nothing about protection.
func receive(raw syscall.RawConn, buffer []byte) ([]ipsec.Change, error) {
	n, lost, err := receiveFrom(raw, buffer)
	switch {
	case err != nil:
		return nil, err
	case lost:
		return []ipsec.Change{{Kind: ipsec.Lost}}, nil
	case n == 0:
		return nil, nil
	}
	changes := parseNotices(buffer[:n])
	clear(buffer[:n]) // notices of new SAs have keys in them
	return changes, nil
}

// receiveFrom waits for a datagram of the kernel and returns its size, 0 for one of another process. lost says that the kernel had no room for notices.
func receiveFrom(raw syscall.RawConn, buffer []byte) (n int, lost bool, err error) {
	var from unix.Sockaddr
	if werr := raw.Read(func(fd uintptr) bool {
		n, from, err = unix.Recvfrom(int(fd), buffer, 0)
		return err != unix.EAGAIN && err != unix.EINTR
	}); werr != nil {
		return 0, false, werr
	}
	if err == unix.ENOBUFS {
		return 0, true, nil
	}
	if err != nil {
		return 0, false, err
	}
	if from, ok := from.(*unix.SockaddrNetlink); !ok || from.Pid != 0 {
		return 0, false, nil
	}
	return n, false, nil
}

// parseNotices parses the messages of a datagram. One that it does not understand makes a Lost.
func parseNotices(b []byte) []ipsec.Change {
	messages, err := syscall.ParseNetlinkMessage(b)
	if err != nil {
		return []ipsec.Change{{Kind: ipsec.Lost}}
	}
	var changes []ipsec.Change
	for _, m := range messages {
		changes = append(changes, parseNotice(m.Header.Type, m.Data)...)
	}
	return changes
}

func parseNotice(kind uint16, b []byte) []ipsec.Change {
	switch kind {
	case nl.XFRM_MSG_NEWSA, nl.XFRM_MSG_UPDSA:
		return ofSA(ipsec.Added, b)
	case nl.XFRM_MSG_EXPIRE:
		return ofSA(ipsec.Expired, b)
	case nl.XFRM_MSG_DELSA:
		const sizeID = 24 // xfrm_usersa_id; the SA follows as an attribute
		if len(b) < sizeID {
			return []ipsec.Change{{Kind: ipsec.Lost}}
		}
		changes := []ipsec.Change{{Kind: ipsec.Removed}}
		if err := attributes(b[sizeID:], func(kind uint16, v []byte) error {
			if kind == nl.XFRMA_SA {
				changes = ofSA(ipsec.Removed, v)
			}
			return nil
		}); err != nil {
			return []ipsec.Change{{Kind: ipsec.Lost}}
		}
		return changes
	case nl.XFRM_MSG_FLUSHSA:
		return []ipsec.Change{{Kind: ipsec.Removed}}
	case nl.XFRM_MSG_NEWPOLICY, nl.XFRM_MSG_UPDPOLICY, nl.XFRM_MSG_DELPOLICY, nl.XFRM_MSG_POLEXPIRE, nl.XFRM_MSG_FLUSHPOLICY:
		return []ipsec.Change{{Kind: ipsec.Policy}}
	case nl.XFRM_MSG_ACQUIRE:
		return []ipsec.Change{{Kind: ipsec.Acquired}}
	}
	return nil
}

func ofSA(kind ipsec.ChangeKind, b []byte) []ipsec.Change {
	if len(b) < sizeSA {
		return []ipsec.Change{{Kind: ipsec.Lost}}
	}
	s, err := parseSA(b[:sizeSA])
	if err != nil {
		return []ipsec.Change{{Kind: ipsec.Lost}}
	}
	if s.Mode != ipsec.Transport || !s.Source.IsValid() {
		return []ipsec.Change{{Kind: kind, SPI: s.SPI}}
	}
	var changes []ipsec.Change
	for _, a := range []netip.Addr{s.Source, s.Destination} {
		changes = append(changes, ipsec.Change{Kind: kind, SPI: s.SPI, Remote: a})
	}
	return changes
}

// dumpTries bounds how often a dump begins again, because the lists changed during it.
const dumpTries = 5

// dump reads all policies and SAs.
func dump() (*snapshot, error) {
	var s *snapshot
	var err error
	for range dumpTries {
		s = &snapshot{}
		// SAs come first: a policy that is newer than they are misses keys at most, and the change of keys makes a notice.
		if err = list(nl.XFRM_MSG_GETSA, nl.XFRM_MSG_NEWSA, parseSA, &s.states); err == nil {
			err = list(nl.XFRM_MSG_GETPOLICY, nl.XFRM_MSG_NEWPOLICY, parsePolicy, &s.policies)
		}
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	if err != nil {
		return nil, explain("read SAs and policies", err)
	}
	// The kernel lists the newest first, which decides between two of the same second.
	slices.SortStableFunc(s.states, func(a, b state) int { return cmp.Compare(unixTime(b.Added), unixTime(a.Added)) })
	return s, nil
}

func unixTime(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.Unix()
}

// list appends what the kernel answers to a request for a dump.
func list[T any](request int, answer uint16, parse func([]byte) (T, error), to *[]T) error {
	req := nl.NewNetlinkRequest(request, unix.NLM_F_DUMP)
	var bad error
	err := req.ExecuteIter(unix.NETLINK_XFRM, answer, func(m []byte) bool {
		x, err := parse(m)
		clear(m) // SAs have keys in them
		if err != nil {
			bad = err
			return false
		}
		*to = append(*to, x)
		return true
	})
	return errors.Join(err, bad)
}

// List returns all SAs of the kernel that packets can use, the newest first.
func List() ([]ipsec.SA, error) {
	s, err := dump()
	if err != nil {
		return nil, err
	}
	var all []ipsec.SA
	for _, x := range s.states {
		if x.usable() {
			all = append(all, x.SA)
		}
	}
	return all, nil
}

// Explain adds to an error of the kernel what is missing, and the command that mends it.
func Explain(action string, err error) error { return explain(action, err) }

// A Demand is a policy of the machine with one template, which requires ESP for packets in one direction.
type Demand struct {
	Out                             bool
	Source, Destination             netip.Prefix // of the packets
	SourcePort, DestinationPort     int          // 0: each
	TCP                             bool         // false: each protocol
	Mode                            ipsec.Mode
	ReqID                           int
	TunnelSource, TunnelDestination netip.Addr // of a tunnel
}

// Demands returns the policies of the kernel that a Demand can describe.
func Demands() ([]Demand, error) {
	s, err := dump()
	if err != nil {
		return nil, err
	}
	var all []Demand
	for _, p := range s.policies {
		if d, ok := p.demand(); ok {
			all = append(all, d)
		}
	}
	return all, nil
}

func (p policy) demand() (Demand, bool) {
	x := p.selector
	whole := func(mask uint16) bool { return mask == 0 || mask == 0xffff }
	if len(p.templates) != 1 || p.dir != dirIn && p.dir != dirOut || p.action != 0 || p.mark || p.sub || p.ifID != 0 || x.badPrefix || x.ifindex != 0 ||
		!whole(x.smask) || !whole(x.dmask) || x.proto != 0 && x.proto != unix.IPPROTO_TCP {
		return Demand{}, false
	}
	t := p.templates[0]
	if t.proto != unix.IPPROTO_ESP || t.optional || t.spi != 0 {
		return Demand{}, false
	}
	d := Demand{
		Out: p.dir == dirOut, Source: x.source, Destination: x.dst, SourcePort: int(x.sport & x.smask), DestinationPort: int(x.dport & x.dmask),
		TCP: x.proto != 0, Mode: t.mode, ReqID: int(t.reqID),
	}
	if t.mode != ipsec.Transport {
		d.TunnelSource, d.TunnelDestination = t.source, t.dst
	}
	return d, true
}
