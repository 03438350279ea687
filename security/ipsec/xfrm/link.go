package xfrm

import (
	"math"
	"net/netip"
	"sync"
	"time"
	"unsafe"

	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	linkAge   = 10 * time.Second // for which what is known of an interface counts
	linkDepth = 4                // of interfaces above others, like a VLAN on a bond
	maxLinks  = 256              // addresses that are kept
)

// links keep which interface has an address of the machine, and its speed.
type links struct {
	mu    sync.Mutex
	known map[netip.Addr]aged
}

type aged struct {
	ipsec.Link
	read time.Time
}

// of returns the interface that has an address. It is zero if none has.
func (l *links) of(a netip.Addr) ipsec.Link {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k, ok := l.known[a]; ok && time.Since(k.read) < linkAge {
		return k.Link
	}
	if l.known == nil || len(l.known) >= maxLinks {
		l.known = map[netip.Addr]aged{}
	}
	found := linkWith(a)
	l.known[a] = aged{found, time.Now()}
	return found
}

// linkWith asks the kernel what of says. What it does not answer is unknown.
func linkWith(a netip.Addr) ipsec.Link {
	family := netlink.FAMILY_V6
	if a.Is4() {
		family = netlink.FAMILY_V4
	}
	list, err := netlink.AddrList(nil, family)
	if err != nil {
		return ipsec.Link{}
	}
	for _, x := range list {
		if ip, ok := netip.AddrFromSlice(x.IP); !ok || ip.Unmap() != a {
			continue
		}
		all, err := netlink.LinkList()
		if err != nil {
			return ipsec.Link{}
		}
		for _, link := range all {
			if link.Attrs().Index == x.LinkIndex {
				return ipsec.Link{Name: link.Attrs().Name, Mbits: speed(link, all, linkDepth, speedOf)}
			}
		}
	}
	return ipsec.Link{}
}

// speed returns the speed of an interface in Mbit/s; 0: unknown. A virtual interface has that of the fastest below it: the parent of a VLAN, and the ports of a bond or
// bridge. of asks the driver of an interface. The number that its own driver says means nothing: veth says 10 Gbit/s.
func speed(link netlink.Link, all []netlink.Link, depth int, of func(name string) int) (mbits int) {
	if link.Type() == "device" {
		return of(link.Attrs().Name)
	}
	if depth == 0 || link.Type() == "veth" { // the parent of veth is its peer
		return 0
	}
	for _, below := range all {
		if b := below.Attrs(); b.Index != link.Attrs().Index && (b.Index == link.Attrs().ParentIndex || b.MasterIndex == link.Attrs().Index) {
			mbits = max(mbits, speed(below, all, depth-1, of))
		}
	}
	return mbits
}

// speedOf returns what the driver of an interface says, in Mbit/s; 0: nothing.
func speedOf(name string) int {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	cmd := ethtoolCmd{cmd: unix.ETHTOOL_GSET}
	req := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte // struct ifreq has 40 bytes, or less
	}{data: unsafe.Pointer(&cmd)}
	copy(req.name[:unix.IFNAMSIZ-1], name)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req))); errno != 0 {
		return 0
	}
	return cmd.mbits()
}

// An ethtoolCmd is struct ethtool_cmd of linux/ethtool.h.
type ethtoolCmd struct {
	cmd, supported, advertising uint32
	speed                       uint16
	_                           [6]byte // duplex to mdio_support
	_, _                        uint32
	speedHigh                   uint16
	_                           [2]byte
	_                           uint32
	_                           [2]uint32
}

// mbits returns the speed; 0: unknown, which drivers say as -1 in 16 or 32 bits.
func (c *ethtoolCmd) mbits() int {
	n := uint32(c.speedHigh)<<16 | uint32(c.speed)
	if n == math.MaxUint32 || n == math.MaxUint16 {
		return 0
	}
	return int(min(n, math.MaxInt32))
}
