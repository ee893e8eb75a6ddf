package console

import (
	"bytes"
	"context"
	"html/template"
	"net/http"
	"strings"
	"time"

	"github.com/pgwake/pgwake/internal/glance"
)

// This file answers: what is there to be seen of a page while the database searches for what it is to show?
//
// Its head and the navigation, which are sent before; what is found follows in the same answer. So a browser has style and script by then, and a search
// ends with the request that wants it.
//
// Invariant: pages take no more than half of the connections of the pool, however many are open and however long that takes: what the program itself
// does goes on.

// soon is how long a page is waited for before its head is sent. Until then an answer has the status that it should have.
const soon = 50 * time.Millisecond

// loading is a page on its way.
type loading struct {
	done  chan struct{} // closed when it has come
	body  any
	err   error
	panic any // of a hook
}

// ask loads what a page shows, when it is its turn.
func (c *console) ask(v *view) (any, error) {
	if v.page.hub { // what is known already
		return v.page.load(v)
	}
	ctx := v.r.Context()
	select {
	case c.turns <- struct{}{}:
		defer func() { <-c.turns }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return v.page.load(v)
}

// turnsOf is how many pages may ask at the same time, of a pool of so many connections.
func turnsOf(conns int32) int { return int(max(1, conns/2)) }

// begin begins to load what a page shows.
func (c *console) begin(v *view) *loading {
	l := &loading{done: make(chan struct{})}
	go func() {
		defer close(l.done)
		defer func() { l.panic = recover() }()
		l.body, l.err = c.ask(v)
	}()
	return l
}

// within reports whether it has come in time.
func (l *loading) within(d time.Duration) bool {
	enough := time.NewTimer(d)
	defer enough.Stop()
	select {
	case <-l.done:
		return true
	case <-enough.C:
		return false
	}
}

// end waits until it has come, or was given up, and returns what a page shows. A panic is where the server expects it.
func (l *loading) end() (any, error) {
	<-l.done
	if l.panic != nil {
		panic(l.panic)
	}
	return l.body, l.err
}

// paints reports whether whoever asks shows the beginning of a page before all of it is there. Others go by the status of the answer.
func paints(r *http.Request) bool {
	return strings.Contains(r.Header.Get("Accept"), "text/html") && r.URL.Query().Get("download") == ""
}

// page serves a page.
func (c *console) page(of *page) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), patience)
		defer cancel()
		v := c.view(r.WithContext(ctx), of)
		l := c.begin(v)
		if !paints(r) || l.within(soon) {
			body, err := l.end()
			c.whole(w, r, v, body, err)
			return
		}
		writeTop(w, c.view(r, of)) // v is of whoever loads it
		body, err := l.end()
		if v.Body = body; err != nil {
			v = c.failed(r, statusOf(err), err)
		}
		writeRest(w, v)
	}
}

// writeTop sends what there is of a page before all else is known.
func writeTop(w http.ResponseWriter, v *view) {
	v.Early = true
	asPage(w, http.StatusOK)
	if v.page.templates.ExecuteTemplate(w, "top", v) == nil {
		_ = http.NewResponseController(w).Flush() // where that cannot be, it comes with the rest
	}
}

// writeRest sends the rest of it.
func writeRest(w http.ResponseWriter, v *view) {
	var b bytes.Buffer
	if err := v.page.templates.ExecuteTemplate(&b, "rest", v); err != nil {
		b.Reset()
		b.WriteString(template.HTMLEscapeString("the page could not be rendered: " + glance.Short(err.Error(), 500)))
	}
	_, _ = b.WriteTo(w) // whoever has gone needs it no more
}
