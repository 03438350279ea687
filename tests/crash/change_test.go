package crash

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// changes are the LUNs of a target, and another target, as the client of the control API knows them.
type changes struct {
	dir    string // of the files
	target string
	extra  string // the name of the other target
	last   int    // the number of the last LUN that was created
	acked  configured
	flight *configured // after the change whose answer has not come
}

// A configured is a state of the configuration.
type configured struct {
	extra bool
	luns  map[int]lunState
}

// A lunState is what the client chose for a LUN.
type lunState struct {
	size     int64
	readOnly bool
}

// String returns a form that can be compared.
func (c configured) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "other target: %v", c.extra)
	for _, id := range slices.Sorted(maps.Keys(c.luns)) {
		fmt.Fprintf(&b, "; LUN %d of %d bytes, read-only %v", id, c.luns[id].size, c.luns[id].readOnly)
	}
	return b.String()
}

// step makes one random change that has to succeed.
func (c *changes) step(ctx context.Context, api *client.Client, rng *rand.Rand) (lost bool, err error) {
	next := configured{c.acked.extra, maps.Clone(c.acked.luns)}
	c.flight = &next
	size := int64(1+rng.IntN(64)) << 16
	ids := slices.Sorted(maps.Keys(next.luns))
	k := rng.IntN(100)
	if len(ids) == 0 || k < 30 && len(ids) < 8 {
		c.last++
		id := c.last
		next.luns[id] = lunState{size: size}
		_, err = api.AddLUN(ctx, c.target, schema.LUN{ID: &id, Backend: "file", Path: c.path(id),
			Size: fmt.Sprint(size), Preallocate: rng.IntN(3) == 0}, schema.Options{})
		return c.end(err)
	}
	id := ids[rng.IntN(len(ids))]
	l := next.luns[id]
	switch {
	case k < 60 && !l.readOnly: // the target resizes no LUN that is read-only
		l.size = size
		next.luns[id] = l
		_, err = api.SetLUN(ctx, c.target, id, schema.Values{"size": fmt.Sprint(size)}, schema.Options{AllowShrink: true})
	case k < 70:
		l.readOnly = !l.readOnly
		next.luns[id] = l
		_, err = api.SetLUN(ctx, c.target, id, schema.Values{"read_only": fmt.Sprint(l.readOnly)}, schema.Options{})
	case k < 80 && next.extra:
		next.extra = false
		_, err = api.RemoveTarget(ctx, c.extra, schema.Options{})
	case k < 80:
		next.extra = true
		_, err = api.AddTarget(ctx, schema.Target{Name: c.extra, Initiators: []string{"*"}}, schema.Options{})
	default:
		delete(next.luns, id)
		_, err = api.RemoveLUN(ctx, c.target, id, schema.Options{})
	}
	return c.end(err)
}

func (c *changes) path(id int) string { return filepath.Join(c.dir, fmt.Sprintf("%d.img", id)) }

// end takes the answer to a change.
func (c *changes) end(err error) (lost bool, _ error) {
	if err == nil {
		c.acked, c.flight = *c.flight, nil
		return false, nil
	}
	var e *schema.Error
	return errors.As(err, &e) && e.Code == schema.Unreached, err
}

// check compares what the target serves, and the sizes of the files, with what they may be.
func (c *changes) check(ctx context.Context, api *client.Client) (faults []string, err error) {
	s, err := api.State(ctx)
	if err != nil {
		return nil, err
	}
	got := configured{luns: map[int]lunState{}}
	for _, t := range s.Targets {
		got.extra = got.extra || t.Name == c.extra
		for _, l := range t.LUNs {
			if l.State != schema.Ready {
				faults = append(faults, fmt.Sprintf("LUN %d of %s is %s: %s", l.ID, t.Name, l.State, l.Reason))
			}
			if t.Name != c.target {
				continue
			}
			got.luns[l.ID] = lunState{l.Size, l.ReadOnly}
			if st, err := os.Stat(l.Path); err != nil {
				faults = append(faults, fmt.Sprintf("LUN %d: %v", l.ID, err))
			} else if st.Size() != l.Size {
				faults = append(faults, fmt.Sprintf("LUN %d has %d bytes, and its file %d", l.ID, l.Size, st.Size()))
			}
		}
	}
	if got.String() != c.acked.String() && (c.flight == nil || got.String() != c.flight.String()) {
		faults = append(faults, fmt.Sprintf("configuration: %v\nacknowledged was: %v\nin flight was: %v", got, c.acked, c.flight))
	}
	c.acked, c.flight = got, nil
	return faults, nil
}
