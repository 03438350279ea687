package config

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/iser-target/iser-target/security"
)

// An Auth configures how initiators authenticate. The zero value requires no authentication.
type Auth struct {
	Method     string     `key:"method"`     // none or chap
	Algorithms []string   `key:"algorithms"` // most preferred first; empty: all
	Users      []User     `key:"users"`
	Mutual     Credential `key:"mutual"` // identity of the target for initiators that ask; may be zero
}

// A User is an initiator.
type User struct {
	Name       string          `key:"name"`        // CHAP_N
	Secret     security.Secret `key:"secret"`      // Load reads it from SecretFile
	SecretFile string          `key:"secret_file"` // path; empty: the configuration has Secret
	// Previous is a second secret that is valid, too, while hosts change to Secret; empty: none.
	Previous     security.Secret `key:"previous_secret"`
	PreviousFile string          `key:"previous_secret_file"`
	Initiator    string          `key:"initiator"` // pattern of the iSCSI names that this user may have; empty: any
	Mutual       Credential      `key:"mutual"`    // identity of the target for this user; zero: Auth.Mutual
}

// A Credential is a name and its secret.
type Credential struct {
	Name       string          `key:"name"`
	Secret     security.Secret `key:"secret"`
	SecretFile string          `key:"secret_file"`
}

// CHAP returns the CHAP configuration for package iscsi, of an Auth that Load has returned;
// nil if it requires no authentication.
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
			Previous:     u.Previous,
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
	key    string // of the user or credential
	name   string
	secret *security.Secret
	file   string
	mutual bool   // the secret authenticates the target
	field  string // of secret below key
}

// secrets returns all secrets of c, in the order of the file.
func (c *Config) secrets() []secretRef {
	var list []secretRef
	for i := range c.Targets {
		list = append(list, c.Targets[i].Auth.secrets(index("targets", i, "auth"))...)
	}
	return append(list, c.DiscoveryAuth.secrets("discovery_auth")...)
}

// SecretFiles returns the paths of the secret files that c names.
func (c *Config) SecretFiles() (list []string) {
	for _, s := range c.secrets() {
		if s.file != "" {
			list = append(list, s.file)
		}
	}
	return list
}

func (a *Auth) secrets(key string) []secretRef {
	var list []secretRef
	mutual := func(key string, m *Credential) {
		if *m != (Credential{}) {
			list = append(list, secretRef{key + ".mutual", m.Name, &m.Secret, m.SecretFile, true, "secret"})
		}
	}
	for i := range a.Users {
		u, key := &a.Users[i], index(key, "users", i)
		list = append(list, secretRef{key, u.Name, &u.Secret, u.SecretFile, false, "secret"})
		if u.Previous != "" || u.PreviousFile != "" {
			list = append(list, secretRef{key, u.Name, &u.Previous, u.PreviousFile, false, "previous_secret"})
		}
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
			errs.addf(s.key+"."+s.field+"_file", "cannot be combined with %s", s.field)
		} else if secret, err := ReadSecret(s.file); err != nil {
			errs.addf(s.key+"."+s.field+"_file", "%s: %s", s.file, reasonOf(err))
		} else {
			*s.secret = secret
		}
	}
	return errs
}

// maxSecretFile is the size in bytes of a file with the longest secret in hexadecimal: "0x",
// the digits, and CR LF.
const maxSecretFile = 2 + 2*security.MaxSecret + 2

// ReadSecret reads a file of one line that has a secret. Only its owner may read it.
func ReadSecret(path string) (security.Secret, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // does not wait for the writer of a FIFO
	if err != nil {
		return "", err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return "", err
	}
	if !fi.Mode().IsRegular() {
		return "", errors.New("not a regular file")
	}
	if err := checkMode(fi.Mode()); err != nil {
		return "", err
	}
	if err := CheckOwner(fi); err != nil {
		return "", err
	}
	b, err := io.ReadAll(io.LimitReader(f, maxSecretFile+1))
	if err != nil {
		return "", err
	}
	if len(b) > maxSecretFile {
		return "", fmt.Errorf("file is larger than %d bytes", maxSecretFile)
	}
	line := strings.TrimSuffix(strings.TrimSuffix(string(b), "\n"), "\r")
	if strings.ContainsAny(line, "\r\n") {
		return "", errors.New("file has more than one line")
	}
	return security.ParseSecret(line)
}

// CheckOwner returns an error if another user than root and that of this process can change a file, as sshd does.
// Pipes are not checked: they end with what their writer says.
func CheckOwner(fi fs.FileInfo) error {
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok || !fi.Mode().IsRegular() {
		return nil
	}
	if st.Uid != 0 && int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("belongs to uid %d, which can change it: it must belong to root or to uid %d. Run chown", st.Uid, os.Geteuid())
	}
	if mode := fi.Mode().Perm(); mode&0o022 != 0 {
		return fmt.Errorf("other users can write to it: its mode is %#o. Run chmod go-w", mode)
	}
	return nil
}

// LooseDirectory returns why other users can put another file in the place of the one at path, or "".
func LooseDirectory(path string) string {
	path, err := filepath.Abs(path)
	if err != nil {
		return ""
	}
	for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
		fi, err := os.Stat(dir)
		if err != nil {
			return ""
		}
		st, ok := fi.Sys().(*syscall.Stat_t)
		switch mode := fi.Mode(); {
		case ok && st.Uid != 0 && int(st.Uid) != os.Geteuid():
			return fmt.Sprintf("uid %d can replace it, to whom %s belongs. Run chown", st.Uid, dir)
		case mode.Perm()&0o022 != 0 && mode&fs.ModeSticky == 0:
			return fmt.Sprintf("other users can replace it: the mode of %s is %#o. Run chmod go-w %s", dir, mode.Perm(), dir)
		}
		if dir == filepath.Dir(dir) {
			return ""
		}
	}
}

// minDistinct is the number of different characters of a secret below which Warnings names it.
const minDistinct = 4

func distinct(s string) map[rune]bool {
	set := map[rune]bool{}
	for _, r := range s {
		set[r] = true
	}
	return set
}

// checkMode returns an error unless only the owner can use the file.
func checkMode(mode fs.FileMode) error {
	if mode := mode.Perm(); mode&0o077 != 0 {
		may := "execute"
		switch {
		case mode&0o044 != 0:
			may = "read"
		case mode&0o022 != 0:
			may = "write to"
		}
		return fmt.Errorf("has secrets, but other users can %s it: its mode is %#o. Run chmod 600", may, mode)
	}
	return nil
}

// checkFileMode returns an error if c has secrets of its own and other users can read a file
// of that mode.
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
			errs.addf(key+".users", "is required: the users that may log in, like [{name: host1, secret_file: /etc/iser-target/host1.secret}]")
		}
	default:
		errs.addf(key+".method", "must be chap or none, not %q", a.Method)
	}
	if _, err := security.ParseCHAPAlgorithms(a.Algorithms); err != nil {
		errs.addf(key+".algorithms", "%v", err)
	}
	names := map[string]string{} // the key, by name
	for i, u := range a.Users {
		key := index(key, "users", i)
		if first, ok := names[u.Name]; ok && u.Name != "" {
			errs.addf(key+".name", "%q is the name of %s", u.Name, first)
		}
		names[u.Name] = key
		if _, err := security.Compile([]string{u.Initiator}); u.Initiator != "" && err != nil {
			errs.addf(key+".initiator", "%v", err)
		}
	}
	for _, s := range a.secrets(key) {
		switch {
		case s.field != "secret": // the name is checked with the other secret
		case s.name == "":
			errs.addf(s.key+".name", "is required: the CHAP name")
		case len(s.name) > security.MaxCHAPName || strings.ContainsRune(s.name, 0):
			errs.addf(s.key+".name", "must have at most %d bytes and no NUL", security.MaxCHAPName)
		}
		if *s.secret == "" && s.file == "" {
			errs.addf(s.key+"."+s.field, "is required, or %s_file", s.field)
		}
	}
}

// eachShared calls f for every secret that equals an earlier one.
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

// checkSecrets refuses secrets that authenticate both an initiator and the target (RFC 7143,
// section 9.2.1).
func (c *Config) checkSecrets(errs *errorList) {
	c.eachShared(func(first, again secretRef) {
		if first.mutual != again.mutual {
			errs.addf(again.key, "has the secret of %s: initiators and target must have different ones", first.key)
		}
	})
}

// Warnings returns one line for each setting that is valid but not safe: a target without
// authentication on a portal that is not on the loopback (RFC 7143, section 9), metrics or a
// dashboard there without a web configuration, iSER without CRCs, LUNs for some initiators where a user may have any initiator name, and one
// secret for two names (section 9.2.1).
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
				warnings = append(warnings, fmt.Sprintf("targets[%d].auth: no authentication: any host that can connect to portals[%d] (%s) can log in to %s with the name of an initiator", i, j, p.Listen, t.Name))
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
				warnings = append(warnings, index("targets", i, "auth", "users", j, "initiator")+": is not set: this user can log in with the name of any initiator and use its LUNs")
			}
		}
	}
	for _, s := range c.secrets() {
		if n := len(distinct(string(*s.secret))); n > 0 && n < minDistinct {
			warnings = append(warnings, fmt.Sprintf("%s.%s: has only %d different characters, which is easy to guess. iser-target secret generate prints a better one", s.key, s.field, n))
		}
	}
	seen := map[string]bool{}
	for _, path := range c.SecretFiles() {
		dir := filepath.Dir(path)
		if seen[dir] {
			continue
		}
		seen[dir] = true
		if w := LooseDirectory(path); w != "" {
			warnings = append(warnings, path+": "+w)
		}
	}
	if c.MPA.CRC == CRCOff {
		for i, p := range c.Portals {
			if addr, reason := parseAddress(p.Listen, true); p.Serves("iser") && (reason != "" || !addr.loopback()) {
				warnings = append(warnings, fmt.Sprintf("mpa.crc: off: unless the initiator asks for CRCs, nothing notices data that the network to portals[%d] (%s) changes (RFC 5044, section 4.4)", i, p.Listen))
				break
			}
		}
	}
	for _, open := range []struct {
		key   string
		at    WebListener
		shows string
	}{
		{"metrics", c.Metrics, "the names of targets and initiators"},
		{"dashboard", c.Dashboard, "sessions, LUNs and events"},
	} {
		if addr, reason := parseAddress(open.at.Listen, true); open.at.Listen != "" && open.at.WebConfig == "" && reason == "" && !addr.loopback() {
			warnings = append(warnings, fmt.Sprintf("%s.listen: any host that can connect to %s sees %s. Set %s.web_config for TLS and a login", open.key, open.at.Listen, open.shows, open.key))
		}
	}
	c.eachShared(func(first, again secretRef) {
		if first.name != again.name {
			warnings = append(warnings, fmt.Sprintf("%s: has the secret of %s: each of the two can log in as the other", again.key, first.key))
		}
	})
	return warnings
}
