package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"
)

// This file answers: how does the parent start, stop and end the processes?

// node is a member of the deployment. Its processes come and go, one at a time; its ways stay.
type node struct {
	index        int
	role         string
	user         string // that its processes connect as
	conditions   conditions
	seed         uint64
	nodes        int
	dir          string
	pool, listen *way   // nil: straight to the server
	address      string // of the server
	plant        []string
	rest         float64 // see order

	mu         sync.Mutex // one fault at a time
	generation int
	process    *process
	silenced   bool // connections of the process's pool have lost their peer, and it may not have noticed
}

func (n *node) String() string { return fmt.Sprintf("node %d (%s)", n.index, n.role) }

// name is what the server knows the connections of a way as.
func (n *node) name(way string) string { return fmt.Sprintf("chaos-%d-%s", n.index, way) }

func (n *node) url(way string, through *way) string {
	host := n.address
	if through != nil {
		host = through.address()
	}
	u := url.URL{Scheme: "postgres", User: url.User(cmp.Or(n.user, "postgres")), Host: host, Path: "/postgres"}
	u.RawQuery = url.Values{"sslmode": {"disable"}, "application_name": {n.name(way)}, "connect_timeout": {"5"}}.Encode()
	return u.String()
}

// process is one life of a node.
type process struct {
	name     string
	started  time.Time
	cmd      *exec.Cmd
	commands io.WriteCloser // its end ends the process
	ready    chan struct{}  // closed when it has opened its Provider, and then this may be read:
	readyAt  time.Time
	gone     chan struct{} // closed when it has ended; then the rest may be read
	err      error
	bye      *farewell
	vitals   chan vitals // answers to "sample"
}

// poolSize is that of a node. One that soaks has all connections from the beginning, so that their number does not grow; those of the
// layers have more handlers than others, each with statements of its own. Pools are small, because all of them connect again at once
// after a restart: where a new backend costs a small machine 50 ms of processor time, a hundred take it more than the 5 s of the bound.
func poolSize(role string) int {
	switch role {
	case soaker:
		return 12
	case dispatcher: // as dispatch.Config.Begin has it
		return placesOfEach + 4
	case engine, busNode:
		return 4
	}
	return 3
}

// poolURL is that of the pools of the node.
func (n *node) poolURL() string {
	u := fmt.Sprintf("%s&pool_max_conns=%d", n.url("pool", n.pool), poolSize(n.role))
	if n.role == soaker {
		u += fmt.Sprintf("&pool_min_conns=%d", poolSize(n.role))
	}
	return u
}

// start begins the node's next life.
func (n *node) start() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	o := order{
		Node: n.index, Generation: n.generation, Nodes: n.nodes, Role: n.role, Seed: n.seed, Plant: n.plant, Rest: n.rest,
		PoolURL: n.poolURL(), ListenURL: n.url("listen", n.listen),
	}
	o.Ahead, o.Skew = n.conditions.ahead, n.conditions.skew(&o)
	n.generation++
	p := &process{name: o.process(), started: time.Now(), ready: make(chan struct{}), gone: make(chan struct{}), vitals: make(chan vitals, 1)}
	o.Ledger = filepath.Join(n.dir, p.name+".ledger")
	text, err := json.Marshal(o)
	if err != nil {
		return err
	}
	logFile, err := os.Create(filepath.Join(n.dir, p.name+".log"))
	if err != nil {
		return err
	}
	defer logFile.Close()
	p.cmd = exec.Command(self)
	p.cmd.Env = append(os.Environ(), envOrder+"="+string(text))
	p.cmd.Stderr = logFile
	ownGroup(p.cmd)
	if p.commands, err = p.cmd.StdinPipe(); err != nil {
		return err
	}
	words, err := p.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	n.process, n.silenced = p, false
	go p.attend(words)
	return nil
}

// attend hears the process out and waits for its end.
func (p *process) attend(words io.Reader) {
	defer close(p.gone)
	for lines := bufio.NewScanner(words); lines.Scan(); {
		if lines.Text() == "ready" {
			p.readyAt = time.Now()
			close(p.ready)
			continue
		}
		var said struct {
			farewell
			Vitals *vitals
		}
		_ = json.Unmarshal(lines.Bytes(), &said)
		if said.Vitals != nil {
			p.vitals <- *said.Vitals
			continue
		}
		p.bye = &said.farewell
	}
	p.err = p.cmd.Wait()
}

// kill ends the process as kill -9 does, also one that is stopped, and waits for its end.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	p.commands.Close()
	<-p.gone
}

func (p *process) tell(command string) { _, _ = io.WriteString(p.commands, command+"\n") }

// close has the node's process end by itself and says what was wrong with that.
func (n *node) close() error {
	p := n.process
	p.tell("close")
	select {
	case <-p.gone:
	case <-time.After(closingBound):
		p.kill()
		return fmt.Errorf("%s did not close within %v", p.name, closingBound)
	}
	switch {
	case p.bye != nil && p.bye.Cut && !n.silenced:
		return fmt.Errorf("%s: Close ran out of time", p.name)
	case p.bye != nil && p.bye.Closing > 2*closeDeadline:
		return fmt.Errorf("%s: Close took %v, with %v to do it in", p.name, p.bye.Closing, closeDeadline)
	case p.bye != nil && p.bye.Error != "":
		return fmt.Errorf("%s closed with: %s", p.name, p.bye.Error)
	case p.err != nil:
		return fmt.Errorf("%s closed with: %w", p.name, p.err)
	case p.bye != nil && p.bye.Stats.Panics > 0:
		return fmt.Errorf("%s: %d panics", p.name, p.bye.Stats.Panics)
	}
	return nil
}

// alive says that the process has ended by itself, if it has.
func (p *process) alive() error {
	select {
	case <-p.gone:
		return fmt.Errorf("%s ended by itself (%v); see its log", p.name, p.err)
	default:
		return nil
	}
}

// openedAfter is how a process that is ready opened, from its start or from that moment on, and whether it did so after that.
func (p *process) openedAfter(t time.Time) (o opening, was bool) {
	o = opening{p.name, span{p.started, p.readyAt}}
	if p.started.Before(t) {
		o.took.from = t
	}
	return o, p.readyAt.After(t)
}

// awaitReady waits until the process works.
func (p *process) awaitReady(ctx context.Context, within time.Duration) error {
	select {
	case <-p.ready:
	case <-p.gone:
	case <-time.After(within):
		return fmt.Errorf("%s was not ready within %v", p.name, within)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return p.alive()
}
