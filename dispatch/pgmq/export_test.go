package pgmq

import "time"

// Failed is what becomes of an error.
var Failed = failed

// SpendCredit leaves the Stream no credit for what notifications call for.
func (s *Stream) SpendCredit() {
	for s.credit.until().IsZero() {
		s.credit.spend()
	}
}

// What of it time, and a find, allow for.
const (
	SpendPause = spendPause
	FoundWorth = foundWorth
)

// Parked is how many wait.
func (s *Stream) Parked() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.parked)
}

// SetPatience is for how long the server may be silent.
func (s *Stream) SetPatience(d time.Duration) { s.patience = d }
