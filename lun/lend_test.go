package lun

import (
	"bytes"
	"errors"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A watchedLender calls a function before each Lend.
type watchedLender struct {
	backend.Lender
	before func() error
}

func (l watchedLender) Lend(off, n int64) ([]byte, *backend.Loan, error) {
	if err := l.before(); err != nil {
		return nil, nil, err
	}
	return l.Lender.Lend(off, n)
}

// All pages of a READ are lent while it keeps WRITE ATOMIC and COMPARE AND WRITE from the whole range: they show all of such a
// command or nothing. A page that cannot be read fails the READ, and nothing is lent.
func TestPagesAreLentTogether(t *testing.T) {
	r := newRig(t, setup{size: 4 << 20})
	const at, size = stripeSpan - 96<<10, 192 << 10 // parts of four pages in two stripes
	data := bytes.Repeat([]byte("0123456789abcdef"), size/16)
	if err := r.store.WriteAt(data, at); err != nil {
		t.Fatal(err)
	}
	lends, failAt := 0, 0
	r.unit.lender = watchedLender{r.store.Store.(backend.Lender), func() error {
		if lends++; lends == failAt {
			return errors.New("injected")
		}
		for i := range 2 {
			if r.unit.ranges[i].TryLock() {
				r.unit.ranges[i].Unlock()
				t.Errorf("stripe %d is free during Lend %d", i, lends)
			}
		}
		return nil
	}}
	lend := func() ([]Lent, bool) {
		block := cdb.Read16(at/512, size/512)
		r.c.LUN, r.c.CDB, lends = [8]byte{}, block[:], 0
		if !r.nexus.Begin(&r.c) {
			t.Fatalf("status %#x", r.c.Status)
		}
		if n := r.nexus.Lends(&r.c, 0, size); n != 4*backend.LoanSize {
			t.Errorf("the loans keep %d bytes", n)
		}
		list, ok := r.nexus.Lend(&r.c, 0, size, nil)
		r.nexus.End(&r.c)
		return list, ok
	}
	list, ok := lend()
	var got []byte
	for _, l := range list {
		got = append(got, l.Data...)
		l.Return()
	}
	if !ok || lends != 4 || !bytes.Equal(got, data) {
		t.Errorf("%d bytes in %d loans, %t", len(got), lends, ok)
	}
	failAt = 3
	if list, ok := lend(); ok || len(list) != 0 || r.c.Status != StatusCheckCondition {
		t.Errorf("%d loans of a store that fails, %t, status %#x", len(list), ok, r.c.Status)
	}
}
