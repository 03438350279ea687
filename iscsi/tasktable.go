package iscsi

// A taskTable finds tasks by Initiator Task Tag. It is a hash table of fixed size with chains, so
// entering a task allocates nothing. Before the first task it has one bucket: a login has no tasks.
type taskTable struct {
	buckets []*Task // linked by nextByITT; a power of two of them
	full    int     // how many there are from the first task on
}

func (tt *taskTable) init(tasks int) {
	tt.full = 16
	for tt.full < 2*tasks {
		tt.full *= 2
	}
	tt.buckets = make([]*Task, 1)
}

func (tt *taskTable) bucket(itt uint32) **Task {
	// Initiators count in either end of the tag: spread both.
	return &tt.buckets[(itt*0x9e3779b1>>12)&uint32(len(tt.buckets)-1)]
}

// find returns the task with that tag, or nil.
func (tt *taskTable) find(itt uint32) *Task {
	t := *tt.bucket(itt)
	for t != nil && t.header().ITT() != itt {
		t = t.nextByITT
	}
	return t
}

func (tt *taskTable) insert(t *Task) {
	if len(tt.buckets) < tt.full {
		tt.buckets = make([]*Task, tt.full)
	}
	b := tt.bucket(t.header().ITT())
	t.nextByITT, *b = *b, t
}

func (tt *taskTable) remove(t *Task) {
	for p := tt.bucket(t.header().ITT()); *p != nil; p = &(*p).nextByITT {
		if *p == t {
			*p, t.nextByITT = t.nextByITT, nil
			return
		}
	}
}

// any reports whether f holds for any task. f may remove the task.
func (tt *taskTable) any(f func(*Task) bool) bool {
	for _, t := range tt.buckets {
		for t != nil {
			next := t.nextByITT
			if f(t) {
				return true
			}
			t = next
		}
	}
	return false
}

// each calls f for every task. f may remove the task.
func (tt *taskTable) each(f func(*Task)) {
	tt.any(func(t *Task) bool { f(t); return false })
}
