package state

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/tests/testkit"
)

// A card is a record for tests.
type card struct {
	NAA  string `json:"naa"`
	Text string `json:"text"`
}

func (c card) Unit() string { return c.NAA }
func (c card) Check() error { return nil }

var cards = Format[Records[card]]{Name: "cards", Version: 1}

// unit returns the serial of unit n.
func unit(n int) string { return fmt.Sprintf("3%015x", n) }

// A slowFile lets a test hold up the calls of the file system.
type slowFile struct {
	syncs atomic.Int32
	gate  chan error // each sync takes its result from it; nil: it is done at once
}

func (s *slowFile) sync(*os.File) error {
	s.syncs.Add(1)
	if s.gate == nil {
		return nil
	}
	return <-s.gate
}

// openCards opens a keeper whose syncs wait for s, and whose callers wait ten seconds.
func openCards(t *testing.T, s *slowFile) (k *Keeper[card], path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "cards.json")
	k, err := OpenKeeper(cards, path)
	if err != nil {
		t.Fatal(err)
	}
	k.SetLimit(func() time.Duration { return 10 * time.Second }, nil)
	k.SetSync(s.sync)
	return k, path
}

// wantCards checks the records of the file at path, and with k those that count.
func wantCards(t *testing.T, k *Keeper[card], path string, want map[string]string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	s, err := cards.Decode(b)
	if err != nil {
		t.Fatal(err)
	}
	for name, got := range map[string][]card{"file": s.Units, "memory": k.doc.State().Units} {
		if len(got) != len(want) {
			t.Errorf("the %s has %v, want %v", name, got, want)
		}
		for _, c := range got {
			if want[c.NAA] != c.Text {
				t.Errorf("the %s has %v, want %v", name, got, want)
			}
		}
	}
}

// Changes that wait at the same time are stored with one write. Nobody who reads waits.
func TestChangesAreStoredTogether(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		s := &slowFile{}
		k, path := openCards(t, s)
		s.gate = make(chan error)
		var wg sync.WaitGroup
		want := map[string]string{}
		for i := range 50 {
			want[unit(i)] = "x"
			wg.Go(func() {
				if _, err := k.Put(card{unit(i), "x"}, Patience{}); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		if _, ok, err := k.Get(unit(0)); ok || err != nil {
			t.Errorf("a record counts before it is stored: %v", err)
		}
		if _, err := k.Remove(unit(99), Patience{}); err != nil {
			t.Errorf("a unit without a record waits: %v", err)
		}
		close(s.gate)
		wg.Wait()
		if n := s.syncs.Load(); n != 6 {
			t.Errorf("50 changes made %d syncs, want 6: two writes, each of the file, its spare copy and their directory", n)
		}
		wantCards(t, k, path, want)
		k.Close()
	})
}

// A change that is not stored in time fails, and does not count: not in memory, and when the file
// system answers again, not in the file. Those that were stored with it count.
func TestAbandonedChangeDoesNotComeBack(t *testing.T) {
	for _, sync := range []string{"file", "directory"} {
		t.Run(sync, func(t *testing.T) {
			testkit.Bubble(t, func(t *testing.T) { abandonOne(t, sync == "directory") })
		})
	}
}

func abandonOne(t *testing.T, renamed bool) {
	s := &slowFile{}
	k, path := openCards(t, s)
	if _, err := k.Put(card{unit(1), "before"}, Patience{}); err != nil {
		t.Fatal(err)
	}
	s.gate = make(chan error)
	late := 0
	k.SetLimit(func() time.Duration { return 10 * time.Second }, func() { late++ })
	results := make(chan error, 2)
	var committed atomic.Bool
	unsure := false
	go func() {
		var err error
		unsure, err = k.Put(card{unit(1), "abandoned"}, Patience{Commit: func() bool { committed.Store(true); return true }})
		results <- err
	}()
	synctest.Wait()
	if renamed {
		s.gate <- nil
	}
	begin := time.Now()
	if err := <-results; !errors.Is(err, ErrTimeout) || time.Since(begin) != 10*time.Second || !unsure || late != 1 {
		t.Fatalf("after %v: %v, unsure %v, %d reports; want ErrTimeout after 10s", time.Since(begin), err, unsure, late)
	}
	go func() {
		_, err := k.Put(card{unit(2), "other"}, Patience{})
		results <- err
	}()
	synctest.Wait()
	close(s.gate)
	if err := <-results; err != nil {
		t.Errorf("a change that waited: %v", err)
	}
	synctest.Wait()
	if committed.Load() {
		t.Error("the abandoned change is in force")
	}
	wantCards(t, k, path, map[string]string{unit(1): "before", unit(2): "other"})
	k.Close()
}

// The writer tries again until the file has nothing that was abandoned.
func TestAbandonedChangeIsTakenBack(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		s := &slowFile{}
		k, path := openCards(t, s)
		s.gate = make(chan error, 1)
		aborted := atomic.Bool{}
		result := make(chan error)
		go func() {
			_, err := k.Put(card{unit(1), "abandoned"}, Patience{Aborted: aborted.Load})
			result <- err
		}()
		synctest.Wait()
		aborted.Store(true)
		if err := <-result; !errors.Is(err, ErrAborted) {
			t.Fatalf("%v, want ErrAborted", err)
		}
		s.gate <- nil
		s.gate <- nil                    // stored, too late
		s.gate <- errors.New("injected") // taking it back fails
		synctest.Wait()
		if _, err := k.Put(card{unit(1), "refused"}, Patience{Aborted: func() bool { return true }}); err == nil {
			t.Error("a change of an aborted command is stored")
		}
		close(s.gate)
		time.Sleep(time.Minute)
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the file is still there: %v", err)
		}
		k.Close()
	})
}

// A change that Commit refuses does not count, as if its caller had gone.
func TestCommitRefuses(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		k, path := openCards(t, &slowFile{})
		if _, err := k.Put(card{unit(1), "before"}, Patience{}); err != nil {
			t.Fatal(err)
		}
		refuse := Patience{Commit: func() bool { return false }}
		if unsure, err := k.Put(card{unit(1), "refused"}, refuse); !errors.Is(err, ErrAborted) || !unsure {
			t.Errorf("%v, unsure %v", err, unsure)
		}
		synctest.Wait()
		wantCards(t, k, path, map[string]string{unit(1): "before"})
		k.Close()
	})
}

// Known identities are there while the file system hangs, and new ones fail in time.
func TestIdentitiesOnAHangingDisk(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		ids, err := OpenIdentities(filepath.Join(t.TempDir(), "identities.json"))
		if err != nil {
			t.Fatal(err)
		}
		known := must(t, ids.Get, keyOne)
		s := &slowFile{gate: make(chan error)}
		ids.SetSync(s.sync)
		ids.SetLimit(func() time.Duration { return 10 * time.Second }, nil)
		if _, err := ids.Get(keyTwo); !errors.Is(err, ErrTimeout) || ids.Known(keyTwo) {
			t.Errorf("a new identity: %v, want ErrTimeout", err)
		}
		begin := time.Now()
		if got := must(t, ids.Get, keyOne); got != known || !ids.Known(keyOne) || time.Since(begin) != 0 {
			t.Errorf("%v after %v, want %v at once", got, time.Since(begin), known)
		}
		close(s.gate)
		synctest.Wait()
		if ids.Known(keyTwo) || len(ids.doc.State().Identities) != 1 {
			t.Error("the identity that was given up came back")
		}
		must(t, ids.Get, keyTwo)
		ids.Close()
	})
}
