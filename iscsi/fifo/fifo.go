// Package fifo provides a queue whose elements contain their own links, so that
// queueing allocates nothing.
package fifo

import (
	"iter"

	"github.com/iser-target/iser-target/lun/invariant"
)

// A Link is the place of a T in a Queue. It is a field of that T and can be in one Queue at a time.
type Link[T any] struct {
	next *Link[T]
	of   *T // nil: the Link is in no Queue
}

// A Queue is a FIFO. The zero value is empty. It is not safe for concurrent use.
type Queue[T any] struct{ head, tail *Link[T] }

// Empty reports whether q has no elements.
func (q *Queue[T]) Empty() bool { return q.head == nil }

// Front returns the oldest element, or nil if q is empty.
func (q *Queue[T]) Front() *T {
	if q.head == nil {
		return nil
	}
	return q.head.of
}

// All returns an iterator over the elements, the oldest first.
func (q *Queue[T]) All() iter.Seq[*T] {
	return func(yield func(*T) bool) {
		for l := q.head; l != nil && yield(l.of); l = l.next {
		}
	}
}

// Push appends t, whose Link is l. l must not be in a Queue.
func (q *Queue[T]) Push(t *T, l *Link[T]) {
	invariant.Check(l.of == nil, "fifo: Push of a Link that is in a Queue")
	l.next, l.of = nil, t
	if q.tail == nil {
		q.head = l
	} else {
		q.tail.next = l
	}
	q.tail = l
}

// Pop removes and returns the oldest element, or returns nil if q is empty.
func (q *Queue[T]) Pop() *T {
	l := q.head
	if l == nil {
		return nil
	}
	if q.head = l.next; q.head == nil {
		q.tail = nil
	}
	t := l.of
	l.next, l.of = nil, nil
	return t
}

// Take empties q and returns its elements as another Queue.
func (q *Queue[T]) Take() (all Queue[T]) {
	all, *q = *q, Queue[T]{}
	return all
}

// Remove removes the element whose Link is l, and reports whether it was in q.
func (q *Queue[T]) Remove(l *Link[T]) bool {
	var before *Link[T]
	at := &q.head
	for ; *at != nil && *at != l; at = &before.next {
		before = *at
	}
	if *at == nil {
		return false
	}
	if *at = l.next; *at == nil {
		q.tail = before
	}
	l.next, l.of = nil, nil
	return true
}
