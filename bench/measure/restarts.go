package measure

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
)

// This file answers: how long do items wait while processes are restarted, or killed, under load?

// RestartsOptions are the sizes of Restarts.
type RestartsOptions struct {
	Processes   int           // Defaults to 3.
	Places      int           // of each. Defaults to 8.
	Handler     time.Duration // how long each item takes. Defaults to 50 ms.
	Gap         time.Duration // from one item to the next. Defaults to 5 ms.
	LockTimeout time.Duration // at least 1 s. Defaults to 2 s.
	Calm        time.Duration // before anything happens. Defaults to 3 s.
	Kills       int           // Defaults to 3.
	Progress    func(Progress)
}

// RestartsResult is what Restarts found.
type RestartsResult struct {
	Processes   int           `json:"processes"`
	Handler     time.Duration `json:"handler"`
	LockTimeout time.Duration `json:"lock_timeout"`
	Calm        Samples       `json:"calm"`    // from an item's commit to its last handler, before anything happened
	Rolling     Samples       `json:"rolling"` // while one process after the other was restarted
	Again       Samples       `json:"again"`   // of items that a process had when it was killed: from then to the next handler
	Lost        int           `json:"lost"`
}

// Restarts has processes with a Dispatcher each do a steady stream of items. Each is told to end (SIGTERM), and replaced when it
// has; then some are killed (SIGKILL), and replaced.
//
// The processes are this program: its main function, or TestMain, must call [ChildMain] before anything else.
func Restarts(ctx context.Context, url string, o RestartsOptions) (r *RestartsResult, err error) {
	orDefault(&o.Processes, 3)
	orDefault(&o.Places, 8)
	orDefault(&o.Handler, 50*time.Millisecond)
	orDefault(&o.Gap, 5*time.Millisecond)
	orDefault(&o.LockTimeout, 2*time.Second)
	orDefault(&o.Calm, 3*time.Second)
	orDefault(&o.Kills, 3)
	defer func(ctx context.Context) { err = about(ctx, "restarts", err) }(ctx)
	s := newStage(url)
	defer s.drop(&err)
	n, err := s.open(ctx, 1)
	if err != nil {
		return nil, err
	}
	defer n.close(&err)

	f := &fleet{order: fleetOrder{URL: url, Schema: s.schema, Places: o.Places, Handler: o.Handler, LockTimeout: o.LockTimeout}, items: map[int]*fate{}}
	defer f.end()
	for range o.Processes {
		if err := f.start(n.ctx); err != nil {
			return nil, err
		}
	}
	sending, stop := context.WithCancel(n.ctx)
	defer stop()
	n.group.Go(func() error { return f.send(sending, n, o.Gap) })

	m := newMeter(o.Progress)
	steps, done := 2+o.Processes+o.Kills, 0
	step := func() {
		done++
		m.report(Progress{Done: done, Total: steps})
	}
	if err := pause(n.ctx, o.Calm/2); err != nil { // it may begin slowly
		return nil, err
	}
	calm := time.Now()
	if err := pause(n.ctx, o.Calm); err != nil {
		return nil, err
	}
	step()
	rolling := time.Now()
	for range o.Processes {
		if err := f.replace(n.ctx, syscall.SIGTERM); err != nil {
			return nil, err
		}
		if err := pause(n.ctx, o.Calm/6); err != nil {
			return nil, err
		}
		step()
	}
	rolled := time.Now()
	if err := pause(n.ctx, o.Calm/3); err != nil { // what was sent before is done when the first is killed
		return nil, err
	}
	var kills []time.Time
	for range o.Kills {
		kills = append(kills, time.Now())
		if err := f.replace(n.ctx, syscall.SIGKILL); err != nil {
			return nil, err
		}
		if err := pause(n.ctx, o.LockTimeout+o.LockTimeout/2); err != nil {
			return nil, err
		}
		step()
	}
	stop()
	if err := f.drained(n.ctx, 2*o.LockTimeout); err != nil {
		return nil, err
	}
	step()
	r = &RestartsResult{Processes: o.Processes, Handler: o.Handler, LockTimeout: o.LockTimeout}
	f.judge(r, calm, rolling, rolled, kills)
	return r, nil
}

// fate is what became of an item.
type fate struct {
	sent  time.Time
	began time.Time // of its last handler
	done  bool
}

// fleet is the processes and their items.
type fleet struct {
	order     fleetOrder
	processes []*member // the oldest first

	mu    sync.Mutex
	items map[int]*fate
}

// member is a process.
type member struct {
	*exec.Cmd
	heard chan struct{} // closed when all that it had to say has been heard
}

// ended waits for its end.
func (m *member) ended() error {
	<-m.heard
	return m.Wait()
}

// start starts a process, and waits until it dispatches.
func (f *fleet) start(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	orders, err := json.Marshal(f.order)
	if err != nil {
		return err
	}
	child := &member{exec.CommandContext(ctx, self), make(chan struct{})}
	child.Env = append(os.Environ(), envFleetOrder+"="+string(orders))
	child.Stderr = os.Stderr
	out, err := child.StdoutPipe()
	if err != nil {
		return err
	}
	if err := child.Start(); err != nil {
		return err
	}
	f.processes = append(f.processes, child)
	lines := json.NewDecoder(bufio.NewReader(out))
	var ready report
	if err := lines.Decode(&ready); err != nil {
		close(child.heard)
		return fmt.Errorf("child process: %w", errors.Join(context.Cause(ctx), err))
	}
	go func() {
		defer close(child.heard)
		for {
			var r report
			if lines.Decode(&r) != nil { // it has ended, and half a line is none
				return
			}
			f.hear(r)
		}
	}()
	return nil
}

func (f *fleet) hear(r report) {
	f.mu.Lock()
	defer f.mu.Unlock()
	i := f.items[r.N]
	if i == nil {
		i = new(fate)
		f.items[r.N] = i
	}
	if r.Done {
		i.done = true
	} else {
		i.began = r.At
	}
}

// send enqueues items at equal distances, whatever becomes of them.
func (f *fleet) send(ctx context.Context, p *node, gap time.Duration) error {
	tick := time.NewTicker(gap)
	defer tick.Stop()
	for n := 0; ; n++ {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		_, err := p.EnqueueForWorker(p.ctx, pgwake.WorkItem{Name: "measure", Input: number(n)}, nil)
		if p.ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		sent := time.Now()
		f.mu.Lock()
		if f.items[n] == nil {
			f.items[n] = new(fate)
		}
		f.items[n].sent = sent
		f.mu.Unlock()
	}
}

// replace ends the oldest process, and starts another when it has ended.
func (f *fleet) replace(ctx context.Context, how syscall.Signal) error {
	oldest := f.processes[0]
	if err := oldest.Process.Signal(how); err != nil {
		return err
	}
	err := oldest.ended()
	f.processes = f.processes[1:]
	if err != nil && how == syscall.SIGTERM {
		return fmt.Errorf("child process: %w", err)
	}
	return f.start(ctx)
}

// drained waits until all is done, or nothing has been for so long.
func (f *fleet) drained(ctx context.Context, patience time.Duration) error {
	for last, since := -1, time.Now(); time.Since(since) < patience; {
		left := 0
		f.mu.Lock()
		for _, i := range f.items {
			if !i.done {
				left++
			}
		}
		f.mu.Unlock()
		if left == 0 {
			return nil
		}
		if left != last {
			last, since = left, time.Now()
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// end ends what processes are left.
func (f *fleet) end() {
	for _, p := range f.processes {
		_ = p.Process.Kill()
		_ = p.ended()
	}
}

func (f *fleet) judge(r *RestartsResult, calm, rolling, rolled time.Time, kills []time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for n := range len(f.items) {
		i := f.items[n]
		switch {
		case !i.done:
			r.Lost++
			continue
		case i.sent.After(calm) && i.sent.Before(rolling):
			r.Calm = append(r.Calm, i.began.Sub(i.sent))
		case i.sent.After(rolling) && i.sent.Before(rolled):
			r.Rolling = append(r.Rolling, i.began.Sub(i.sent))
		}
		for _, killed := range kills {
			if back := i.began.Sub(killed); i.sent.Before(killed) && back > r.LockTimeout/2 && back < 2*r.LockTimeout {
				r.Again = append(r.Again, back)
			}
		}
	}
}

// envFleetOrder holds the order of a process of a fleet, as JSON. It is what makes a process one.
const envFleetOrder = "PGWAKE_MEASURE_FLEET"

// fleetOrder is what a process of a fleet is told.
type fleetOrder struct {
	URL, Schema string
	Places      int
	Handler     time.Duration
	LockTimeout time.Duration
}

// report is what a process says of an item, as a line of JSON; the first line says that it dispatches.
type report struct {
	N    int
	At   time.Time
	Done bool
}

// run dispatches until SIGTERM.
func (o fleetOrder) run() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	n, err := (stage{url: o.URL, schema: o.Schema}).openWith(ctx, o.Places, pgwake.Config{SkipMigrate: true})
	if err != nil {
		return err
	}
	d := dispatch.New(n.Provider, &dispatch.Config{Concurrency: o.Places, LockTimeout: o.LockTimeout})
	var mu sync.Mutex
	reports := json.NewEncoder(os.Stdout)
	say := func(r report) error {
		mu.Lock()
		defer mu.Unlock()
		return reports.Encode(r)
	}
	d.Handle("measure", func(ctx context.Context, item *pgwake.ClaimedWorkItem) (dispatch.Result, error) {
		i, err := strconv.Atoi(string(item.Input))
		if err == nil {
			err = say(report{N: i, At: time.Now()})
		}
		if err == nil {
			err = pause(ctx, o.Handler)
		}
		if err == nil {
			err = say(report{N: i, Done: true})
		}
		return nil, err
	})
	if err := say(report{}); err != nil {
		return err
	}
	err = d.Run(ctx)
	n.close(&err)
	return err
}
