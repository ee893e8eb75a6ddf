package console_test

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/pgwake/pgwake/taskgraph"
	"github.com/stretchr/testify/require"
)

// This file answers: how much do lists read of what they do not show?

func TestLists_PayloadsAreLong_ReadTheirBeginnings_AndWhollyWhatIsRedacted(t *testing.T) {
	t.Parallel()
	p := schemas.New(t, nil)
	bus, err := eventbus.New(t.Context(), p, &eventbus.Config{Logger: silent})
	require.NoError(t, err)
	engine, err := taskgraph.New(t.Context(), p, &taskgraph.Config{Logger: silent})
	require.NoError(t, err)
	long := `{"who": "` + strings.Repeat("somebody ", 1000) + `"}`
	s := newSite(t, p, &console.Options{Tasks: engine.Graph, Events: bus})
	s.enqueue(t, "long", "default", long)
	_, err = bus.Emit(t.Context(), "long", []string{long}, nil)
	require.NoError(t, err)

	conn, err := pgx.Connect(t.Context(), pgwaketest.URL(t))
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(context.Background())) }()
	_, err = conn.Exec(t.Context(), `SET search_path = `+pgx.Identifier{p.Schema()}.Sanitize()+`;
		INSERT INTO dead_letters (queue, item_id, namespace, priority, attempt_count, name, data, enqueued_at, reason)
			VALUES ('worker', 1, 'default', 0, 1, 'long', '`+long+`', now(), 'r');
		INSERT INTO instances (instance_id, namespace, name, custom_status) VALUES ('long', 'default', 'long', '`+long+`');
		CREATE SEQUENCE cuts;
		ALTER FUNCTION cut_of RENAME TO cut_of_any;
		CREATE FUNCTION cut_of(p_payload anyelement, p_bytes integer) RETURNS json LANGUAGE sql STABLE STRICT SET search_path FROM CURRENT
			AS 'SELECT cut_of_any($1, $2) FROM nextval(''cuts'')'`)
	require.NoError(t, err)
	cuts := func() (n int) {
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM cuts`).Scan(&n))
		return n
	}
	require.NoError(t, engine.Register(t.Context(), taskgraph.Define("default", "long", "1").Step("a", "h")))
	_, err = engine.Submit(t.Context(), taskgraph.Submission{Namespace: "default", Name: "long", Version: "1", Context: long})
	require.NoError(t, err)

	for _, page := range []string{"items", "letters", "events", "instances", "tasks"} {
		before := cuts()
		status, body, _ := s.get(t, page)
		require.Equal(t, 200, status)
		require.Greater(t, cuts(), before, page)
		if page == "items" || page == "events" {
			require.Contains(t, body, "somebody somebody", page)
		}
	}

	var redacted []int
	s = newSite(t, p, &console.Options{Events: bus, Redact: func(p console.Payload) []byte {
		redacted = append(redacted, len(p.Data))
		return []byte(`"hidden"`)
	}})
	before := cuts()
	for _, page := range []string{"items", "events"} {
		_, body, _ := s.get(t, page)
		require.Contains(t, body, "hidden", page)
	}
	require.Equal(t, before, cuts(), "it has to see all of what it is to understand")
	require.Len(t, redacted, 2)
	for _, n := range redacted {
		require.GreaterOrEqual(t, n, len(long))
	}
	items, err := p.Peek(t.Context(), pgwake.Worker, nil)
	require.NoError(t, err)
	require.Len(t, items[0].Data, len(long), "nothing of it is gone")
}
