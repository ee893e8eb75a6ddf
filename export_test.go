package pgwake

// AcksWaiting returns how many acks wait for a group that has not started.
func AcksWaiting(p *Provider) int {
	p.acks.mu.Lock()
	defer p.acks.mu.Unlock()
	return len(p.acks.waiting)
}

// EnqueuesUnderWay returns how many enqueues wait for a group that has not started, how many groups are on their way, and
// how many enqueues that are made directly.
func EnqueuesUnderWay(p *Provider) (waiting, groups, singles int) {
	p.enqueues.mu.Lock()
	defer p.enqueues.mu.Unlock()
	return len(p.enqueues.waiting), p.enqueues.flying, p.enqueues.singles
}
