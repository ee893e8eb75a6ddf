package pgwake_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: how much of what is long do lists read?

// long is 1,203 bytes, and 1,202 characters.
var long = json.RawMessage(`"ü` + strings.Repeat("x", 1199) + `"`)

// withPayloads has an item, a message, a dead letter of each, an archived item and an instance, with payloads that are short and long by turns.
func withPayloads(t *testing.T) *node {
	t.Helper()
	n := newNode(t, nil)
	for name, payload := range map[string]string{"long": string(long), "short": "[1]", "none": ""} {
		var p *string
		if payload != "" {
			p = &payload
		}
		n.exec(t, `INSERT INTO worker_queue (name, input) VALUES ($1, $2)`, name, p)
		n.exec(t, `INSERT INTO orchestrator_queue (instance_id, kind, name, data) VALUES ($1, 'k', $1, $2)`, name, p)
		n.exec(t, `INSERT INTO dead_letters (queue, item_id, namespace, priority, attempt_count, name, data, enqueued_at, reason)
			VALUES ('worker', 1000, 'default', 0, 1, $1, $2, now(), 'r')`, name, p)
		n.exec(t, `INSERT INTO archive (item_id, namespace, priority, attempt_count, name, input, enqueued_at) VALUES (1, 'default', 0, 1, $1, $2, now())`, name, p)
		n.exec(t, `INSERT INTO instances (instance_id, namespace, name, attributes, custom_status) VALUES ($1, 'default', $1, $2::text::json, $2)`, name, p)
		n.exec(t, `INSERT INTO executions (instance_id, execution_id, status, output) VALUES ($1, 1, 'Completed', $2)`, name, p)
	}
	return n
}

// payload is what a list has of one.
type payload struct {
	data string
	cut  *pgwake.Cut
}

// lists are those that read payloads, each by its name and up to how many bytes.
func (n *node) lists(t *testing.T, upTo int) map[string]map[string]payload {
	t.Helper()
	all := make(map[string]map[string]payload)
	add := func(list, name, data string, cut *pgwake.Cut) {
		if all[list] == nil {
			all[list] = make(map[string]payload)
		}
		all[list][name] = payload{data, cut}
	}
	for _, queue := range []pgwake.Queue{pgwake.Worker, pgwake.Orchestrator} {
		for _, i := range n.peeked(t, queue, &pgwake.PeekFilter{PayloadBytes: upTo}) {
			add("items of "+queue.String(), i.Name, string(i.Data), i.DataCut)
		}
	}
	letters, err := n.ListDeadLetters(t.Context(), &pgwake.DeadLetterFilter{PayloadBytes: upTo})
	require.NoError(t, err)
	for _, d := range letters {
		add("dead letters", d.Name, string(d.Data), d.DataCut)
	}
	for _, a := range n.archived(t, &pgwake.ArchiveFilter{PayloadBytes: upTo}) {
		add("archive", a.Name, string(a.Input), a.InputCut)
	}
	for _, status := range []pgwake.Status{"", pgwake.StatusCompleted} {
		infos, err := n.ListInstances(t.Context(), &pgwake.ListOptions{Status: status, PayloadBytes: upTo})
		require.NoError(t, err)
		for _, i := range infos {
			add("attributes "+string(status), i.Name, string(i.Attributes), i.AttributesCut)
			add("output "+string(status), i.Name, i.Output, i.OutputCut)
			add("custom status "+string(status), i.Name, i.CustomStatus, i.CustomStatusCut)
		}
	}
	return all
}

func TestLists_PayloadBytes_TheBeginningStandsForWhatIsLonger(t *testing.T) {
	t.Parallel()
	n := withPayloads(t)
	for upTo, want := range map[int]map[string]payload{
		0:    {"long": {string(long), nil}, "short": {"[1]", nil}, "none": {}},
		1203: {"long": {string(long), nil}, "short": {"[1]", nil}, "none": {}},
		1202: {"long": {"", &pgwake.Cut{Bytes: 1203, Start: string(long)}}, "short": {"[1]", nil}, "none": {}},
		3:    {"long": {"", &pgwake.Cut{Bytes: 1203, Start: `"üx`}}, "short": {"[1]", nil}, "none": {}},
		2:    {"long": {"", &pgwake.Cut{Bytes: 1203, Start: `"ü`}}, "short": {"", &pgwake.Cut{Bytes: 3, Start: "[1"}}, "none": {}},
	} {
		lists := n.lists(t, upTo)
		require.Len(t, lists, 10)
		for list, got := range lists {
			require.Equal(t, want, got, "%s, up to %d", list, upTo)
		}
	}
}

func TestLists_PayloadBytesOfLessThanNone_IsInvalid(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	_, peeked := n.Peek(t.Context(), pgwake.Worker, &pgwake.PeekFilter{PayloadBytes: -1})
	_, letters := n.ListDeadLetters(t.Context(), &pgwake.DeadLetterFilter{PayloadBytes: -1})
	_, archived := n.ListArchive(t.Context(), &pgwake.ArchiveFilter{PayloadBytes: -1})
	_, infos := n.ListInstances(t.Context(), &pgwake.ListOptions{PayloadBytes: -1})
	for _, err := range []error{peeked, letters, archived, infos} {
		require.ErrorIs(t, err, pgwake.ErrInvalid)
	}
}

// A node of this version goes on with a schema to which a later one has added what it does not know of.
func TestLists_ALaterVersionAddedColumns_GoOn(t *testing.T) {
	t.Parallel()
	n := withPayloads(t)
	want := n.lists(t, 3)
	for _, table := range []string{"worker_queue", "orchestrator_queue", "dead_letters", "archive", "instances", "executions"} {
		n.exec(t, `ALTER TABLE `+table+` ADD COLUMN of_a_later_version text NOT NULL DEFAULT 'x'`)
	}
	n.exec(t, `CREATE OR REPLACE VIEW instance_info AS SELECT i.*, now() AS of_a_later_version FROM (`+
		query[string](t, n, `SELECT rtrim(pg_get_viewdef('instance_info'::regclass), ';')`)[0]+`) AS i`)
	require.Equal(t, want, n.lists(t, 3))
	info, err := n.GetInstanceInfo(t.Context(), "short")
	require.NoError(t, err)
	require.Equal(t, "[1]", info.Output)
	redriven, err := n.RedriveDeadLetters(t.Context(), &pgwake.DeadLetterFilter{Limit: 1})
	require.NoError(t, err)
	require.Equal(t, 1, redriven)
	require.NotZero(t, n.take(t).ID)
}
