package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
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
func name(r *http.Request) string { return normalized(r.PathValue("target")) }

func normalized(name string) string {
	if normal, err := security.NormalizeName(name); err == nil {
		return normal
	}
	return name
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

func (s *Server) state(*http.Request) (any, error) { return s.d.State(), nil }

func (s *Server) targets(*http.Request) (any, error) {
	targets := s.d.State().Targets
	for i := range targets {
		brief(targets[i].LUNs)
	}
	return targets, nil
}

// brief removes the latencies, which would make a list long.
func brief(luns []schema.LUNState) []schema.LUNState {
	for i := range luns {
		luns[i].Counters.Latency, luns[i].Counters.Operations = nil, nil
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
	t, err := s.findTarget(name(r))
	if err != nil {
		return nil, err
	}
	brief(t.LUNs)
	return t, nil
}

func (s *Server) addTarget(r *http.Request) (any, error) {
	return add(s, r, func(d *config.Document, t *schema.Target) error {
		if t.Cluster {
			return d.AddSharedTarget(targetConfig(t))
		}
		return d.AddTarget(targetConfig(t))
	})
}

// add changes the configuration by edit with the object in the body of r.
func add[T any](s *Server, r *http.Request, edit func(*config.Document, *T) error) (*schema.Plan, error) {
	var v T
	if err := body(r, &v); err != nil {
		return nil, err
	}
	return s.change(r, func(d *config.Document) error { return edit(d, &v) })
}

func (s *Server) setTarget(r *http.Request) (any, error) {
	edit, keys, err := editOf(r, func(d *config.Document, key, value string) error { return d.SetTarget(name(r), key, value) })
	if err == nil {
		err = s.requireKeys(r, keys)
	}
	if err != nil {
		return nil, err
	}
	return s.change(r, edit)
}

// editOf returns the edit that sets the keys in the body of r, and these keys.
func editOf(r *http.Request, set func(d *config.Document, key, value string) error) (edit func(*config.Document) error, keys []string, err error) {
	var v schema.Values
	if err := body(r, &v); err != nil {
		return nil, nil, err
	}
	if len(v) == 0 {
		return nil, nil, invalid("body: no key to set")
	}
	return func(d *config.Document) error {
		for _, k := range v.Keys() {
			if err := set(d, k, v[k]); err != nil {
				return err
			}
		}
		return nil
	}, v.Keys(), nil
}

func (s *Server) removeTarget(r *http.Request) (any, error) {
	plan, err := s.change(r, func(d *config.Document) error { return d.RemoveTarget(name(r)) })
	return s.removedBefore(r, -1, plan, err)
}

func (s *Server) allow(r *http.Request) (any, error) {
	return add(s, r, func(d *config.Document, p *schema.Pattern) error {
		if err := d.AllowInitiator(name(r), p.Pattern); !errors.Is(err, config.ErrExists) {
			return err
		}
		return nil // the pattern is there
	})
}

func (s *Server) deny(r *http.Request) (any, error) {
	pattern := r.URL.Query().Get("pattern")
	return s.change(r, func(d *config.Document) error {
		only, err := isOnly(d, func(cfg *config.Config) int {
			i := slices.IndexFunc(cfg.Targets, func(t config.Target) bool { return t.Name == name(r) })
			if i < 0 {
				return 0
			}
			return len(cfg.Targets[i].Initiators)
		}, func() error { return d.DenyInitiator(name(r), pattern) })
		if only {
			return invalid("%q is the only pattern of %s: allow another one first, or delete the target", pattern, name(r))
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
	list := []schema.LUNState{}
	if n := r.URL.Query().Get("target"); n != "" {
		t, err := s.findTarget(normalized(n))
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

func (s *Server) lun(r *http.Request) (any, error) { return s.findLUN(r) }

// removedBefore returns the result of a removal, plan and err. If the object was removed before and
// still drains, it ends that with the option now. id is the number of a LUN, or negative for a
// target.
func (s *Server) removedBefore(r *http.Request, id int, plan *schema.Plan, err error) (*schema.Plan, error) {
	if !errors.Is(err, config.ErrNotFound) {
		return plan, err
	}
	what, ending := "target "+name(r), s.d.RemovalProgress(name(r), id)
	if id >= 0 {
		what = fmt.Sprintf("LUN %d of target %s", id, name(r))
	}
	o, err2 := changeOptions(r)
	switch {
	case err2 != nil || ending == "":
		return nil, err
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
	plan, err := s.change(r, func(d *config.Document) error { return d.RemoveLUN(name(r), id) })
	return s.removedBefore(r, id, plan, err)
}

func (s *Server) reservations(*http.Request) (any, error) {
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
	return schema.Done{Done: true}, s.d.ClearReservation(r.Context(), name(r), id)
}

func (s *Server) resetSettings(r *http.Request) (any, error) {
	id, err := lunID(r)
	if err != nil {
		return nil, err
	}
	return schema.Done{Done: true}, s.d.ResetSettings(r.Context(), name(r), id)
}

func (s *Server) recoverLUN(r *http.Request) (any, error) {
	id, err := lunID(r)
	if err != nil {
		return nil, err
	}
	return s.d.Recover(r.Context(), name(r), id)
}

func (s *Server) scrub(r *http.Request) (any, error) {
	id, err := lunID(r)
	if err != nil {
		return nil, err
	}
	return s.d.Scrub(name(r), id)
}

func (s *Server) beginScrub(r *http.Request) (any, error) {
	id, err := lunID(r)
	if err != nil {
		return nil, err
	}
	var req schema.ScrubRequest
	if err := body(r, &req); err != nil {
		return nil, err
	}
	rate := config.Size(0)
	if req.Rate != "" {
		if rate, err = config.ParseSize(req.Rate); err != nil {
			return nil, invalid("rate: %v", err)
		}
	}
	return s.d.BeginScrub(r.Context(), name(r), id, int64(rate))
}

func (s *Server) cancelScrub(r *http.Request) (any, error) {
	id, err := lunID(r)
	if err != nil {
		return nil, err
	}
	return s.d.CancelScrub(r.Context(), name(r), id)
}

func (s *Server) setFaults(r *http.Request) (any, error) {
	id, err := lunID(r)
	if err != nil {
		return nil, err
	}
	var f schema.Faults
	if err := body(r, &f); err != nil {
		return nil, err
	}
	return schema.Done{Done: true}, s.d.SetFaults(r.Context(), name(r), id, f)
}

func (s *Server) clearFaults(r *http.Request) (any, error) {
	id, err := lunID(r)
	if err != nil {
		return nil, err
	}
	return schema.Done{Done: true}, s.d.ClearFaults(r.Context(), name(r), id)
}

func (s *Server) portals(*http.Request) (any, error) { return s.d.State().Portals, nil }

func (s *Server) addPortal(r *http.Request) (any, error) {
	return add(s, r, func(d *config.Document, p *schema.Portal) error { return d.AddPortal(portalConfig(p)) })
}

func (s *Server) setPortal(r *http.Request) (any, error) {
	edit, _, err := editOf(r, func(d *config.Document, key, value string) error {
		return d.SetPortal(r.PathValue("portal"), key, value)
	})
	if err != nil {
		return nil, err
	}
	return s.change(r, edit)
}

func (s *Server) ipsec(*http.Request) (any, error) { return s.d.IPsec(), nil }

func (s *Server) removePortal(r *http.Request) (any, error) {
	return s.change(r, func(d *config.Document) error {
		only, err := isOnly(d, func(cfg *config.Config) int { return len(cfg.Portals) }, func() error { return d.RemovePortal(r.PathValue("portal")) })
		if only {
			return invalid("%s is the only portal: add another one first", r.PathValue("portal"))
		}
		return err
	})
}

func (s *Server) sessions(*http.Request) (any, error) {
	list := s.d.State().Sessions
	for i := range list {
		list[i].Counters.Latency, list[i].Counters.Operations = nil, nil
	}
	slices.SortFunc(list, func(a, b schema.SessionState) int { return cmp.Compare(a.TSIH, b.TSIH) })
	return list, nil
}

func (s *Server) session(r *http.Request) (any, error) {
	id, err := tsih(r)
	if err != nil {
		return nil, err
	}
	for _, st := range s.d.State().Sessions {
		if st.TSIH == id {
			return st, nil
		}
	}
	return nil, notFound("session %d", id)
}

func (s *Server) limits(*http.Request) (any, error) { return s.d.Limits(), nil }

func (s *Server) cluster(*http.Request) (any, error) { return s.d.Cluster() }

func (s *Server) handOver(r *http.Request) (any, error) {
	id, err := lunID(r)
	if err != nil {
		return nil, err
	}
	var req schema.HandOverRequest
	if err := body(r, &req); err != nil {
		return nil, err
	}
	return schema.Done{Done: true}, s.d.HandOver(r.Context(), name(r), id, req.To)
}

func (s *Server) balance(r *http.Request) (any, error) {
	dry := false
	if err := flag(r.URL.Query(), "dry_run", &dry); err != nil {
		return nil, err
	}
	return s.d.Balance(r.Context(), dry)
}

// clusterConfig answers with the targets of the cluster. Only administrators get their secrets, which is an event.
func (s *Server) clusterConfig(r *http.Request) (any, error) {
	doc, c, err := s.d.ClusterConfig()
	if err != nil {
		return nil, err
	}
	text, err := s.visible(r, doc)
	if err != nil {
		return nil, err
	}
	c.Text = string(text)
	return c, nil
}

// visible returns the text of doc as the caller of r may see it. Only administrators get secrets, which is an event.
func (s *Server) visible(r *http.Request, doc *config.Document) ([]byte, error) {
	text, secrets, err := doc.WithoutSecrets()
	if err != nil {
		return nil, err
	}
	if c, _ := r.Context().Value(callerKey{}).(*caller); c != nil && c.role >= roleAdmin {
		text = doc.Bytes()
		if secrets > 0 {
			s.d.Logger().InfoContext(r.Context(), "the secrets of the configuration were read", "event", "control", "secrets", secrets)
		}
	}
	return text, nil
}

// applyCluster replaces the targets of the cluster by those in the body of r.
func (s *Server) applyCluster(r *http.Request) (any, error) {
	o, err := changeOptions(r)
	if err != nil {
		return nil, err
	}
	q, move := r.URL.Query(), false
	if err := flag(q, "move", &move); err != nil {
		return nil, err
	}
	b, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, maxDocument))
	if err != nil {
		return nil, err
	}
	shared, err := config.NewShared(cmp.Or(q.Get("source"), "request"), b, 0)
	if err != nil {
		return nil, err
	}
	if !trusted(r) {
		before := s.d.Document()
		next := before.Clone()
		next.SetShared(shared)
		if err := s.checkNames(before, next); err != nil {
			return nil, err
		}
	}
	ctx, cancel := inTurn(r)
	defer cancel()
	return s.d.ApplyCluster(ctx, shared, move, o)
}

func (s *Server) setLimits(r *http.Request) (any, error) {
	edit, _, err := editOf(r, (*config.Document).SetLimit)
	if err != nil {
		return nil, err
	}
	return s.change(r, edit)
}

// maxReason bounds the reason of killSession, in bytes.
const maxReason = 255

func (s *Server) killSession(r *http.Request) (any, error) {
	id, err := tsih(r)
	if err != nil {
		return nil, err
	}
	reason := r.URL.Query().Get("reason")
	if len(reason) > maxReason {
		return nil, invalid("query: reason has more than %d bytes", maxReason)
	}
	return schema.Done{Done: true}, s.d.KillSession(r.Context(), id, reason)
}

func (s *Server) drain(r *http.Request) (any, error) {
	var req schema.DrainRequest
	if err := body(r, &req); err != nil {
		return nil, err
	}
	within, err := time.ParseDuration(req.Within)
	if err != nil || within < 0 || within > schema.MaxDrain {
		return nil, invalid("within must be 0s to %v, not %q", schema.MaxDrain, req.Within)
	}
	return s.d.Drain(r.Context(), within, req.To)
}

func (s *Server) upgrade(r *http.Request) (any, error) {
	ctx, cancel := context.WithTimeout(r.Context(), turnTime)
	defer cancel()
	return s.d.Upgrade(ctx)
}

func (s *Server) planConfig(r *http.Request) (any, error) { return s.applyDocument(r, true) }

func (s *Server) applyConfig(r *http.Request) (any, error) { return s.applyDocument(r, false) }

// applyDocument applies the configuration in the body of r, or with dry only plans that.
func (s *Server) applyDocument(r *http.Request, dry bool) (*schema.Plan, error) {
	o, err := changeOptions(r)
	if err != nil {
		return nil, err
	}
	o.DryRun = o.DryRun || dry
	q, own := r.URL.Query(), false
	if err := flag(q, "own_file", &own); err != nil {
		return nil, err
	}
	b, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, maxDocument))
	if err != nil {
		return nil, err
	}
	d, err := config.NewDocument(cmp.Or(q.Get("source"), "request"), b)
	if err != nil {
		return nil, err
	}
	ctx, cancel := inTurn(r)
	defer cancel()
	if own { // the text of the file, which its owner wrote
		return s.d.ApplyOwn(ctx, d, o)
	}
	if !trusted(r) {
		if err := s.checkNames(s.d.Document(), d); err != nil {
			return nil, err
		}
	}
	return s.d.Apply(ctx, d, o)
}

// exportConfig answers with the configuration. Only administrators get its secrets, which is an event.
func (s *Server) exportConfig(w http.ResponseWriter, r *http.Request) error {
	text, err := s.visible(r, s.d.Document())
	if err != nil {
		return err
	}
	send(w, http.StatusOK, "application/yaml", text)
	return nil
}

func (s *Server) describe(w http.ResponseWriter, _ *http.Request) error {
	send(w, http.StatusOK, "application/yaml", openAPI)
	return nil
}

func (s *Server) explain(r *http.Request) (any, error) {
	q := r.URL.Query()
	for _, key := range []string{"initiator", "target"} {
		if q.Get(key) == "" {
			return nil, invalid("query: %s is required", key)
		}
	}
	return s.d.Explain(q.Get("initiator"), q.Get("target"), q.Get("portal"), q.Get("from")), nil
}

// events answers one line of JSON for each stored event, and with follow continues with new
// ones until one side goes away. Empty lines are heartbeats.
func (s *Server) events(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	var since uint64
	if v := q.Get("since"); v != "" {
		var err error
		if since, err = strconv.ParseUint(v, 10, 64); err != nil {
			return invalid("query: since must be the number of an event, not %q", v)
		}
	}
	var follow bool
	if err := flag(q, "follow", &follow); err != nil {
		return err
	}
	w.Header().Set(schema.EventLogHeader, s.d.EventLog())
	if !follow {
		send(w, http.StatusOK, "application/jsonl", lines(s.d.Events(since)))
		return nil
	}
	leave, most := s.takeFollower(r)
	if leave == nil {
		return &schema.Error{Code: schema.Busy, Message: fmt.Sprintf("%d clients follow the events, the most that are allowed", most), Hint: "end one of them"}
	}
	defer leave()
	s.follow(w, r, since)
	return nil
}

// takeFollower takes a place for a stream of events. Callers below admin share half of the places, so that
// administrators find one. leave is nil if there are most streams already.
func (s *Server) takeFollower(r *http.Request) (leave func(), most int) {
	places := []chan struct{}{s.followers}
	if c, _ := r.Context().Value(callerKey{}).(*caller); c == nil || c.role < roleAdmin {
		places = append(places, s.readers)
	}
	free := func(n int) {
		for _, p := range places[:n] {
			<-p
		}
	}
	for i, p := range places {
		select {
		case p <- struct{}{}:
		default:
			free(i)
			return nil, cap(p)
		}
	}
	return func() { free(len(places)) }, 0
}

func (s *Server) follow(w http.ResponseWriter, r *http.Request, since uint64) {
	news, cancel := s.d.Subscribe()
	defer cancel()
	beat := time.NewTicker(heartbeat)
	defer beat.Stop()
	ctx, end := s.stream(w, r)
	defer end(nil)
	w.Header().Set("Content-Type", "application/jsonl")
	next := []byte{}
	for {
		list := s.d.Events(since)
		if len(list) > 0 {
			since = list[len(list)-1].Number
		}
		if _, err := (patient{w}).Write(append(next, lines(list)...)); err != nil {
			return
		}
		next = nil
		select {
		case <-ctx.Done():
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
