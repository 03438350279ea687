// Package selftest runs conformance cases against a LUN of a running target, on the wire and by SCSI commands. It overwrites the LUN.
package selftest

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/iser-target/iser-target/iscsi/initiator"
	iserinitiator "github.com/iser-target/iser-target/iser/initiator"
)

// Transports are the transports that cases run on, in their order.
var Transports = []string{"tcp", "iser"}

// MinSize is the size in bytes that the LUN must have at least.
const MinSize = 8 << 20

// patience is how long a case waits for the target, including all its steps.
const patience = 20 * time.Second

// Options say which LUN of which target is tested.
type Options struct {
	Address    string // HOST:PORT
	Target     string
	LUN        int
	Name       string   // of the initiator, which the target must admit without CHAP
	Transports []string // of Transports
	// Progress is called before each case; nil: nobody is told.
	Progress func(done, of int, r *Result)
}

// The outcomes of a case.
const (
	Pass = "pass"
	Fail = "fail"
	Skip = "skip"
)

// A Result is the outcome of a case on a transport.
type Result struct {
	Transport string   `json:"transport"`
	Group     string   `json:"group"`
	Case      string   `json:"case"`
	Rows      []string `json:"rows,omitempty"` // of docs/requirements
	Outcome   string   `json:"outcome"`        // pass, fail or skip
	Reason    string   `json:"reason,omitempty"`
	Seconds   float64  `json:"seconds"`
}

// A testCase is one case. It runs on each transport unless only names one.
type testCase struct {
	group, id string // id has ids of docs/requirements and the case in words
	only      string // a transport; empty: all
	run       func(t *T)
}

// rowID matches the ids of docs/requirements.
var rowID = regexp.MustCompile(`\b(?:(?:MPA2?|DDP|RDMAP|ISER|ISCSI|SEC)-[0-9A-Z][0-9A-Z.]*|V-[A-Z0-9]+)-[0-9]+\b`)

// name returns the rows that the id of a case names, and its words.
func name(id string) (rows []string, words string) {
	rows = rowID.FindAllString(id, -1)
	words = strings.Join(strings.Fields(rowID.ReplaceAllString(id, "")), " ")
	return rows, words
}

// A T is the run of a case. Its methods that fail or skip end the goroutine of the case.
type T struct {
	ctx       context.Context
	o         *Options
	transport string
	cleanups  []func()
	outcome   string
	reason    string
}

// end ends the case.
func (t *T) end(outcome, format string, a ...any) {
	t.outcome, t.reason = outcome, fmt.Sprintf(format, a...)
	runtime.Goexit()
}

// failf ends the case, which has failed.
func (t *T) failf(format string, a ...any) { t.end(Fail, format, a...) }

// skipf ends the case, which cannot be judged.
func (t *T) skipf(format string, a ...any) { t.end(Skip, format, a...) }

// check fails the case unless err is nil.
func (t *T) check(err error, what string) {
	if err != nil {
		t.failf("%s: %v", what, err)
	}
}

// cleanup calls f when the case has ended.
func (t *T) cleanup(f func()) { t.cleanups = append(t.cleanups, f) }

// login opens a session that ends with the case.
func (t *T) login(change func(*initiator.Config)) *initiator.Session {
	s, err := t.o.connect(t.ctx, t.transport, change)
	t.check(err, "login")
	t.cleanup(func() { s.Close() })
	return s
}

// connect opens a session on a transport. change, which may be nil, changes how.
func (o *Options) connect(ctx context.Context, transport string, change func(*initiator.Config)) (*initiator.Session, error) {
	cfg := initiator.Config{Name: o.Name, Target: o.Target, Transport: initiator.TCP{}}
	if transport == "iser" {
		cfg.Transport = iserinitiator.Transport{}
	}
	if change != nil {
		change(&cfg)
	}
	return initiator.Connect(ctx, o.Address, cfg)
}

// Run runs all cases, one after the other. It returns an error if the LUN cannot be tested, or if ctx ends; then the results are those
// so far.
func Run(ctx context.Context, o Options) ([]Result, error) {
	list := slices.Concat(loginCases(), protocolCases(), streamCases(), scsiCases())
	var todo []Result
	var runs []*testCase
	for _, transport := range o.Transports {
		if err := o.probe(ctx, transport); err != nil {
			return nil, err
		}
		for i := range list {
			if c := &list[i]; c.only == "" || c.only == transport {
				rows, words := name(c.id)
				todo = append(todo, Result{Transport: transport, Group: c.group, Case: words, Rows: rows})
				runs = append(runs, c)
			}
		}
	}
	for i, c := range runs {
		r := &todo[i]
		if o.Progress != nil {
			o.Progress(i, len(runs), r)
		}
		o.run(ctx, c, r)
		if ctx.Err() != nil {
			return todo[:i], context.Cause(ctx)
		}
	}
	return todo, nil
}

// run runs one case.
func (o *Options) run(ctx context.Context, c *testCase, r *Result) {
	start := time.Now()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	t := &T{ctx: ctx, o: o, transport: r.Transport}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			for _, f := range slices.Backward(t.cleanups) {
				f()
			}
		}()
		t.outcome = Fail // unless the case ends
		t.reason = "the case did not end"
		c.run(t)
		t.outcome, t.reason = Pass, ""
	}()
	<-done
	r.Outcome, r.Reason, r.Seconds = t.outcome, t.reason, time.Since(start).Seconds()
}

// probe checks that the LUN can be tested on a transport.
func (o *Options) probe(ctx context.Context, transport string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	s, err := o.connect(ctx, transport, nil)
	if err != nil {
		return fmt.Errorf("%s over %s: %w", o.Address, transport, err)
	}
	defer s.Close()
	d, err := s.Open(ctx, o.LUN)
	switch {
	case err != nil:
		return fmt.Errorf("LUN %d: %w", o.LUN, err)
	case d.ReadOnly:
		return fmt.Errorf("LUN %d: it is write protected", o.LUN)
	case d.Size() < MinSize:
		return fmt.Errorf("LUN %d: it has %d bytes, and selftest requires %d", o.LUN, d.Size(), MinSize)
	case d.BlockSize != 512 && d.BlockSize != 4096:
		return fmt.Errorf("LUN %d: blocks of %d bytes", o.LUN, d.BlockSize)
	}
	return nil
}

// Interrupted reports whether err of Run means that its context ended.
func Interrupted(err error) bool { return errors.Is(err, context.Canceled) }

// Count returns how many results have each outcome.
func Count(list []Result) (pass, fail, skip int) {
	for _, r := range list {
		switch r.Outcome {
		case Pass:
			pass++
		case Skip:
			skip++
		default:
			fail++
		}
	}
	return pass, fail, skip
}
