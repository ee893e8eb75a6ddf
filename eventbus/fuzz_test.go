package eventbus_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/eventbus"
	"github.com/stretchr/testify/require"
)

// This file answers: what do cron expressions and cursors from outside mean, whatever they are? `make fuzz` looks for more than the seeds.

// An expression and a time zone are refused as such, or they have a next instant after any other, which is also the next one after the second before it.
func FuzzCron_AnyText_IsRefusedOrHasANextInstant(f *testing.F) {
	for _, cron := range []string{"", "*/20 * * * * *", "30 2 * * *", "0 12 29 FEB ?", "1,2,5-9/2 */3 13 jan-dec fri", "@every 999999h999999m999999s", "@daily", "0 0 31 2 *", "60 * * * *", "\u017fun"} {
		f.Add(cron, "Europe/Berlin", int64(1_774_746_000)) // an hour before a clock is put forward
		f.Add(cron, "Australia/Lord_Howe", int64(0))
	}
	f.Add("* * * * *", "Etc/GMT-14", int64(-1))
	f.Add("* * * * *", "Foo/Bar", int64(-1))
	f.Add("\xe3", "\x8c\x8c", int64(0)) // a letter, together
	conn := session(f, schemas.New(f, &pgwake.Config{Mode: pgwake.ModeDisabled}))
	f.Fuzz(func(t *testing.T, cron, zone string, second int64) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		const century = 100 * 366 * 24 * 60 * 60
		since := time.Unix(second%century, 0)
		after := func(at time.Time) (next *time.Time, err error) {
			err = conn.QueryRow(ctx, `SELECT next_occurrence($1, $2, $3::timestamptz, $4::timestamptz)`, cron, zone, at, since).Scan(&next)
			return next, err
		}
		next, err := after(since)
		if err != nil {
			requireNoText(t, err, cron+" "+zone)
			return
		}
		if next == nil {
			return
		}
		require.True(t, next.After(since), next)
		require.Zero(t, next.Nanosecond())
		again, err := after(next.Add(-time.Second))
		require.NoError(t, err)
		require.NotNil(t, again)
		require.True(t, next.Equal(*again), "%v, and from the second before it %v", next, again)
	})
}

// requireNoText fails unless a text was refused for what it says, or because no text of the server can be like that.
func requireNoText(t *testing.T, err error, text string) {
	t.Helper()
	var refused *pgconn.PgError
	require.True(t, errors.As(err, &refused), "%v", err)
	if utf8.ValidString(text) && !strings.ContainsRune(text, 0) {
		require.Equal(t, "PW003", refused.Code, "%v", err)
	}
}

// A text is refused, or is a cursor that can be written down and asked for.
func FuzzParseCursor_AnyText_IsRefusedOrAPlace(f *testing.F) {
	for _, text := range []string{"", "0/0", "/", "7", "+7/+8", "07/08", "7/-8", "9223372036854775807/9223372036854775807", "9223372036854775808/0", "18446744073709551615/1", "1/2/3", "1/2 ", "\xff/1"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		c, err := eventbus.ParseCursor(text)
		if err != nil {
			require.ErrorIs(t, err, pgwake.ErrInvalid)
			require.True(t, utf8.ValidString(err.Error()) && len(err.Error()) < 600, "an error is for a log line")
			return
		}
		require.GreaterOrEqual(t, c.ID, int64(0))
		again, err := eventbus.ParseCursor(c.String())
		require.NoError(t, err)
		require.Equal(t, c, again)
	})
}
