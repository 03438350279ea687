package keys

import (
	"cmp"
	"slices"
	"strings"
)

// A Negotiation is one login, or one text negotiation in the full feature phase. It takes
// effect as a whole, when Finish succeeds, or not at all. After its first error it
// returns only that one. MaxText limits its memory.
type Negotiation struct {
	limits  Limits
	p       Params
	text    bool // full feature phase
	joining bool // not the leading connection

	seen    []seen              // by row of table
	unknown map[string]struct{} // keys that are not in the table
	size    int                 // of text

	firstDone, declared bool
	err                 error
}

// seen says in which stage a key has come, if at all.
type seen uint8

const (
	notYet seen = iota
	inSecurity
	afterSecurity
)

// NewLogin starts the login of a leading connection.
func NewLogin(l Limits) *Negotiation {
	n := newNegotiation(l, Params{})
	for _, k := range table {
		k.reset(&n.p)
	}
	return n
}

// NewJoin starts the login of a connection that joins or reinstates a session. Leading-only keys are errors
// in it. The caller calls Join before operational keys are offered.
func NewJoin(l Limits) *Negotiation {
	n := NewLogin(l)
	n.joining = true
	return n
}

// Join makes cur, on which the session has agreed, what the connection begins with. Its names, session
// type and user stay: every login declares them. Keys of a connection have their defaults.
func (n *Negotiation) Join(cur Params) {
	cur.InitiatorName, cur.TargetName = n.p.InitiatorName, n.p.TargetName
	cur.InitiatorAlias = cmp.Or(n.p.InitiatorAlias, cur.InitiatorAlias)
	cur.Discovery, cur.CHAPName = n.p.Discovery, n.p.CHAPName
	for _, k := range table {
		if k.flags&connection != 0 {
			k.reset(&cur)
		}
	}
	n.p = cur
}

// NewText starts a negotiation in the full feature phase of a connection that has agreed on cur.
func NewText(l Limits, cur Params) *Negotiation {
	n := newNegotiation(l, cur)
	n.text = true
	return n
}

// newNegotiation returns a Negotiation that starts with p.
func newNegotiation(l Limits, p Params) *Negotiation {
	n := &Negotiation{limits: l.complete(), p: p, seen: make([]seen, len(table)),
		unknown: map[string]struct{}{}}
	if err := l.Validate(); err != nil {
		n.err = &Error{Status: statusTargetError, Reason: err.Error()}
	}
	return n
}

// Params returns the result so far. After the first Login Request it contains the names
// and the session type, which access control needs.
func (n *Negotiation) Params() Params { return n.p }

// FirstRequest marks the end of the first Login Request. It returns an error if a name is
// missing that the first request must contain (RFC 7143, section 4.2.7.1). From then on
// the names and the session type cannot change.
func (n *Negotiation) FirstRequest() error {
	if n.err == nil && n.p.InitiatorName == "" {
		n.err = &Error{statusMissingParameter, "InitiatorName", "is missing in the first Login Request"}
	}
	if n.err == nil && n.p.TargetName == "" && !n.p.Discovery {
		n.err = &Error{statusMissingParameter, "TargetName",
			"is missing in the first Login Request of a normal session"}
	}
	n.firstDone = true
	return n.err
}

// RequireCHAP makes CHAP the only AuthMethod that the target accepts, instead of None. The
// caller calls it before AuthMethod is offered.
func (n *Negotiation) RequireCHAP() { n.limits.chap = true }

// Offer handles one pair of the initiator in stage s and appends the answer, if any, to answers. An
// answer can be about five times as long as the offer, and the caller must have room for it. An
// error is an *Error and ends the negotiation; the caller may still send answers then.
func (n *Negotiation) Offer(s Stage, p Pair, answers []Pair) ([]Pair, error) {
	if n.err == nil {
		answers, n.err = n.offer(s, p, answers)
	}
	return answers, n.err
}

// offer implements Offer.
func (n *Negotiation) offer(s Stage, p Pair, answers []Pair) ([]Pair, error) {
	answer := func(v string) []Pair { return append(answers, Pair{p.Key, v}) }

	if n.size += len(p.Key) + len(p.Value) + 2; n.size > MaxText {
		return answers, textError("", "negotiation is longer than %d bytes", MaxText)
	}
	i := slices.IndexFunc(table, func(k *key) bool { return k.name == p.Key })
	if i < 0 {
		if isReserved(p.Value) {
			return answers, textError(quote(p.Key), "%s is not an offer", p.Value)
		}
		if _, ok := n.unknown[p.Key]; ok {
			return answers, textError(quote(p.Key), "came twice")
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
		return answers, textError(k.name, "%s is not an offer", quote(p.Value))
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
		return answers, textError(k.name, "%s is not a valid value", quote(p.Value))
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

// hasCome reports whether the initiator has offered the key with that name.
func (n *Negotiation) hasCome(name string) bool {
	return n.seen[slices.IndexFunc(table, func(k *key) bool { return k.name == name })] != notYet
}

// misplaced returns why the initiator must not offer k in stage s, or "".
func (n *Negotiation) misplaced(k *key, s Stage) string {
	switch {
	case n.text != (s == FullFeature) || s != Security && s != Operational && s != FullFeature:
		return "cannot be negotiated in the " + s.String()
	case k.refuse != "":
		return k.refuse
	case k.flags&targetSends != 0:
		return "only targets send it"
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

// comesAgain notes that row i of the table has come in stage s. A key comes once in a
// negotiation (RFC 7143, section 6.3), with one exception for libiscsi: after a security
// stage it declares the names, the alias and the session type again in the operational
// stage. comesAgain returns true then.
func (n *Negotiation) comesAgain(i int, s Stage) (bool, error) {
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

// Declare appends, once, the key that the target declares. The caller calls it when it
// answers a request of the operational stage. open-iscsi fails the login for a key that
// it does not know, so Declare uses only one that it knows.
func (n *Negotiation) Declare(answers []Pair) []Pair {
	if n.declared || n.text || n.limits.RDMA || n.p.RDMAExtensions {
		return answers
	}
	n.declared = true
	return append(answers, Pair{"MaxRecvDataSegmentLength", number.format(count(n.limits.MaxRecvDataSegmentLength))})
}

// Finish returns the result if its values fit together (RFC 7143, section 6.2). An error
// is an *Error.
func (n *Negotiation) Finish() (Params, error) {
	if n.err == nil && !n.text {
		n.FirstRequest()
	}
	if n.err != nil {
		return Params{}, n.err
	}
	p := n.p
	if !n.text {
		p.Declared = n.limits.MaxRecvDataSegmentLength
	}
	if p.Discovery {
		for _, k := range table {
			if k.discovery != applies {
				k.reset(&p)
			}
		}
	}
	switch {
	case n.joining && p.Discovery:
		n.err = textError("SessionType", "a discovery session has only one connection")
	case n.limits.RDMA && !p.Discovery && !p.RDMAExtensions:
		n.err = textError("RDMAExtensions", "Yes is required, because this connection uses iSER")
	case p.RDMAExtensions && !n.limits.RDMA && !n.limits.StepUp:
		n.err = textError("RDMAExtensions", "the session uses iSER, but this connection cannot")
	case p.FirstBurstLength > p.MaxBurstLength && (p.ImmediateData || !p.InitialR2T) && n.hasCome("FirstBurstLength"):
		// Without an offer the default stands, as the initiator assumes. Boot ROMs offer a small MaxBurstLength alone.
		n.err = textError("FirstBurstLength", "%d is more than MaxBurstLength, %d", p.FirstBurstLength,
			p.MaxBurstLength)
	case !n.joining && !n.text && !p.Discovery && p.ErrorRecoveryLevel == 2 && p.DefaultTime2Retain > n.limits.DefaultTime2Retain:
		// It has its default, because the initiator has offered nothing that is valid.
		n.err = textError("DefaultTime2Retain", "needs an offer for ErrorRecoveryLevel=2: its default is %d, and the limit %d",
			p.DefaultTime2Retain, n.limits.DefaultTime2Retain)
	default:
		return p, nil
	}
	return Params{}, n.err
}

// isReserved reports whether v is a word for answers only (RFC 7143, section 6.2). The
// fourth such word, None, is also an offer.
func isReserved(v string) bool {
	return v == "Reject" || v == "Irrelevant" || v == "NotUnderstood"
}
