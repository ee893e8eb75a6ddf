package migrations

import "time"

// WithPatience returns a Layer that is tried again for so long.
func WithPatience(l Layer, patience time.Duration) Layer {
	l.patience = patience
	return l
}
