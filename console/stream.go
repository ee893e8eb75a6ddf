package console

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"hash/maphash"
	"io"
	"net/http"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/glance"
)

// This file answers: how does a page that is open stay up to date? By server-sent events, each of which is what is live on it, as HTML.

const (
	heartbeat = 15 * time.Second // also for whatever is in between and ends what is silent

	// ownPace is for each statement that a page takes which is loaded for itself, so that it sends two a second at most, with those of the hub.
	ownPace = 600 * time.Millisecond
)

// stream serves the changes of a page until whoever looks has gone.
func (c *console) stream(w http.ResponseWriter, r *http.Request) {
	of, known := pages[r.PathValue("page")]
	if !known || !of.hub && of.statements == 0 {
		c.fail(w, r, http.StatusNotFound, errors.New("there is nothing live of that name"))
		return
	}
	switch r.Header.Get("Sec-Fetch-Site") {
	case "", "none", "same-origin":
	default: // a page of another site could not read it, and would cost as much
		http.Error(w, "this is for pages of the console", http.StatusForbidden)
		return
	}
	if r.Method == http.MethodHead {
		w.Header().Set("Content-Type", "text/event-stream")
		return
	}
	select {
	case c.streams <- struct{}{}:
		defer func() { <-c.streams }()
	default:
		w.Header().Set("Retry-After", "30")
		http.Error(w, "too many pages are open", http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	s := &streaming{w: w, to: http.NewResponseController(w), seed: maphash.MakeSeed()}
	if s.event("hello", "") != nil {
		return
	}
	if of.hub {
		c.followHub(s, r, of)
	} else {
		c.followOwn(s, r, of)
	}
}

// followHub sends the page anew at each moment of the hub.
func (c *console) followHub(s *streaming, r *http.Request, of *page) {
	bell, end := c.hub.watch(true)
	defer end()
	beat := time.NewTicker(heartbeat)
	defer beat.Stop()
	for {
		var err error
		select {
		case <-r.Context().Done():
			return
		case <-bell:
			err = c.refresh(s, r, of)
		case <-beat.C:
			err = s.comment()
		}
		if err != nil {
			return
		}
	}
}

// followOwn loads the page again and again, as long as things happen.
func (c *console) followOwn(s *streaming, r *http.Request, of *page) {
	bell, end := c.hub.watch(false)
	defer end()
	beat := time.Now()
	for r.Context().Err() == nil {
		began := time.Now()
		if err := c.refresh(s, r, of); err != nil {
			return
		}
		c.hub.wait(r.Context(), bell, began, time.Duration(of.statements)*ownPace)
		if time.Since(beat) > heartbeat {
			if s.comment() != nil {
				return
			}
			beat = time.Now()
		}
	}
}

// refresh sends what is live on a page, if it has changed. An error of the database is told, and does not end the stream; one of the stream does.
func (c *console) refresh(s *streaming, r *http.Request, of *page) error {
	ctx, cancel := context.WithTimeout(r.Context(), patience)
	defer cancel()
	v := c.view(r.WithContext(ctx), of)
	v.Live = true
	var err error
	if v.Body, err = c.ask(v); err != nil {
		if r.Context().Err() != nil || errors.Is(err, pgwake.ErrClosed) {
			return err
		}
		return s.send("trouble", glance.Short(err.Error(), 300))
	}
	var b bytes.Buffer
	if err := of.templates.ExecuteTemplate(&b, "live", v); err != nil {
		return s.send("trouble", glance.Short(err.Error(), 300))
	}
	return s.send("live", b.String())
}

// streaming is one stream.
type streaming struct {
	w    io.Writer
	to   *http.ResponseController
	seed maphash.Seed
	last uint64 // hash of what was sent last
}

// stalled is how long a client may take to accept something before it is taken for gone.
const stalled = 20 * time.Second

// send sends an event, unless it is the same as the one before.
func (s *streaming) send(event, text string) error {
	hash := maphash.String(s.seed, event+"\x00"+text)
	if hash == s.last {
		return nil
	}
	s.last = hash
	return s.event(event, text)
}

func (s *streaming) event(event, text string) error {
	b := bytes.NewBufferString("event: " + event + "\ndata: ")
	data := json.NewEncoder(b) // one line, whatever is in it
	data.SetEscapeHTML(false)  // it is no part of a page, and tags would be six times as long
	if err := data.Encode(text); err != nil {
		return err
	}
	return s.write(b.String() + "\n")
}

func (s *streaming) comment() error { return s.write(": still here\n\n") }

func (s *streaming) write(text string) error {
	if err := s.to.SetWriteDeadline(time.Now().Add(stalled)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	if _, err := io.WriteString(s.w, text); err != nil {
		return err
	}
	return s.to.Flush()
}
