// Package api serves the control API of a running target: JSON over HTTP on a Unix socket,
// or with TLS on a TCP address. openapi.yaml describes it. Package client has the client,
// package schema the types that both use.
package api

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/cmd/iser-target/capture"
	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
	"github.com/iser-target/iser-target/cmd/iser-target/httpd"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/lun/state"
)

// Limits of requests.
const (
	maxBody        = 64 << 10         // bytes of a request in JSON
	maxDocument    = config.MaxFile   // bytes of a configuration
	maxConnections = 128              // of a listener, at one time
	maxFollowers   = 64               // event streams at one time
	writeTime      = 30 * time.Second // of an answer, or of one event
	idleTime       = 2 * time.Minute
	// turnTime bounds the wait for other changes. A change that has begun is completed.
	turnTime = time.Minute
	// heartbeat is the interval of empty lines on a silent event stream, which reveal
	// that the reader is gone.
	heartbeat = 15 * time.Second
)

//go:embed openapi.yaml
var openAPI []byte

// A Server answers the requests of the control API of one daemon.
type Server struct {
	d         *daemon.Daemon
	rights    rights
	trust     atomic.Pointer[trust] // nil: no listener requires certificates
	origins   http.CrossOriginProtection
	http      *http.Server
	ending    chan struct{} // closed to end streams
	followers chan struct{}
	readers   chan struct{} // those of followers that are not administrators
}

// A route maps a method and path to its handler.
type route struct {
	pattern string // of http.ServeMux
	role    role   // that the caller needs
	query   string // known parameters, space separated
	handle  func(*Server, http.ResponseWriter, *http.Request) error
}

// options are the parameters that changeOptions takes.
const options = "dry_run disrupt allow_shrink now drain"

var routes = []route{
	{"GET /v1/state", roleRead, "", value((*Server).state)},
	{"GET /v1/targets", roleRead, "", value((*Server).targets)},
	{"POST /v1/targets", roleAdmin, options, value((*Server).addTarget)},
	{"GET /v1/targets/{target}", roleRead, "", value((*Server).target)},
	{"PATCH /v1/targets/{target}", roleOperate, options, value((*Server).setTarget)},
	{"DELETE /v1/targets/{target}", roleAdmin, options, value((*Server).removeTarget)},
	{"POST /v1/targets/{target}/initiators", roleOperate, options, value((*Server).allow)},
	{"DELETE /v1/targets/{target}/initiators", roleOperate, "pattern " + options, value((*Server).deny)},
	{"GET /v1/targets/{target}/users", roleRead, "", value((*Server).users)},
	{"POST /v1/targets/{target}/users", roleAdmin, options, value((*Server).addUser)},
	{"DELETE /v1/targets/{target}/users", roleAdmin, "user " + options, value((*Server).removeUser)},
	{"POST /v1/targets/{target}/users/previous", roleAdmin, options, value((*Server).rotateUser)},
	{"DELETE /v1/targets/{target}/users/previous", roleAdmin, "user " + options, value((*Server).endRotation)},
	{"GET /v1/luns", roleRead, "target", value((*Server).luns)},
	{"POST /v1/targets/{target}/luns", roleOperate, "progress " + options, (*Server).addLUN},
	{"GET /v1/targets/{target}/luns/{lun}", roleRead, "", value((*Server).lun)},
	{"PATCH /v1/targets/{target}/luns/{lun}", roleOperate, "progress preallocate " + options, (*Server).setLUN},
	{"DELETE /v1/targets/{target}/luns/{lun}", roleOperate, options, value((*Server).removeLUN)},
	{"GET /v1/reservations", roleRead, "", value((*Server).reservations)},
	{"DELETE /v1/targets/{target}/luns/{lun}/reservation", roleOperate, "", value((*Server).clearReservation)},
	{"DELETE /v1/targets/{target}/luns/{lun}/settings", roleOperate, "", value((*Server).resetSettings)},
	{"POST /v1/targets/{target}/luns/{lun}/recover", roleOperate, "", value((*Server).recoverLUN)},
	{"GET /v1/targets/{target}/luns/{lun}/scrub", roleRead, "", value((*Server).scrub)},
	{"POST /v1/targets/{target}/luns/{lun}/scrub", roleOperate, "", value((*Server).beginScrub)},
	{"DELETE /v1/targets/{target}/luns/{lun}/scrub", roleOperate, "", value((*Server).cancelScrub)},
	{"PUT /v1/targets/{target}/luns/{lun}/faults", roleAdmin, "", value((*Server).setFaults)},
	{"DELETE /v1/targets/{target}/luns/{lun}/faults", roleAdmin, "", value((*Server).clearFaults)},
	{"GET /v1/snapshots", roleRead, "target", value((*Server).snapshots)},
	{"POST /v1/targets/{target}/luns/{lun}/snapshots", roleOperate, "dry_run", value((*Server).makeSnapshot)},
	{"DELETE /v1/targets/{target}/luns/{lun}/snapshots/{snapshot}", roleOperate, "dry_run", value((*Server).deleteSnapshot)},
	{"GET /v1/portals", roleRead, "", value((*Server).portals)},
	{"POST /v1/portals", roleAdmin, options, value((*Server).addPortal)},
	{"PATCH /v1/portals/{portal}", roleAdmin, options, value((*Server).setPortal)},
	{"DELETE /v1/portals/{portal}", roleAdmin, options, value((*Server).removePortal)},
	{"GET /v1/sessions", roleRead, "", value((*Server).sessions)},
	{"GET /v1/sessions/{tsih}", roleRead, "", value((*Server).session)},
	{"DELETE /v1/sessions/{tsih}", roleOperate, "reason", value((*Server).killSession)},
	{"GET /v1/sessions/{tsih}/capture", roleAdmin, "max duration snaplen headers_only lun", (*Server).capture},
	{"DELETE /v1/sessions/{tsih}/capture", roleAdmin, "", value((*Server).stopCapture)},
	{"GET /v1/ipsec", roleRead, "", value((*Server).ipsec)},
	{"GET /v1/cluster", roleRead, "", value((*Server).cluster)},
	{"POST /v1/cluster/balance", roleOperate, "dry_run", value((*Server).balance)},
	{"GET /v1/cluster/config", roleRead, "", value((*Server).clusterConfig)},
	{"POST /v1/cluster/config/apply", roleAdmin, "move source " + options, value((*Server).applyCluster)},
	{"POST /v1/targets/{target}/luns/{lun}/handover", roleOperate, "", value((*Server).handOver)},
	{"GET /v1/limits", roleRead, "", value((*Server).limits)},
	{"PATCH /v1/limits", roleAdmin, options, value((*Server).setLimits)},
	{"GET /v1/config", roleRead, "", (*Server).exportConfig},
	{"POST /v1/config/plan", roleAdmin, "source " + options, value((*Server).planConfig)},
	{"POST /v1/config/apply", roleAdmin, "own_file source " + options, value((*Server).applyConfig)},
	{"POST /v1/drain", roleAdmin, "", value((*Server).drain)},
	{"POST /v1/upgrade", roleAdmin, "", value((*Server).upgrade)},
	{"GET /v1/explain", roleRead, "initiator target portal from", value((*Server).explain)},
	{"GET /v1/events", roleRead, "since follow", (*Server).events},
	{"GET /v1/openapi.yaml", roleRead, "", (*Server).describe},
}

// value returns a handler that answers with the result of get as JSON.
func value(get func(*Server, *http.Request) (any, error)) func(*Server, http.ResponseWriter, *http.Request) error {
	return func(s *Server, w http.ResponseWriter, r *http.Request) error {
		working := showWork(w, r)
		defer working.stop()
		v, err := get(s, r)
		working.stop()
		if err == nil {
			writeJSON(w, http.StatusOK, v)
		}
		return err
	}
}

// NewServer returns a server of d on the addresses of c. d must be ready before the first request.
func NewServer(d *daemon.Daemon, c config.Control) *Server {
	s := &Server{d: d, rights: newRights(c, d.Logger()), ending: make(chan struct{}), followers: make(chan struct{}, maxFollowers), readers: make(chan struct{}, maxFollowers/2)}
	mux := http.NewServeMux()
	for _, to := range routes {
		mux.HandleFunc(to.pattern, func(w http.ResponseWriter, r *http.Request) {
			err := s.require(r, to.role, to.pattern)
			if err == nil {
				err = checkQuery(r, strings.Fields(to.query))
			}
			if err == nil {
				err = checkContent(r)
			}
			if err == nil {
				err = to.handle(s, w, r)
			}
			if err != nil {
				s.refuse(w, r, err)
			}
		})
	}
	s.http = httpd.NewServer(s.identified(unknown(mux)), func(w http.ResponseWriter, err error) {
		writeError(w, &schema.Error{Code: schema.Busy, Message: err.Error(), Hint: "close some of them, or try again"})
	})
	s.http.IdleTimeout = idleTime
	s.http.ConnContext = withManager(withPeer(s.http.ConnContext))
	s.http.ErrorLog = slog.NewLogLogger(d.Logger().With("server", "control API").Handler(), slog.LevelWarn)
	s.http.RegisterOnShutdown(func() { close(s.ending) })
	return s
}

// Serve answers the requests of the connections of l until Shutdown, which closes l.
func (s *Server) Serve(l net.Listener) error { return s.serve(l, maxConnections) }

// serve serves the connections of l like Serve, most of them at one time.
func (s *Server) serve(l net.Listener, most int) error {
	if err := s.http.Serve(httpd.Limit(l, most)); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Shutdown ends Serve. It waits for requests in progress until ctx ends.
func (s *Server) Shutdown(ctx context.Context) error {
	err := s.http.Shutdown(ctx)
	if err != nil {
		err = errors.Join(err, s.http.Close())
	}
	return err
}

// use makes t prove who clients are.
func (s *Server) use(t *trust) {
	s.trust.Store(t)
	s.d.ShowCertificates(t.certificates)
}

// unknown answers requests for which mux has no route, in JSON.
func unknown(mux *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h, pattern := mux.Handler(r)
		if pattern != "" {
			mux.ServeHTTP(w, r)
			return
		}
		var answer statusOnly
		answer.header = w.Header()
		h.ServeHTTP(&answer, r)
		if answer.status == http.StatusMethodNotAllowed {
			writeError(w, &schema.Error{Code: schema.Method, Message: fmt.Sprintf("%s does not support %s", r.URL.Path, r.Method), Hint: "use " + w.Header().Get("Allow")})
			return
		}
		writeError(w, &schema.Error{Code: schema.NotFound, Message: r.URL.Path + ": no such path", Hint: "GET /v1/openapi.yaml describes all paths"})
	})
}

// A statusOnly is a ResponseWriter that discards the body.
type statusOnly struct {
	header http.Header
	status int
}

func (s *statusOnly) Header() http.Header         { return s.header }
func (s *statusOnly) WriteHeader(status int)      { s.status = status }
func (s *statusOnly) Write(b []byte) (int, error) { return len(b), nil }

func writeJSON(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		status, b = http.StatusInternalServerError, []byte(`{"error":"the answer cannot be encoded as JSON","code":"failed"}`)
	}
	send(w, status, "application/json", append(b, '\n'))
}

// send sends an answer to a client that must read it within writeTime.
func send(w http.ResponseWriter, status int, content string, b []byte) {
	http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTime))
	w.Header().Set("Content-Type", content)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	w.Write(b)
}

// A patient is a Writer of a stream to a client that must read each write within writeTime.
type patient struct{ w http.ResponseWriter }

func (p patient) Write(b []byte) (int, error) {
	control := http.NewResponseController(p.w)
	control.SetWriteDeadline(time.Now().Add(writeTime))
	n, err := p.w.Write(b)
	if err == nil {
		err = control.Flush()
	}
	return n, err
}

// Reasons for the end of a stream.
var (
	errRole   = errors.New("its caller has lost the role for it")
	errEnding = errors.New("the target ends")
	errGone   = errors.New("the client is gone")
)

// stream returns the context of an answer that may take long. It ends with the client, with the target, and
// soon after the caller has a lower role than it had. The caller must call cancel.
func (s *Server) stream(w http.ResponseWriter, r *http.Request) (ctx context.Context, cancel context.CancelCauseFunc) {
	http.NewResponseController(w).SetReadDeadline(time.Time{}) // else it would look like the end of the client
	ctx, cancel = context.WithCancelCause(context.WithoutCancel(r.Context()))
	go func() {
		tick := time.NewTicker(heartbeat)
		defer tick.Stop()
		for {
			select {
			case <-s.ending:
				cancel(errEnding)
				return
			case <-r.Context().Done():
				cancel(errGone)
				return
			case <-ctx.Done():
				return
			case <-tick.C:
				if s.lostRole(r) {
					cancel(errRole)
					return
				}
			}
		}
	}()
	return ctx, cancel
}

func writeError(w http.ResponseWriter, err error) {
	e := errorOf(err)
	writeJSON(w, statuses[e.Code], e)
}

// errorOf returns err with its code and a hint about the next step.
func errorOf(err error) *schema.Error {
	var (
		e       *schema.Error
		refused *daemon.ErrRefused
		wrong   *config.Error
		large   *http.MaxBytesError
	)
	switch {
	case errors.As(err, &e):
		return e
	case errors.As(err, &refused):
		return &schema.Error{Code: schema.Refused, Message: err.Error(), Needs: refused.Needs().Options(), Plan: refused.Plan,
			Hint: "check the plan, and repeat the request with " + strings.Join(refused.Needs().Options(), " and ")}
	case errors.Is(err, daemon.ErrNotFound), errors.Is(err, config.ErrNotFound):
		return &schema.Error{Code: schema.NotFound, Message: err.Error(), Hint: "GET the list to see what exists"}
	case errors.Is(err, daemon.ErrBuilding), errors.Is(err, daemon.ErrManyBuilds):
		return &schema.Error{Code: schema.Busy, Message: err.Error(), Hint: "try again when that is done"}
	case errors.Is(err, fs.ErrExist) && !errors.As(err, &wrong):
		return &schema.Error{Code: schema.Exists, Message: err.Error(), Hint: "choose another path, or leave out preallocate and from to use the file as it is"}
	case errors.Is(err, backend.ErrNoSpace), errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return &schema.Error{Code: schema.Failed, Message: err.Error(), Hint: "free space on the file system"}
	case errors.Is(err, capture.ErrTooMany), errors.Is(err, capture.ErrTaken):
		return &schema.Error{Code: schema.Busy, Message: err.Error(), Hint: "end one: interrupt its command, or DELETE /v1/sessions/{tsih}/capture"}
	case errors.Is(err, backend.ErrNoReflink):
		return &schema.Error{Code: schema.Refused, Message: err.Error(), Hint: "nothing was changed; clones share blocks on XFS and btrfs, within one file system"}
	case errors.Is(err, backend.ErrUnsettled):
		return &schema.Error{Code: schema.Busy, Message: err.Error(), Hint: "nothing was changed; try again"}
	case errors.Is(err, config.ErrExists):
		return &schema.Error{Code: schema.Exists, Message: err.Error(), Hint: "change it, or remove it first"}
	case errors.Is(err, daemon.ErrEdited):
		return &schema.Error{Code: schema.Edited, Message: err.Error(), Hint: "check the file with config plan, and then apply it"}
	case errors.Is(err, daemon.ErrUnwell):
		return &schema.Error{Code: schema.Failed, Message: err.Error(), Hint: "remove the cause; then iser-target lun recover"}
	case errors.Is(err, backend.ErrDeleted), errors.Is(err, backend.ErrCut):
		return &schema.Error{Code: schema.Failed, Message: err.Error(), Hint: "nothing was changed; bring the file back, as docs/service.md describes, and repeat the command"}
	case errors.Is(err, backend.ErrMoved):
		return &schema.Error{Code: schema.Refused, Message: err.Error(), Hint: "nothing was changed; ask the gateway that serves the LUN: iser-target cluster status"}
	case errors.Is(err, daemon.ErrCluster):
		return &schema.Error{Code: schema.Refused, Message: err.Error(), Hint: "nothing was changed"}
	case errors.Is(err, daemon.ErrStale):
		return &schema.Error{Code: schema.Busy, Message: err.Error(), Hint: "see iser-target cluster status, and try again"}
	case errors.Is(err, state.ErrUnreachable):
		return &schema.Error{Code: schema.Failed, Message: err.Error(), Hint: "check the members of etcd (cluster.etcd)"}
	case errors.Is(err, daemon.ErrHealthy), errors.Is(err, daemon.ErrInUse):
		return &schema.Error{Code: schema.Refused, Message: err.Error(), Hint: "nothing was changed"}
	case errors.Is(err, daemon.ErrDraining):
		return &schema.Error{Code: schema.Busy, Message: err.Error(), Hint: "wait until it ends, or end it at once with SIGTERM"}
	case errors.Is(err, daemon.ErrNoUpgrade):
		return &schema.Error{Code: schema.Refused, Message: err.Error(), Hint: "the message says what to do first"}
	case errors.Is(err, daemon.ErrEnding):
		return &schema.Error{Code: schema.Busy, Message: err.Error(), Hint: "nothing was changed; try again when the target is back"}
	case errors.Is(err, daemon.ErrBeingRemoved):
		return &schema.Error{Code: schema.Busy, Message: err.Error(), Hint: "wait until the removal is complete, or end it: remove it again with now"}
	case errors.Is(err, daemon.ErrStuck):
		return &schema.Error{Code: schema.Failed, Message: err.Error(), Hint: "check the server or device that the backend is on"}
	case errors.As(err, &large):
		return &schema.Error{Code: schema.TooLarge, Message: fmt.Sprintf("the body has more than %d bytes", large.Limit)}
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return &schema.Error{Code: schema.Busy, Message: err.Error(), Hint: "try again"}
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EROFS):
		return &schema.Error{Code: schema.Failed, Message: err.Error(), Hint: "the user that the target runs as needs the permission; docs/service.md lists what its systemd unit forbids"}
	case errors.Is(err, config.ErrStorage) && errors.As(err, &wrong):
		return &schema.Error{Code: schema.Failed, Message: err.Error(),
			Hint: "check the file system and the device of " + wrong.Source + " (dmesg), and try again"}
	case errors.Is(err, daemon.ErrStateStuck):
		return &schema.Error{Code: schema.Failed, Message: err.Error(), Hint: "check the file system that state_dir is on; limits.state_timeout is how long the target waits for it"}
	case errors.As(err, &wrong), errors.Is(err, config.ErrShared):
		return &schema.Error{Code: schema.Invalid, Message: err.Error(), Problems: problemsOf(err), Hint: "nothing was changed; docs/config.md describes all keys"}
	case errors.Is(err, fs.ErrNotExist):
		return &schema.Error{Code: schema.Failed, Message: err.Error(), Hint: "the file, or the directory for it, must exist on the machine of the target"}
	}
	return &schema.Error{Code: schema.Failed, Message: err.Error()}
}

// problemsOf returns the errors of a configuration that err joins.
func problemsOf(err error) (list []schema.Problem) {
	switch e := err.(type) {
	case *config.Error:
		return []schema.Problem{{Key: e.Key, Reason: e.Reason}}
	case interface{ Unwrap() []error }:
		for _, one := range e.Unwrap() {
			list = append(list, problemsOf(one)...)
		}
	case interface{ Unwrap() error }:
		return problemsOf(e.Unwrap())
	}
	return list
}

func invalid(format string, a ...any) *schema.Error {
	return &schema.Error{Code: schema.Invalid, Message: fmt.Sprintf(format, a...), Hint: "GET /v1/openapi.yaml describes the request"}
}

// checkContent refuses a body that does not say what it is. A page of another site can make a browser send
// text/plain and forms, with the certificate of its user, but neither of our types.
func checkContent(r *http.Request) error {
	if r.ContentLength == 0 && r.Header.Get("Content-Type") == "" {
		return nil
	}
	want := "application/json"
	if strings.HasPrefix(r.URL.Path, "/v1/config/") || strings.HasPrefix(r.URL.Path, "/v1/cluster/config/") {
		want = "application/yaml"
	}
	switch r.Method {
	case http.MethodPost, http.MethodPut, http.MethodPatch:
		if got, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || got != want {
			return invalid("the Content-Type of the body must be %s, not %q", want, r.Header.Get("Content-Type"))
		}
	}
	return nil
}

// body decodes the JSON of a request into v.
func body(r *http.Request, v any) error {
	d := json.NewDecoder(http.MaxBytesReader(nil, r.Body, maxBody))
	d.DisallowUnknownFields()
	err := d.Decode(v)
	if err == nil {
		if _, err = d.Token(); err == io.EOF {
			return nil
		} else if err == nil {
			err = errors.New("data after the JSON value")
		}
	}
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		return err
	}
	return invalid("body: %s", bodyError(err))
}

// bodyError returns err, of package json, in the words of JSON.
func bodyError(err error) string {
	kind, ok := errors.AsType[*json.UnmarshalTypeError](err)
	if !ok {
		return strings.TrimPrefix(err.Error(), "json: ")
	}
	want := kind.Type.String()
	switch kind.Type.Kind() {
	case reflect.String:
		want = "a string"
	case reflect.Bool:
		want = "true or false"
	case reflect.Struct, reflect.Map:
		want = "an object"
	case reflect.Slice, reflect.Array:
		want = "an array"
	case reflect.Int, reflect.Int64, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		want = "a whole number"
	}
	if kind.Field == "" {
		return fmt.Sprintf("the value at byte %d must be %s, not %s", kind.Offset, want, article(kind.Value))
	}
	return fmt.Sprintf("%s: must be %s, not %s", kind.Field, want, article(kind.Value))
}

// article returns the name of a kind of JSON value with its article.
func article(kind string) string {
	switch kind {
	case "array", "object":
		return "an " + kind
	case "bool":
		return "true or false"
	case "null":
		return kind
	}
	return "a " + kind
}

// checkQuery checks that each parameter of a request is in known and appears once.
func checkQuery(r *http.Request, known []string) error {
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return invalid("query: %v", err)
	}
	for k, v := range q {
		if !slices.Contains(known, k) {
			return invalid("query: %s is unknown; known are: %s", k, strings.Join(known, ", "))
		}
		if len(v) != 1 {
			return invalid("query: %s is given %d times", k, len(v))
		}
	}
	return nil
}

func flag(q url.Values, key string, to *bool) error {
	v := q.Get(key)
	if v == "" {
		return nil
	}
	b, err := strconv.ParseBool(v)
	if err != nil {
		return invalid("query: %s must be true or false, not %q", key, v)
	}
	*to = b
	return nil
}

// changeOptions returns the Options of a request.
func changeOptions(r *http.Request) (o daemon.ChangeOptions, err error) {
	q := r.URL.Query()
	for key, to := range map[string]*bool{"dry_run": &o.DryRun, "disrupt": &o.Disrupt, "allow_shrink": &o.AllowShrink, "now": &o.Now} {
		if err := flag(q, key, to); err != nil {
			return o, err
		}
	}
	if v := q.Get("drain"); v != "" {
		if o.Drain, err = time.ParseDuration(v); err != nil || o.Drain <= 0 || o.Drain > maxDrain {
			return o, invalid("query: drain must be a time up to %v, like 10s, not %q", maxDrain, v)
		}
		if o.Now {
			return o, invalid("query: drain and now exclude each other")
		}
	}
	return o, nil
}

// maxDrain bounds Options.Drain.
const maxDrain = time.Hour

// change changes the configuration by edit, with the Options of the request.
func (s *Server) change(r *http.Request, edit func(*config.Document) error) (*schema.Plan, error) {
	o, err := changeOptions(r)
	if err != nil {
		return nil, err
	}
	return s.changeWith(r, o, edit)
}

func (s *Server) changeWith(r *http.Request, o daemon.ChangeOptions, edit func(*config.Document) error) (*schema.Plan, error) {
	ctx, cancel := inTurn(r)
	defer cancel()
	return s.d.Change(ctx, s.confined(r, edit), o)
}

// inTurn returns the context of a change, which continues if its client goes away.
func inTurn(r *http.Request) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(r.Context()), turnTime)
}
