package goworkflows_test

import (
	"encoding/json"
	"fmt"
	"os"
	"testing"

	"github.com/pgwake/pgwake/internal/testschema"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if told := os.Getenv(childVariable); told != "" {
		var c child
		if err := json.Unmarshal([]byte(told), &c); err != nil {
			panic(err)
		}
		if err := c.run(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	// The runtime leaves behind the coroutine of a workflow that has not ended, wherever it has no cache to close it.
	testschema.Main(m, goleak.IgnoreAnyFunction("github.com/cschleiden/go-workflows/internal/sync.(*coState).yield"))
}
