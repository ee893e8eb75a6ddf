package pgmq_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/pgwake/pgwake/dispatch/pgmq"
	"github.com/pgwake/pgwake/dispatch/pgmq/pgmqtest"
	"github.com/pgwake/pgwake/dispatch/streamtest"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// This file answers: are pgmq's queues an EventStream, whoever sends to them, and does waiting for them cost nothing?

func TestMain(m *testing.M) {
	code := m.Run()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintf(os.Stderr, "goroutines were left behind: %v\n", err)
		code = 1
	}
	os.Exit(code)
}

const patience = 20 * time.Second

var databases atomic.Int64

// database creates one, which is dropped when the test ends, and returns its URL: pgmq is in one schema, so tests cannot share it.
func database(tb testing.TB, prepare func(context.Context, *pgxpool.Pool) error) string {
	tb.Helper()
	ctx := context.Background()
	admin, err := pgx.Connect(ctx, pgwaketest.URL(tb))
	require.NoError(tb, err)
	name := fmt.Sprintf("pgmq_%d_%d", os.Getpid(), databases.Add(1))
	if _, err := admin.Exec(ctx, `CREATE DATABASE `+name); err != nil {
		_ = admin.Close(ctx)
		tb.Skipf("these tests need a role that may create databases: %v", err)
	}
	tb.Cleanup(func() {
		_, err := admin.Exec(ctx, `DROP DATABASE `+name+` WITH (FORCE)`)
		require.NoError(tb, err)
		require.NoError(tb, admin.Close(ctx))
	})
	u, err := url.Parse(pgwaketest.URL(tb))
	require.NoError(tb, err)
	u.Path = "/" + name
	p := open(tb, u.String())
	require.NoError(tb, prepare(ctx, p))
	require.NoError(tb, pgmq.Install(ctx, p))
	return u.String()
}

func open(tb testing.TB, url string) *pgxpool.Pool {
	tb.Helper()
	pool, err := pgxpool.New(context.Background(), url)
	require.NoError(tb, err)
	tb.Cleanup(pool.Close)
	return pool
}

// stream is a Stream with its pool.
type stream struct {
	*pgmq.Stream
	pool             *pgxpool.Pool
	url, application string
}

func newStream(tb testing.TB, databaseURL string) *stream {
	tb.Helper()
	s := &stream{url: databaseURL, application: fmt.Sprintf("pgmq_%d", databases.Add(1))}
	u, err := url.Parse(databaseURL)
	require.NoError(tb, err)
	q := u.Query()
	q.Set("application_name", s.application)
	u.RawQuery = q.Encode()
	s.pool = open(tb, u.String())
	s.Stream, err = pgmq.New(context.Background(), s.pool, &pgmq.Config{Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
	require.NoError(tb, err)
	tb.Cleanup(s.Close)
	return s
}

// cut ends all its connections.
func (s *stream) cut(tb testing.TB) {
	tb.Helper()
	admin, err := pgx.Connect(context.Background(), s.url)
	require.NoError(tb, err)
	defer admin.Close(context.Background())
	_, err = admin.Exec(context.Background(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1`, s.application)
	require.NoError(tb, err)
}

// listening waits until the Stream listens.
func (s *stream) listening(t *testing.T) {
	t.Helper()
	awaitListening(t, s.url, s.application)
}

// awaitListening waits until the Stream of an application listens.
func awaitListening(t *testing.T, url, application string) {
	t.Helper()
	admin := open(t, url)
	require.Eventually(t, func() bool {
		var n int
		require.NoError(t, admin.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity
			WHERE application_name = $1 AND state = 'idle' AND query LIKE 'LISTEN pgmq_message_ready;%'`, application).Scan(&n))
		return n == 1
	}, patience, 10*time.Millisecond)
}

func (s *stream) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	_, err := s.pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err, sql)
}

func factory(prepare func(context.Context, *pgxpool.Pool) error) streamtest.Factory {
	var all sync.Map // by the Stream
	keep := func(s *stream) dispatch.EventStream {
		all.Store(s.Stream, s)
		return s.Stream
	}
	of := func(s dispatch.EventStream) *stream {
		v, _ := all.Load(s)
		return v.(*stream)
	}
	return streamtest.Factory{
		New: func(tb testing.TB) dispatch.EventStream { return keep(newStream(tb, database(tb, prepare))) },
		Another: func(tb testing.TB, s dispatch.EventStream) dispatch.EventStream {
			return keep(newStream(tb, of(s).url))
		},
		Break: func(tb testing.TB, s dispatch.EventStream) { of(s).cut(tb) },
		DeadLetters: func(tb testing.TB, s dispatch.EventStream, namespace string) []string {
			rows, err := of(s).pool.Query(context.Background(), `SELECT headers -> 'pgwake' ->> 'name' FROM pgmq.`+pgx.Identifier{"a_" + namespace + "_queue"}.Sanitize()+`
				WHERE headers -> 'pgwake' -> 'dead' ->> 'reason' <> ''`)
			require.NoError(tb, err)
			names, err := pgx.CollectRows(rows, pgx.RowTo[string])
			require.NoError(tb, err)
			return names
		},
	}
}

func TestStream_Contract(t *testing.T) { streamtest.Run(t, factory(pgmqtest.Install)) }

// With the real one, where the server has it.
func TestStream_Contract_OnPgmq(t *testing.T) {
	probe := open(t, pgwaketest.URL(t))
	var version string
	err := probe.QueryRow(t.Context(), `SELECT coalesce(max(default_version), '') FROM pg_available_extensions WHERE name = 'pgmq'`).Scan(&version)
	require.NoError(t, err)
	install := `CREATE EXTENSION pgmq`
	if path := os.Getenv("PGWAKE_PGMQ_SQL"); path != "" {
		script, err := os.ReadFile(path)
		require.NoError(t, err)
		install = string(script)
	} else if version == "" {
		t.Skip("the server has no extension pgmq, and PGWAKE_PGMQ_SQL names no file with its SQL-only installation")
	}
	streamtest.Run(t, factory(func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := pool.Exec(ctx, install)
		return err
	}))
}

func standIn(t *testing.T) *stream { return newStream(t, database(t, pgmqtest.Install)) }

func (s *stream) receive(t *testing.T, namespace string) dispatch.StreamDelivery {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	got, err := s.Receive(ctx, namespace, 1, time.Minute)
	require.NoError(t, err)
	return got[0]
}

func TestNamespaceOf_IsAsTheNamesSay(t *testing.T) {
	s := standIn(t)
	for queue, want := range map[string]string{
		"orchestration": "orchestration", "orchestration_steps_queue": "orchestration", "worker_billing_queue": "billing", "worker_a_b_queue": "a_b",
		"worker__queue": "worker", "worker_queue": "worker", "billing_queue": "billing", "Billing2_queue": "Billing2", "billing": "default", "": "default",
		"2x_queue": "default", "a-b_queue": "default", "_queue": "default", "worker_x_queue_2": "default",
	} {
		var got string
		require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT pgwake_pgmq.namespace_of($1)`, queue).Scan(&got))
		require.Equal(t, want, got, queue)
	}
	for _, n := range []int{1, 44, 45, 200} {
		var channel string
		require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT pgwake_pgmq.channel($1)`, strings.Repeat("x", n)).Scan(&channel))
		require.LessOrEqual(t, len(channel), 63)
		require.True(t, strings.HasPrefix(channel, "pgmq_message_ready."))
	}
}

// A message that somebody else sends, by whatever way, wakes who waits: the fallback would take a minute.
func TestReceive_SentByOthers_IsPushed(t *testing.T) {
	s := standIn(t)
	for _, send := range []string{
		`SELECT pgmq.send('worker_mail_queue', '{"n": 1}')`,
		`INSERT INTO pgmq.q_worker_mail_queue (vt, message, headers) VALUES (clock_timestamp(), '{"n": 1}', '[1]')`,
		`SELECT pgmq.send('worker_mail_queue', '{"n": 1}', '{"k": "v", "n": 7, "pgwake": {"name": "mail.send"}}', clock_timestamp() + interval '300 ms')`,
	} {
		s.exec(t, `SELECT pgmq.create('worker_mail_queue')`)
		s.listening(t)
		got := make(chan dispatch.StreamDelivery, 1)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		since := s.now(t)
		go func() {
			defer close(got)
			all, err := s.Receive(ctx, "mail", 1, time.Minute)
			if err != nil {
				t.Errorf("receive: %v", err)
				return
			}
			got <- all[0]
		}()
		s.waits(t, since)
		s.exec(t, send)
		d := <-got
		cancel()
		require.JSONEq(t, `{"n": 1}`, string(d.Payload))
		require.Equal(t, 1, d.Attempt)
		if d.Headers != nil {
			require.Equal(t, "mail.send", d.Name)
			require.Equal(t, map[string]string{"k": "v", "n": "7"}, d.Headers)
		} else {
			require.Equal(t, "worker_mail_queue", d.Name)
		}
		require.NoError(t, s.Ack(t.Context(), []pgwake.LockToken{d.Receipt}))
	}
}

// waits waits until a Receive that began after an instant of the server has asked in vain. An earlier one is still what its connection
// did last.
func (s *stream) waits(t *testing.T, since time.Time) {
	t.Helper()
	admin := open(t, s.url)
	require.Eventually(t, func() bool {
		var n int
		require.NoError(t, admin.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE application_name = $1
			AND state = 'idle' AND query LIKE '%pgwake_pgmq.receive%' AND query_start > $2`, s.application, since).Scan(&n))
		return n > 0
	}, patience, 10*time.Millisecond)
}

// now is the server's clock.
func (s *stream) now(t *testing.T) (now time.Time) {
	t.Helper()
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT clock_timestamp()`).Scan(&now))
	return now
}

// While nobody sends, who waits asks once, and then not before the fallback.
func TestReceive_Idle_DoesNotPoll(t *testing.T) {
	s := standIn(t)
	s.exec(t, `SELECT pgmq.create('a_queue')`)
	s.exec(t, `CREATE SEQUENCE asked`)
	s.exec(t, `ALTER FUNCTION pgmq.read RENAME TO really_read`)
	s.exec(t, `CREATE FUNCTION pgmq.read(text, integer, integer) RETURNS SETOF pgmq.message_record LANGUAGE sql
		AS $$ SELECT r.* FROM nextval('public.asked'), pgmq.really_read($1, $2, $3) r $$`)
	s.listening(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_, err := s.Receive(ctx, "a", 1, time.Minute)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	var asked int
	var ever bool // or else the sequence is at 1 as well
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT last_value, is_called FROM asked`).Scan(&asked, &ever))
	require.True(t, ever, "it has asked")
	require.LessOrEqual(t, asked, 2, "once, and once more if it had just begun to listen")
}

func TestTell_SaysNothingOfTheContent(t *testing.T) {
	s := standIn(t)
	s.exec(t, `SELECT pgmq.create('mail_queue')`)
	conn, err := pgx.Connect(t.Context(), s.url)
	require.NoError(t, err)
	defer conn.Close(context.Background())
	_, err = conn.Exec(t.Context(), `LISTEN pgmq_message_ready; LISTEN "pgmq_message_ready.mail"; LISTEN pgmq_queue_created`)
	require.NoError(t, err)
	s.exec(t, `SELECT pgmq.send_batch('mail_queue', array_fill('{"secret": 1}'::jsonb, ARRAY[50]), array_fill('{"secret": 1}'::jsonb, ARRAY[50]), clock_timestamp() + interval '10 s')`)
	s.exec(t, `SELECT pgmq.create('other_queue')`)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var channels []string
	for range 3 {
		n, err := conn.WaitForNotification(ctx)
		require.NoError(t, err)
		channels = append(channels, n.Channel)
		require.NotContains(t, n.Payload, "secret")
		var event map[string]any
		require.NoError(t, json.Unmarshal([]byte(n.Payload), &event))
		if n.Channel == "pgmq_queue_created" {
			require.Equal(t, "queue_created", event["event_type"])
			require.Equal(t, "other_queue", event["queue_name"])
			require.Equal(t, "other", event["namespace"])
			continue
		}
		require.Equal(t, "message_ready", event["event_type"])
		require.EqualValues(t, 1, event["msg_id"])
		require.Equal(t, "mail_queue", event["queue_name"])
		require.Equal(t, "mail", event["namespace"])
		require.EqualValues(t, 10, event["delay_seconds"])
		require.NotEmpty(t, event["ready_at"])
		require.NotEmpty(t, event["emitted_at"])
	}
	require.ElementsMatch(t, []string{"pgmq_message_ready", "pgmq_message_ready.mail", "pgmq_queue_created"}, channels)
}

// Two queues have the same namespace: both are received from, and Publish creates no third.
func TestNamespace_OfTwoQueues_IsServedFromBoth(t *testing.T) {
	s := standIn(t)
	s.exec(t, `SELECT pgmq.create('worker_a_queue')`)
	require.NoError(t, s.Publish(t.Context(), "a", dispatch.StreamMessage{Name: "published"}))
	s.exec(t, `SELECT pgmq.create('a_queue'); SELECT pgmq.send('a_queue', '1')`)
	names := map[string]bool{s.receive(t, "a").Name: true, s.receive(t, "a").Name: true}
	require.Equal(t, map[string]bool{"published": true, "a_queue": true}, names)
	all, err := s.WaitForNamespaces(t.Context(), nil)
	require.NoError(t, err)
	require.Equal(t, []string{"a"}, all)
}

// A message that is made due sooner, by anybody, is heard of: no timer is set for it.
func TestReceive_VisibilityIsShortened_WakesThen(t *testing.T) {
	s := standIn(t)
	require.NoError(t, s.Publish(t.Context(), "a", dispatch.StreamMessage{Name: "x", Delay: time.Hour}))
	s.listening(t)
	got := make(chan int, 1)
	since := s.now(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	go func() {
		all, err := s.Receive(ctx, "a", 1, time.Minute)
		if err != nil {
			t.Errorf("receive: %v", err)
		}
		got <- len(all)
	}()
	s.waits(t, since)
	s.exec(t, `SELECT pgmq.set_vt('a_queue', 1, 0)`)
	require.Equal(t, 1, <-got)
}

// Who waits learns of the end of a lease that somebody else took, and died: no fallback is needed.
func TestLease_OfAProcessThatDied_IsKnownToWhoWaits(t *testing.T) {
	s := standIn(t)
	dead := newStream(t, s.url)
	s.exec(t, `SELECT pgmq.create('a_queue')`)
	s.listening(t)
	got := make(chan dispatch.StreamDelivery, 2)
	since := s.now(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for _, from := range []*stream{s, dead} {
		go func() {
			all, err := from.Receive(ctx, "a", 1, time.Second)
			if err != nil {
				t.Errorf("receive: %v", err)
				return
			}
			got <- all[0]
		}()
	}
	s.waits(t, since)
	dead.waits(t, since)
	s.exec(t, `SELECT pgmq.send('a_queue', '1')`)
	for attempt := range 2 {
		select {
		case d := <-got:
			require.Equal(t, attempt+1, d.Attempt)
		case <-ctx.Done():
			require.Fail(t, "it did not come", "attempt %d", attempt+1)
		}
	}
}

// silenced is a connection that nothing is sent on any more once it is silent: the server has nothing to answer.
type silenced struct {
	net.Conn
	silent *atomic.Bool
}

func (c silenced) Write(b []byte) (int, error) {
	if c.silent.Load() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

// silenceable is a Stream of which all connections, and those to come, fall silent.
func silenceable(t *testing.T) (s *pgmq.Stream, silence func()) {
	t.Helper()
	config, err := pgxpool.ParseConfig(database(t, pgmqtest.Install))
	require.NoError(t, err)
	var silent atomic.Bool
	var mu sync.Mutex
	var conns []net.Conn
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		mu.Lock()
		defer mu.Unlock()
		conns = append(conns, conn)
		return silenced{conn, &silent}, nil
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	t.Cleanup(func() { // nobody waits for an answer any more
		silent.Store(false)
		mu.Lock()
		defer mu.Unlock()
		for _, conn := range conns {
			_ = conn.Close()
		}
	})
	s, err = pgmq.New(t.Context(), pool, &pgmq.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(s.Close)
	return s, func() { silent.Store(true) }
}

func TestReceive_ServerIsSilent_TheTimeIsOver_IsSaid(t *testing.T) {
	s, silence := silenceable(t)
	silence()
	for range 3 { // the connection that there is, and then those that are to be made
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		_, err := s.Receive(ctx, "a", 1, time.Minute)
		cancel()
		require.ErrorContains(t, err, "no answer")
		require.NotErrorIs(t, err, context.DeadlineExceeded, "it would say that there are no messages")
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	_, err := s.Receive(ctx, "a", 1, time.Minute)
	require.ErrorIs(t, err, context.Canceled)
}

// Others have all connections at the moment at which its time is over. That is no sign of a database that does not answer.
func TestReceive_PoolIsBusy_TheTimeIsOver_ThereIsNoMessage(t *testing.T) {
	s := standIn(t)
	s.exec(t, `SELECT pgmq.create('a_queue')`)
	var busy []*pgxpool.Conn
	for range s.pool.Config().MaxConns {
		conn, err := s.pool.Acquire(t.Context())
		require.NoError(t, err)
		busy = append(busy, conn)
	}
	free := sync.OnceFunc(func() {
		for _, conn := range busy {
			conn.Release()
		}
	})
	t.Cleanup(free)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	context.AfterFunc(ctx, free)
	_, err := s.Receive(ctx, "a", 1, time.Minute)
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

// Each statement, and each attempt to connect, takes longer than a fetch waits after a failure.
func TestReceive_ServerIsSilent_HealthSaysSo(t *testing.T) {
	s, silence := silenceable(t)
	quiet := slog.New(slog.DiscardHandler)
	c := dispatch.NewCoordinators(dispatch.StreamSource(s, &dispatch.StreamConfig{MaxWait: 50 * time.Millisecond}), &dispatch.CoordinatorsConfig{
		Logger: quiet, Groups: []dispatch.Group{{Namespaces: []string{"*"}, Config: dispatch.Config{Logger: quiet}, Handlers: func(d *dispatch.Dispatcher) {
			d.HandleOthers(func(context.Context, *pgwake.ClaimedWorkItem) (dispatch.Result, error) { return nil, nil })
		}}},
	})
	require.NoError(t, c.Spawn("a"))
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	require.Eventually(t, func() bool { return c.Health().Status == dispatch.Healthy && len(c.Namespaces()) == 1 }, patience, 10*time.Millisecond)
	silence()
	served := func() dispatch.NamespaceStats { return c.Namespaces()[0] }
	require.Eventually(t, func() bool { return served().Failures > 0 }, patience, 10*time.Millisecond)
	healed := false
	require.Eventually(t, func() bool {
		healed = healed || served().Failures == 0
		return c.Health().Status == dispatch.Unhealthy
	}, patience, 10*time.Millisecond)
	require.False(t, healed, "the server was silent all the time")
	stop()
	require.NoError(t, <-ended)
}

func TestPublish_BadInput_IsInvalid(t *testing.T) {
	s := standIn(t)
	for namespace, m := range map[string]dispatch.StreamMessage{
		"a":                      {Name: "x", Payload: []byte(`{`)},
		"b":                      {Name: "x", Payload: []byte(`"\u0000"`)},
		"c--d":                   {Name: "x"}, // pgmq refuses it
		"e f":                    {Name: "x"},
		strings.Repeat("f", 42):  {Name: "x"},
		strings.Repeat("-f", 20): {Name: "x"},
		"":                       {Name: "x"},
		"g":                      {Name: "x", Headers: map[string]string{"pgwake": "x"}},
		"h":                      {Name: "x", Delay: -1},
		"i":                      {Name: "x", Headers: map[string]string{"pgwake": ""}},
	} {
		require.ErrorIs(t, s.Publish(t.Context(), namespace, m), pgwake.ErrInvalid, namespace)
	}
	_, err := s.Receive(t.Context(), "a", 0, time.Minute)
	require.ErrorIs(t, err, pgwake.ErrInvalid)
	some := (*pgwake.LostLocksError)(nil)
	for _, token := range []pgwake.LockToken{"", "1/1/a_queue", "x/y/z", "1/2"} {
		require.ErrorAs(t, s.Ack(t.Context(), []pgwake.LockToken{token}), &some)
	}
}

// What the server could not take apart, or hold, is said before anything is there, be it one message of many.
func TestPublish_DeepOrTooLarge_IsInvalidAndNothingIsSent(t *testing.T) {
	s := standIn(t)
	nested := func(depth int) []byte { return []byte(strings.Repeat("[", depth) + strings.Repeat("]", depth)) }
	large := []byte(`"` + strings.Repeat("x", pgmq.MaxPayload) + `"`)
	good := dispatch.StreamMessage{Name: "x", Payload: nested(pgwake.MaxDepth)}
	for what, m := range map[string]dispatch.StreamMessage{
		"deep":                             {Name: "x", Payload: nested(pgwake.MaxDepth + 1)},
		"very deep":                        {Name: "x", Payload: nested(1_000_000)},
		"long numbers":                     {Name: "x", Payload: []byte("[7" + strings.Repeat("e131071, 7", 8300) + "]")},
		"half a pair":                      {Name: "x", Payload: []byte(`"\ud800"`)},
		"large":                            {Name: "x", Payload: large},
		"NUL in a header":                  {Name: "x", Headers: map[string]string{"h": "a\x00"}},
		"NUL in the name":                  {Name: "a\x00"},
		"no UTF-8 in the name of a header": {Name: "x", Headers: map[string]string{"a\xff": "b"}},
		"no UTF-8 in a header":             {Name: "x", Headers: map[string]string{"h": "a\xff"}},
		"no UTF-8 in the name":             {Name: "a\xff"},
	} {
		err := s.Publish(t.Context(), "a", good, m)
		require.ErrorIs(t, err, pgwake.ErrInvalid, what)
		require.Equal(t, what == "large", errors.Is(err, pgwake.ErrPayloadTooLarge), what)
	}
	var queues int
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT count(*) FROM pgmq.meta`).Scan(&queues))
	require.Zero(t, queues)
	require.NoError(t, s.Publish(t.Context(), "a", good))
	require.Equal(t, string(good.Payload), string(s.receive(t, "a").Payload))
}

// What is within those bounds may be more than the server is set for: it says so, and would say it again.
func TestPublish_DeeperThanTheServersStack_IsInvalid(t *testing.T) {
	u, err := url.Parse(database(t, pgmqtest.Install))
	require.NoError(t, err)
	q := u.Query()
	q.Set("max_stack_depth", "100kB")
	u.RawQuery = q.Encode()
	s := newStream(t, u.String())
	deep := strings.Repeat("[", pgwake.MaxDepth) + strings.Repeat("]", pgwake.MaxDepth)
	err = s.Publish(t.Context(), "a", dispatch.StreamMessage{Name: "x", Payload: []byte(deep)})
	require.ErrorContains(t, err, "SQLSTATE 54001")
	require.ErrorIs(t, err, pgwake.ErrInvalid)
}

func TestErrors_OfTheServer_AreInvalidIfTheSameCallWouldFailAgain(t *testing.T) {
	for code, invalid := range map[string]bool{
		"22P02": true, "22003": true, "54000": true, "54001": true, "54023": true, "53100": false, "57P01": false, "40001": false,
	} {
		require.Equal(t, invalid, errors.Is(pgmq.Failed("x", &pgconn.PgError{Code: code, Routine: "somewhere"}), pgwake.ErrInvalid), code)
	}
	for _, full := range []pgconn.PgError{{Routine: "PreCommit_Notify"}, {Message: "too many notifications in the NOTIFY queue"}} {
		full.Code = "54000"
		require.NotErrorIs(t, pgmq.Failed("x", &full), pgwake.ErrInvalid, "there will be room again")
	}
}

func TestPublish_NamespaceWithoutQueue_CreatesOneThatBelongsToIt(t *testing.T) {
	s := standIn(t)
	for _, c := range []struct{ namespace, queue string }{
		{"a", "a_queue"}, {"tenant-a", "worker_tenant-a_queue"}, {"a-b-2", "worker_a-b-2_queue"},
		{"worker_c", "worker_worker_c_queue"}, // worker_c_queue belongs to c
		{"orchestration2", "worker_orchestration2_queue"}, {strings.Repeat("f", 41), strings.Repeat("f", 41) + "_queue"},
	} {
		for range 2 { // the second goes where the first went
			require.NoError(t, s.Publish(t.Context(), c.namespace, dispatch.StreamMessage{Name: "x"}))
		}
		for range 2 {
			d := s.receive(t, c.namespace)
			require.Equal(t, c.namespace, d.Namespace)
			require.NoError(t, s.Ack(t.Context(), []pgwake.LockToken{d.Receipt}))
		}
		var queues []string
		require.NoError(t, s.pool.QueryRow(t.Context(),
			`SELECT array_agg(queue_name) FROM pgmq.meta WHERE pgwake_pgmq.namespace_of(queue_name) = $1`, c.namespace).Scan(&queues))
		require.Equal(t, []string{c.queue}, queues)
	}
}

func TestInstall_AgainAndAway(t *testing.T) {
	s := standIn(t)
	require.NoError(t, pgmq.Install(t.Context(), s.pool))
	require.NoError(t, s.Publish(t.Context(), "a", dispatch.StreamMessage{Name: "x"}))
	require.Equal(t, "x", s.receive(t, "a").Name)
	require.NoError(t, pgmq.Uninstall(t.Context(), s.pool))
	s.exec(t, `SELECT pgmq.create('b_queue'); SELECT pgmq.send('a_queue', '1')`)
	_, err := pgmq.New(t.Context(), s.pool, nil)
	require.ErrorIs(t, err, pgwake.ErrConfig)
	require.NoError(t, pgmq.Install(t.Context(), s.pool), "with queues that are there")
	s.exec(t, `DROP SCHEMA pgmq CASCADE`)
	require.ErrorIs(t, pgmq.Install(t.Context(), s.pool), pgwake.ErrConfig)
}

// Functions are those of the library, whatever version has installed them before.
func TestInstall_OverAnOlderOne_ReplacesItsFunctions(t *testing.T) {
	s := standIn(t)
	state := func() (all string) {
		t.Helper()
		require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT string_agg(oid || ' ' || proname || ' ' || md5(prosrc), E'\n' ORDER BY oid) FROM pg_proc
			WHERE pronamespace = 'pgwake_pgmq'::regnamespace`).Scan(&all))
		return all
	}
	fresh := state()
	s.exec(t, `CREATE OR REPLACE FUNCTION pgwake_pgmq.ack(p_queue text, p_ids bigint[], p_reads integer[]) RETURNS TABLE (id bigint, reads integer)
		LANGUAGE sql AS 'SELECT NULL::bigint, NULL::integer'`)
	require.NotEqual(t, fresh, state())
	require.NoError(t, pgmq.Install(t.Context(), s.pool))
	require.Equal(t, fresh, state())
}

func TestClose_WhoWaits_LearnsOfIt(t *testing.T) {
	s := standIn(t)
	ended := make(chan error, 2)
	since := s.now(t)
	go func() {
		_, err := s.Receive(context.Background(), "a", 1, time.Minute)
		ended <- err
	}()
	go func() {
		_, err := s.WaitForNamespaces(context.Background(), nil)
		ended <- err
	}()
	s.waits(t, since)
	s.Close()
	s.Close()
	require.ErrorIs(t, <-ended, pgwake.ErrClosed)
	require.ErrorIs(t, <-ended, pgwake.ErrClosed)
}

// All connections of the pool lose their peer: to try one gets no answer.
func TestReceive_PoolVanishes_OthersAreMade(t *testing.T) {
	t.Parallel()
	url := database(t, pgmqtest.Install)
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	config.MaxConns = 8
	var lost atomic.Bool
	var alive sync.Map // connections made since
	config.AfterConnect = func(_ context.Context, c *pgx.Conn) error {
		if lost.Load() {
			alive.Store(c, true)
		}
		return nil
	}
	config.PrepareConn = func(ctx context.Context, c *pgx.Conn) (bool, error) {
		if _, is := alive.Load(c); lost.Load() && !is {
			<-ctx.Done()
			return false, ctx.Err()
		}
		return true, nil
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	var all []*pgxpool.Conn
	for range config.MaxConns {
		c, err := pool.Acquire(t.Context())
		require.NoError(t, err)
		all = append(all, c)
	}
	for _, c := range all {
		c.Release()
	}
	s, err := pgmq.New(t.Context(), pool, nil)
	require.NoError(t, err)
	t.Cleanup(s.Close)
	_, err = pool.Exec(t.Context(), `SELECT pgmq.create('a_queue')`)
	require.NoError(t, err)

	lost.Store(true)
	_, err = open(t, url).Exec(t.Context(), `SELECT pgmq.send('a_queue', '1')`)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	got, err := s.Receive(ctx, "a", 1, time.Minute)
	require.NoError(t, err)
	require.Len(t, got, 1)
}
