package lun

import (
	"errors"
	"time"

	"github.com/iser-target/iser-target/lun/state"
)

// A turn lets one command at a time change something of a unit that has to be stored first. Commands
// that do not change it do not wait. The file system may hang, so those that wait stop when they are
// aborted, or after the time limit of the file, and there are at most maxTurns of them.
type turn struct {
	places  chan struct{} // one for each command that waits or stores
	storing chan struct{} // has room for one
}

// maxTurns bounds the commands that wait for a turn or have it, for each unit.
const maxTurns = 32

// newTurn returns a turn that nobody has.
func newTurn() turn { return turn{make(chan struct{}, maxTurns), make(chan struct{}, 1)} }

// A deadliner is a state.Keeper.
type deadliner interface {
	Limit() time.Duration
	TooLate() error
}

var errTurns = errors.New("too many changes wait to be stored; try again later")

// turnPoll is how often a command that waits for its turn asks whether it was aborted.
const turnPoll = 10 * time.Millisecond

// take waits for the turn of c, or with nil of the daemon, to change a record in file. It returns
// how long the caller may wait for storage, in all. Without an error, give follows.
func (t *turn) take(c *Command, file deadliner) (p state.Patience, err error) {
	p.Since = time.Now()
	if c != nil && c.Abort != nil {
		p.Aborted = c.aborted
	}
	select {
	case t.places <- struct{}{}:
	default:
		return p, errTurns
	}
	select {
	case t.storing <- struct{}{}:
		return p, nil
	default:
	}
	poll := time.NewTicker(turnPoll)
	defer poll.Stop()
	for {
		select {
		case t.storing <- struct{}{}:
			return p, nil
		case <-poll.C:
		}
		limit := file.Limit()
		switch {
		case p.Aborted != nil && p.Aborted():
			err = errAborted
		case limit > 0 && time.Since(p.Since) >= limit:
			err = file.TooLate()
		default:
			continue
		}
		<-t.places
		return p, err
	}
}

// give ends the turn.
func (t *turn) give() {
	<-t.storing
	<-t.places
}

// failStore ends c, whose change could not be stored, and returns false.
func (c *Command) failStore(err error) bool {
	switch {
	case errors.Is(err, errTurns): // the initiator tries again
		c.Status, c.failed = statusBusy, true
		return false
	case c.aborted():
		return c.fail(condAborted)
	case errors.Is(err, errReplaced):
		return c.failClosed()
	}
	c.unit.notStored(err)
	return c.fail(condInternal)
}
