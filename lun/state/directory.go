package state

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// A Directory is a Home in a directory. Each key is the name of a file, which exists while the key has a value, with a
// spare copy. The file KEY.lock is locked (flock(2)) from the first use of the key to Close, and another Directory
// that uses the key gets an error.
//
// Nothing can interrupt a file system that hangs: a call continues after the end of its context, and the next ones wait
// for it as long as their contexts last.
type Directory struct {
	dir   string
	check func(key string, data []byte) error

	turn chan struct{} // whose holder calls the file system; room for one

	mu       sync.Mutex // guards the fields below; not held during a call of the file system
	files    map[string]*file
	watchers map[*watcher]bool
	closed   bool

	last Revision // guarded by turn
}

// OpenDirectory returns the home in dir. Missing directories are created with mode 0700 when the first key is used. check
// finds values that are damaged: their spare copies are restored then, or the key is an error. Nil finds none.
func OpenDirectory(dir string, check func(key string, data []byte) error) *Directory {
	if check == nil {
		check = func(string, []byte) error { return nil }
	}
	return &Directory{dir: dir, check: check, turn: make(chan struct{}, 1), files: map[string]*file{}, watchers: map[*watcher]bool{}}
}

// suffixes are those of the files that belong to the file of a key.
var suffixes = []string{".lock", ".spare", ".tmp", ".damaged"}

// checkKey refuses keys that are no names of files, or those of other keys' files.
func checkKey(key string) error {
	if key == "" || key == "." || key == ".." || strings.ContainsAny(key, "/\x00") ||
		slices.ContainsFunc(suffixes, func(suffix string) bool { return strings.HasSuffix(key, suffix) }) {
		return fmt.Errorf("key %q cannot be the name of a file", key)
	}
	return nil
}

// file returns the file of the key, which is not open if this is its first use.
func (h *Directory) file(key string) *file {
	h.mu.Lock()
	defer h.mu.Unlock()
	f := h.files[key]
	if f == nil {
		f = &file{path: filepath.Join(h.dir, key), fsync: (*os.File).Sync}
		h.files[key] = f
	}
	return f
}

// do calls f, which may use the file system, with the turn. began reports, with an ErrUnreachable, whether f was called.
func (h *Directory) do(ctx context.Context, f func() error) (began bool, err error) {
	if ctx.Err() == nil {
		select {
		case h.turn <- struct{}{}:
			began = true
		case <-ctx.Done():
		}
	}
	if !began {
		return false, unreachable(ctx)
	}
	done := make(chan error, 1)
	run := func() {
		defer func() { <-h.turn }()
		h.mu.Lock()
		closed := h.closed
		h.mu.Unlock()
		if closed {
			done <- fs.ErrClosed
			return
		}
		done <- f()
	}
	if ctx.Done() == nil {
		run()
		return true, <-done
	}
	go run()
	select {
	case err := <-done:
		return true, err
	case <-ctx.Done():
		return true, unreachable(ctx)
	}
}

// unreachable returns the error of a call whose context has ended.
func unreachable(ctx context.Context) error {
	return fmt.Errorf("%w: %w", ErrUnreachable, context.Cause(ctx))
}

// get returns the value of the key.
//
// Preconditions: the caller has the turn.
func (h *Directory) get(key string) (Value, error) {
	if err := checkKey(key); err != nil {
		return Value{}, err
	}
	f := h.file(key)
	if f.lock == nil {
		if err := f.open(f.path); err != nil {
			return Value{}, err
		}
	}
	before, was := f.unsure, f.revision
	data, err := f.load(func(b []byte) error { return h.check(key, b) })
	if err == nil && data == nil && before { // the removal may not be durable
		err = f.settle()
	}
	switch {
	case err != nil:
		return Value{}, err
	case data == nil:
		f.revision = 0
	case was == 0 || before:
		h.last++
		f.revision = h.last
	}
	f.unsure = false // load has synced what it found
	return Value{key, data, f.revision}, nil
}

// Get implements Home.
func (h *Directory) Get(ctx context.Context, key string) (Value, error) {
	var v Value
	_, err := h.do(ctx, func() (err error) {
		v, err = h.get(key)
		return err
	})
	if err != nil {
		return Value{}, err
	}
	return v, nil
}

// Put implements Home.
func (h *Directory) Put(ctx context.Context, key string, data []byte, base Revision) (Revision, error) {
	var next Revision
	began, err := h.do(ctx, func() (err error) {
		next, err = h.put(key, data, base)
		return err
	})
	switch {
	case err == nil:
		return next, nil
	case began && errors.Is(err, ErrUnreachable):
		err = unsureError{err}
	}
	return 0, err
}

// put stores a value.
//
// Preconditions: the caller has the turn.
func (h *Directory) put(key string, data []byte, base Revision) (Revision, error) {
	f := h.file(key)
	if f.lock == nil {
		if _, err := h.get(key); err != nil {
			return 0, err
		}
	}
	if base != f.revision {
		return 0, fmt.Errorf("%w: %s has revision %d, not %d", ErrConflict, key, f.revision, base)
	}
	var next Revision
	var err error
	if data == nil {
		err = f.remove()
	} else {
		next = h.last + 1
		err = f.replace(data)
	}
	switch {
	case err != nil && f.unsure:
		return 0, unsureError{err}
	case err != nil:
		return 0, err
	}
	h.last, f.revision = max(h.last, next), next
	h.tell(Value{key, data, next})
	return next, nil
}

// List implements Home.
func (h *Directory) List(ctx context.Context, prefix string) ([]Value, error) {
	var list []Value
	_, err := h.do(ctx, func() error {
		entries, err := os.ReadDir(h.dir)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		keys := map[string]bool{}
		for _, e := range entries {
			key := strings.TrimSuffix(e.Name(), ".spare") // which may be all that is left
			if strings.HasPrefix(key, prefix) && checkKey(key) == nil {
				keys[key] = true
			}
		}
		for _, key := range slices.Sorted(maps.Keys(keys)) {
			v, err := h.get(key)
			if err != nil {
				return fmt.Errorf("%s: %w", key, err)
			}
			if v.Data != nil {
				list = append(list, v)
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return list, nil
}

// Close implements Home.
func (h *Directory) Close() error {
	h.turn <- struct{}{}
	defer func() { <-h.turn }()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil
	}
	h.closed = true
	for w := range h.watchers {
		w.end()
	}
	h.watchers = nil
	var errs []error
	for _, f := range h.files {
		errs = append(errs, f.unlock())
	}
	return errors.Join(errs...)
}

// A watcher hands values to one reader.
type watcher struct {
	prefix string
	ready  chan struct{} // has room for one: something is queued
	ended  chan struct{}

	queue []Value // guarded by Directory.mu; one of each key
}

// end ends w. It is called once, with Directory.mu held.
func (w *watcher) end() { close(w.ended) }

// tell hands v to the watchers.
func (h *Directory) tell(v Value) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.watchers {
		if !strings.HasPrefix(v.Key, w.prefix) {
			continue
		}
		w.queue = append(slices.DeleteFunc(w.queue, func(o Value) bool { return o.Key == v.Key }), v)
		select {
		case w.ready <- struct{}{}:
		default:
		}
	}
}

// Watch implements Home. All changes are those of this Directory, because it has the locks.
func (h *Directory) Watch(ctx context.Context, prefix string) (<-chan Value, error) {
	w := &watcher{prefix: prefix, ready: make(chan struct{}, 1), ended: make(chan struct{})}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, fs.ErrClosed
	}
	h.watchers[w] = true
	values := make(chan Value)
	go h.feed(ctx, w, values)
	return values, nil
}

// feed sends the values of w until ctx, w or the reader ends.
func (h *Directory) feed(ctx context.Context, w *watcher, values chan<- Value) {
	defer close(values)
	defer func() {
		h.mu.Lock()
		delete(h.watchers, w)
		h.mu.Unlock()
	}()
	for {
		select {
		case <-w.ready:
		case <-w.ended:
			return
		case <-ctx.Done():
			return
		}
		for {
			h.mu.Lock()
			if len(w.queue) == 0 {
				h.mu.Unlock()
				break
			}
			v := w.queue[0]
			w.queue = w.queue[1:]
			h.mu.Unlock()
			select {
			case values <- v:
			case <-w.ended:
				return
			case <-ctx.Done():
				return
			}
		}
	}
}
