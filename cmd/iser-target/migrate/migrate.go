// Package migrate turns the configurations of other iSCSI targets into one of this target: LIO (saveconfig.json of
// targetcli), tgt (targets.conf, as tgt-admin --dump prints it) and ctld of FreeBSD (ctl.conf). Initiators then find
// their disks under the names that they know.
package migrate

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/iser-target/iser-target/config"
)

// A Result is an imported configuration.
type Result struct {
	doc     document
	secrets []secret
	// Notes say what has no counterpart here, or needs a look.
	Notes []string
}

// A secret is the secret of a CHAP user, for a file of its own.
type secret struct{ name, text string }

type document struct {
	Portals []portal `yaml:"portals"`
	Targets []target `yaml:"targets"`
}

type portal struct {
	Listen     string   `yaml:"listen"`
	TPGT       int      `yaml:"tpgt,omitempty"`
	Transports []string `yaml:"transports,omitempty,flow"`
}

type target struct {
	Name         string   `yaml:"name"`
	Alias        string   `yaml:"alias,omitempty"`
	Initiators   []string `yaml:"initiators"`
	Networks     []string `yaml:"networks,omitempty,flow"`
	PortalGroups []int    `yaml:"portal_groups,omitempty,flow"`
	Auth         *auth    `yaml:"auth,omitempty"`
	LUNs         []disk   `yaml:"luns"`
}

type auth struct {
	Method string `yaml:"method"`
	Users  []user `yaml:"users"`
}

type user struct {
	Name       string `yaml:"name"`
	SecretFile string `yaml:"secret_file"`
	Initiator  string `yaml:"initiator,omitempty"`
	Mutual     *user  `yaml:"mutual,omitempty"`
}

type disk struct {
	ID           int      `yaml:"id"`
	Backend      string   `yaml:"backend"`
	Path         string   `yaml:"path,omitempty"`
	Size         string   `yaml:"size,omitempty"`
	BlockSize    int      `yaml:"block_size,omitempty"`
	ReadOnly     bool     `yaml:"read_only,omitempty"`
	WriteThrough bool     `yaml:"write_through,omitempty"`
	Serial       string   `yaml:"serial,omitempty"`
	NAA          string   `yaml:"naa,omitempty"`
	Vendor       string   `yaml:"vendor,omitempty"`
	Product      string   `yaml:"product,omitempty"`
	Initiators   []string `yaml:"initiators,omitempty"`
	ReadOnlyFor  []string `yaml:"read_only_for,omitempty"`
}

// Formats are what Import reads.
var Formats = []string{"lio", "tgt", "ctl"}

// Import reads the text b of a configuration in one of Formats. name is that of the file, for errors.
func Import(format, name string, b []byte) (*Result, error) {
	r := &Result{}
	var err error
	switch format {
	case "lio":
		err = r.lio(b)
	case "tgt":
		err = r.tgt(b)
	case "ctl":
		err = r.ctl(b)
	default:
		return nil, fmt.Errorf("%q is not one of %s", format, strings.Join(Formats, ", "))
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if len(r.doc.Targets) == 0 {
		return nil, fmt.Errorf("%s: it has no iSCSI target", name)
	}
	r.finish()
	return r, nil
}

func (r *Result) note(format string, a ...any) { r.Notes = append(r.Notes, fmt.Sprintf(format, a...)) }

// finish makes r a configuration that a target can have.
func (r *Result) finish() {
	if len(r.doc.Portals) == 0 {
		r.note("no portal: the target listens on port 3260 of all addresses")
		r.doc.Portals = []portal{{Listen: "0.0.0.0:3260"}}
	}
	paths := map[string]string{}
	for i := range r.doc.Targets {
		t := &r.doc.Targets[i]
		if len(t.Initiators) == 0 {
			t.Initiators = []string{"*"}
			r.note("target %s: it admits all initiators, as before", t.Name)
		}
		t.LUNs = slices.DeleteFunc(t.LUNs, func(l disk) bool {
			of := fmt.Sprintf("LUN %d of %s", l.ID, t.Name)
			if other := paths[l.Path]; l.Path != "" && other != "" {
				r.note("%s: left out, because %s has the same path %s, which two LUNs cannot share here", of, other, l.Path)
				return true
			}
			paths[l.Path] = of
			return false
		})
		for j := range t.LUNs {
			l := &t.LUNs[j]
			l.Vendor, l.Product = r.fit(l.Vendor, "vendor", 8, t, l), r.fit(l.Product, "product", 16, t, l)
			if l.Backend == "file" && l.Size == "" {
				if fi, err := os.Stat(l.Path); err == nil && fi.Mode().IsRegular() {
					l.Size = config.Size(fi.Size()).String()
				} else {
					r.note("LUN %d of %s: its size is not known, because %s is not a file on this machine. Set size", l.ID, t.Name, l.Path)
				}
			}
			if l.NAA == "" {
				names := "naa"
				if l.Serial == "" {
					names = "naa and serial"
				}
				r.note("LUN %d of %s: it gets another %s. To keep the old one, set naa to what a host has in /sys/block/sdX/device/wwid, and serial to what sg_inq shows", l.ID, t.Name, names)
			}
		}
		if t.LUNs == nil {
			t.LUNs = []disk{}
		}
	}
}

// fit cuts a name of an INQUIRY field to its length.
func (r *Result) fit(text, key string, most int, t *target, l *disk) string {
	if len(text) > most {
		r.note("LUN %d of %s: %s %q is cut to %d characters, as in INQUIRY", l.ID, t.Name, key, text, most)
		return strings.TrimSpace(text[:most])
	}
	return text
}

// placeholder is what tgt-admin --dump prints instead of secrets.
const placeholder = "PLEASE_CORRECT_THE_PASSWORD"

// user adds a CHAP user to t. Its secret goes into a file of its own.
func (r *Result) user(t *target, u user, password string, mutualName, mutualPassword string) {
	if t.Auth == nil {
		t.Auth = &auth{Method: "chap"}
	}
	file := func(name, text string) string {
		if text == placeholder || text == "" {
			r.note("CHAP user %s of %s: the file has no secret. Write it into its secret_file, mode 0600", name, t.Name)
		}
		s := secret{unsafe.ReplaceAllString(t.Name[strings.LastIndexByte(t.Name, ':')+1:]+"-"+name, "_"), text}
		for n := 2; slices.ContainsFunc(r.secrets, func(o secret) bool { return o.name == s.name }); n++ {
			s.name = fmt.Sprintf("%s-%d", strings.TrimSuffix(s.name, fmt.Sprintf("-%d", n-1)), n)
		}
		r.secrets = append(r.secrets, s)
		return s.name
	}
	u.SecretFile = file(u.Name, password)
	if mutualName != "" {
		u.Mutual = &user{Name: mutualName}
		u.Mutual.SecretFile = file(mutualName, mutualPassword)
	}
	t.Auth.Users = append(t.Auth.Users, u)
}

// unsafe matches what does not belong into the name of a file.
var unsafe = regexp.MustCompile(`[^A-Za-z0-9._-]+`)

// Secrets returns how many files Write makes.
func (r *Result) Secrets() int { return len(r.secrets) }

// Write returns the YAML. It first writes the secrets, each into a new file of mode 0600 in dir, an absolute path that is
// made if it is missing. A file that exists is not overwritten.
func (r *Result) Write(dir, source string) (text []byte, err error) {
	var written []string
	defer func() {
		if err != nil {
			for _, path := range written {
				os.Remove(path)
			}
		}
	}()
	if len(r.secrets) > 0 {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
	}
	for _, s := range r.secrets {
		path := filepath.Join(dir, s.name+".secret")
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return nil, err
		}
		written = append(written, path)
		_, err = f.WriteString(s.text + "\n")
		if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
			return nil, err
		}
	}
	doc := r.doc
	for i := range doc.Targets {
		if a := doc.Targets[i].Auth; a != nil {
			for j := range a.Users {
				a.Users[j].SecretFile = filepath.Join(dir, a.Users[j].SecretFile+".secret")
				if m := a.Users[j].Mutual; m != nil {
					m.SecretFile = filepath.Join(dir, m.SecretFile+".secret")
				}
			}
		}
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "# Imported from %s. What needs a look:\n", oneLine(source))
	for _, n := range r.Notes {
		fmt.Fprintf(&b, "#  - %s\n", oneLine(n))
	}
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if err := errors.Join(e.Encode(doc), e.Close()); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// Check returns why a target would not take the YAML text, or nil.
func Check(text []byte) error {
	doc, err := config.NewDocument("import", text)
	if err == nil {
		_, err = doc.Config()
	}
	return err
}

// oneLine returns text for a comment.
func oneLine(text string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == 0x85 || r == 0x2028 || r == 0x2029 {
			return '?'
		}
		return r
	}, text)
}

// portal adds a portal, unless it is there.
func (r *Result) portal(listen string, tpgt int, transports ...string) {
	p := portal{Listen: listen, Transports: transports}
	if tpgt > 1 {
		p.TPGT = tpgt
	}
	for i := range r.doc.Portals {
		if o := &r.doc.Portals[i]; o.Listen == listen {
			if cmp.Or(o.TPGT, 1) != cmp.Or(p.TPGT, 1) {
				r.note("portal %s: it is in portal group %d alone, not in %d as well", listen, cmp.Or(o.TPGT, 1), cmp.Or(p.TPGT, 1))
			}
			return
		}
	}
	r.doc.Portals = append(r.doc.Portals, p)
}
