// Package fifo has a queue whose elements bring their links along, so that
// queueing allocates nothing.
package fifo

import "iter"

// A Link is the place of a T in a Queue, one at a time. It is part of that T.
type Link[T any] struct {
	next *Link[T]
	of   *T
}

// A Queue is a FIFO; the zero value is empty. Whoever uses it sees to it that
// nobody else does.
type Queue[T any] struct{ head, tail *Link[T] }

// Empty tells whether there is nothing in q.
func (q *Queue[T]) Empty() bool { return q.head == nil }

// Front returns the oldest element, or nil.
func (q *Queue[T]) Front() *T {
	if q.head == nil {
		return nil
	}
	return q.head.of
}

// All goes through the elements, the oldest first.
func (q *Queue[T]) All() iter.Seq[*T] {
	return func(yield func(*T) bool) {
		for l := q.head; l != nil && yield(l.of); l = l.next {
		}
	}
}

// Push appends t, which has the link l; l is in no Queue.
func (q *Queue[T]) Push(t *T, l *Link[T]) {
	l.next, l.of = nil, t
	if q.tail == nil {
		q.head = l
	} else {
		q.tail.next = l
	}
	q.tail = l
}

// Pop takes the oldest element out, and returns it, or nil.
func (q *Queue[T]) Pop() *T {
	l := q.head
	if l == nil {
		return nil
	}
	if q.head = l.next; q.head == nil {
		q.tail = nil
	}
	l.next = nil
	return l.of
}

// Take empties q, and returns what was in it.
func (q *Queue[T]) Take() (all Queue[T]) {
	all, *q = *q, Queue[T]{}
	return all
}

// Remove takes the element with the link l out, and tells whether it was in q.
func (q *Queue[T]) Remove(l *Link[T]) bool {
	var before *Link[T]
	for m := q.head; m != nil; before, m = m, m.next {
		if m != l {
			continue
		}
		if before == nil {
			q.head = l.next
		} else {
			before.next = l.next
		}
		if q.tail == l {
			q.tail = before
		}
		l.next = nil
		return true
	}
	return false
}
