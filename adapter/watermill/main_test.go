package watermill_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/pgwake/pgwake/internal/testschema"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if socket := os.Getenv(envRestart); socket != "" {
		if err := restart(socket); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	// One of the suite's goroutines waits for ever for what nobody publishes any more.
	testschema.Main(m, goleak.IgnoreAnyFunction("github.com/ThreeDotsLabs/watermill/pubsub/tests.TestReconnect.func2"))
}
