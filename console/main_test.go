package console_test

import (
	"flag"
	"os"
	"runtime"
	"strconv"
	"testing"

	"github.com/pgwake/pgwake/internal/testschema"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", strconv.Itoa(2*runtime.GOMAXPROCS(0))); err != nil { // half of them wait most of the time
		panic(err)
	}
	code := m.Run()
	closeBrowser()
	testschema.Drop()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			println("goroutines were left behind:", err.Error())
			code = 1
		}
	}
	os.Exit(code)
}
