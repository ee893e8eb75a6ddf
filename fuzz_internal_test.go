package pgwake

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/pgwake/pgwake/internal/testdb"
	"github.com/stretchr/testify/require"
)

// This file answers: what do bytes from outside mean, whatever they are?
//
// Each target states what its decoder accepts, and that what it accepts keeps its meaning. `go test` runs the seeds;
// to look for more, one at a time:
//
//	go build -o bin/withpg ./devpg/cmd/withpg
//	bin/withpg -- go test -run '^$' -fuzz '^FuzzPayload_Any' -fuzztime 1m -fuzzminimizetime 1s .

// fuzzServer is a connection to a migrated schema, for verdicts of the server. A worker of the fuzzer has a
// process, and so a schema, of its own.
func fuzzServer(f *testing.F) *pgx.Conn {
	f.Helper()
	ctx := context.Background()
	schema := testdb.Schema(f)
	p, err := Open(ctx, testdb.URL(f), &Config{Schema: schema, Logger: silent})
	require.NoError(f, err)
	require.NoError(f, p.Close(ctx)) // it was there to migrate
	config, err := pgx.ParseConfig(testdb.URL(f))
	require.NoError(f, err)
	config.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize()
	// No cache of statements, and so no answer that depends on the input before.
	config.DefaultQueryExecMode = pgx.QueryExecModeExec
	conn, err := pgx.ConnectConfig(ctx, config)
	require.NoError(f, err)
	f.Cleanup(func() { _ = conn.Close(ctx) })
	return conn
}

// sqlState returns the SQLSTATE of a refusal, or "" if there was none. Anything but a refusal ends the test.
func sqlState(t *testing.T, err error) string {
	t.Helper()
	if err == nil {
		return ""
	}
	var refused *pgconn.PgError
	require.ErrorAs(t, err, &refused)
	return refused.Code
}

// Notifications

// formatNote is notify_queue, for a note that the function can write.
func formatNote(n note) string {
	var micros int64
	if !n.next.IsZero() {
		micros = n.next.UnixMicro()
	}
	namespace := n.namespace
	if namespace == "" {
		namespace = "*"
	}
	return fmt.Sprintf("%d %d %s", n.due, micros, namespace)
}

// noteOf is parseNote of what can be read.
func noteOf(t testing.TB, said string) note {
	t.Helper()
	n, ok := parseNote(said)
	require.True(t, ok, "%q", said)
	return n
}

// said is what a notification says, but for when it was sent, which was a moment ago.
func said(t testing.TB, n *pgconn.Notification) string {
	t.Helper()
	end := strings.LastIndexByte(n.Payload, ' ')
	require.Positive(t, end, n.Payload)
	micros, err := strconv.ParseInt(n.Payload[end+1:], 10, 64)
	require.NoError(t, err)
	require.WithinDuration(t, time.Now(), time.UnixMicro(micros), time.Minute)
	return n.Payload[:end]
}

func requireSameNote(t *testing.T, want, got note) {
	t.Helper()
	require.True(t, want.next.Equal(got.next), "%v is not %v", want.next, got.next)
	want.next, got.next = time.Time{}, time.Time{}
	require.Equal(t, want, got)
}

// What notify_queue writes is read as what was meant, to the microsecond, and the server itself writes it like
// that.
func FuzzNote_FromNotifyQueue_IsWhatWasMeant(f *testing.F) {
	server := fuzzServer(f)
	ctx := context.Background()
	var channel string
	require.NoError(f, server.QueryRow(ctx, `SELECT channel('worker')`).Scan(&channel))
	_, err := server.Exec(ctx, `LISTEN `+pgx.Identifier{channel}.Sanitize())
	require.NoError(f, err)

	f.Add(int64(0), int64(0), "")
	f.Add(int64(1), int64(0), "default")
	f.Add(int64(10_000), int64(1763720000123456), "a_b-9")
	f.Add(int64(0), int64(1), "")
	f.Add(int64(0), int64(-1), "z")                        // before 1970: an item may be due at any instant
	f.Add(int64(math.MaxInt64), int64(253402300799), "zz") // the last second of 9999 in the wrong unit
	f.Fuzz(func(t *testing.T, due, micros int64, namespace string) {
		const year1, year10000 = -62135596800000000, 253402300800000000 // what the queues can hold
		if due < 0 || micros < year1 || micros >= year10000 || namespace != "" && CheckNamespace(namespace) != nil {
			t.Skip("nothing that a queue can say")
		}
		want := note{due: due, namespace: namespace}
		if micros != 0 {
			want.next = time.UnixMicro(micros)
		}
		requireSameNote(t, want, noteOf(t, formatNote(want)))

		// A null instant is no instant. It travels as its distance from 1970, so that nothing on the way rounds.
		_, err := server.Exec(ctx, `SELECT notify_queue('worker', $1, CASE WHEN $2::bigint <> 0 THEN
			'epoch'::timestamptz + $2::bigint / 1000000 * interval '1 second' + $2::bigint % 1000000 * interval '1 microsecond' END, $3)`,
			due, micros, text(namespace))
		require.NoError(t, err)
		heard, err := server.WaitForNotification(ctx)
		require.NoError(t, err)
		require.Equal(t, formatNote(want), said(t, heard))
		requireSameNote(t, want, noteOf(t, said(t, heard)))
	})
}

// What notify_queue cannot have written for a queue, from a newer version or a stranger, has everybody look: a payload
// with one more field at its end, for one, is no note for a namespace that nobody serves. What it can have written is
// read to the end: written again it says the same.
func FuzzNote_AnyPayload_IsReadWholeOrMeansLook(f *testing.F) {
	for _, payload := range []string{
		"", " ", "  ", "1", "1 0", "1 0 ", "1 0 *", "0 0 *", "0 0 default", "12 1763720000123456 red", "+1 +0 red", "01 00 red", "-1 0 red", "-0 -0 red",
		"0 -1 *", "x y z", "1 x red", "x 0 red", "1.0 0 red", "1e3 0 red", "0x1 0 red", "1_0 0 red", "9223372036854775808 0 *",
		"0 9223372036854775807 *", "0 -9223372036854775808 *", "1\t0\tred", "1 0 red\n", "1 0 red more", "1 0 red,blue", "1 0 Red", "1 0 **",
		"1 0 \x00", "1 0 \xff", "{}", "١ 0 red",
	} {
		f.Add(payload)
	}
	f.Fuzz(func(t *testing.T, payload string) {
		n, ok := parseNote(payload)
		fields := strings.SplitN(payload, " ", 3)
		readable := len(fields) == 3 && (fields[2] == "*" || CheckNamespace(fields[2]) == nil)
		for i, number := range fields[:min(2, len(fields))] {
			n, err := strconv.ParseInt(number, 10, 64)
			readable = readable && err == nil && (i > 0 || n >= 0) // the first is how many are due
		}
		require.Equal(t, readable, ok)
		if !readable {
			require.Equal(t, note{due: 1}, n, "%q: look, whatever the namespace", payload)
			return
		}
		requireSameNote(t, n, noteOf(t, formatNote(n)))
		require.Equal(t, fields[2] == "*", n.namespace == "", "who looks")
		require.Equal(t, strings.Trim(fields[1], "+-0") == "", n.next.IsZero(), "whether there is an instant")
	})
}

// A notification to a lane is for one that there can be, or for nobody; as it is read it can be written, and read again.
func FuzzCall_AnyPayload_IsForALaneOrForNobody(f *testing.F) {
	for _, payload := range []string{"", "1 0 0 n", "-7 3 1 a b", "2147483647 2147483647 x n", "2147483648 0 0 n", "1 -1 0 n", "1 0 0 ", "1 0 0 \xff", "+1 0 0 n", "1  0 n"} {
		f.Add(payload)
	}
	f.Fuzz(func(t *testing.T, payload string) {
		c, ok := parseCall(payload)
		if !ok {
			require.Zero(t, c)
			return
		}
		require.NoError(t, CheckNamespace(c.namespace))
		require.GreaterOrEqual(t, c.hop, 0)
		standBy := map[bool]int{true: 1}[c.standBy]
		again, ok := parseCall(fmt.Sprintf("%d %d %d %s", c.lane, c.hop, standBy, c.namespace))
		require.True(t, ok)
		require.Equal(t, c, again)
	})
}

// Versions

// A text is refused, or is a version that can be stored, and that is written as a text for the same.
func FuzzParseVersion_AnyText_IsRefusedOrAVersion(f *testing.F) {
	for _, text := range []string{"", "1", "1.2", "1.2.3", "01.0.0", "4194303.1048575.1048575", "4194304", "1.1048576", "1.2.3.4", "+1", "1..2", "-1.0", "1.2.x", "\xff"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		v, err := ParseVersion(text)
		if err != nil {
			require.ErrorIs(t, err, ErrInvalid)
			require.True(t, utf8.ValidString(err.Error()), "%q", err)
			return
		}
		again, err := ParseVersion(v.String())
		require.NoError(t, err)
		require.Equal(t, v, again)
	})
}

// Lock tokens

// A token that a fetch made is taken apart into what it was made of, and joined to itself again.
func FuzzLockToken_MadeByAFetch_ComesApartAndTogetherAgain(f *testing.F) {
	f.Add(make([]byte, 16), "i", int64(1))
	f.Add([]byte("0123456789abcdef"), "order/7", int64(-1)) // the id may have a slash
	f.Add([]byte("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), "/", int64(math.MaxInt64))
	f.Add([]byte("0123456789abcdef"), strings.Repeat("é", 127), int64(math.MinInt64))
	f.Fuzz(func(t *testing.T, id []byte, instance string, item int64) {
		if len(id) != 16 || checkText("instance id", instance, true) != nil {
			t.Skip("no fetch makes it")
		}
		claim := pgtype.UUID{Bytes: [16]byte(id), Valid: true}

		token := lockToken(claim, instance)
		gotClaim, subject, err := token.split()
		require.NoError(t, err)
		require.Equal(t, claim, gotClaim)
		require.Equal(t, instance, subject)
		require.Equal(t, token, lockToken(gotClaim, subject))

		token = lockToken(claim, strconv.FormatInt(item, 10))
		l, err := token.splitWork()
		require.NoError(t, err)
		require.Equal(t, lease{item, claim}, l)
		require.Equal(t, token, lockToken(l.claim, strconv.FormatInt(l.item, 10)))

		require.NotEqual(t, lockToken(newClaim(), instance), lockToken(newClaim(), instance), "two claims")
	})
}

// Whatever text is passed for a token: it is a lost lock, or it stands for exactly one claim of one thing, and the
// token that a fetch would have made for these stands for the same.
func FuzzLockToken_AnyText_IsLostOrStandsForOneClaim(f *testing.F) {
	const id = "00112233-4455-6677-8899-aabbccddeeff"
	for _, token := range []string{
		"", "/", id, id + "/", id + "/1", id + "/order/7", id + "//", id + "/\x00", id + "/\xff", id + "/" + strings.Repeat("x", 256),
		strings.ToUpper(id) + "/1", strings.ReplaceAll(id, "-", "") + "/1", strings.ReplaceAll(id, "-", "_") + "/1", "{" + id + "}/1",
		id + "/9223372036854775808", id + "/-1", id + "/+1", id + "/01", id + "/1 ", id + "/0x1", id + "/1_0", " " + id + "/1", "g" + id[1:] + "/1",
	} {
		f.Add(token)
	}
	f.Fuzz(func(t *testing.T, text string) {
		token := LockToken(text)
		lost := func(err error) {
			require.ErrorIs(t, err, ErrLockLost)
			require.Less(t, len(err.Error()), 4*MaxNameLength+100, "an error is for a log line")
			require.True(t, utf8.ValidString(err.Error()))
		}
		claim, subject, err := token.split()
		l, workErr := token.splitWork()
		if err != nil {
			lost(err)
			lost(workErr)
			return
		}
		require.True(t, claim.Valid)
		require.NoError(t, checkText("subject", subject, true), "it goes to the server")
		require.True(t, strings.HasSuffix(text, "/"+subject), "nothing of the subject is lost")
		canonical := lockToken(claim, subject)
		again, same, err := canonical.split()
		require.NoError(t, err)
		require.Equal(t, claim, again)
		require.Equal(t, subject, same)

		number, isNumber := strconv.ParseInt(subject, 10, 64)
		if isNumber != nil {
			lost(workErr)
			return
		}
		require.NoError(t, workErr)
		require.Equal(t, lease{number, claim}, l)
	})
}

// Payloads

// depthOf is how deep JSON is nested, as encoding/json sees it.
func depthOf(data []byte) (deepest int) {
	depth := 0
	for d := json.NewDecoder(bytes.NewReader(data)); ; {
		token, err := d.Token()
		if err != nil {
			return deepest
		}
		switch token {
		case json.Delim('['), json.Delim('{'):
			depth++
			deepest = max(deepest, depth)
		case json.Delim(']'), json.Delim('}'):
			depth--
		}
	}
}

// What the check lets pass, the server stores and can take apart, and what it refuses is no JSON or the server could
// not take it apart. The verdict is that of the server's jsonb, which keeps no text but the meaning, with the
// exceptions that are listed here.
func FuzzPayload_AnyBytes_AreAcceptedIfTheServerCanTakeThemApart(f *testing.F) {
	server := fuzzServer(f)
	for _, data := range []string{
		``, ` `, `null`, `true`, `0`, `-0`, `-`, `01`, `1.`, `.1`, `1e`, `1E+5`, `1e-5`, `-1.5e+3`, `+1`, `1a`, `0x1`, `NaN`, `Infinity`, `1 2`, `1e200000`,
		`""`, `"a`, `'a'`, "\"\n\"", "\"\x1f\"", "\"\x7f\"", `"\/"`, `"\b\f\n\r\t\"\\"`, `"\x"`, `"\u00"`, `"\u00e9"`, `"\u00E9"`, `"\uD83D\uDE00"`,
		`"\u0000"`, `"\\u0000"`, `"\\\u0000"`, `"\ud83d"`, `"\ude00"`, `"\ud83d\ud83d"`, `"\ud83d\u0041"`, `"\ud83dx"`, `"\ud83d\\ude00"`, `{"\u0000":1}`,
		"\"\xff\"", "\"\xed\xa0\x80\"", "\"\xc0\x80\"", "\"\xf4\x90\x80\x80\"", "1\x00", "\"\x00\"", "\ufeff1", "\u00a01", "\v1", "\f1", "\r\n\t 1 ",
		`{}`, `{"a":1,"a":2}`, `{"a":1,}`, `{a:1}`, `{"a"}`, `{"a":}`, `{1:2}`, `[1,2]`, `[1,]`, `[,]`, `[`, `]`, `{"a":{"b":[{"c":null}]}}`, `//x`, `/**/1`,
		`{"":""}`, `tru`, `nulll`, `TRUE`, strings.Repeat("[", 9000) + strings.Repeat("]", 9000),
		strings.Repeat("[", MaxDepth) + strings.Repeat("]", MaxDepth), strings.Repeat("[", MaxDepth+1) + strings.Repeat("]", MaxDepth+1),
		strings.Repeat(`{"":[`, MaxDepth/2) + strings.Repeat("]}", MaxDepth/2), `"` + strings.Repeat(`[{\"\\`, MaxDepth) + `"`, "[" + strings.Repeat("[],", MaxDepth) + "0]",
	} {
		f.Add([]byte(data))
	}
	c := Config{MaxPayload: 1 << 16}
	f.Fuzz(func(t *testing.T, data []byte) {
		before := bytes.Clone(data)
		err := c.checkJSON("payload", data)
		require.Equal(t, before, data)
		if len(data) > c.MaxPayload {
			require.ErrorIs(t, err, ErrPayloadTooLarge)
			return
		}
		require.NotErrorIs(t, err, ErrPayloadTooLarge)
		if err != nil {
			require.ErrorIs(t, err, ErrInvalid)
		}
		if len(data) == 0 {
			require.NoError(t, err, "no payload")
			require.Nil(t, payload(data))
			return
		}
		require.Equal(t, string(data), *payload(data), "byte for byte")

		// What the protocol carries as text is valid UTF-8 without NUL; the rest does not get as far as JSON.
		if !utf8.Valid(data) || bytes.IndexByte(data, 0) >= 0 {
			require.Error(t, err)
			return
		}
		var stored string
		var kind string
		state := sqlState(t, server.QueryRow(context.Background(),
			`SELECT j.given::text, jsonb_typeof(j.given::jsonb) FROM (SELECT $1::text::json) AS j (given)`, string(data)).Scan(&stored, &kind))
		switch state {
		case "":
			require.Equal(t, depthOf(data) <= MaxDepth, err == nil, "the server takes it, and its depth decides: %v", err)
			require.Equal(t, string(data), stored)
		case "22003":
			// Numbers that its numeric cannot hold: json keeps them.
		default:
			require.Error(t, err, "the server refuses it: %s", state)
		}
		if err == nil {
			require.True(t, json.Valid(data))
		}
	})
}

// Names

// fuzzNames are texts that may be names, of whatever kind, and may be not.
var fuzzNames = []string{
	"", "a", "A", "z9", "9a", "_a", "-a", "a_", "a-", "default", "a b", "a,b", "a.b", "a*", "*", "a\n", "\na", "a\x00", "\x00", "a\xff", "\xff",
	"\xed\xa0\x80", "é", "aé", "ａ", "ſ", "ı", "K", "a\u0301", "a\u200b", strings.Repeat("a", 40), strings.Repeat("a", 41),
	strings.Repeat("é", 127) + "x", strings.Repeat("é", 128), strings.Repeat("x", 255), strings.Repeat("x", 256), "'; DROP TABLE worker_queue --",
}

// The rule for namespaces is written down twice, in Go and in the tables. They agree, and both say what the
// documentation says.
func FuzzNamespace_AnyText_GoAndTheTablesAgree(f *testing.F) {
	server := fuzzServer(f)
	ctx := context.Background()
	for _, name := range fuzzNames {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		good := len(name) >= 1 && len(name) <= 40 && name[0] >= 'a' && name[0] <= 'z'
		for i := range len(name) {
			c := name[i]
			good = good && (c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '_' || c == '-')
		}
		err := CheckNamespace(name)
		if !good {
			require.ErrorIs(t, err, ErrInvalid)
		} else {
			require.NoError(t, err)
			require.NotEqual(t, "*", name, "which stands for all in a notification")
			require.NotContains(t, name, ",", "which separates them for the fallback")
		}
		if !utf8.ValidString(name) || strings.ContainsRune(name, 0) {
			return // does not get as far
		}
		for _, insert := range []string{
			`INSERT INTO namespaces (name) VALUES ($1) ON CONFLICT DO NOTHING`,
			`INSERT INTO worker_queue (name, namespace) VALUES ('w', $1)`,
			`INSERT INTO orchestrator_queue (instance_id, kind, namespace) VALUES ('i', 'k', $1)`,
			`INSERT INTO instances (instance_id, name, namespace) VALUES ('i', 'n', $1)`,
		} {
			refused := errors.New("rolled back")
			err := pgx.BeginFunc(ctx, server, func(tx pgx.Tx) error {
				if _, err := tx.Exec(ctx, insert, name); err != nil {
					return err
				}
				return refused
			})
			if good {
				require.Equal(t, refused, err)
			} else {
				require.Equal(t, "23514", sqlState(t, err), insert)
			}
		}
	})
}

// A set of namespaces is sorted and without duplicates, whoever asks in whatever order: dispatchers that fetch the
// same share a lane. It survives its way to the fallback as one text, and the caller's slice is left alone.
func FuzzNamespaceSet_AnyNames_AreASetOrRefused(f *testing.F) {
	f.Add("")
	f.Add("a")
	f.Add("b;a;b")
	f.Add("a;;b")
	f.Add("default;A")
	f.Add("a,b;c")
	f.Fuzz(func(t *testing.T, joined string) {
		var names []string
		if joined != "" {
			names = strings.Split(joined, ";")
		}
		before := slices.Clone(names)
		set, err := namespaceSet(names)
		require.Equal(t, before, names)
		if slices.ContainsFunc(names, func(n string) bool { return CheckNamespace(n) != nil }) {
			require.ErrorIs(t, err, ErrInvalid)
			return
		}
		require.NoError(t, err)
		require.True(t, slices.IsSorted(set))
		require.Equal(t, len(set), len(slices.Compact(slices.Clone(set))))
		require.Equal(t, len(names) == 0, set == nil, "nil means all")
		for _, n := range names {
			require.Contains(t, set, n)
		}
		for _, n := range set {
			require.Contains(t, names, n)
		}
		slices.Reverse(names)
		again, err := namespaceSet(names)
		require.NoError(t, err)
		require.Equal(t, filter{Namespaces: set}.key(), filter{Namespaces: again}.key())
	})
}

// What passes as a name, an instance id, a version, a kind, a dedup key, the server stores as it is.
func FuzzText_AnyText_IsKeptOrRefused(f *testing.F) {
	server := fuzzServer(f)
	for _, name := range fuzzNames {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, s string) {
		err := checkText("text", s, true)
		if s != "" {
			require.Equal(t, err, checkText("text", s, false))
		} else {
			require.NoError(t, checkText("text", s, false))
			require.Nil(t, text(s))
		}
		carried := utf8.ValidString(s) && !strings.ContainsRune(s, 0)
		if err != nil {
			require.ErrorIs(t, err, ErrInvalid)
			require.True(t, utf8.ValidString(err.Error()))
			require.Less(t, len(err.Error()), 4*MaxNameLength+100)
			if !carried {
				return
			}
		}
		var stored []string
		refused := errors.New("rolled back")
		ctx := context.Background()
		got := pgx.BeginFunc(ctx, server, func(tx pgx.Tx) error {
			err := tx.QueryRow(ctx, `INSERT INTO worker_queue (name, instance_id, dedup_key) VALUES ($1, $1, $1)
				RETURNING ARRAY[name, instance_id, dedup_key]`, s).Scan(&stored)
			if err != nil {
				return err
			}
			return refused
		})
		if err != nil {
			require.Equal(t, "23514", sqlState(t, got), "the table has the same rule")
			return
		}
		require.Equal(t, refused, got)
		require.Equal(t, []string{s, s, s}, stored)
	})
}
