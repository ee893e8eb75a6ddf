package console_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	code := m.Run()
	closeBrowser()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			println("goroutines were left behind:", err.Error())
			code = 1
		}
	}
	os.Exit(code)
}
