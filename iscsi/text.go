package iscsi

import (
	"cmp"
	"net"
	"strconv"
	"strings"

	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/security"
)

// A textExchange is a text negotiation in the full feature phase, which may take several Text
// Requests (RFC 7143, section 6.4). A connection has one at a time.
type textExchange struct {
	open bool
	itt  uint32 // of all its requests
	ttt  uint32 // of the request that continues it
	in   []byte // text of requests with C=1
	out  []byte // rest of an answer that does not fit into one PDU
	neg  *keys.Negotiation

	charged int // bytes of in and out that count
}

// runText answers a Text Request.
func (t *Task) runText() {
	c := t.conn
	c.mu.Lock()
	busy := c.textBusy
	c.textBusy = true
	c.mu.Unlock()
	if busy { // an initiator that does not wait for the answer
		t.rejectRequest(pdu.RejectProtocolError)
		return
	}
	c.pause(c.sess.discovery)
	x := &c.text
	answer, cont, reason := c.textAnswer(t)
	ttt, flags := uint32(pdu.ReservedTag), byte(pdu.FlagF)
	if reason != 0 || t.header().Final() && !cont { // the exchange ends
		c.endText()
	} else {
		x.open, x.itt = true, t.header().ITT()
		if x.ttt++; x.ttt == pdu.ReservedTag {
			x.ttt = 0
		}
		ttt, flags = x.ttt, 0
		if cont {
			flags = pdu.FlagC
		}
	}
	c.mu.Lock()
	c.textBusy = false // before the answer leaves: the next request may follow at once
	c.mu.Unlock()
	if reason != 0 {
		t.rejectRequest(reason)
		return
	}
	h := t.beginPDU(pdu.TextResp, t.header().ITT())
	h.SetFlags(flags)
	h.SetTTT(ttt)
	t.Segment = answer
	c.respond(t)
}

// endText forgets the text of the exchange.
func (c *conn) endText() {
	c.text = textExchange{ttt: c.text.ttt, charged: c.text.charged}
	c.chargeText()
}

// chargeText counts the text that the exchange keeps. It returns false if memory is short.
func (c *conn) chargeText() bool {
	x := &c.text
	n := cap(x.in) + cap(x.out)
	switch {
	case n < x.charged:
		c.budget.discharge(x.charged - n)
	case n > x.charged && !c.budget.charge(n-x.charged):
		return false
	}
	x.charged = n
	return true
}

// textAnswer returns the next part of the answer in the exchange that t begins or continues. cont
// reports whether the text continues in the next PDU. A reason other than 0 rejects the request.
func (c *conn) textAnswer(t *Task) (answer []byte, cont bool, reason pdu.RejectReason) {
	x, h := &c.text, t.header()
	other := x.open && h.ITT() != x.itt
	switch {
	case h.Final() && h.Continue(), // section 6.2
		other && (len(x.in) > 0 || h.TTT() != pdu.ReservedTag): // another request, before the rest of the text or within the exchange
		return nil, false, pdu.RejectProtocolError
	case t.noMemory:
		return nil, false, pdu.RejectOutOfResources
	case h.TTT() == pdu.ReservedTag: // begins, or begins again (section 6.4)
		c.endText()
	case !x.open || h.TTT() != x.ttt: // section 11.10.4
		return nil, false, pdu.RejectInvalidField
	}
	if len(x.out) > 0 {
		if len(t.data) > 0 { // section 6.2
			return nil, false, pdu.RejectProtocolError
		}
		return t.cutText()
	}
	if len(x.in)+len(t.data) > keys.MaxText {
		return nil, false, pdu.RejectOutOfResources
	}
	x.in = append(x.in, t.data...)
	t.data = nil
	if !c.chargeText() {
		return nil, false, pdu.RejectOutOfResources
	}
	if h.Continue() {
		return nil, false, 0
	}
	var ok bool
	if x.out, ok = c.answerText(x); !ok {
		return nil, false, pdu.RejectProtocolError
	}
	x.in = nil
	if !c.chargeText() {
		return nil, false, pdu.RejectOutOfResources
	}
	if h.Final() && x.neg != nil {
		p, err := x.neg.Finish()
		if err != nil {
			return nil, false, pdu.RejectProtocolError
		}
		c.mu.Lock()
		c.params.InitiatorAlias, c.params.MaxRecvDataSegmentLength = p.InitiatorAlias, p.MaxRecvDataSegmentLength
		c.mu.Unlock()
		if r, ok := c.dm.(Renegotiator); ok {
			r.SetMaxSendSegment(int(p.MaxRecvDataSegmentLength))
		}
	}
	return t.cutText()
}

// cutText takes from the answer what one PDU can carry, and reports whether there is more. It copies
// that to memory of t, where it may have to wait for the network.
func (t *Task) cutText() (part []byte, more bool, reason pdu.RejectReason) {
	c, x := t.conn, &t.conn.text
	n := min(len(x.out), c.dm.MaxSendSegment())
	if n == 0 {
		return nil, false, 0
	}
	room := t.room(n)
	if room == nil {
		return nil, false, pdu.RejectOutOfResources
	}
	part = room[:copy(room, x.out[:n])]
	if x.out = x.out[n:]; len(x.out) == 0 {
		x.out = nil
	}
	c.chargeText()
	return part, len(x.out) > 0, 0
}

// answerText answers the text collected in x, unless that violates the protocol.
func (c *conn) answerText(x *textExchange) (out []byte, ok bool) {
	pairs, err := keys.ParseText(x.in)
	if err != nil {
		return nil, false
	}
	var answers []keys.Pair
	asked := false
	for _, p := range pairs {
		if p.Key == "SendTargets" {
			if asked { // of a text full of them the answer would be very long
				return nil, false
			}
			asked = true
			answers = c.sendTargets(p.Value, answers)
			continue
		}
		if c.sess.discovery { // nothing else in discovery (section 4.3)
			return nil, false
		}
		if x.neg == nil {
			x.neg = keys.NewText(c.limits(), c.params)
		}
		if answers, err = x.neg.Offer(keys.FullFeature, p, answers); err != nil {
			return nil, false
		}
	}
	return keys.AppendPair(nil, answers...), true
}

// sendTargets appends the answer to SendTargets=which (RFC 7143, appendix C). Discovery sessions may
// ask for All or a name, normal sessions for their own target: by its name or the empty value.
func (c *conn) sendTargets(which string, answers []keys.Pair) []keys.Pair {
	nd := c.node
	nd.mu.Lock()
	targets, portals, peers := nd.targets, nd.portals, nd.peers
	nd.mu.Unlock()
	var name string
	from := security.AddressOf(c.dm.RemoteAddr())
	all := which == "All"
	if !all {
		// An invalid name is the name of no target.
		name, _ = security.NormalizeName(cmp.Or(which, c.sess.key.target))
	}
	if all && !c.sess.discovery || which == "" && c.sess.discovery || !all && !c.sess.discovery && name != c.sess.key.target {
		return append(answers, keys.Pair{Key: "SendTargets", Value: "Reject"})
	}
	for _, tg := range targets {
		if !all && tg.Name != name || !tg.Initiators.Match(c.sess.key.initiator) || !tg.Networks.Admit(from) {
			continue
		}
		before := len(answers)
		answers = append(answers, keys.Pair{Key: "TargetName", Value: tg.Name})
		add := func(p *Portal) {
			if c.portal.Protected && !p.Protected && !tg.Protected {
				return
			}
			for _, addr := range p.addresses(c.portal, c.dm.LocalAddr()) {
				answers = append(answers, keys.Pair{Key: "TargetAddress", Value: addr + "," + strconv.Itoa(int(p.TPGT))})
			}
		}
		for _, p := range portals {
			if tg.servedBy(p) {
				add(p)
			}
		}
		for _, p := range peers[tg.Name] {
			add(p)
		}
		if len(answers) == before+1 { // without an address the initiator would expect the target at this one
			answers = answers[:before]
		}
	}
	return answers
}

// addresses returns what discovery answers for p to an initiator that reached the node by way of own
// at local: host:port each.
func (p *Portal) addresses(own *Portal, local net.Addr) []string {
	if len(p.Advertise) > 0 {
		return p.Advertise
	}
	here, ok := local.(*net.TCPAddr)
	if p == own {
		if !ok {
			return []string{local.String()}
		}
		return []string{hostPort(here.IP, here.Port)}
	}
	// Another portal: the address where it listens. If it listens on all addresses, the address at
	// which the initiator has reached the target, with that portal's port.
	host, service, err := net.SplitHostPort(p.Listen)
	port, err2 := strconv.Atoi(service)
	if err != nil || err2 != nil || port == 0 {
		return nil
	}
	host, zone, _ := strings.Cut(host, "%")
	there := net.ParseIP(host)
	switch {
	case host == "" || there != nil && there.IsUnspecified():
		if !ok || there != nil && there.To4() != nil && here.IP.To4() == nil {
			return nil
		}
		return []string{hostPort(here.IP, port)}
	case there == nil: // a name
		return []string{p.Listen}
	case ok && there.IsLoopback() && !here.IP.IsLoopback(),
		there.To4() == nil && there.IsLinkLocalUnicast() && !(ok && here.IP.IsLinkLocalUnicast() && here.Zone == zone):
		return nil // out of the initiator's reach
	}
	return []string{hostPort(there, port)}
}

// hostPort formats an address without its zone, which means something on this machine only. IPv6
// addresses are in brackets.
func hostPort(ip net.IP, port int) string {
	return (&net.TCPAddr{IP: ip, Port: port}).String()
}
