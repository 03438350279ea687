package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// others are programs that examples use besides iser-target.
var others = []string{"install", "kubectl", "ssh", "tgt-admin"}

// shellCommands returns the words of each command of a line of a shell, without redirections and variables.
func shellCommands(line string) (commands [][]string, err error) {
	var words []string
	word, in, quote, target := "", false, rune(0), false
	end := func() {
		variable := len(words) == 0 && strings.Contains(word, "=")
		if in && !target && !variable {
			words = append(words, word)
		}
		if in {
			word, in, target = "", false, false
		}
	}
	for _, r := range line {
		switch {
		case r == quote:
			quote = 0
		case quote != 0:
			word += string(r)
		case r == '\'' || r == '"':
			quote, in = r, true
		case r == '|':
			end()
			commands, words = append(commands, words), nil
		case r == '>' || r == '<':
			end()
			target = true
		case r == ' ':
			end()
		case strings.ContainsRune("$*?()[]{}`\\~#!;&", r):
			return nil, fmt.Errorf("%q outside of quotes", r)
		default:
			word, in = word+string(r), true
		}
	}
	if quote != 0 {
		return nil, fmt.Errorf("no closing %q", quote)
	}
	end()
	return append(commands, words), nil
}

// parseExample returns the command of the program that a line of an example runs, nil if it runs only others, or why
// the line is wrong.
func parseExample(line string) (found *cobra.Command, err error) {
	commands, err := shellCommands(line)
	if err != nil {
		return nil, err
	}
	for _, words := range commands {
		switch {
		case len(words) == 0:
			return nil, errors.New("an empty command")
		case words[0] == "iser-target":
			if found, err = parseCommand(words); err != nil {
				return found, err
			}
		case !slices.Contains(others, words[0]):
			return nil, fmt.Errorf("%s is not a program that examples use", words[0])
		}
	}
	return found, nil
}

func parseCommand(words []string) (*cobra.Command, error) {
	root := rootCommand(io.Discard, io.Discard)
	c, rest, err := root.Find(words[1:])
	if err != nil {
		return nil, err
	}
	if err := c.ParseFlags(rest); err != nil {
		return c, err
	}
	if err := c.ValidateArgs(c.Flags().Args()); err != nil {
		return c, err
	}
	if err := c.ValidateRequiredFlags(); err != nil {
		return c, err
	}
	return c, c.ValidateFlagGroups()
}

// Each command that does something has an example of itself, and each line of an example names a command with its
// flags and its arguments.
func TestExamplesParse(t *testing.T) {
	var seen int
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		own := false
		for line := range strings.Lines(c.Example) {
			line = strings.TrimSpace(line)
			if line == "" || strings.HasPrefix(line, "#") {
				continue
			}
			got, err := parseExample(line)
			if err != nil {
				t.Errorf("%s: %s: %v", c.CommandPath(), line, err)
				continue
			}
			seen++
			own = own || got != nil && got.CommandPath() == c.CommandPath()
		}
		if !own && c.HasParent() && !c.HasAvailableSubCommands() && c.Name() != supervisorName && c.Name() != witnessName {
			t.Errorf("%s has no example of itself", c.CommandPath())
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	root := rootCommand(io.Discard, io.Discard)
	walk(root)
	if seen < 80 {
		t.Errorf("only %d lines were parsed", seen)
	}
	if root.Example == "" {
		t.Error("the program has no examples")
	}
}

// parseExample finds what is wrong.
func TestWrongExamples(t *testing.T) {
	for line, want := range map[string]string{
		"iser-target lun lst":                           "unknown command",
		"iser-target lun list --wide":                   "unknown flag: --wide",
		"iser-target lun delete":                        "wrong number of arguments",
		"iser-target top --count x":                     "invalid argument",
		"iser-target initiator allow store *":           "outside of quotes",
		"iser-target lun show store '0":                 "no closing",
		"lun list":                                      "not a program that examples use",
		"iser-target lun list | jqq .":                  "not a program that examples use",
		"iser-target lun list | iser-target lun lst >x": "unknown command",
	} {
		c, err := parseExample(line)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, %v, want %q", line, c, err, want)
		}
	}
}
