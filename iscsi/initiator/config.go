// Package initiator is an iSCSI initiator (RFC 7143) for programs: it logs in, finds targets and LUNs, and runs SCSI
// commands. Connect returns a Session, and Session.Open the Disk of a LUN.
//
// Data travels over plain TCP. Package iser/initiator has the Transport for iSER.
//
// # Commands
//
// Session.Do runs one Command and waits for it. Session.Start sends it and returns. The Command comes back through its
// Done channel. A Command can be used again, and then it allocates nothing.
//
// # Endings
//
// The session is at ErrorRecoveryLevel 0. It ends with the first of its connections that fails, and all its commands end with
// the reason. Session.Logout ends it in an orderly way. The memory of a command is its caller's again when the command comes
// back, and never before.
//
// # Reconnecting
//
// A session does not log in again. To continue, a program waits for Session.Done, pauses, and calls Connect with the same Config. It
// has to decide about the commands that ended with an error: the target may have done them, or not. To repeat a READ, or a WRITE of the same
// data, is safe as long as no other command writes there. A fixed Config.ISID makes the target end what is left of the earlier session first
// (session reinstatement; RFC 7143, section 6.3.5). The example Reconnect does this.
//
// A session sends no pings of its own, and does not limit the time of a command. A deadline of Session.Do, or Session.Ping, finds a target that is
// silent.
package initiator

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"

	"github.com/iser-target/iser-target/security"
)

// DefaultPort is the TCP port of iSCSI targets (RFC 7143, section 13.8).
const DefaultPort = "3260"

// DefaultName is the InitiatorName of a Config without a name.
const DefaultName = "iqn.2026-11.io.github.iser-target:initiator"

// Limits of a Config.
const (
	DefaultQueueDepth = 128
	MaxQueueDepth     = 4096
	MaxConnections    = 64
)

// Config says how to log in. The zero value of a field means its default.
type Config struct {
	Name      string    // InitiatorName; default DefaultName
	Target    string    // TargetName; Discover does not use it
	Transport Transport // default TCP
	CHAP      *CHAP     // default: no authentication

	// HeaderDigest and DataDigest require CRC32C. Login fails if the target refuses it. Over iSER, iWARP has CRCs instead.
	HeaderDigest, DataDigest bool

	// Connections is the number of connections of the session, 1 by default. The target may agree to less, see
	// Session.Connections.
	Connections int

	// QueueDepth limits how many commands of the session can be in progress. The window of the target limits them, too.
	QueueDepth int

	// ISID identifies the session among those of the same name. Default: a random one, so that two sessions of one name do
	// not replace each other (RFC 7143, section 6.3.5).
	ISID [6]byte

	// OnAsync is called with each Asynchronous Message, by a goroutine that must not wait. It may be nil.
	OnAsync func(AsyncEvent)
}

// An AsyncEvent is what a target tells by an Asynchronous Message (RFC 7143, section 11.9).
type AsyncEvent struct {
	Event      byte // pdu.AsyncLogoutRequest for instance
	Parameters [3]uint16
	Data       []byte // sense data of a SCSI event; valid during the call
}

// CHAP is the identity of an initiator, and of the target if it has to prove its own (RFC 7143, section 12.1.3).
type CHAP struct {
	Name   string
	Secret security.Secret
	// TargetSecret is the secret by which the target proves its identity. Login fails if it does not. Empty: it need not.
	// It must differ from Secret.
	TargetSecret security.Secret
	// TargetName is the CHAP_N that the target must use; empty: any.
	TargetName string
}

// complete returns c with defaults in place of zeros, or an error about the first field that cannot be used.
func (c Config) complete(discovery bool) (Config, error) {
	if c.Name == "" {
		c.Name = DefaultName
	}
	if _, err := security.NormalizeName(c.Name); err != nil {
		return c, fmt.Errorf("initiator name %q: %w", c.Name, err)
	}
	if discovery {
		c.Target, c.Connections = "", 1
	} else if _, err := security.NormalizeName(c.Target); err != nil {
		return c, fmt.Errorf("target name %q: %w", c.Target, err)
	}
	if c.Transport == nil {
		c.Transport = TCP{}
	}
	if c.Connections == 0 {
		c.Connections = 1
	}
	if c.Connections < 1 || c.Connections > MaxConnections {
		return c, fmt.Errorf("%d connections: a session can have 1 to %d", c.Connections, MaxConnections)
	}
	if c.QueueDepth == 0 {
		c.QueueDepth = DefaultQueueDepth
	}
	if c.QueueDepth < 1 || c.QueueDepth > MaxQueueDepth {
		return c, fmt.Errorf("queue depth %d: it can be 1 to %d", c.QueueDepth, MaxQueueDepth)
	}
	if c.ISID == [6]byte{} {
		rand.Read(c.ISID[:])
		c.ISID[0] = 0x80 // the random format (RFC 7143, section 11.12.5)
	}
	return c, c.CHAP.check()
}

// check returns an error if c cannot be used. A nil c can.
func (c *CHAP) check() error {
	switch {
	case c == nil:
		return nil
	case c.Name == "":
		return errors.New("CHAP: the name is empty")
	case len(c.Name) > security.MaxCHAPName:
		return fmt.Errorf("CHAP: the name has %d bytes: at most %d are possible", len(c.Name), security.MaxCHAPName)
	case strings.ContainsRune(c.Name, 0):
		return errors.New("CHAP: the name contains a zero byte")
	}
	if err := checkSecret(c.Secret); err != nil {
		return fmt.Errorf("CHAP: secret of the initiator: %w", err)
	}
	if c.TargetSecret == "" {
		return nil
	}
	if err := checkSecret(c.TargetSecret); err != nil {
		return fmt.Errorf("CHAP: secret of the target: %w", err)
	}
	if c.TargetSecret == c.Secret {
		return errors.New("CHAP: initiator and target have the same secret (RFC 7143, section 9.2.1, forbids it)")
	}
	return nil
}

// checkSecret returns an error if s is not a secret, or shorter than is safe without IPsec, of which an initiator
// knows nothing (RFC 7143, section 9.2.1).
func checkSecret(s security.Secret) error {
	if s.Short() {
		return fmt.Errorf("it has %d bytes, less than %d (96 bits)", len(s), security.MinSecret)
	}
	_, err := security.ParseSecret(string(s))
	return err
}

// A URL names a LUN, a target or a portal: iscsi://HOST[:PORT][/TARGET[/LUN]], or the same with iser://.
type URL struct {
	Scheme  string // iscsi or iser
	Address string // HOST:PORT
	Target  string // empty: not named
	LUN     int    // -1: not named
}

// ParseURL parses a URL. It refuses user names and secrets in it, which other users of the machine could read.
func ParseURL(s string) (u URL, err error) {
	const form = "iscsi://HOST[:PORT]/TARGET/LUN"
	p, err := url.Parse(s)
	if err != nil {
		return u, fmt.Errorf("%q is not a URL like %s", s, form)
	}
	switch {
	case p.Scheme != "iscsi" && p.Scheme != "iser":
		return u, fmt.Errorf("%q does not begin with iscsi:// or iser://", s)
	case p.User != nil:
		return u, errors.New("the URL must not contain a user or a secret: other users of this machine can read it")
	case p.Hostname() == "":
		return u, fmt.Errorf("%q has no host: a URL is like %s", s, form)
	case p.RawQuery != "" || p.Fragment != "":
		return u, fmt.Errorf("%q has a query or a fragment: a URL is like %s", s, form)
	}
	port := p.Port()
	if port == "" {
		port = DefaultPort
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return u, fmt.Errorf("port %q is not a number from 1 to 65535", port)
	}
	u = URL{Scheme: p.Scheme, Address: net.JoinHostPort(p.Hostname(), port), LUN: -1}
	parts := strings.Split(strings.TrimPrefix(p.Path, "/"), "/")
	if len(parts) > 2 {
		return u, fmt.Errorf("%q has more than a target and a LUN: a URL is like %s", s, form)
	}
	if u.Target = parts[0]; u.Target != "" {
		if u.Target, err = security.NormalizeName(u.Target); err != nil {
			return u, fmt.Errorf("target name %q: %w", parts[0], err)
		}
	}
	if len(parts) == 2 && parts[1] != "" {
		n, err := strconv.ParseUint(parts[1], 10, 32)
		if err != nil || n > MaxLUN {
			return u, fmt.Errorf("LUN %q is not a number from 0 to %d", parts[1], MaxLUN)
		}
		u.LUN = int(n)
	}
	return u, nil
}

// String returns the URL as ParseURL reads it.
func (u URL) String() string {
	s := u.Scheme + "://" + u.Address
	if u.Target != "" {
		s += "/" + u.Target
		if u.LUN >= 0 {
			s += "/" + strconv.Itoa(u.LUN)
		}
	}
	return s
}
