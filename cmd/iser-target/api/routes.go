package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/security"
)

func notFound(format string, a ...any) error {
	return fmt.Errorf(format+": %w", append(a, daemon.ErrNotFound)...)
}

// name returns the target in the path of r, normalized for comparison.
func name(r *http.Request) string {
	n := r.PathValue("target")
	if normal, err := security.NormalizeName(n); err == nil {
		return normal
	}
	return n
}

func lunID(r *http.Request) (int, error) {
	id, err := strconv.Atoi(r.PathValue("lun"))
	if err != nil {
		return 0, invalid("LUN %q is not a number", r.PathValue("lun"))
	}
	return id, nil
}

func tsih(r *http.Request) (uint16, error) {
	n, err := strconv.ParseUint(r.PathValue("tsih"), 10, 16)
	if err != nil {
		return 0, invalid("TSIH %q is not a number up to 65535", r.PathValue("tsih"))
	}
	return uint16(n), nil
}

func (s *Server) state(r *http.Request) (any, error) {
	if _, err := query(r); err != nil {
		return nil, err
	}
	return s.d.State(), nil
}

func (s *Server) targets(r *http.Request) (any, error) {
	if _, err := query(r); err != nil {
		return nil, err
	}
	targets := s.d.State().Targets
	for i := range targets {
		brief(targets[i].LUNs)
	}
	return targets, nil
}

// brief removes the latencies, which would make a list long.
func brief(luns []schema.LUNState) []schema.LUNState {
	for i := range luns {
		luns[i].Counters.Latency = nil
	}
	return luns
}

func (s *Server) findTarget(name string) (*schema.TargetState, error) {
	for _, t := range s.d.State().Targets {
		if t.Name == name {
			return &t, nil
		}
	}
	return nil, notFound("target %s", name)
}

func (s *Server) target(r *http.Request) (any, error) {
	if _, err := query(r); err != nil {
		return nil, err
	}
	t, err := s.findTarget(name(r))
	if err != nil {
		return nil, err
	}
	brief(t.LUNs)
	return t, nil
}

func (s *Server) addTarget(r *http.Request) (any, error) {
	var t schema.Target
	if err := body(r, &t); err != nil {
		return nil, err
	}
	return s.change(r, func(d *config.Document) error { return d.AddTarget(targetConfig(&t)) })
}

func (s *Server) setTarget(r *http.Request) (any, error) {
	return s.set(r, func(d *config.Document, key, value string) error { return d.SetTarget(name(r), key, value) })
}

// set changes the keys that the body of r has.
func (s *Server) set(r *http.Request, set func(d *config.Document, key, value string) error) (any, error) {
	edit, err := editOf(r, set)
	if err != nil {
		return nil, err
	}
	return s.change(r, edit)
}

// editOf returns the edit that sets the keys in the body of r.
func editOf(r *http.Request, set func(d *config.Document, key, value string) error) (func(*config.Document) error, error) {
	var v schema.Values
	if err := body(r, &v); err != nil {
		return nil, err
	}
	if len(v) == 0 {
		return nil, invalid("body: no key to set")
	}
	return func(d *config.Document) error {
		for _, k := range v.Keys() {
			if err := set(d, k, v[k]); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

func (s *Server) removeTarget(r *http.Request) (any, error) {
	v, err := s.change(r, func(d *config.Document) error { return d.RemoveTarget(name(r)) })
	return s.removedBefore(r, -1, v, err)
}

func (s *Server) allow(r *http.Request) (any, error) {
	var p schema.Pattern
	if err := body(r, &p); err != nil {
		return nil, err
	}
	return s.change(r, func(d *config.Document) error {
		if err := d.AllowInitiator(name(r), p.Pattern); !errors.Is(err, config.ErrExists) {
			return err
		}
		return nil // the pattern is there
	})
}

func (s *Server) deny(r *http.Request) (any, error) {
	o, q, err := changeOptions(r, "pattern")
	if err != nil {
		return nil, err
	}
	return s.changeWith(r, o, func(d *config.Document) error {
		only, err := isOnly(d, func(cfg *config.Config) int {
			i := slices.IndexFunc(cfg.Targets, func(t config.Target) bool { return t.Name == name(r) })
			if i < 0 {
				return 0
			}
			return len(cfg.Targets[i].Initiators)
		}, func() error { return d.DenyInitiator(name(r), q.Get("pattern")) })
		if only {
			return invalid("%q is the only pattern of %s: allow another one first, or delete the target", q.Get("pattern"), name(r))
		}
		return err
	})
}

// isOnly calls remove, and reports whether it removed the last of the objects that count
// counts, of which the configuration needs one.
func isOnly(d *config.Document, count func(*config.Config) int, remove func() error) (bool, error) {
	cfg, err := d.Config()
	if err != nil {
		return false, err
	}
	n := count(cfg)
	err = remove()
	return err == nil && n == 1, err
}

func (s *Server) luns(r *http.Request) (any, error) {
	q, err := query(r, "target")
	if err != nil {
		return nil, err
	}
	list := []schema.LUNState{}
	if n := q.Get("target"); n != "" {
		if normal, err := security.NormalizeName(n); err == nil {
			n = normal
		}
		t, err := s.findTarget(n)
		if err != nil {
			return nil, err
		}
		return append(list, brief(t.LUNs)...), nil
	}
	for _, t := range s.d.State().Targets {
		list = append(list, brief(t.LUNs)...)
	}
	return list, nil
}

func (s *Server) findLUN(r *http.Request) (*schema.LUNState, error) {
	id, err := lunID(r)
	if err != nil {
		return nil, err
	}
	t, err := s.findTarget(name(r))
	if err != nil {
		return nil, err
	}
	for _, l := range t.LUNs {
		if l.ID == id && l.State != schema.Draining {
			return &l, nil
		}
	}
	return nil, notFound("LUN %d of target %s", id, t.Name)
}

func (s *Server) lun(r *http.Request) (any, error) {
	if _, err := query(r); err != nil {
		return nil, err
	}
	return s.findLUN(r)
}

// removedBefore returns the result of a removal, v and err. If the object was removed
// before and still drains, it ends that with the option now. id is the number of a LUN, or
// negative for a target.
func (s *Server) removedBefore(r *http.Request, id int, v any, err error) (any, error) {
	if !errors.Is(err, config.ErrNotFound) {
		return v, err
	}
	what, ending := "target "+name(r), s.d.RemovalProgress(name(r), id)
	if id >= 0 {
		what = fmt.Sprintf("LUN %d of target %s", id, name(r))
	}
	o, _, err2 := changeOptions(r)
	switch {
	case err2 != nil || ending == "":
		return v, err
	case o.Now && !o.DryRun && s.d.CutOff(r.Context(), name(r), id):
		return &schema.Plan{Steps: []schema.Step{}, Note: what + " was removed before; its commands are aborted now"}, nil
	}
	return nil, &schema.Error{Code: schema.NotFound, Message: fmt.Sprintf("%s was removed before: %s", what, ending), Hint: "wait until the removal is complete, or end it with now"}
}

// freeLUN returns the lowest number that no LUN of the target has, including those that
// are being removed.
func freeLUN(d *config.Document, target string, leaving []int) (int, error) {
	cfg, err := d.Config()
	if err != nil {
		return 0, err
	}
	at := slices.IndexFunc(cfg.Targets, func(t config.Target) bool { return t.Name == target })
	if at < 0 {
		return 0, notFound("target %s", target)
	}
	taken := map[int]bool{}
	for _, l := range cfg.Targets[at].LUNs {
		taken[l.ID] = true
	}
	for _, id := range leaving {
		taken[id] = true
	}
	id := 0
	for taken[id] {
		id++
	}
	return id, nil
}

func (s *Server) removeLUN(r *http.Request) (any, error) {
	id, err := lunID(r)
	if err != nil {
		return nil, err
	}
	v, err := s.change(r, func(d *config.Document) error { return d.RemoveLUN(name(r), id) })
	return s.removedBefore(r, id, v, err)
}

func (s *Server) reservations(r *http.Request) (any, error) {
	if _, err := query(r); err != nil {
		return nil, err
	}
	list := []schema.Reservation{}
	for _, t := range s.d.State().Targets {
		for _, l := range t.LUNs {
			if l.Reservation != nil && l.State != schema.Draining {
				list = append(list, schema.Reservation{Target: t.Name, LUN: l.ID, ReservationState: *l.Reservation})
			}
		}
	}
	return list, nil
}

func (s *Server) clearReservation(r *http.Request) (any, error) {
	id, err := lunID(r)
	if err != nil {
		return nil, err
	}
	if _, err := query(r); err != nil {
		return nil, err
	}
	return schema.Done{Done: true}, s.d.ClearReservation(r.Context(), name(r), id)
}

func (s *Server) portals(r *http.Request) (any, error) {
	if _, err := query(r); err != nil {
		return nil, err
	}
	return s.d.State().Portals, nil
}

func (s *Server) addPortal(r *http.Request) (any, error) {
	var p schema.Portal
	if err := body(r, &p); err != nil {
		return nil, err
	}
	return s.change(r, func(d *config.Document) error { return d.AddPortal(portalConfig(&p)) })
}

func (s *Server) removePortal(r *http.Request) (any, error) {
	return s.change(r, func(d *config.Document) error {
		only, err := isOnly(d, func(cfg *config.Config) int { return len(cfg.Portals) }, func() error { return d.RemovePortal(r.PathValue("portal")) })
		if only {
			return invalid("%s is the only portal: add another one first", r.PathValue("portal"))
		}
		return err
	})
}

func (s *Server) sessions(r *http.Request) (any, error) {
	if _, err := query(r); err != nil {
		return nil, err
	}
	list := s.d.State().Sessions
	for i := range list {
		list[i].Counters.Latency = nil
	}
	slices.SortFunc(list, func(a, b schema.SessionState) int { return cmp.Compare(a.TSIH, b.TSIH) })
	return list, nil
}

func (s *Server) session(r *http.Request) (any, error) {
	id, err := tsih(r)
	if err != nil {
		return nil, err
	}
	if _, err := query(r); err != nil {
		return nil, err
	}
	for _, st := range s.d.State().Sessions {
		if st.TSIH == id {
			return st, nil
		}
	}
	return nil, notFound("session %d", id)
}

// maxReason bounds the reason of killSession, in bytes.
const maxReason = 255

func (s *Server) killSession(r *http.Request) (any, error) {
	id, err := tsih(r)
	if err != nil {
		return nil, err
	}
	q, err := query(r, "reason")
	if err != nil {
		return nil, err
	}
	if len(q.Get("reason")) > maxReason {
		return nil, invalid("query: reason has more than %d bytes", maxReason)
	}
	return schema.Done{Done: true}, s.d.KillSession(r.Context(), id, q.Get("reason"))
}

// document returns the configuration in the body of r, and the Options. r may have the
// parameters more, too.
func (s *Server) document(r *http.Request, more ...string) (*config.Document, daemon.ChangeOptions, url.Values, error) {
	o, q, err := changeOptions(r, append(more, "source")...)
	if err != nil {
		return nil, o, nil, err
	}
	b, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, maxDocument))
	if err != nil {
		return nil, o, nil, err
	}
	d, err := config.NewDocument(cmp.Or(q.Get("source"), "request"), b)
	return d, o, q, err
}

func (s *Server) planConfig(r *http.Request) (any, error) {
	d, o, _, err := s.document(r)
	if err != nil {
		return nil, err
	}
	o.DryRun = true
	return s.apply(r, d, o, s.d.Apply)
}

func (s *Server) applyConfig(r *http.Request) (any, error) {
	d, o, q, err := s.document(r, "own_file")
	if err != nil {
		return nil, err
	}
	own := false
	if err := flag(q, "own_file", &own); err != nil {
		return nil, err
	}
	if own {
		return s.apply(r, d, o, s.d.ApplyOwn)
	}
	return s.apply(r, d, o, s.d.Apply)
}

func (s *Server) apply(r *http.Request, d *config.Document, o daemon.ChangeOptions,
	apply func(context.Context, *config.Document, daemon.ChangeOptions) (*schema.Plan, error)) (any, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), turnTime)
	defer cancel()
	return answer(apply(ctx, d, o))
}

func (s *Server) exportConfig(w http.ResponseWriter, r *http.Request) {
	if _, err := query(r); err != nil {
		writeError(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/yaml")
	send(w, http.StatusOK, s.d.Document().Bytes())
}

func (s *Server) describe(w http.ResponseWriter, r *http.Request) {
	if _, err := query(r); err != nil {
		writeError(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/yaml")
	send(w, http.StatusOK, openAPI)
}

func (s *Server) explain(r *http.Request) (any, error) {
	q, err := query(r, "initiator", "target", "portal")
	if err != nil {
		return nil, err
	}
	for _, key := range []string{"initiator", "target"} {
		if q.Get(key) == "" {
			return nil, invalid("query: %s is required", key)
		}
	}
	return s.d.Explain(q.Get("initiator"), q.Get("target"), q.Get("portal")), nil
}

// events answers one line of JSON for each stored event, and with follow continues with new
// ones until one side goes away. Empty lines are heartbeats.
func (s *Server) events(w http.ResponseWriter, r *http.Request) {
	q, err := query(r, "since", "follow")
	var since uint64
	if v := q.Get("since"); err == nil && v != "" {
		if since, err = strconv.ParseUint(v, 10, 64); err != nil {
			err = invalid("query: since must be the number of an event, not %q", v)
		}
	}
	var follow bool
	if err == nil {
		err = flag(q, "follow", &follow)
	}
	if err != nil {
		writeError(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/jsonl")
	if !follow {
		send(w, http.StatusOK, lines(s.d.Events(since)))
		return
	}
	select {
	case s.followers <- struct{}{}:
		defer func() { <-s.followers }()
	default:
		writeError(w, &schema.Error{Code: schema.Busy, Message: fmt.Sprintf("%d clients follow the events, the most that are allowed", maxFollowers), Hint: "end one of them"})
		return
	}
	s.follow(w, r, since)
}

func (s *Server) follow(w http.ResponseWriter, r *http.Request, since uint64) {
	news, cancel := s.d.Subscribe()
	defer cancel()
	beat := time.NewTicker(heartbeat)
	defer beat.Stop()
	control := http.NewResponseController(w)
	control.SetReadDeadline(time.Time{}) // else the read deadline would look like the end of the client
	next := []byte{}
	for {
		list := s.d.Events(since)
		if len(list) > 0 {
			since = list[len(list)-1].Number
		}
		control.SetWriteDeadline(time.Now().Add(writeTime))
		if _, err := w.Write(append(next, lines(list)...)); err != nil || control.Flush() != nil {
			return
		}
		next = nil
		select {
		case <-r.Context().Done():
			return
		case <-s.ending:
			return
		case <-news:
		case <-beat.C:
			next = []byte("\n")
		}
	}
}

func lines(list []schema.Event) (b []byte) {
	for _, e := range list {
		line, err := json.Marshal(e)
		if err != nil { // a value that JSON does not have
			line = fmt.Appendf(nil, `{"number":%d,"event":%q,"text":%q}`, e.Number, e.Event, err)
		}
		b = append(append(b, line...), '\n')
	}
	return b
}
