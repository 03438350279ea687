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

// Start serves the control API of d on the addresses of c, from when d is ready until end is
// called. It returns an error if it cannot listen on one of them. If only the default
// socket cannot be used, it logs that and continues without.
func Start(d *daemon.Daemon, c config.Control, log *slog.Logger) (end func(), err error) {
	var (
		listeners []net.Listener
		proofs    *trust // nil: control.listen is not set
	)
	fail := func(key string, err error) (func(), error) {
		for _, l := range listeners {
			l.Close()
		}
		return nil, fmt.Errorf("%s: %w", key, err)
	}
	if c.Socket != "" {
		key := "control.socket"
		if os.Getenv(envSocket) == c.Socket {
			key += ", by " + envSocket // which overrides the file
		}
		l, err := Listen(c.Socket, c.SocketGroup, d.Listeners())
		switch {
		case err == nil:
			listeners = append(listeners, l)
		case c.Socket == config.DefaultSocket():
			log.Warn("target cannot be managed", "reason", err, "instead", anotherSocket(c.Socket))
		case errors.Is(err, ErrInUse):
			return fail(key, fmt.Errorf("%w: %s", err, anotherSocket(c.Socket)))
		default:
			return fail(key, err)
		}
	}
	if c.Listen != "" {
		l, t, err := listenTLS(c, d.Listeners(), log)
		if err != nil {
			return fail("control.listen", err)
		}
		listeners, proofs = append(listeners, l), t
	}
	s := NewServer(d, c)
	if proofs != nil {
		s.use(proofs)
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
			return fail("control.tls", err)
		}
		log.Info("control API", "address", portals{})
	} else if len(listeners) == 0 && c.Socket == "" {
		log.Info("control API is off", "reason", "control.socket, control.listen and control of portals are not set")
	}
	for _, l := range listeners {
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
