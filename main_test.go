package pgwake_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/testschema"
	"go.uber.org/goleak"
)

func init() { pgwake.BorrowSchema = testschema.Core.Borrow }

func TestMain(m *testing.M) {
	code := m.Run()
	closeBackstage()
	testschema.Drop()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintf(os.Stderr, "goroutines were left behind: %v\n", err)
		code = 1
	}
	os.Exit(code)
}
