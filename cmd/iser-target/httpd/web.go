package httpd

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/exporter-toolkit/web"
	"go.yaml.in/yaml/v3"
	"golang.org/x/crypto/bcrypt"
)

// maxWeb is the limit of a web configuration file, in bytes.
const maxWeb = 1 << 20

// maxCost is the highest cost of a bcrypt hash. A login takes 2^cost rounds, about 2 s at 15.
const maxCost = 15

// A Web is TLS and login for a server, by a web configuration file of Prometheus exporters. The
// file is read again for each request and each TLS connection. A nil *Web has neither.
type Web struct {
	file   string
	tls    *tls.Config // nil: no TLS
	secure http.Handler
	next   http.Handler // that secure passes requests on to
	log    *slog.Logger

	expiries expiries
}

// NewWeb returns TLS and login by a web configuration file. An empty file name returns nil. Errors
// name the file, the key and the reason, as those of CheckWeb do. Requests that fail because the file is bad
// are logged, at most once per second.
func NewWeb(file string, log *slog.Logger) (*Web, error) {
	if file == "" {
		return nil, nil
	}
	if err := CheckWeb(file); err != nil {
		return nil, err
	}
	w := &Web{file: file, log: log}
	// web.Serve sets the handler and TLS of a server up, and then serves until its listener ends.
	s := &http.Server{
		Handler:   http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { w.next.ServeHTTP(rw, r) }),
		Protocols: new(http.Protocols),
	}
	s.Protocols.SetHTTP1(true)
	quiet := slog.New(&seldom{Handler: log.With("web_config", file).Handler()})
	if err := web.Serve(ended{}, s, &web.FlagConfig{WebConfigFile: &file}, quiet); !errors.Is(err, errEnded) {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	w.tls, w.secure = s.TLSConfig, s.Handler
	return w, nil
}

// CheckWeb returns what is wrong with a web configuration file, and with the certificates, keys and
// hashes in it. The error names the file, and the key if the reason is that of one.
func CheckWeb(file string) error {
	c, err := readWeb(file)
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(c.Users)) {
		hash := c.Users[name]
		cost, err := bcrypt.Cost([]byte(hash))
		if err != nil {
			return fmt.Errorf("%s: basic_auth_users.%s: not a bcrypt hash, like the output of htpasswd -nBC 10 %s: %w", file, name, name, err)
		}
		if cost > maxCost {
			return fmt.Errorf("%s: basic_auth_users.%s: has cost %d, and each login would take seconds. Use a cost of at most %d", file, name, cost, maxCost)
		}
	}
	t := &c.TLSConfig
	for _, ca := range []struct{ key, pem string }{{"client_ca", t.ClientCAsText}, {"client_ca_file", t.ClientCAs}} {
		if ca.pem == "" {
			continue
		}
		b := []byte(ca.pem)
		if ca.key == "client_ca_file" {
			if b, err = os.ReadFile(ca.pem); err != nil {
				return fmt.Errorf("%s: tls_server_config.%s: %w", file, ca.key, err)
			}
		}
		if !x509.NewCertPool().AppendCertsFromPEM(b) {
			return fmt.Errorf("%s: tls_server_config.%s: has no certificate in PEM", file, ca.key)
		}
	}
	if t.IsEnabled() {
		if _, err := web.ConfigToTLSConfig(t); err != nil {
			return fmt.Errorf("%s: tls_server_config: %w", file, err)
		}
	}
	if err := web.Validate(file); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return nil
}

// WebFiles returns a web configuration file and the files that it names.
func WebFiles(file string) ([]string, error) {
	c, err := readWeb(file)
	if err != nil {
		return nil, err
	}
	files := []string{file}
	for _, f := range []string{c.TLSConfig.TLSCertPath, c.TLSConfig.TLSKeyPath, c.TLSConfig.ClientCAs} {
		if f != "" {
			files = append(files, f)
		}
	}
	return files, nil
}

// readWeb reads a web configuration file. Unknown keys are found by web.Validate.
func readWeb(file string) (*web.Config, error) {
	b, err := readLimited(file)
	if err != nil {
		return nil, err
	}
	c := &web.Config{}
	if err := yaml.Unmarshal(b, c); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	c.TLSConfig.SetDirectory(filepath.Dir(file))
	return c, nil
}

// Scheme returns the scheme of the URL of the server.
func (w *Web) Scheme() string {
	if w == nil || w.tls == nil {
		return "http"
	}
	return "https"
}

// Listen returns l, with TLS if the file configures it.
func (w *Web) Listen(l net.Listener) net.Listener {
	if w == nil || w.tls == nil {
		return l
	}
	return TLS(l, w.tls, w.log)
}

// Handler returns next for requests that the file lets in. It is called once, before the server runs.
func (w *Web) Handler(next http.Handler) http.Handler {
	if w == nil {
		return next
	}
	w.next = next
	return w.secure
}

// ended is a listener that ended.
type ended struct{}

var errEnded = errors.New("the listener ended")

func (ended) Accept() (net.Conn, error) { return nil, errEnded }
func (ended) Close() error              { return nil }
func (ended) Addr() net.Addr            { return &net.TCPAddr{} }

// seldom passes on errors, at most one every reportEvery. Clients without login must not be
// able to fill the disk of the log.
type seldom struct {
	slog.Handler
	mu   sync.Mutex
	last time.Time
}

// Enabled implements slog.Handler.
func (s *seldom) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelError }

// Handle implements slog.Handler.
func (s *seldom) Handle(ctx context.Context, r slog.Record) error {
	s.mu.Lock()
	if r.Time.Sub(s.last) < reportEvery {
		s.mu.Unlock()
		return nil
	}
	s.last = r.Time
	s.mu.Unlock()
	return s.Handler.Handle(ctx, r)
}
