package lun

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/lun/invariant"
)

// A READ that refers leaves from the pages of the medium, in which a later change shows until the initiator has received them. So a change of
// the range waits until the initiator has acknowledged the READ, and asks it to. If that takes too long, the store gets the data to other pages first. A
// READ that begins while a change is announced copies.

const (
	// viewWait is the default of Options.ViewWait.
	viewWait = 100 * time.Millisecond
	// viewPress is the time between two questions.
	viewPress = 10 * time.Millisecond
	// viewLimit is how long a View stays that nobody will end, and how long commands end with BUSY that no READ may show in part, or
	// out of their order, if the store cannot get the data to other pages.
	viewLimit = 10 * time.Second
	// Where changes wait for Views again within viewNear, READs copy for viewRest: blocks that initiators read and write all the time.
	viewNear = 10 * time.Millisecond
	viewRest = 100 * time.Millisecond
)

// viewEpoch is when viewClock was 0.
var viewEpoch = time.Now()

// viewClock returns the time in ns.
func viewClock() int64 { return int64(time.Since(viewEpoch)) }

// A Viewer is a connection with Views.
type Viewer interface {
	// Press makes the initiator acknowledge what it has, soon. It does not wait for that.
	Press()
	// Lag says that the initiator has not acknowledged for as long as a change waits.
	Lag()
}

// A View is a range of the medium that is on its way to an initiator, which may see later changes of it. The zero value is none. Its methods may be
// called with locks held.
type View struct {
	unit   *Unit // nil: none
	viewer Viewer
	byteRange

	// Guarded by unit.views.mu:
	gone   bool      // its pages do not change any longer
	index  int       // in viewList.list, unless it is gone
	lagged time.Time // since when changes do not wait for it; or zero
}

// A viewList has the Views of a unit.
type viewList struct {
	mu    sync.Mutex // a leaf
	list  []*View
	ended chan struct{} // closed when a View ends; nil: nobody waits for that
}

// begin begins v, unless a change of the range is announced.
//
// Preconditions: the stripes of the range are held.
func (v *View) begin(u *Unit, viewer Viewer, r byteRange) bool {
	*v = View{unit: u, viewer: viewer, byteRange: r}
	l := &u.views
	l.mu.Lock()
	v.index = len(l.list)
	l.list = append(l.list, v)
	l.mu.Unlock()
	stripes := stripesOf(r.pos, r.n)
	u.ranges.addViews(stripes, 1)
	if u.ranges.announced(stripes) { // one that is announced later sees v
		v.End()
		return false
	}
	return true
}

// End ends v, if it has begun: the initiator has the data, or will never use it.
func (v *View) End() {
	if v.unit == nil {
		return
	}
	l := &v.unit.views
	l.mu.Lock()
	if !v.gone {
		l.remove(v)
	}
	l.mu.Unlock()
	*v = View{}
}

// Abandon ends v, if it has begun, at the end of its connection: nobody learns then when the initiator has the data.
func (v *View) Abandon() {
	if v.unit == nil {
		return
	}
	l := &v.unit.views
	l.mu.Lock()
	if !v.gone {
		left := v.unit.newLeftView(v.byteRange)
		left.index = v.index
		l.list[v.index] = left
		l.wake()
	}
	l.mu.Unlock()
	*v = View{}
}

// newLeftView returns a View that nobody will end but a timer, and for which changes do not wait.
func (u *Unit) newLeftView(r byteRange) *View {
	v := &View{unit: u, byteRange: r, lagged: time.Now()}
	time.AfterFunc(viewLimit, v.End)
	return v
}

// addLeft adds Views that began in another unit, whose store had the same data.
func (u *Unit) addLeft(views []byteRange) {
	if u.splicer == nil {
		return
	}
	l := &u.views
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range views {
		v := u.newLeftView(r)
		v.index = len(l.list)
		l.list = append(l.list, v)
		u.ranges.addViews(stripesOf(r.pos, r.n), 1)
	}
}

// ranges returns those of all Views.
func (l *viewList) ranges() []byteRange {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := make([]byteRange, 0, len(l.list))
	for _, v := range l.list {
		list = append(list, v.byteRange)
	}
	return list
}

// remove takes v from the list.
//
// Preconditions: l.mu is held.
func (l *viewList) remove(v *View) {
	invariant.Held(&l.mu)
	last := len(l.list) - 1
	l.list[v.index] = l.list[last]
	l.list[v.index].index = v.index
	l.list[last] = nil
	l.list = l.list[:last]
	v.gone = true
	v.unit.ranges.addViews(stripesOf(v.pos, v.n), -1)
	l.wake()
}

// wake makes changes look again.
//
// Preconditions: l.mu is held.
func (l *viewList) wake() {
	invariant.Held(&l.mu)
	if l.ended != nil {
		close(l.ended)
		l.ended = nil
	}
}

// frozen takes the Views from the list whose pages the store has forgotten.
func (l *viewList) frozen(r byteRange) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := len(l.list) - 1; i >= 0; i-- {
		if v := l.list[i]; v.pos >= r.pos && v.end() <= r.end() {
			l.remove(v)
		}
	}
}

// look returns the viewers for which a change of r has to wait. late: it has waited. Then it returns the first View that is left instead, and for how long
// changes have not waited for that; viewers are those that have become too slow.
func (l *viewList) look(r byteRange, late bool) (viewers []Viewer, left byteRange, lag time.Duration, ended chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	for _, v := range l.list {
		if v.overlaps(r) && v.lagged.IsZero() && !slices.Contains(viewers, v.viewer) {
			viewers = append(viewers, v.viewer)
		}
	}
	if len(viewers) > 0 && !late {
		if l.ended == nil {
			l.ended = make(chan struct{})
		}
		return viewers, byteRange{}, 0, l.ended
	}
	for _, v := range l.list {
		if v.lagged.IsZero() && slices.Contains(viewers, v.viewer) {
			v.lagged = now
		}
		if v.overlaps(r) && left.n == 0 {
			left, lag = v.byteRange, now.Sub(v.lagged)
		}
	}
	return viewers, left, lag, nil
}

// errViewed ends a command that must not show in a READ of which an initiator may have a part.
var errViewed = fmt.Errorf("%w: an initiator is still receiving data of the range", errHeldUp)

// An announcement keeps Views of a range from beginning.
type announcement struct {
	locks   *rangeLocks
	stripes stripeSet
}

// end ends it.
func (a announcement) end() {
	if a.stripes != 0 {
		a.locks.addChanges(a.stripes, -1)
	}
}

// announce announces a change of n bytes at pos, and returns when no View shows it. whole: the change is all or nothing for others. The caller holds no
// stripes yet, and calls end of the announcement after the change, also after an error.
func (u *Unit) announce(c *Command, pos, n int64, whole bool) (announcement, error) {
	if u.splicer == nil {
		return announcement{}, nil
	}
	a := announcement{&u.ranges, stripesOf(pos, n)}
	u.ranges.addChanges(a.stripes, 1)
	if !u.ranges.viewed(a.stripes) {
		return a, nil
	}
	return a, u.awaitViews(byteRange{pos, n}, whole || c.Ordered, c.aborted, func(left byteRange) error { return u.freezeFor(c, left) })
}

// awaitViews does what announce says, for a change that is announced. strict: a View must not show the change. Otherwise it may, if freeze, which makes
// the store get the data to other pages, fails: a READ may have what its blocks had at any time until its end.
func (u *Unit) awaitViews(r byteRange, strict bool, aborted func() bool, freeze func(byteRange) error) error {
	begin, waits := time.Now(), false
	for {
		late := time.Since(begin) >= u.opt.ViewWait
		viewers, left, lag, ended := u.views.look(r, late)
		for _, v := range viewers {
			if late {
				v.Lag()
			} else {
				v.Press()
			}
		}
		switch {
		case aborted():
			return errAborted
		case ended != nil:
			if !waits {
				waits = true
				u.ranges.noteWait(stripesOf(r.pos, r.n))
			}
			again := time.NewTimer(viewPress)
			select {
			case <-ended:
			case <-again.C:
			}
			again.Stop()
		case left.n == 0:
			return nil
		default:
			err := freeze(left)
			switch {
			case err == nil:
			case !storeFailed(err):
				return err
			case strict && lag < viewLimit:
				return errViewed
			default:
				return nil
			}
		}
	}
}

// freezeFor makes the store get the data of a View to other pages, so that c can change it, and ends the View.
func (u *Unit) freezeFor(c *Command, r byteRange) error {
	r = toFreeze(r)
	if err := u.enter(c, heavyStep(2*r.n)); err != nil {
		return err
	}
	defer u.leave(c)
	defer u.ranges.exclude(stripesOf(r.pos, r.n)).release()
	if err := u.barredTo(c); err != nil {
		return err
	}
	return u.freeze(r)
}

// toFreeze returns what the store gets to other pages with r, whose end may be behind that of the store.
func toFreeze(r byteRange) byteRange {
	begin := r.pos / backend.FreezeAlign * backend.FreezeAlign
	return byteRange{begin, (r.end() - begin + backend.FreezeAlign - 1) / backend.FreezeAlign * backend.FreezeAlign}
}

// freeze makes the store get the data of a range to other pages, and ends its Views.
//
// Preconditions: the caller has entered the gate, nobody else reads or changes the range, and toFreeze has returned it.
func (u *Unit) freeze(r byteRange) error {
	if err := u.storeFreeze(r.pos, min(r.n, u.Size()-r.pos)); err != nil {
		return err
	}
	u.views.frozen(r)
	return nil
}

// sanitizeViews waits until no View shows what a sanitize, which keeps others from the medium, does.
func (u *Unit) sanitizeViews() {
	if !u.ranges.viewed(allStripes) {
		return
	}
	_ = u.awaitViews(byteRange{0, u.Size()}, false, u.sanitizer.stop.Load, func(left byteRange) error {
		r := toFreeze(left)
		return u.inSanitize(heavyStep(2*r.n), func() error { return u.freeze(r) })
	})
}

// Refers reports whether Refer can have a part of the data-in of c, and no change is likely to wait for that.
func (n *Nexus) Refers(c *Command) bool {
	u := c.unit
	return !c.failed && c.row.lends && !c.wire && u.splicer != nil && u.splicer.CanSplice() && !u.ranges.rests(stripesOf(u.at(c, 0), int64(c.DataIn)))
}

// Refer does what Produce does, but without a copy: it fills a pipe, which has room for that, with the size bytes of data-in that start at off. They may change
// while v has not ended, which the caller ends. viewer is its connection. After an error the pipe may have a part.
//
// Preconditions: Refers returns true.
func (n *Nexus) Refer(c *Command, off, size uint64, pipe int, v *View, viewer Viewer) bool {
	if c.failed || !c.proceed() {
		return false
	}
	defer c.leave()
	return c.readDone(c.unit.refer(c, pipe, c.unit.at(c, off), int64(size), v, viewer))
}

// refer makes the pipe refer to n bytes at pos, apart from COMPARE AND WRITE and its like, or copies them to it.
func (u *Unit) refer(c *Command, pipe int, pos, n int64, v *View, viewer Viewer) error {
	if err := u.enter(c, moved(int(n))); err != nil {
		return err
	}
	defer u.leave(c)
	defer u.ranges.share(stripesOf(pos, n)).release()
	if err := u.erased(c); err != nil {
		return err
	}
	if v.begin(u, viewer, byteRange{pos, n}) {
		err := u.storeSplice(pipe, pos, n)
		if err == nil {
			return nil
		}
		v.End()
		if !errors.Is(err, backend.ErrNoSplice) {
			return err
		}
	}
	sp := scratch.Get().(*[]byte)
	defer scratch.Put(sp)
	return u.storePour(pipe, pos, n, *sp)
}

// addViews counts n more Views of stripes.
func (l *rangeLocks) addViews(s stripeSet, n int32) {
	for ; s != 0; s &= s - 1 {
		l[bits.TrailingZeros64(uint64(s))].views.Add(n)
	}
}

// addChanges counts n more announced changes of stripes.
func (l *rangeLocks) addChanges(s stripeSet, n int32) {
	for ; s != 0; s &= s - 1 {
		l[bits.TrailingZeros64(uint64(s))].changes.Add(n)
	}
}

// noteWait notes that a change of stripes has to wait for Views.
func (l *rangeLocks) noteWait(s stripeSet) {
	now := viewClock()
	for ; s != 0; s &= s - 1 {
		stripe := &l[bits.TrailingZeros64(uint64(s))]
		if stripe.views.Load() == 0 {
			continue
		}
		if last := stripe.waited.Swap(now); last != 0 && now-last < int64(viewNear) {
			stripe.copied.Store(now + int64(viewRest))
		}
	}
}

// rests reports whether READs of one of the stripes copy at present, because changes have waited for their Views.
func (l *rangeLocks) rests(s stripeSet) bool {
	for ; s != 0; s &= s - 1 {
		stripe := &l[bits.TrailingZeros64(uint64(s))]
		if until := stripe.copied.Load(); until != 0 {
			if viewClock() < until {
				return true
			}
			stripe.copied.CompareAndSwap(until, 0)
		}
	}
	return false
}

// viewed reports whether one of the stripes may have a View.
func (l *rangeLocks) viewed(s stripeSet) bool {
	for ; s != 0; s &= s - 1 {
		if l[bits.TrailingZeros64(uint64(s))].views.Load() > 0 {
			return true
		}
	}
	return false
}

// announced reports whether a change of one of the stripes is announced.
func (l *rangeLocks) announced(s stripeSet) bool {
	for ; s != 0; s &= s - 1 {
		if l[bits.TrailingZeros64(uint64(s))].changes.Load() > 0 {
			return true
		}
	}
	return false
}
