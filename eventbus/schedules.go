package eventbus

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
)

// This file answers: what is emitted again and again?

// CatchUp says what becomes of occurrences that nobody could carry out for a minute or more after the latest instant that Jitter allows. The others come.
type CatchUp string

// The ways to catch up.
const (
	CatchUpOne  CatchUp = "one"  // one comes for all of them
	CatchUpAll  CatchUp = "all"  // all come
	CatchUpSkip CatchUp = "skip" // none comes
)

// Overlap says what becomes of an occurrence while what came of the one before is not done: an event is not handled by all of its groups, or
// a work item is in the queue.
type Overlap string

// What may overlap.
const (
	OverlapAllow Overlap = "allow" // it comes all the same
	OverlapSkip  Overlap = "skip"  // it is left out. Events then have a key, their own if there is none; any other of that key counts too
)

// Schedule is an event that is emitted, or a work item that is enqueued, whenever a cron expression says so.
type Schedule struct {
	// Name is unique in the namespace. 1 to 255 bytes.
	Name string

	// Cron has 5 fields, minute, hour, day of the month, month and day of the week, or 6, with seconds before them: "30 4 1,15 * mon-fri",
	// "*/10 * * * * *". If a day of the month and a day of the week are given, either will do. Or it is @yearly, @monthly, @weekly, @daily,
	// @hourly, or "@every 1h30m", which counts from when the schedule is made or resumed, or gets this expression. Up to 255 bytes.
	//
	// Where the clock is put forward or back: with hours that begin with * it occurs at every instant at which the clock shows a time that
	// matches. Any other names times of the day, each of which comes once a day: when it is first shown or, if it is left out, when the clock
	// is put forward.
	Cron string

	// TimeZone is one of IANA's, such as Europe/Berlin, as the server knows it. Defaults to UTC.
	TimeZone string

	// Type is of the events; those are emitted by the producer "scheduler", with the id of the schedule, and {"scheduled_at": ...} as metadata.
	// Or Work is the name of work items, and WorkTag their tag.
	Type          string
	Work, WorkTag string

	// Payload is that of the events, or the input of the work items; see Bus.Emit. Up to 1 MiB. Defaults to null.
	Payload any

	// Key is that of the events, or of the work items. Defaults to "": none.
	Key string

	// Jitter has each occurrence come up to so much later, by chance. Up to 24 h. Defaults to 0.
	Jitter time.Duration

	// CatchUp defaults to CatchUpOne, and Overlap to OverlapAllow.
	CatchUp CatchUp
	Overlap Overlap

	// ByPgCron has pg_cron fire it, which is to be installed in the database, and not the nodes: so it needs none, comes within a second or so of its time,
	// and if the server is away then it does not come. pg_cron takes 5 fields, or "@every" of 1 to 59 s, in the zone of its setting cron.timezone,
	// which is UTC by itself; and there is no Jitter, CatchUp or Overlap, but for CatchUpSkip, which is what CatchUp defaults to then. The job has the
	// name {namespace}_{name}_{id}, of which what is before the id is cut to 26 bytes, and calls run_scheduled_task. Defaults to false.
	ByPgCron bool

	// Paused: it does not occur, until Bus.ResumeSchedule. Defaults to false, which is for one that is new: a program that makes its schedules
	// whenever it begins does not end a pause that an operator has made.
	Paused bool
}

// Schedule makes a schedule, or changes the one of that name to this, also while an occurrence of it is due; to say the same again changes
// nothing. It returns its id. The nodes of the namespace carry it out: each occurrence exactly once, over all of them, when it is due.
// pgwake.ErrInvalid for what breaks a rule, among them cron expressions that are for no day that there is.
func (b *Bus) Schedule(ctx context.Context, s Schedule) (id string, err error) {
	const op = "schedule"
	payload, err := encode("payload of schedule", s.Payload, min(b.cfg.MaxPayload, maxScheduled))
	if err == nil {
		err = s.check()
	}
	if err != nil {
		return "", failed(op, err)
	}
	var active *bool // nil: as it is, and a new one is
	if s.Paused {
		active = new(bool)
	}
	return value[string](ctx, b, verb{op: op, function: "schedule_task", enqueues: true, args: []any{b.namespace, s.Name, s.Cron, text(s.Type), payload, text(s.TimeZone),
		active, s.Jitter, text(string(s.CatchUp)), orDefault(s.Overlap, OverlapAllow), text(s.Key), text(s.Work), text(s.WorkTag), s.ByPgCron}})
}

const maxScheduled = 1 << 20

func orDefault[T ~string](v, unless T) string {
	if v == "" {
		return string(unless)
	}
	return string(v)
}

// check finds what cannot even be sent. What a schedule may be is up to schedule_task.
func (s *Schedule) check() error {
	for what, t := range map[string]string{"name": s.Name, "time zone": s.TimeZone, "event type": s.Type, "work": s.Work, "tag": s.WorkTag,
		"key": s.Key, "CatchUp": string(s.CatchUp), "Overlap": string(s.Overlap)} {
		if err := checkText(what, t); err != nil {
			return err
		}
	}
	if s.Jitter < 0 {
		return invalid("a jitter of %v is negative", s.Jitter)
	}
	return checkCron(s.Cron)
}

// ScheduleInfo is a schedule, and how far it has got.
type ScheduleInfo struct {
	Schedule
	ID        string
	Next      time.Time // its next occurrence, without jitter; zero: it is paused, or pg_cron fires it
	JobID     int64     // of the job of pg_cron that fires it; 0: there is none
	Last      time.Time // the latest that was carried out, or when RunSchedule was; zero: there was none
	LastID    int64     // event or work item that came of it
	Skipped   int64     // how often occurrences were left out by CatchUp, in which case several count once, or by Overlap
	CreatedAt time.Time
	UpdatedAt time.Time // when it was changed, or carried out
}

const maxSchedules = 10_000

// Schedules returns up to limit schedules of the namespace, those with the lowest names after one. At most 10,000.
func (b *Bus) Schedules(ctx context.Context, after string, limit int) ([]ScheduleInfo, error) {
	const op = "list schedules"
	if limit < 1 || limit > maxSchedules {
		return nil, failed(op, invalid("a limit of %d, and 1 to %d is possible", limit, maxSchedules))
	}
	if err := checkText("name", after); err != nil {
		return nil, failed(op, err)
	}
	return b.schedules(ctx, op, nil, after, limit)
}

// GetSchedule returns the schedule of a name. pgwake.ErrNotFound if there is none.
func (b *Bus) GetSchedule(ctx context.Context, name string) (ScheduleInfo, error) {
	const op = "get schedule"
	if err := checkText("name", name); err != nil {
		return ScheduleInfo{}, failed(op, err)
	}
	found, err := b.schedules(ctx, op, &name, "", 1)
	if err == nil && len(found) == 0 {
		err = failed(op, fmt.Errorf("%w: schedule %q", pgwake.ErrNotFound, name))
	}
	if err != nil {
		return ScheduleInfo{}, err
	}
	return found[0], nil
}

// schedules are those of the namespace: the one of a name, or those after one.
func (b *Bus) schedules(ctx context.Context, op string, name *string, after string, limit int) ([]ScheduleInfo, error) {
	return query(ctx, b, verb{op: op, function: "list_schedules", args: []any{b.namespace, name, after, limit},
		columns: "task_id::pg_catalog.text, name, cron_expression, timezone, coalesce(event_type, ''), coalesce(work_name, ''), coalesce(work_tag, ''), payload::pg_catalog.text, coalesce(key, ''), " +
			"jitter, catch_up, overlap, NOT active, by_pg_cron, coalesce(job_id, 0), next_at, last_at, coalesce(last_id, 0), skipped, created_at, updated_at",
	}, func(row pgx.CollectableRow) (s ScheduleInfo, err error) {
		var payload string
		var next, last *time.Time
		err = row.Scan(&s.ID, &s.Name, &s.Cron, &s.TimeZone, &s.Type, &s.Work, &s.WorkTag, &payload, &s.Key, &s.Jitter, &s.CatchUp, &s.Overlap, &s.Paused, &s.ByPgCron, &s.JobID,
			&next, &last, &s.LastID, &s.Skipped, &s.CreatedAt, &s.UpdatedAt)
		s.Payload = json.RawMessage(payload)
		if next != nil {
			s.Next = *next
		}
		if last != nil {
			s.Last = *last
		}
		return s, err
	})
}

// PauseSchedule has a schedule not occur any more, and takes its pending occurrence away; ResumeSchedule has it occur from now on, and
// nothing is caught up with. They return whether that was not so before. pgwake.ErrNotFound if there is none of the name.
func (b *Bus) PauseSchedule(ctx context.Context, name string) (bool, error) {
	return b.activate(ctx, "pause schedule", name, false)
}

// ResumeSchedule ends a PauseSchedule.
func (b *Bus) ResumeSchedule(ctx context.Context, name string) (bool, error) {
	return b.activate(ctx, "resume schedule", name, true)
}

func (b *Bus) activate(ctx context.Context, op, name string, active bool) (bool, error) {
	if err := checkText("name", name); err != nil {
		return false, failed(op, err)
	}
	return value[bool](ctx, b, verb{op: op, function: "activate_schedule", enqueues: true, args: []any{b.namespace, name, active}})
}

// DeleteSchedule removes a schedule with its pending occurrence, and returns whether there was one. What has come of it stays.
func (b *Bus) DeleteSchedule(ctx context.Context, name string) (bool, error) {
	const op = "delete schedule"
	if err := checkText("name", name); err != nil {
		return false, failed(op, err)
	}
	return value[bool](ctx, b, verb{op: op, function: "delete_schedule", enqueues: true, args: []any{b.namespace, name}})
}

// RunSchedule has what a schedule is for come now, beside its occurrences, and returns the id of the event or work item; 0: it is paused, and
// nothing happened. pgwake.ErrNotFound if there is none of the name.
func (b *Bus) RunSchedule(ctx context.Context, name string) (int64, error) {
	const op = "run schedule"
	if err := checkText("name", name); err != nil {
		return 0, failed(op, err)
	}
	return value[int64](ctx, b, verb{op: op, function: "run_schedule", enqueues: true, args: []any{b.namespace, name}})
}

// NextOccurrence returns the first instant after another one that a cron expression is for, in a time zone ("": UTC); the zero time if there is
// none. @every counts from that other one. pgwake.ErrInvalid for what is no expression, or no zone.
func (b *Bus) NextOccurrence(ctx context.Context, cron, timeZone string, after time.Time) (time.Time, error) {
	const op = "next occurrence"
	if err := cmp.Or(checkCron(cron), checkText("time zone", timeZone), checkInstant(after)); err != nil {
		return time.Time{}, failed(op, err)
	}
	at, err := value[*time.Time](ctx, b, verb{op: op, function: "next_occurrence", args: []any{cron, text(timeZone), after}})
	if err != nil || at == nil {
		return time.Time{}, err
	}
	return *at, nil
}
