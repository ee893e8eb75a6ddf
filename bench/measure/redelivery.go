package measure

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"time"

	"github.com/pgwake/pgwake"
)

// This file answers: when do the items of a process that was killed come back?

// RedeliveryOptions are the sizes of Redelivery.
type RedeliveryOptions struct {
	Kills       int           // Processes to kill, one after another. Defaults to 5.
	Items       int           // That each of them holds, by a lease each; at most 5. Defaults to 3.
	LockTimeout time.Duration // Of those leases. Defaults to 2 s.
	Dispatchers int           // Of the Provider that waits. Defaults to 8.
	Progress    func(Progress)
}

// RedeliveryResult is what Redelivery found.
type RedeliveryResult struct {
	LockTimeout time.Duration `json:"lock_timeout"`
	Lateness    Samples       `json:"lateness"` // from the end of the dead process's lease to the item in hand elsewhere
	ClockError  time.Duration `json:"clock_error"`
	Net         SafetyNet     `json:"safety_net"`
}

// Redelivery has child processes enqueue and claim items and kills them (SIGKILL). A Provider whose dispatchers have
// waited since before the items were claimed, and were told of nothing but the claims, must get them when
// the leases end.
//
// The child is this program: its main function, or TestMain, must call [ChildMain] before anything else.
func Redelivery(ctx context.Context, url string, o RedeliveryOptions) (r *RedeliveryResult, err error) {
	orDefault(&o.Kills, 5)
	orDefault(&o.Items, 3)
	orDefault(&o.LockTimeout, 2*time.Second)
	orDefault(&o.Dispatchers, 8)
	o.Items = min(o.Items, 5)
	defer func(ctx context.Context) { err = about(ctx, "redelivery", err) }(ctx)

	s := newStage(url)
	defer s.drop(&err)
	consumer, err := s.open(ctx, o.Dispatchers)
	if err != nil {
		return nil, err
	}
	defer consumer.close(&err)
	total := o.Kills * o.Items
	l := newLedger(warmUps + total)
	p, err := s.produce(ctx, PlainSQL, consumer, l)
	if err != nil {
		return nil, err
	}
	defer p.close(&err)
	clock, err := newServerClock(ctx, url)
	if err != nil {
		return nil, err
	}
	// A delivery of a first attempt is one that the child should have had.
	consumer.dispatch(o.Dispatchers, nil, func(item *pgwake.ClaimedWorkItem, inHand time.Time) error {
		if n, err := strconv.Atoi(string(item.Input)); err == nil && n >= warmUps && item.Attempt < 2 {
			return fmt.Errorf("item %d came before the other process had claimed it", n)
		}
		return l.take(item, inHand)
	})
	ctx = consumer.ctx
	if err := p.warmUp(ctx, l, ignore); err != nil {
		return nil, err
	}

	m := newMeter(o.Progress)
	ends := make([]time.Time, warmUps+total)
	for first := warmUps; first < len(ends); first += o.Items {
		if err := consumer.parked(o.Dispatchers); err != nil {
			return nil, err
		}
		claims, err := claimAndDie(ctx, order{URL: url, Schema: s.schema, First: first, Items: o.Items, LockTimeout: o.LockTimeout})
		if err != nil {
			return nil, err
		}
		for n, end := range claims {
			ends[n] = end
		}
		if err := l.wait(ctx, o.Items, ignore); err != nil {
			return nil, err
		}
		m.report(Progress{Done: first + o.Items - warmUps, Total: total})
	}
	if err := clock.finish(ctx); err != nil {
		return nil, err
	}
	r = &RedeliveryResult{LockTimeout: o.LockTimeout, ClockError: clock.uncertainty()}
	for n := warmUps; n < len(ends); n++ {
		if ends[n].IsZero() {
			return nil, fmt.Errorf("no child process claimed item %d", n)
		}
		r.Lateness = append(r.Lateness, clock.server(l.line(n).inHand).Sub(ends[n]))
	}
	r.Net, err = safetyNet(ctx, consumer.Provider)
	return r, err
}

// envOrder holds the order of a child, as JSON. It is what makes a process a child.
const envOrder = "PGWAKE_MEASURE_CLAIM"

// order is what a child is to enqueue and claim.
type order struct {
	URL, Schema  string
	First, Items int
	LockTimeout  time.Duration
}

// claimed is what a child reports of an item, as a line of JSON.
type claimed struct {
	N     int
	Until time.Time // end of the lease, server time
}

// claimAndDie has a child claim items, kills it, and returns the ends of its leases by item.
func claimAndDie(ctx context.Context, o order) (ends map[int]time.Time, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	orders, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	child := exec.CommandContext(ctx, self)
	child.Env = append(os.Environ(), envOrder+"="+string(orders))
	child.Stderr = os.Stderr
	leash, err := child.StdinPipe() // the child ends when this end closes, however that comes about
	if err != nil {
		return nil, err
	}
	defer leash.Close()
	reports, err := child.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := child.Start(); err != nil {
		return nil, err
	}
	ends = map[int]time.Time{}
	lines := json.NewDecoder(bufio.NewReader(reports))
	for err == nil && len(ends) < o.Items {
		var c claimed
		if err = lines.Decode(&c); err == nil {
			ends[c.N] = c.Until
		}
	}
	killed := child.Process.Kill()
	ended := child.Wait()
	if err == nil {
		err = killed
	}
	if err == nil && child.ProcessState.ExitCode() >= 0 && runtime.GOOS != "windows" {
		err = fmt.Errorf("it was to be killed and ended by itself: %w", ended)
	}
	if err != nil {
		return nil, fmt.Errorf("child process: %w", errors.Join(context.Cause(ctx), err))
	}
	return ends, nil
}

// ChildMain does nothing, unless this process was started by Redelivery or Restarts. Then it does what they ask for, and never
// returns.
func ChildMain() {
	var err error
	if orders, ok := os.LookupEnv(envOrder); ok {
		err = cmp.Or(claimAndHang(orders), errHung)
	} else if orders, ok := os.LookupEnv(envFleetOrder); ok {
		var o fleetOrder
		if err = json.Unmarshal([]byte(orders), &o); err == nil {
			err = o.run()
		}
	} else {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "measure: child process:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

var errHung = errors.New("nobody waits for it any more")

// claimAndHang enqueues items of which nobody is told, claims them, and never acknowledges them. Each is claimed at once: whoever waits may look for
// reasons of its own, such as a claim before that found nothing.
func claimAndHang(orders string) error {
	var o order
	if err := json.Unmarshal([]byte(orders), &o); err != nil {
		return err
	}
	ctx := context.Background()
	p, err := pgwake.Open(ctx, o.URL, &pgwake.Config{Schema: o.Schema, SkipMigrate: true})
	if err != nil {
		return err
	}
	conn, err := stage{url: o.URL, schema: o.Schema}.connect(ctx)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	if _, err := conn.Exec(ctx, "SET pgwake.notify = off"); err != nil {
		return err
	}
	reports := json.NewEncoder(os.Stdout)
	for i := range o.Items {
		// Apart from each other, so that the leases end apart; but all claims come before the first end.
		if i > 0 {
			if err := pause(ctx, o.LockTimeout/20); err != nil {
				return err
			}
		}
		if _, err := conn.Exec(ctx, "SELECT enqueue_work('measure', $1)", number(o.First+i)); err != nil {
			return err
		}
		item, err := p.FetchWorkItem(ctx, &pgwake.FetchOptions{NoWait: true, LockTimeout: o.LockTimeout})
		if err != nil {
			return err
		}
		n, err := strconv.Atoi(string(item.Input))
		if err != nil {
			return err
		}
		if err := reports.Encode(claimed{N: n, Until: item.LockedUntil}); err != nil {
			return err
		}
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}
