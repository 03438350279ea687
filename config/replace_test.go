package config

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// withoutExchange simulates a file system that cannot exchange names.
func withoutExchange(t *testing.T) {
	was := exchange
	exchange = func(a, b string, _ uint) error {
		return &os.LinkError{Op: "rename", Old: a, New: b, Err: unix.EINVAL}
	}
	t.Cleanup(func() { exchange = was })
}

// history returns the texts in the history of a file, oldest first.
func history(t *testing.T, path string) (texts []string) {
	t.Helper()
	numbers, err := versions(path + ".history")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for _, n := range numbers {
		b, err := os.ReadFile(versionPath(path+".history", n))
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, string(b))
	}
	return texts
}

// A text that an editor writes between the comparison and the replacement is not lost: either
// it stays and the save fails, or the history has it.
func TestEditedInBetween(t *testing.T) {
	size := func(s string) string { return strings.Replace(good, "1GiB", s, 1) }
	editor := map[string]func(path, text string) error{
		"written in place": func(path, text string) error { return os.WriteFile(path, []byte(text), 0o600) },
		"renamed": func(path, text string) error {
			if err := os.WriteFile(path+"~", []byte(text), 0o600); err != nil {
				return err
			}
			return os.Rename(path+"~", path)
		},
		"removed": func(path, _ string) error { return os.Remove(path) },
	}
	for _, tt := range []struct {
		name   string
		save   func(d *openFile, path string) error
		refuse bool // what is not expected
	}{
		{"SaveOver", func(d *openFile, path string) error { return d.SaveOver(path, []byte(good)) }, true},
		{"SaveAs", func(d *openFile, path string) error { return d.SaveAs(path) }, false},
	} {
		for what, edit := range editor {
			for _, exchanges := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s, %s, exchange %v", tt.name, what, exchanges), func(t *testing.T) {
					if !exchanges {
						withoutExchange(t)
					}
					path, d := saved(t, 0o600)
					setSize(t, d, "2GiB")
					once := false
					beforeReplace = func(path string) {
						if once {
							return
						}
						once = true
						if err := edit(path, size("7GiB")); err != nil {
							t.Fatal(err)
						}
					}
					defer func() { beforeReplace = func(string) {} }()
					err := tt.save(d, path)
					want, kept := size("2GiB"), []string{good}
					switch {
					case what == "removed":
					case tt.refuse:
						want = size("7GiB")
						if !errors.Is(err, ErrChanged) || !strings.HasPrefix(err.Error(), path+": changed by another process") {
							t.Errorf("error %v", err)
						}
						err = nil
					default:
						kept = append(kept, size("7GiB"))
					}
					if err != nil {
						t.Error(err)
					}
					wantFile(t, path, want, "c.yaml.history")
					if got := history(t, path); !slices.Equal(got, kept) {
						t.Errorf("history %q, want %q", got, kept)
					}
				})
			}
		}
	}
}

// A file that is created meanwhile is not overwritten, unless the caller overwrites any file.
func TestCreatedInBetween(t *testing.T) {
	for _, exchanges := range []bool{true, false} {
		t.Run(fmt.Sprintf("exchange %v", exchanges), func(t *testing.T) {
			if !exchanges {
				withoutExchange(t)
			}
			defer func() { beforeReplace = func(string) {} }()
			for name, save := range map[string]func(d *Document, path string) error{
				"SaveOver": func(d *Document, path string) error { return d.SaveOver(path, []byte("what there was")) },
				"SaveAs":   func(d *Document, path string) error { return d.SaveAs(path) },
			} {
				path := filepath.Join(t.TempDir(), "c.yaml")
				d, err := NewDocument("test", []byte(good))
				if err != nil {
					t.Fatal(err)
				}
				beforeReplace = func(path string) {
					beforeReplace = func(string) {}
					if err := os.WriteFile(path, []byte("other"), 0o600); err != nil {
						t.Fatal(err)
					}
				}
				err = save(d, path)
				if name == "SaveOver" {
					if !errors.Is(err, ErrChanged) {
						t.Errorf("%s: %v", name, err)
					}
					wantFile(t, path, "other")
					continue
				}
				if err != nil {
					t.Errorf("%s: %v", name, err)
				}
				wantFile(t, path, good, "c.yaml.history")
				if got := history(t, path); !slices.Equal(got, []string{"other"}) {
					t.Errorf("history %q", got)
				}
			}
		})
	}
}

// An editor that has the file open when it is replaced writes into the history.
func TestWrittenLate(t *testing.T) {
	for _, exchanges := range []bool{true, false} {
		t.Run(fmt.Sprintf("exchange %v", exchanges), func(t *testing.T) {
			if !exchanges {
				withoutExchange(t)
			}
			path, d := saved(t, 0o600)
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			setSize(t, d, "2GiB")
			if err := d.Save(); err != nil {
				t.Fatal(err)
			}
			if _, err := f.WriteAt([]byte("# late"), 0); err != nil {
				t.Fatal(err)
			}
			if got := history(t, path); len(got) != 1 || got[0] != "# late"+good[6:] {
				t.Errorf("history %q", got)
			}
		})
	}
}

// The displaced file is synced before it replaces its copy in the history, because its editor
// may not have synced it. If the sync fails the copy stays.
func TestDisplacedIsSynced(t *testing.T) {
	defer func(was func(string) error) { syncData = was }(syncData)
	for _, exchanges := range []bool{true, false} {
		for _, fails := range []error{nil, unix.EIO} {
			t.Run(fmt.Sprintf("exchange %v, %v", exchanges, fails), func(t *testing.T) {
				if !exchanges {
					withoutExchange(t)
				}
				path, d := saved(t, 0o600)
				was, err := os.Stat(path)
				if err != nil {
					t.Fatal(err)
				}
				synced := 0
				syncData = func(displaced string) error {
					synced++
					fi, err := os.Stat(displaced)
					if err != nil || !os.SameFile(fi, was) {
						t.Errorf("another file is synced: %v", err)
					}
					return fails
				}
				setSize(t, d, "2GiB")
				if err := d.Save(); (err != nil) != (fails != nil) {
					t.Errorf("%v, want %v", err, fails)
				}
				kept, err := os.Stat(versionPath(path+".history", 1))
				if err != nil || synced != 1 || os.SameFile(kept, was) != (fails == nil) {
					t.Errorf("synced %d times; kept %v, error %v", synced, kept, err)
				}
				if got := history(t, path); !slices.Equal(got, []string{good}) {
					t.Errorf("history %q", got)
				}
			})
		}
	}
}

// The directory is synced once the path leads to the new text, however the file gets its name.
func TestReplacedFileIsDurable(t *testing.T) {
	defer func(was func(string) error) { syncDirectory = was }(syncDirectory)
	for _, exchanges := range []bool{true, false} {
		for _, exists := range []bool{true, false} {
			for _, fails := range []error{nil, unix.EIO} {
				t.Run(fmt.Sprintf("exchange %v, file exists %v, %v", exchanges, exists, fails), func(t *testing.T) {
					if !exchanges {
						withoutExchange(t)
					}
					path, d := saved(t, 0o600)
					if !exists {
						if err := os.Remove(path); err != nil {
							t.Fatal(err)
						}
					}
					setSize(t, d, "2GiB")
					text := string(d.Bytes())
					synced := false
					syncDirectory = func(dir string) error {
						b, err := os.ReadFile(path)
						if dir != filepath.Dir(path) || err != nil || string(b) != text {
							return nil
						}
						synced = true
						return fails
					}
					err := d.SaveAs(path)
					if !synced {
						t.Error("the new name of the file was not synced")
					}
					if !errors.Is(err, fails) || err != nil && !strings.Contains(err.Error(), "a loss of power may undo it") {
						t.Errorf("error %v, want %v", err, fails)
					}
				})
			}
		}
	}
}

// The history gets a file that a killed process has displaced.
func TestDisplaced(t *testing.T) {
	path, d := saved(t, 0o600)
	if err := os.WriteFile(sibling(path, ".old"), []byte("displaced"), 0o600); err != nil {
		t.Fatal(err)
	}
	setSize(t, d, "2GiB")
	if err := d.Save(); err != nil {
		t.Fatal(err)
	}
	wantFile(t, path, strings.Replace(good, "1GiB", "2GiB", 1), "c.yaml.history")
	if got := history(t, path); !slices.Equal(got, []string{"displaced", good}) {
		t.Errorf("history %q", got)
	}
}

// An editor that saves all the time loses no text to saves of documents: each text is in the
// file, in the history, or displaced by the editor itself.
func TestTwoEditors(t *testing.T) {
	path, _ := saved(t, 0o600)
	var stop atomic.Bool
	var attempts atomic.Int32
	var wg sync.WaitGroup
	const rounds = 8 // with what is saved no more than the history has room for
	texts := map[string]bool{}
	wg.Go(func() {
		defer stop.Store(true)
		for i := range rounds {
			for int(attempts.Load()) < i { // not all before the first save
				runtime.Gosched()
			}
			// An editor saves over what it has seen; here, the newest there is.
			text := fmt.Sprintf("%s# edit %d\n", good, i)
			if err := os.WriteFile(path+"~", []byte(text), 0o600); err != nil {
				t.Error(err)
				return
			}
			displaced := path + fmt.Sprintf(".was%d", i)
			if err := unix.Renameat2(unix.AT_FDCWD, path+"~", unix.AT_FDCWD, path, unix.RENAME_EXCHANGE); err != nil {
				t.Error(err)
				return
			}
			if err := os.Rename(path+"~", displaced); err != nil { // what the editor itself has displaced
				t.Error(err)
				return
			}
			texts[text] = true
		}
	})
	saves, refused := 0, 0
	for ; !stop.Load() || saves == 0; attempts.Add(1) {
		d := openDocument(t, path)
		setSize(t, d, fmt.Sprintf("%dMiB", saves+2))
		switch err := d.Save(); {
		case err == nil:
			saves++
		case errors.Is(err, ErrChanged):
			refused++
		default:
			t.Fatal(err)
		}
	}
	wg.Wait()
	t.Logf("%d saves, %d refused", saves, refused)
	found := history(t, path)
	for i := range rounds {
		b, err := os.ReadFile(path + fmt.Sprintf(".was%d", i))
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, string(b))
	}
	now, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	found = append(found, string(now))
	for text := range texts {
		if !slices.ContainsFunc(found, func(s string) bool { return bytes.Equal([]byte(s), []byte(text)) }) {
			t.Errorf("lost: %s", text[len(text)-12:])
		}
	}
}
