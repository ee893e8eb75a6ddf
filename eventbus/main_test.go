package eventbus_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/pgwake/pgwake/internal/testschema"
)

func TestMain(m *testing.M) {
	if told := os.Getenv(memberVariable); told != "" {
		if err := beMember(told); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	testschema.Main(m)
}
