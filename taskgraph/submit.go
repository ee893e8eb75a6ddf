package taskgraph

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: how does a task come into being?

// Identity says which tasks are the same task.
type Identity int

const (
	// IdentityKey: those with the same Submission.IdempotencyKey; without one, none.
	IdentityKey Identity = iota
	// IdentityStrict: those of the same definition with the same Context. Submission.IdempotencyKey is made of these.
	IdentityStrict
)

// Submission is a task to be created.
type Submission struct {
	Namespace, Name, Version string // of the definition, which is registered; required

	// ID is that of the task, a UUID. Defaults to a new one.
	ID string

	// Context is what the task is about: any value of which package encoding/json makes JSON. Its steps see it. Defaults to {}.
	Context any

	// Priority is the level that the task begins with; see Settings for what is added to it. Defaults to 0.
	Priority int

	// Delay has the task begin so much later. Defaults to 0: at once.
	Delay time.Duration

	// Deadline is until when the task is to be complete. What is past it is preferred by as much as Settings say. Defaults to none.
	Deadline time.Time

	// IdempotencyKey makes the submission add nothing if there is a task with the same key, of at most 255 bytes. One of another
	// definition or with another context is an ErrConflict. Defaults to "": no such check.
	IdempotencyKey string

	// Identity says how the key comes about. Defaults to IdentityKey.
	Identity Identity

	// Initiator, SourceSystem and Reason say where the task comes from, for people. Default to "".
	Initiator, SourceSystem, Reason string

	// Tags are labels, for people and for handlers: any value of which package encoding/json makes JSON. Default to none.
	Tags any

	// CorrelationID and ParentCorrelationID are UUIDs that tell what belongs together. Default to the task's id, and to none.
	CorrelationID, ParentCorrelationID string
}

// Submitted is the outcome of a Submission.
type Submitted struct {
	ID string `db:"task_id"`

	// Duplicate says that nothing was added: ID is that of the task which has the idempotency key.
	Duplicate bool `db:"duplicate"`
}

// longestDelay is the Provider's.
const longestDelay = 100 * 365 * 24 * time.Hour

// MaxSubmissions is the most tasks that SubmitMany takes at a time.
const MaxSubmissions = 10_000

// Submit creates a task, durably once it returns. Errors: pgwake.ErrInvalid for a Submission that breaks a rule, also as
// pgwake.ErrPayloadTooLarge for a Context or Tags of more than pgwake.Config.MaxPayload each,
// pgwake.ErrNotFound for a definition that is not registered, ErrConflict.
func (g *Graph) Submit(ctx context.Context, s Submission) (Submitted, error) {
	all, err := g.submit(ctx, "submit task", []Submission{s})
	if err != nil {
		return Submitted{}, err
	}
	return all[0], nil
}

// SubmitMany creates tasks, all or none, in one statement. The outcomes are in the order of the submissions.
func (g *Graph) SubmitMany(ctx context.Context, all []Submission) ([]Submitted, error) {
	return g.submit(ctx, "submit tasks", all)
}

func (g *Graph) submit(ctx context.Context, op string, all []Submission) ([]Submitted, error) {
	if len(all) == 0 {
		return nil, nil
	}
	if len(all) > MaxSubmissions {
		return nil, invalid(op, "%d tasks at a time, and %d is the most", len(all), MaxSubmissions)
	}
	n := len(all)
	var (
		ids, namespaces, names, versions, contexts        = make([]*string, n), make([]string, n), make([]string, n), make([]string, n), make([]*string, n)
		priorities, delays, deadlines                     = make([]int32, n), make([]*time.Duration, n), make([]*time.Time, n)
		keys, initiators, systems, reasons, tags          = make([]*string, n), make([]*string, n), make([]*string, n), make([]*string, n), make([]*string, n)
		correlations, parentCorrelations, headers, traces = make([]*string, n), make([]*string, n), make([]*string, n), g.headers(ctx)
		problems                                          problems
	)
	byID := make(map[string]int)
	for i := range all {
		s := &all[i]
		wrong := func(format string, args ...any) { problems.add("task %d: "+format, append([]any{i}, args...)...) }
		namespaces[i], names[i], versions[i] = s.Namespace, s.Name, s.Version
		if err := pgwake.CheckNamespace(s.Namespace); err != nil {
			wrong("%s", strings.TrimPrefix(err.Error(), pgwake.ErrInvalid.Error()+": "))
		}
		for _, t := range [...]struct {
			what, text string
			least      int
		}{{"name", s.Name, 1}, {"version", s.Version, 1}, {"idempotency key", s.IdempotencyKey, 0}, {"initiator", s.Initiator, 0}, {"source system", s.SourceSystem, 0},
			{"reason", s.Reason, 0}} {
			if problem := textProblem(t.text, t.least, pgwake.MaxNameLength); problem != "" {
				wrong("the %s %s", t.what, problem)
			}
		}
		for _, id := range [...]struct{ what, text string }{{"id", s.ID}, {"correlation id", s.CorrelationID}, {"parent correlation id", s.ParentCorrelationID}} {
			if id.text != "" && !isUUID(id.text) {
				wrong("the %s %s is no UUID", id.what, quoteShort(id.text))
			}
		}
		if other, taken := byID[s.ID]; taken {
			wrong("the id is that of task %d as well", other)
		} else if s.ID != "" {
			byID[s.ID] = i
		}
		if s.Priority < -1<<20 || s.Priority > 1<<20 {
			wrong("the priority %d is not between %d and %d", s.Priority, -1<<20, 1<<20)
		}
		if s.Delay < 0 || s.Delay > longestDelay {
			wrong("the delay %v is not between 0 and 100 years", s.Delay)
		}
		if year := s.Deadline.UTC().Year(); year < 1 || year > 9999 {
			wrong("the deadline is in the year %d", year)
		}
		if s.Identity != IdentityKey && s.Identity != IdentityStrict {
			wrong("the identity %d is neither IdentityKey nor IdentityStrict", s.Identity)
		}
		var err error
		if tags[i], err = jsonText(s.Tags, g.p.MaxPayload()); err != nil {
			wrong("the tags: %v", err)
		}
		key := s.IdempotencyKey
		if contexts[i], err = jsonText(s.Context, g.p.MaxPayload()); err != nil {
			wrong("the context: %v", err)
		} else if s.Identity == IdentityStrict {
			if key != "" {
				wrong("an idempotency key of its own, and IdentityStrict")
			}
			key = strictKey(s, contexts[i])
		}
		priorities[i], ids[i], keys[i] = int32(s.Priority), optional(s.ID), optional(key)
		initiators[i], systems[i], reasons[i] = optional(s.Initiator), optional(s.SourceSystem), optional(s.Reason)
		correlations[i], parentCorrelations[i], headers[i] = optional(s.CorrelationID), optional(s.ParentCorrelationID), traces
		if s.Delay > 0 {
			delays[i] = &s.Delay
		}
		if !s.Deadline.IsZero() {
			deadlines[i] = &s.Deadline
		}
	}
	if err := problems.err(op); err != nil {
		return nil, err
	}
	return rows[Submitted](ctx, g, op, "create_task_many", ids, namespaces, names, versions, contexts, priorities, delays, deadlines, keys,
		initiators, systems, reasons, tags, correlations, parentCorrelations, nil, nil, headers)
}

// strictKey is the idempotency key of a task with IdentityStrict. Contexts that the server takes for equal have the same.
func strictKey(s *Submission, context *string) string {
	hash := sha256.New()
	for _, part := range []string{s.Namespace, s.Name, s.Version} {
		fmt.Fprintf(hash, "%d %s ", len(part), part)
	}
	var value any = map[string]any{} // what a task has without one
	if context != nil {
		value, _ = decodeJSON([]byte(*context)) // it was checked
	}
	text, _ := json.Marshal(canonical(value))
	hash.Write(text)
	return "strict " + hex.EncodeToString(hash.Sum(nil))
}

// canonical has the numbers of JSON written alike that jsonb takes for equal: 1, 1.0 and 10e-1.
func canonical(value any) any {
	switch v := value.(type) {
	case map[string]any:
		for key, of := range v {
			v[key] = canonical(of)
		}
	case []any:
		for i, of := range v {
			v[i] = canonical(of)
		}
	case json.Number:
		return json.Number(parseDecimal(string(v)).String())
	}
	return value
}

// Register registers definitions, all or none as part of a transaction, and otherwise one after the other. One that is
// registered already as it is remains so; a version that is registered and is another is an ErrConflict: tasks of it may be under
// way. Errors: pgwake.ErrInvalid with everything that is wrong with any of the definitions, a *DefinitionError for each.
func (g *Graph) Register(ctx context.Context, definitions ...*Definition) error {
	const op = "register task definition"
	var wrong []error
	for i, d := range definitions {
		if d == nil {
			wrong = append(wrong, fmt.Errorf("%w: definition %d is nil", pgwake.ErrInvalid, i))
		} else if err := d.Validate(); err != nil {
			wrong = append(wrong, err)
		}
	}
	if err := errors.Join(wrong...); err != nil {
		return failed(op, err)
	}
	for _, d := range definitions {
		args, err := d.arguments()
		if err != nil {
			return failed(op, err)
		}
		if _, err := value[string](ctx, g, op, "register_task_definition", args...); err != nil {
			return err
		}
	}
	return nil
}

func optional(text string) *string {
	if text == "" {
		return nil
	}
	return &text
}

// arguments are those of register_task_definition.
func (d *Definition) arguments() ([]any, error) {
	configuration, err := json.Marshal(d)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", pgwake.ErrInvalid, err)
	}
	n := len(d.Steps)
	var (
		names, handlers, descriptions, tags = make([]string, n), make([]*string, n), make([]*string, n), make([]string, n)
		retryables, onDemand                = make([]bool, n), make([]bool, n)
		attempts, backoffs, timeouts        = make([]int, n), make([]*int64, n), make([]*time.Duration, n)
		keys, inputs, subTasks, subVersions = make([]*string, n), make([]*string, n), make([]*string, n), make([]*string, n)
		parents, children                   []string
		conditions                          []*string
	)
	for i := range d.Steps {
		s := &d.Steps[i]
		names[i], handlers[i], descriptions[i], tags[i] = s.Name, optional(s.Handler), optional(s.Description), s.Tag
		retryables[i], onDemand[i], attempts[i], timeouts[i] = s.retryable(), s.OnDemand, s.maxAttempts(), s.Timeout
		keys[i], inputs[i], subTasks[i], subVersions[i] = optional(s.LimitKey), optional(string(s.Inputs)), optional(s.SubTaskName), optional(s.SubTaskVersion)
		if s.RetryEvery != nil {
			every := seconds(*s.RetryEvery)
			backoffs[i] = &every
		}
		for _, dependency := range s.After {
			parents, children, conditions = append(parents, dependency.Step), append(children, s.Name), append(conditions, optional(dependency.If))
		}
	}
	return []any{d.Namespace, d.Name, d.Version, optional(d.Description), string(configuration), names, handlers, descriptions, retryables, attempts, backoffs,
		timeouts, tags, keys, inputs, onDemand, subTasks, subVersions, parents, children, conditions}, nil
}
