package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"sync"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/checked"
	pi "github.com/iser-target/iser-target/backend/protection"
	"github.com/iser-target/iser-target/cmd/iser-target/handover"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
)

// checksumsFile, in the state directory, lists the files and devices that have checksums, with their side files.
// So a side file that is missing is noticed, and one whose LUN was served without checksums is not used again.
const checksumsFile = "checksums.json"

// A sideFile is a side file as checksumsFile has it.
type sideFile struct {
	Path       string  `json:"path"`
	ID         string  `json:"id"`
	New        bool    `json:"new,omitempty"`        // it may not be there yet
	Protection pi.Type `json:"protection,omitempty"` // it has protection information of that type instead of checksums
}

// sums is the content of checksumsFile.
type sums struct {
	Version int                 `json:"version"`
	Files   map[string]sideFile `json:"files"` // by the path of the data
}

var (
	checksumsFormat = state.Format[sums]{Name: "checksums", Version: 1}
	noSums          = sums{1, map[string]sideFile{}}
)

// Check implements state.State.
func (s sums) Check() error {
	if s.Files == nil {
		return errors.New("is damaged: the member files is not an object")
	}
	for path, f := range s.Files {
		if f.Path == "" || f.ID == "" {
			return fmt.Errorf("is damaged: the side file of %.300q has no path or no id", path)
		}
		if err := f.Protection.Validate(); err != nil {
			return fmt.Errorf("is damaged: the side file of %.300q: %w", path, err)
		}
	}
	return nil
}

// checksums has what is in checksumsFile.
type checksums struct {
	doc    *state.Document[sums] // nil without a state directory; set once
	broken error                 // why it is nil although there is one; set once

	mu    sync.Mutex
	files map[string]sideFile
}

// open opens the file.
func (c *checksums) open(dir string) error {
	doc, err := state.Open(checksumsFormat, filepath.Join(dir, checksumsFile), noSums)
	if err != nil {
		return err
	}
	c.doc, c.files = doc, maps.Clone(doc.State().Files) // nothing else uses c yet
	return nil
}

// close closes the file, if there is one.
func (c *checksums) close() error {
	if c.doc == nil {
		return nil
	}
	return c.doc.Close()
}

// of returns the side file of the data at path, or the zero value.
func (c *checksums) of(path string) sideFile {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.files[path]
}

// set stores the side file of the data at path; the zero value forgets it.
func (c *checksums) set(path string, f sideFile) error {
	c.mu.Lock()
	was := c.files[path]
	if c.files == nil {
		c.files = map[string]sideFile{}
	}
	if delete(c.files, path); f != (sideFile{}) {
		c.files[path] = f
	}
	c.mu.Unlock()
	if was == f || c.doc == nil {
		return nil
	}
	return c.doc.Update(func() (sums, bool) {
		c.mu.Lock()
		defer c.mu.Unlock()
		return sums{1, maps.Clone(c.files)}, len(c.files) == 0
	})
}

// withChecksums returns a store with checksums or protection information on store if l has them. Otherwise it removes a side file that the LUN had:
// it would soon differ from the data. fresh: the file is new, and a side file of before does not count. If it
// fails, the store stays open.
func (d *Daemon) withChecksums(store backend.Store, target string, l *config.LUN, fresh bool) (backend.Store, error) {
	all, kind := &d.state.checksums, pi.Type(l.Protection)
	has := l.Checksums || kind != pi.None
	switch {
	case l.Backend == "memory" && has:
		return d.protectMemory(store.(*backend.Memory), target, l)
	case l.Backend != "file" && l.Backend != "block" || !has && l.ReadOnly:
		return store, nil
	}
	known := all.of(l.Path)
	if other := known.ID != "" && known.Protection != kind; fresh || !has || other {
		if other && has && l.ReadOnly {
			return nil, fmt.Errorf("it has a side file of another kind, %s, and a read-only LUN gets no new one. Make the LUN writable first", known.Path)
		}
		if err := d.dropSums(l.Path); err != nil {
			return nil, err
		}
		known = sideFile{}
	}
	if !has {
		return store, nil
	}
	if all.broken != nil {
		return nil, fmt.Errorf("its side file is not known: %w. iser-target state repair --discard %s, while the target is stopped, makes checksums of the data as it is", all.broken, checksumsFile)
	}
	path := l.SumsPath()
	if known.ID == "" { // stored first: a side file that is there without it is not that of this data
		known = sideFile{path, checked.NewID(), true, kind}
		if err := all.set(l.Path, known); err != nil {
			return nil, err
		}
	}
	log := d.log.With(eventKey, "medium", "target", target, "lun", l.ID)
	s, err := checked.Open(store, checked.Config{
		Path: path, ID: known.ID, Create: known.New, Protection: kind, AwaitAppTags: kind != pi.None, Blank: fresh,
		Corrupt: corruptLog(log, store, kind), Rested: d.receiveChecksums(target, l.ID),
	})
	if err != nil {
		return nil, err
	}
	if err := all.set(l.Path, sideFile{path, known.ID, false, kind}); err != nil {
		return nil, errors.Join(err, s.Abandon())
	}
	if n := s.Counts().Stale; n > 0 {
		what := "checksums are computed from the data"
		if kind != pi.None {
			what = "protection information is computed from the data"
		}
		log.Info(what, "octets", n)
	}
	return s, nil
}

// corruptLog returns checked.Config.Corrupt for a store.
func corruptLog(log *slog.Logger, store backend.Store, kind pi.Type) func(int64, uint64) {
	what := "data is corrupt: it differs from its checksum"
	if kind != pi.None {
		what = "data is corrupt: it differs from its protection information"
	}
	return func(off int64, more uint64) {
		log.Error(what, "lba", off/int64(store.Info().BlockSize), "not_logged", more)
	}
}

// protectMemory returns a store with protection information in memory. In an upgrade, the information is that of the other process.
func (d *Daemon) protectMemory(store *backend.Memory, target string, l *config.LUN) (backend.Store, error) {
	kind := pi.Type(l.Protection)
	side, err := checked.NewSide(store.Info(), kind)
	if err != nil {
		return nil, err
	}
	if d.received != nil {
		if f := d.received.Take(handover.KindMemory, handover.SideName(target, l.ID)); f != nil {
			err := side.Take(f)
			f.Close()
			if err != nil {
				return nil, errors.Join(err, side.Close())
			}
		}
	}
	log := d.log.With(eventKey, "medium", "target", target, "lun", l.ID)
	s, err := checked.OpenMemory(store, side, checked.Config{
		Protection: kind, AwaitAppTags: kind != pi.None, Corrupt: corruptLog(log, store, kind), Rested: d.receiveChecksums(target, l.ID),
	})
	if err != nil {
		return nil, errors.Join(err, side.Close())
	}
	return s, nil
}

// dropSums removes the side file that the data at path had, and forgets it. It leaves a file alone that is another one.
func (d *Daemon) dropSums(path string) error {
	known := d.state.checksums.of(path)
	if known.ID == "" {
		return nil
	}
	if checked.IDOf(known.Path) == known.ID {
		err := os.Remove(known.Path)
		if err == nil {
			err = syncDir(filepath.Dir(known.Path))
		}
		if err != nil {
			return fmt.Errorf("remove old checksums: %w", err)
		}
		d.log.Info("checksums of before were removed", eventKey, "lun", "path", known.Path)
	}
	return d.state.checksums.set(path, sideFile{})
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// checksumState returns the state of the checksums of l, or nil.
func checksumState(l *servedLUN) *schema.ChecksumState {
	if !l.Checksums && l.Protection == 0 {
		return nil
	}
	s := &schema.ChecksumState{Path: l.SumsPath()}
	if c, ok := l.unit.Checksums(); ok {
		s.Verified, s.Mismatches, s.Bad, s.Pending = c.Verified, c.Mismatches, c.Bad, c.Stale
	}
	if last, err := l.unit.Scrub(); err == nil {
		s.Scrub = scrubState(&last)
	}
	return s
}

func scrubState(s *lun.Scrub) *schema.Scrub {
	st := &schema.Scrub{State: s.Status.String(), Done: s.Done, Total: s.Total, Bad: s.Bad, Rate: s.Rate, Begun: s.Begun}
	if s.Bad > 0 {
		st.First = &s.First
	}
	if !s.Ended.IsZero() {
		st.Ended = &s.Ended
	}
	return st
}

// Scrub returns the last scrub of a LUN.
func (d *Daemon) Scrub(target string, id int) (*schema.Scrub, error) {
	l, err := d.lun(target, id)
	if err != nil {
		return nil, err
	}
	last, err := l.unit.Scrub()
	if err != nil {
		return nil, scrubError(target, id, err)
	}
	return scrubState(&last), nil
}

// scrubError returns the answer to a request that cannot be met.
func scrubError(target string, id int, err error) error {
	e := &schema.Error{Code: schema.Refused, Message: fmt.Sprintf("LUN %d of %s: %v", id, target, err)}
	switch {
	case errors.Is(err, lun.ErrNoChecksums):
		e.Hint = "iser-target lun set TARGET LUN checksums=true gives it some (docs/checksums.md)"
	case errors.Is(err, lun.ErrNoScrub):
		e.Code, e.Hint = schema.NotFound, "iser-target lun scrub TARGET LUN begins one"
	case errors.Is(err, lun.ErrNotScrubbing):
		e.Hint = "iser-target lun scrub TARGET LUN --status shows how the last one ended"
	case errors.Is(err, lun.ErrScrubEnding):
		e.Hint = "try again when the backend answers: iser-target lun list shows whether it hangs"
	case errors.Is(err, lun.ErrScrubbing):
		e.Hint = "iser-target lun scrub TARGET LUN --status shows how far it is, --cancel ends it"
	default:
		return fmt.Errorf("LUN %d of %s: %w", id, target, err)
	}
	return e
}

// BeginScrub begins a scrub of a LUN, of at most rate bytes per second; 0: no limit.
func (d *Daemon) BeginScrub(ctx context.Context, target string, id int, rate int64) (*schema.Scrub, error) {
	l, err := d.lun(target, id)
	if err != nil {
		return nil, err
	}
	if err := l.unit.BeginScrub(rate); err != nil {
		return nil, scrubError(target, id, err)
	}
	d.log.InfoContext(ctx, "scrub begins", eventKey, "medium", "target", target, "lun", id, "rate", rate)
	return d.Scrub(target, id)
}

// CancelScrub ends the scrub of a LUN.
func (d *Daemon) CancelScrub(ctx context.Context, target string, id int) (*schema.Scrub, error) {
	l, err := d.lun(target, id)
	if err != nil {
		return nil, err
	}
	if err := l.unit.CancelScrub(); err != nil {
		return nil, scrubError(target, id, err)
	}
	d.log.InfoContext(ctx, "scrub was canceled", eventKey, "medium", "target", target, "lun", id)
	return d.Scrub(target, id)
}
