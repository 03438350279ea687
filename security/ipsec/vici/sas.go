package vici

import (
	"net/netip"
	"strconv"
	"time"

	"github.com/strongswan/govici/vici"
)

// A key names an SA of the kernel, as the header of its packets does (RFC 4301, section 4.1).
type key struct {
	spi         uint32
	destination netip.Addr
}

// A record is what strongSwan knows of an SA.
type record struct {
	localID, remoteID string
	lifetime          time.Duration // from the installation to the end; 0: none in time
	gone              time.Time     // when strongSwan was first found without it; zero: it has it
}

// records returns the SAs of the answer to list-sas. It leaves out what it cannot read: those SAs stay unknown.
func records(answer []*vici.Message) map[key]record {
	sas := map[key]record{}
	for _, m := range answer {
		for _, name := range m.Keys() {
			if ike, ok := m.Get(name).(*vici.Message); ok {
				addIKE(sas, ike)
			}
		}
	}
	return sas
}

// addIKE adds the SAs below one IKE SA. Without an identity of the peer the IKE SA is still being negotiated.
func addIKE(sas map[key]record, ike *vici.Message) {
	r := record{localID: text(ike, "local-id"), remoteID: text(ike, "remote-id")}
	local, remote := address(ike, "local-host"), address(ike, "remote-host")
	children, ok := ike.Get("child-sas").(*vici.Message)
	if !ok || r.remoteID == "" {
		return
	}
	for _, name := range children.Keys() {
		child, ok := children.Get(name).(*vici.Message)
		if !ok {
			continue
		}
		r.lifetime = 0
		if left, ok := seconds(child, "life-time"); ok {
			age, _ := seconds(child, "install-time")
			r.lifetime = left + age
		}
		for _, end := range []struct {
			spi         string
			destination netip.Addr
		}{{"spi-in", local}, {"spi-out", remote}} {
			if spi, err := strconv.ParseUint(text(child, end.spi), 16, 32); err == nil && spi != 0 && end.destination.IsValid() {
				sas[key{uint32(spi), end.destination}] = r
			}
		}
	}
}

// text returns the value of a name, or "" if m lacks it.
func text(m *vici.Message, name string) string {
	s, _ := m.Get(name).(string)
	return s
}

// list returns the values of a name.
func list(m *vici.Message, name string) []string {
	l, _ := m.Get(name).([]string)
	return l
}

// address returns the address of a name, without a zone, or the zero Addr.
func address(m *vici.Message, name string) netip.Addr {
	a, err := netip.ParseAddr(text(m, name))
	if err != nil {
		return netip.Addr{}
	}
	return a.Unmap().WithZone("")
}

// maxSeconds bounds the times of an SA: a hundred years.
const maxSeconds = 100 * 365 * 24 * 3600

// seconds returns the time of a name.
func seconds(m *vici.Message, name string) (time.Duration, bool) {
	n, err := strconv.ParseInt(text(m, name), 10, 64)
	if err != nil || n < 0 || n > maxSeconds {
		return 0, false
	}
	return time.Duration(n) * time.Second, true
}
