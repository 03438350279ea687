package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// A naming says whether the first argument of a verb is a target, and whether a user may leave it out if there is only one.
type naming uint8

const (
	noTarget naming = iota
	targetRequired
	targetOptional
)

// argsOrFewer accepts what v.args accepts, also without an optional target.
func (v *verb) argsOrFewer() cobra.PositionalArgs {
	if v.names != targetOptional {
		return v.args
	}
	return func(cmd *cobra.Command, args []string) error {
		err := v.args(cmd, args)
		if err != nil && v.args(cmd, withTarget("", args)) == nil {
			return nil
		}
		return err
	}
}

func withTarget(target string, args []string) []string {
	return append([]string{target}, args...)
}

// nameTarget replaces the first argument of a verb by the full name of its target, or inserts that of the only target.
func (c *call) nameTarget(ctx context.Context, v *verb) (err error) {
	fits := func(args []string) bool { return v.args(c.cmd, args) == nil }
	if v.names == targetOptional && (!fits(c.args) || fits(withTarget("", c.args)) && noTargetName(c.args[0])) {
		all, err := c.Targets(ctx)
		if err != nil {
			return err
		}
		if len(c.args) > 0 && slices.ContainsFunc(all, func(t schema.TargetState) bool { return isCalled(&t, c.args[0]) }) {
			return usage(c.cmd, "wrong number of arguments, %d, after the target: usage: %s", len(c.args)-1, c.cmd.UseLine())
		}
		if len(all) != 1 {
			return usage(c.cmd, "name the target: there are %d (%s)", len(all), some(texts(all, func(t schema.TargetState) string { return t.Name })))
		}
		c.args = withTarget(all[0].Name, c.args)
		return nil
	}
	if v.names == noTarget || len(c.args) == 0 {
		return nil
	}
	c.args = slices.Clone(c.args)
	c.args[0], err = findTarget(ctx, c.Client, c.args[0])
	return err
}

// noTargetName reports whether an argument in the place of a target is the next argument of the verb: the number of a
// LUN, or a key and its value.
func noTargetName(arg string) bool {
	return strings.Trim(arg, "0123456789") == "" || strings.Contains(arg, "=")
}

// findTarget returns the name of the target with that name, that alias, or the only one whose name ends so. It does not ask
// about full names, so that the target answers for them.
func findTarget(ctx context.Context, c *client.Client, text string) (string, error) {
	if isName(text) {
		return text, nil
	}
	all, err := c.Targets(ctx)
	if err != nil {
		return "", err
	}
	for _, match := range []func(*schema.TargetState) bool{
		func(t *schema.TargetState) bool { return isCalled(t, text) },
		func(t *schema.TargetState) bool { return strings.HasSuffix(t.Name, strings.ToLower(text)) },
	} {
		var found []string
		for i := range all {
			if match(&all[i]) {
				found = append(found, all[i].Name)
			}
		}
		switch {
		case len(found) == 1:
			return found[0], nil
		case len(found) > 1:
			return "", &schema.Error{Code: schema.Invalid, Message: fmt.Sprintf("%s may be %d targets: %s", text, len(found), some(found)), Hint: "use more of the name"}
		}
	}
	return "", notThere(text, all)
}

// isCalled reports whether text is the name of t, its alias, or what follows the last colon of its name.
func isCalled(t *schema.TargetState, text string) bool {
	return strings.EqualFold(t.Name, text) || t.Alias == text || strings.EqualFold(t.Name[strings.LastIndexByte(t.Name, ':')+1:], text)
}

// isName reports whether text has the form of a full iSCSI name.
func isName(text string) bool {
	kind, _, ok := strings.Cut(strings.ToLower(text), ".")
	return ok && (kind == "iqn" || kind == "eui" || kind == "naa")
}

// suggestTarget adds to an error about a target that does not exist the name of one that does.
func (c *call) suggestTarget(ctx context.Context, err error) error {
	var e *schema.Error
	if len(c.args) == 0 || !errors.As(err, &e) || e.Code != schema.NotFound || !strings.HasPrefix(e.Hint, "GET ") {
		return err
	}
	all, listErr := c.Targets(ctx)
	if listErr != nil || slices.ContainsFunc(all, func(t schema.TargetState) bool { return strings.EqualFold(t.Name, c.args[0]) }) {
		return err
	}
	return notThere(c.args[0], all)
}

// notThere returns the error about a target that is none of all, with the name that is most like text.
func notThere(text string, all []schema.TargetState) error {
	e := &schema.Error{Code: schema.NotFound, Message: fmt.Sprintf("target %s: not found", text), Hint: "see iser-target target list"}
	var names []string
	full := map[string]string{}
	for i := range all {
		t := &all[i]
		for _, name := range []string{t.Name, t.Name[strings.LastIndexByte(t.Name, ':')+1:], t.Alias} {
			if name != "" {
				names = append(names, name)
				full[name] = t.Name
			}
		}
	}
	if like := config.Nearest(text, names); like != "" {
		e.Message = fmt.Sprintf("target %s: not found; did you mean %s?", text, full[like])
	}
	return e
}

// some returns the first names of a list.
func some(names []string) string {
	const most = 5
	if len(names) > most {
		return strings.Join(names[:most], ", ") + ", ..."
	}
	return strings.Join(names, ", ")
}
