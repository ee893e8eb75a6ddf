package measure

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: how many small orchestrations does a node get through, and how much of that is due to
// how it finds work?

// StressOptions are the sizes of Stress. The defaults are the stress configuration of the designs that
// pgwake goes back to.
type StressOptions struct {
	Duration      time.Duration // for which new instances are started. Defaults to 30 s.
	Instances     int           // under way at a time. Defaults to 20.
	Tasks         int           // of each instance, side by side. Defaults to 5.
	TaskTime      time.Duration // that each takes. Defaults to 10 ms.
	Orchestrators int           // Dispatchers that fetch orchestrations. Defaults to 4.
	Workers       int           // Dispatchers that fetch work items. Defaults to 4.

	// ShortPoll makes the dispatchers not wait for work but ask, and ask again after so long if there was
	// none. Defaults to 0: they wait.
	ShortPoll time.Duration
	Progress  func(Progress)
}

// StressResult is what Stress found.
type StressResult struct {
	ShortPoll time.Duration `json:"short_poll"`
	Duration  time.Duration `json:"duration"`  // until the last instance was completed
	Completed Samples       `json:"completed"` // from the start message's enqueue to the last turn's ack
	Looks     int64         `json:"looks"`     // queries for work, on both queues
	Net       SafetyNet     `json:"safety_net"`
}

// PerSecond is the throughput, in instances.
func (r *StressResult) PerSecond() float64 { return float64(len(r.Completed)) / r.Duration.Seconds() }

// Stress keeps a number of instances under way. Each starts some tasks in its first turn, which workers
// carry out by waiting, and is completed when all have reported back.
func Stress(ctx context.Context, url string, o StressOptions) (r *StressResult, err error) {
	orDefault(&o.Duration, 30*time.Second)
	orDefault(&o.Instances, 20)
	orDefault(&o.Tasks, 5)
	orDefault(&o.TaskTime, 10*time.Millisecond)
	orDefault(&o.Orchestrators, 4)
	orDefault(&o.Workers, 4)
	defer func(ctx context.Context) { err = about(ctx, "stress", err) }(ctx)

	s := newStage(url)
	defer s.drop(&err)
	n, err := s.openWith(ctx, o.Orchestrators+o.Workers, pgwake.Config{DisableLongPoll: o.ShortPoll > 0})
	if err != nil {
		return nil, err
	}
	defer n.close(&err)
	w := &workload{node: n, o: o, completed: make(map[string]chan struct{})}
	for range o.Orchestrators {
		n.loop(w.paced(w.turn))
	}
	for range o.Workers {
		n.loop(w.paced(w.task))
	}

	r = &StressResult{ShortPoll: o.ShortPoll}
	m := newMeter(o.Progress)
	var mu sync.Mutex
	var clients sync.WaitGroup
	for c := range o.Instances {
		clients.Go(func() {
			for i := 0; time.Since(m.began) < o.Duration; i++ {
				began := time.Now()
				if !w.run(fmt.Sprintf("%d-%d", c, i)) {
					return
				}
				mu.Lock()
				r.Completed = append(r.Completed, time.Since(began))
				if m.due() {
					m.report(Progress{Done: len(r.Completed), Figures: r.Completed.Summary()})
				}
				mu.Unlock()
			}
		})
	}
	clients.Wait()
	r.Duration = time.Since(m.began)
	if err := context.Cause(n.ctx); err != nil {
		return nil, err
	}
	stats := n.Stats()
	r.Looks = stats.Worker.Looks + stats.Orchestrator.Looks
	r.Net, err = safetyNet(ctx, n.Provider)
	return r, err
}

// workload is what the dispatchers of Stress carry out.
type workload struct {
	*node
	o StressOptions

	mu        sync.Mutex
	completed map[string]chan struct{} // by instance
}

// run starts an instance and waits until it is completed. It reports whether it was.
func (w *workload) run(instance string) bool {
	done := make(chan struct{})
	w.mu.Lock()
	w.completed[instance] = done
	w.mu.Unlock()
	_, err := w.EnqueueForOrchestrator(w.ctx, pgwake.Message{Instance: instance, Kind: pgwake.MessageStart, Name: "stress", Version: "1.0.0"}, nil)
	if err != nil {
		w.group.Go(func() error { return err })
		return false
	}
	select {
	case <-done:
		return true
	case <-w.ctx.Done():
		return false
	}
}

// paced makes a dispatcher that does not wait for work pause when there was none.
func (w *workload) paced(turn func() error) func() error {
	if w.o.ShortPoll == 0 {
		return turn
	}
	return func() error {
		err := turn()
		if errors.Is(err, pgwake.ErrNoWork) {
			return pause(w.ctx, w.o.ShortPoll)
		}
		return err
	}
}

const reported = "reported"

// turn starts the tasks, notes who has reported back, and completes the instance.
func (w *workload) turn() error {
	item, err := w.FetchOrchestrationItem(w.ctx, nil)
	if err != nil {
		return err
	}
	ack := pgwake.OrchestrationAck{ExecutionID: item.ExecutionID, Metadata: pgwake.Metadata{Name: item.Name, Version: item.Version}}
	reports := 0
	for _, e := range item.History {
		if e.Type == reported {
			reports++
		}
	}
	for _, m := range item.Messages {
		ack.History = append(ack.History, pgwake.Event{ID: int64(len(item.History) + len(ack.History) + 1), Type: string(m.Kind)})
		if m.Kind != pgwake.MessageStart {
			reports++
			continue
		}
		for task := range w.o.Tasks {
			ack.WorkItems = append(ack.WorkItems, pgwake.WorkEnqueue{WorkItem: pgwake.WorkItem{
				Name: "task", Instance: item.Instance, ExecutionID: item.ExecutionID, ActivityID: int64(task + 1)}})
		}
	}
	if reports == w.o.Tasks {
		ack.Metadata.Status = pgwake.StatusCompleted
	}
	if err := w.AckOrchestrationItem(w.ctx, item.LockToken, ack); err != nil {
		return err
	}
	if reports == w.o.Tasks {
		w.mu.Lock()
		defer w.mu.Unlock()
		close(w.completed[item.Instance])
		delete(w.completed, item.Instance)
	}
	return nil
}

func (w *workload) task() error {
	item, err := w.FetchWorkItem(w.ctx, nil)
	if err != nil {
		return err
	}
	if err := pause(w.ctx, w.o.TaskTime); err != nil {
		return err
	}
	return w.AckWorkItem(w.ctx, item.LockToken, &pgwake.Message{Instance: item.Instance, Kind: reported})
}
