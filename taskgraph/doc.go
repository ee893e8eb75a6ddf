// Package taskgraph runs tasks that are made of steps with dependencies: a step runs when all that it waits for is done, on
// whatever process has its handler, within milliseconds, and nothing polls for it.
//
//	e, err := taskgraph.New(ctx, p, nil) // on a pgwake.Provider; makes its tables in the same schema
//	if err != nil {
//		return err
//	}
//	e.Handle("stock.reserve", func(ctx context.Context, s *taskgraph.Step) (any, error) { ... })
//	e.Handle("card.charge", func(ctx context.Context, s *taskgraph.Step) (any, error) { ... })
//	e.Handle("mail.send", func(ctx context.Context, s *taskgraph.Step) (any, error) { ... })
//
//	err = e.Register(ctx, taskgraph.Define("shop", "fulfil_order", "1.0.0").
//		Step("reserve", "stock.reserve").
//		Step("charge", "card.charge", taskgraph.MaxAttempts(5)).
//		Step("notify", "mail.send", taskgraph.After("reserve", "charge")))
//	...
//	task, err := e.Submit(ctx, taskgraph.Submission{Namespace: "shop", Name: "fulfil_order", Version: "1.0.0", Context: order})
//	...
//	err = e.Run(ctx) // in every process that is to take part
//
// # Definitions
//
// A Definition says what the tasks of a name and version are made of; it is built by Define, or read from YAML by ParseDefinitions, and
// everything that is wrong with it is told at once, before anything is stored. A registered version never changes. A dependency may have a
// condition on the result of the step that is waited for (AfterIf): if it does not hold, the step that waits is skipped, and what comes
// after that goes on. A step may be a task of its own (Definition.SubTask); and what a Template describes is added while a task runs, with
// dependencies and conditions of its own, by a handler that returns a Decision, or by Graph.AddSteps.
//
// # Steps
//
// A Handler gets the Step: the context of the task, its own inputs, the results of all steps before it by name, and what an attempt before
// has kept (Step.Checkpoint). What it returns is the result. An error, a panic and a time-out are failures; the step is tried again, after a
// backoff, up to its number of attempts, unless the error is Permanent. A handler may be called again for the same step after a crash, so
// it has to bear that.
//
// # What becomes of a task
//
// A task goes through twelve states (TaskState) and a step through ten (StepState), each by compare-and-swap, each change written down with
// it: Graph.TaskAsOf tells what was at an instant, Graph.ReadTransitions follows everything that happens. A task of which a step has failed for good
// is blocked: nothing more begins (FailFast), or only what does not depend on the failure (Drain). Then somebody decides: ResetStep, ResolveStep,
// CompleteStep, or GiveUp. Cancel ends a task at any time. Engine.Wait returns when one has ended, and Engine.Watch tells how far it has got;
// both are pushed.
//
// # When processes die
//
// A task is an instance of the Provider, whose turn evaluates it, and the run of a step is a work item. Whatever belongs together is one
// transaction: a step that is enqueued and its work item, a result and the message that has the task evaluated. So any process may die at any
// instant: leases end, others go on, nothing is enqueued twice and nothing is lost. An attempt whose worker was lost counts. A database that is
// away for less than a lease lasts costs none, as long as the worker lives.
//
// # Any language
//
// All of it is SQL functions in the Provider's schema, with comments (package migrations): SELECT create_task('shop', 'fulfil_order', '1.0.0')
// creates a task, and start_step and finish_step are what a worker calls.
package taskgraph
