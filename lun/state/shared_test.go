package state

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// patience is how long these tests wait for what has to happen.
const patience = 2 * time.Minute

// A fickleHome is a home whose calls a test can let fail.
type fickleHome struct {
	Home

	mu       sync.Mutex
	put, get func() error // what a call returns after it was done; nil: nothing
	drop     bool         // a failed Put stores nothing
}

func (h *fickleHome) fail(put, get func() error, drop bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.put, h.get, h.drop = put, get, drop
}

func (h *fickleHome) Put(ctx context.Context, key string, data []byte, base Revision) (Revision, error) {
	h.mu.Lock()
	put, drop := h.put, h.drop
	h.mu.Unlock()
	if put != nil && drop {
		return 0, put()
	}
	r, err := h.Home.Put(ctx, key, data, base)
	if put != nil && err == nil {
		return 0, put()
	}
	return r, err
}

func (h *fickleHome) Get(ctx context.Context, key string) (Value, error) {
	h.mu.Lock()
	get := h.get
	h.mu.Unlock()
	if get != nil {
		return Value{}, get()
	}
	return h.Home.Get(ctx, key)
}

func failUnsure() error { return unsureError{fmt.Errorf("%w: injected", ErrUnreachable)} }

// newSharedHome returns a home in which another key has a value that must stay.
func newSharedHome(t *testing.T) *fickleHome {
	t.Helper()
	h := &fickleHome{Home: OpenDirectory(t.TempDir(), nil)}
	r, err := h.Put(t.Context(), "neighbor", []byte("mine"), 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if v, err := h.Home.Get(context.Background(), "neighbor"); err != nil || string(v.Data) != "mine" || v.Revision != r {
			t.Errorf("the neighbor has %q, revision %d, %v", v.Data, v.Revision, err)
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return h
}

func openSharedDocument(t *testing.T, h Home) *Document[Records[card]] {
	t.Helper()
	d, err := OpenIn(t.Context(), cards, h, "doc", Records[card]{Version: 1, Units: []card{}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// addCard adds the card of unit n, whatever else is there.
func addCard(d *Document[Records[card]], n int) error {
	_, err := d.store(&update[Records[card]]{keys: []string{unit(n)}, apply: func(s Records[card]) (Records[card], bool, error) {
		s.Units = append(slices.Clone(s.Units), card{unit(n), "x"})
		return s, true, nil
	}})
	return err
}

// Changes of several processes that depend on the state are all there in the end. One that does not fails after another.
func TestSharedDocument(t *testing.T) {
	h := newSharedHome(t)
	one, two := openSharedDocument(t, h), openSharedDocument(t, h)
	if !one.Fresh() {
		t.Error("a document without a value is not fresh")
	}
	var wg sync.WaitGroup
	for n := range 20 {
		wg.Go(func() {
			if err := addCard([]*Document[Records[card]]{one, two}[n%2], n); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	three := openSharedDocument(t, h)
	if got := three.State(); len(got.Units) != 20 || three.Fresh() {
		t.Errorf("%d of 20 changes are there", len(got.Units))
	}

	mine := Records[card]{Version: 1, Units: []card{{unit(1), "mine"}}}
	if err := one.Replace(mine); errors.Is(err, ErrConflict) {
		err = one.Replace(mine) // two has changed it last
		if err != nil {
			t.Fatal(err)
		}
	} else if err != nil {
		t.Fatal(err)
	}
	err := two.Replace(Records[card]{Version: 1, Units: []card{}})
	if !errors.Is(err, ErrConflict) || errors.Is(err, ErrUnsure) || two.State().Units[0].Text != "mine" {
		t.Errorf("Replace of a state that was not known = %v, state %v", err, two.State())
	}
	if err := two.Remove(Records[card]{Version: 1, Units: []card{}}); err != nil {
		t.Error(err)
	}
	if v, err := h.Get(t.Context(), "doc"); err != nil || v.Data != nil {
		t.Errorf("after Remove the value is %q, %v", v.Data, err)
	}
	if err := addCard(one, 7); err != nil || len(one.State().Units) != 1 {
		t.Errorf("a change after the removal: %v, state %v", err, one.State())
	}
	if err := one.Close(); err != nil {
		t.Error(err)
	}
	if err := addCard(two, 8); err != nil || len(two.State().Units) != 2 {
		t.Errorf("after the other was closed: %v, state %v", err, two.State())
	}
}

// After an answer that was lost the home says whether the value counts.
func TestSharedUnsure(t *testing.T) {
	h := newSharedHome(t)
	d := openSharedDocument(t, h)
	if err := addCard(d, 1); err != nil {
		t.Fatal(err)
	}
	has := func() string { return fmt.Sprint(d.State().Units) }

	h.fail(failUnsure, nil, false)
	if err := addCard(d, 2); err != nil || len(d.State().Units) != 2 {
		t.Errorf("a change that was stored: %v, state %s", err, has())
	}
	h.fail(failUnsure, nil, true)
	if err := addCard(d, 3); !errors.Is(err, ErrUnreachable) || errors.Is(err, ErrUnsure) || len(d.State().Units) != 2 {
		t.Errorf("a change that was not stored: %v, state %s", err, has())
	}
	h.fail(failUnsure, func() error { return fmt.Errorf("%w: injected", ErrUnreachable) }, false)
	if err := addCard(d, 4); !errors.Is(err, ErrUnsure) || len(d.State().Units) != 2 {
		t.Errorf("a change of which nothing is known: %v, state %s", err, has())
	}
	h.fail(nil, nil, false)
	end := time.Now().Add(patience)
	for len(d.State().Units) != 3 { // the writer looks again
		if time.Now().After(end) {
			t.Fatalf("the state does not become that of the home: %s", has())
		}
		time.Sleep(time.Millisecond)
	}
	if err := addCard(d, 5); err != nil || len(d.State().Units) != 4 {
		t.Errorf("the next change: %v, state %s", err, has())
	}
	if s := openSharedDocument(t, h).State(); fmt.Sprint(s) != fmt.Sprint(d.State()) {
		t.Errorf("the home has %v", s)
	}
}

func openSharedCards(t *testing.T, h Home) *Keeper[card] {
	t.Helper()
	k, err := OpenKeeperIn(t.Context(), cards, h, "cards.")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Close() })
	return k
}

// wantCard checks a record; text is empty if the unit has no record.
func wantCard(t *testing.T, k *Keeper[card], n int, text string) {
	t.Helper()
	if c, ok, err := k.Get(unit(n)); err != nil || ok != (text != "") || c.Text != text {
		t.Errorf("unit %d has %v, %v, %v; want %q", n, c, ok, err, text)
	}
}

// In a shared home each unit has a value of its own, so that its changes meet only those of the same unit.
func TestSharedKeeper(t *testing.T) {
	h := newSharedHome(t)
	one, two := openSharedCards(t, h), openSharedCards(t, h)
	put := func(k *Keeper[card], n int, text string) error {
		unsure, err := k.Put(card{unit(n), text}, Patience{})
		if unsure {
			t.Errorf("Put of unit %d is unsure: %v", n, err)
		}
		return err
	}
	for n := range 4 {
		if err := put([]*Keeper[card]{one, two}[n%2], n, "first"); err != nil {
			t.Fatal(err)
		}
	}
	const golden = `{
  "version": 1,
  "units": [
    {
      "naa": "3000000000000002",
      "text": "first"
    }
  ]
}
`
	if v, err := h.Get(t.Context(), "cards."+unit(2)); err != nil || string(v.Data) != golden {
		t.Errorf("the value is %q, %v", v.Data, err)
	}
	three := openSharedCards(t, h)
	if got := three.Units(); !slices.Equal(got, []string{unit(0), unit(1), unit(2), unit(3)}) {
		t.Errorf("the units are %v", got)
	}
	if err := put(three, 1, "of three"); err != nil {
		t.Fatal(err)
	}
	err := put(two, 1, "of two")
	if !errors.Is(err, ErrConflict) || !strings.Contains(err.Error(), "cards cards."+unit(1)) {
		t.Errorf("a change of a record that another has changed: %v", err)
	}
	wantCard(t, two, 1, "of three")
	wantCard(t, two, 3, "first")
	if err := put(two, 1, "again"); err != nil {
		t.Error(err)
	}
	if _, err := three.Remove(unit(0), Patience{}); err != nil {
		t.Error(err)
	}
	if _, err := three.Remove(unit(9), Patience{}); err != nil {
		t.Error(err)
	}
	if v, err := h.Get(t.Context(), "cards."+unit(0)); err != nil || v.Data != nil {
		t.Errorf("a removed record is %q, %v", v.Data, err)
	}
	if err := put(one, 0, "late"); !errors.Is(err, ErrConflict) {
		t.Errorf("a change of a record that another has removed: %v", err)
	}
	wantCard(t, one, 0, "")
	aborted := Patience{Commit: func() bool { return false }}
	if unsure, err := one.Put(card{unit(5), "aborted"}, aborted); !errors.Is(err, ErrAborted) || !unsure {
		t.Errorf("a change that its caller does not want: %v, %v", unsure, err)
	}
	if err := one.Close(); err != nil {
		t.Error(err)
	}
	if err := put(one, 5, "closed"); err == nil {
		t.Error("a closed keeper stores")
	}
	four := openSharedCards(t, h)
	wantCard(t, four, 5, "")
	wantCard(t, four, 1, "again")
	if got := four.Units(); !slices.Equal(got, []string{unit(1), unit(2), unit(3)}) {
		t.Errorf("the units are %v", got)
	}
}

// Update loses no change, whatever others change at the same time, and its Commit comes before Follow tells of a later change.
func TestUpdate(t *testing.T) {
	h := newSharedHome(t)
	own, err := OpenKeeper(cards, filepath.Join(t.TempDir(), "cards.json"))
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	one, two := openSharedCards(t, h), openSharedCards(t, h)
	for _, keepers := range [][]*Keeper[card]{{one, two}, {own, own}} {
		var mu sync.Mutex
		counts := map[*Keeper[card]]string{} // what counts for each keeper, in the order of its calls
		if keepers[0].Shared() != (keepers[0] != own) {
			t.Error("Shared is wrong")
		}
		for _, k := range keepers {
			if !k.Shared() {
				continue
			}
			err := k.Follow(t.Context(), func(unit string) {
				c, _, err := k.Get(unit)
				if err != nil && !errors.Is(err, ErrLost) {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				counts[k] = c.Text
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		const workers, steps = 4, 5
		var wg sync.WaitGroup
		for n := range workers {
			k := keepers[n%2]
			wg.Go(func() {
				for range steps {
					var text string
					unsure, err := k.Update(unit(1), Patience{Commit: func() bool {
						mu.Lock()
						defer mu.Unlock()
						counts[k] = text
						return true
					}}, func(c card, ok bool) card {
						if ok != (c.NAA != "") {
							t.Errorf("the record %+v, %v", c, ok)
						}
						text = c.Text + "x"
						return card{unit(1), text}
					})
					if unsure || err != nil {
						t.Error(unsure, err)
					}
				}
			})
		}
		wg.Wait()
		want := strings.Repeat("x", workers*steps)
		for _, k := range keepers {
			end := time.Now().Add(patience)
			for {
				c, _, err := k.Get(unit(1))
				mu.Lock()
				got := counts[k]
				mu.Unlock()
				if err == nil && c.Text == want && got == want {
					break
				}
				if time.Now().After(end) {
					t.Fatalf("the record is %q, %v, and %q counts; want %d changes", c.Text, err, got, workers*steps)
				}
				time.Sleep(time.Millisecond)
			}
		}
	}
	if _, err := h.Put(t.Context(), "cards."+unit(2), []byte("{"), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := one.Update(unit(2), Patience{}, func(card, bool) card { return card{unit(2), "new"} }); !errors.Is(err, ErrLost) && !strings.Contains(err.Error(), "is damaged") {
		t.Errorf("over a damaged record Update = %v", err)
	}
	if v, err := h.Get(t.Context(), "cards."+unit(2)); err != nil || string(v.Data) != "{" {
		t.Errorf("a damaged record is %q, %v", v.Data, err)
	}
}

// A damaged record costs its unit only. A record of a newer program, or under another name, is an error.
func TestSharedKeeperDamage(t *testing.T) {
	h := newSharedHome(t)
	k := openSharedCards(t, h)
	for n := range 2 {
		if _, err := k.Put(card{unit(n), "good"}, Patience{}); err != nil {
			t.Fatal(err)
		}
	}
	good, err := h.Get(t.Context(), "cards."+unit(0))
	if err != nil {
		t.Fatal(err)
	}
	for n, text := range map[int]string{2: "{", 3: string(good.Data)} {
		if _, err := h.Put(t.Context(), "cards."+unit(n), []byte(text), 0); err != nil {
			t.Fatal(err)
		}
	}
	k = openSharedCards(t, h)
	wantCard(t, k, 0, "good")
	wantCard(t, k, 1, "good")
	for n := 2; n < 4; n++ {
		_, _, get := k.Get(unit(n))
		_, put := k.Put(card{unit(n), "new"}, Patience{})
		_, remove := k.Remove(unit(n), Patience{})
		for _, err := range []error{get, put, remove} {
			if !errors.Is(err, ErrLost) || !strings.Contains(err.Error(), "is damaged") {
				t.Errorf("unit %d: %v, want ErrLost", n, err)
			}
		}
	}
	if lost := k.Lost(); len(lost) != 2 {
		t.Errorf("lost are %v", lost)
	}
	if err := k.Accept(unit(2)); err != nil {
		t.Error(err)
	}
	if err := k.Accept(unit(0)); err == nil {
		t.Error("a good record is accepted as lost")
	}
	if _, err := k.Put(card{unit(2), "new"}, Patience{}); err != nil {
		t.Error(err)
	}
	wantCard(t, openSharedCards(t, h), 2, "new")
	wantCard(t, openSharedCards(t, h), 0, "good")

	newer := strings.Replace(string(good.Data), `"version": 1`, `"version": 2`, 1)
	r, err := h.Put(t.Context(), "cards."+unit(4), []byte(newer), 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := OpenKeeperIn(t.Context(), cards, h, "cards."); err == nil || !strings.Contains(err.Error(), "cards cards."+unit(4)+": has version 2, but this program knows only version 1") {
		t.Errorf("with a record of a newer program: %v", err)
	}
	if _, err := h.Put(t.Context(), "cards."+unit(4), nil, r); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Put(t.Context(), "cards.x", []byte("x"), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenKeeperIn(t.Context(), cards, h, "cards."); err == nil || !strings.Contains(err.Error(), `key "cards.x"`) {
		t.Errorf("with a key of no unit: %v", err)
	}
	h.fail(nil, func() error { return ErrUnreachable }, false)
	if _, err := OpenIn(t.Context(), cards, h, "doc", Records[card]{}); !errors.Is(err, ErrUnreachable) {
		t.Errorf("without an answer OpenIn = %v", err)
	}
}

// A change for which a shared home takes too long fails in time, and the error speaks of no file system. Another unit's change
// waits for its own answer only.
func TestSharedTimeout(t *testing.T) {
	h := newSharedHome(t)
	k := openSharedCards(t, h)
	answer := make(chan struct{})
	h.fail(func() error { <-answer; return failUnsure() }, nil, true)
	k.SetLimit(func() time.Duration { return 10 * time.Millisecond }, nil)
	for n := range 2 {
		unsure, err := k.Put(card{unit(n), "late"}, Patience{})
		if !unsure || !errors.Is(err, ErrTimeout) || !errors.Is(err, ErrUnreachable) ||
			!strings.HasSuffix(err.Error(), "the home of the state does not answer: nothing was stored within 10ms (limits.state_timeout)") {
			t.Errorf("unit %d: Put = %v, %v", n, unsure, err)
		}
	}
	if err := k.TooLate(); !errors.Is(err, ErrTimeout) || strings.Contains(err.Error(), "file system") {
		t.Errorf("TooLate = %v", err)
	}
	h.fail(nil, nil, false)
	close(answer)
	k.SetLimit(nil, nil)
	if _, err := k.Put(card{unit(0), "next"}, Patience{}); err != nil {
		t.Errorf("the next change: %v", err)
	}
	wantCard(t, k, 0, "next")
}

// follow makes k follow its home, and returns what it tells: each unit once, in the order of the first calls after the last time.
func follow(t *testing.T, k *Keeper[card]) (told func() []string) {
	t.Helper()
	var mu sync.Mutex
	var list []string
	err := k.Follow(t.Context(), func(unit string) {
		mu.Lock()
		defer mu.Unlock()
		list = append(list, unit)
	})
	if err != nil {
		t.Fatal(err)
	}
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		all := list
		list = nil
		slices.Sort(all)
		return slices.Compact(all)
	}
}

// A keeper that follows its home has what others store, and tells of it. Of its own changes it tells nothing.
func TestFollow(t *testing.T) {
	h := newSharedHome(t)
	one := openSharedCards(t, h)
	put := func(k *Keeper[card], n int, text string) {
		t.Helper()
		if _, err := k.Put(card{unit(n), text}, Patience{}); err != nil {
			t.Fatal(err)
		}
	}
	for n := range 3 {
		put(one, n, "first")
	}
	two := openSharedCards(t, h)
	put(one, 0, "before")
	if _, err := one.Remove(unit(1), Patience{}); err != nil {
		t.Fatal(err)
	}
	told := follow(t, two)
	marks := 100
	// wantTold checks what two has told, up to a change of another unit that one makes now.
	wantTold := func(units ...string) {
		t.Helper()
		marks++
		put(one, marks, "mark")
		var got []string
		end := time.Now().Add(patience)
		for !slices.Contains(got, unit(marks)) {
			if time.Now().After(end) {
				t.Fatalf("told of %v only", got)
			}
			time.Sleep(time.Millisecond)
			got = append(got, told()...)
		}
		wantCard(t, two, marks, "mark")
		if want := append(units, unit(marks)); !slices.Equal(got, want) {
			t.Errorf("told of %v, want %v", got, want)
		}
	}
	wantTold(unit(0), unit(1))
	wantCard(t, two, 0, "before")
	wantCard(t, two, 1, "")

	put(two, 2, "own")
	put(two, 5, "own")
	if _, err := two.Remove(unit(5), Patience{}); err != nil {
		t.Fatal(err)
	}
	wantTold()
	wantCard(t, two, 2, "own")

	followed := follow(t, one)
	end := time.Now().Add(patience)
	for got := []string{}; !slices.Contains(got, unit(2)); got = append(got, followed()...) {
		if time.Now().After(end) {
			t.Fatal("a second keeper that follows is not told")
		}
		time.Sleep(time.Millisecond)
	}
	put(one, 2, "of one")
	wantTold(unit(2))
	wantCard(t, two, 2, "of one")
	put(two, 2, "of two") // no conflict: it has followed
	wantTold()

	// A conflict has found the change already. It is told of all the same.
	three := openSharedCards(t, h)
	put(one, 0, "of one")
	if _, err := three.Put(card{unit(0), "of three"}, Patience{}); !errors.Is(err, ErrConflict) {
		t.Fatalf("Put after another change = %v", err)
	}
	late := follow(t, three)
	for got := []string{}; !slices.Contains(got, unit(0)); got = append(got, late()...) {
		if time.Now().After(end) {
			t.Fatal("the change of a conflict is not told of")
		}
		time.Sleep(time.Millisecond)
	}
	wantTold(unit(0))
}

// Refresh finds what another process has made of one unit, or that the home does not answer.
func TestRefresh(t *testing.T) {
	h := newSharedHome(t)
	one, two := openSharedCards(t, h), openSharedCards(t, h)
	for n := range 2 {
		if _, err := one.Put(card{unit(n), "new"}, Patience{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range []string{"new", ""} {
		if err := two.Refresh(t.Context(), unit(0)); err != nil {
			t.Fatal(err)
		}
		wantCard(t, two, 0, want)
		wantCard(t, two, 1, "") // nobody has asked
		if _, err := one.Remove(unit(0), Patience{}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := two.Put(card{unit(0), "of two"}, Patience{}); err != nil {
		t.Errorf("Put after Refresh: %v", err)
	}
	if _, err := two.Put(card{unit(1), "of two"}, Patience{}); !errors.Is(err, ErrConflict) {
		t.Errorf("Put without Refresh: %v, want a conflict", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := two.Refresh(ctx, unit(0)); !errors.Is(err, context.Canceled) {
		t.Errorf("Refresh after its end: %v", err)
	}
	if err := two.Close(); err != nil {
		t.Fatal(err)
	}
	if err := two.Refresh(t.Context(), unit(0)); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("Refresh after Close: %v", err)
	}
}

// What follows a home survives that the home does not answer, and records that are damaged. Those cost their units only.
func TestFollowFaults(t *testing.T) {
	h := newSharedHome(t)
	one, two := openSharedCards(t, h), openSharedCards(t, h)
	for n := range 2 {
		if _, err := one.Put(card{unit(n), "good"}, Patience{}); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	calls := make(chan string, 100)
	if err := two.Follow(ctx, func(unit string) { calls <- unit }); err != nil {
		t.Fatal(err)
	}
	await := func(want string) {
		t.Helper()
		select {
		case got := <-calls:
			if got != want {
				t.Errorf("told of %s, want %s", got, want)
			}
		case <-time.After(patience):
			t.Fatalf("not told of %s", want)
		}
	}
	await(unit(0))
	await(unit(1))

	good, err := h.Get(t.Context(), "cards."+unit(0))
	if err != nil {
		t.Fatal(err)
	}
	r, err := h.Put(t.Context(), "cards."+unit(0), []byte("{"), good.Revision)
	if err != nil {
		t.Fatal(err)
	}
	await(unit(0))
	if _, _, err := two.Get(unit(0)); !errors.Is(err, ErrLost) {
		t.Errorf("of a damaged record Get says %v", err)
	}
	if _, err := two.Put(card{unit(0), "new"}, Patience{}); !errors.Is(err, ErrLost) {
		t.Errorf("over a damaged record Put says %v", err)
	}
	wantCard(t, two, 1, "good")
	if _, err := h.Put(t.Context(), "cards."+unit(0), good.Data, r); err != nil {
		t.Fatal(err)
	}
	await(unit(0))
	wantCard(t, two, 0, "good")
	if _, err := h.Put(t.Context(), "cards.x", []byte("x"), 0); err != nil { // of no unit
		t.Fatal(err)
	}

	looked := make(chan struct{}, 1)
	h.fail(nil, func() error {
		select {
		case looked <- struct{}{}:
		default:
		}
		return fmt.Errorf("%w: injected", ErrUnreachable)
	}, false)
	if _, err := one.Put(card{unit(1), "unseen"}, Patience{}); err != nil {
		t.Fatal(err)
	}
	<-looked
	wantCard(t, two, 1, "good")
	h.fail(nil, nil, false)
	await(unit(1))
	wantCard(t, two, 1, "unseen")

	cancel()
	if err := two.Close(); err != nil {
		t.Error(err)
	}
}
