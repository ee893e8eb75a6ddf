package pgwake

// This file answers: how is a goroutine told that there is something for it to do?

// bell is for one goroutine to receive from. Rung while that is busy it stays rung, once: whoever has put something down
// and then rings may count on it to be looked at.
type bell chan struct{}

func newBell() bell { return make(bell, 1) }

// ring never blocks. It is safe for concurrent use, with a mutex held as well.
func (b bell) ring() {
	select {
	case b <- struct{}{}:
	default:
	}
}

// silence takes back a ring that nobody has heard yet, and reports whether there was one.
func (b bell) silence() bool {
	select {
	case <-b:
		return true
	default:
		return false
	}
}
