package dashboard

import (
	"cmp"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// A historyQuery selects the points of a LUN, a session, or of all LUNs together.
type historyQuery struct {
	span   int   // index in spans
	after  int64 // points after this time, in Unix milliseconds
	target string
	lun    int // -1: none
	tsih   int // -1: none
}

// parseHistoryQuery parses span (5m, 1h or 24h), after, target with lun, and session.
func parseHistoryQuery(raw string) (q historyQuery, err error) {
	q = historyQuery{lun: -1, tsih: -1}
	values, err := url.ParseQuery(raw)
	if err != nil {
		return q, fmt.Errorf("query: %w", err)
	}
	for key, v := range values {
		if len(v) != 1 {
			return q, fmt.Errorf("query: %s is given %d times", key, len(v))
		}
		var n uint64
		switch key {
		case "span":
			if q.span = slices.IndexFunc(spans[:], func(s span) bool { return s.name == v[0] }); q.span < 0 {
				err = fmt.Errorf("not 5m, 1h or 24h")
			}
		case "after":
			q.after, err = strconv.ParseInt(v[0], 10, 64)
		case "target":
			q.target = v[0]
		case "lun":
			n, err = strconv.ParseUint(v[0], 10, 16)
			q.lun = int(n)
		case "session":
			n, err = strconv.ParseUint(v[0], 10, 16)
			q.tsih = int(n)
		default:
			err = fmt.Errorf("unknown")
		}
		if err != nil {
			return q, fmt.Errorf("query: %s=%q: %w", key, v[0], err)
		}
	}
	if (q.lun >= 0) != (q.target != "") || q.lun >= 0 && q.tsih >= 0 {
		return q, fmt.Errorf("query: give target with lun, or session, or none of them")
	}
	return q, nil
}

// what names what q selects.
func (q *historyQuery) what() string {
	switch {
	case q.lun >= 0:
		return fmt.Sprintf("LUN %d of %s", q.lun, q.target)
	case q.tsih >= 0:
		return fmt.Sprintf("session %d", q.tsih)
	}
	return "all LUNs"
}

// A fact is a line about an object: what it is, and its value.
type fact [2]string

// A chartAnswer has the points that a historyQuery selects, and what is known about the object.
type chartAnswer struct {
	Time    time.Time    `json:"time"` // of the sample
	Every   float64      `json:"every"`
	Seconds float64      `json:"seconds"` // length of the span
	Points  []chartPoint `json:"points"`

	Title   string `json:"title,omitempty"`
	Command string `json:"command,omitempty"` // that shows more
	State   string `json:"state,omitempty"`   // of a LUN: its state or health
	Facts   []fact `json:"facts,omitempty"`
}

// chart returns what q selects, or nil if there is no such object.
func (s *sampler) chart(q historyQuery) *chartAnswer {
	s.mu.Lock()
	defer s.mu.Unlock()
	every := spans[q.span].every.Seconds()
	a := &chartAnswer{Time: s.at, Every: every, Seconds: every * float64(spans[q.span].points), Points: []chartPoint{}}
	of := &s.history.total
	switch {
	case q.lun >= 0:
		l := s.lun(q.target, q.lun)
		if l == nil {
			return nil
		}
		of = s.history.luns[lunKey{q.target, q.lun}]
		a.Title, a.Command, a.State = q.what(), fmt.Sprintf("iser-target lun show %s %d", q.target, q.lun), l.State
		if l.State == schema.Ready && l.Health != schema.Healthy {
			a.State = l.Health
		}
		a.Facts = lunFacts(l)
	case q.tsih >= 0:
		i := slices.IndexFunc(s.state.Sessions, func(c schema.SessionState) bool { return int(c.TSIH) == q.tsih })
		if i < 0 {
			return nil
		}
		c := &s.state.Sessions[i]
		of = s.history.sess[sessionKey{c.TSIH, c.Started}]
		a.Title, a.Command, a.Facts = q.what()+" of "+c.Initiator, fmt.Sprintf("iser-target session show %d", c.TSIH), sessionFacts(c)
	}
	if of != nil {
		a.Points = of.rings[q.span].since(q.after)
	}
	return a
}

// lun returns a LUN of the last sample, or nil.
//
// Preconditions: s.mu is held.
func (s *sampler) lun(target string, id int) *schema.LUNState {
	for i := range s.state.Targets {
		if t := &s.state.Targets[i]; t.Name == target {
			for j := range t.LUNs {
				if l := &t.LUNs[j]; l.ID == id && l.State != schema.Draining {
					return l
				}
			}
		}
	}
	return nil
}

// lunFacts returns what the page shows of a LUN.
func lunFacts(l *schema.LUNState) (facts []fact) {
	add := func(name, value string) {
		if value != "" {
			facts = append(facts, fact{name, value})
		}
	}
	add("Reason", l.Reason)
	add("Backend", strings.TrimSpace(l.Backend+" "+l.Path))
	add("Size", fmt.Sprintf("%s, in blocks of %d bytes", sizeText(l.Size), l.BlockSize))
	add("NAA", l.NAA)
	add("Serial number", l.Serial)
	add("Vendor and product", strings.TrimSpace(l.Vendor+" "+l.Product))
	var modes []string
	for mode, on := range map[string]bool{"read only": l.ReadOnly, "write through": l.WriteThrough, "removable": l.Removable, "checksums": l.Checksums != nil} {
		if on {
			modes = append(modes, mode)
		}
	}
	slices.Sort(modes)
	add("Mode", strings.Join(modes, ", "))
	add("Visible to", cmp.Or(strings.Join(l.Initiators, ", "), "all initiators of the target"))
	add("Read only for", strings.Join(l.ReadOnlyFor, ", "))
	if l.Space != nil {
		add("Space", fmt.Sprintf("%s used, %s available", sizeText(l.Space.Used), sizeText(l.Space.Available)))
	}
	add("Reservation", reservation(l.Reservation))
	return facts
}

// sessionFacts returns what the page shows of a session.
func sessionFacts(c *schema.SessionState) (facts []fact) {
	add := func(name, value string) {
		if value != "" {
			facts = append(facts, fact{name, value})
		}
	}
	add("Initiator", c.Initiator)
	add("Target", c.Target)
	add("Transport", c.Transport)
	for _, conn := range c.Connections {
		add(fmt.Sprintf("Connection %d", conn.CID), fmt.Sprintf("%s to %s", conn.Remote, conn.Local))
	}
	if p := c.Protection(); p != nil {
		add("IPsec", p.Details())
	}
	for _, key := range []string{"MaxBurstLength", "FirstBurstLength", "InitialR2T", "ImmediateData", "ErrorRecoveryLevel", "HeaderDigest", "DataDigest", "MaxRecvDataSegmentLength"} {
		add(key, c.Parameters[key])
	}
	return facts
}

// sizeText returns a number of bytes with up to one decimal, like 1.5 GiB.
func sizeText(n int64) string {
	v, unit := float64(n), "bytes"
	for _, u := range []string{"KiB", "MiB", "GiB", "TiB", "PiB"} {
		if v < 1024 {
			break
		}
		v, unit = v/1024, u
	}
	return strings.TrimSuffix(strconv.FormatFloat(v, 'f', 1, 64), ".0") + " " + unit
}
