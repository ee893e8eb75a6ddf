package goworkflows

import (
	"context"
	"sync"

	"github.com/cschleiden/go-workflows/core"
	"github.com/cschleiden/go-workflows/worker"
	"github.com/cschleiden/go-workflows/workflow/executor"
	"github.com/cschleiden/go-workflows/workflow/executor/cache"
)

// This file answers: what does a worker keep of a workflow, and until when?
//
// Invariant: what a worker keeps is never ahead of the history. It is as soon as a task was carried out, until that is completed; and if it cannot be
// completed the worker would refuse the next task of the execution, which begins where the history ends, over and over. So then it is forgotten.

// executorCache is the runtime's own cache, of one worker.
type executorCache struct {
	executor.Cache
	all *sync.Map // of the workers at work
}

// StartEviction is called by the worker, and returns when that is stopped.
func (c *executorCache) StartEviction(ctx context.Context) {
	c.all.Store(c, nil)
	defer c.all.Delete(c)
	c.Cache.StartEviction(ctx)
}

// forget removes what workers keep of an execution.
func (b *Backend) forget(ctx context.Context, instance *core.WorkflowInstance) {
	b.executors.Range(func(c, _ any) bool {
		_ = c.(*executorCache).Evict(ctx, instance) // never fails
		return true
	})
}

// WorkerOptions returns options for one worker.New: the runtime's defaults, but for what goes with this Backend. There is no polling interval, since Gets
// wait. Heartbeats are often enough for the leases. And what the worker keeps of a workflow, it forgets if a task could not be completed: if the
// database was away for longer than a lease, say. Without that it might refuse all later tasks of the workflow.
func (b *Backend) WorkerOptions() *worker.Options {
	o := worker.DefaultOptions
	o.WorkflowPollingInterval, o.ActivityPollingInterval = 0, 0
	o.WorkflowHeartbeatInterval = min(o.WorkflowHeartbeatInterval, b.options.WorkflowLockTimeout/3)
	o.ActivityHeartbeatInterval = min(o.ActivityHeartbeatInterval, b.options.ActivityLockTimeout/3)
	o.WorkflowExecutorCache = &executorCache{cache.NewWorkflowExecutorLRUCache(b.Metrics(), o.WorkflowExecutorCacheSize, o.WorkflowExecutorCacheTTL), b.executors}
	return &o
}
