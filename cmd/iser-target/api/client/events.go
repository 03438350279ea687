package client

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// Events calls each with the events whose numbers are above since. With follow, it
// continues with new events until each fails, ctx ends, or the target ends.
func (c *Client) Events(ctx context.Context, since uint64, follow bool, each func(schema.Event) error) error {
	return c.events(ctx, since, follow, func(string) error { return nil }, each)
}

// Times between two attempts of Follow to connect again.
const (
	firstPause = 100 * time.Millisecond
	maxPause   = 5 * time.Second
)

// Follow calls each with the events whose numbers are above since, and then with new ones, until each fails or ctx ends. It
// returns the error of each or of ctx.
//
// If the target, or the connection to it, ends, Follow connects again every 0.1 s to 5 s, and continues after the last
// event that it has passed to each: none comes twice. Events that the target has displaced meanwhile are missing, which a gap in
// the numbers shows. The numbers of a target that was started again begin at 1; Follow passes all of its events.
//
// An error of the first connection ends Follow. So does an error later that does not pass, like schema.Forbidden.
func (c *Client) Follow(ctx context.Context, since uint64, each func(schema.Event) error) error {
	return c.FollowWith(ctx, since, Follower{Event: each})
}

// A Follower gets what FollowWith follows. Its functions are called one after the other; Lost and Back may be nil.
type Follower struct {
	// Event gets an event, like each of Follow.
	Event func(schema.Event) error
	// Lost is called once for each break. err is nil if the target ended the events.
	Lost func(err error)
	// Back is called when the target answers after a break. restarted says that another process does, whose numbers began at 1.
	Back func(restarted bool)
}

// FollowWith follows events as Follow does, and tells f when the target is lost and back.
func (c *Client) FollowWith(ctx context.Context, since uint64, f Follower) error {
	var (
		lost      bool
		connected bool
		log       string // of the events that f has got
		failed    error  // of f.Event
		pause     time.Duration
	)
	for {
		err := c.events(ctx, since, true, func(now string) error {
			restarted := connected && now != log
			other := restarted && since != 0
			connected, log, pause = true, now, firstPause
			if lost && f.Back != nil {
				f.Back(restarted)
			}
			lost = false
			if other {
				since, pause = 0, 0
				return errOtherLog
			}
			return nil
		}, func(e schema.Event) error {
			if failed = f.Event(e); failed == nil {
				since = e.Number
			}
			return failed
		})
		switch {
		case failed != nil:
			return failed
		case ctx.Err() != nil:
			return ctx.Err()
		case !connected:
			return err
		case err != nil && !errors.Is(err, errOtherLog) && !errors.Is(err, schema.Unreached) && !errors.Is(err, schema.Busy):
			return err
		}
		if !lost && !errors.Is(err, errOtherLog) {
			if lost = true; f.Lost != nil {
				f.Lost(err)
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
		pause = min(max(2*pause, firstPause), maxPause)
	}
}

// errOtherLog ends a request of Follow whose numbers are of another process.
var errOtherLog = errors.New("the numbers of events have begun at 1 again")

// events requests events. It calls begin with the name of their numbering, and then each.
func (c *Client) events(ctx context.Context, since uint64, follow bool, begin func(log string) error, each func(schema.Event) error) error {
	q := url.Values{"since": {strconv.FormatUint(since, 10)}, "follow": {strconv.FormatBool(follow)}}
	w := c.watch(ctx, http.MethodGet)
	defer w.stop()
	if follow && c.limit == 0 {
		w.expect(c.silence, "has not answered")
	}
	resp, err := w.roundTrip("/v1/events", q, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := begin(resp.Header.Get(schema.EventLogHeader)); err != nil {
		return err
	}
	if follow {
		w.expect(c.silence, "showed no sign of life")
	}
	return lines(w, resp.Body, "event", each)
}
