package eventbus_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/pgwake/pgwake/internal/hostile"
	"github.com/stretchr/testify/require"
)

// This file answers: what becomes of texts that callers choose, whatever they say? They come back byte for byte and find themselves alone, or are refused.

// sorted returns texts that pass a check, and those that do not.
func sorted(texts []string, check func(string) error) (good, bad []string) {
	for _, text := range texts {
		if check(text) == nil {
			good = append(good, text)
		} else {
			bad = append(bad, text)
		}
	}
	return good, bad
}

// refused asserts that a verb has found the argument bad before it was sent.
func refused(t *testing.T, err error, what string) {
	t.Helper()
	require.ErrorIs(t, err, pgwake.ErrInvalid, "%q", what)
	var failed *pgwake.Error
	if errors.As(err, &failed) {
		require.Empty(t, failed.SQLState, "%q: it was sent: %v", what, err)
	}
	require.True(t, hostile.IsLine(err.Error()) && len(err.Error()) < 1500, "%q is for a log line", err)
}

func second[T any](_ T, err error) error { return err }

func TestTexts_OfEvents_ComeBackAndFindThemselvesAlone(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	types, _ := sorted(hostile.Texts(eventbus.MaxTypeLength), eventbus.CheckType)
	require.Subset(t, types, []string{`%s`, `'`, `\`, `[a]`, `^a$`, `?`, `{}`, "\U0001F600", "null", "$1"})
	groups, patterns := map[string]string{}, map[string][]string{}
	for i, text := range types {
		groups[text] = text
		if eventbus.CheckGroup(text) != nil { // it is too long
			groups[text] = fmt.Sprint("g", i)
		}
		patterns[text] = []string{text}
		if wide := text + ".*"; eventbus.CheckPattern(wide) == nil {
			patterns[text] = append(patterns[text], wide)
		}
		l.subscribe(groups[text], patterns[text]...)
	}
	// What SQL has to route by, and Go by the same rule.
	receivers := func(eventType string) (n int) {
		for _, of := range patterns {
			if slices.ContainsFunc(of, func(pattern string) bool { return eventbus.Match(pattern, eventType) }) {
				n++
			}
		}
		return n
	}
	all, err := l.Groups(l.within())
	require.NoError(t, err)
	of := map[string][]string{}
	for _, g := range all {
		of[g.Name] = g.Patterns
	}
	require.Len(t, of, len(types))

	var events []eventbus.Emission
	for _, text := range types {
		o := eventbus.EmitOptions{Key: text, DedupKey: text, Headers: map[string]string{text: text}, Metadata: map[string]string{text: text}}
		events = append(events, eventbus.Emission{Type: text, Payload: text, EmitOptions: o})
	}
	emitted, err := l.EmitMany(l.within(), events)
	require.NoError(t, err)
	again, err := l.EmitMany(l.within(), events)
	require.NoError(t, err)
	l.log(len(types))
	for i, text := range types {
		require.ElementsMatch(t, patterns[text], of[groups[text]], "%q", text)
		require.Equal(t, receivers(text), emitted[i].Deliveries, "%q", text)
		require.Equal(t, eventbus.Emitted{ID: emitted[i].ID, Duplicate: true}, again[i])
		read, err := l.Read(l.within(), eventbus.Cursor{}, 10, text)
		require.NoError(t, err)
		byKey, err := l.Find(l.within(), &eventbus.FindFilter{Key: text})
		require.NoError(t, err)
		byType, err := l.Find(l.within(), &eventbus.FindFilter{Types: []string{text}})
		require.NoError(t, err)
		for _, found := range [][]*eventbus.Event{read, byKey, byType} {
			require.Len(t, found, 1, "%q", text)
			var payload string
			require.NoError(t, found[0].Decode(&payload))
			require.Equal(t, []string{text, text, text}, []string{found[0].Type, found[0].Key, payload})
			require.Equal(t, map[string]string{text: text}, found[0].Headers)
		}

		// Its delivery is for nobody but its group, and what is below it is too.
		items, err := l.p.FetchWorkItems(l.within(), 10, &pgwake.FetchOptions{NoWait: true, Tags: pgwake.Tags(eventTag(groups[text], text))})
		require.NoError(t, err, "%q", text)
		require.Len(t, items, 1)
		require.Equal(t, []string{text, text}, []string{items[0].Name, items[0].Key})
		require.NoError(t, l.p.DeadLetterWorkItem(l.within(), items[0].LockToken, text, text))
		for _, f := range []eventbus.LetterFilter{{Group: groups[text]}, {Type: text}, {Reason: text}} {
			letters, err := l.DeadLetters(l.within(), &f)
			require.NoError(t, err)
			require.Len(t, letters, 1, "%q", text)
			require.Equal(t, []string{groups[text], text, text, text, text}, []string{letters[0].Group, letters[0].Reason, letters[0].Error, letters[0].Event.Type, letters[0].Event.Key})
			require.Equal(t, map[string]string{text: text}, letters[0].Event.Headers)
		}
		if wide := text + ".x"; eventbus.CheckType(wide) == nil {
			below, err := l.EmitMany(l.within(), []eventbus.Emission{{Type: wide}})
			require.NoError(t, err)
			require.Equal(t, receivers(wide), below[0].Deliveries, "%q", wide)
		}
	}
	for i, text := range types {
		change, filter := l.Redrive, &eventbus.LetterFilter{Group: groups[text]}
		if i%2 == 0 {
			change, filter = l.Purge, &eventbus.LetterFilter{Reason: text}
		}
		n, err := change(l.within(), filter)
		require.NoError(t, err)
		require.Equal(t, 1, n, "%q", text)
		was, err := l.Unsubscribe(l.within(), groups[text], text)
		require.NoError(t, err)
		require.True(t, was, "%q", text)
		was, err = l.DeleteGroup(l.within(), groups[text])
		require.NoError(t, err)
		require.True(t, was, "%q", text)
	}
	require.Zero(t, one[int](l, `SELECT (SELECT count(*) FROM event_groups) + (SELECT count(*) FROM event_subscriptions) + (SELECT count(*) FROM dead_letters)`))
}

func TestTexts_OfEvents_ReachHandlersAsTheyAre(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	texts := hostile.Texts(pgwake.MaxNameLength)
	n := l.node(quick("all"))
	got := make(chan eventbus.Event, 2*len(texts))
	require.NoError(t, n.On(l.within(), "#", func(_ context.Context, e *eventbus.Event, _ pgx.Tx) error {
		got <- *e
		return nil
	}))
	types, _ := sorted(texts, eventbus.CheckType)
	var events []eventbus.Emission
	for i, text := range texts {
		events = append(events, eventbus.Emission{Type: types[i%len(types)], Payload: text, EmitOptions: eventbus.EmitOptions{Key: text, Headers: map[string]string{text: text}}})
	}
	_, err := l.EmitMany(l.within(), events)
	require.NoError(t, err)
	keys := map[string]string{}
	for range texts {
		select {
		case e := <-got:
			var payload string
			require.NoError(t, e.Decode(&payload))
			require.Equal(t, map[string]string{payload: payload}, e.Headers)
			require.Equal(t, payload, e.Key)
			keys[e.Key] = e.Type
		case <-l.within().Done():
			t.Fatal("not all have come")
		}
	}
	for _, e := range events {
		require.Equal(t, e.Type, keys[e.Key], "%q", e.Key)
	}
}

func TestTexts_ThatBreakARule_AreRefusedByTheBusAndNothingIsWritten(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	more := func(most int) []string { return slices.Collect(maps.Values(hostile.Refused(most))) }
	_, types := sorted(append(hostile.Texts(eventbus.MaxTypeLength), more(eventbus.MaxTypeLength)...), eventbus.CheckType)
	_, patterns := sorted(append(hostile.Texts(eventbus.MaxTypeLength), more(eventbus.MaxTypeLength)...), eventbus.CheckPattern)
	_, groups := sorted(append(hostile.Texts(eventbus.MaxGroupLength), more(eventbus.MaxGroupLength)...), eventbus.CheckGroup)
	_, namespaces := sorted(append(hostile.Texts(40), more(40)...), pgwake.CheckNamespace)
	// SQL has the same rule for texts, but that what is a space or a control character beyond ASCII is up to the database's locale.
	known := func(text string) bool {
		return utf8.ValidString(text) && !strings.ContainsFunc(text, func(r rune) bool { return r == 0 || r > 0x7f && (unicode.IsSpace(r) || unicode.IsControl(r)) })
	}
	good := eventbus.Schedule{Name: "s", Cron: "@daily", Type: "a"}
	for _, text := range types {
		refused(t, second(l.Emit(l.within(), text, nil, nil)), text)
		refused(t, second(l.Read(l.within(), eventbus.Cursor{}, 1, "a", text)), text)
		refused(t, second(l.Find(l.within(), &eventbus.FindFilter{Types: []string{text}})), text)
		refused(t, second(l.DeadLetters(l.within(), &eventbus.LetterFilter{Type: text})), text)
		if known(text) {
			for _, call := range []string{`emit('default', $1)`, `append_event_log('default', $1, '{}', 'n')`} {
				_, err := l.conn.Exec(l.within(), `SELECT `+call, text)
				require.Error(t, err, "%s of %q", call, text)
			}
		}
	}
	for _, text := range patterns {
		refused(t, l.Subscribe(l.within(), "g", []string{"a", text}, nil), text)
		refused(t, second(l.Unsubscribe(l.within(), "g", text)), text)
		if known(text) {
			_, err := l.conn.Exec(l.within(), `SELECT subscribe('default', 'g', ARRAY[$1])`, text)
			require.ErrorContains(t, err, "PW003", "%q", text)
		}
	}
	for _, text := range groups {
		refused(t, l.Subscribe(l.within(), text, []string{"a"}, nil), text)
		refused(t, second(l.Unsubscribe(l.within(), text, "a")), text)
		refused(t, second(l.DeleteGroup(l.within(), text)), text)
		refused(t, second(l.Replay(l.within(), text, eventbus.Range{})), text)
		refused(t, second(l.DeadLetters(l.within(), &eventbus.LetterFilter{Group: text})), text)
		_, err := l.Node(l.within(), &eventbus.NodeConfig{Group: text})
		require.ErrorIs(t, err, pgwake.ErrConfig, "%q", text)
	}
	for _, text := range namespaces {
		refused(t, second(l.In(text).Emit(l.within(), "a", nil, nil)), text)
		refused(t, l.In(text).Subscribe(l.within(), "g", []string{"a"}, nil), text)
		refused(t, second(l.In(text).Schedule(l.within(), good)), text)
		refused(t, second(l.In(text).DeadLetters(l.within(), nil)), text)
	}
	for _, text := range more(pgwake.MaxNameLength) {
		refused(t, second(l.Emit(l.within(), "a", nil, &eventbus.EmitOptions{Key: text})), text)
		refused(t, second(l.Emit(l.within(), "a", nil, &eventbus.EmitOptions{DedupKey: text})), text)
		refused(t, second(l.Emit(l.within(), "a", nil, &eventbus.EmitOptions{Headers: map[string]string{text: ""}})), text)
		refused(t, second(l.Find(l.within(), &eventbus.FindFilter{Key: text})), text)
		refused(t, second(l.DeadLetters(l.within(), &eventbus.LetterFilter{Reason: text})), text)
		refused(t, second(l.Node(l.within(), &eventbus.NodeConfig{DisplayName: text})), text)
		for _, spoil := range []func(*eventbus.Schedule){
			func(s *eventbus.Schedule) { s.Name = text }, func(s *eventbus.Schedule) { s.Cron = text }, func(s *eventbus.Schedule) { s.TimeZone = text },
			func(s *eventbus.Schedule) { s.Type = text }, func(s *eventbus.Schedule) { s.Key = text }, func(s *eventbus.Schedule) { s.Type, s.Work = "", text },
			func(s *eventbus.Schedule) { s.Type, s.Work, s.WorkTag = "", "w", text }, func(s *eventbus.Schedule) { s.CatchUp = eventbus.CatchUp(text) },
		} {
			s := good
			spoil(&s)
			refused(t, second(l.Schedule(l.within(), s)), text)
		}
		refused(t, second(l.PauseSchedule(l.within(), text)), text)
		refused(t, second(l.GetSchedule(l.within(), text)), text)
		refused(t, second(l.RunSchedule(l.within(), text)), text)
		refused(t, second(l.DeleteSchedule(l.within(), text)), text)
		refused(t, second(l.Schedules(l.within(), text, 1)), text)
		refused(t, second(l.NextOccurrence(l.within(), text, "", time.Now())), text)
	}
	for _, text := range hostile.NoTexts {
		refused(t, second(l.Emit(l.within(), "a", nil, &eventbus.EmitOptions{Headers: map[string]string{"h": text}})), text)
		refused(t, second(l.Node(l.within(), &eventbus.NodeConfig{Description: text})), text)
	}
	for _, table := range []string{"event_log", "event_dedup_keys", "event_groups", "event_subscriptions", "scheduled_tasks", "event_nodes", "worker_queue"} {
		require.Zero(t, one[int](l, `SELECT count(*) FROM `+table), table)
	}
	require.Equal(t, []string{"default"}, all[string](l, `SELECT name FROM namespaces`))
}

func TestTexts_OfSchedules_ComeBackAndFindThemselvesAlone(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	texts := hostile.Texts(pgwake.MaxNameLength)
	ids := map[string]string{}
	for _, text := range texts {
		ids[text] = l.schedule(eventbus.Schedule{Name: text, Cron: "@yearly", Work: text, WorkTag: text, Key: text, Payload: text})
	}
	found := map[string]eventbus.ScheduleInfo{}
	for after := ""; ; {
		page, err := l.Schedules(l.within(), after, 7)
		require.NoError(t, err)
		for _, s := range page {
			require.NotContains(t, found, s.Name, "each is after itself")
			found[s.Name] = s
			after = s.Name
		}
		if len(page) < 7 {
			break
		}
	}
	require.Len(t, found, len(texts))
	for _, text := range texts {
		s := found[text]
		require.Equal(t, []string{ids[text], text, text, text}, []string{s.ID, s.Work, s.WorkTag, s.Key})
		alone, err := l.GetSchedule(l.within(), text)
		require.NoError(t, err)
		require.Equal(t, s, alone)
		_, err = l.RunSchedule(l.within(), text)
		require.NoError(t, err, "%q", text)
		item := l.claim(text)
		require.Equal(t, []string{text, text}, []string{item.Name, item.Key})
		paused, err := l.PauseSchedule(l.within(), text)
		require.NoError(t, err)
		require.True(t, paused, "%q", text)
		was, err := l.DeleteSchedule(l.within(), text)
		require.NoError(t, err)
		require.True(t, was, "%q", text)
	}
	require.Empty(t, l.scheduled())

	// Few are part of an expression, and what the server knows as a zone is one.
	var parts []string
	for _, text := range texts {
		for _, cron := range []string{text, "0 0 * * " + text, "@every " + text, text + " 0 0 * * *"} {
			next, err := l.NextOccurrence(l.within(), cron, "", time.Now())
			if err != nil {
				require.ErrorIs(t, err, pgwake.ErrInvalid, "%q", cron)
				continue
			}
			require.False(t, next.IsZero(), "%q", cron)
			parts = append(parts, cron)
		}
		if _, err := l.NextOccurrence(l.within(), "@daily", text, time.Now()); err != nil {
			require.ErrorIs(t, err, pgwake.ErrInvalid, "%q", text)
		}
	}
	require.ElementsMatch(t, []string{"@every 1h", "0 0 * * *", "0 0 * * ?", "0 0 * * 0", "0 0 * * 1", "0 0 * * 01", "* 0 0 * * *", "? 0 0 * * *", "0 0 0 * * *", "1 0 0 * * *", "01 0 0 * * *",
		"  0 0 * * *", "\n 0 0 * * *", "\t 0 0 * * *"}, parts)
}

func TestTexts_OfNodes_ComeBack(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	texts := hostile.Texts(pgwake.MaxNameLength)
	for i, text := range texts {
		n, err := l.Node(l.within(), &eventbus.NodeConfig{ID: fmt.Sprintf("%03d-%s", i, text), DisplayName: text, Description: text, Metadata: map[string]string{text: text}})
		require.NoError(t, err, "%q", text)
		require.Regexp(t, `^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$`, n.ID())
	}
	nodes, err := l.Nodes(l.within())
	require.NoError(t, err)
	require.Len(t, nodes, len(texts))
	slices.SortFunc(nodes, func(a, b eventbus.NodeInfo) int {
		return int(a.ID[0])<<16 + int(a.ID[1])<<8 + int(a.ID[2]) - int(b.ID[0])<<16 - int(b.ID[1])<<8 - int(b.ID[2])
	})
	for i, text := range texts {
		require.Equal(t, []string{text, text}, []string{nodes[i].DisplayName, nodes[i].Description})
	}
}
