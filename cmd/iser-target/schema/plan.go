package schema

import (
	"slices"
	"time"

	"github.com/iser-target/iser-target/config/terms"
)

// A Plan lists the steps of a change, and which of them are done.
type Plan struct {
	Steps     []Step `json:"steps"`
	Persisted bool   `json:"persisted"`      // the configuration file has the change
	Note      string `json:"note,omitempty"` // what else the user should know
}

// A Step is one difference between the running configuration and the next one.
type Step struct {
	Change     terms.Change `json:"change"`
	Disturbs   []string     `json:"disturbs,omitempty"` // sessions and LUNs, each as a short text
	Disruptive bool         `json:"disruptive"`         // requires Options.Disrupt
	Shrinks    bool         `json:"shrinks"`            // requires Options.AllowShrink
	Restart    bool         `json:"restart"`            // takes effect at the next start of the target
	Done       bool         `json:"done"`
}

// DefaultDrain is the default of Options.Drain.
const DefaultDrain = 10 * time.Second

// Options say how the target makes a change. In a request they are the query.
type Options struct {
	DryRun      bool          // dry_run: return the plan and change nothing
	Disrupt     bool          // disrupt: allow steps that disturb sessions
	AllowShrink bool          // allow_shrink: allow a LUN to become smaller and lose the data beyond its new end
	Now         bool          // now: end sessions and commands of what is removed at once
	Drain       time.Duration // drain: the time that these sessions and commands have to end; 0: DefaultDrain
}

// Needs names the options that a refused plan requires.
type Needs struct {
	Disrupt, Shrink bool
}

// Needs returns the options that the steps of p require.
func (p *Plan) Needs() Needs {
	return Needs{
		Disrupt: slices.ContainsFunc(p.Steps, func(s Step) bool { return s.Disruptive }),
		Shrink:  slices.ContainsFunc(p.Steps, func(s Step) bool { return s.Shrinks }),
	}
}

// Options returns the names of n in the query of a request.
func (n Needs) Options() []string { return n.names("disrupt", "allow_shrink") }

// Flags returns n as flags of the command line.
func (n Needs) Flags() []string { return n.names("--disrupt", "--allow-shrink") }

func (n Needs) names(disrupt, shrink string) (list []string) {
	if n.Disrupt {
		list = append(list, disrupt)
	}
	if n.Shrink {
		list = append(list, shrink)
	}
	return list
}
