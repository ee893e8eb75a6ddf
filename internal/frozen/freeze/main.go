// Program freeze adds the migrations that are about to be released to internal/frozen/CHECKSUMS. It runs at the root of the repository.
package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/pgwake/pgwake/internal/frozen"
)

const file = "internal/frozen/CHECKSUMS"

func main() {
	if err := freeze(); err != nil {
		fmt.Fprintln(os.Stderr, "freeze:", err)
		os.Exit(1)
	}
}

func freeze() error {
	before, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	after, err := frozen.Freeze(os.DirFS("."), string(before))
	if err != nil {
		return err
	}
	return os.WriteFile(file, []byte(after), 0o644)
}
