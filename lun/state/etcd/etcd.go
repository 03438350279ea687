// Package etcd keeps states in etcd, where several targets find them (state.Home).
//
// The value of a key is that of PREFIX/values/KEY in etcd, and its revision is the ModRevision there. PREFIX/fences/
// has a key for each home whose Put was unsure, with a lease of a day: see Home.fence.
package etcd

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"

	"github.com/iser-target/iser-target/lun/state"
)

const (
	// MaxValue is the longest value, in bytes. etcd refuses requests of more than 1.5 MiB (its option
	// max-request-bytes), keys and comparisons included.
	MaxValue = 1400 << 10
	// DefaultTimeout is the time of a call if Config has none. An election in etcd takes 1 to 2 s.
	DefaultTimeout = 5 * time.Second

	page     = 64 // values in one answer of etcd
	fenceTTL = 24 * time.Hour
)

// A Config says where a home is in etcd.
type Config struct {
	Endpoints []string // URLs of the members: http://HOST:PORT or https://HOST:PORT
	Prefix    string   // of all keys in etcd, such as "/iser-target"; not empty
	TLS       *tls.Config
	// User and Password are those of etcd's users; without them the certificate of TLS counts, if etcd has users.
	User, Password string
	Timeout        time.Duration // of each call; 0: DefaultTimeout
}

// Check finds what Open refuses.
func (c *Config) Check() error {
	if len(c.Endpoints) == 0 {
		return errors.New("no endpoint of etcd is named")
	}
	scheme := ""
	for _, e := range c.Endpoints {
		u, err := url.Parse(e)
		switch {
		case err != nil:
			return fmt.Errorf("endpoint %q: %w", e, err)
		case u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.Port() == "" || strings.Trim(u.Path, "/") != "" || u.User != nil || u.RawQuery != "":
			return fmt.Errorf("endpoint %q: want http://HOST:PORT or https://HOST:PORT", e)
		case scheme != "" && u.Scheme != scheme:
			return fmt.Errorf("endpoint %q: the other endpoints are %s", e, scheme)
		}
		scheme = u.Scheme
	}
	switch {
	case scheme == "http" && c.TLS != nil:
		return fmt.Errorf("endpoint %q: TLS requires https", c.Endpoints[0])
	case strings.Trim(c.Prefix, "/") == "":
		return fmt.Errorf("prefix %q: etcd may have keys of others, so a name is required", c.Prefix)
	case (c.User == "") != (c.Password == ""):
		return errors.New("user and password of etcd require each other")
	case c.Timeout < 0:
		return fmt.Errorf("timeout %v is negative", c.Timeout)
	}
	return nil
}

// A Home is a state.Home in etcd. A call takes at most the time of Config, whatever its context allows.
//
// A Watch that loses its member of etcd continues with another. A member that is frozen is noticed after 15 s at the
// latest.
type Home struct {
	client  *clientv3.Client
	where   string // for errors
	values  string // before each key
	timeout time.Duration
	ctx     context.Context // ends with Close
	end     context.CancelCauseFunc
	busy    sync.WaitGroup // calls and watches

	fenceKey string
	bumping  chan struct{} // has room for one: who changes the fence

	mu     sync.Mutex // guards the fields below; not held during a call of etcd
	closed bool
	// fence is the revision of fenceKey, 0 if it has none. Each Put is on condition that it is. The key is changed
	// before a key of unsure is used again, so that a Put that is still on its way cannot come after that.
	fence  int64
	lease  clientv3.LeaseID
	unsure map[string]int64 // the fence of the last Put of a key that may still be on its way
}

// Open returns the home that c describes. It waits for etcd only with a user.
func Open(c Config) (*Home, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	if c.Timeout == 0 {
		c.Timeout = DefaultTimeout
	}
	where := "etcd at " + strings.Join(c.Endpoints, ", ")
	client, err := clientv3.New(clientv3.Config{
		Endpoints: c.Endpoints, TLS: c.TLS, Username: c.User, Password: c.Password, Logger: zap.NewNop(),
		// Pings without a stream would be too many for the server, which then closes the connection.
		DialTimeout: c.Timeout, DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: 5 * time.Second,
		DialOptions: []grpc.DialOption{
			grpc.WithStatsHandler(sentHandler{}),
			// A member that is back is found within a second.
			grpc.WithConnectParams(grpc.ConnectParams{
				Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
				MinConnectTimeout: 2 * time.Second,
			}),
		},
	})
	if err != nil {
		if transient(err) {
			err = fmt.Errorf("%w: %w", state.ErrUnreachable, err)
		}
		return nil, fmt.Errorf("%s: %w", where, err)
	}
	prefix := strings.TrimRight(c.Prefix, "/")
	h := &Home{
		client: client, where: where, values: prefix + "/values/", timeout: c.Timeout,
		fenceKey: prefix + "/fences/" + rand.Text(), bumping: make(chan struct{}, 1), unsure: map[string]int64{},
	}
	h.ctx, h.end = context.WithCancelCause(context.Background())
	return h, nil
}

// Close implements state.Home. It ends calls in progress.
func (h *Home) Close() error {
	h.mu.Lock()
	closed := h.closed
	h.closed = true
	h.mu.Unlock()
	h.end(fs.ErrClosed)
	h.busy.Wait()
	if closed {
		return nil
	}
	return h.client.Close()
}

// begin begins a call, unless h is closed. The call ends with h, and with limit also after the time of Config.
func (h *Home) begin(ctx context.Context, limit bool) (_ context.Context, done func(), err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, nil, fs.ErrClosed
	}
	if ctx.Err() != nil {
		return nil, nil, h.unreachable(context.Cause(ctx))
	}
	h.busy.Add(1)
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(h.ctx, func() { cancel(fs.ErrClosed) })
	ended := func() {}
	if limit {
		ctx, ended = context.WithTimeoutCause(ctx, h.timeout, fmt.Errorf("nothing within %v: %w", h.timeout, context.DeadlineExceeded))
	}
	return ctx, func() {
		stop()
		ended()
		cancel(nil)
		h.busy.Done()
	}, nil
}

func (h *Home) unreachable(cause error) error {
	return fmt.Errorf("%s: %w: %w", h.where, state.ErrUnreachable, cause)
}

// explain returns the error of a call of etcd that failed with err.
func (h *Home) explain(ctx context.Context, err error) error {
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, fs.ErrClosed):
		return fs.ErrClosed
	case cause != nil:
		return h.unreachable(cause)
	case transient(err):
		return h.unreachable(err)
	}
	return fmt.Errorf("%s: %w", h.where, err)
}

// code returns the code of an error of the client.
func code(err error) codes.Code {
	if e, ok := errors.AsType[rpctypes.EtcdError](err); ok {
		return e.Code()
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return codes.DeadlineExceeded
	case errors.Is(err, context.Canceled):
		return codes.Canceled
	}
	return status.Code(err)
}

// transient reports whether etcd has not answered, or not for itself: it has no leader, for example.
func transient(err error) bool {
	return slices.Contains([]codes.Code{codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Aborted, codes.Internal, codes.Unknown}, code(err))
}

// refused reports whether etcd has refused a request as a whole.
func refused(err error) bool {
	return slices.Contains([]codes.Code{codes.InvalidArgument, codes.FailedPrecondition, codes.PermissionDenied, codes.Unauthenticated,
		codes.ResourceExhausted, codes.NotFound, codes.OutOfRange, codes.Unimplemented}, code(err))
}

// read calls f until it is answered. A member that does not answer costs a third of the time of a call; the next
// try asks another.
func (h *Home) read(ctx context.Context, f func(context.Context) error) error {
	for {
		try, cancel := context.WithTimeout(ctx, h.timeout/3)
		err := f(try)
		silent := try.Err() != nil
		cancel()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil || !silent:
			return err
		}
	}
}

// valueOf returns the value that kv is.
func (h *Home) valueOf(kv *mvccpb.KeyValue) state.Value {
	v := state.Value{Key: strings.TrimPrefix(string(kv.Key), h.values), Data: kv.Value, Revision: state.Revision(kv.ModRevision)}
	if v.Data == nil {
		v.Data = []byte{}
	}
	return v
}

func checkKey(key string) error {
	if key == "" || len(key) > 4096 {
		return fmt.Errorf("key %.40q has %d bytes, not 1 to 4096", key, len(key))
	}
	return nil
}

// Get implements state.Home.
func (h *Home) Get(ctx context.Context, key string) (state.Value, error) {
	if err := checkKey(key); err != nil {
		return state.Value{}, err
	}
	ctx, done, err := h.begin(ctx, true)
	if err != nil {
		return state.Value{}, err
	}
	defer done()
	if err := h.settle(ctx, func(k string) bool { return k == key }); err != nil {
		return state.Value{}, err
	}
	var resp *clientv3.GetResponse
	err = h.read(ctx, func(ctx context.Context) (err error) {
		resp, err = h.client.Get(ctx, h.values+key)
		return err
	})
	switch {
	case err != nil:
		return state.Value{}, h.explain(ctx, err)
	case len(resp.Kvs) == 0:
		return state.Value{Key: key}, nil
	}
	return h.valueOf(resp.Kvs[0]), nil
}

// A sentKey is that of an *atomic.Bool in a context: whether a request has left with it.
type sentKey struct{}

// A sentHandler notes that requests have left.
type sentHandler struct{}

func (sentHandler) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

func (sentHandler) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if _, ok := s.(*stats.OutHeader); !ok {
		return
	}
	if sent, ok := ctx.Value(sentKey{}).(*atomic.Bool); ok {
		sent.Store(true)
	}
}

func (sentHandler) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (sentHandler) HandleConn(context.Context, stats.ConnStats)                       {}

// Put implements state.Home. data has at most MaxValue bytes.
func (h *Home) Put(ctx context.Context, key string, data []byte, base state.Revision) (state.Revision, error) {
	return h.put(ctx, key, data, base, clientv3.NoLease, "")
}

// put does what Put does, for a value that stays as long as the lease, or, if held is the key of a value, what Lease.PutHeld does.
func (h *Home) put(ctx context.Context, key string, data []byte, base state.Revision, lease clientv3.LeaseID, held string) (state.Revision, error) {
	if err := checkKey(key); err != nil {
		return 0, err
	}
	if len(data) > MaxValue {
		return 0, fmt.Errorf("%s: the value of %s has %d bytes, more than the limit of %d", h.where, key, len(data), MaxValue)
	}
	ctx, done, err := h.begin(ctx, true)
	if err != nil {
		return 0, err
	}
	defer done()
	name, holder := h.values+key, h.values+held
	var of []clientv3.OpOption // of the value
	var ifHeld []clientv3.Cmp
	var whoHolds []clientv3.Op
	if held == "" {
		of = append(of, clientv3.WithLease(lease))
	} else {
		ifHeld = append(ifHeld, clientv3.Compare(clientv3.LeaseValue(holder), "=", lease))
		whoHolds = append(whoHolds, clientv3.OpGet(holder, clientv3.WithKeysOnly()))
	}
	op := clientv3.OpDelete(name)
	if data != nil {
		op = clientv3.OpPut(name, string(data), of...)
	}
	for {
		if err := h.settle(ctx, func(k string) bool { return k == key }); err != nil {
			return 0, err
		}
		h.mu.Lock()
		fence := h.fence
		h.mu.Unlock()
		var sent atomic.Bool
		resp, err := h.client.Txn(context.WithValue(ctx, sentKey{}, &sent)).
			If(append(ifHeld, clientv3.Compare(clientv3.ModRevision(name), "=", int64(base)), clientv3.Compare(clientv3.ModRevision(h.fenceKey), "=", fence))...).
			Then(op).
			Else(append([]clientv3.Op{clientv3.OpGet(name, clientv3.WithKeysOnly())}, whoHolds...)...).
			Commit()
		switch {
		case errors.Is(err, rpctypes.ErrLeaseNotFound):
			return 0, fmt.Errorf("%s: %w", h.where, state.ErrLeaseEnded)
		case err != nil && sent.Load() && !refused(err):
			h.mu.Lock()
			h.unsure[key] = fence
			h.mu.Unlock()
			return 0, fmt.Errorf("%w: %w", h.explain(ctx, err), state.ErrUnsure)
		case err != nil:
			return 0, h.explain(ctx, err)
		case resp.Succeeded && data == nil:
			return 0, nil
		case resp.Succeeded:
			return state.Revision(resp.Header.Revision), nil
		}
		if is := revisionOf(foundIn(resp, 0)); is != int64(base) {
			return 0, fmt.Errorf("%w: %s has revision %d, not %d", state.ErrConflict, key, is, base)
		}
		if held != "" {
			if kv := foundIn(resp, 1); kv == nil || clientv3.LeaseID(kv.Lease) != lease {
				return 0, fmt.Errorf("%w: %s is not of the lease that has to have it", state.ErrConflict, held)
			}
		}
		if err := h.raiseFence(ctx, fence); err != nil { // another call has raised it, or its lease has ended
			return 0, err
		}
	}
}

// foundIn returns what answer i of a transaction has found, or nil.
func foundIn(resp *clientv3.TxnResponse, i int) *mvccpb.KeyValue {
	if kvs := resp.Responses[i].GetResponseRange().Kvs; len(kvs) > 0 {
		return kvs[0]
	}
	return nil
}

// revisionOf returns the revision of kv, which may be nil.
func revisionOf(kv *mvccpb.KeyValue) int64 {
	if kv == nil {
		return 0
	}
	return kv.ModRevision
}

// settle makes sure that no earlier Put of the keys is still on its way.
func (h *Home) settle(ctx context.Context, concerned func(key string) bool) error {
	h.mu.Lock()
	fence, unsure := h.fence, false
	for key := range h.unsure {
		unsure = unsure || concerned(key)
	}
	h.mu.Unlock()
	if !unsure {
		return nil
	}
	return h.raiseFence(ctx, fence)
}

// raiseFence changes the fence if it is that of the caller.
func (h *Home) raiseFence(ctx context.Context, old int64) error {
	select {
	case h.bumping <- struct{}{}:
	case <-ctx.Done():
		return h.explain(ctx, ctx.Err())
	}
	defer func() { <-h.bumping }()
	h.mu.Lock()
	fence, lease := h.fence, h.lease
	h.mu.Unlock()
	if fence != old {
		return nil
	}
	for {
		if lease == 0 {
			grant, err := h.client.Grant(ctx, int64(fenceTTL/time.Second))
			if err != nil {
				return h.explain(ctx, err)
			}
			lease = grant.ID
		}
		resp, err := h.client.Put(ctx, h.fenceKey, "", clientv3.WithLease(lease))
		if errors.Is(err, rpctypes.ErrLeaseNotFound) {
			lease = 0
			continue
		}
		if err != nil {
			return h.explain(ctx, err)
		}
		fence = resp.Header.Revision
		break
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fence, h.lease = fence, lease
	for key, f := range h.unsure {
		if f != fence {
			delete(h.unsure, key)
		}
	}
	return nil
}

// each calls f for the keys that begin with prefix, ascending, all as they were at the revision that it returns.
// reset is called when it begins again, because that revision was compacted.
func (h *Home) each(ctx context.Context, prefix string, reset func(), f func(*mvccpb.KeyValue), opts ...clientv3.OpOption) (int64, error) {
	begin := h.values + prefix
	end := clientv3.GetPrefixRangeEnd(begin)
	from, revision := begin, int64(0)
	for {
		var resp *clientv3.GetResponse
		err := h.read(ctx, func(ctx context.Context) (err error) {
			resp, err = h.client.Get(ctx, from, append(opts, clientv3.WithRange(end), clientv3.WithLimit(page), clientv3.WithRev(revision))...)
			return err
		})
		if errors.Is(err, rpctypes.ErrCompacted) {
			from, revision = begin, 0
			reset()
			continue
		}
		if err != nil {
			return 0, h.explain(ctx, err)
		}
		if revision == 0 {
			revision = resp.Header.Revision
		}
		for _, kv := range resp.Kvs {
			f(kv)
		}
		if !resp.More || len(resp.Kvs) == 0 {
			return revision, nil
		}
		from = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
	}
}

// List implements state.Home.
func (h *Home) List(ctx context.Context, prefix string) ([]state.Value, error) {
	ctx, done, err := h.begin(ctx, true)
	if err != nil {
		return nil, err
	}
	defer done()
	if err := h.settle(ctx, func(key string) bool { return strings.HasPrefix(key, prefix) }); err != nil {
		return nil, err
	}
	var list []state.Value
	_, err = h.each(ctx, prefix, func() { list = nil }, func(kv *mvccpb.KeyValue) { list = append(list, h.valueOf(kv)) })
	if err != nil {
		return nil, err
	}
	return list, nil
}
