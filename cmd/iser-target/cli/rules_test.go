package cli

import (
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// commands returns all commands by path.
func commands(t *testing.T) map[string]*cobra.Command {
	t.Helper()
	root := &cobra.Command{Use: "iser-target"}
	AddTo(root)
	all := map[string]*cobra.Command{}
	var walk func(c *cobra.Command, path string)
	walk = func(c *cobra.Command, path string) {
		all[path] = c
		for _, sub := range c.Commands() {
			walk(sub, strings.TrimSpace(path+" "+sub.Name()))
		}
	}
	walk(root, "")
	return all
}

// A noun whose objects can be created or removed has a list. All nouns have the same verbs, with the words of other tools as aliases.
func TestNounsHaveTheSameVerbs(t *testing.T) {
	all := commands(t)
	words := map[string][]string{"list": {"ls"}, "create": {"add"}, "delete": {"rm", "remove"}}
	removing := []string{"delete", "deny", "kill", "clear"} // one of them
	for path, c := range all {
		if !c.HasSubCommands() {
			continue
		}
		verbs := map[string]*cobra.Command{}
		for _, sub := range c.Commands() {
			for _, name := range append([]string{sub.Name()}, sub.Aliases...) {
				if verbs[name] != nil {
					t.Errorf("%s: %s is %s and %s", path, name, verbs[name].Name(), sub.Name())
				}
				verbs[name] = sub
			}
		}
		for verb, others := range words {
			for _, other := range others {
				if verbs[verb] != nil && verbs[other] != verbs[verb] {
					t.Errorf("%s %s is not %s %s", path, other, path, verb)
				}
			}
		}
		if !slices.ContainsFunc(removing, func(v string) bool { return verbs[v] != nil }) {
			continue
		}
		if verbs["list"] == nil {
			t.Errorf("%s has no list", path)
		}
		if verbs["delete"] == nil {
			t.Errorf("%s has no delete", path)
		}
	}
}

// Flags are where they mean something: commands that only add objects show none that lets sessions end, each change shows
// --dry-run and -o, and commands that ask no target show and take none that locates one.
func TestFlagsAreWhereTheyMeanSomething(t *testing.T) {
	all := commands(t)
	shown := func(c *cobra.Command, name string) bool {
		f := c.Flags().Lookup(name)
		if f == nil {
			f = c.InheritedFlags().Lookup(name)
		}
		return f != nil && !f.Hidden
	}
	disturbing := []string{"target delete", "target set", "lun delete", "lun set", "lun resize", "portal delete", "portal set", "initiator deny", "config apply"}
	adding := []string{"target create", "lun create", "lun clone", "portal create", "initiator allow"}
	for _, path := range slices.Concat(disturbing, adding, []string{"session kill", "reservation clear"}) {
		c := all[path]
		for _, name := range []string{"dry-run", "output", "socket", "address"} {
			if !shown(c, name) {
				t.Errorf("%s has no --%s", path, name)
			}
		}
		for _, name := range []string{"disrupt", "drain", "now"} {
			if slices.Contains(disturbing, path) && !shown(c, name) || slices.Contains(adding, path) && shown(c, name) {
				t.Errorf("%s, --%s: shown %v", path, name, shown(c, name))
			}
		}
	}
	for _, path := range []string{"config validate", "config schema", "config import"} {
		c := all[path]
		text := c.UsageString()
		for _, name := range []string{"socket", "address", "context", "timeout", "tls-cert", "tls-key", "tls-ca"} {
			if strings.Contains(text, "--"+name) {
				t.Errorf("%s shows --%s", path, name)
			}
			value := "x"
			if name == "timeout" {
				value = "3s"
			}
			root := &cobra.Command{Use: "iser-target", SilenceErrors: true, SilenceUsage: true}
			AddTo(root)
			root.SetOut(io.Discard)
			root.SetErr(io.Discard)
			line := append(strings.Fields(path), "--"+name, value)
			if path != "config schema" {
				line = append(line, "/nowhere/c.yaml")
			}
			root.SetArgs(line)
			var out strings.Builder
			if code := Report(&out, root.ExecuteContext(t.Context())); code != ExitUsage || !strings.Contains(out.String(), "--"+name+" means nothing here: iser-target "+path+" asks no target") {
				t.Errorf("%q: code %d: %s", line, code, out.String())
			}
		}
	}
}

// Changes that wait for the next start have one finding with one advice, and each is in it once.
func TestPendingChangesHaveOneAdvice(t *testing.T) {
	text := func(pending ...string) string {
		return tableText(func(tb *table) { printFindings(tb, checkPending(&schema.State{Pending: pending})) })
	}
	if got := text(); got != "" {
		t.Errorf("none: %q", got)
	}
	if got, want := text("set format of log: text -> json"), "warning  configuration  set format of log: text -> json takes effect at the next start\n                          restart the target when convenient\n"; got != want {
		t.Errorf("one: got\n%s\nwant\n%s", got, want)
	}
	got := text("set a", "set b", "set c")
	const want = `warning  configuration  3 changes take effect at the next start:
                        set a
                        set b
                        set c
                          restart the target when convenient
`
	if got != want {
		t.Errorf("three: got\n%s\nwant\n%s", got, want)
	}
}

// session list and status show the mean number of commands in progress, and not that of a moment.
func TestSessionsHaveADepth(t *testing.T) {
	st := schema.State{Sessions: []schema.SessionState{{TSIH: 3, Initiator: "iqn.2026-11.io.example:host", Target: "iqn.2026-11.io.example:store", Transport: "tcp", Depth: 7.96}}}
	if row := sessionRow(&st.Sessions[0]); row[7] != "8.0" || row[len(row)-1] != 0 {
		t.Errorf("row %v", row)
	}
	s := statusOf(&st, time.Now())
	if got := tableText(s.fill); !strings.Contains(got, "DEPTH") || !strings.Contains(got, "8.0\n") || s.Sessions[0].Depth != 7.96 {
		t.Errorf("status\n%s", got)
	}
}
