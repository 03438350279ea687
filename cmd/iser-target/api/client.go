package api

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
	"strconv"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
)

const (
	dialTime = 5 * time.Second
	// maxAnswer bounds what a client keeps of an answer, in octets: the state of
	// 16384 LUNs has less.
	maxAnswer = 64 << 20
	maxLine   = 1 << 20 // octets of one event, or of one ChangeUpdate
)

// A Client asks a target. Its errors are *Error.
type Client struct {
	where string     // path of the socket, or host:port
	tls   *clientTLS // nil: the target is asked by its socket
	http  http.Client
}

// NewClient returns a client of the target that serves on the Unix socket.
func NewClient(socket string) *Client {
	dialer := net.Dialer{Timeout: dialTime}
	return newClient(socket, &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return dialer.DialContext(ctx, "unix", socket)
	}})
}

func newClient(where string, t *http.Transport) *Client {
	t.DisableCompression = true
	t.MaxIdleConns = 1
	t.IdleConnTimeout = idleTime / 2 // before the server's
	return &Client{where: where, http: http.Client{Transport: t}}
}

// Remote tells whether the target may be on another machine: paths mean nothing here
// then.
func (c *Client) Remote() bool { return c.tls != nil }

// values are o as a query.
func (o Options) values() url.Values {
	q := url.Values{}
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

// roundTrip sends a request and returns the answer if that is a good one.
func (c *Client) roundTrip(ctx context.Context, method, path string, q url.Values, content string, body []byte) (*http.Response, error) {
	u := "http://iser-target" + path
	if c.tls != nil {
		u = "https://" + c.where + path
	}
	if len(q) > 0 {
		u += "?" + q.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, method, u, bytes.NewReader(body))
	if err != nil {
		return nil, &Error{Code: Invalid, Message: err.Error()}
	}
	if body != nil {
		req.Header.Set("Content-Type", content)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.unreached(method, err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	e := &Error{}
	if err != nil || json.Unmarshal(b, e) != nil || e.Code == "" {
		return nil, &Error{Code: Failed, Message: fmt.Sprintf("%s: %s, which is no answer of a target", c.where, resp.Status)}
	}
	return nil, e
}

// unreached is why there was no answer to a request of that method.
func (c *Client) unreached(method string, err error) error {
	hint := "whether a change was made is not known: look when it is back"
	if method == http.MethodGet {
		hint = "nothing was to change: see whether it still runs"
	}
	if errors.Is(err, context.Canceled) {
		e := &Error{Code: Failed, Message: "interrupted before the target at " + c.where + " answered"}
		if method != http.MethodGet {
			e.Hint = "whether a change was made is not known: see what there is"
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
			return &Error{Code: Unreached, Message: fmt.Sprintf("not allowed to use %s: %v", c.where, err),
				Hint: "it is for the user that the target runs as, and for root"}
		}
		hint = "start it with iser-target serve, or say by --socket where it is (control.socket in its configuration)"
		if c.tls != nil {
			hint = "start it with iser-target serve, or say by --address where it is (control.listen in its configuration)"
		}
		return &Error{Code: Unreached, Message: fmt.Sprintf("no target answers on %s: %v", c.where, err), Hint: hint}
	}
	var ue *url.Error
	if errors.As(err, &ue) {
		err = ue.Err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return &Error{Code: Unreached, Message: "the target at " + c.where + " has not answered in time", Hint: hint}
	}
	return &Error{Code: Unreached, Message: fmt.Sprintf("the target at %s went away before it answered: %v", c.where, err), Hint: hint}
}

// call sends v, if it is not nil, as JSON and reads the answer into to.
func (c *Client) call(ctx context.Context, method, path string, q url.Values, v, to any) error {
	var b []byte
	if v != nil {
		var err error
		if b, err = json.Marshal(v); err != nil {
			return &Error{Code: Invalid, Message: err.Error()}
		}
	}
	return c.send(ctx, method, path, q, "application/json", b, to)
}

func (c *Client) send(ctx context.Context, method, path string, q url.Values, content string, body []byte, to any) error {
	resp, err := c.roundTrip(ctx, method, path, q, content, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return c.decode(method, resp.Body, to)
}

// decode reads an answer to a request of that method.
func (c *Client) decode(method string, r io.Reader, to any) error {
	b, err := io.ReadAll(io.LimitReader(r, maxAnswer))
	if err != nil {
		return c.unreached(method, err)
	}
	if err := json.Unmarshal(b, to); err != nil {
		return &Error{Code: Failed, Message: fmt.Sprintf("answer of the target at %s: %v", c.where, err)}
	}
	return nil
}

func get[T any](ctx context.Context, c *Client, path string, q url.Values) (v T, err error) {
	err = c.call(ctx, http.MethodGet, path, q, nil, &v)
	return v, err
}

// change asks for a change and returns what became of it.
func (c *Client) change(ctx context.Context, method, path string, q url.Values, v any) (*daemon.Plan, error) {
	p := &daemon.Plan{}
	if err := c.call(ctx, method, path, q, v, p); err != nil {
		return nil, err
	}
	return p, nil
}

func targetPath(target string) string { return "/v1/targets/" + url.PathEscape(target) }

func lunPath(target string, id int) string { return targetPath(target) + "/luns/" + strconv.Itoa(id) }

// State is all that runs.
func (c *Client) State(ctx context.Context) (daemon.State, error) {
	return get[daemon.State](ctx, c, "/v1/state", nil)
}

// Targets are all.
func (c *Client) Targets(ctx context.Context) ([]daemon.TargetState, error) {
	return get[[]daemon.TargetState](ctx, c, "/v1/targets", nil)
}

// Target is that of this name.
func (c *Client) Target(ctx context.Context, name string) (daemon.TargetState, error) {
	return get[daemon.TargetState](ctx, c, targetPath(name), nil)
}

// AddTarget adds a target without LUNs.
func (c *Client) AddTarget(ctx context.Context, t Target, o Options) (*daemon.Plan, error) {
	return c.change(ctx, http.MethodPost, "/v1/targets", o.values(), t)
}

// RemoveTarget removes a target with its LUNs; files stay.
func (c *Client) RemoveTarget(ctx context.Context, name string, o Options) (*daemon.Plan, error) {
	return c.change(ctx, http.MethodDelete, targetPath(name), o.values(), nil)
}

// Allow lets initiators in that match the pattern.
func (c *Client) Allow(ctx context.Context, target, pattern string, o Options) (*daemon.Plan, error) {
	return c.change(ctx, http.MethodPost, targetPath(target)+"/initiators", o.values(), Pattern{pattern})
}

// Deny takes the pattern from those that let initiators in.
func (c *Client) Deny(ctx context.Context, target, pattern string, o Options) (*daemon.Plan, error) {
	q := o.values()
	q.Set("pattern", pattern)
	return c.change(ctx, http.MethodDelete, targetPath(target)+"/initiators", q, nil)
}

// LUNs are those of a target, or all if its name is empty.
func (c *Client) LUNs(ctx context.Context, target string) ([]daemon.LUNState, error) {
	q := url.Values{}
	if target != "" {
		q.Set("target", target)
	}
	return get[[]daemon.LUNState](ctx, c, "/v1/luns", q)
}

// LUN is one of a target.
func (c *Client) LUN(ctx context.Context, target string, id int) (daemon.LUNState, error) {
	return get[daemon.LUNState](ctx, c, lunPath(target, id), nil)
}

// AddLUN adds a LUN; the plan has its number.
func (c *Client) AddLUN(ctx context.Context, target string, l LUN, o Options) (*daemon.Plan, error) {
	return c.change(ctx, http.MethodPost, targetPath(target)+"/luns", o.values(), l)
}

// MakeLUN is AddLUN for a LUN whose file takes time to make. It tells each how far that
// has come; when ctx ends, what there is of it is removed.
func (c *Client) MakeLUN(ctx context.Context, target string, l LUN, o Options, each func(Progress)) (*daemon.Plan, error) {
	return c.follow(ctx, http.MethodPost, targetPath(target)+"/luns", o.values(), l, each)
}

// GrowLUN is SetLUN that gives the file of the LUN the space that it has more then. It
// tells each how far that has come; when ctx ends, the LUN has its new size and some of
// the space.
func (c *Client) GrowLUN(ctx context.Context, target string, id int, v Values, o Options, each func(Progress)) (*daemon.Plan, error) {
	q := o.values()
	q.Set("preallocate", "true")
	return c.follow(ctx, http.MethodPatch, lunPath(target, id), q, v, each)
}

// follow asks for a change that can take long.
func (c *Client) follow(ctx context.Context, method, path string, q url.Values, v any, each func(Progress)) (*daemon.Plan, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, &Error{Code: Invalid, Message: err.Error()}
	}
	q.Set("progress", "true")
	resp, err := c.roundTrip(ctx, method, path, q, "application/json", b)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.Header.Get("Content-Type") != "application/jsonl" { // it took no time
		p := &daemon.Plan{}
		return p, c.decode(method, resp.Body, p)
	}
	var plan *daemon.Plan
	if err := c.lines(ctx, method, resp.Body, func(line []byte) error {
		var m ChangeUpdate
		switch err := json.Unmarshal(line, &m); {
		case err != nil:
			return &Error{Code: Failed, Message: fmt.Sprintf("progress: %v", err)}
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
		return nil, c.unreached(method, cmp.Or(ctx.Err(), io.ErrUnexpectedEOF))
	}
	return plan, nil
}

// SetLUN sets keys of a LUN; "size" among them resizes it.
func (c *Client) SetLUN(ctx context.Context, target string, id int, v Values, o Options) (*daemon.Plan, error) {
	return c.change(ctx, http.MethodPatch, lunPath(target, id), o.values(), v)
}

// RemoveLUN removes a LUN; its file stays.
func (c *Client) RemoveLUN(ctx context.Context, target string, id int, o Options) (*daemon.Plan, error) {
	return c.change(ctx, http.MethodDelete, lunPath(target, id), o.values(), nil)
}

// Reservations are those of all LUNs.
func (c *Client) Reservations(ctx context.Context) ([]Reservation, error) {
	return get[[]Reservation](ctx, c, "/v1/reservations", nil)
}

// ClearReservation ends all reservations of, and registrations with, a LUN.
func (c *Client) ClearReservation(ctx context.Context, target string, id int) error {
	return c.call(ctx, http.MethodDelete, lunPath(target, id)+"/reservation", nil, nil, &done{})
}

// Portals are all.
func (c *Client) Portals(ctx context.Context) ([]daemon.PortalState, error) {
	return get[[]daemon.PortalState](ctx, c, "/v1/portals", nil)
}

// AddPortal adds a portal.
func (c *Client) AddPortal(ctx context.Context, p Portal, o Options) (*daemon.Plan, error) {
	return c.change(ctx, http.MethodPost, "/v1/portals", o.values(), p)
}

// RemovePortal removes the portal that is configured with this address.
func (c *Client) RemovePortal(ctx context.Context, listen string, o Options) (*daemon.Plan, error) {
	return c.change(ctx, http.MethodDelete, "/v1/portals/"+url.PathEscape(listen), o.values(), nil)
}

// Sessions are all, by TSIH.
func (c *Client) Sessions(ctx context.Context) ([]daemon.SessionState, error) {
	return get[[]daemon.SessionState](ctx, c, "/v1/sessions", nil)
}

// Session is the one with this TSIH.
func (c *Client) Session(ctx context.Context, tsih uint16) (daemon.SessionState, error) {
	return get[daemon.SessionState](ctx, c, fmt.Sprintf("/v1/sessions/%d", tsih), nil)
}

// KillSession ends a session; the reason, which may be empty, goes to the log.
func (c *Client) KillSession(ctx context.Context, tsih uint16, reason string) error {
	q := url.Values{}
	if reason != "" {
		q.Set("reason", reason)
	}
	return c.call(ctx, http.MethodDelete, fmt.Sprintf("/v1/sessions/%d", tsih), q, nil, &done{})
}

// Plan tells what Apply of the document would do; errors in it are about source.
func (c *Client) Plan(ctx context.Context, source string, document []byte) (*daemon.Plan, error) {
	return c.document(ctx, "/v1/config/plan", source, document, url.Values{})
}

// Apply makes the document the configuration.
func (c *Client) Apply(ctx context.Context, source string, document []byte, o Options) (*daemon.Plan, error) {
	return c.document(ctx, "/v1/config/apply", source, document, o.values())
}

// ApplyOwn is Apply of the text of the file of the target. It fails with code Edited if the
// file has another text by then.
func (c *Client) ApplyOwn(ctx context.Context, source string, document []byte, o Options) (*daemon.Plan, error) {
	q := o.values()
	q.Set("own_file", "true")
	return c.document(ctx, "/v1/config/apply", source, document, q)
}

func (c *Client) document(ctx context.Context, path, source string, document []byte, q url.Values) (*daemon.Plan, error) {
	q.Set("source", source)
	p := &daemon.Plan{}
	if err := c.send(ctx, http.MethodPost, path, q, "application/yaml", append([]byte{}, document...), p); err != nil {
		return nil, err
	}
	return p, nil
}

// Export is the configuration that runs, as YAML.
func (c *Client) Export(ctx context.Context) ([]byte, error) {
	return c.text(ctx, "/v1/config")
}

func (c *Client) text(ctx context.Context, path string) ([]byte, error) {
	resp, err := c.roundTrip(ctx, http.MethodGet, path, nil, "", nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return nil, c.unreached(http.MethodGet, err)
	}
	return b, nil
}

// Explain tells whether an initiator would be let in; portal may be empty.
func (c *Client) Explain(ctx context.Context, initiator, target, portal string) (daemon.Explanation, error) {
	q := url.Values{"initiator": {initiator}, "target": {target}}
	if portal != "" {
		q.Set("portal", portal)
	}
	return get[daemon.Explanation](ctx, c, "/v1/explain", q)
}

// Events calls each with the events whose numbers are above since, and with follow with
// those that come, until that fails, ctx ends, or the target does.
func (c *Client) Events(ctx context.Context, since uint64, follow bool, each func(daemon.Event) error) error {
	q := url.Values{"since": {strconv.FormatUint(since, 10)}, "follow": {strconv.FormatBool(follow)}}
	resp, err := c.roundTrip(ctx, http.MethodGet, "/v1/events", q, "", nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return c.lines(ctx, http.MethodGet, resp.Body, func(line []byte) error {
		var e daemon.Event
		if err := json.Unmarshal(line, &e); err != nil {
			return &Error{Code: Failed, Message: fmt.Sprintf("event: %v", err)}
		}
		return each(e)
	})
}

// lines calls each with the lines that have something in them, of the answer to a request
// of that method, until ctx ends.
func (c *Client) lines(ctx context.Context, method string, r io.Reader, each func(line []byte) error) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		if len(lines.Bytes()) == 0 {
			continue // the target is alive
		}
		if err := each(lines.Bytes()); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil && ctx.Err() == nil {
		return c.unreached(method, err)
	}
	return nil
}
