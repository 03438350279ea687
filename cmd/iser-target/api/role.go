package api

import (
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"

	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
	"github.com/iser-target/iser-target/cmd/iser-target/httpd"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// A role is what a caller may do. Each includes those before it.
type role int

const (
	roleNone    role = iota
	roleRead         // see everything except secrets and data
	roleOperate      // change targets, LUNs and what initiators do
	roleAdmin        // everything
)

// parseRole returns the role with a name of config.Roles.
func parseRole(name string) role { return roleRead + role(slices.Index(config.Roles, name)) }

// String returns the name of the role.
func (r role) String() string {
	if r == roleNone {
		return "none"
	}
	return config.Roles[r-roleRead]
}

// A caller is the client of a request.
type caller struct {
	process *process          // over the Unix socket
	cert    *x509.Certificate // over TLS
	remote  string            // address of cert's holder
	portal  bool              // cert's holder has come through a portal
	role    role
	trusted bool // root, or the user of this process, on the socket
}

type (
	peerKey   struct{} // of a connection's *process in a context
	callerKey struct{} // of a request's *caller
)

// withPeer returns a ConnContext for http.Server that adds the process at the other end of a Unix
// socket to what next returns.
func withPeer(next func(context.Context, net.Conn) context.Context) func(context.Context, net.Conn) context.Context {
	return func(ctx context.Context, c net.Conn) context.Context {
		ctx = next(ctx, c)
		if p, ok := c.RemoteAddr().(*process); ok {
			ctx = context.WithValue(ctx, peerKey{}, p)
		}
		return ctx
	}
}

// identified passes the caller of a request to h. It refuses callers without a role.
func (s *Server) identified(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := &caller{remote: r.RemoteAddr}
		c.process, _ = r.Context().Value(peerKey{}).(*process)
		c.portal, _ = r.Context().Value(managerKey{}).(bool)
		if r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
			c.cert = r.TLS.PeerCertificates[0]
		}
		c.trusted = s.rights.isOwner(c.process)
		r = r.WithContext(context.WithValue(daemon.By(r.Context(), c.String()), callerKey{}, c))
		if err := s.admit(r, c); err != nil {
			w.Header().Set("Connection", "close")
			s.refuse(w, r, err)
			return
		}
		c.role = s.roleNow(c)
		if err := s.require(r, roleRead, r.Method+" "+r.URL.Path); err != nil {
			s.refuse(w, r, err)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// admit refuses requests that pages of other sites make, that name another server, and those with a certificate
// that is not trusted any longer.
func (s *Server) admit(r *http.Request, c *caller) error {
	if err := s.origins.Check(r); err != nil {
		return &schema.Error{Code: schema.Forbidden, Message: fmt.Sprintf("%s %s: a page of another site asks for it: %v", r.Method, r.URL.Path, err), Hint: "nothing was changed; use the commands, or a program"}
	}
	if r.TLS == nil {
		return nil
	}
	trust := s.trust.Load()
	if trust == nil {
		return &schema.Error{Code: schema.Forbidden, Message: "this server expects no TLS"}
	}
	now := trust.current()
	if !httpd.IsAddress(r.Host) && now.config.Certificates[0].Leaf.VerifyHostname(hostOf(r.Host)) != nil {
		return &schema.Error{Code: schema.Forbidden, Message: fmt.Sprintf("%q is not a name in the certificate of this target", r.Host), Hint: "nothing was changed; use an address, or a name in the certificate"}
	}
	if err := now.verify(r.TLS.PeerCertificates, trust.now()); err != nil {
		return &schema.Error{Code: schema.Forbidden, Message: fmt.Sprintf("%s is not trusted any longer: %v", c.who(), err), Hint: "nothing was changed; connect with another certificate"}
	}
	return nil
}

// hostOf returns a host without its port.
func hostOf(host string) string {
	u := url.URL{Host: host}
	return u.Hostname()
}

// roleNow returns the role of c.
func (s *Server) roleNow(c *caller) role {
	return s.rights.roleOf(c, s.d.Effective().Control.Access)
}

// lostRole reports whether the caller of r has a lower role than when its request began.
func (s *Server) lostRole(r *http.Request) bool {
	c, _ := r.Context().Value(callerKey{}).(*caller)
	return c == nil || s.roleNow(c) < c.role || s.admit(r, c) != nil
}

// String names c, for the log.
func (c *caller) String() string {
	switch {
	case c.cert != nil && c.portal:
		return fmt.Sprintf("%s at rdma://%s", c.cert.Subject, c.remote)
	case c.cert != nil:
		return fmt.Sprintf("%s at %s", c.cert.Subject, c.remote)
	}
	return c.remote // see process
}

// who names c without what differs between its connections.
func (c *caller) who() string {
	switch {
	case c.cert != nil:
		return "certificate " + c.cert.Subject.String()
	case c.process != nil:
		return c.process.AddressKey()
	}
	return c.remote
}

// entry returns the Access that would give c that role, as YAML.
func (c *caller) entry(r role) string {
	switch {
	case c.cert != nil && c.cert.Subject.CommonName != "":
		return fmt.Sprintf("{certificate: %q, role: %v}", c.cert.Subject.CommonName, r)
	case c.cert != nil:
		return fmt.Sprintf("{certificate: NAME, role: %v}", r)
	case c.process != nil:
		return fmt.Sprintf("{user: %q, role: %v}", strconv.FormatUint(uint64(c.process.uid), 10), r)
	}
	return fmt.Sprintf("{user: NAME, role: %v}", r)
}

// refuse answers a request with err. If that says what the caller may not do, it is an event.
func (s *Server) refuse(w http.ResponseWriter, r *http.Request, err error) {
	if e := errorOf(err); e.Code == schema.Forbidden {
		who := r.RemoteAddr
		if c, _ := r.Context().Value(callerKey{}).(*caller); c != nil {
			who = c.who()
		}
		s.d.Logger().WarnContext(r.Context(), "request refused", "event", "control", "outcome", "refused", "remote", who, "reason", e.Message)
	}
	writeError(w, err)
}

// require returns an error unless the caller of r may do what the request says.
func (s *Server) require(r *http.Request, needs role, what string) error {
	c, _ := r.Context().Value(callerKey{}).(*caller)
	if c != nil && c.role >= needs {
		return nil
	}
	if c == nil { // a request that identified has not seen
		c = &caller{remote: r.RemoteAddr}
	}
	has := "has the role " + c.role.String()
	if c.role == roleNone {
		has = "has no role"
	}
	reason := fmt.Sprintf("%s requires the role %v, and %s %s", what, needs, c.who(), has)
	return &schema.Error{Code: schema.Forbidden, Message: reason, Hint: "nothing was changed; an administrator can give the role with control.access: [" + c.entry(needs) + "]"}
}

// rights decides what roles callers have. The zero value gives root and the user of this process, if it has
// the number owner, the role admin.
type rights struct {
	owner uint32
	// strangers is the number by which a user namespace shows all users and groups that it does not know;
	// 0: the process is not in such a namespace.
	strangers uint32
	shared    bool // others than the owner can open the socket

	// Tests replace these.
	lookupUser  func(name string) (*user.User, error)
	lookupGroup func(name string) (*user.Group, error)
}

// newRights returns the rights of callers of this process.
func newRights(c config.Control, log *slog.Logger) rights {
	r := rights{owner: uint32(os.Geteuid()), shared: c.SocketGroup != "", lookupUser: user.Lookup, lookupGroup: user.LookupGroup}
	b, err := os.ReadFile("/proc/self/uid_map")
	if f := strings.Fields(string(b)); err != nil || len(f) != 3 || f[0] != "0" || f[1] != "0" || f[2] != "4294967295" {
		r.strangers = 65534
		if b, err := os.ReadFile("/proc/sys/kernel/overflowuid"); err == nil {
			if n, err := number(strings.TrimSpace(string(b))); err == nil {
				r.strangers = n
			}
		}
		if r.shared {
			log.Warn("control.socket_group in a user namespace: users and groups that the namespace does not know have no role", "number", r.strangers)
		}
	}
	return r
}

func number(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err
}

// roleOf returns the highest role that list gives c. Root and the owner of the process are
// administrators on the socket.
func (r *rights) roleOf(c *caller, list []config.Access) role {
	best := roleNone
	switch {
	case c.cert != nil:
		names := slices.Concat([]string{c.cert.Subject.CommonName}, c.cert.DNSNames, c.cert.EmailAddresses)
		for _, u := range c.cert.URIs {
			names = append(names, u.String())
		}
		for _, a := range list {
			if a.Certificate != "" && slices.Contains(names, a.Certificate) || a.OU != "" && slices.Contains(c.cert.Subject.OrganizationalUnit, a.OU) {
				best = max(best, parseRole(a.Role))
			}
		}
	case c.process != nil && c.process.known:
		p := c.process
		if r.isOwner(p) {
			return roleAdmin
		}
		for _, a := range list {
			if a.User != "" && !r.isStranger(p) && r.isUser(a.User, p.uid) || a.Group != "" && r.isMember(a.Group, p) {
				best = max(best, parseRole(a.Role))
			}
		}
	}
	return best
}

// isStranger reports whether p may be of any user.
func (r *rights) isStranger(p *process) bool {
	return !p.known || r.shared && r.strangers != 0 && p.uid == r.strangers
}

// isOwner reports whether p, which may be nil, is of root or of the user of this process. If only they can open
// the socket, a user that the namespace does not know is root outside of it.
func (r *rights) isOwner(p *process) bool {
	if p == nil || r.isStranger(p) {
		return false
	}
	return p.uid == 0 || p.uid == r.owner || !r.shared && r.strangers != 0 && p.uid == r.strangers
}

// isUser reports whether name, or number, is the user uid.
func (r *rights) isUser(name string, uid uint32) bool {
	n, err := number(name)
	if err != nil {
		u, err := r.lookupUser(name)
		if err != nil {
			return false
		}
		if n, err = number(u.Uid); err != nil {
			return false
		}
	}
	return n == uid
}

// isMember reports whether p is in the group with that name, or number.
func (r *rights) isMember(name string, p *process) bool {
	n, err := groupNumber(name, r.lookupGroup)
	if err != nil || r.strangers != 0 && n == r.strangers {
		return false
	}
	return p.gid == n || slices.Contains(p.groups, n)
}

// groupNumber returns the number of a group.
func groupNumber(name string, lookup func(string) (*user.Group, error)) (uint32, error) {
	if n, err := number(name); err == nil {
		return n, nil
	}
	g, err := lookup(name)
	if err != nil {
		return 0, err
	}
	return number(g.Gid)
}

// adminKeys are the keys of a target that decide which initiators prove their names and protect their
// connections. Only administrators change them.
var adminKeys = []string{"auth", "ipsec"}

// requireKeys returns an error unless the caller of r may set these keys of a target.
func (s *Server) requireKeys(r *http.Request, keys []string) error {
	for _, k := range keys {
		if first, _, _ := strings.Cut(k, "."); slices.Contains(adminKeys, first) {
			if err := s.require(r, roleAdmin, "setting "+k+" of a target"); err != nil {
				return err
			}
		}
	}
	return nil
}
