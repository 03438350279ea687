package httpd

import (
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
)

// Guard returns next for requests that name the server by an address or as localhost, if they come over the
// loopback. Otherwise a foreign name that resolves to the loopback (DNS rebinding) would let a foreign page
// read the answers with the browser of somebody on this machine.
func Guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if local(r) && !IsAddress(r.Host) {
			http.Error(w, "use localhost or an address as the name of this server", http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// local reports whether r came to an address of the loopback.
func local(r *http.Request) bool {
	a, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if a == nil {
		return false
	}
	ap, err := netip.ParseAddrPort(a.String())
	return err == nil && ap.Addr().Unmap().IsLoopback()
}

// IsAddress reports whether host, with or without a port, is an address or localhost.
func IsAddress(host string) bool {
	u := url.URL{Host: host}
	name := u.Hostname()
	if strings.EqualFold(name, "localhost") {
		return true
	}
	_, err := netip.ParseAddr(name)
	return err == nil
}
