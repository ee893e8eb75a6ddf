package main

import (
	"bytes"
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestFirstProgram_HandlesAllThreeItems_AndLeavesNoSchema(t *testing.T) {
	server, err := devpg.Start(t.Context(), nil)
	require.NoError(t, err)
	defer func() { assert.NoError(t, server.Stop(context.Background())) }()

	require.NoError(t, firstProgram(t.Context(), server.URL), "it returns when all three were greeted")
	assert.Empty(t, schemas(t, server.URL))
}

func TestFirstProgram_Interrupted_LeavesNoSchema(t *testing.T) {
	server, err := devpg.Start(t.Context(), nil)
	require.NoError(t, err)
	defer func() { assert.NoError(t, server.Stop(context.Background())) }()

	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(300*time.Millisecond, cancel) // any moment will do
	defer cancel()
	if err := firstProgram(ctx, server.URL); err != nil {
		assert.ErrorIs(t, err, context.Canceled)
	}
	assert.Empty(t, schemas(t, server.URL))
}

func schemas(t *testing.T, url string) (names []string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	defer conn.Close(t.Context())
	require.NoError(t, conn.QueryRow(t.Context(),
		`SELECT array(SELECT nspname FROM pg_namespace WHERE nspname LIKE 'quickstart\_%')`).Scan(&names))
	return names
}

func TestScreen_Terminal_WritesOverOneLine(t *testing.T) {
	var out bytes.Buffer
	s := &screen{out: &out, width: func() int { return 10 }}
	s.status("one")
	s.status("twenty-one characters")
	s.clear()
	s.line("done")
	assert.Equal(t, "\r\x1b[K  one\r\x1b[K  twenty-\r\x1b[Kdone\n", out.String(), "a status fits into one line")
}

func TestScreen_NoTerminal_WritesPlainLinesNowAndThen(t *testing.T) {
	file, err := os.CreateTemp(t.TempDir(), "")
	require.NoError(t, err)
	defer file.Close()
	s := newScreen(file)
	s.status("too soon")
	s.last = s.last.Add(-plainPause)
	s.status("now")
	s.clear()
	s.line("done")
	text, err := os.ReadFile(file.Name())
	require.NoError(t, err)
	assert.Equal(t, "  ... now\ndone\n", string(text))
	assert.False(t, strings.ContainsRune(string(text), '\x1b'))
}
