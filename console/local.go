package console

import (
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// This file answers: who is at this machine, and nowhere else?

// onlyLocal refuses requests that come from elsewhere, and those that name another host: they are of a page of somebody else, whose name has
// been made to lead here, and for which a browser takes the console for that site's own.
func onlyLocal(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !arrivedHere(r) || !namesHere(r.Host) {
			http.Error(w, "this is served to this machine only", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// arrivedHere reports whether a request was sent to a loopback address. No server says so of one that came by something else than TCP.
func arrivedHere(r *http.Request) bool {
	at, tcp := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	return !tcp || at.IP.IsLoopback()
}

// namesHere reports whether a Host is this machine.
func namesHere(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil { // there is no port
		name = strings.Trim(host, "[]")
	}
	ip, err := netip.ParseAddr(name)
	return strings.EqualFold(name, "localhost") || err == nil && ip.IsLoopback()
}
