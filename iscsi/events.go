package iscsi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"sync"
	"time"

	"github.com/iser-target/iser-target/lun"
)

// An Event is something that an operator audits.
type Event = lun.Event

// A ConnAddr says which connection an event is about.
type ConnAddr struct {
	Transport     string // of the Datamover: "iser" or "tcp"
	Remote, Local net.Addr
}

// A SessionName says which session an event is about.
type SessionName struct {
	TSIH              uint16
	Discovery         bool
	Initiator, Target string // normalised iSCSI names; Target is empty in an unnamed discovery session
}

// A LoginOutcome is the result of a connection attempt, without anything that an initiator chooses:
// there are few different ones.
type LoginOutcome struct {
	Transport string // "iser" or "tcp"; empty if that was not decided
	Accepted  bool
	Stage     string // the stage that login was in: "before login", a login stage, or "mpa"
	Status    string // the status of a refusal; empty if the initiator was not told one
}

// loginCounts count outcomes. The zero value is ready.
type loginCounts struct {
	mu sync.Mutex // a leaf
	of map[LoginOutcome]uint64
}

func (l *loginCounts) count(o LoginOutcome) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.of == nil {
		l.of = map[LoginOutcome]uint64{}
	}
	l.of[o]++
}

// Logins returns how many connection attempts had each outcome since the start.
func (nd *Node) Logins() map[LoginOutcome]uint64 {
	nd.logins.mu.Lock()
	defer nd.logins.mu.Unlock()
	return maps.Clone(nd.logins.of)
}

// A LoginEvent is the outcome of one connection attempt.
type LoginEvent struct {
	LoginOutcome
	ConnAddr
	Session SessionName // of a refused login only the names, as far as the initiator has sent them
	ISID    [6]byte
	CID     uint16
	User    string // that CHAP has authenticated; may be empty
	Err     error  // why the login was refused
}

// A ConnectionEndedEvent is the end of a connection whose session continues.
type ConnectionEndedEvent struct {
	Ending
	CID uint16
}

// A SessionEndedEvent is the end of a session and of its last connection.
type SessionEndedEvent struct {
	Ending // its ConnAddr is of the last connection; zero if that ended earlier
}

// An Ending is the end of a connection or session.
type Ending struct {
	ConnAddr
	Session SessionName
	Reason  string
	Failed  bool          // neither side ended it on purpose
	Lasted  time.Duration // since the target accepted the connection, or since login
}

// A DataTimeoutEvent says that data of a command made no progress for limits.data_timeout.
type DataTimeoutEvent struct {
	ConnAddr
	Session SessionName
	LUN     uint16
	ITT     uint32
	Missing int // bytes that the target awaits
	Limit   time.Duration
	Ends    bool // the connection ends because of that, not the command alone
}

// Kind implements Event.
func (DataTimeoutEvent) Kind() string { return "session" }

// Kind implements Event.
func (LoginEvent) Kind() string { return "login" }

// Kind implements Event.
func (ConnectionEndedEvent) Kind() string { return "session" }

// Kind implements Event.
func (SessionEndedEvent) Kind() string { return "session" }

// Log writes e as one line with the attributes extra: a warning if the login was refused.
func (e LoginEvent) Log(l *slog.Logger, extra ...slog.Attr) {
	level, outcome := slog.LevelInfo, "accepted"
	attrs := append(e.ConnAddr.attrs(), extra...)
	if e.Err != nil {
		level, outcome = slog.LevelWarn, "refused"
	} else {
		attrs = append(append(attrs, e.Session.handle()...), slog.Int("cid", int(e.CID)))
		if e.User != "" {
			attrs = append(attrs, slog.String("user", e.User))
		}
	}
	attrs = append(attrs, slog.String("outcome", outcome), slog.String("stage", e.Stage))
	if e.Err != nil {
		attrs = append(attrs, slog.String("reason", e.Err.Error()))
		if e.Status != "" {
			attrs = append(attrs, slog.String("status", e.Status))
		}
	}
	attrs = append(append(attrs, e.Session.names()...), slog.String("isid", fmt.Sprintf("%x", e.ISID)))
	l.LogAttrs(context.Background(), level, "login", attrs...)
}

// Log writes e as one line with the attributes extra: a warning if the connection failed.
func (e ConnectionEndedEvent) Log(l *slog.Logger, extra ...slog.Attr) {
	e.log(l, "connection ended", append([]slog.Attr{slog.Int("cid", int(e.CID))}, extra...))
}

// Log writes e as one line with the attributes extra: a warning if the session failed.
func (e SessionEndedEvent) Log(l *slog.Logger, extra ...slog.Attr) {
	e.log(l, "session ended", extra)
}

// Log writes e as a warning of one line with the attributes extra.
func (e DataTimeoutEvent) Log(l *slog.Logger, extra ...slog.Attr) {
	ends := "command"
	if e.Ends {
		ends = "connection"
	}
	attrs := append(append(e.ConnAddr.attrs(), e.Session.handle()...), extra...)
	l.LogAttrs(context.Background(), slog.LevelWarn, "data of a command did not come", append(append(attrs, e.Session.names()...),
		slog.Int("lun", int(e.LUN)), slog.String("itt", fmt.Sprintf("%#x", e.ITT)), slog.Int("missing", e.Missing),
		slog.Duration("limit", e.Limit), slog.String("ends", ends))...)
}

func (e Ending) log(l *slog.Logger, text string, extra []slog.Attr) {
	level := slog.LevelInfo
	if e.Failed {
		level = slog.LevelWarn
	}
	attrs := append(append(e.ConnAddr.attrs(), e.Session.handle()...), extra...)
	l.LogAttrs(context.Background(), level, text, append(append(attrs, e.Session.names()...),
		slog.String("reason", e.Reason), slog.Duration("duration", e.Lasted.Round(time.Millisecond)))...)
}

func (a ConnAddr) attrs() []slog.Attr {
	attrs := make([]slog.Attr, 0, 14) // as many as the longest line has
	if a.Transport == "" {
		return attrs
	}
	return append(attrs, slog.String("transport", a.Transport),
		slog.String("remote", a.Remote.String()), slog.String("local", a.Local.String()))
}

func (n SessionName) handle() []slog.Attr {
	kind := "normal"
	if n.Discovery {
		kind = "discovery"
	}
	return []slog.Attr{slog.String("session", kind), slog.Int("tsih", int(n.TSIH))}
}

func (n SessionName) names() []slog.Attr {
	return []slog.Attr{slog.String("initiator", n.Initiator), slog.String("target", n.Target)}
}

// addr returns how events name c.
func (c *conn) addr() ConnAddr {
	return ConnAddr{c.dm.Transport(), c.dm.RemoteAddr(), c.dm.LocalAddr()}
}

// name returns how events name s.
func (s *session) name() SessionName {
	return SessionName{s.tsih, s.discovery, s.key.initiator, s.key.target}
}

// reportLogin counts the outcome of the login and reports it.
func (l *login) reportLogin(err error) {
	e := LoginEvent{
		LoginOutcome: LoginOutcome{Transport: l.conn.dm.Transport(), Accepted: err == nil, Stage: l.stage.String()},
		ConnAddr:     l.conn.addr(), Session: SessionName{Initiator: l.key.initiator, Target: l.key.target},
		ISID: l.first.ISID, CID: l.conn.cid, User: l.conn.params.CHAPName, Err: err,
	}
	switch {
	case l.count == 0:
		e.Stage = "before login"
	case err != nil && l.enabling:
		e.Stage = "mpa"
	}
	if err == nil {
		e.Session = l.conn.sess.name()
	}
	var refusal *loginError
	if errors.As(err, &refusal) {
		e.Status = refusal.status.String()
	}
	l.conn.node.logins.count(e.LoginOutcome)
	l.conn.opt.Events(e)
}

// reportEnd reports the end of c, or of its session if c was the last connection.
func (c *conn) reportEnd(last bool) {
	s, reason := c.sess, "logout"
	if c.reason != nil {
		reason = c.reason.Error()
	} else if s.discovery {
		reason = "discovery done"
	}
	failed := c.failed && !s.discovery
	if last {
		s.reportEnd(c.addr(), reason, failed)
		return
	}
	c.opt.Events(ConnectionEndedEvent{
		Ending{c.addr(), s.name(), reason, failed, time.Since(c.serveOptions.Accepted)}, c.cid,
	})
}

// reportEnd reports the end of s. addr names the last connection if s ended with it.
func (s *session) reportEnd(addr ConnAddr, reason string, failed bool) {
	s.node.opt.Load().Events(SessionEndedEvent{Ending{addr, s.name(), reason, failed, time.Since(s.started)}})
}
