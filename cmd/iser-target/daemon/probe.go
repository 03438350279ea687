package daemon

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/cmd/iser-target/httpd"
	"github.com/iser-target/iser-target/cmd/iser-target/probe"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

const callProbe = "looking at it"

// probe returns the error that the change to cfg would end with because of the file or device of a LUN or of a web configuration file, or nil: a dry
// run says what the change would say. It leaves nothing behind. building is the file that does not exist yet, or nil.
func (d *Daemon) probe(ctx context.Context, plan *schema.Plan, cfg *config.Config, building *FileBuilder) error {
	for _, w := range cfg.WebConfigs() {
		section, _, _ := strings.Cut(w.Key, ".")
		if !slices.ContainsFunc(plan.Steps, func(s schema.Step) bool { return s.Change.Kind == section }) {
			continue
		}
		err := d.calls.do(ctx, d.waits.store, "probe "+w.Key, callProbe, func(*call) error { return httpd.CheckWeb(w.File) }, nil)
		if err != nil {
			return fmt.Errorf("%s: %w", w.Key, err)
		}
	}
	open := d.openPaths()
	for _, s := range plan.Steps {
		luns := lunsToOpen(s.Change, cfg)
		for i := range luns {
			if err := d.checkFree(s.Change.Target, &luns[i], s.Change.Op == config.Add); err != nil {
				return err
			}
		}
		grows := s.Change.Kind == config.KindLUN && s.Change.Op == config.Update && s.Change.Key == "size" && !s.Shrinks
		if grows {
			luns = append(luns, *lunOf(targetOf(cfg, s.Change.Target), s.Change.LUN))
		}
		for _, l := range luns {
			look := func() error { return probe.LUN(&l) }
			switch {
			case grows && l.Backend == "file", building != nil && building.Path() == l.Path:
				look = func() error { return backend.ProbeSize(l.Path, int64(l.Size)) }
			case open[l.Path]: // by this process, in the same plan or until then: it is known to work
				continue
			}
			err := d.calls.do(ctx, d.waits.store, "probe "+storeKey(s.Change.Target, &l), callProbe, func(*call) error { return look() }, nil)
			if err != nil {
				return fmt.Errorf("%v: %w", s.Change, err)
			}
		}
	}
	return nil
}

// openPaths returns the files and devices of the LUNs that are served.
func (d *Daemon) openPaths() map[string]bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	open := map[string]bool{}
	for _, t := range d.served.targets {
		for _, l := range t.luns {
			if l.Path != "" {
				open[l.Path] = true
			}
		}
	}
	return open
}
