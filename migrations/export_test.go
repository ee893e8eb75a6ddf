package migrations

import (
	"io/fs"
	"time"
)

// WithPatience returns a Layer that is tried again for so long.
func WithPatience(l Layer, patience time.Duration) Layer {
	l.patience = patience
	return l
}

// BySection is what goose is given of a Layer's files.
func BySection(files fs.FS) fs.FS { return bySection{files} }
