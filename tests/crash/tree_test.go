package crash

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// A tree is what a directory and all below it have at one time.
type tree struct {
	dirs  map[string]names // by path, "." is the top
	files map[int]*fileContent
}

// names are the entries of a directory: numbers of files. A directory has number 0.
type names map[string]int

// A fileContent is what a file has.
type fileContent struct {
	data []byte
	mode fs.FileMode
	// mark is the attribute by which the target finds a file that was copied, and own says that it names
	// the inode of the file itself.
	mark []byte
	own  bool
}

// A step is what one system call did.
type step struct {
	now  *tree // after it
	what string
	// dir or file has been made durable as of this step, with content. file 0: none.
	dir     string
	file    int
	content *fileContent
}

// A forest observes a directory. It numbers files, because inodes have the numbers of those that were
// removed.
type forest struct {
	dir     string
	now     *tree
	numbers map[uint64]int // of the inodes that have names
	unnamed map[uint64]int // of those that were synced before they had one
	last    int
}

func newForest(dir string) forest {
	return forest{dir: dir, numbers: map[uint64]int{}, unnamed: map[uint64]int{}}
}

const markName = "user.iser-target"

// look returns what the directory has.
func (f *forest) look() (*tree, error) {
	t := &tree{dirs: map[string]names{}, files: map[int]*fileContent{}}
	there := map[uint64]int{}
	err := filepath.WalkDir(f.dir, func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it was removed meanwhile
		}
		if err != nil {
			return err
		}
		local, err := filepath.Rel(f.dir, path)
		if err != nil {
			return err
		}
		if e.IsDir() {
			t.dirs[local] = names{}
			if local != "." {
				t.dirs[filepath.Dir(local)][e.Name()] = 0
			}
			return nil
		}
		if !e.Type().IsRegular() {
			return nil // a socket
		}
		ino, c, err := f.read(path)
		if errors.Is(err, fs.ErrNotExist) || err == nil && c == nil {
			return nil
		}
		if err != nil {
			return err
		}
		there[ino] = f.number(ino)
		delete(f.unnamed, ino)
		t.dirs[filepath.Dir(local)][e.Name()] = there[ino]
		t.files[there[ino]] = c
		return nil
	})
	f.numbers = there
	return t, err
}

// number returns the number of an inode, which is a new file if it was not there before.
func (f *forest) number(ino uint64) int {
	if n, ok := f.numbers[ino]; ok {
		return n
	}
	if n, ok := f.unnamed[ino]; ok {
		return n
	}
	f.last++
	return f.last
}

// read returns the inode of a file and its content.
func (f *forest) read(path string) (uint64, *fileContent, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, nil, err
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, nil, err
	}
	c := &fileContent{data: data, mode: fs.FileMode(st.Mode & 0o777)}
	mark := make([]byte, 256)
	if n, err := unix.Getxattr(path, markName, mark); err == nil {
		own := fmt.Sprintf(" %d", st.Ino)
		c.mark, c.own = bytes.TrimSuffix(mark[:n], []byte(own)), bytes.HasSuffix(mark[:n], []byte(own))
	}
	if f.now != nil && f.now.files[f.numbers[st.Ino]].equal(c) {
		c = f.now.files[f.numbers[st.Ino]] // takes no further memory
	}
	return st.Ino, c, nil
}

func (c *fileContent) equal(o *fileContent) bool {
	return c == o || c != nil && o != nil && bytes.Equal(c.data, o.data) && c.mode == o.mode && bytes.Equal(c.mark, o.mark) && c.own == o.own
}

// changed notes a step if the directory has changed.
func (f *forest) changed(steps *[]step) error {
	t, err := f.look()
	if err != nil || f.now != nil && t.equal(f.now) {
		return err
	}
	what := "change"
	if f.now != nil {
		what = f.now.difference(t)
	}
	f.now = t
	*steps = append(*steps, step{now: t, what: what})
	return nil
}

// synced notes that the file or directory that link leads to is durable.
func (f *forest) synced(link string, steps *[]step) error {
	if err := f.changed(steps); err != nil { // by something else
		return err
	}
	path, err := os.Readlink(link)
	if err != nil {
		return err
	}
	st, err := os.Stat(link)
	if err != nil {
		return err
	}
	local, err := filepath.Rel(f.dir, strings.TrimSuffix(path, " (deleted)"))
	if err != nil {
		return err
	}
	s := step{now: f.now, what: "sync of " + local}
	if st.IsDir() {
		s.dir = local
	} else {
		ino := st.Sys().(*syscall.Stat_t).Ino
		if s.file = f.number(ino); f.numbers[ino] == 0 {
			f.unnamed[ino] = s.file
		}
		if _, s.content, err = f.read(link); err != nil {
			return err
		}
	}
	*steps = append(*steps, s)
	return nil
}

func (t *tree) equal(o *tree) bool { return t.difference(o) == "" }

// difference returns what o has that t has not, or "".
func (t *tree) difference(o *tree) string {
	for dir, n := range o.dirs {
		for name, number := range n {
			was, ok := t.dirs[dir][name]
			switch {
			case !ok:
				return "new name " + filepath.Join(dir, name)
			case was != number:
				return "another file at " + filepath.Join(dir, name)
			case number != 0 && !t.files[number].equal(o.files[number]):
				return "content of " + filepath.Join(dir, name)
			}
		}
		for name := range t.dirs[dir] {
			if _, ok := n[name]; !ok {
				return "no name " + filepath.Join(dir, name)
			}
		}
	}
	if len(t.dirs) != len(o.dirs) {
		return "a directory"
	}
	return ""
}

// A durable is what is durable of a tree: contents by sync of the file, names by sync of the directory.
type durable struct {
	names map[string]names
	files map[int]*fileContent
}

// durableAfter returns what is durable after steps, when base was. without reports whether the sync of a
// step is left out; nil: none is.
func durableAfter(base *tree, steps []step, without func(i int) bool) durable {
	d := durable{map[string]names{}, map[int]*fileContent{}}
	for dir, n := range base.dirs {
		d.names[dir] = n
	}
	for n, c := range base.files {
		d.files[n] = c
	}
	for i, s := range steps {
		switch {
		case without != nil && without(i):
		case s.dir != "":
			d.names[s.dir] = s.now.dirs[s.dir]
		case s.file != 0:
			d.files[s.file] = s.content
		}
	}
	return d
}

// tree returns the tree after a loss of power. With rng, some of what was not durable is there, too:
// the names of any directory, the content of any file.
func (d *durable) tree(now *tree, rng *rand.Rand) *tree {
	t := &tree{dirs: map[string]names{}, files: map[int]*fileContent{}}
	all := append(slices.Collect(keysOf(d.names)), slices.Collect(keysOf(now.dirs))...)
	slices.Sort(all)
	all = slices.Compact(all)
	for _, dir := range all { // a directory comes before what it has
		if dir != "." && !has(t.dirs[filepath.Dir(dir)], filepath.Base(dir)) {
			continue
		}
		n := d.names[dir]
		if rng != nil && rng.IntN(2) == 0 {
			n = now.dirs[dir]
		}
		t.dirs[dir] = names{}
		for _, name := range slices.Sorted(keysOf(n)) {
			number := n[name]
			t.dirs[dir][name] = number
			if number == 0 {
				continue
			}
			c := d.files[number]
			if now.files[number] != nil && rng != nil && rng.IntN(2) == 0 {
				c = now.files[number]
			}
			if c == nil {
				c = &fileContent{mode: 0o600} // a name, and nothing else
			}
			t.files[number] = c
		}
	}
	return t
}

func has(n names, name string) bool { _, ok := n[name]; return ok }

// keysOf returns the keys of a map.
func keysOf[V any](m map[string]V) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// key returns a text that differs for different trees.
func (t *tree) key() string {
	var b strings.Builder
	for _, dir := range slices.Sorted(keysOf(t.dirs)) {
		for _, name := range slices.Sorted(keysOf(t.dirs[dir])) {
			fmt.Fprintf(&b, "%s/%s ", dir, name)
			if c := t.files[t.dirs[dir][name]]; c != nil {
				fmt.Fprintf(&b, "%q %v %q %v", c.data, c.mode, c.mark, c.own)
			}
			b.WriteByte('\n')
		}
	}
	return b.String()
}

// read returns the content of a file.
func (t *tree) read(path string) string {
	c := t.files[t.dirs[filepath.Dir(path)][filepath.Base(path)]]
	if c == nil {
		return ""
	}
	return string(c.data)
}

// keeps reports whether the configuration, its history, or a file that is on its way there, has a text.
func (t *tree) keeps(text string) bool {
	if t.read("config.yaml") == text || t.read(".config.yaml.old") == text {
		return true
	}
	for name := range t.dirs["config.yaml.history"] {
		if t.read("config.yaml.history/"+name) == text {
			return true
		}
	}
	return false
}

// put makes dir have what t has.
func (t *tree) put(dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	at := map[int]string{} // where a file is already
	for _, local := range slices.Sorted(keysOf(t.dirs)) {
		if err := os.Mkdir(filepath.Join(dir, local), 0o700); err != nil {
			return err
		}
		for name, number := range t.dirs[local] {
			path := filepath.Join(dir, local, name)
			if number == 0 {
				continue
			}
			if first, ok := at[number]; ok {
				if err := os.Link(first, path); err != nil {
					return err
				}
				continue
			}
			at[number] = path
			if err := t.files[number].put(path); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *fileContent) put(path string) error {
	if err := os.WriteFile(path, c.data, c.mode); err != nil {
		return err
	}
	if c.mark == nil {
		return nil
	}
	mark := slices.Clone(c.mark)
	if c.own {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return err
		}
		mark = fmt.Appendf(mark, " %d", st.Ino)
	}
	return unix.Setxattr(path, markName, mark, 0)
}
