package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/Shopify/toxiproxy/v2"
	"github.com/Shopify/toxiproxy/v2/toxics"
	"github.com/rs/zerolog"
)

// This file answers: what can happen to the bytes between a process and the server?

// network makes the ways of all processes. Its toxiproxy serves no API of its own.
type network struct {
	library  *toxiproxy.ApiServer
	upstream string
}

func newNetwork(upstream string) *network {
	zerolog.SetGlobalLevel(zerolog.Disabled)
	return &network{toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop()), upstream}
}

// way is one proxied way to the server.
type way struct {
	proxy  *toxiproxy.Proxy
	toxics int // so far, for their names
}

// newWay listens on a port below those that systems hand out to connections, so that it is still free when
// the way opens again after it was shut.
func (n *network) newWay(name string) (w *way, err error) {
	for range 100 {
		p := toxiproxy.NewProxy(n.library, name, fmt.Sprintf("127.0.0.1:%d", 17000+rand.IntN(15000)), n.upstream)
		if err = p.Start(); err == nil {
			return &way{proxy: p}, nil
		}
	}
	return nil, err
}

func (w *way) address() string { return w.proxy.Listen }

// errStuck: the library may wait for ever if a connection breaks at the moment at which toxics change. The
// way is then beyond repair.
var errStuck = errors.New("toxiproxy is stuck")

func (w *way) change(f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-time.After(15 * time.Second):
		return errStuck
	}
}

// The directions of a toxic.
var (
	bothWays = []string{"upstream", "downstream"}
	answers  = []string{"downstream"}
)

// infect adds a toxic and returns what removes it again.
func (w *way) infect(kind string, directions []string, attributes any) (heal func() error, err error) {
	w.toxics++
	name := fmt.Sprintf("%s-%d-", kind, w.toxics)
	err = w.change(func() error {
		for _, direction := range directions {
			toxic, err := json.Marshal(map[string]any{"name": name + direction, "type": kind, "stream": direction, "attributes": attributes})
			if err != nil {
				return err
			}
			if _, err := w.proxy.Toxics.AddToxicJson(strings.NewReader(string(toxic))); err != nil {
				return err
			}
		}
		return nil
	})
	return func() error {
		return w.change(func() error {
			for _, direction := range directions {
				if err := w.proxy.Toxics.RemoveToxic(context.Background(), name+direction); err != nil {
					return err
				}
			}
			return nil
		})
	}, err
}

// blackhole loses all bytes of all connections, and new connections too. They are closed when it heals.
func (w *way) blackhole() (heal func() error, err error) {
	return w.infect("timeout", bothWays, map[string]int{"timeout": 0})
}

// mute is a black hole for the answers alone: what is asked for happens, and nobody learns of it.
func (w *way) mute() (heal func() error, err error) {
	return w.infect("timeout", answers, map[string]int{"timeout": 0})
}

// vanish loses all bytes of the connections that there are, for ever and without a sign; those made after
// the returned instant work. So does a firewall that forgets its connections. Nothing heals it but the peers.
func (w *way) vanish() (until time.Time, err error) {
	until = time.Now().Add(200 * time.Millisecond) // longer than the toxic takes to reach them
	_, err = w.infect("vanish", bothWays, vanish{Before: until})
	return until, err
}

// reset breaks each connection at the next answer, which is lost.
func (w *way) reset() (heal func() error, err error) {
	return w.infect("reset_peer", answers, map[string]int{"timeout": 0})
}

// slow delays every byte by so many ms, half as many more or less.
func (w *way) slow(ms int) (heal func() error, err error) {
	return w.infect("latency", bothWays, map[string]int{"latency": ms, "jitter": ms / 2})
}

// narrow lets through so many kB a second.
func (w *way) narrow(rate int) (heal func() error, err error) {
	return w.infect("bandwidth", bothWays, map[string]int{"rate": rate})
}

// shut closes all connections and refuses new ones.
func (w *way) shut() (heal func() error, err error) {
	err = w.change(func() error { w.proxy.Stop(); return nil })
	return func() error { return w.change(w.proxy.Start) }, err
}

// lead has new connections go to another server, and closes those that there are.
func (w *way) lead(upstream string) error {
	return w.change(func() error {
		w.proxy.Stop()
		w.proxy.Upstream = upstream
		return w.proxy.Start()
	})
}

// vanish is the toxic behind way.vanish.
type vanish struct {
	Before time.Time `json:"before"` // connections made after it are spared
}

func init() { toxics.Register("vanish", new(vanish)) }

// NewState is called for each connection when the toxic meets it.
func (v *vanish) NewState() any { return time.Now().Before(v.Before) }

// Pipe is called again after each interruption by another toxic that comes or goes.
func (v *vanish) Pipe(stub *toxics.ToxicStub) {
	swallow := stub.State.(bool)
	for {
		select {
		case <-stub.Interrupt:
			return
		case chunk := <-stub.Input:
			switch {
			case chunk == nil:
				stub.Close()
				return
			case !swallow:
				stub.Output <- chunk
			}
		}
	}
}
