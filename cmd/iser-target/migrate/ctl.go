package migrate

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// A ctlNode is a statement of ctl.conf: words, and a block of statements.
type ctlNode struct {
	line  int
	words []string
	block []ctlNode
}

// maxDepth is how deeply the blocks of ctl.conf nest at most.
const maxDepth = 8

// parseCtl parses the statements up to the end of the block. A line ends a statement, outside of quotes and braces.
func parseCtl(text []byte, pos, line *int, depth int) (list []ctlNode, err error) {
	if depth > maxDepth {
		return nil, fmt.Errorf("line %d: blocks nest too deeply", *line)
	}
	var words []string
	end := func() {
		if len(words) > 0 {
			list = append(list, ctlNode{line: *line, words: words})
			words = nil
		}
	}
	for *pos < len(text) {
		c := text[*pos]
		*pos++
		switch {
		case c == '\n' || c == ';':
			end()
			if c == '\n' {
				*line++
			}
		case c == ' ' || c == '\t' || c == '\r':
		case c == '#':
			for *pos < len(text) && text[*pos] != '\n' {
				*pos++
			}
		case c == '{':
			n := ctlNode{line: *line, words: words}
			words = nil
			if n.block, err = parseCtl(text, pos, line, depth+1); err != nil {
				return nil, err
			}
			list = append(list, n)
		case c == '}':
			end()
			if depth == 0 {
				return nil, fmt.Errorf("line %d: } without {", *line)
			}
			return list, nil
		case c == '"':
			var word strings.Builder
			for {
				if *pos >= len(text) || text[*pos] == '\n' {
					return nil, fmt.Errorf("line %d: a quote does not end", *line)
				}
				c := text[*pos]
				*pos++
				if c == '"' {
					break
				}
				if c == '\\' && *pos < len(text) {
					c = text[*pos]
					*pos++
				}
				word.WriteByte(c)
			}
			words = append(words, word.String())
		default:
			begin := *pos - 1
			for *pos < len(text) && !strings.ContainsRune(" \t\r\n;{}\"#", rune(text[*pos])) {
				*pos++
			}
			words = append(words, string(text[begin:*pos]))
		}
	}
	end()
	if depth > 0 {
		return nil, fmt.Errorf("line %d: a block does not end: } is missing", *line)
	}
	return list, nil
}

// word returns word i of n, or an empty text.
func (n *ctlNode) word(i int) string {
	if i < len(n.words) {
		return n.words[i]
	}
	return ""
}

// ctl reads ctl.conf (ctl.conf(5) of FreeBSD).
func (r *Result) ctl(b []byte) error {
	pos, line := 0, 1
	list, err := parseCtl(b, &pos, &line, 0)
	if err != nil {
		return err
	}
	groups, auths, luns := map[string]int{}, map[string][]ctlNode{}, map[string][]ctlNode{}
	for i := range list {
		n := &list[i]
		switch n.word(0) {
		case "portal-group":
			tag := len(groups) + 1
			groups[n.word(1)] = tag
			for _, s := range n.block {
				switch s.word(0) {
				case "listen", "listen-iser":
					address, err := ctlAddress(s.word(1))
					if err != nil {
						return fmt.Errorf("line %d: listen %s: %w", s.line, s.word(1), err)
					}
					if s.word(0) == "listen" {
						r.portal(address, tag, "tcp")
					} else {
						r.portal(address, tag)
					}
				case "discovery-auth-group":
					if s.word(1) != "no-authentication" {
						r.note("portal-group %s: discovery asked for authentication: set discovery_auth", n.word(1))
					}
				default:
					r.note("line %d: %s of portal-group %s has no counterpart", s.line, s.word(0), n.word(1))
				}
			}
		case "auth-group":
			auths[n.word(1)] = n.block
		case "lun":
			luns[n.word(1)] = n.block
		case "target", "":
		default:
			r.note("line %d: %s has no counterpart", n.line, n.word(0))
		}
	}
	for i := range list {
		if n := &list[i]; n.word(0) == "target" {
			if err := r.ctlTarget(n, groups, auths, luns); err != nil {
				return err
			}
		}
	}
	return nil
}

// ctlAddress returns the address of a listen statement, which may have no port.
func ctlAddress(text string) (string, error) {
	if a, err := netip.ParseAddr(strings.Trim(text, "[]")); err == nil {
		return net.JoinHostPort(a.String(), "3260"), nil
	}
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		return text + ":3260", nil
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return "", fmt.Errorf("%q is no port", port)
	}
	return net.JoinHostPort(host, port), nil
}

func (r *Result) ctlTarget(n *ctlNode, groups map[string]int, auths, luns map[string][]ctlNode) error {
	t := target{Name: n.word(1), LUNs: []disk{}}
	open := false // an authentication was said
	for i := range n.block {
		s := &n.block[i]
		switch s.word(0) {
		case "alias":
			t.Alias = s.word(1)
		case "portal-group":
			tag, ok := groups[s.word(1)]
			if !ok {
				return fmt.Errorf("line %d: portal-group %s is not in the file", s.line, s.word(1))
			}
			t.PortalGroups = append(t.PortalGroups, tag)
		case "auth-group":
			open = true
			block, ok := auths[s.word(1)]
			switch {
			case s.word(1) == "no-authentication":
			case !ok:
				return fmt.Errorf("line %d: auth-group %s is not in the file", s.line, s.word(1))
			}
			for j := range block {
				r.ctlAuth(&t, &block[j])
			}
		case "chap", "chap-mutual", "initiator-name", "initiator-portal", "auth-type":
			open = true
			r.ctlAuth(&t, s)
		case "lun":
			id, err := strconv.Atoi(s.word(1))
			if err != nil {
				return fmt.Errorf("line %d: lun %q is not a number", s.line, s.word(1))
			}
			block := s.block
			if name := s.word(2); name != "" {
				found, ok := luns[name]
				if !ok {
					return fmt.Errorf("line %d: lun %s is not in the file", s.line, name)
				}
				block = found
			}
			l, ok, err := r.ctlDisk(&t, id, block)
			if err != nil {
				return err
			}
			if ok {
				t.LUNs = append(t.LUNs, l)
			}
		default:
			r.note("line %d: %s of target %s has no counterpart", s.line, s.word(0), t.Name)
		}
	}
	if !open {
		r.note("target %s: it has no auth-group, so ctld let nobody in. Set initiators", t.Name)
		t.Initiators = []string{"iqn.2026-11.invalid:nobody"}
	}
	r.doc.Targets = append(r.doc.Targets, t)
	return nil
}

// ctlAuth adds a statement of an auth-group to t.
func (r *Result) ctlAuth(t *target, s *ctlNode) {
	switch s.word(0) {
	case "chap":
		r.user(t, user{Name: s.word(1)}, s.word(2), "", "")
	case "chap-mutual":
		r.user(t, user{Name: s.word(1)}, s.word(2), s.word(3), s.word(4))
	case "initiator-name":
		t.Initiators = append(t.Initiators, s.word(1))
	case "initiator-portal":
		t.Networks = append(t.Networks, s.word(1))
	case "auth-type":
		if s.word(1) == "deny" {
			r.note("target %s: auth-type deny has no counterpart. Set initiators", t.Name)
		}
	default:
		r.note("line %d: %s has no counterpart", s.line, s.word(0))
	}
}

func (r *Result) ctlDisk(t *target, id int, block []ctlNode) (l disk, ok bool, err error) {
	l = disk{ID: id, Backend: "file", Vendor: "FREEBSD", Product: "CTLDISK"}
	for i := range block {
		s := &block[i]
		key, value := s.word(0), s.word(1)
		if key == "option" {
			key, value = "option "+s.word(1), s.word(2)
		}
		switch key {
		case "path":
			if l.Path = value; strings.HasPrefix(value, "/dev/") {
				l.Backend = "block"
			}
		case "size":
			if l.Size = value; value != "" && strings.ContainsAny(value[len(value)-1:], "KMGTPkmgtp") {
				l.Size = strings.ToUpper(value) + "iB"
			}
		case "blocksize":
			if n, err := strconv.Atoi(value); err != nil {
				return l, false, fmt.Errorf("line %d: blocksize %q is not a number", s.line, value)
			} else if n != 512 {
				l.BlockSize = n
			}
		case "serial":
			l.Serial = value
		case "backend":
			if value == "ramdisk" {
				l.Backend = "memory"
			}
		case "option naa":
			l.NAA = strings.TrimPrefix(strings.ToLower(value), "0x")
		case "option vendor":
			l.Vendor = value
		case "option product":
			l.Product = value
		case "option readonly":
			l.ReadOnly = value == "on" || value == "true" || value == "yes"
		default:
			r.note("LUN %d of %s: %s has no counterpart", id, t.Name, key)
		}
	}
	if l.Backend == "memory" {
		l.Path = ""
	} else if l.Path == "" {
		r.note("LUN %d of %s: it has no path, and is left out", id, t.Name)
		return l, false, nil
	}
	return l, true, nil
}
