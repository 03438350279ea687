package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"sync"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/lun/state"
)

// shrinkFile, in the state directory, lists the files that a change is about to cut off,
// with their new sizes, and the files that a change is extending, with their old sizes. A
// file larger than configured is then no mistake for the next start: the end of the process
// interrupted a change. shrinkFile exists only while it lists something.
const shrinkFile = "shrink.json"

// sizes are sizes in bytes by path.
type sizes map[string]int64

// shrinkState is the content of shrinkFile.
type shrinkState struct {
	Version int   `json:"version"`
	Files   sizes `json:"files"`
}

var (
	shrinkFormat = state.Format[shrinkState]{
		Name: "shrinks", Version: 1,
		Upgrades: map[int]func([]byte) (shrinkState, any, error){0: upgradeShrinks},
	}
	noShrinks = shrinkState{1, sizes{}}
)

// Check implements state.State.
func (s shrinkState) Check() error {
	if s.Files == nil {
		return errors.New("is damaged: the member files is not an object")
	}
	return nil
}

// upgradeShrinks reads the file of programs that wrote no version: only the sizes.
func upgradeShrinks(b []byte) (shrinkState, any, error) {
	s := shrinkState{Version: 1}
	if err := json.Unmarshal(b, &s.Files); err != nil {
		return s, nil, fmt.Errorf("is damaged: %w", err)
	}
	return s, &s.Files, nil
}

// shrinks has what is in shrinkFile, and why.
type shrinks struct {
	doc *state.Document[shrinkState] // nil without a state directory; set once

	mu        sync.Mutex
	left      sizes // that an earlier process left and this one did not come to
	planned   sizes // that the change in progress is about to cut off
	overgrown sizes // that may be larger than they are to be: see mayOutgrow
}

// open opens the file and reads what an earlier process left.
func (s *shrinks) open(dir string) error {
	doc, err := state.Open(shrinkFormat, filepath.Join(dir, shrinkFile), noShrinks)
	if err != nil {
		return err
	}
	s.doc, s.left = doc, doc.State().Files // nothing else uses s yet
	return nil
}

// close closes the file, if there is one.
func (s *shrinks) close() error {
	if s.doc == nil {
		return nil
	}
	return s.doc.Close()
}

// store writes the file, or removes it if it would list nothing. When several callers store at the
// same time, the file has what was listed last.
func (s *shrinks) store() error {
	if s.doc == nil {
		return nil
	}
	return s.doc.Update(func() (shrinkState, bool) {
		all := sizes{}
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, of := range []sizes{s.left, s.overgrown, s.planned} {
			maps.Copy(all, of)
		}
		return shrinkState{1, all}, len(all) == 0
	})
}

// filesToShrink returns the files that a plan cuts off, with their new sizes.
func filesToShrink(p *schema.Plan, cfg *config.Config) sizes {
	s := sizes{}
	for _, st := range p.Steps {
		if l := lunOf(targetOf(cfg, st.Change.Target), st.Change.LUN); st.Shrinks && l != nil && l.Backend == "file" {
			s[l.Path] = int64(l.Size)
		}
	}
	return s
}

// keepShrinks stores s as what the change in progress is about to cut off.
func (e *editor) keepShrinks(s sizes) error {
	all := &e.d.state.shrinks
	all.mu.Lock()
	all.planned = s
	all.mu.Unlock()
	return all.store()
}

// mayOutgrow stores that the file may be larger than size, its configured size, because
// it is being extended. With so false it forgets that. A store that hangs may extend the
// file long after the change failed, so the caller need not be the editor.
func (d *Daemon) mayOutgrow(path string, size int64, so bool) error {
	s := &d.state.shrinks
	s.mu.Lock()
	_, was := s.overgrown[path]
	if s.overgrown == nil {
		s.overgrown = sizes{}
	}
	if delete(s.overgrown, path); so {
		s.overgrown[path] = size
	}
	s.mu.Unlock()
	if !was && !so {
		return nil
	}
	return s.store()
}

// shrinksTo returns the size that an earlier process was about to give the file, or 0.
func (d *Daemon) shrinksTo(path string) int64 {
	s := &d.state.shrinks
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.left[path]
}

// forgetShrinks forgets what an earlier process left and the start has finished, or found
// not necessary. It keeps what a LUN needs whose file is missing.
func (e *editor) forgetShrinks() error {
	waits := sizes{}
	d, s := e.d, &e.d.state.shrinks
	d.mu.Lock()
	s.mu.Lock()
	none := len(s.left) == 0
	for _, t := range d.served.targets {
		for _, l := range t.luns {
			if size, ok := s.left[l.Path]; ok && l.fault != nil {
				waits[l.Path] = size
			}
		}
	}
	s.left = waits
	s.mu.Unlock()
	d.mu.Unlock()
	if none {
		return nil
	}
	return e.keepShrinks(nil)
}
