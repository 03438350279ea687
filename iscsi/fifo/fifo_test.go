package fifo

import (
	"slices"
	"testing"
)

type element struct {
	n    int
	link Link[element]
}

func queue(n int) (q Queue[element], elements []element) {
	elements = make([]element, n)
	for i := range elements {
		elements[i].n = i
		q.Push(&elements[i], &elements[i].link)
	}
	return q, elements
}

// want checks the elements of q, and that it can be appended to and emptied.
func want(t *testing.T, q *Queue[element], ns ...int) {
	t.Helper()
	var got []int
	for e := range q.All() {
		got = append(got, e.n)
	}
	if !slices.Equal(got, ns) {
		t.Errorf("%v in the queue, want %v", got, ns)
	}
	if f := q.Front(); q.Empty() != (len(ns) == 0) || q.Empty() != (f == nil) || f != nil && f.n != ns[0] {
		t.Errorf("Empty is %v, Front is %v, want %v", q.Empty(), f, ns)
	}
	last := element{n: -1}
	q.Push(&last, &last.link)
	got = nil
	for e := q.Pop(); e != nil; e = q.Pop() {
		got = append(got, e.n)
	}
	if !slices.Equal(got, append(ns, -1)) || !q.Empty() || q.Pop() != nil {
		t.Errorf("%v came out, want %v and -1", got, ns)
	}
}

func TestQueue(t *testing.T) {
	var none Queue[element]
	want(t, &none)
	q, _ := queue(3)
	want(t, &q, 0, 1, 2)
	q, _ = queue(3)
	if e := q.Pop(); e == nil || e.n != 0 {
		t.Errorf("Pop: %v", e)
	}
	want(t, &q, 1, 2)
	q, _ = queue(2)
	all := q.Take()
	want(t, &q)
	want(t, &all, 0, 1)
}

func TestAllStops(t *testing.T) {
	q, _ := queue(3)
	for e := range q.All() {
		if e.n == 1 {
			break
		}
		if e.n > 1 {
			t.Fatal("did not stop")
		}
	}
}

func TestRemove(t *testing.T) {
	for gone, left := range [][]int{{1, 2}, {0, 2}, {0, 1}} {
		q, elements := queue(3)
		if !q.Remove(&elements[gone].link) || q.Remove(&elements[gone].link) {
			t.Errorf("Remove of %d: want true, then false", gone)
		}
		want(t, &q, left...)
	}
	q, elements := queue(1)
	q.Remove(&elements[0].link)
	want(t, &q)
}

// An element can move from queue to queue.
func TestMove(t *testing.T) {
	a, elements := queue(2)
	var b Queue[element]
	for e := a.Pop(); e != nil; e = a.Pop() {
		b.Push(e, &e.link)
	}
	want(t, &a)
	want(t, &b, 0, 1)
	if allocs := testing.AllocsPerRun(100, func() {
		b.Push(&elements[0], &elements[0].link)
		for e := range b.All() {
			e.n++
		}
		b.Pop()
	}); allocs != 0 {
		t.Errorf("%v allocations", allocs)
	}
}
