package show

import (
	"bytes"
	"context"
	"net/http"
	"regexp"
	"testing"

	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/pgwaketest"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConsole_IsThereForThisMachineUntilItIsInterrupted(t *testing.T) {
	p := pgwaketest.New(t, nil)
	var out bytes.Buffer
	stay, err := Console(t.Context(), &out, p, console.Options{})
	require.NoError(t, err)
	require.NoError(t, stay(nil), "without the flag it is nowhere")
	require.Empty(t, out.String())

	*address = "127.0.0.1:0"
	defer func() { *address = "" }()
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	stay, err = Console(ctx, &out, p, console.Options{})
	require.NoError(t, err)
	url := regexp.MustCompile(`http://\S+`).FindString(out.String())
	for host, status := range map[string]int{"": http.StatusOK, "evil.example": http.StatusForbidden} {
		r, err := http.NewRequest(http.MethodGet, url+"letters", nil)
		require.NoError(t, err)
		r.Host = host
		answer, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		answer.Body.Close()
		require.Equal(t, status, answer.StatusCode)
	}
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	ended := make(chan error, 1)
	go func() { ended <- stay(nil) }()
	interrupt()
	require.NoError(t, <-ended)
	_, err = http.Get(url) //nolint:bodyclose // nobody answers
	require.Error(t, err)
}
