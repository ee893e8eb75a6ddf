package pgwake

import "time"

// HoldGroups has a group that hangs hold up others for as long as it takes: for tests that let calls gather behind it, on a
// machine that may stand still.
func HoldGroups(p *Provider) {
	p.acks.mu.Lock()
	defer p.acks.mu.Unlock()
	p.enqueues.mu.Lock()
	defer p.enqueues.mu.Unlock()
	p.acks.patience, p.enqueues.patience = time.Hour, time.Hour
}

// InjectFault has the engine call fault where a test may make it fail.
func InjectFault(c *Config, fault func(point string)) { c.fault = fault }

// AcksWaiting returns how many acks wait for a group that has not started.
func AcksWaiting(p *Provider) int {
	p.acks.mu.Lock()
	defer p.acks.mu.Unlock()
	return len(p.acks.waiting)
}

// EnqueuesUnderWay returns how many enqueues wait for a group that has not started, how many groups are on their way, but
// those that hang, and how many enqueues that are made directly.
func EnqueuesUnderWay(p *Provider) (waiting, groups, singles int) {
	p.enqueues.mu.Lock()
	defer p.enqueues.mu.Unlock()
	return len(p.enqueues.waiting), p.enqueues.flying, p.enqueues.singles
}

// WorkWaiting returns how many wait for work items, and how many of them in vain: in their modes nothing is fetched.
func WorkWaiting(p *Provider) (all, inVain int) {
	w := p.engine.waiters
	w.mu.RLock()
	defer w.mu.RUnlock()
	for _, l := range w.byKey[Worker] {
		l.mu.Lock()
		all += len(l.waiting)
		if l.filter.nothing {
			inVain += len(l.waiting)
		}
		l.mu.Unlock()
	}
	return all, inVain
}

// ExpectsNoWork reports whether whoever waits for work items of the namespace looks at no instant that is known, such as the end of a lease.
func ExpectsNoWork(p *Provider, namespace string) bool {
	nothing := true
	p.engine.waiters.each(Worker, namespace, func(l *lane) {
		l.mu.Lock()
		defer l.mu.Unlock()
		nothing = nothing && l.earliest.IsZero() && l.told.IsZero() && l.instantBy.IsZero()
	})
	return nothing
}

// WorkSettled reports whether whoever waits for work items of the namespace, and hears of them, looks only when told to.
func WorkSettled(p *Provider, namespace string) bool {
	settled := true
	p.engine.waiters.each(Worker, namespace, func(l *lane) {
		l.mu.Lock()
		defer l.mu.Unlock()
		settled = settled && (!l.filter.manner.hears || l.arming.settled && l.empty)
	})
	return settled
}
