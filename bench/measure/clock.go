package measure

import (
	"context"
	"math"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file answers: what did the server's clock show when this process saw something?

// serverClock converts instants of this process to server time, by two comparisons of the clocks, one before
// and one after what is measured, with a straight line between them. Only differences of our monotonic clock
// enter, so that setting our clock does no harm.
type serverClock struct {
	url           string
	base          time.Time // our instants are counted from here
	before, after comparison
}

// comparison of the clocks.
type comparison struct {
	at     time.Duration // when, since base
	offset time.Duration // server's reading, since base, minus ours
	err    time.Duration // by how much that may be wrong
}

// comparisonTrips is how many round trips a comparison makes. Each shows that the server read its clock
// between our sending and our receiving; the bounds of all together are as narrow as the fastest trip.
const comparisonTrips = 200

func newServerClock(ctx context.Context, url string) (*serverClock, error) {
	c := &serverClock{url: url, base: time.Now()}
	var err error
	c.before, err = c.compare(ctx)
	c.after = c.before
	return c, err
}

// finish makes the second comparison.
func (c *serverClock) finish(ctx context.Context) (err error) {
	c.after, err = c.compare(ctx)
	return err
}

func (c *serverClock) compare(ctx context.Context) (comparison, error) {
	low, high := time.Duration(math.MinInt64), time.Duration(math.MaxInt64)
	err := withConn(ctx, c.url, func(conn *pgx.Conn) error {
		for range comparisonTrips {
			var server time.Time
			sent := time.Since(c.base)
			if err := conn.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&server); err != nil {
				return err
			}
			received := time.Since(c.base)
			reading := server.Sub(c.base)
			low, high = max(low, reading-received), min(high, reading-sent)
		}
		return nil
	})
	return comparison{time.Since(c.base), (low + high) / 2, (high - low).Abs() / 2}, err
}

// server returns what the server's clock showed at one of our instants.
func (c *serverClock) server(at time.Time) time.Time {
	since := at.Sub(c.base)
	offset := c.before.offset
	if span := c.after.at - c.before.at; span > 0 {
		offset += time.Duration(float64(c.after.offset-c.before.offset) * float64(since-c.before.at) / float64(span))
	}
	return c.base.Round(0).Add(since + offset)
}

// uncertainty is by how much server may be wrong.
func (c *serverClock) uncertainty() time.Duration {
	return max(c.before.err, c.after.err) + (c.after.offset-c.before.offset).Abs()/2
}
