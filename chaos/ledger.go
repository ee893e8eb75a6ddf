package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// This file answers: what did the processes set out to do, and what came of it?
//
// Each process appends lines to a file of its own, outside the database: what it is about to do before it
// calls the library, and what came of it after. Every line is handed to the system before the next step is
// taken, so kill -9 takes back none of it. A step without an outcome is one whose outcome is unknown.

// What a line says. An enqueue is sending, then sent, revoked or nothing. A delivery is got, then acking or
// returning, then acked, returned, refused or nothing.
const (
	sending   = "sending"   // an enqueue is about to be called
	sent      = "sent"      // it returned without an error
	revoked   = "revoked"   // its transaction was rolled back
	got       = "got"       // a claim is in hand
	acking    = "acking"    // the ack of a claim is about to be called
	returning = "returning" // so is abandon
	acked     = "acked"     // the ack returned without an error
	returned  = "returned"  // abandon did
	refused   = "refused"   // ack or abandon returned ErrLockLost
	renewed   = "renewed"   // the lease was made longer
	wrong     = "wrong"     // something that must not happen, in Err
	erred     = "erred"     // a call that began at Since failed, which must not happen in a calm
)

// entry is a line. Key is the name of an item or message, chosen by whoever sends it and carried inside.
type entry struct {
	At   time.Time `json:"at"`
	What string    `json:"what"`
	Key  string    `json:"key,omitempty"`

	// An enqueue, and Session.
	Instance string        `json:"instance,omitempty"` // of a message; "" for a work item
	Do       string        `json:"do,omitempty"`       // what the handler is to do
	Delay    time.Duration `json:"delay,omitempty"`
	Dedup    string        `json:"dedup,omitempty"` // namespace and dedup key

	// Its outcome, and what is in hand.
	ID        int64     `json:"id,omitempty"`
	Duplicate bool      `json:"duplicate,omitempty"`
	Due       time.Time `json:"due,omitzero"`

	// A delivery.
	Namespace string `json:"namespace,omitempty"`
	Tag       string `json:"tag,omitempty"`
	Session   string `json:"session,omitempty"`

	Token string    `json:"token,omitempty"`
	Until time.Time `json:"until,omitzero"` // end of the lease when it was claimed, by the machine's clock

	Err   string    `json:"err,omitempty"`
	Since time.Time `json:"since,omitzero"`

	Graph *graphLine `json:"graph,omitempty"` // of a task (graphs.go)
	Bus   *busLine   `json:"bus,omitempty"`   // of an event (bus.go)

	process string // whose line it is, such as "node-2-1"
}

// ledger is the file of one process.
type ledger struct{ file *os.File }

func openLedger(path string) (*ledger, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	return &ledger{f}, err
}

// write appends lines in one write(2), all marked with what happened. Without a ledger nothing can be
// checked, so an error ends the process.
func (l *ledger) write(what string, entries ...entry) {
	var lines bytes.Buffer
	for _, e := range entries {
		e.What, e.At = what, time.Now()
		line, err := json.Marshal(e)
		if err != nil {
			panic(err)
		}
		lines.Write(append(line, '\n'))
	}
	if _, err := l.file.Write(lines.Bytes()); err != nil {
		panic(err)
	}
}

// readLedgers returns the lines of all processes; each file's in their order.
func readLedgers(dir string) ([]entry, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.ledger"))
	if err != nil {
		return nil, err
	}
	var all []entry
	for _, path := range files {
		process := strings.TrimSuffix(filepath.Base(path), ".ledger")
		if all, err = readLedger(all, path, process); err != nil {
			return nil, err
		}
	}
	return all, nil
}

func readLedger(all []entry, path, process string) ([]entry, error) {
	r, err := followLedger(path, process)
	if err != nil {
		return nil, err
	}
	defer r.file.Close()
	return r.readOn(all)
}

// ledgerReader reads a ledger that may still be written.
type ledgerReader struct {
	process string
	file    *os.File
	lines   *bufio.Reader
	begun   []byte // of a line whose end is not there yet
}

func followLedger(path, process string) (*ledgerReader, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	return &ledgerReader{process: process, file: f, lines: bufio.NewReader(f)}, nil
}

// readOn appends the lines that have come since the last time. A line that never gets an end was cut off by kill -9,
// and what it says was never begun.
func (r *ledgerReader) readOn(all []entry) ([]entry, error) {
	for {
		line, err := r.lines.ReadBytes('\n')
		r.begun = append(r.begun, line...)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		e := entry{process: r.process}
		if err := json.Unmarshal(r.begun, &e); err != nil {
			return nil, fmt.Errorf("%s: %w", r.file.Name(), err)
		}
		all, r.begun = append(all, e), r.begun[:0]
	}
}
