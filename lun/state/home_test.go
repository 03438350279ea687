package state

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// newHome returns an empty home whose key "a" has the value "one", with its revision.
func newHome(t *testing.T) (*Directory, Revision) {
	t.Helper()
	h := OpenDirectory(t.TempDir(), func(_ string, b []byte) error {
		if bytes.Contains(b, []byte("damaged")) {
			return errors.New("is damaged")
		}
		return nil
	})
	t.Cleanup(func() { h.Close() })
	r, err := h.Put(t.Context(), "a", []byte("one"), 0)
	if err != nil {
		t.Fatal(err)
	}
	return h, r
}

// A value is a file with its content, and a spare copy.
func TestDirectoryFiles(t *testing.T) {
	h, r := newHome(t)
	path := filepath.Join(h.dir, "a")
	for _, p := range []string{path, path + ".spare"} {
		if content(t, p) != "one" {
			t.Errorf("%s is %q", p, content(t, p))
		}
		if st, err := os.Stat(p); err != nil || st.Mode() != 0o600 {
			t.Errorf("%s has mode %v, %v", p, st.Mode(), err)
		}
	}
	if _, err := OpenDirectory(h.dir, nil).Get(t.Context(), "a"); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("another home reads the key: %v", err)
	}
	if err := os.WriteFile(path, []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	v, err := h.Get(t.Context(), "a")
	if err != nil || string(v.Data) != "one" || v.Revision != r || content(t, path) != "one" || content(t, path+".damaged") != "damaged" {
		t.Errorf("a damaged file gives %q, revision %d, %v", v.Data, v.Revision, err)
	}
	if _, err := h.Put(t.Context(), "a", nil, r); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{path, path + ".spare"} {
		if _, err := os.Stat(p); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is there after a removal: %v", p, err)
		}
	}
	for _, key := range []string{"", ".", "..", "a/b", "a\x00", "a.spare", "a.lock", "a.tmp", "a.damaged"} {
		if _, err := h.Put(t.Context(), key, []byte("x"), 0); err == nil || !strings.Contains(err.Error(), "name of a file") {
			t.Errorf("Put %q = %v", key, err)
		}
	}
}

// After a replacement that failed when it was done the same base counts, and Get gives what is there a new revision.
func TestDirectoryUnsure(t *testing.T) {
	h, r := newHome(t)
	fail := func(name string) {
		h.file("a").fsync = func(f *os.File) error {
			if filepath.Base(f.Name()) == name {
				return errors.New("injected")
			}
			return f.Sync()
		}
	}
	fail("a.tmp")
	if _, err := h.Put(t.Context(), "a", []byte("two"), r); err == nil || errors.Is(err, ErrUnsure) || errors.Is(err, ErrUnreachable) {
		t.Errorf("before the rename the error is %v", err)
	}
	if v, err := h.Get(t.Context(), "a"); err != nil || string(v.Data) != "one" || v.Revision != r {
		t.Errorf("then Get = %q, revision %d, %v", v.Data, v.Revision, err)
	}
	fail(filepath.Base(h.dir))
	if _, err := h.Put(t.Context(), "a", []byte("two"), r); !errors.Is(err, ErrUnsure) || err.Error() != "injected" {
		t.Errorf("after the rename the error is %v, want ErrUnsure", err)
	}
	h.file("a").fsync = (*os.File).Sync
	r2, err := h.Put(t.Context(), "a", []byte("three"), r)
	if err != nil || r2 == r {
		t.Fatalf("with the same base: %d, %v", r2, err)
	}
	fail(filepath.Base(h.dir))
	if _, err := h.Put(t.Context(), "a", []byte("four"), r2); !errors.Is(err, ErrUnsure) {
		t.Errorf("after the rename the error is %v, want ErrUnsure", err)
	}
	if _, err := h.Get(t.Context(), "a"); err == nil {
		t.Error("Get returns what is not synced")
	}
	h.file("a").fsync = (*os.File).Sync
	v, err := h.Get(t.Context(), "a")
	if err != nil || string(v.Data) != "four" || v.Revision == r2 {
		t.Errorf("Get = %q, revision %d, %v; want the new value with a new revision", v.Data, v.Revision, err)
	}
	if _, err := h.Put(t.Context(), "a", []byte("five"), r2); !errors.Is(err, ErrConflict) {
		t.Errorf("with the old base: %v", err)
	}
}

// A file system that hangs costs its callers their time, and no more. What it does later is known by Get.
func TestDirectoryHangs(t *testing.T) {
	h, r := newHome(t)
	hang := make(chan struct{})
	h.file("a").fsync = func(f *os.File) error {
		<-hang
		return f.Sync()
	}
	const limit = 100 * time.Millisecond
	within := func(f func(context.Context) error) error {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		began := time.Now()
		err := f(ctx)
		if took := time.Since(began); took > 5*time.Second || !errors.Is(err, ErrUnreachable) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a call ended after %v with %v", took, err)
		}
		return err
	}
	put := func(key string, base Revision) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := h.Put(ctx, key, []byte("two"), base)
			return err
		}
	}
	if err := within(put("a", r)); !errors.Is(err, ErrUnsure) {
		t.Errorf("a Put that began: %v, want ErrUnsure", err)
	}
	if err := within(put("b", 0)); errors.Is(err, ErrUnsure) {
		t.Errorf("a Put that did not begin: %v", err)
	}
	within(func(ctx context.Context) error { _, err := h.Get(ctx, "a"); return err })
	within(func(ctx context.Context) error { _, err := h.List(ctx, ""); return err })
	neighbor := OpenDirectory(t.TempDir(), nil)
	defer neighbor.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := neighbor.Put(ctx, "a", []byte("mine"), 0); err != nil {
		t.Errorf("another home: %v", err)
	}
	close(hang)
	if v, err := h.Get(ctx, "a"); err != nil || string(v.Data) != "two" || v.Revision == r {
		t.Errorf("Get = %q, revision %d, %v", v.Data, v.Revision, err)
	}
	if v, err := h.Get(ctx, "b"); err != nil || v.Data != nil {
		t.Errorf("the Put that did not begin is there: %q, %v", v.Data, err)
	}
}

// Of what is stored while a reader does not read, the last value of each key is kept for it.
func TestDirectorySlowReader(t *testing.T) {
	h, r := newHome(t)
	values, err := h.Watch(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	for range 40 {
		if r, err = h.Put(t.Context(), "a", []byte("two"), r); err != nil {
			t.Fatal(err)
		}
	}
	kept := 1
	for v := range values {
		if v.Revision == r {
			break
		}
		kept++
	}
	if kept > 2 { // the first may have been on its way
		t.Errorf("the home kept %d of 40 values", kept)
	}
}
