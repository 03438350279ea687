package etcd

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/etcdserver"
)

// A card is a record for tests.
type card struct {
	NAA  string `json:"naa"`
	Text string `json:"text"`
}

func (c card) Unit() string { return c.NAA }
func (c card) Check() error { return nil }

// Records in etcd are found by another process. A change during which etcd is frozen fails and says that it is unsure; later both
// processes have the same record, and the other units keep theirs.
func TestKeepers(t *testing.T) {
	members := etcdserver.Start(t, 1)
	cards := state.Format[state.Records[card]]{Name: "cards", Version: 1}
	unit := func(n int) string { return fmt.Sprintf("3%015x", n) }
	keeper := func() (*state.Keeper[card], *Home) {
		t.Helper()
		h := open(t, Config{Endpoints: etcdserver.Endpoints(members)})
		k, err := state.OpenKeeperIn(t.Context(), cards, h, "cards/")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { k.Close() })
		return k, h
	}
	text := func(k *state.Keeper[card], n int) string {
		t.Helper()
		c, _, err := k.Get(unit(n))
		if err != nil {
			t.Fatal(err)
		}
		return c.Text
	}
	one, _ := keeper()
	const units = page + 6
	for n := range units {
		if _, err := one.Put(card{unit(n), "first"}, state.Patience{}); err != nil {
			t.Fatal(err)
		}
	}
	two, _ := keeper()
	if got := two.Units(); len(got) != units || got[units-1] != unit(units-1) {
		t.Errorf("another process finds %d units", len(got))
	}
	hasty, h := keeper()
	h.timeout = time.Second
	members[0].Freeze()
	unsure, err := hasty.Put(card{unit(3), "frozen"}, state.Patience{})
	if !unsure || !errors.Is(err, state.ErrUnsure) || !strings.Contains(err.Error(), "cards cards/"+unit(3)) {
		t.Errorf("Put in a frozen etcd = %v, %v; want ErrUnsure", unsure, err)
	}
	if text(hasty, 3) != "first" {
		t.Errorf("a change that is unsure counts")
	}
	members[0].Thaw()
	testkit.Eventually(t, "the next change is stored", func() bool {
		_, err := hasty.Put(card{unit(3), "thawed"}, state.Patience{})
		return err == nil
	})
	_, err = two.Put(card{unit(3), "of two"}, state.Patience{})
	if !errors.Is(err, state.ErrConflict) || text(two, 3) != "thawed" {
		t.Errorf("a change of a record that another has changed: %v, the record is %q", err, text(two, 3))
	}
	three, _ := keeper()
	for n := range units {
		if want := map[bool]string{false: "first", true: "thawed"}[n == 3]; text(three, n) != want {
			t.Errorf("unit %d has %q, want %q", n, text(three, n), want)
		}
	}
}

// What one process stores in etcd, another one that follows has soon, also after etcd was frozen or killed meanwhile.
func TestFollow(t *testing.T) {
	members := etcdserver.Start(t, 1)
	cards := state.Format[state.Records[card]]{Name: "cards", Version: 1}
	const unit = "3000000000000001"
	var keepers []*state.Keeper[card]
	for range 2 {
		k, err := state.OpenKeeperIn(t.Context(), cards, open(t, Config{Endpoints: etcdserver.Endpoints(members)}), "cards/")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { k.Close() })
		keepers = append(keepers, k)
	}
	one, two := keepers[0], keepers[1]
	told := make(chan string, 100)
	if err := two.Follow(t.Context(), func(unit string) { told <- unit }); err != nil {
		t.Fatal(err)
	}
	for i, fault := range []func(){func() {}, func() { members[0].Freeze(); members[0].Thaw() }, func() { members[0].Kill(); members[0].Start(); members[0].WaitHealthy() }} {
		fault()
		text := fmt.Sprint("text ", i)
		testkit.Eventually(t, "the change is stored", func() bool {
			_, err := one.Put(card{unit, text}, state.Patience{})
			return err == nil
		})
		testkit.Eventually(t, "the change is followed", func() bool {
			c, _, err := two.Get(unit)
			return err == nil && c.Text == text
		})
		if got := <-told; got != unit {
			t.Errorf("told of %q", got)
		}
	}
	if _, err := two.Put(card{unit, "of two"}, state.Patience{}); err != nil {
		t.Errorf("a change of a record that was followed: %v", err)
	}
}
