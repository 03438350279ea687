package migrate

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// tgt reads targets.conf (targets.conf(5)), which is also what tgt-admin --dump prints.
func (r *Result) tgt(b []byte) error {
	var (
		t        *target
		l        *disk // in a backing-store or direct-store section
		names    []string
		networks []string
		incoming [][2]string
		outgoing [2]string
		next     int
	)
	for i, line := range strings.Split(string(b), "\n") {
		at := i + 1
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		key, value, _ := strings.Cut(strings.Join(strings.Fields(line), " "), " ")
		value = strings.Trim(value, `"`)
		if section, ok := strings.CutPrefix(key, "<"); ok {
			name := strings.TrimSuffix(strings.TrimSuffix(value, ">"), " ")
			switch strings.TrimSuffix(section, ">") {
			case "target":
				if t != nil {
					return fmt.Errorf("line %d: a <target> within another", at)
				}
				t = &target{Name: name, LUNs: []disk{}}
				names, networks, incoming, outgoing, next = nil, nil, nil, [2]string{}, 1
			case "backing-store", "direct-store":
				if t == nil || l != nil {
					return fmt.Errorf("line %d: a <%s> that is not directly in a <target>", at, section)
				}
				l = tgtDisk(section, name, next)
			case "/backing-store", "/direct-store":
				if l == nil {
					return fmt.Errorf("line %d: %s without its begin", at, line)
				}
				next = max(next, l.ID) + 1
				t.LUNs, l = append(t.LUNs, *l), nil
			case "/target":
				if t == nil || l != nil {
					return fmt.Errorf("line %d: %s without its begin", at, line)
				}
				t.Initiators, t.Networks = names, networks
				for _, u := range incoming {
					r.user(t, user{Name: u[0]}, u[1], outgoing[0], outgoing[1])
				}
				r.doc.Targets, t = append(r.doc.Targets, *t), nil
			default:
				return fmt.Errorf("line %d: unknown section %s", at, line)
			}
			continue
		}
		switch {
		case l != nil:
			if err := r.tgtKey(t, l, key, value); err != nil {
				return fmt.Errorf("line %d: %w", at, err)
			}
			continue
		case t == nil:
			if key != "default-driver" || value != "iscsi" {
				r.note("line %d: %s has no counterpart", at, key)
			}
			continue
		}
		switch key {
		case "backing-store", "direct-store":
			t.LUNs = append(t.LUNs, *tgtDisk(key, value, next))
			next++
		case "initiator-name", "initiator-address":
			switch { // tgt-admin --dump prints addresses as names
			case value == "ALL":
			case key == "initiator-address" || isNetwork(value):
				networks = append(networks, value)
			default:
				names = append(names, value)
			}
		case "incominguser", "outgoinguser":
			name, secret, _ := strings.Cut(value, " ")
			if key == "outgoinguser" {
				outgoing = [2]string{name, secret}
			} else {
				incoming = append(incoming, [2]string{name, secret})
			}
		case "driver":
			if value == "iser" {
				r.note("target %s: it serves iSER over iWARP and iSCSI over TCP here. RoCE and InfiniBand have no counterpart", t.Name)
			}
		default:
			r.note("line %d: %s of target %s has no counterpart", at, key, t.Name)
		}
	}
	if t != nil {
		return fmt.Errorf("<target %s> does not end", t.Name)
	}
	return nil
}

// isNetwork reports whether text is an address or a network.
func isNetwork(text string) bool {
	_, err := netip.ParsePrefix(text)
	_, err2 := netip.ParseAddr(text)
	return err == nil || err2 == nil
}

// tgtDisk returns a LUN with what tgt gives each.
func tgtDisk(kind, path string, id int) *disk {
	l := &disk{ID: id, Backend: "file", Path: path, Vendor: "IET", Product: "VIRTUAL-DISK"}
	if kind == "direct-store" || strings.HasPrefix(path, "/dev/") {
		l.Backend = "block"
	}
	return l
}

// tgtKey sets a key of a LUN.
func (r *Result) tgtKey(t *target, l *disk, key, value string) error {
	switch key {
	case "lun":
		n, err := strconv.Atoi(value)
		if err != nil {
			return fmt.Errorf("lun %q is not a number", value)
		}
		l.ID = n
	case "scsi_sn":
		l.Serial = value
	case "vendor_id":
		l.Vendor = value
	case "product_id":
		l.Product = value
	case "readonly":
		l.ReadOnly = value == "1" || value == "on"
	case "write-cache":
		l.WriteThrough = value == "off"
	case "block-size":
		n, err := strconv.Atoi(value)
		if err != nil {
			return fmt.Errorf("block-size %q is not a number", value)
		}
		if n != 512 {
			l.BlockSize = n
		}
	default:
		r.note("LUN %d of %s: %s has no counterpart", l.ID, t.Name, key)
	}
	return nil
}
