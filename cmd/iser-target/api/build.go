package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// reportEvery is the time between two lines of progress; the end of a phase has its own.
const reportEvery = 200 * time.Millisecond

// addLUN adds a LUN, and builds its file first if the request asks for that. With progress,
// the answer to that has a ChangeUpdate on each line.
func (s *Server) addLUN(w http.ResponseWriter, r *http.Request) error {
	return answerUpdates(w, r, s.makeLUN)
}

// setLUN sets keys of a LUN, and with preallocate then allocates the space of its file. It
// answers like addLUN.
func (s *Server) setLUN(w http.ResponseWriter, r *http.Request) error {
	return answerUpdates(w, r, s.growLUN)
}

// answerUpdates answers with the result of do, and with its updates if it writes any.
func answerUpdates(w http.ResponseWriter, r *http.Request, do func(*http.Request, *updateWriter) (*schema.Plan, error)) error {
	out := &updateWriter{w: w, working: showWork(w, r)}
	defer out.working.stop()
	if err := flag(r.URL.Query(), "progress", &out.wanted); err != nil {
		return err
	}
	plan, err := do(r, out)
	out.working.stop()
	switch {
	case out.begun && err != nil:
		out.line(schema.ChangeUpdate{Error: errorOf(err)})
	case out.begun:
		out.line(schema.ChangeUpdate{Plan: plan})
	case err == nil:
		writeJSON(w, http.StatusOK, plan)
	default:
		return err
	}
	return nil
}

func (s *Server) makeLUN(r *http.Request, out *updateWriter) (*schema.Plan, error) {
	var l schema.LUN
	if err := body(r, &l); err != nil {
		return nil, err
	}
	c, err := lunConfig(&l)
	if err != nil {
		return nil, err
	}
	o, err := changeOptions(r)
	if err != nil {
		return nil, err
	}
	if l.Backend == "file" && l.Path != "" && l.From == "" && !l.Preallocate && l.Clone == nil {
		if err := s.checkPath(r, l.Path, unix.S_IFREG); err != nil {
			return nil, err
		}
		// A file that is there has a size. The store compares it when it opens the file.
		if fi, err := os.Stat(l.Path); err == nil && fi.Mode().IsRegular() {
			if err := takeSize(&c, fi.Size(), name(r)); err != nil {
				return nil, err
			}
		}
	}
	edit := func(d *config.Document) (err error) {
		if l.ID == nil {
			if c.ID, err = freeLUN(d, name(r), s.d.Removing(name(r))); err != nil {
				return err
			}
		}
		return d.AddLUN(name(r), c)
	}
	if !l.Preallocate && l.From == "" && l.Clone == nil {
		return s.changeWith(r, o, edit)
	}
	switch {
	case l.Backend != "file":
		return nil, invalid("preallocate, from and clone require the backend file, not %s", l.Backend)
	case l.Clone != nil && (l.Preallocate || l.From != "" || l.Size != ""):
		return nil, invalid("clone excludes preallocate, from and size: a clone shares the blocks of its source, and has its size")
	}
	if err := s.checkPath(r, l.Path, unix.S_IFREG); err != nil {
		return nil, err
	}
	if err := s.checkPath(r, l.From, unix.S_IFREG, unix.S_IFBLK); err != nil {
		return nil, err
	}
	build := backend.BuildConfig{Path: l.Path, Size: int64(c.Size), BlockSize: uint32(c.BlockSize), Preallocate: l.Preallocate, From: l.From}
	if l.Clone != nil {
		if err := s.checkSource(r, l.Clone); err != nil {
			return nil, err
		}
		if err := s.d.CloneConfig(r.Context(), &build, l.Clone); err != nil {
			return nil, err
		}
		c.BlockSize = int(build.BlockSize)
	}
	file, err := s.d.NewFileBuilder(build)
	if err != nil {
		return nil, err
	}
	defer file.Abort()
	c.Size = config.Size(file.Size())
	dry := o
	dry.DryRun, dry.File = true, file
	if plan, err := s.changeWith(r, dry, edit); err != nil || o.DryRun { // refused before the long work
		return plan, err
	}
	if err := s.run(out, r, file.Build); err != nil {
		return nil, err
	}
	c.Size, o.File = config.Size(file.Size()), file // a LUN may have got another size until it was cloned
	return s.changeWith(r, o, edit)
}

// takeSize gives a LUN on a file of that many bytes the size of the file. It returns an error if the LUN is to have another size:
// the caller may have mistaken a file with data in it for another one.
func takeSize(l *config.LUN, size int64, target string) error {
	if l.Size == 0 {
		l.Size = config.Size(size)
	}
	if size == 0 || int64(l.Size) == size {
		return nil
	}
	e := &schema.Error{Code: schema.Invalid, Message: fmt.Sprintf("%s exists and is %s, but --size is %s. Nothing was changed", l.Path, backend.SizeText(size), backend.SizeText(int64(l.Size))),
		Hint: "leave out --size to use the file as it is; truncate -s " + strconv.FormatInt(int64(l.Size), 10) + " PATH makes it smaller, and loses the data beyond that"}
	if int64(l.Size) > size {
		e.Hint = fmt.Sprintf("leave out --size to use the file as it is, and extend it then with iser-target lun resize %s LUN %v", target, l.Size)
	}
	return e
}

func (s *Server) growLUN(r *http.Request, out *updateWriter) (*schema.Plan, error) {
	id, err := lunID(r)
	if err != nil {
		return nil, err
	}
	o, err := changeOptions(r)
	if err != nil {
		return nil, err
	}
	var preallocate bool
	if err := flag(r.URL.Query(), "preallocate", &preallocate); err != nil {
		return nil, err
	}
	edit, _, err := editOf(r, func(d *config.Document, key, value string) error { return d.SetLUN(name(r), id, key, value) })
	if err != nil {
		return nil, err
	}
	var from int64
	if preallocate {
		l, err := s.findLUN(r)
		if err != nil {
			return nil, err
		}
		if l.Backend != "file" {
			return nil, invalid("preallocate requires the backend file, not %s", l.Backend)
		}
		from = l.Size
		dry := o
		dry.DryRun = true
		plan, err := s.changeWith(r, dry, edit)
		if err != nil || o.DryRun {
			return plan, err
		}
		if err := roomFor(plan, l); err != nil {
			return nil, err
		}
	}
	plan, err := s.changeWith(r, o, edit)
	if err != nil || o.DryRun || !preallocate {
		return plan, err
	}
	err = s.run(out, r, func(ctx context.Context, report func(backend.Progress)) error {
		return s.d.Allocate(ctx, name(r), id, from, report)
	})
	if err != nil {
		return nil, fmt.Errorf("the LUN has its new size, but not all its space is allocated: %w", err)
	}
	return plan, nil
}

// roomFor returns an error if the file system lacks the space by which the plan extends l.
func roomFor(plan *schema.Plan, l *schema.LUNState) error {
	for _, step := range plan.Steps {
		size, err := config.ParseSize(step.Change.New)
		if err != nil || step.Change.Key != "size" || int64(size) < l.Size {
			continue
		}
		if err := backend.CheckRoom(l.Path, int64(size)-l.Size); err != nil {
			return fmt.Errorf("nothing was changed: %s: %w", l.Path, err)
		}
	}
	return nil
}

// run calls do, and cancels it if the client goes away or the target ends.
func (s *Server) run(out *updateWriter, r *http.Request, do func(context.Context, func(backend.Progress)) error) error {
	ctx, cancel := s.stream(out.w, r)
	defer cancel(nil)
	return do(ctx, func(p backend.Progress) {
		if err := out.progress(p); err != nil {
			cancel(err)
		}
	})
}

// An updateWriter writes the ChangeUpdates of an answer, if the request asks for them.
type updateWriter struct {
	w       http.ResponseWriter
	working work
	wanted  bool
	begun   bool // something was written
	last    time.Time
}

func (o *updateWriter) progress(p backend.Progress) error {
	if !o.wanted || p.Done < p.Total && time.Since(o.last) < reportEvery {
		return nil
	}
	o.last = time.Now()
	return o.line(schema.ChangeUpdate{Progress: &schema.Progress{Phase: p.Phase, Done: p.Done, Total: p.Total}})
}

func (o *updateWriter) line(m schema.ChangeUpdate) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if !o.begun {
		o.working.stop()
		o.begun = true
		o.w.Header().Set("Content-Type", "application/jsonl")
		o.w.Header().Set("X-Content-Type-Options", "nosniff")
	}
	_, err = patient{o.w}.Write(append(b, '\n'))
	return err
}
