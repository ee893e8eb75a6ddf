package eventbus_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
)

func TestNode_HandlersOfAnEvent_RunInOneTransactionThatEndsTheDelivery(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.exec(`CREATE TABLE effects (id bigint, by text)`)
	l.undone(`DROP TABLE effects`)
	n := l.node(quick("g"))
	table := pgx.Identifier{l.p.Schema(), "effects"}.Sanitize()
	insert := func(by string) eventbus.Handler {
		return func(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO `+table+` VALUES ($1, $2)`, e.ID, by)
			return err
		}
	}
	var attempts atomic.Int64
	var events seen
	require.NoError(t, n.On(l.within(), "order.*", insert("first")))
	require.NoError(t, n.On(l.within(), "order.created", func(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error {
		events.note("%s %s %s %d %d", e.Type, e.Payload, e.Producer, e.Redelivery, e.MessageID)
		if err := insert("second")(ctx, e, tx); err != nil {
			return err
		}
		switch attempts.Add(1) {
		case 1:
			return errors.New("not yet")
		case 2:
			panic("oops")
		}
		return nil
	}))
	id, err := n.Emit(l.within(), "order.created", 7, nil)
	require.NoError(t, err)
	l.eventually(func() bool { return len(l.queued()) == 0 }, "it is handled")
	require.Equal(t, []string{"first", "second"}, all[string](l, `SELECT by FROM effects WHERE id = $1 ORDER BY by`, id))
	list := events.list()
	require.Len(t, list, 3)
	require.Equal(t, fmt.Sprintf("order.created 7 %s 0", n.ID()), list[0][:len(fmt.Sprintf("order.created 7 %s 0", n.ID()))])
	require.Contains(t, list[2], n.ID()+" 2 ")
}

func TestNode_FailsEachTime_IsADeadLetterAndARedriveGoesToItsGroup(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	n, other := l.node(quick("g")), l.node(quick("other"))
	var good atomic.Bool
	var handled, others seen
	require.NoError(t, other.On(l.within(), "#", others.ids))
	require.NoError(t, n.On(l.within(), "a", func(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error {
		handled.note("%d", e.ID)
		if !good.Load() {
			return errors.New("it is broken")
		}
		return nil
	}))
	require.NoError(t, n.On(l.within(), "b", func(context.Context, *eventbus.Event, pgx.Tx) error {
		return eventbus.DeadLetter(errors.New("never"))
	}))
	id := l.emit("a")
	letters := func() []eventbus.Letter {
		letters, err := l.DeadLetters(l.within(), nil)
		require.NoError(t, err)
		return letters
	}
	l.eventually(func() bool { return len(letters()) == 1 }, "it is given up")
	letter := letters()[0]
	require.Len(t, handled.list(), 5)
	require.Equal(t, []any{id, "a", "g", 5, 4, eventbus.ReasonHandler},
		[]any{letter.Event.ID, letter.Event.Type, letter.Group, letter.Attempts, letter.Event.Redelivery, letter.Reason})
	require.Contains(t, letter.Error, "it is broken")
	good.Store(true)
	redriven, err := l.Redrive(l.within(), &eventbus.LetterFilter{IDs: []int64{letter.ID}})
	require.NoError(t, err)
	require.Equal(t, 1, redriven)
	l.eventually(func() bool { return len(handled.list()) == 6 && len(l.queued()) == 0 }, "it is handled")
	require.Equal(t, slices.Repeat([]string{fmt.Sprint(id)}, 6), handled.list())
	require.Equal(t, []string{fmt.Sprint(id)}, others.list(), "the other group has had it")
	l.emit("b")
	l.eventually(func() bool { return len(letters()) == 1 }, "at once")
	require.Equal(t, []any{1, "Handler error"}, []any{letters()[0].Attempts, letters()[0].Reason})
}

func TestNode_HandlerPanics_DeadLetterHasTheStack(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	config := quick("g")
	config.MaxAttempts = 1
	require.NoError(t, l.node(config).On(l.within(), "a", func(context.Context, *eventbus.Event, pgx.Tx) error { panic("oops") }))
	l.emit("a")
	l.eventually(func() bool { return one[int](l, `SELECT count(*) FROM dead_letters`) == 1 }, "it is given up at once")
	letters, err := l.DeadLetters(l.within(), nil)
	require.NoError(t, err)
	require.Equal(t, []any{eventbus.ReasonHandler, 1}, []any{letters[0].Reason, letters[0].Attempts})
	require.Contains(t, letters[0].Error, "oops")
	require.Contains(t, letters[0].Error, "node_test.go:")
}

func TestNode_VisibilityAndTimeout_AreThoseOfItsDeliveries(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	config := quick("g")
	config.MaxAttempts, config.Visibility, config.Timeout = 1, 5*time.Second, 200*time.Millisecond
	left := make(chan time.Duration, 1)
	require.NoError(t, l.node(config).On(l.within(), "a", func(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error {
		var until time.Duration // by another connection, and not within the time of the handler
		err := l.p.Pool().QueryRow(l.within(), `SELECT visible_at - clock_timestamp() FROM `+pgx.Identifier{l.p.Schema()}.Sanitize()+`.worker_queue WHERE id = $1`, e.MessageID).Scan(&until)
		left <- until
		if err == nil {
			<-ctx.Done()
			err = ctx.Err()
		}
		return err
	}))
	l.emit("a")
	until := <-left
	require.Positive(t, until)
	require.LessOrEqual(t, until, 5*time.Second)
	l.eventually(func() bool { return one[int](l, `SELECT count(*) FROM dead_letters`) == 1 }, "its time is over")
	letters, err := l.DeadLetters(l.within(), nil)
	require.NoError(t, err)
	require.Contains(t, letters[0].Error, dispatch.ErrTimeout.Error())
}

func TestNode_RetryAfter_WaitsSoLong(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	n := l.node(quick("g"))
	require.NoError(t, n.On(l.within(), "a", func(context.Context, *eventbus.Event, pgx.Tx) error {
		return eventbus.RetryAfter(errors.New("later"), time.Hour)
	}))
	l.emit("a")
	l.eventually(func() bool {
		return one[bool](l, `SELECT coalesce(bool_and(visible_at > now() + interval '59 min' AND last_error = 'later'), false) FROM worker_queue`)
	}, "it is due in an hour")
}

func TestNode_PlainHandler_RunsWithoutATransactionAndAgainIfATransactionalOneFails(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	n := l.node(quick("g"))
	var s seen
	var failed atomic.Bool
	require.NoError(t, n.On(l.within(), "a", func(context.Context, *eventbus.Event, pgx.Tx) error {
		if !failed.Swap(true) {
			return errors.New("no")
		}
		return nil
	}))
	require.NoError(t, n.OnPlain(l.within(), "#", func(_ context.Context, e *eventbus.Event) error { s.note("%s", e.Type); return nil }))
	l.emit("a")
	l.emit("b")
	l.eventually(func() bool { return len(l.queued()) == 0 }, "both are handled")
	require.ElementsMatch(t, []string{"a", "a", "b"}, s.list())
}

func TestNode_HandlerEndsItsTransaction_CannotAndSavepointsCan(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	n := l.node(quick("g"))
	result := make(chan error, 3)
	require.NoError(t, n.On(l.within(), "a", func(ctx context.Context, _ *eventbus.Event, tx pgx.Tx) error {
		result <- tx.Commit(ctx)
		result <- tx.Rollback(ctx)
		result <- pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { _, err := tx.Exec(ctx, `SELECT 1`); return err })
		return nil
	}))
	l.emit("a")
	require.Error(t, <-result)
	require.Error(t, <-result)
	require.NoError(t, <-result)
	l.eventually(func() bool { return len(l.queued()) == 0 }, "it is handled all the same")
}

// Two versions of a program in one group: each handles what it knows, and nothing becomes a dead letter that somebody handles.
func TestNode_MixedFleet_EachClaimsWhatItHandles(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	old, new_ := l.node(quick("g")), l.nodeOn(l.another(), quick("g"))
	var byOld, byNew seen
	require.NoError(t, old.On(l.within(), "order.created", byOld.types))
	require.NoError(t, new_.On(l.within(), "order.paid", byNew.types))
	require.NoError(t, new_.On(l.within(), "item.*", byNew.types))
	for range 20 {
		l.emit("order.created")
		l.emit("order.paid")
		l.emit("item.added")
	}
	l.eventually(func() bool { return len(l.queued()) == 0 }, "all are handled")
	require.Equal(t, slices.Repeat([]string{"order.created"}, 20), byOld.list())
	paid := slices.DeleteFunc(byNew.list(), func(s string) bool { return s != "order.paid" })
	require.Len(t, paid, 20)
	require.Len(t, byNew.list(), 40)
	require.Zero(t, one[int](l, `SELECT count(*) FROM dead_letters`))
}

// What a node with a narrow pattern leaves behind is handled by one whose pattern covers it, as soon as that has heard of it.
func TestNode_NarrowerPatternWhoseNodeIsGone_IsHandledByOneThatCoversIt(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	var s seen
	wide := l.node(quick("g"))
	require.NoError(t, wide.On(l.within(), "order.#", s.types))
	l.subscribe("g", "order.created") // by a node that is gone
	l.emit("order.created")
	l.eventually(func() bool { return len(s.list()) == 1 }, "the wide one has it")
	require.Empty(t, all[string](l, `SELECT reason FROM dead_letters`))
}

// seldom is a Provider, and a node on it, whose heartbeats no test lives to see.
var seldom = pgwake.Config{FallbackInterval: time.Hour}

// A node declares a pattern while others are at work, and dies: what goes by that is not late by a heartbeat.
func TestNode_AnotherDeclaresANarrowerPatternAndDies_IsHandledAtOnce(t *testing.T) {
	t.Parallel()
	l := newLabOn(t, &seldom, nil)
	config := quick("g")
	config.Heartbeat = time.Hour
	var s, narrow seen
	wide := l.node(config)
	require.NoError(t, wide.On(l.within(), "order.*", s.types))
	bus, p := l.mortal()
	dies, err := bus.Node(l.within(), config)
	require.NoError(t, err)
	require.NoError(t, dies.Start(l.within()))
	require.NoError(t, dies.On(l.within(), "order.created", narrow.types))
	require.NoError(t, p.Close(l.within()))
	l.exec(`BEGIN; SELECT emit(NULL, 'order.created')`)
	require.Equal(t, []string{"order.created eventbus/g|order.created"}, l.queued())
	l.exec(`COMMIT`)
	l.eventually(func() bool { return len(l.queued()) == 0 }, "the wide one has it")
	require.Equal(t, []string{"order.created"}, s.list())
	require.Empty(t, narrow.list())
	l.eventually(func() bool {
		return one[bool](l, `SELECT patterns = '{order.*,order.created}' FROM event_nodes WHERE node_id = $1`, wide.ID())
	}, "it was told of both")
	_, err = l.Unsubscribe(l.within(), "g", "order.created")
	require.NoError(t, err)
	l.eventually(func() bool {
		return one[bool](l, `SELECT patterns = '{order.*}' FROM event_nodes WHERE node_id = $1`, wide.ID())
	}, "it hears of the end as well")
}

// Nobody is told of a pattern. The heartbeat that costs no statement finds it.
func TestNode_PatternIsDeclaredInSilence_IsFoundWithAHeartbeat(t *testing.T) {
	t.Parallel()
	l := newLabOn(t, &pgwake.Config{FallbackInterval: 100 * time.Millisecond}, nil)
	var s seen
	n := l.node(nil)
	require.NoError(t, n.On(l.within(), "order.*", s.types))
	l.eventually(func() bool { return one[bool](l, `SELECT patterns = '{order.*}' FROM event_nodes`) }, "it has heard of its own pattern")
	l.exec(`SET pgwake.notify = off`)
	l.exec(`SELECT subscribe(NULL, NULL, '{order.created}')`)
	l.exec(`RESET pgwake.notify`)
	l.emit("order.created")
	l.eventually(func() bool { return len(s.list()) == 1 }, "it is handled")
}

func TestNode_SeveralOfAGroup_ShareItsEvents(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	var s seen
	for range 3 {
		n := l.nodeOn(l.another(), quick("g"))
		require.NoError(t, n.On(l.within(), "a", s.ids))
	}
	var want []string
	for range 60 {
		want = append(want, fmt.Sprint(l.emit("a")))
	}
	l.eventually(func() bool { return len(l.queued()) == 0 }, "all are handled")
	require.ElementsMatch(t, want, s.list(), "each once")
}

// A replay of a long log takes hours, of steps of which each stands by itself.
func TestNode_StopsDuringAReplay_GivesItBackAtOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	config := quick("g")
	config.StopTimeout = time.Hour
	n := l.node(config)
	l.subscribe("g", "a")
	l.exec(`ALTER FUNCTION replay_some RENAME TO done_by_test`)
	l.exec(`CREATE SEQUENCE steps`)
	l.exec(`CREATE FUNCTION replay_some(bigint) RETURNS text LANGUAGE sql SET search_path FROM CURRENT AS $$ SELECT 'more' FROM nextval('steps') $$`)
	_, err := l.Replay(l.within(), "g", eventbus.Range{})
	require.NoError(t, err)
	l.eventually(func() bool { return one[int](l, `SELECT last_value FROM steps`) > 2 }, "it is under way")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	require.NoError(t, n.Stop(ctx))
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM worker_queue WHERE name = 'eventbus|replay' AND lock_token IS NULL AND visible_at <= now()`))
}

func TestNode_Stop_FinishesWhatRunsAndGivesTheRestBackAtOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	config := quick("g")
	config.Concurrency = 1
	n := l.node(config)
	began, goOn := make(chan struct{}), make(chan struct{})
	require.NoError(t, n.On(l.within(), "a", func(context.Context, *eventbus.Event, pgx.Tx) error { began <- struct{}{}; <-goOn; return nil }))
	for range 3 {
		l.emit("a")
	}
	<-began
	stopped := make(chan error, 2)
	for range 2 {
		go func() { stopped <- n.Stop(context.Background()) }()
	}
	l.eventually(func() bool {
		return one[int](l, `SELECT count(*) FROM worker_queue WHERE visible_at <= now()`) == 2
	}, "what is not begun is due")
	select {
	case <-stopped:
		t.Fatal("it did not wait for the handler")
	default:
	}
	close(goOn)
	require.NoError(t, <-stopped)
	require.NoError(t, <-stopped, "twice")
	require.Len(t, l.queued(), 2)
	nodes, err := l.Nodes(l.within())
	require.NoError(t, err)
	require.Len(t, nodes, 1)
	require.False(t, nodes[0].Live)
	require.False(t, nodes[0].StoppedAt.IsZero())

	go func() { <-began; <-began }()
	require.NoError(t, n.Start(l.within()), "it may begin again")
	require.NoError(t, n.Start(l.within()), "and twice")
	l.eventually(func() bool { return len(l.queued()) == 0 }, "the rest is handled")
}

// Nobody has waited for the end of a node. When it is started once more, it works.
func TestNode_StartsWhileItComesToItsEnd_BeginsAnew(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	n := l.node(quick("g"))
	began, goOn := make(chan struct{}), make(chan struct{})
	var s seen
	require.NoError(t, n.On(l.within(), "a", func(context.Context, *eventbus.Event, pgx.Tx) error { close(began); <-goOn; return nil }))
	require.NoError(t, n.On(l.within(), "b", s.types))
	l.emit("a")
	<-began
	none, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, n.Stop(none), context.Canceled)
	require.ErrorIs(t, n.Start(none), context.Canceled)
	started := make(chan error, 1)
	go func() { started <- n.Start(l.t.Context()) }()
	close(goOn)
	require.NoError(t, <-started)
	l.emit("b")
	l.eventually(func() bool { return len(s.list()) == 1 && len(l.queued()) == 0 }, "it is handled")
}

func TestNode_StopDoesNotWaitForItsHandlers_IsMarkedAsGoneAllTheSame(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	n := l.node(quick("g"))
	began, goOn := make(chan struct{}), make(chan struct{})
	require.NoError(t, n.On(l.within(), "a", func(context.Context, *eventbus.Event, pgx.Tx) error { close(began); <-goOn; return nil }))
	l.emit("a")
	<-began
	none, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, n.Stop(none), context.Canceled)
	close(goOn)
	<-n.Done()
	require.True(t, one[bool](l, `SELECT stopped_at IS NOT NULL AND NOT live FROM list_nodes()`))
}

func TestNode_StartAndStopAtOnce_NothingIsLeftBehind(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	n, err := l.Node(l.within(), quick("g"))
	require.NoError(t, err)
	require.NoError(t, n.On(l.within(), "a", new(seen).ids))
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 5 {
				if err := errors.Join(n.Start(t.Context()), n.Stop(t.Context())); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	require.NoError(t, n.Stop(l.within()))
}

// The connection of a handler breaks in the middle of its transaction, as when its process is killed: another attempt has all of the effects.
func TestNode_ConnectionBreaksInAHandler_EffectsHappenOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.exec(`CREATE TABLE effects (id bigint)`)
	l.undone(`DROP TABLE effects`)
	table := pgx.Identifier{l.p.Schema(), "effects"}.Sanitize()
	n := l.node(quick("g"))
	var killed atomic.Bool
	require.NoError(t, n.On(l.within(), "a", func(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `INSERT INTO `+table+` VALUES ($1)`, e.ID); err != nil {
			return err
		}
		if !killed.Swap(true) {
			_, _ = tx.Exec(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`)
		}
		return nil
	}))
	l.emit("a")
	l.eventually(func() bool { return len(l.queued()) == 0 }, "it is handled")
	require.True(t, killed.Load())
	require.Equal(t, 1, one[int](l, `SELECT count(*) FROM effects`))
	require.Zero(t, one[int](l, `SELECT count(*) FROM dead_letters`))
}

// A handler emits an event of a key that somebody else has, who takes his time, or removes a backlog.
func TestNode_CommitHasNoAnswer_CostsNoAttempt(t *testing.T) {
	t.Parallel()
	for name, ends := range map[string]bool{"since its connection ends": true, "in time": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if !ends && testing.Short() {
				t.Skip("takes 10 s")
			}
			lines := &logged{}
			l := newLab(t, &eventbus.Config{Logger: slog.New(lines)})
			l.subscribe("other", "b")
			other := l.begin()
			_, err := l.WithTx(other).Emit(l.within(), "b", nil, &eventbus.EmitOptions{Key: "k"})
			require.NoError(t, err)
			_, err = other.Exec(l.within(), `SET CONSTRAINTS ALL IMMEDIATE`)
			require.NoError(t, err)
			config := quick("g")
			config.MaxAttempts = 1
			n := l.node(config)
			require.NoError(t, n.On(l.within(), "a", func(ctx context.Context, _ *eventbus.Event, tx pgx.Tx) error {
				_, err := l.WithTx(tx).Emit(ctx, "b", nil, &eventbus.EmitOptions{Key: "k"})
				return err
			}))
			l.emit("a")
			if ends {
				l.eventually(func() bool {
					return one[bool](l, `SELECT coalesce(bool_or(pg_terminate_backend(pid)), false) FROM pg_stat_activity
						WHERE wait_event_type = 'Lock' AND strpos(query, '"' || current_schema() || '".ack_work(') > 0`)
				}, "the commit waits")
			}
			l.eventually(func() bool {
				return len(lines.of("eventbus: cannot commit")) > 0 || one[int](l, `SELECT count(*) FROM dead_letters`) > 0
			}, "it has no answer")
			require.NoError(t, other.Rollback(l.within()))
			l.eventually(func() bool { return len(l.lined("k")) == 1 }, "it is handled, once")
			l.eventually(func() bool { return slices.Equal(l.queued(), []string{"b eventbus/other|b"}) }, "it is done")
			require.Zero(t, one[int](l, `SELECT count(*) FROM dead_letters`))
		})
	}
}

// What costs a handler no attempt may be its own doing all the same: its key does not stand still for ever.
func TestNode_CommitAlwaysFails_IsADeadLetterInTheEnd(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.exec(`CREATE TABLE slow (n integer)`)
	l.exec(`CREATE FUNCTION too_slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'it takes too long' USING ERRCODE = '57014'; END $$`)
	l.exec(`CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON slow DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION too_slow()`)
	l.undone(`DROP TABLE slow; DROP FUNCTION too_slow()`)
	config := quick("g")
	config.MaxAttempts = 2
	n := l.node(config)
	var rounds atomic.Int64
	require.NoError(t, n.On(l.within(), "a", func(ctx context.Context, _ *eventbus.Event, tx pgx.Tx) error {
		rounds.Add(1)
		_, err := tx.Exec(ctx, `INSERT INTO `+pgx.Identifier{l.p.Schema(), "slow"}.Sanitize()+` VALUES (1)`)
		return err
	}))
	l.emit("a")
	l.eventuallyAll(func() int { return int(rounds.Load()) }, 2*(eventbus.MostSpared+1), "it is tried again and again")
	l.eventually(func() bool { return one[int](l, `SELECT count(*) FROM dead_letters`) == 1 }, "it is given up")
	require.Empty(t, l.queued())
	require.EqualValues(t, 2*(eventbus.MostSpared+1), rounds.Load())
}

// A handler does not say that its statement has failed, whose time limit has closed the connection.
func TestNode_HandlerHidesThatItsConnectionIsClosed_IsADeadLetterInTheEnd(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	config := quick("g")
	config.MaxAttempts = 3
	n := l.node(config)
	var attempts atomic.Int64
	require.NoError(t, n.On(l.within(), "a", func(ctx context.Context, _ *eventbus.Event, tx pgx.Tx) error {
		attempts.Add(1)
		for !tx.Conn().IsClosed() && ctx.Err() == nil { // as it is not if the time is over before the statement is sent
			short, cancel := context.WithCancel(ctx)
			time.AfterFunc(10*time.Millisecond, cancel)
			_, _ = tx.Exec(short, `SELECT pg_sleep(60)`)
		}
		return nil
	}))
	l.emit("a")
	l.eventually(func() bool { return len(l.queued()) == 0 }, "it is given up")
	require.EqualValues(t, 3, attempts.Load())
	letters, err := l.DeadLetters(l.within(), nil)
	require.NoError(t, err)
	require.Len(t, letters, 1)
	require.Equal(t, eventbus.ReasonHandler, letters[0].Reason)
}

// Another has the delivery by the time that the handler is done: nothing of what it did is there.
func TestNode_LeaseWasLost_NothingTakesEffect(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.exec(`CREATE TABLE effects (redelivery int)`)
	l.undone(`DROP TABLE effects`)
	table := pgx.Identifier{l.p.Schema(), "effects"}.Sanitize()
	n := l.node(quick("g"))
	require.NoError(t, n.On(l.within(), "a", func(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `INSERT INTO `+table+` VALUES ($1)`, e.Redelivery)
		if err == nil && e.Redelivery == 0 { // as if the lease had ended
			in := pgx.Identifier{l.p.Schema()}.Sanitize()
			_, err = l.p.Pool().Exec(ctx, `UPDATE `+in+`.worker_queue SET lock_token = NULL, visible_at = clock_timestamp(); SELECT `+in+`.notify_queue('worker', 1, NULL)`)
		}
		return err
	}))
	l.emit("a")
	l.eventually(func() bool {
		return one[int](l, `SELECT count(*) FROM effects`) > 0 || len(l.queued()) == 0
	}, "it is handled")
	require.Equal(t, []int{1}, all[int](l, `SELECT redelivery FROM effects`))
}

// What is small is in the delivery as well, and outlives the log.
func TestNode_EventIsNotInTheLogAnyMore_IsADeadLetterIfItIsLarge(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "#")
	_, err := l.EmitMany(l.within(), []eventbus.Emission{{Type: "large", Payload: strings.Repeat("x", 5000)}, {Type: "small"}, {Type: "bad", Payload: 7}})
	require.NoError(t, err)
	l.exec(`DELETE FROM event_log`)
	n := l.node(quick("g"))
	var s seen
	require.NoError(t, n.On(l.within(), "#", func(ctx context.Context, e *eventbus.Event, tx pgx.Tx) error {
		if e.Type == "bad" {
			return eventbus.DeadLetter(errors.New("it is bad"))
		}
		return s.types(ctx, e, tx)
	}))
	l.eventually(func() bool {
		return one[int](l, `SELECT count(*) FROM dead_letters WHERE reason = 'Event not in the log' AND name = 'large'`) == 1 && len(l.queued()) == 0
	}, "all are done, or given up")
	require.Equal(t, []string{"small"}, s.list())
	letters, err := l.DeadLetters(l.within(), nil)
	require.NoError(t, err)
	payloads := map[string]string{}
	for _, letter := range letters {
		payloads[letter.Event.Type] = string(letter.Event.Payload)
	}
	require.Equal(t, map[string]string{"large": "", "bad": "7"}, payloads)
}

func TestNode_BadArguments_AreRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	for _, c := range []eventbus.NodeConfig{{Group: "a|b"}, {Concurrency: -1}, {BatchSize: -1}, {Visibility: time.Millisecond}, {MaxAttempts: -2}, {Heartbeat: 1}, {Timeout: -1}} {
		_, err := l.Node(l.within(), &c)
		require.ErrorIs(t, err, pgwake.ErrConfig, c)
	}
	_, err := l.Node(l.within(), &eventbus.NodeConfig{Metadata: 7})
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	_, err = l.Node(l.within(), &eventbus.NodeConfig{Description: "\x00"})
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	n, err := l.Node(l.within(), nil)
	require.NoError(t, err)
	require.ErrorIs(t, n.On(l.within(), "a", nil), pgwake.ErrInvalid)
	require.ErrorIs(t, n.OnPlain(l.within(), "a", nil), pgwake.ErrInvalid)
	require.ErrorIs(t, n.On(l.within(), "a|b", new(seen).ids), pgwake.ErrInvalid)
	require.ErrorIs(t, n.On(l.within(), "a*", new(seen).ids), pgwake.ErrInvalid)
	for i := range pgwake.MaxTags - 1 {
		require.NoError(t, n.On(l.within(), fmt.Sprint("a", i), new(seen).ids))
	}
	require.ErrorIs(t, n.On(l.within(), "b", new(seen).ids), pgwake.ErrInvalid)
	require.NoError(t, n.On(l.within(), "a0", new(seen).ids), "another handler of the same")
}

// What a node has no handler for it does not even touch: another version of the program is going to.
func TestNode_NoHandlerForAnEventOfItsGroup_LeavesItAlone(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "order.paid", "#")
	n := l.node(quick("g"))
	var s seen
	require.NoError(t, n.On(l.within(), "order.created", s.types))
	l.emit("order.paid")
	l.emit("item.added")
	for range 3 {
		l.emit("order.created")
	}
	l.eventually(func() bool { return len(s.list()) == 3 && len(l.queued()) == 2 }, "what it has handlers for")
	beats := func() time.Time { return one[time.Time](l, `SELECT last_heartbeat FROM event_nodes`) }
	since := beats()
	l.eventually(func() bool { return beats().After(since) }, "it has asked for patterns once more")
	l.emit("order.created")
	l.eventually(func() bool { return len(s.list()) == 4 && len(l.queued()) == 2 }, "and claimed by those")
	require.Equal(t, []bool{true, true}, all[bool](l, `SELECT q.xmin::text = e.xact::text FROM worker_queue q JOIN event_log e ON e.event_id = (q.input->>'event_id')::bigint`))
}

// What is small travels in the delivery, and what is large is read. A handler sees no difference, whichever way the event came.
func TestNode_SmallAndLargeEvents_ComeAsTheLogHasThem(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.subscribe("g", "#")
	large := strings.Repeat("0123456789abcdef", 1000) // which compresses well
	var random strings.Builder
	for range 100 {
		random.WriteString(rand.Text())
	}
	emitter, err := l.Node(l.within(), &eventbus.NodeConfig{ID: "emitter"})
	require.NoError(t, err)
	var events []eventbus.Emission
	for i, payload := range []any{nil, map[string]any{"b": 1.50, "a": []any{nil, "<&>"}}, large, random.String()} {
		for _, key := range []string{"", fmt.Sprint("k", i)} {
			o := eventbus.EmitOptions{Key: key, Headers: map[string]string{"h": "x"}, Metadata: map[string]int{"m": i}}
			events = append(events, eventbus.Emission{Type: "a.b", Payload: payload, EmitOptions: o})
			_, err := emitter.Emit(l.within(), "a.b", payload, &o)
			require.NoError(t, err)
		}
	}
	_, err = emitter.EmitMany(l.within(), events)
	require.NoError(t, err)
	want := l.log(2 * len(events))
	require.Equal(t, 4+2, one[int](l, `SELECT count(*) FROM worker_queue WHERE input -> 'payload' IS NULL`), "those that are large; of a key the first")
	got := make(chan eventbus.Event, len(want))
	n := l.node(quick("g"))
	require.NoError(t, n.On(l.within(), "#", func(_ context.Context, e *eventbus.Event, _ pgx.Tx) error {
		require.Positive(t, e.MessageID)
		e.MessageID = 0
		got <- *e
		return nil
	}))
	_, err = l.Replay(l.within(), "g", eventbus.Range{})
	require.NoError(t, err)
	times := map[int64]int{}
	for range 2 * len(want) {
		select {
		case e := <-got:
			times[e.ID]++
			i := slices.IndexFunc(want, func(w *eventbus.Event) bool { return w.ID == e.ID })
			require.JSONEq(t, string(want[i].Payload), string(e.Payload))
			require.JSONEq(t, string(want[i].Metadata), string(e.Metadata))
			e.Payload, e.Metadata = want[i].Payload, want[i].Metadata
			require.Equal(t, *want[i], e)
		case <-time.After(patience):
			require.Fail(t, "not all are handled")
		}
	}
	for _, w := range want {
		require.Equal(t, 2, times[w.ID], "emitted, and replayed")
	}
}

func TestNodeDone_StoppedOrProviderClosed_IsClosed(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	n, err := l.Node(l.within(), nil)
	require.NoError(t, err)
	require.Nil(t, n.Done(), "it was not started")
	ended := func(done <-chan struct{}) bool {
		select {
		case <-done:
			return true
		default:
			return false
		}
	}
	require.NoError(t, n.Start(l.within()))
	first := n.Done()
	require.False(t, ended(first))
	require.NoError(t, n.Stop(l.within()))
	require.True(t, ended(first))
	require.NoError(t, n.Start(l.within()))
	require.False(t, ended(n.Done()), "it is about the latest Start")
	require.NoError(t, l.p.Close(l.within()))
	l.eventually(func() bool { return ended(n.Done()) }, "it has seen that its Provider is closed")
	require.NoError(t, n.Stop(l.within()))
}

// Whatever kind of handler a delivery has, the archive of the Provider has it once it is handled, for as long as that says.
func TestNode_ProviderArchives_HasDeliveriesOfAllHandlers(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		keep time.Duration
		want []string
	}{
		"for a time":   {36 * time.Hour, []string{"35 h", "transactional", "plain"}},
		"not asked to": {0, []string{"35 h", "37 h"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLabOn(t, &pgwake.Config{ArchiveFor: c.keep}, nil)
			n := l.node(quick("g"))
			require.NoError(t, n.OnPlain(l.within(), "plain", func(context.Context, *eventbus.Event) error { return nil }))
			require.NoError(t, n.On(l.within(), "transactional", new(seen).ids))
			l.exec(`INSERT INTO archive (item_id, namespace, priority, attempt_count, name, enqueued_at, finished_at)
				SELECT 0, 'default', 0, 1, ago, now() - ago::interval, now() - ago::interval FROM unnest('{35 h,37 h}'::text[]) AS ago`)
			for _, eventType := range []string{"transactional", "plain"} {
				l.emit(eventType)
				l.eventually(func() bool { return len(l.queued()) == 0 }, "it is handled")
			}
			require.Equal(t, c.want, all[string](l, `SELECT name FROM archive ORDER BY id`))
		})
	}
}
