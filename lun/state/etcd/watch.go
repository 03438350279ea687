package etcd

import (
	"context"
	"errors"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/iser-target/iser-target/lun/state"
)

// rewatchAfter is how long a watch that has failed waits before it tries again.
const rewatchAfter = 200 * time.Millisecond

// Watch implements state.Home.
func (h *Home) Watch(ctx context.Context, prefix string) (<-chan state.Value, error) {
	ctx, done, err := h.begin(ctx, false)
	if err != nil {
		return nil, err
	}
	w := &watch{home: h, prefix: prefix, in: make(chan state.Value)}
	if _, err := w.list(ctx, clientv3.WithKeysOnly()); err != nil {
		done()
		return nil, err
	}
	out := make(chan state.Value)
	go func() {
		defer close(w.in)
		w.follow(ctx)
	}()
	go func() {
		defer done()
		defer close(out)
		feed(ctx, w.in, out)
		for range w.in { // until follow has ended
		}
	}()
	return out, nil
}

// A watch follows what etcd stores.
type watch struct {
	home   *Home
	prefix string
	in     chan state.Value // what is new
	// known has the revisions of all keys, because after a compaction etcd cannot tell which were removed.
	known map[string]int64
	next  int64 // the first revision that is not known
}

// list returns the values that are not known, removals included, and knows them then. It takes the time of a call.
func (w *watch) list(ctx context.Context, opts ...clientv3.OpOption) ([]state.Value, error) {
	h := w.home
	ctx, done, err := h.begin(ctx, true)
	if err != nil {
		return nil, err
	}
	defer done()
	var values []state.Value
	known := map[string]int64{}
	revision, err := h.each(ctx, w.prefix, func() {
		values = nil
		clear(known)
	}, func(kv *mvccpb.KeyValue) {
		v := h.valueOf(kv)
		known[v.Key] = kv.ModRevision
		if w.known != nil && w.known[v.Key] != kv.ModRevision {
			values = append(values, v)
		}
	}, opts...)
	if err != nil {
		return nil, err
	}
	for key := range w.known {
		if known[key] == 0 {
			values = append(values, state.Value{Key: key})
		}
	}
	w.known, w.next = known, revision+1
	return values, nil
}

// follow sends what etcd stores to in, until ctx ends.
func (w *watch) follow(ctx context.Context) {
	for {
		err := w.stream(ctx)
		for errors.Is(err, rpctypes.ErrCompacted) {
			var values []state.Value
			if values, err = w.list(ctx); err == nil {
				for _, v := range values {
					if !w.send(ctx, v) {
						return
					}
				}
				break
			}
			if !pause(ctx) {
				return
			}
			err = rpctypes.ErrCompacted // which it still is
		}
		if err != nil && !pause(ctx) || ctx.Err() != nil {
			return
		}
	}
}

// pause waits before the next try. It reports false if ctx ends.
func pause(ctx context.Context) bool {
	select {
	case <-time.After(rewatchAfter):
		return true
	case <-ctx.Done():
		return false
	}
}

func (w *watch) send(ctx context.Context, v state.Value) bool {
	select {
	case w.in <- v:
		return true
	case <-ctx.Done():
		return false
	}
}

// stream sends what one watch of etcd reports, until that fails. A member without a leader ends it, so that another is
// asked.
func (w *watch) stream(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	events := w.home.client.Watch(clientv3.WithRequireLeader(ctx), w.home.values+w.prefix, clientv3.WithPrefix(), clientv3.WithRev(w.next))
	for resp := range events {
		if err := resp.Err(); err != nil {
			return err
		}
		for _, e := range resp.Events {
			v := w.home.valueOf(e.Kv)
			if w.known[v.Key] = e.Kv.ModRevision; e.Type == clientv3.EventTypeDelete {
				delete(w.known, v.Key)
				v.Data, v.Revision = nil, 0
			}
			w.next = e.Kv.ModRevision + 1
			if !w.send(ctx, v) {
				return ctx.Err()
			}
		}
	}
	return errors.New("the watch has no member of etcd")
}

// feed sends what comes from in to a reader that may be slow, until ctx or in ends. It keeps the last value of each
// key for it.
func feed(ctx context.Context, in <-chan state.Value, out chan<- state.Value) {
	var order []string // the keys of last, oldest first
	last := map[string]state.Value{}
	for {
		var ready chan<- state.Value
		var first state.Value
		if len(order) > 0 {
			ready, first = out, last[order[0]]
		}
		select {
		case v, ok := <-in:
			if !ok {
				return
			}
			if _, ok := last[v.Key]; !ok {
				order = append(order, v.Key)
			}
			last[v.Key] = v
		case ready <- first:
			delete(last, first.Key)
			order = order[1:]
		case <-ctx.Done():
			return
		}
	}
}
