package console

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"path"
	"strings"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/glance"
)

// This file answers: how does a request become a page?

// Handler returns the console of a Provider, to be mounted at any path: with http.StripPrefix, and a pattern that ends with a slash. It owns
// nothing that has to be closed: what it does in the background it does while pages are open, and it ends with their requests. Safe for
// concurrent use.
func Handler(p *pgwake.Provider, o *Options) http.Handler {
	if o == nil {
		o = &Options{}
	}
	c := &console{p: p, o: *o, hub: newHub(p), streams: make(chan struct{}, defaultStreams),
		turns: make(chan struct{}, turnsOf(p.Pool().Config().MaxConns))}
	if o.MaxStreams > 0 {
		c.streams = make(chan struct{}, o.MaxStreams)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /assets/", serveAsset)
	mux.HandleFunc("GET /stream/{page}", c.stream)
	mux.HandleFunc("GET /{$}", c.page(overviewPage))
	for name, page := range pages {
		if page != overviewPage {
			mux.HandleFunc("GET /"+name, c.page(page))
		}
	}
	mux.Handle("POST /act", http.NewCrossOriginProtection().Handler(http.HandlerFunc(c.act)))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		c.fail(w, r, http.StatusNotFound, errors.New("there is no such page"))
	})
	if o.Local {
		return secured(onlyLocal(mux))
	}
	return secured(mux)
}

// console is what the pages of one Handler share.
type console struct {
	p       *pgwake.Provider
	o       Options
	hub     *hub
	streams chan struct{} // as many as pages are live
	turns   chan struct{} // as many as ask the database
}

// policy lets a page load nothing but what the console itself serves, and nobody frame it.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; " +
	"frame-ancestors 'none'; base-uri 'none'"

// secured sets what holds for every answer.
func secured(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Referrer-Policy", "same-origin")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		h.Set("X-Accel-Buffering", "no") // nginx would collect what is sent bit by bit
		if r.URL.Path == "" {            // the path that it is mounted at, without the slash that links need
			whole, _, _ := strings.Cut(r.RequestURI, "?")
			h.Set("Location", "./"+url.PathEscape(path.Base(whole))+"/")
			w.WriteHeader(http.StatusTemporaryRedirect)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// patience is how long a page may take to be made.
const patience = 10 * time.Second

func statusOf(err error) int {
	switch {
	case errors.Is(err, pgwake.ErrNotFound):
		return http.StatusNotFound
	case errors.Is(err, errStale):
		return http.StatusConflict
	case errors.Is(err, pgwake.ErrInvalid), errors.Is(err, errBadRequest):
		return http.StatusBadRequest
	case errors.Is(err, pgwake.ErrPermission): // of the role that the console works as
		return http.StatusForbidden
	case errors.Is(err, pgwake.ErrClosed), errors.Is(err, context.DeadlineExceeded):
		return http.StatusServiceUnavailable
	}
	return http.StatusBadGateway // the database
}

// errBadRequest is what is wrong with a request itself.
var errBadRequest = errors.New("the request cannot be understood")

func badRequest(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errBadRequest, fmt.Sprintf(format, args...))
}

// whole serves all of a page, or what went wrong with it.
func (c *console) whole(w http.ResponseWriter, r *http.Request, v *view, body any, err error) {
	var d *download
	switch {
	case errors.As(err, &d):
		d.serve(w)
	case err != nil:
		c.fail(w, r, statusOf(err), err)
	default:
		v.Body = body
		c.write(w, http.StatusOK, v)
	}
}

// fail serves an error as a page.
func (c *console) fail(w http.ResponseWriter, r *http.Request, status int, err error) {
	c.write(w, status, c.failed(r, status, err))
}

// failed is an error as a page.
func (c *console) failed(r *http.Request, status int, err error) *view {
	v := c.view(r, failedPage)
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("there was no answer in time; where there is much to be looked through, ask for less: %w", err)
	}
	v.Title, v.Body = http.StatusText(status), glance.Short(err.Error(), 2000)
	return v
}

// write renders a page and sends it, whole or not at all.
func (c *console) write(w http.ResponseWriter, status int, v *view) {
	var b bytes.Buffer
	if err := v.page.templates.ExecuteTemplate(&b, "layout", v); err != nil {
		http.Error(w, "the page could not be rendered: "+glance.Short(err.Error(), 500), http.StatusInternalServerError)
		return
	}
	asPage(w, status)
	_, _ = b.WriteTo(w) // whoever has gone needs it no more
}

func asPage(w http.ResponseWriter, status int) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
}
