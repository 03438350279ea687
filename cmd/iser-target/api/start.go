package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
	"github.com/iser-target/iser-target/cmd/iser-target/handover"
	"github.com/iser-target/iser-target/cmd/iser-target/httpd"
	"github.com/iser-target/iser-target/config"
)

// envSocket is the environment variable that overrides control.socket.
const envSocket = "ISER_TARGET_CONTROL_SOCKET"

// endTime bounds the wait for requests in progress when the target ends.
const endTime = 5 * time.Second

// removeTime is what the removal of the control socket has beyond that: its file system may hang.
const removeTime = time.Second

// Sockets are what the control API listens on, besides portals.
type Sockets struct {
	control   config.Control
	log       *slog.Logger
	listeners []net.Listener
	proofs    *trust // nil: control.listen is not set
}

// Open listens on the addresses of c, on what another process has handed over if that is in open. It returns an error if it
// cannot listen on one of them. If only the default socket cannot be used, it logs that and continues without.
func Open(open *handover.Listeners, c config.Control, log *slog.Logger) (*Sockets, error) {
	s := &Sockets{control: c, log: log}
	fail := func(key string, err error) (*Sockets, error) {
		s.Close()
		return nil, fmt.Errorf("%s: %w", key, err)
	}
	if c.Socket != "" {
		key := "control.socket"
		if os.Getenv(envSocket) == c.Socket {
			key += ", by " + envSocket // which overrides the file
		}
		l, err := Listen(c.Socket, c.SocketGroup, open)
		switch {
		case err == nil:
			s.listeners = append(s.listeners, l)
		case c.Socket == config.DefaultSocket():
			log.Warn("target cannot be managed", "reason", err, "instead", anotherSocket(c.Socket))
		case errors.Is(err, ErrInUse):
			return fail(key, fmt.Errorf("%w: %s", err, anotherSocket(c.Socket)))
		default:
			return fail(key, err)
		}
	}
	if c.Listen != "" {
		l, t, err := listenTLS(c, open, log)
		if err != nil {
			return fail("control.listen", err)
		}
		s.listeners, s.proofs = append(s.listeners, l), t
	}
	return s, nil
}

// Close closes what Open has opened, if Serve does not serve it.
func (o *Sockets) Close() {
	for _, l := range o.listeners {
		l.Close()
	}
}

// Serve serves the control API of d from when d is ready until end is called. With an error it closes o.
func (o *Sockets) Serve(d *daemon.Daemon) (end func(), err error) {
	c, log := o.control, o.log
	s := NewServer(d, c)
	if o.proofs != nil {
		s.use(o.proofs)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	serve := func(l net.Listener, most int) {
		wg.Go(func() {
			select {
			case <-d.Ready():
			case <-stop:
				l.Close()
				return
			}
			if err := s.serve(l, most); err != nil {
				log.Error("control API ended", "address", l.Addr(), "reason", err)
			}
		})
	}
	m := &managers{s: s, tls: c.TLS, serve: func(l net.Listener) { serve(l, maxManagers) }}
	if d.Effective().ServesManagers() {
		if _, err := m.begin(); err != nil {
			o.Close()
			return nil, fmt.Errorf("control.tls: %w", err)
		}
		log.Info("control API", "address", portals{})
	} else if len(o.listeners) == 0 && c.Socket == "" {
		log.Info("control API is off", "reason", "control.socket, control.listen and control of portals are not set")
	}
	for _, l := range o.listeners {
		log.Info("control API", "address", l.Addr())
		serve(l, maxConnections)
	}
	d.ServeManagers(m.take)
	return sync.OnceFunc(func() {
		m.end()
		close(stop)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			ctx, cancel := context.WithTimeout(context.Background(), endTime)
			defer cancel()
			if err := s.Shutdown(ctx); err != nil {
				log.Warn("requests of the control API were cut off", "reason", err)
			}
			wg.Wait()
		}()
		select {
		case <-ended:
		case <-time.After(endTime + removeTime):
			log.Warn("control socket was not removed", "reason", "its file system does not answer", "socket", c.Socket)
		}
	}), nil
}

// anotherSocket returns how to configure a second target on this machine.
func anotherSocket(taken string) string {
	return fmt.Sprintf("set control.socket in its configuration, or %s, to a path of its own, like %s, "+
		"and give it to the commands with --socket", envSocket, strings.TrimSuffix(taken, ".sock")+"-2.sock")
}

// listenTLS listens for clients that authenticate with a certificate (RFC 8446, section 4.4).
func listenTLS(c config.Control, open *handover.Listeners, log *slog.Logger) (net.Listener, *trust, error) {
	t, err := newTrust(c.TLS, log)
	if err != nil {
		return nil, nil, err
	}
	l, _, err := open.Listen("control.listen", func() (net.Listener, error) { return net.Listen("tcp", c.Listen) })
	if err != nil {
		return nil, nil, err
	}
	return httpd.TLS(l, t.serverConfig(), log), t, nil
}
