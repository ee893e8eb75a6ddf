//go:build linux

package main

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/testpooler"
	"github.com/stretchr/testify/require"
)

// This file answers: what does doctor say behind PgBouncer?

func TestDoctor_PoolerSharesSessions_ThatCheckAloneSpeaks(t *testing.T) {
	c, _ := newCLI(t, nil)
	through := testpooler.Start(t, c.url, "transaction")
	direct := c.url
	c.url = with(t, c.url, func(config *pgx.ConnConfig) { through(config) })
	r, code := c.examined()
	require.Equal(t, []string{"pooler"}, spoken(r), "%+v", r.Findings)
	require.Equal(t, exitFailed, code)

	r, code = c.examined("--listen-url", direct, "--strict")
	require.Empty(t, spoken(r), "%+v", r.Findings)
	require.Zero(t, code)
}

func TestDoctor_PoolerLendsWholeSessions_IsFine(t *testing.T) {
	c, _ := newCLI(t, nil)
	through := testpooler.Start(t, c.url, "session")
	c.url = with(t, c.url, func(config *pgx.ConnConfig) { through(config) })
	r, code := c.examined("--strict")
	require.Empty(t, spoken(r), "%+v", r.Findings)
	require.Zero(t, code)
}
