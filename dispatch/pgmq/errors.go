package pgmq

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgwake/pgwake"
)

// This file answers: what goes wrong, and what is a receipt?

// failed wraps an error as one of those that an EventStream has.
func failed(op string, err error) error {
	var server *pgconn.PgError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded), !errors.As(err, &server):
	case server.Code == "42501": // insufficient_privilege
		err = fmt.Errorf("%w: %w", pgwake.ErrPermission, err)
	case server.Code == "3F000", server.Code == "42883": // schema, function
		err = fmt.Errorf("%w: Install has not been called, or pgmq is gone: %w", pgwake.ErrConfig, err)
	case notificationsFull(server): // whoever reads on makes room
	case strings.HasPrefix(server.Code, "22"), strings.HasPrefix(server.Code, "54"): // data exceptions; beyond what the server can hold, or nested deeper than its stack
		err = fmt.Errorf("%w: %w", pgwake.ErrInvalid, err)
	}
	return fmt.Errorf("pgmq: %s: %w", op, err)
}

// notificationsFull reports whether the server's queue of notifications is full. The state is that of what is too large, so the function
// that raised it has to tell, or the text, which is in the server's language, where something in between leaves the function out.
func notificationsFull(err *pgconn.PgError) bool {
	return err.Code == "54000" && (err.Routine == "PreCommit_Notify" || err.Routine == "" && strings.Contains(err.Message, "NOTIFY"))
}

// receipt is a read of a message.
type receipt struct {
	queue string
	id    int64
	reads int32
}

// token is the receipt as it is handed out. The queue is last, since its name may be anything.
func (r receipt) token() pgwake.LockToken {
	return pgwake.LockToken(fmt.Sprintf("%d/%d/%s", r.reads, r.id, r.queue))
}

// parse returns the receipt of a token. ok is false for one that no Receive can have made.
func parse(token pgwake.LockToken) (r receipt, ok bool) {
	reads, rest, _ := strings.Cut(string(token), "/")
	id, queue, ok := strings.Cut(rest, "/")
	n, err1 := strconv.ParseInt(reads, 10, 32)
	number, err2 := strconv.ParseInt(id, 10, 64)
	return receipt{queue, number, int32(n)}, ok && err1 == nil && err2 == nil
}

// receipts are those of one queue, as the functions take them.
type receipts struct {
	ids   []int64
	reads []int32
}

// byQueue sorts tokens.
func byQueue(tokens []pgwake.LockToken) map[string]*receipts {
	all := make(map[string]*receipts)
	for _, t := range tokens {
		r, ok := parse(t)
		if !ok {
			continue
		}
		if all[r.queue] == nil {
			all[r.queue] = &receipts{}
		}
		all[r.queue].ids = append(all[r.queue].ids, r.id)
		all[r.queue].reads = append(all[r.queue].reads, r.reads)
	}
	return all
}
