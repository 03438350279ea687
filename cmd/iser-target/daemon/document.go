package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// An origin says where the document of a change comes from, and so what the file may
// contain when the change is saved.
type origin int

const (
	fromElsewhere origin = iota // the file may contain anything
	fromRunning                 // an edit of the running document: the file contains that
	fromFile                    // the file contains the document; save does not write it
	fromCluster                 // the targets of the cluster change, and the file may contain anything
)

// checkEdited fails with ErrEdited if the file is neither the running document nor that
// of the change in progress, which may have written it already or end meanwhile.
func (d *Daemon) checkEdited() error {
	if d.path == "" {
		return nil
	}
	doc, next := d.documents()
	for {
		b, err := config.ReadFile(d.path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil // the change writes it again
		case err != nil:
			return err
		case bytes.Equal(b, doc.Bytes()), next != nil && bytes.Equal(b, next.Bytes()):
			return nil
		}
		was, wasNext := doc, next
		if doc, next = d.documents(); doc == was && next == wasNext {
			return d.edited()
		}
	}
}

// documents returns the running document and that of the change in progress, or nil.
func (d *Daemon) documents() (doc, next *config.Document) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.served.doc, d.served.next
}

// edited returns an ErrEdited about the file.
func (d *Daemon) edited() error {
	return fmt.Errorf("%s: %w. Nothing was changed", d.path, ErrEdited)
}

// prepare does what has to be on stable storage before the configuration is, and is
// harmless if the configuration never gets there: it forgets the identity of a LUN whose
// file is absent, so that a new file of that name is another disk. It fails if a LUN needs
// what an earlier change removed and what is still in use.
func (e *editor) prepare(ctx context.Context, plan *schema.Plan, cfg *config.Config) error {
	d := e.d
	for _, s := range plan.Steps {
		for _, l := range lunsToOpen(s.Change, cfg) {
			if err := d.checkFree(s.Change.Target, &l, s.Change.Op == config.Add); err != nil {
				return err
			}
			if l.Backend != "file" {
				continue
			}
			var absent bool // valid when the call is back
			err := d.calls.do(ctx, d.waits.store, storeKey(s.Change.Target, &l), "looking for the file", func(*call) error {
				_, err := os.Stat(l.Path)
				absent = errors.Is(err, fs.ErrNotExist)
				return nil
			}, nil)
			if err != nil {
				return fmt.Errorf("LUN %d of %s: %w. Nothing was changed", l.ID, s.Change.Target, err)
			}
			if absent {
				e.absent = append(e.absent, l.Path)
				if err := d.state.ids.Forget(identityKey(s.Change.Target, &l)); err != nil {
					return err
				}
			}
		}
	}
	if s := filesToShrink(plan, cfg); len(s) > 0 {
		return e.keepShrinks(s)
	}
	return nil
}

// lunsToOpen returns the LUNs that a step opens.
func lunsToOpen(ch config.Change, cfg *config.Config) []config.LUN {
	t := targetOf(cfg, ch.Target)
	switch l := lunOf(t, ch.LUN); {
	case t == nil:
	case ch.Kind == config.KindTarget && ch.Op == config.Add:
		return t.LUNs
	case ch.Kind == config.KindLUN && l != nil && (ch.Op == config.Add || ch.Op == config.Update && ch.Key == "path"):
		return []config.LUN{*l}
	}
	return nil
}

// publish gives the file of a LUN its name before the configuration has that name: a
// start that did not find the file would create an empty one.
func (d *Daemon) publish(ctx context.Context, file *FileBuilder) error {
	if file == nil {
		return nil
	}
	if err := d.before("file"); err != nil {
		return err
	}
	return file.publish(ctx)
}

// save writes doc to the file, unless the file has that text already. It fails with
// ErrEdited if the file has a text that from does not allow.
func (e *editor) save(doc *config.Document, from origin) error {
	d := e.d
	if d.path == "" || from == fromCluster {
		return nil
	}
	if err := d.before("save"); err != nil {
		return err
	}
	if b, err := config.ReadFile(d.path); err == nil && bytes.Equal(b, doc.Bytes()) {
		return nil
	}
	switch from {
	case fromElsewhere:
		return doc.SaveAs(d.path)
	case fromFile:
		return d.edited()
	}
	err := doc.SaveOver(d.path, d.served.doc.Bytes())
	if errors.Is(err, config.ErrChanged) {
		err = d.edited()
	}
	return err
}

// restore writes the running document to the file after a change to next failed, unless
// next came from the file. It does not touch a text that somebody else wrote meanwhile.
func (e *editor) restore(next *config.Document, from origin, saved bool) error {
	d := e.d
	err := e.keepShrinks(nil)
	if d.path == "" || from == fromFile || from == fromCluster || bytes.Equal(next.Bytes(), d.served.doc.Bytes()) {
		return err
	}
	b, rerr := config.ReadFile(d.path)
	switch {
	case rerr == nil && !bytes.Equal(b, next.Bytes()): // next was not written, or was replaced
		return err
	case rerr != nil && !saved:
		return err
	case rerr != nil && !errors.Is(rerr, fs.ErrNotExist):
		return errors.Join(err, rerr)
	}
	rerr = d.served.doc.Clone().SaveOver(d.path, next.Bytes()) // others may read the document
	if errors.Is(rerr, config.ErrChanged) {
		rerr = nil
	}
	return errors.Join(err, rerr)
}
