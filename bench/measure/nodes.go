package measure

import (
	"context"
	"time"
)

// This file answers: how many queries does one item cost a fleet of nodes, all of which wait for it?

// NodesOptions are the sizes of Nodes.
type NodesOptions struct {
	Nodes       int           // Defaults to 10.
	Dispatchers int           // Of each. Defaults to 8.
	Items       int           // Defaults to 100.
	Gap         time.Duration // Mean time from one item's end to the next. Defaults to 20 ms.
	Peer        Peer          // Defaults to nil: pgwake.
	Progress    func(Progress)
}

// NodesResult is what Nodes found.
type NodesResult struct {
	Peer        string           `json:"peer,omitempty"` // "": pgwake
	Nodes       int              `json:"nodes"`
	Dispatchers int              `json:"dispatchers"`
	Items       int              `json:"items"`
	Looks       int64            `json:"looks"`            // queries for work of all nodes together
	Tokens      map[string]int64 `json:"tokens,omitempty"` // wake-ups by reason
	Latency     Latency          `json:"latency"`
	Net         SafetyNet        `json:"safety_net"`
}

// PerItem is the number of queries that an item cost.
func (r *NodesResult) PerItem() float64 { return float64(r.Looks) / float64(r.Items) }

// Nodes enqueues items one at a time, by another node, while all dispatchers of all nodes wait.
func Nodes(ctx context.Context, url string, o NodesOptions) (r *NodesResult, err error) {
	orDefault(&o.Nodes, 10)
	orDefault(&o.Dispatchers, 8)
	orDefault(&o.Items, 100)
	orDefault(&o.Gap, 20*time.Millisecond)
	defer func(ctx context.Context) { err = about(ctx, "nodes", err) }(ctx)
	s := newStage(url)
	defer s.drop(&err)
	l := newLedger(warmUps + o.Items)
	r = &NodesResult{Peer: nameOf(o.Peer), Nodes: o.Nodes, Dispatchers: o.Dispatchers, Items: o.Items, Tokens: map[string]int64{}}

	var enqueue *producer
	var looks func() int64
	var nodes []*node
	if o.Peer == nil {
		p, err := s.produce(ctx, OtherProvider, nil, l)
		if err != nil {
			return nil, err
		}
		defer p.close(&err)
		enqueue = p
		var stop context.CancelCauseFunc
		ctx, stop = context.WithCancelCause(ctx)
		defer stop(nil)
		for range o.Nodes {
			n, err := s.open(ctx, 3) // one query at a time is the rule
			if err != nil {
				return nil, err
			}
			defer n.close(&err)
			n.dispatch(o.Dispatchers, nil, l.take)
			context.AfterFunc(n.ctx, func() { stop(context.Cause(n.ctx)) }) // a node that fails ends the scenario
			nodes = append(nodes, n)
		}
		looks = func() (sum int64) {
			for _, n := range nodes {
				sum += n.Stats().Worker.Looks
			}
			return sum
		}
	} else {
		if err := s.preparePeer(ctx, o.Peer); err != nil {
			return nil, err
		}
		p, err := o.Peer.Produce(ctx, s.url, s.schema, 1)
		if err != nil {
			return nil, err
		}
		defer p.Close()
		enqueue = &producer{enqueue: p.Enqueue}
		var peers []*peerNode
		for range o.Nodes {
			n, err := s.openPeer(ctx, o.Peer, o.Dispatchers, PeerHandler{Hand: func(n int) { l.arrive(n, time.Now()) }})
			if err != nil {
				return nil, err
			}
			defer n.close(&err)
			ctx = n.ctx
			peers = append(peers, n)
		}
		looks = func() (sum int64) {
			for _, n := range peers {
				sum += n.Looks()
			}
			return sum
		}
	}
	if err := enqueue.warmUp(ctx, l, ignore); err != nil {
		return nil, err
	}
	for _, n := range nodes {
		if err := n.parked(o.Dispatchers); err != nil {
			return nil, err
		}
	}
	if err := pause(ctx, safetyGrace); err != nil { // whoever was woken for nothing has looked
		return nil, err
	}
	tokens := func(sign int64) {
		for _, n := range nodes {
			for why, count := range n.Stats().Worker.Tokens {
				r.Tokens[why] += sign * count
			}
		}
	}
	before := looks()
	tokens(-1)
	m := newMeter(o.Progress)
	for n := warmUps; n < warmUps+o.Items; n++ {
		if err := pause(ctx, Uniform.draw(o.Gap)); err != nil {
			return nil, err
		}
		if err := enqueue.now(ctx, l, n); err != nil {
			return nil, err
		}
		if err := l.wait(ctx, 1, ignore); err != nil {
			return nil, err
		}
		r.Latency.add(l.line(n))
		if done := n - warmUps + 1; m.due() || done == o.Items {
			m.report(Progress{Done: done, Total: o.Items, Figures: r.Latency.FromCommit.Summary()})
		}
	}
	if err := pause(ctx, safetyGrace); err != nil {
		return nil, err
	}
	r.Looks = looks() - before
	tokens(1)
	for _, n := range nodes {
		net, err := safetyNet(ctx, n.Provider)
		if err != nil {
			return nil, err
		}
		r.Net = r.Net.Plus(net)
	}
	return r, nil
}
