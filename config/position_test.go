package config

import (
	"errors"
	"strings"
	"testing"
)

// Errors name the line and the column of a key, and show the line without what may be a secret.
func TestPositions(t *testing.T) {
	const text = `portals:
  - listen: 127.0.0.1:3260
  - {tpgt: 0, listen: 127.0.0.1:3261}
targets:
  - name: iqn.2026-11.io.example:store
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, sise: 1GiB}
      - id: 1
        backend: memory
        size: 3
      - &two {id: 2, backend: memory, size: 1MiB, block_size: 7}
      - <<: *two
        id: 3
    auth:
      method: chap
      users:
        - {name: a, secert: hunter2-hunter2, initiator: 7}
        - name: ä
          initiator: 8
        - {name: é, initiator: 9}
        - name: b
          secret: "hunter2
            hunter3"
          initiator: 10
"log.level": 1
limits: {queue_depth: 0}
`
	_, err := load("f", []byte(text))
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		t.Fatal(err)
	}
	if strings.Contains(err.Error(), "hunter") {
		t.Errorf("a secret in %v", err)
	}
	got := map[string]*Error{}
	for _, e := range joined.Unwrap() {
		var one *Error
		if !errors.As(e, &one) {
			t.Fatalf("%T", e)
		}
		got[one.Key] = one
		if strings.Contains(one.At.Text, "hunter") {
			t.Errorf("%v shows a secret: %s", one, one.At.Text)
		}
	}
	mark := func(line string) string { // | stands before the character that ^ is below
		return strings.Replace(line, "|", "", 1) + "\n" + strings.Repeat(" ", len([]rune(line[:strings.Index(line, "|")]))) + "^"
	}
	for key, want := range map[string]struct{ at, caret string }{
		"portals[1].tpgt":                    {"3:12", mark("  - {tpgt: |0, listen: 127.0.0.1:3261}")},
		"targets[0].luns[0].sise":            {"8:34", mark("      - {id: 0, backend: memory, |sise: ...")},
		"targets[0].luns[0].size":            {"8:9", mark("      - |{id: 0, backend: memory, sise: ...")},
		"targets[0].luns[1].size":            {"11:15", mark("        size: |3")},
		"targets[0].luns[2].block_size":      {"12:63", mark("      - &two {id: 2, backend: memory, size: 1MiB, block_size: |7}")},
		"targets[0].luns[3].block_size":      {"12:63", mark("      - &two {id: 2, backend: memory, size: 1MiB, block_size: |7}")}, // merged
		"targets[0].auth.users[0].secert":    {"18:21", mark("        - {name: a, |secert: ...")},
		"targets[0].auth.users[0].initiator": {"18:57", ""}, // behind what may be a secret
		"targets[0].auth.users[1].initiator": {"20:22", mark("          initiator: |8")},
		"targets[0].auth.users[2].initiator": {"21:32", mark("        - {name: é, initiator: |9}")},
		"targets[0].auth.users[3].initiator": {"25:22", ""}, // below a secret that may have more lines
		`"log.level"`:                        {"26:1", ""},
		"limits.queue_depth":                 {"27:23", ""},
	} {
		e := got[key]
		if e == nil {
			t.Errorf("no error about %s in\n%v", key, err)
		} else if !strings.HasPrefix(e.Error(), "f:"+want.at+": "+key+": ") || e.At.Caret() != want.caret {
			t.Errorf("%v\n%s\nwant %s\n%s", e, e.At.Caret(), want.at, want.caret)
		}
	}

	for text, want := range map[string]string{
		text[:strings.Index(text, `"log.level"`)] + "\tlog: a\n": "f:26:1: yaml: a TAB cannot indent. Use spaces",
		"portals:\n\t- listen: 127.0.0.1:1\n":                    "f:2:1: yaml: a TAB cannot indent. Use spaces",
		"hello\n":                                                "f:1: yaml: a configuration must be a mapping of keys, like portals and targets",
		"# of a test\n- a\n":                                     "f:2: yaml: a configuration must be a mapping of keys, like portals and targets",
		"[*]\n":                                                  "f:1: yaml: did not find expected alphabetic or numeric character. Put a value that begins with * or & in quotes",
		"targets:\n- initiators: [*]\n":                          "f:2: yaml: did not find expected alphabetic or numeric character. Put a value that begins with * or & in quotes",
		"a: *b\n":                                                "f: yaml: unknown anchor. Put a value that begins with * in quotes",
		"a: 1\na: 2\n":                                           `f:2: yaml: mapping key "a" already defined at line 1`,
	} {
		if _, err := load("f", []byte(text)); err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// No file has the text of an edit yet.
func TestEditHasNoPosition(t *testing.T) {
	d := mustDocument(t, good)
	if err := d.SetLUN("iqn.2026-11.io.example:store", 0, "size", "3"); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Config(); err == nil || !strings.HasPrefix(err.Error(), "f: targets[0].luns[0].size: ") {
		t.Error(err)
	}
}

// A secret in a wrong place below the authentication is neither in an error nor in the line that it shows.
func TestErrorsShowNoMisplacedSecret(t *testing.T) {
	const secret = "hunter2hunter2"
	for _, auth := range []string{
		"auth: " + secret, "auth: [" + secret + "]", "auth: {" + secret + ": x}", "auth: {method: chap, " + secret + ": x}", "auth: {method: [" + secret + "]}",
		"auth:\n      " + secret + ": x", "auth:\n      - " + secret, "auth: {method: chap, algorithms: " + secret + "}", "auth: {method: chap, algorithms: {" + secret + ": 1}}",
		"auth: {method: chap, users: " + secret + "}", "auth: {method: chap, users: [bob, " + secret + "]}", "auth: {method: chap, users: [[bob, " + secret + "]]}",
		"auth: {method: chap, users: ['bob:" + secret + "']}", "auth:\n      method: chap\n      users:\n        - bob:" + secret, "auth:\n      method: chap\n      users:\n        " + secret,
		"auth: {method: chap, users: [{name: bob, " + secret + "}]}", "auth: {method: chap, users: [{name: bob, " + secret + ": x}]}", "auth: {method: chap, users: [{name: [" + secret + "]}]}",
		"auth: {method: chap, users: [{name: bob, initiator: [" + secret + "]}]}", "auth: {method: chap, users: [{name: bob, initiator: {a: " + secret + "}}]}",
		"auth: {method: chap, users: [{name: bob, previous_secret: [" + secret + "]}]}", "auth: {method: chap, mutual: " + secret + "}", "auth: {method: chap, mutual: [t, " + secret + "]}",
		"auth: {method: chap, mutual: {name: t, " + secret + ": y}}", "auth: &x " + secret + "\n    alias: *x",
	} {
		for _, text := range []string{good + "    " + auth + "\n", good + "discovery_" + strings.ReplaceAll(auth, "\n    ", "\n") + "\n", good + "    " + auth + "\n    foo: 1\n"} {
			_, err := load("f", []byte(text))
			if err == nil {
				continue // like an alias without authentication
			}
			shown := err.Error()
			joined, _ := err.(interface{ Unwrap() []error })
			if joined == nil {
				joined = errors.Join(err).(interface{ Unwrap() []error })
			}
			for _, one := range joined.Unwrap() {
				var e *Error
				if errors.As(one, &e) {
					shown += "\n" + e.At.Text
				}
			}
			if strings.Contains(shown, "hunter") {
				t.Errorf("%s\nshows the secret:\n%s", auth, shown)
			}
		}
	}
}
