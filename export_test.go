package pgwake

// AcksWaiting returns how many acks wait for a group that has not started.
func AcksWaiting(p *Provider) int {
	p.acks.mu.Lock()
	defer p.acks.mu.Unlock()
	return len(p.acks.waiting)
}
