package keys

import (
	"slices"
	"strings"
)

// A Negotiation is one login, or one text negotiation in the full feature
// phase. It takes effect as a whole, when Finish succeeds, or not at all; its
// first error is its last word. Its memory is bounded by MaxText.
type Negotiation struct {
	limits  Limits
	p       Params
	text    bool // full feature phase
	joining bool // not the leading connection

	seen    []seen              // by row of table
	unknown map[string]struct{} // keys not understood
	size    int                 // of text

	firstDone, declared bool
	err                 error
}

// seen says whether and where a key has come.
type seen uint8

const (
	notYet seen = iota
	inSecurity
	afterSecurity
)

// NewLogin begins the login of a leading connection.
func NewLogin(l Limits) *Negotiation {
	n := newNegotiation(l, Params{})
	for _, k := range table {
		k.reset(&n.p)
	}
	return n
}

// NewJoin begins the login of a connection that joins, or takes up again, the
// session that agreed on cur. Leading-only keys are errors in it.
func NewJoin(l Limits, cur Params) *Negotiation {
	n := newNegotiation(l, cur)
	n.joining = true
	n.p.InitiatorName, n.p.TargetName, n.p.CHAPName = "", "", "" // every login says who it is
	for _, k := range table {
		if k.flags&connection != 0 {
			k.reset(&n.p)
		}
	}
	return n
}

// NewText begins a negotiation in the full feature phase of a connection that
// has agreed on cur.
func NewText(l Limits, cur Params) *Negotiation {
	n := newNegotiation(l, cur)
	n.text = true
	return n
}

func newNegotiation(l Limits, p Params) *Negotiation {
	n := &Negotiation{limits: l.complete(), p: p, seen: make([]seen, len(table))}
	if err := l.Validate(); err != nil {
		n.err = &Error{Status: statusTargetError, Reason: err.Error()}
	}
	return n
}

// Params is what has been agreed on so far: after the first Login Request it
// has the names and the session type that access control needs.
func (n *Negotiation) Params() Params { return n.p }

// FirstRequest is to be called when all of the first Login Request has been
// offered. It reports whether the names are there that every login begins with
// (RFC 7143, section 4.2.7.1); from then on these, and the session type,
// cannot change.
func (n *Negotiation) FirstRequest() error {
	if n.err == nil && n.p.InitiatorName == "" {
		n.err = &Error{statusMissingParameter, "InitiatorName", "is missing in the first Login Request"}
	}
	if n.err == nil && n.p.TargetName == "" && !n.p.Discovery {
		n.err = &Error{statusMissingParameter, "TargetName", "is missing in the first Login Request of a normal session"}
	}
	n.firstDone = true
	return n.err
}

// RequireCHAP makes CHAP instead of None the one AuthMethod that can be agreed
// on. To be called before AuthMethod is offered.
func (n *Negotiation) RequireCHAP() { n.limits.chap = true }

// Offer takes one pair of the initiator in stage s and appends what must be
// answered to answers; an answer may be five times as long as the offer, or so,
// which the caller has to have room for. An error is an *Error and ends the
// negotiation; answers then holds what may still be said.
func (n *Negotiation) Offer(s Stage, p Pair, answers []Pair) ([]Pair, error) {
	if n.err == nil {
		var err *Error
		if answers, err = n.offer(s, p, answers); err != nil {
			n.err = err
		}
	}
	return answers, n.err
}

func (n *Negotiation) offer(s Stage, p Pair, answers []Pair) ([]Pair, *Error) {
	answer := func(v string) []Pair { return append(answers, Pair{p.Key, v}) }

	if n.size += len(p.Key) + len(p.Value) + 2; n.size > MaxText {
		return answers, textError("", "negotiation is longer than %d bytes", MaxText)
	}
	i, ok := byName[p.Key]
	if !ok {
		if isReserved(p.Value) {
			return answers, textError(quote(p.Key), "%s is no offer", p.Value)
		}
		if _, ok := n.unknown[p.Key]; ok {
			return answers, textError(quote(p.Key), "came twice")
		}
		if n.unknown == nil {
			n.unknown = make(map[string]struct{})
		}
		n.unknown[p.Key] = struct{}{}
		return answer("NotUnderstood"), nil
	}

	k := table[i]
	if reason := n.misplaced(k, s); reason != "" {
		return answers, textError(k.name, "%s", reason)
	}
	again, err := n.comesAgain(i, s)
	if err != nil {
		return answers, err
	}
	if k.kind != text && slices.ContainsFunc(strings.Split(p.Value, ","), isReserved) {
		return answers, textError(k.name, "%s is no offer", quote(p.Value))
	}
	if !k.kind.long && len(p.Value) > maxValue {
		return answers, textError(k.name, "value is longer than %d bytes", maxValue)
	}
	if k.discovery == irrelevant && n.p.Discovery {
		return answer("Irrelevant"), nil
	}

	v, ok := k.kind.parse(k, p.Value)
	if ok && k.result != nil {
		v = k.result(k.own(&n.limits, &n.p), v)
		ok = !k.kind.picks || v.s != ""
	}
	switch {
	case !ok && k.fail != 0:
		if k.flags&declared == 0 {
			answers = answer("Reject")
		}
		return answers, &Error{k.fail, k.name, quote(p.Value) + " is not supported"}
	case !ok && k.flags&declared != 0:
		return answers, textError(k.name, "%s is not admissible", quote(p.Value))
	case !ok: // the key keeps its value: RFC 7143, section 6.2
		return answer("Reject"), nil
	}

	was := n.p
	if k.set != nil {
		k.set(&n.p, v)
	}
	if n.p != was && (again || k.flags&firstRequest != 0 && n.firstDone) {
		n.p = was
		return answers, textError(k.name, "cannot change during login")
	}
	if k.flags&declared == 0 {
		answers = answer(k.kind.format(v))
	}
	return answers, nil
}

// misplaced says why k cannot be offered in stage s; it is empty if k can.
func (n *Negotiation) misplaced(k *key, s Stage) string {
	switch {
	case n.text != (s == FullFeature) || s != Security && s != Operational && s != FullFeature:
		return "cannot be negotiated in the " + s.String()
	case k.refuse != "":
		return k.refuse
	case k.flags&targetSends != 0:
		return "is sent by targets only"
	case s == FullFeature && k.use != always:
		return "cannot be negotiated in the full feature phase"
	case s == Security && k.flags&(anyStage|securityOnly) == 0,
		s == Operational && k.flags&securityOnly != 0:
		return "does not belong in the " + s.String()
	case n.joining && k.use == leading:
		return "belongs in the login of the leading connection"
	}
	return ""
}

// comesAgain notes that row i of the table has come in stage s. A key comes
// once in a negotiation (RFC 7143, section 6.3). Only libiscsi's habit is
// let through: after a security stage it declares the names, the alias and the
// session type again in the operational stage. The second result is true then.
func (n *Negotiation) comesAgain(i int, s Stage) (bool, *Error) {
	k, was := table[i], n.seen[i]
	now := afterSecurity
	if s == Security {
		now = inSecurity
	}
	n.seen[i] = now
	if was == notYet {
		return false, nil
	}
	if k.flags&anyStage != 0 && was == inSecurity && now == afterSecurity {
		return true, nil
	}
	return false, textError(k.name, "came twice")
}

// Declare appends, once, what the target itself has to declare. To be called
// when answering a request of the operational stage. It is nothing that
// open-iscsi does not know, because it fails the login over any such key.
func (n *Negotiation) Declare(answers []Pair) []Pair {
	if n.declared || n.text || n.limits.RDMA || n.p.RDMAExtensions {
		return answers
	}
	n.declared = true
	return append(answers, Pair{"MaxRecvDataSegmentLength", number.format(value{n: uint64(n.limits.MaxRecvDataSegmentLength)})})
}

// Finish returns what was agreed on if it holds together, now that all values
// are known (RFC 7143, section 6.2). An error is an *Error.
func (n *Negotiation) Finish() (Params, error) {
	if n.err == nil && !n.text {
		n.FirstRequest()
	}
	if n.err != nil {
		return Params{}, n.err
	}
	p := n.p
	if p.Discovery {
		for _, k := range table {
			if k.discovery != applies {
				k.reset(&p)
			}
		}
	}
	switch {
	case n.joining && p.Discovery:
		n.err = textError("SessionType", "no connection joins a discovery session")
	case n.limits.RDMA && !p.Discovery && !p.RDMAExtensions:
		n.err = textError("RDMAExtensions", "Yes was not agreed on, and this connection carries nothing but iSER")
	case p.RDMAExtensions && !n.limits.RDMA && !n.limits.StepUp:
		n.err = textError("RDMAExtensions", "the session uses iSER, and this connection cannot")
	case p.FirstBurstLength > p.MaxBurstLength && (p.ImmediateData || !p.InitialR2T):
		n.err = textError("FirstBurstLength", "%d is more than MaxBurstLength, %d", p.FirstBurstLength, p.MaxBurstLength)
	default:
		return p, nil
	}
	return Params{}, n.err
}

// isReserved reports whether v is one of the words that only answer (RFC 7143,
// section 6.2). The fourth, None, is a legitimate offer.
func isReserved(v string) bool {
	return v == "Reject" || v == "Irrelevant" || v == "NotUnderstood"
}
