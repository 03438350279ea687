package config

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/iser-target/iser-target/security"
)

// An Auth is how initiators prove who they are. The zero value asks for no
// proof.
type Auth struct {
	Method     string     `key:"method"`     // none or chap
	Algorithms []string   `key:"algorithms"` // in order of preference; empty: all
	Users      []User     `key:"users"`
	Mutual     Credential `key:"mutual"` // who the target is, if initiators ask; may be zero
}

// A User is an initiator.
type User struct {
	Name       string          `key:"name"`        // CHAP_N
	Secret     security.Secret `key:"secret"`      // after Load that of SecretFile
	SecretFile string          `key:"secret_file"` // path; empty: Secret is in the configuration itself
	Initiator  string          `key:"initiator"`   // pattern of the iSCSI names that may be this user; empty: any
	Mutual     Credential      `key:"mutual"`      // who the target is to this user; zero: Auth.Mutual
}

// A Credential is a name and the secret that goes with it.
type Credential struct {
	Name       string          `key:"name"`
	Secret     security.Secret `key:"secret"`
	SecretFile string          `key:"secret_file"`
}

// CHAP is what package iscsi needs of a configuration that Load has returned;
// nil if initiators need no proof.
func (a *Auth) CHAP() (*security.CHAP, error) {
	if a.Method != "chap" {
		return nil, nil
	}
	algorithms, err := security.ParseCHAPAlgorithms(a.Algorithms)
	if err != nil {
		return nil, err
	}
	cfg := security.CHAPConfig{Algorithms: algorithms, Target: a.Mutual.identity()}
	for _, u := range a.Users {
		cfg.Users = append(cfg.Users, security.CHAPUser{
			CHAPIdentity: security.CHAPIdentity{Name: u.Name, Secret: u.Secret},
			Initiator:    u.Initiator,
			Target:       u.Mutual.identity(),
		})
	}
	return security.NewCHAP(cfg)
}

func (c Credential) identity() security.CHAPIdentity {
	return security.CHAPIdentity{Name: c.Name, Secret: c.Secret}
}

// A secretRef is one secret of a configuration.
type secretRef struct {
	key    string // of what has the secret
	name   string
	secret *security.Secret
	file   string
	mutual bool // it proves who the target is
}

// secrets are all of c, in the order of the file.
func (c *Config) secrets() []secretRef {
	var list []secretRef
	for i := range c.Targets {
		list = append(list, c.Targets[i].Auth.secrets(index("targets", i, "auth"))...)
	}
	return append(list, c.DiscoveryAuth.secrets("discovery_auth")...)
}

func (a *Auth) secrets(key string) []secretRef {
	var list []secretRef
	mutual := func(key string, m *Credential) {
		if *m != (Credential{}) {
			list = append(list, secretRef{key + ".mutual", m.Name, &m.Secret, m.SecretFile, true})
		}
	}
	for i := range a.Users {
		u, key := &a.Users[i], index(key, "users", i)
		list = append(list, secretRef{key, u.Name, &u.Secret, u.SecretFile, false})
		mutual(key, &u.Mutual)
	}
	mutual(key, &a.Mutual)
	return list
}

// readSecrets reads the secrets that are in files.
func (c *Config) readSecrets() (errs errorList) {
	for _, s := range c.secrets() {
		if s.file == "" {
			continue
		}
		if *s.secret != "" {
			errs.addf(s.key+".secret_file", "is there beside secret")
			continue
		}
		secret, err := readSecret(s.file)
		if err != nil {
			errs.addf(s.key+".secret_file", "%s: %s", s.file, reasonOf(err))
			continue
		}
		*s.secret = secret
	}
	return errs
}

// maxSecretFile is the size, in octets, of a file with the longest secret in
// hexadecimal, "0x" in front and a line end behind it.
const maxSecretFile = 2 + 2*security.MaxSecret + 2

// readSecret reads a file that has a secret on its one line.
func readSecret(path string) (security.Secret, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // which does not wait for the writer of a FIFO
	if err != nil {
		return "", err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return "", err
	}
	if !fi.Mode().IsRegular() {
		return "", errors.New("is no regular file")
	}
	if err := checkMode(fi.Mode()); err != nil {
		return "", err
	}
	b, err := io.ReadAll(io.LimitReader(f, maxSecretFile+1))
	if err != nil {
		return "", err
	}
	if len(b) > maxSecretFile {
		return "", fmt.Errorf("file is larger than %d octets", maxSecretFile)
	}
	line := strings.TrimSuffix(strings.TrimSuffix(string(b), "\n"), "\r")
	if strings.ContainsAny(line, "\r\n") {
		return "", errors.New("file has more than one line")
	}
	return security.ParseSecret(line)
}

// checkMode tells whether only the owner can read the file.
func checkMode(mode fs.FileMode) error {
	if mode := mode.Perm(); mode&0o077 != 0 {
		return fmt.Errorf("has secrets, but its mode is %#o; it must be 0600 or less (chmod 600)", mode)
	}
	return nil
}

// checkFileMode tells whether a file of that mode may have the secrets that c
// has.
func (c *Config) checkFileMode(mode fs.FileMode) error {
	for _, s := range c.secrets() {
		if s.file == "" {
			return checkMode(mode)
		}
	}
	return nil
}

func (a *Auth) check(key string, errs *errorList) {
	switch a.Method {
	case "", "none":
		if a.Method == "" && (len(a.Users) > 0 || len(a.Algorithms) > 0 || a.Mutual != Credential{}) {
			errs.addf(key+".method", "is required: chap or none")
		}
	case "chap":
		if len(a.Users) == 0 {
			errs.addf(key+".users", "is required: who may log in, like [{name: host1, secret_file: /etc/iser-target/host1.secret}]")
		}
	default:
		errs.addf(key+".method", "must be chap or none, not %q", a.Method)
	}
	if _, err := security.ParseCHAPAlgorithms(a.Algorithms); err != nil {
		errs.addf(key+".algorithms", "%v", err)
	}
	names := map[string]string{} // the key
	for i, u := range a.Users {
		key := index(key, "users", i)
		if first, ok := names[u.Name]; ok && u.Name != "" {
			errs.addf(key+".name", "%q is the name of %s", u.Name, first)
		}
		names[u.Name] = key
		if u.Initiator == "" {
			continue
		}
		if _, err := security.Compile([]string{u.Initiator}); err != nil {
			errs.addf(key+".initiator", "%v", err)
		}
	}
	for _, s := range a.secrets(key) {
		switch {
		case s.name == "":
			errs.addf(s.key+".name", "is required: the CHAP name")
		case len(s.name) > security.MaxCHAPName || strings.ContainsRune(s.name, 0):
			errs.addf(s.key+".name", "must be at most %d octets, none of them NUL", security.MaxCHAPName)
		}
		if *s.secret == "" && s.file == "" {
			errs.addf(s.key+".secret", "is required, or secret_file")
		}
	}
}

// eachShared calls f for every secret that is the same as an earlier one.
func (c *Config) eachShared(f func(first, again secretRef)) {
	seen := map[security.Secret]secretRef{}
	for _, s := range c.secrets() {
		if first, ok := seen[*s.secret]; ok {
			f(first, s)
		} else if *s.secret != "" {
			seen[*s.secret] = s
		}
	}
}

// checkSecrets finds secrets that are used in both directions (RFC 7143,
// section 9.2.1).
func (c *Config) checkSecrets(errs *errorList) {
	c.eachShared(func(first, again secretRef) {
		if first.mutual != again.mutual {
			errs.addf(again.key, "has the secret of %s: initiators and target must have different ones", first.key)
		}
	})
}

// Warnings are about what is allowed, but better not done, each on one line: a
// target that asks for no proof on a portal that others can reach (RFC 7143,
// section 9), metrics or a dashboard there, LUNs by initiator where a user can be any initiator, and a secret of
// two names (section 9.2.1).
func (c *Config) Warnings() []string {
	var warnings []string
	for i, t := range c.Targets {
		if t.Auth.Method == "chap" || t.Redirect.To != "" {
			continue
		}
		for j, p := range c.Portals {
			if !t.ServedBy(p) {
				continue
			}
			if addr, reason := parseAddress(p.Listen, true); reason != "" || !addr.loopback() {
				warnings = append(warnings, fmt.Sprintf("targets[%d].auth: no authentication: whoever reaches portals[%d], %s, can log in to %s by the name of an initiator", i, j, p.Listen, t.Name))
				break
			}
		}
	}
	for i, t := range c.Targets {
		if t.Auth.Method != "chap" || !slices.ContainsFunc(t.LUNs, LUN.forSome) {
			continue
		}
		for j, u := range t.Auth.Users {
			if u.Initiator == "" {
				warnings = append(warnings, index("targets", i, "auth", "users", j, "initiator")+": is not set: this user can take the name of any initiator, and so the LUNs of others")
			}
		}
	}
	for _, open := range []struct{ key, listen, shows string }{
		{"metrics.listen", c.Metrics.Listen, "the names of targets and initiators"},
		{"dashboard.listen", c.Dashboard.Listen, "sessions, LUNs and events"},
	} {
		if addr, reason := parseAddress(open.listen, true); open.listen != "" && reason == "" && !addr.loopback() {
			warnings = append(warnings, fmt.Sprintf("%s: whoever reaches %s sees %s", open.key, open.listen, open.shows))
		}
	}
	c.eachShared(func(first, again secretRef) {
		if first.name != again.name {
			warnings = append(warnings, fmt.Sprintf("%s: has the secret of %s: each of the two can pass for the other", again.key, first.key))
		}
	})
	return warnings
}
