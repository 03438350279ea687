package client

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

const (
	dialTime = 5 * time.Second
	// maxAnswer bounds an answer, in bytes. The state of 16384 LUNs has less.
	maxAnswer = 64 << 20
	maxLine   = 1 << 20 // bytes of one event, or of one ChangeUpdate
	// leastSilence is several times the interval of the target's heartbeats.
	leastSilence = time.Minute
	// idleTime is less than the server's, so that no request meets a closed connection.
	idleTime = time.Minute
)

// A Client sends requests to one target. Its errors are *schema.Error, except those of
// callbacks and Writers of the caller. Goroutines can use it at the same time, but call Limit before.
type Client struct {
	where string     // path of the socket, host:port, or rdma://host:port
	tls   *clientTLS // nil: where is a socket
	http  http.Client

	silence time.Duration // the longest time between two heartbeats of a stream
	limit   time.Duration // the longest time without an answer or a sign of life; 0: none
	work    time.Duration // the longest time without progress of work that reports it; 0: none
	waiting func(time.Duration)
}

// Limit bounds the time of a target. Within answer, it answers a request, or shows that it works on it; also while a
// capture has nothing to record. Within work, long work makes progress. Streams with heartbeats may be silent for
// answer, but not for less than a minute.
func (c *Client) Limit(answer, work time.Duration) {
	c.limit, c.work, c.silence = answer, work, max(answer, leastSilence)
}

// WhileWaiting makes the client call notice once for each request that the target still works on after the time of Limit
// for an answer, with the time since the request. notice runs in a goroutine of the client.
func (c *Client) WhileWaiting(notice func(time.Duration)) { c.waiting = notice }

// New returns a client of the target that serves on the Unix socket. It does not connect
// before the first request.
func New(socket string) *Client {
	dialer := net.Dialer{Timeout: dialTime}
	return newClient(socket, &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return dialer.DialContext(ctx, "unix", socket)
	}})
}

func newClient(where string, t *http.Transport) *Client {
	t.DisableCompression = true
	t.MaxIdleConns = 1
	t.IdleConnTimeout = idleTime
	return &Client{where: where, http: http.Client{Transport: t}, silence: leastSilence}
}

// Close ends connections that wait for the next request. Requests in progress continue, and c can be used afterwards.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Remote reports whether the target may run on another machine, where paths mean other files.
func (c *Client) Remote() bool { return c.tls != nil }

// query returns the keys whose values are not empty as a query.
func query(keysAndValues ...string) url.Values {
	q := url.Values{}
	for kv := range slices.Chunk(keysAndValues, 2) {
		if kv[1] != "" {
			q.Set(kv[0], kv[1])
		}
	}
	return q
}

// values returns o as a query, with more keys whose values are not empty.
func values(o schema.Options, more ...string) url.Values {
	q := query(more...)
	for key, on := range map[string]bool{"dry_run": o.DryRun, "disrupt": o.Disrupt, "allow_shrink": o.AllowShrink, "now": o.Now} {
		if on {
			q.Set(key, "true")
		}
	}
	if o.Drain > 0 {
		q.Set("drain", o.Drain.String())
	}
	return q
}

// A document is the body of a request that is YAML.
type document []byte

// encode returns the body of a request, which is a document, a value for JSON, or nil, and its type.
func encode(body any) (b []byte, content string, err error) {
	switch v := body.(type) {
	case nil:
		return nil, "", nil
	case document:
		return v, "application/yaml", nil
	}
	b, err = json.Marshal(body)
	return b, "application/json", err
}

// roundTrip sends the request of w and returns its answer, or the error that the target answers.
func (w *wait) roundTrip(path string, q url.Values, body any) (*http.Response, error) {
	c := w.c
	u := "http://iser-target" + path
	if c.tls != nil {
		u = "https://" + c.tls.tcp + path
	}
	if len(q) > 0 {
		u += "?" + q.Encode()
	}
	b, content, err := encode(body)
	if err != nil {
		return nil, &schema.Error{Code: schema.Invalid, Message: err.Error()}
	}
	req, err := http.NewRequestWithContext(w.ctx, w.method, u, bytes.NewReader(b))
	if err != nil {
		return nil, &schema.Error{Code: schema.Invalid, Message: err.Error()}
	}
	if content != "" {
		req.Header.Set("Content-Type", content)
	}
	if w.method != http.MethodGet {
		req.Header.Set(schema.PreferHeader, schema.PreferProcessing)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, w.fail(err)
	}
	w.heard()
	resp.Body = &heardBody{resp.Body, w.heard}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	b, err = io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	e := &schema.Error{}
	if err != nil || json.Unmarshal(b, e) != nil || e.Code == "" {
		return nil, &schema.Error{Code: schema.Failed, Message: fmt.Sprintf("%s: %s, which is not the answer of a target", c.where, resp.Status)}
	}
	return nil, e
}

// unreached returns the error of a request of that method that got no answer because of err.
func (c *Client) unreached(method string, err error) error {
	e := c.unanswered(method, err)
	e.Cause = err
	return e
}

// unanswered returns that error without its Cause.
func (c *Client) unanswered(method string, err error) *schema.Error {
	hint := "the change may have been made; check when the target is back"
	if method == http.MethodGet {
		hint = "check whether the target still runs"
	}
	if errors.Is(err, context.Canceled) {
		e := &schema.Error{Code: schema.Failed, Message: "interrupted before the target at " + c.where + " answered"}
		if method != http.MethodGet {
			e.Hint = "the change may have been made; check with list or show"
		}
		return e
	}
	if c.tls != nil {
		if e := c.tls.explain(c.where, err); e != nil {
			return e
		}
	}
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		err = op.Err
		if c.tls == nil && errors.Is(err, fs.ErrPermission) {
			return &schema.Error{Code: schema.Unreached, Message: fmt.Sprintf("no access to %s: %v", c.where, err),
				Hint: "only root, the user that the target runs as, and the group control.socket_group may use the socket"}
		}
		hint = "start it with iser-target serve, or name its socket with --socket (control.socket in its configuration)"
		if c.tls != nil {
			hint = "start it with iser-target serve, or name its address with --address (control.listen in its configuration)"
		}
		if c.tls != nil && c.tls.portal {
			hint = "start it with iser-target serve, or name a portal that has control in its configuration"
		}
		return &schema.Error{Code: schema.Unreached, Message: fmt.Sprintf("no target answers on %s: %v", c.where, err), Hint: hint}
	}
	var ue *url.Error
	if errors.As(err, &ue) {
		err = ue.Err
	}
	return &schema.Error{Code: schema.Unreached, Message: fmt.Sprintf("the connection to the target at %s ended before it answered: %v", c.where, err), Hint: hint}
}

// call sends a request and decodes the answer into to.
func (c *Client) call(ctx context.Context, method, path string, q url.Values, body, to any) error {
	w := c.watch(ctx, method)
	defer w.stop()
	resp, err := w.roundTrip(path, q, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return w.decode(resp.Body, to)
}

// decode decodes the answer to the request of w.
func (w *wait) decode(r io.Reader, to any) error {
	b, err := w.read(r)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, to); err != nil {
		return &schema.Error{Code: schema.Failed, Message: fmt.Sprintf("answer of the target at %s: %v", w.c.where, err), Cause: err}
	}
	return nil
}

// read returns the answer to the request of w.
func (w *wait) read(r io.Reader) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxAnswer))
	if err != nil {
		return nil, w.fail(err)
	}
	return b, nil
}

func get[T any](ctx context.Context, c *Client, path string, q url.Values) (v T, err error) {
	err = c.call(ctx, http.MethodGet, path, q, nil, &v)
	return v, err
}

// change requests a change and returns the plan that was carried out.
func (c *Client) change(ctx context.Context, method, path string, q url.Values, body any) (*schema.Plan, error) {
	p := &schema.Plan{}
	if err := c.call(ctx, method, path, q, body, p); err != nil {
		return nil, err
	}
	return p, nil
}

func targetPath(target string) string { return "/v1/targets/" + url.PathEscape(target) }

func lunPath(target string, id int) string { return targetPath(target) + "/luns/" + strconv.Itoa(id) }

// State returns the state of the target, with portals, targets, LUNs and sessions.
func (c *Client) State(ctx context.Context) (schema.State, error) {
	return get[schema.State](ctx, c, "/v1/state", nil)
}

// Targets returns all targets.
func (c *Client) Targets(ctx context.Context) ([]schema.TargetState, error) {
	return get[[]schema.TargetState](ctx, c, "/v1/targets", nil)
}

// Target returns the target with that name.
func (c *Client) Target(ctx context.Context, name string) (schema.TargetState, error) {
	return get[schema.TargetState](ctx, c, targetPath(name), nil)
}

// AddTarget adds a target without LUNs and returns the plan that was carried out.
func (c *Client) AddTarget(ctx context.Context, t schema.Target, o schema.Options) (*schema.Plan, error) {
	return c.change(ctx, http.MethodPost, "/v1/targets", values(o), t)
}

// RemoveTarget removes a target with its LUNs. Their files and devices stay.
func (c *Client) RemoveTarget(ctx context.Context, name string, o schema.Options) (*schema.Plan, error) {
	return c.change(ctx, http.MethodDelete, targetPath(name), values(o), nil)
}

// Allow adds a pattern of initiators that may log in to the target.
func (c *Client) Allow(ctx context.Context, target, pattern string, o schema.Options) (*schema.Plan, error) {
	return c.change(ctx, http.MethodPost, targetPath(target)+"/initiators", values(o), schema.Pattern{Pattern: pattern})
}

// Deny removes a pattern that Allow or the configuration file added.
func (c *Client) Deny(ctx context.Context, target, pattern string, o schema.Options) (*schema.Plan, error) {
	return c.change(ctx, http.MethodDelete, targetPath(target)+"/initiators", values(o, "pattern", pattern), nil)
}

// Users returns the CHAP users of a target.
func (c *Client) Users(ctx context.Context, target string) ([]schema.UserState, error) {
	return get[[]schema.UserState](ctx, c, targetPath(target)+"/users", nil)
}

// AddUser adds a CHAP user to a target.
func (c *Client) AddUser(ctx context.Context, target string, u schema.User, o schema.Options) (*schema.Plan, error) {
	return c.change(ctx, http.MethodPost, targetPath(target)+"/users", values(o), u)
}

// RemoveUser removes a CHAP user of a target.
func (c *Client) RemoveUser(ctx context.Context, target, user string, o schema.Options) (*schema.Plan, error) {
	return c.change(ctx, http.MethodDelete, targetPath(target)+"/users", values(o, "user", user), nil)
}

// RotateUser gives a CHAP user another secret. The present one stays valid until EndRotation.
func (c *Client) RotateUser(ctx context.Context, target string, u schema.User, o schema.Options) (*schema.Plan, error) {
	return c.change(ctx, http.MethodPost, targetPath(target)+"/users/previous", values(o), u)
}

// EndRotation removes the previous secret of a CHAP user.
func (c *Client) EndRotation(ctx context.Context, target, user string, o schema.Options) (*schema.Plan, error) {
	return c.change(ctx, http.MethodDelete, targetPath(target)+"/users/previous", values(o, "user", user), nil)
}

// LUNs returns the LUNs of a target, or of all targets if its name is empty. Their counters
// have no latencies.
func (c *Client) LUNs(ctx context.Context, target string) ([]schema.LUNState, error) {
	return get[[]schema.LUNState](ctx, c, "/v1/luns", query("target", target))
}

// LUN returns one LUN of a target.
func (c *Client) LUN(ctx context.Context, target string, id int) (schema.LUNState, error) {
	return get[schema.LUNState](ctx, c, lunPath(target, id), nil)
}

// AddLUN adds a LUN. The plan has its number.
func (c *Client) AddLUN(ctx context.Context, target string, l schema.LUN, o schema.Options) (*schema.Plan, error) {
	return c.change(ctx, http.MethodPost, targetPath(target)+"/luns", values(o), l)
}

// MakeLUN adds a LUN whose file takes time to create. It calls each with the progress. If
// ctx ends before the file is complete, the target removes the file.
func (c *Client) MakeLUN(ctx context.Context, target string, l schema.LUN, o schema.Options, each func(schema.Progress)) (*schema.Plan, error) {
	return c.follow(ctx, http.MethodPost, targetPath(target)+"/luns", values(o), l, each)
}

// GrowLUN sets keys of a LUN and then allocates the space of its file. It calls each with
// the progress. If ctx ends before that, the LUN has its new size and some of the space.
func (c *Client) GrowLUN(ctx context.Context, target string, id int, v schema.Values, o schema.Options, each func(schema.Progress)) (*schema.Plan, error) {
	return c.follow(ctx, http.MethodPatch, lunPath(target, id), values(o, "preallocate", "true"), v, each)
}

// follow requests a change that may take long.
func (c *Client) follow(ctx context.Context, method, path string, q url.Values, body any, each func(schema.Progress)) (*schema.Plan, error) {
	q.Set("progress", "true")
	w := c.watch(ctx, method)
	defer w.stop()
	resp, err := w.roundTrip(path, q, body)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.Header.Get("Content-Type") != "application/jsonl" { // it took no time
		p := &schema.Plan{}
		return p, w.decode(resp.Body, p)
	}
	w.expect(c.work, "reported no progress")
	var plan *schema.Plan
	if err := lines(w, resp.Body, "progress", func(m schema.ChangeUpdate) error {
		switch {
		case m.Error != nil:
			return m.Error
		case m.Progress != nil:
			each(*m.Progress)
		default:
			plan = m.Plan
		}
		return nil
	}); err != nil {
		return nil, err
	}
	if plan == nil {
		return nil, w.fail(cmp.Or(w.ctx.Err(), io.ErrUnexpectedEOF))
	}
	return plan, nil
}

// SetTarget sets keys of a target.
func (c *Client) SetTarget(ctx context.Context, name string, v schema.Values, o schema.Options) (*schema.Plan, error) {
	return c.change(ctx, http.MethodPatch, targetPath(name), values(o), v)
}

// SetLUN sets keys of a LUN. The key "size" resizes it.
func (c *Client) SetLUN(ctx context.Context, target string, id int, v schema.Values, o schema.Options) (*schema.Plan, error) {
	return c.change(ctx, http.MethodPatch, lunPath(target, id), values(o), v)
}

// RemoveLUN removes a LUN. Its file or device stays.
func (c *Client) RemoveLUN(ctx context.Context, target string, id int, o schema.Options) (*schema.Plan, error) {
	return c.change(ctx, http.MethodDelete, lunPath(target, id), values(o), nil)
}

// Reservations returns the reservations and registrations of all LUNs.
func (c *Client) Reservations(ctx context.Context) ([]schema.Reservation, error) {
	return get[[]schema.Reservation](ctx, c, "/v1/reservations", nil)
}

// ClearReservation removes all reservations and registrations of a LUN.
func (c *Client) ClearReservation(ctx context.Context, target string, id int) error {
	return c.call(ctx, http.MethodDelete, lunPath(target, id)+"/reservation", nil, nil, &schema.Done{})
}

// ResetSettings restores the defaults of what initiators set of a LUN for all.
func (c *Client) ResetSettings(ctx context.Context, target string, id int) error {
	return c.call(ctx, http.MethodDelete, lunPath(target, id)+"/settings", nil, nil, &schema.Done{})
}

// Snapshots returns the snapshots of the LUNs of a target, or of all targets if its name is empty.
func (c *Client) Snapshots(ctx context.Context, target string) ([]schema.Snapshot, error) {
	return get[[]schema.Snapshot](ctx, c, "/v1/snapshots", query("target", target))
}

// Snapshot makes a snapshot of a LUN. With dryRun it only looks whether that is possible.
func (c *Client) Snapshot(ctx context.Context, target string, id int, name string, dryRun bool) (schema.Snapshot, error) {
	var s schema.Snapshot
	err := c.call(ctx, http.MethodPost, lunPath(target, id)+"/snapshots", query("dry_run", trueText(dryRun)), schema.SnapshotRequest{Name: name}, &s)
	return s, err
}

// DeleteSnapshot deletes a snapshot of a LUN. With dryRun it only looks whether that is possible.
func (c *Client) DeleteSnapshot(ctx context.Context, target string, id int, name string, dryRun bool) (schema.Snapshot, error) {
	var s schema.Snapshot
	err := c.call(ctx, http.MethodDelete, lunPath(target, id)+"/snapshots/"+url.PathEscape(name), query("dry_run", trueText(dryRun)), nil, &s)
	return s, err
}

func trueText(on bool) string {
	if on {
		return "true"
	}
	return ""
}

// RecoverLUN uses the file or device of a LUN again that is not healthy. Its sessions stay.
func (c *Client) RecoverLUN(ctx context.Context, target string, id int) (schema.Recovery, error) {
	var r schema.Recovery
	err := c.call(ctx, http.MethodPost, lunPath(target, id)+"/recover", nil, nil, &r)
	return r, err
}

// Scrub returns the last scrub of a LUN.
func (c *Client) Scrub(ctx context.Context, target string, id int) (*schema.Scrub, error) {
	var r schema.Scrub
	err := c.call(ctx, http.MethodGet, lunPath(target, id)+"/scrub", nil, nil, &r)
	return &r, err
}

// BeginScrub begins a scrub of a LUN.
func (c *Client) BeginScrub(ctx context.Context, target string, id int, req schema.ScrubRequest) (*schema.Scrub, error) {
	var r schema.Scrub
	err := c.call(ctx, http.MethodPost, lunPath(target, id)+"/scrub", nil, req, &r)
	return &r, err
}

// CancelScrub ends the scrub of a LUN.
func (c *Client) CancelScrub(ctx context.Context, target string, id int) (*schema.Scrub, error) {
	var r schema.Scrub
	err := c.call(ctx, http.MethodDelete, lunPath(target, id)+"/scrub", nil, nil, &r)
	return &r, err
}

// SetFaults injects faults between a LUN and its backend, instead of those before.
func (c *Client) SetFaults(ctx context.Context, target string, id int, f schema.Faults) error {
	return c.call(ctx, http.MethodPut, lunPath(target, id)+"/faults", nil, f, &schema.Done{})
}

// ClearFaults ends the injection of faults.
func (c *Client) ClearFaults(ctx context.Context, target string, id int) error {
	return c.call(ctx, http.MethodDelete, lunPath(target, id)+"/faults", nil, nil, &schema.Done{})
}

// Portals returns all portals.
func (c *Client) Portals(ctx context.Context) ([]schema.PortalState, error) {
	return get[[]schema.PortalState](ctx, c, "/v1/portals", nil)
}

// AddPortal adds a portal.
func (c *Client) AddPortal(ctx context.Context, p schema.Portal, o schema.Options) (*schema.Plan, error) {
	return c.change(ctx, http.MethodPost, "/v1/portals", values(o), p)
}

// SetPortal sets keys of the portal whose configured address is listen. An empty value removes a key.
func (c *Client) SetPortal(ctx context.Context, listen string, v schema.Values, o schema.Options) (*schema.Plan, error) {
	return c.change(ctx, http.MethodPatch, "/v1/portals/"+url.PathEscape(listen), values(o), v)
}

// IPsec returns what is known about IPsec.
func (c *Client) IPsec(ctx context.Context) (schema.IPsecState, error) {
	return get[schema.IPsecState](ctx, c, "/v1/ipsec", nil)
}

// RemovePortal removes the portal whose configured address is listen.
func (c *Client) RemovePortal(ctx context.Context, listen string, o schema.Options) (*schema.Plan, error) {
	return c.change(ctx, http.MethodDelete, "/v1/portals/"+url.PathEscape(listen), values(o), nil)
}

// Sessions returns all sessions in the order of their TSIHs. Their counters have no latencies.
func (c *Client) Sessions(ctx context.Context) ([]schema.SessionState, error) {
	return get[[]schema.SessionState](ctx, c, "/v1/sessions", nil)
}

// Session returns the session with that TSIH.
func (c *Client) Session(ctx context.Context, tsih uint16) (schema.SessionState, error) {
	return get[schema.SessionState](ctx, c, fmt.Sprintf("/v1/sessions/%d", tsih), nil)
}

// KillSession ends a session. The reason, which may be empty, goes to the log. The initiator
// may log in again.
func (c *Client) KillSession(ctx context.Context, tsih uint16, reason string) error {
	return c.call(ctx, http.MethodDelete, fmt.Sprintf("/v1/sessions/%d", tsih), query("reason", reason), nil, &schema.Done{})
}

// Drain makes the target end: initiators have that time to log out, and go to the address if it is not empty.
// It does not wait for the end.
func (c *Client) Drain(ctx context.Context, within time.Duration, to string) (s schema.DrainState, err error) {
	err = c.call(ctx, http.MethodPost, "/v1/drain", nil, schema.DrainRequest{Within: within.String(), To: to}, &s)
	return s, err
}

// Upgrade makes a new process of the program continue what the target does.
func (c *Client) Upgrade(ctx context.Context) (u schema.Upgrade, err error) {
	err = c.call(ctx, http.MethodPost, "/v1/upgrade", nil, nil, &u)
	return u, err
}

// Cluster returns the gateways that share LUNs with the target.
func (c *Client) Cluster(ctx context.Context) (schema.ClusterState, error) {
	return get[schema.ClusterState](ctx, c, "/v1/cluster", nil)
}

// HandOver makes a gateway the owner of a shared LUN; "" ends such a choice. It does not wait for that.
func (c *Client) HandOver(ctx context.Context, target string, id int, to string) error {
	var done schema.Done
	return c.call(ctx, http.MethodPost, lunPath(target, id)+"/handover", nil, schema.HandOverRequest{To: to}, &done)
}

// Balance spreads the shared LUNs evenly over the gateways, or only returns the moves.
func (c *Client) Balance(ctx context.Context, dryRun bool) (moves []schema.ClusterMove, err error) {
	err = c.call(ctx, http.MethodPost, "/v1/cluster/balance", query("dry_run", trueText(dryRun)), nil, &moves)
	return moves, err
}

// ClusterConfig returns the targets of the cluster, as they run on the target.
func (c *Client) ClusterConfig(ctx context.Context) (schema.ClusterConfig, error) {
	return get[schema.ClusterConfig](ctx, c, "/v1/cluster/config", nil)
}

// ApplyCluster makes the targets in the text, YAML with the key targets, those of all gateways of the cluster. With move, targets of the same
// names leave the configuration file of the target that is asked.
func (c *Client) ApplyCluster(ctx context.Context, source string, text []byte, move bool, o schema.Options) (*schema.Plan, error) {
	return c.change(ctx, http.MethodPost, "/v1/cluster/config/apply", values(o, "source", source, "move", trueText(move)), document(text))
}

// Limits returns the limits of what initiators share, and their present use.
func (c *Client) Limits(ctx context.Context) ([]schema.LimitState, error) {
	return get[[]schema.LimitState](ctx, c, "/v1/limits", nil)
}

// SetLimits sets keys of limits in the configuration. An empty value restores the default.
func (c *Client) SetLimits(ctx context.Context, v schema.Values, o schema.Options) (*schema.Plan, error) {
	return c.change(ctx, http.MethodPatch, "/v1/limits", values(o), v)
}

// Plan returns what Apply of the document would do. Errors name the document by source.
func (c *Client) Plan(ctx context.Context, source string, text []byte) (*schema.Plan, error) {
	return c.change(ctx, http.MethodPost, "/v1/config/plan", query("source", source), document(text))
}

// Apply makes the document the running configuration, and writes it to the configuration file.
func (c *Client) Apply(ctx context.Context, source string, text []byte, o schema.Options) (*schema.Plan, error) {
	return c.change(ctx, http.MethodPost, "/v1/config/apply", values(o, "source", source), document(text))
}

// ApplyOwn applies the text of the target's own configuration file. It fails with code
// Edited if the file has another text by then.
func (c *Client) ApplyOwn(ctx context.Context, source string, text []byte, o schema.Options) (*schema.Plan, error) {
	q := values(o, "source", source, "own_file", "true")
	return c.change(ctx, http.MethodPost, "/v1/config/apply", q, document(text))
}

// Export returns the running configuration as YAML, secrets included.
func (c *Client) Export(ctx context.Context) ([]byte, error) {
	w := c.watch(ctx, http.MethodGet)
	defer w.stop()
	resp, err := w.roundTrip("/v1/config", nil, nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return w.read(resp.Body)
}

// Explain returns whether an initiator could log in to a target, and why. portal, and from, the address that the
// initiator connects from, may be empty.
func (c *Client) Explain(ctx context.Context, initiator, target, portal, from string) (schema.Explanation, error) {
	return get[schema.Explanation](ctx, c, "/v1/explain", query("initiator", initiator, "target", target, "portal", portal, "from", from))
}

// lines calls each with the lines of the answer to w, until the context of the caller ends. what names a line in errors.
// Empty lines only show that the target is alive.
func lines[T any](w *wait, r io.Reader, what string, each func(T) error) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		if len(lines.Bytes()) == 0 {
			continue
		}
		var v T
		if err := json.Unmarshal(lines.Bytes(), &v); err != nil {
			return &schema.Error{Code: schema.Failed, Message: fmt.Sprintf("%s: %v", what, err), Cause: err}
		}
		if err := each(v); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil && (context.Cause(w.ctx) == errSilent || !errors.Is(w.ctx.Err(), context.Canceled)) {
		return w.fail(err)
	}
	return nil
}

func capturePath(tsih uint16) string { return fmt.Sprintf("/v1/sessions/%d/capture", tsih) }

// A Capture is the answer to a request that records a session: a growing pcapng file.
type Capture struct {
	c     *Client
	tsih  uint16
	resp  *http.Response
	w     *wait         // ends with errSilent when the target answers no longer
	heard chan struct{} // has an element if bytes have come
}

// Capture begins to record a session. The caller must call Close.
func (c *Client) Capture(ctx context.Context, tsih uint16, o schema.CaptureOptions) (*Capture, error) {
	q := url.Values{}
	if o.Max != 0 {
		q.Set("max", strconv.FormatInt(o.Max, 10))
	}
	if o.Duration != 0 {
		q.Set("duration", o.Duration.String())
	}
	if o.Snaplen != 0 {
		q.Set("snaplen", strconv.Itoa(o.Snaplen))
	}
	if o.Headers {
		q.Set("headers_only", "true")
	}
	if o.LUN != nil {
		q.Set("lun", strconv.Itoa(int(*o.LUN)))
	}
	w := c.watch(ctx, http.MethodGet)
	resp, err := w.roundTrip(capturePath(tsih), q, nil)
	if err != nil {
		w.stop()
		return nil, err
	}
	w.expect(0, "has not answered") // Capture.watch ends it
	k := &Capture{c, tsih, resp, w, make(chan struct{}, 1)}
	if c.limit > 0 {
		go k.watch()
	}
	return k, nil
}

// watch ends a capture whose target answers no longer. A session without traffic has nothing to record, so
// it asks for the session when nothing has come for the limit.
func (k *Capture) watch() {
	for {
		select {
		case <-k.w.ctx.Done():
			return
		case <-k.heard:
			continue
		case <-time.After(k.c.limit):
		}
		begun := time.Now()
		_, err := k.c.Session(k.w.ctx, k.tsih)
		var e *schema.Error
		late := errors.As(err, &e) && e.Code == schema.Unreached && time.Since(begun) >= k.c.limit
		select {
		case <-k.heard:
		default:
			if late {
				k.w.silent(k.c.limit)
			}
		}
	}
}

// StopCapture ends the capture of a session.
func (c *Client) StopCapture(ctx context.Context, tsih uint16) error {
	return c.call(ctx, http.MethodDelete, capturePath(tsih), nil, nil, &schema.Done{})
}

// Close ends the capture and discards what Copy has not written.
func (k *Capture) Close() error {
	k.w.stop()
	return k.resp.Body.Close()
}

// Copy writes the file to w until the capture ends, and returns its summary. If the target
// ends before, or w fails, the first Size bytes of w are a valid file.
func (k *Capture) Copy(w io.Writer) (sum schema.Summary, err error) {
	sum.Size, err = copyBlocks(w, &heardBody{k.resp.Body, func() {
		select {
		case k.heard <- struct{}{}:
		default:
		}
	}})
	var write *writeError
	switch {
	case errors.As(err, &write):
		return sum, write.error
	case err != nil:
		return sum, k.w.fail(err)
	}
	if err := json.Unmarshal([]byte(k.resp.Trailer.Get(schema.SummaryTrailer)), &sum); err != nil {
		return sum, &schema.Error{Code: schema.Failed, Message: fmt.Sprintf("the target at %s did not report how the capture ended: %v", k.c.where, err), Cause: err}
	}
	return sum, nil
}
