// Package state keeps small states that survive the process and a power failure: the
// identities of logical units, a record for each logical unit, and documents of other shapes.
// They are in a Home: a directory, or etcd (package etcd).
//
// All files have one format: JSON with a version, mode 0600, replaced as a whole and synced before
// the change counts. A lock keeps a second process out. A file that this package could not have
// written is an error and stays as it is. A Document is one such file, a Keeper is a Document with
// a record for each logical unit, and Identities is a Document with their names.
package state

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"
	"unicode/utf8"
)

// A State is the content of a file: a struct that encodes the version as the member "version".
type State interface {
	Check() error // finds what this program could not have written
}

// A Format describes the files that have a state of type S.
type Format[S State] struct {
	Name    string // what the file is about, for errors
	Version int
	// Upgrades read files of other versions, 0 for files without one. Each
	// returns the state in the present version, and what is written in b.
	Upgrades map[int]func(b []byte) (s S, written any, err error)
}

// A Document is a file with a state of type S. Its methods are safe for concurrent use. Those that
// change it wait for storage, at most for the time of SetLimit; the others do not.
type Document[S State] struct {
	format Format[S]
	home   Home     // nil: nothing is stored; only the writer uses it after Open
	key    string   // in home
	base   Revision // that home has of state; only the writer uses it after Open
	file   *file    // of key, if home is a Directory of the document's own; otherwise it has only a path, for errors
	// shared: others change the key, too, and home is not closed with the document.
	shared  bool
	initial S // the state without a value, if shared
	accept  func(S) error
	lose    func(reason error) S // makes the state of a value that could not have been written; nil: such a value is an error
	foreign bool                 // another process has changed state since the last look; only the writer uses it

	mu      sync.Mutex // never held during a call of the file system
	closed  bool
	state   S    // only the writer changes it
	absent  bool // state is that without a file; only the writer uses it
	limit   func() time.Duration
	late    func()
	queue   []*update[S]
	batch   []*update[S]    // what the writer has
	writing chan struct{}   // closed when the writer ends; nil: none runs
	dirty   map[string]bool // keys of which the file may have another entry than state
	retry   bool            // the writer stores the state although nothing waits

	fresh bool // see Fresh
}

// newDocument returns a document that is stored nowhere.
func newDocument[S State](format Format[S], initial S) *Document[S] {
	return &Document[S]{format: format, file: &file{fsync: (*os.File).Sync}, state: initial}
}

// Open opens the file at path, which has the state initial while it does not
// exist. Missing directories are created with mode 0700. A file that is not
// wholly as a Document has written it is an error and stays as it is.
//
// Until Close the file path.lock is locked (flock(2)), and Open refuses the same path.
func Open[S State](format Format[S], path string, initial S) (*Document[S], error) {
	d := newDocument(format, initial)
	if path == "" {
		return nil, fmt.Errorf("%s: the path of the file is empty", format.Name)
	}
	home := OpenDirectory(filepath.Dir(path), func(_ string, b []byte) error {
		next, err := format.Decode(b)
		if err == nil {
			d.state = next
		}
		return err
	})
	d.file = home.file(filepath.Base(path))
	d.file.path = path // as the caller wrote it
	d.home, d.key = home, filepath.Base(path)
	v, err := home.Get(context.Background(), d.key)
	if err != nil {
		return nil, errors.Join(d.wrap(err), home.Close())
	}
	d.base, d.absent, d.fresh = v.Revision, v.Data == nil, v.Data == nil
	return d, nil
}

// OpenIn opens the document that home has under the key, with the state initial while it has no value. Other processes may
// have it open, too: what they store is found by the next change here. A change that does not depend on
// the state fails with an ErrConflict then, and all others are applied to the state that was found. After a value that may
// have been stored, home says whether it was. Close leaves home open.
func OpenIn[S State](ctx context.Context, format Format[S], home Home, key string, initial S) (*Document[S], error) {
	d := newShared(format, home, key, initial)
	v, err := home.Get(ctx, key)
	if err == nil {
		err = d.adopt(v)
	}
	if err != nil {
		return nil, d.wrap(err)
	}
	d.fresh = v.Data == nil
	return d, nil
}

// newShared returns a document that home has, as long as home has no value of the key.
func newShared[S State](format Format[S], home Home, key string, initial S) *Document[S] {
	d := newDocument(format, initial)
	d.home, d.key, d.shared, d.initial, d.absent, d.file.path = home, key, true, initial, true, key
	return d
}

// adopt makes v, which home has, the state that counts, or the loss of it. Only the writer calls it after OpenIn.
func (d *Document[S]) adopt(v Value) (err error) {
	s := d.initial
	if v.Data != nil {
		s, err = d.format.Decode(v.Data)
		if err == nil && d.accept != nil {
			err = d.accept(s)
		}
		if err != nil {
			if d.lose == nil {
				return err
			}
			s = d.lose(err)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.state, d.absent, d.base, d.dirty, d.foreign = s, v.Data == nil, v.Revision, nil, true
	return err
}

// find returns the state that counts and the content that it is from: see file.find.
func (d *Document[S]) find() (s S, from []byte, reason error) {
	from, reason = d.file.find(func(b []byte) error {
		next, err := d.format.Decode(b)
		if err == nil {
			s = next
		}
		return err
	})
	return s, from, reason
}

// Restored returns why the file was restored from its spare copy when it was opened, or nil.
func (d *Document[S]) Restored() error { return d.wrap(d.file.restored) }

// Fresh reports whether neither the file nor its spare copy existed when it was opened.
func (d *Document[S]) Fresh() bool { return d.fresh }

// Close releases the file for others, after the update in progress. Changes fail from then on with
// fs.ErrClosed.
func (d *Document[S]) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	d.closed = true
	writing := d.writing
	d.mu.Unlock()
	if writing != nil {
		<-writing
	}
	if d.home == nil || d.shared {
		return nil
	}
	return d.wrap(d.home.Close())
}

// SetLimit makes changes fail with ErrTimeout if they are not stored within the time that limit
// returns. They do not count then: see Patience. late is called when that happens.
func (d *Document[S]) SetLimit(limit func() time.Duration, late func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.limit, d.late = limit, late
}

// SetSync makes f the function that syncs files and directories, so that a test
// can let it fail or hang. With nil it is (*os.File).Sync again. No change may be in progress.
func (d *Document[S]) SetSync(f func(*os.File) error) {
	if f == nil {
		f = (*os.File).Sync
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.file.fsync = f
}

// State returns the state that counts. The caller must not change what it refers to.
func (d *Document[S]) State() S {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.state
}

// Replace stores s as the new state. s is on stable storage when Replace returns
// nil. After an error the old state counts.
func (d *Document[S]) Replace(s S) error {
	_, err := d.store(&update[S]{keys: []string{""}, force: true, blind: true, apply: func(S) (S, bool, error) { return s, true, nil }})
	return d.wrap(err)
}

// Remove removes the file. s is the state that it has while it does not exist.
func (d *Document[S]) Remove(s S) error {
	_, err := d.store(&update[S]{
		keys: []string{""}, force: true, blind: true, remove: true, apply: func(S) (S, bool, error) { return s, true, nil },
	})
	return d.wrap(err)
}

// Update stores the state that next returns when the writer comes to it. With absent, that is the
// state without a file, and the file is removed. next must not wait for storage.
func (d *Document[S]) Update(next func() (s S, absent bool)) error {
	u := &update[S]{keys: []string{""}, force: true}
	u.apply = func(S) (s S, _ bool, _ error) {
		s, u.remove = next()
		return s, true, nil
	}
	_, err := d.store(u)
	return d.wrap(err)
}

// wrap adds the name of the file to err, which may be nil.
func (d *Document[S]) wrap(err error) error {
	switch {
	case err == nil:
		return nil
	case d.file.path == "":
		return fmt.Errorf("ephemeral %s: %w", d.format.Name, err)
	}
	return fmt.Errorf("%s %s: %w", d.format.Name, d.file.path, err)
}

// Decode returns the state in the content b of a file. It refuses what could not have been written.
func (f *Format[S]) Decode(b []byte) (s S, err error) {
	var written any = &s // what is in b
	version, err := versionOf(b)
	upgrade := f.Upgrades[version]
	if (err == nil || errors.Is(err, errNoVersion)) && upgrade != nil && (version != 0) == (err == nil) {
		s, written, err = upgrade(b)
	} else {
		err = Decode(b, f.Version, &s)
	}
	if err == nil {
		err = s.Check()
	}
	if err == nil {
		if err = sameTokens(b, written); err != nil {
			err = fmt.Errorf("is damaged: %w", err)
		}
	}
	if err != nil {
		var none S
		return none, err
	}
	return s, nil
}

// Encode returns s as JSON. It refuses what Decode would refuse for its length.
func Encode(s any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(s); err != nil {
		return nil, err
	}
	if b.Len() > maxFile {
		return nil, fmt.Errorf("the file would have %d bytes, more than the limit of %d", b.Len(), maxFile)
	}
	return b.Bytes(), nil
}

// Decode fills *s from JSON with that version. It refuses unknown members;
// sameTokens finds what is left.
func Decode(b []byte, version int, s any) error {
	got, err := versionOf(b)
	switch {
	case err != nil:
		return err
	case got != version:
		return fmt.Errorf("%w %d, but this program knows only version %d", errVersion, got, version)
	}
	return decodeMembers(b, s)
}

func decodeMembers(b []byte, s any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(s); err != nil {
		return fmt.Errorf("is damaged: %w", err)
	}
	return nil
}

var (
	errNoVersion = errors.New("has no version")
	// errVersion is in errors about a file of another program, which is not damaged.
	errVersion = errors.New("has version")
)

// versionOf returns the version of a file, which decides what else may be there.
func versionOf(b []byte) (int, error) {
	switch {
	case len(b) == 0:
		return 0, errors.New("is empty")
	case len(b) > maxFile:
		return 0, fmt.Errorf("is longer than the limit of %d bytes", maxFile)
	case !utf8.Valid(b):
		return 0, errors.New("is not valid UTF-8")
	}
	var v struct{ Version *int }
	if err := json.Unmarshal(b, &v); err != nil {
		if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
			return 0, fmt.Errorf("is damaged at byte %d of %d: %w", syntax.Offset, len(b), err)
		}
		return 0, fmt.Errorf("is damaged: %w", err)
	}
	if v.Version == nil {
		return 0, errNoVersion
	}
	return *v.Version, nil
}

// sameTokens checks that b says s and nothing else. White space is free, and so
// is how a string is escaped. Package json is lenient: of a repeated member it
// takes the last, it ignores case and order, and it accepts null for a value.
func sameTokens(b []byte, s any) error {
	canonical, err := json.Marshal(s)
	if err != nil {
		return err
	}
	got, want := json.NewDecoder(bytes.NewReader(b)), json.NewDecoder(bytes.NewReader(canonical))
	for {
		w, err := want.Token()
		if err == io.EOF {
			return nil // b is one JSON value: it is at its end as well
		}
		if err != nil {
			return err
		}
		g, err := got.Token()
		if err != nil {
			return err
		}
		if g != w {
			return fmt.Errorf("%v before byte %d, where %v belongs", g, got.InputOffset(), w)
		}
	}
}
