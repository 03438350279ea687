package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// shrinkFile, in the state directory, has the files that a change is about to cut off,
// with the sizes that they are to have. It is there from before the configuration says
// so until that is done. So are files that are being extended, with the sizes before. A start finds there that a file which is larger than
// configured is not a mistake, but what the end of the process has left undone.
const shrinkFile = "shrink.json"

// shrinks are sizes in octets by path.
type shrinks map[string]int64

// planned are the files that a plan cuts off.
func planned(p *schema.Plan, cfg *config.Config) shrinks {
	s := shrinks{}
	for _, st := range p.Steps {
		if l := lunOf(targetOf(cfg, st.Change.Target), st.Change.LUN); st.Shrinks && l != nil && l.Backend == "file" {
			s[l.Path] = int64(l.Size)
		}
	}
	return s
}

// readShrinks reads what an earlier process has left.
func readShrinks(dir string) (shrinks, error) {
	path := filepath.Join(dir, shrinkFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var s shrinks
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err != nil {
		return nil, fmt.Errorf("state_dir: %s: %w", path, err)
	}
	return s, nil
}

// keepShrinks makes s what a start finds of the change.
func (d *Daemon) keepShrinks(s shrinks) error {
	d.mu.Lock()
	d.planned = s
	d.mu.Unlock()
	return d.writeShrinks()
}

// writeShrinks has a start find what the change is about to cut off, what an earlier
// process has left, and what may be too large; with none there is no file.
func (d *Daemon) writeShrinks() error {
	dir := d.Effective().StateDir
	if dir == "" {
		return nil
	}
	d.shrinking.Lock()
	defer d.shrinking.Unlock()
	s := shrinks{}
	d.mu.Lock()
	for _, of := range []shrinks{d.shrinks, d.overgrown, d.planned} {
		maps.Copy(s, of)
	}
	d.mu.Unlock()
	path := filepath.Join(dir, shrinkFile)
	if len(s) == 0 {
		err := os.Remove(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		}
		return syncPath(dir)
	}
	b, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".tmp", append(b, '\n'), 0o600); err != nil {
		return err
	}
	if err := errors.Join(syncPath(path+".tmp"), os.Rename(path+".tmp", path)); err != nil {
		return err
	}
	return syncPath(dir)
}

// mayOutgrow has a start find, as long as that is so, that the file may be larger than size,
// although it is to have that: it is being extended, and a store that hangs may do so when
// the change has long failed. It may be anybody's turn.
func (d *Daemon) mayOutgrow(path string, size int64, so bool) error {
	d.mu.Lock()
	_, was := d.overgrown[path]
	if d.overgrown == nil {
		d.overgrown = shrinks{}
	}
	if delete(d.overgrown, path); so {
		d.overgrown[path] = size
	}
	d.mu.Unlock()
	if !was && !so {
		return nil
	}
	return d.writeShrinks()
}

// syncPath has a file, or the names in a directory, on stable storage.
func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// shrinksTo is the size that an earlier process was about to give the file, or 0.
func (d *Daemon) shrinksTo(path string) int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.shrinks[path]
}

// forgetShrinks drops what the start has found and is done, or was never to be. A file
// that is missing waits for its LUN to be ready.
//
// It is the caller's turn.
func (d *Daemon) forgetShrinks() error {
	waits := shrinks{}
	d.mu.Lock()
	none := len(d.shrinks) == 0
	for _, t := range d.targets {
		for _, l := range t.luns {
			if size, ok := d.shrinks[l.Path]; ok && l.fault != nil {
				waits[l.Path] = size
			}
		}
	}
	d.shrinks = waits
	d.mu.Unlock()
	if none {
		return nil
	}
	return d.keepShrinks(nil)
}
