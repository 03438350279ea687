package state

import (
	"errors"
	"io/fs"
	"os"
)

// A Verdict is what Examine finds of a file.
type Verdict string

// Verdicts.
const (
	Good       Verdict = "ok"
	Missing    Verdict = "missing"    // with its spare copy, as before its first change
	Restorable Verdict = "restorable" // the spare copy will take its place
	Partial    Verdict = "partial"    // some records are damaged in the file and in its spare copy
	Damaged    Verdict = "damaged"    // the spare copy is of no use
)

// A Condition is the result of Examine.
type Condition struct {
	Name    string // what the file is about
	Path    string
	Verdict Verdict
	Reason  error    // nil if the verdict is Good or Missing
	Lost    []Loss   // of Partial; those of identities have no NAA
	Left    []string // of identities: the text that is left of each
}

// Examine looks at the file at path as Open does, but changes nothing, and ignores the lock: a target may be
// using the file.
func (f Format[S]) Examine(path string) Condition {
	d := newDocument(f, *new(S))
	d.file.path, d.file.fsync = path, func(*os.File) error { return nil }
	c := Condition{Name: f.Name, Path: path, Verdict: Good}
	_, from, reason := d.find()
	c.Reason = d.wrap(reason)
	switch {
	case from == nil && reason == nil:
		c.Verdict = Missing
	case from == nil:
		c.Verdict = Damaged
	case reason != nil:
		c.Verdict = Restorable
	}
	return c
}

// KnownSerials returns what Identities.Serials would return, for the file at path, or nil if it cannot be read. It changes
// nothing, and ignores the lock.
func KnownSerials(path string) map[string]string {
	d := newDocument(identitiesFormat, noIdentities())
	d.file.path, d.file.fsync = path, func(*os.File) error { return nil }
	s, from, _ := d.find()
	if from == nil {
		return nil
	}
	d.state = s
	return (&Identities{doc: d}).Serials()
}

// ExamineIdentities does what Examine does, for the file of OpenIdentities.
func ExamineIdentities(path string) Condition { return examineIdentities(path) }

// Discard renames the file at path and its spare copy, if they exist, to path.damaged and path.spare.damaged,
// so that Open finds none. It fails if a target uses the file.
func Discard(path string) error {
	f := file{fsync: (*os.File).Sync}
	if err := f.open(path); err != nil {
		return err
	}
	for _, p := range []string{f.spare(), f.path} {
		if err := os.Rename(p, p+".damaged"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return errors.Join(err, f.unlock())
		}
	}
	return errors.Join(f.settle(), f.unlock())
}
