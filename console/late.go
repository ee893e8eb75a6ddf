package console

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"time"
)

// This file answers: what is there to be seen of a page while the database searches for what it is to show?
//
// A page at once that says so, and leads to the one that waits. The search goes on meanwhile, and is not begun twice, however often somebody reloads.

// firstPaint is how long a page is waited for before there is one that says so.
const firstPaint = 140 * time.Millisecond

// loads are those that take long.
type loads struct {
	mu  sync.Mutex
	all map[string]*loading // by page and parameters
}

// loading is a page on its way.
type loading struct {
	began time.Time
	done  chan struct{} // closed when it has come
	body  any
	title string
	err   error
	panic any // of a hook
}

// load loads what a page shows, or the link to where that will be.
func (c *console) load(v *view, h http.Header) (any, error) {
	if v.page.statements == 0 || v.Value("download") != "" {
		return v.page.load(v)
	}
	waits := v.Value(waitParam) != "" || !strings.Contains(v.r.Header.Get("Accept"), "text/html") // no browser
	l, forget := c.loads.join(v, waits)
	enough := time.NewTimer(firstPaint)
	defer enough.Stop()
	for {
		select {
		case <-l.done:
			forget()
			if l.panic != nil {
				panic(l.panic) // where the server expects it
			}
			v.Title = l.title
			return l.body, l.err
		case <-v.r.Context().Done():
			return nil, v.r.Context().Err()
		case <-enough.C:
			if waits {
				continue
			}
			q := v.r.URL.Query() // also with what came of an action
			q.Set(waitParam, "1")
			to := v.page.name + "?" + q.Encode()
			h.Set("Refresh", "0; url="+to)
			v.page = latePage
			return to, nil
		}
	}
}

// join returns the load that a view needs: one that takes long already or, for who waits, any that is under way, and else a new one. forget has the next
// one begin anew.
func (l *loads) join(v *view, waits bool) (_ *loading, forget func()) {
	key := v.page.name + "?" + v.lasting().Encode()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all == nil {
		l.all = make(map[string]*loading)
	}
	of := l.all[key]
	if of == nil || !waits && time.Since(of.began) < firstPaint {
		of = &loading{began: time.Now(), done: make(chan struct{})}
		l.all[key] = of
		go of.run(*v, func() { time.AfterFunc(patience, func() { l.forget(key, of) }) })
	}
	return of, func() { l.forget(key, of) }
}

func (l *loads) forget(key string, of *loading) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all[key] == of {
		delete(l.all, key)
	}
}

// run loads the page for whoever waits for it then.
func (of *loading) run(v view, ended func()) {
	defer ended()
	defer close(of.done)
	defer func() { of.panic = recover() }()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(v.r.Context()), patience)
	defer cancel()
	v.r = v.r.WithContext(ctx)
	body, err := v.page.load(&v)
	of.body, of.title, of.err = body, v.Title, err
}
