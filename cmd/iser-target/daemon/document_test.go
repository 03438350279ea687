package daemon

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A change does not overwrite an edit of the file that was not applied.
func TestEditedFileIsNotOverwritten(t *testing.T) {
	l := newLab(t)
	l.luns += `, {id: 7, backend: memory, size: 1MiB}`
	l.write()
	_, err := l.Change(t.Context(), func(d *config.Document) error {
		return d.AddLUN(store, config.LUN{ID: 1, Backend: "memory", Size: 1 << 20})
	}, ChangeOptions{})
	if !errors.Is(err, ErrEdited) {
		t.Errorf("error %v", err)
	}
	if b, err := os.ReadFile(l.path); err != nil || string(b) != l.text() {
		t.Errorf("the file says\n%s%v", b, err)
	}
}

// An edit during a change is not overwritten either: before the change is saved, the change
// is refused; afterwards the edit stays even if the change fails.
func TestFileEditedDuringAChangeIsNotOverwritten(t *testing.T) {
	l := newLab(t)
	before := l.snapshot()
	was := l.text()
	edited := was + "# edited\n"
	for _, at := range []string{"save", "paths"} {
		l.before = func(what string) error {
			if what != at {
				return nil
			}
			if err := os.WriteFile(l.path, []byte(edited), 0o600); err != nil {
				t.Fatal(err)
			}
			if at == "save" {
				return nil
			}
			return errInjected
		}
		_, err := l.Change(t.Context(), func(d *config.Document) error {
			return d.AddLUN(store, config.LUN{ID: 1, Backend: "memory", Size: 1 << 20})
		}, ChangeOptions{})
		if want := map[string]error{"save": ErrEdited, "paths": errInjected}[at]; !errors.Is(err, want) || strings.Contains(err.Error(), "Undoing the change failed") {
			t.Errorf("%s: error %v", at, err)
		}
		if b, err := os.ReadFile(l.path); err != nil || string(b) != edited {
			t.Errorf("%s: the file says\n%s%v", at, b, err)
		}
		if err := os.WriteFile(l.path, []byte(was), 0o600); err != nil {
			t.Fatal(err)
		}
		if after := l.snapshot(); after != before {
			t.Errorf("%s: the state is\n%s\nand was\n%s", at, after, before)
		}
	}
	// Apply overwrites the file, and the history has the text before.
	l.before = func(what string) error {
		if what == "save" {
			return os.WriteFile(l.path, []byte(edited), 0o600)
		}
		return nil
	}
	l.luns += `, {id: 1, backend: memory, size: 1MiB}`
	l.ok(ChangeOptions{})
	if b, err := os.ReadFile(l.path); err != nil || string(b) != l.text() {
		t.Errorf("the file says\n%s%v", b, err)
	}
	kept, err := filepath.Glob(l.path + ".history/*")
	if err != nil || len(kept) == 0 {
		t.Fatalf("history %q, %v", kept, err)
	}
	if b, err := os.ReadFile(kept[len(kept)-1]); err != nil || string(b) != edited {
		t.Errorf("the newest in the history is\n%s%v", b, err)
	}
}

// A watched file is applied when it is replaced or written in place.
func TestWatchedFileIsApplied(t *testing.T) {
	l := newLab(t, func(l *lab) { l.more = "watch: true" })
	load(t, l.login("stays", store))
	l.luns += `, {id: 1, backend: memory, size: 1MiB}`
	tmp := filepath.Join(l.dir, "new.yaml")
	if err := os.WriteFile(tmp, []byte(l.text()), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp, l.path); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "LUN 1", func() bool { return len(l.State().Targets[0].LUNs) == 2 })
	l.luns += `, {id: 2, backend: memory, size: 1MiB}`
	l.write()
	testkit.Eventually(t, "LUN 2", func() bool { return len(l.State().Targets[0].LUNs) == 3 })
}

// A reload reads the file after earlier changes have ended, and so does not undo them. It
// never writes the file, whatever happens meanwhile.
func TestReloadWaitsForChangesAndDoesNotWrite(t *testing.T) {
	l := newLab(t)
	check := func(text string, luns int) {
		t.Helper()
		if b, err := os.ReadFile(l.path); err != nil || string(b) != text {
			t.Errorf("the file is, %v\n%s\nwant\n%s", err, b, text)
		}
		if n := len(l.State().Targets[0].LUNs); n != luns {
			t.Errorf("%d LUNs, want %d", n, luns)
		}
	}
	e, err := l.edit(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		l.reload(t.Context(), "SIGHUP")
		close(done)
	}()
	select {
	case <-done:
		t.Error("it did not wait for the other change")
	case <-time.After(100 * time.Millisecond):
	}
	l.luns += `, {id: 1, backend: memory, size: 1MiB}`
	l.write()
	e.release()
	<-done
	check(l.text(), 2)

	l.luns += `, {id: 2, backend: memory, size: 1MiB}`
	l.write()
	newer := l.text() + "# newer\n"
	l.before = func(step string) error {
		if step == "save" {
			return os.WriteFile(l.path, []byte(newer), 0o600)
		}
		return nil
	}
	l.reload(t.Context(), "SIGHUP")
	check(newer, 2)

	failed := false
	l.before = func(step string) error {
		if strings.HasPrefix(step, "add LUN 2") {
			failed = true
			return errors.New("no")
		}
		return nil
	}
	l.reload(t.Context(), "SIGHUP")
	if check(newer, 2); !failed {
		t.Error("the step did not fail")
	}
	l.before = func(string) error { return nil }
	l.reload(t.Context(), "SIGHUP")
	check(newer, 3)

	// ApplyOwn requires that the file still has the text.
	doc := l.doc()
	l.luns += `, {id: 3, backend: memory, size: 1MiB}`
	l.write()
	if _, err := l.ApplyOwn(t.Context(), doc, ChangeOptions{}); !errors.Is(err, ErrEdited) {
		t.Errorf("a text that the file no longer has: error %v", err)
	}
	check(l.text(), 3)
	if _, err := l.ApplyOwn(t.Context(), l.doc(), ChangeOptions{}); err != nil {
		t.Error(err)
	}
	check(l.text(), 4)
}
