package outage_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/outage"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestPasses_WhatTheServerIsLike_AndNotWhatItThinks(t *testing.T) {
	for state, want := range map[string]bool{
		"57P01": true, "40P01": true, // Retryable
		"28P01": true, "3D000": true, "58030": true, "26000": true, "XX001": true,
		"42501": true, "42P01": true, "3F000": true, // what it is missing
		"PW001": false, "PW003": false, "22P02": false, "XX000": false, "P0001": false,
	} {
		err := pgwake.WrapError("ack", &pgconn.PgError{Code: state, SeverityUnlocalized: "ERROR"})
		require.Equal(t, want, outage.Passes(err), state)
		require.Equal(t, want, outage.Passes(fmt.Errorf("again: %w", err)), state)
	}
	require.False(t, outage.Passes(nil))
	require.False(t, outage.Passes(errors.New("what a handler says")))
	require.False(t, outage.Passes(&pgwake.Error{Op: "ack", Err: fmt.Errorf("%w: %w", pgwake.ErrClosed, pgwake.ErrPermission)}))
}

func TestOfTheServer_RightsAndTables_AreNot(t *testing.T) {
	for state, want := range map[string]bool{"28P01": true, "58030": true, "42501": false, "42P01": false, "40P01": false} {
		var failure *pgwake.Error
		require.ErrorAs(t, pgwake.WrapError("fetch", &pgconn.PgError{Code: state, SeverityUnlocalized: "ERROR"}), &failure)
		require.Equal(t, want, outage.OfTheServer(failure), state)
	}
}
