// Package nbduri parses URIs of exports of NBD.
package nbduri

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
)

// An Address says where an export is.
type Address struct {
	Network string // tcp or unix
	Host    string // HOST:PORT, or the path of a socket
	Export  string // name of the export; may be empty
	TLS     bool   // required
	// Certificates is a directory with ca-cert.pem, and client-cert.pem and client-key.pem if the server asks for a certificate. Empty: the
	// authorities of the system.
	Certificates string
	ServerName   string // in the certificate of the server
}

const (
	defaultPort = "10809"
	maxExport   = 4096 // bytes of a string of the protocol
	maxSocket   = 107  // the length of sun_path without its NUL (unix(7))
)

// Parse parses a URI of an export (https://github.com/NetworkBlockDevice/nbd/blob/master/doc/uri.md): nbd://HOST[:PORT]/EXPORT, or
// nbd+unix:///EXPORT?socket=PATH. With nbds and nbds+unix the connection must have TLS; tls-certificates names the directory of certificates, and tls-hostname
// the name of the server.
func Parse(s string) (*Address, error) {
	u, err := url.Parse(s)
	if err != nil {
		return nil, errors.New("not a URI like nbd://HOST/EXPORT or nbd+unix:///EXPORT?socket=PATH")
	}
	a := &Address{}
	switch u.Scheme {
	case "nbd", "nbds":
		a.Network = "tcp"
	case "nbd+unix", "nbds+unix":
		a.Network = "unix"
	default:
		return nil, errors.New("not a URI like nbd://HOST/EXPORT or nbd+unix:///EXPORT?socket=PATH")
	}
	a.TLS = strings.HasPrefix(u.Scheme, "nbds")
	if u.User != nil || u.Fragment != "" || u.Opaque != "" {
		return nil, errors.New("a URI of NBD has no user and no fragment")
	}
	a.Export = strings.TrimPrefix(u.Path, "/")
	if len(a.Export) > maxExport || strings.ContainsRune(a.Export, 0) {
		return nil, fmt.Errorf("the name of the export has more than %d bytes, or a NUL", maxExport)
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return nil, fmt.Errorf("parameters of the URI: %w", err)
	}
	known := []string{"socket", "tls-certificates", "tls-hostname"}
	for name, values := range query {
		switch {
		case !slices.Contains(known, name):
			return nil, fmt.Errorf("parameter %q of the URI: must be one of %s", name, strings.Join(known, ", "))
		case len(values) > 1:
			return nil, fmt.Errorf("parameter %q of the URI occurs twice", name)
		case values[0] == "":
			return nil, fmt.Errorf("parameter %q of the URI is empty", name)
		case strings.HasPrefix(name, "tls-") && !a.TLS:
			return nil, fmt.Errorf("parameter %q of the URI requires nbds or nbds+unix", name)
		}
	}
	a.Certificates, a.ServerName = query.Get("tls-certificates"), query.Get("tls-hostname")
	if a.Certificates != "" && !filepath.IsAbs(a.Certificates) {
		return nil, errors.New("tls-certificates: must be an absolute path")
	}
	socket := query.Get("socket")
	if a.Network == "unix" {
		if u.Host != "" || socket == "" || !filepath.IsAbs(socket) || len(socket) > maxSocket {
			return nil, fmt.Errorf("%s: needs ///EXPORT, and ?socket= with an absolute path of up to %d bytes", u.Scheme, maxSocket)
		}
		a.Host = socket
		if a.TLS && a.ServerName == "" {
			a.ServerName = "localhost"
		}
		return a, nil
	}
	if socket != "" {
		return nil, fmt.Errorf("parameter %q of the URI requires nbd+unix or nbds+unix", "socket")
	}
	host, port := u.Hostname(), u.Port()
	if host == "" {
		return nil, errors.New("the URI has no host")
	}
	if port == "" {
		port = defaultPort
	}
	if n, err := net.LookupPort("tcp", port); err != nil || n == 0 {
		return nil, fmt.Errorf("port %s: must be 1 to 65535", port)
	}
	a.Host = net.JoinHostPort(host, port)
	if a.ServerName == "" {
		a.ServerName = host
	}
	return a, nil
}

// Paths returns the socket and the directory of certificates, where there are any.
func (a *Address) Paths() (list []string) {
	if a.Network == "unix" {
		list = append(list, a.Host)
	}
	if a.Certificates != "" {
		list = append(list, a.Certificates)
	}
	return list
}
