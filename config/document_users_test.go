package config

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/security"
)

const withUsers = `# top
portals: [{listen: ":1"}]
targets:
  - name: iqn.2026-11.io.example:a # first
    initiators: ["*"]
    auth: # of a
      method: chap
      users:
        - name: host1 # keep
          secret: aaaaaaaaaaaa # of 2026
          initiator: "*:1"
        - {name: host2, secret_file: /s/2}
    luns: []
  - name: iqn.2026-11.io.example:b
    initiators: ["*"] # last
  - {name: "iqn.2026-11.io.example:c", initiators: ["*"], auth: {method: none}}
`

// Edits of users keep comments and other users. A rotation moves the present secret and ends by removing it.
func TestDocumentUsers(t *testing.T) {
	d, err := NewDocument("f", []byte(withUsers))
	if err != nil {
		t.Fatal(err)
	}
	const a, b, c = "iqn.2026-11.io.example:a", "iqn.2026-11.io.example:b", "iqn.2026-11.io.example:c"
	check := func(what string, err error, target int, method string, want ...User) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		auth := d.settingsOnly().Targets[target].Auth
		if auth.Method != method || !reflect.DeepEqual(auth.Users, want) {
			t.Errorf("%s: method %q, users %+v, want %q, %+v\n%s", what, auth.Method, auth.Users, method, want, d.Bytes())
		}
		for _, comment := range []string{"# top", "# first", "# of a", "# keep", "# of 2026", "# last"} {
			if !strings.Contains(string(d.Bytes()), comment) && !(comment == "# of 2026" && strings.HasPrefix(what, "end")) {
				t.Errorf("%s: the comment %q is gone:\n%s", what, comment, d.Bytes())
			}
		}
	}
	host1, host2 := User{Name: "host1", Secret: "aaaaaaaaaaaa", Initiator: "*:1"}, User{Name: "host2", SecretFile: "/s/2"}
	host3 := User{Name: "yes: no", Secret: "0x00ff # 'bbb", Initiator: "?"}
	check("add", d.AddUser(a, host3), 0, "chap", host1, host2, host3)
	check("add the first", d.AddUser(b, User{Name: "x", Secret: "cccccccccccc"}), 1, "chap", User{Name: "x", Secret: "cccccccccccc"})
	check("add without a change of the method", d.AddUser(c, User{Name: "x", Secret: "cccccccccccc"}), 2, "none", User{Name: "x", Secret: "cccccccccccc"})
	rotated := host1
	rotated.Secret, rotated.Previous = "dddddddddddd", host1.Secret
	check("rotate", d.RotateUser(a, User{Name: "host1", Secret: "dddddddddddd"}), 0, "chap", rotated, host2, host3)
	check("rotate a file", d.RotateUser(a, User{Name: "host2", SecretFile: "/s/new"}), 0, "chap",
		rotated, User{Name: "host2", SecretFile: "/s/new", PreviousFile: "/s/2"}, host3)
	for what, err := range map[string]error{
		"rotate again":      d.RotateUser(a, User{Name: "host1", Secret: "eeeeeeeeeeee"}),
		"rotate file again": d.RotateUser(a, User{Name: "host2", Secret: "eeeeeeeeeeee"}),
		"add again":         d.AddUser(a, User{Name: "host1", Secret: "eeeeeeeeeeee"}),
	} {
		if !errors.Is(err, ErrExists) || strings.Contains(err.Error(), "eeee") {
			t.Errorf("%s: %v, want ErrExists without the secret", what, err)
		}
	}
	rotated.Previous = ""
	check("end", d.EndRotation(a, "host1"), 0, "chap", rotated, User{Name: "host2", SecretFile: "/s/new", PreviousFile: "/s/2"}, host3)
	check("end that of a file", d.EndRotation(a, "host2"), 0, "chap", rotated, User{Name: "host2", SecretFile: "/s/new"}, host3)
	for what, err := range map[string]error{
		"end again":       d.EndRotation(a, "host1"),
		"no user":         d.RotateUser(a, User{Name: "host9", Secret: "eeeeeeeeeeee"}),
		"remove no user":  d.RemoveUser(a, "host9"),
		"no target":       d.RemoveUser(a+"9", "host1"),
		"no user to end":  d.EndRotation(b, "host1"),
		"another's name":  d.RemoveUser(b, "HOST1"),
		"remove two":      errors.Join(d.RemoveUser(b, "x"), d.RemoveUser(b, "x")),
		"rotate a target": d.RotateUser(a+"9", User{Name: "host1", Secret: "eeeeeeeeeeee"}),
	} {
		if !errors.Is(err, ErrNotFound) {
			t.Errorf("%s: %v, want ErrNotFound", what, err)
		}
	}
	if err := d.RemoveUser(a, "host2"); err != nil {
		t.Fatal(err)
	}
	if got := d.settingsOnly().Targets[0].Auth.Users; !reflect.DeepEqual(got, []User{rotated, host3}) {
		t.Errorf("after the removal: %+v", got)
	}
}

// A user that an alias shares cannot be changed alone.
func TestSharedUserIsNotRotated(t *testing.T) {
	for name, user := range map[string]string{
		"a merge":      "{<<: *u, name: b}",
		"an alias":     "*u",
		"the anchored": "",
	} {
		text := "portals: [{listen: \":1\"}]\ntargets: [{name: iqn.2026-11.io.example:a, initiators: ['*'], auth: {method: chap, users: [&u {name: a, secret: aaaaaaaaaaaa}"
		which := "a"
		if user != "" {
			text += ", " + user
		}
		switch name {
		case "a merge":
			which = "b"
		case "the anchored":
			text += ", {<<: *u, name: c}"
		}
		text += "]}}]\n"
		d, err := NewDocument("f", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if err := d.RotateUser("iqn.2026-11.io.example:a", User{Name: which, Secret: security.Secret("bbbbbbbbbbbb")}); !errors.Is(err, ErrShared) {
			t.Errorf("%s: %v, want ErrShared\n%s", name, err, d.Bytes())
		}
		if string(d.Bytes()) != text {
			t.Errorf("%s: the text has changed:\n%s", name, d.Bytes())
		}
	}
}
