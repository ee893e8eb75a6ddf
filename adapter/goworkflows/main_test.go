package goworkflows_test

import (
	"testing"

	"github.com/pgwake/pgwake/internal/testschema"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// The runtime leaves behind the coroutine of a workflow that has not ended, wherever it has no cache to close it.
	testschema.Main(m, goleak.IgnoreAnyFunction("github.com/cschleiden/go-workflows/internal/sync.(*coState).yield"))
}
