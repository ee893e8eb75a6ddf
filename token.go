package pgwake

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgtype"
)

// This file answers: what does a claim leave in the hands of whoever made it?

// LockToken proves a claim. It is made anew for every fetch, is opaque, and may be handed to another
// process. Once its lease has ended, whether or not somebody else took the item, it can do nothing.
type LockToken string

// WorkItem returns what the SQL functions about a claimed work item take, such as ack_work: the id of the item, and the token
// of the claim, a UUID. So a statement of the caller's own can acknowledge it, together with what else it does. A token does not
// say which queue it is of: that is for the caller to know. ErrLockLost for one that no fetch can have made.
func (t LockToken) WorkItem() (id int64, token string, err error) {
	l, err := t.splitWork()
	if err != nil {
		return 0, "", err
	}
	return l.item, l.claim.String(), nil
}

// Turn returns what the SQL functions about a turn take, such as ack_orchestration: the id of the instance, and the token of the
// claim, a UUID. For the rest it is as WorkItem.
func (t LockToken) Turn() (instance, token string, err error) {
	claim, instance, err := t.split()
	if err != nil {
		return "", "", err
	}
	return instance, claim.String(), nil
}

// newClaim returns the id of one claim. The client makes it, so that it can undo a claim whose answer was lost.
func newClaim() pgtype.UUID {
	id := pgtype.UUID{Valid: true}
	_, _ = rand.Read(id.Bytes[:]) // never fails
	return id
}

// lockToken joins the claim's id and what was claimed, so that a verb finds the row by its primary key.
func lockToken(claim pgtype.UUID, subject string) LockToken {
	return LockToken(claim.String() + "/" + subject)
}

// tokenMaker makes the tokens of the items of one claim.
type tokenMaker []byte

func newTokenMaker(claim pgtype.UUID) tokenMaker {
	return append(append(make(tokenMaker, 0, 64), claim.String()...), '/')
}

// of returns lockToken of an item.
func (m tokenMaker) of(item int64) LockToken { return LockToken(strconv.AppendInt(m, item, 10)) }

// split takes a token apart. One that no fetch can have made is a lost lock.
func (t LockToken) split() (claim pgtype.UUID, subject string, err error) {
	id, subject, _ := strings.Cut(string(t), "/")
	if scanClaim(&claim, id) != nil || checkText("", subject, true) != nil {
		return claim, "", fmt.Errorf("%w: lock token %s", ErrLockLost, quote(string(t)))
	}
	return claim, subject, nil
}

// scanClaim is claim.Scan, without what that allocates.
func scanClaim(claim *pgtype.UUID, id string) error {
	if len(id) != 36 {
		return claim.Scan(id)
	}
	at := 0
	for _, part := range [...]string{id[:8], id[9:13], id[14:18], id[19:23], id[24:]} {
		n, err := hex.Decode(claim.Bytes[at:], []byte(part))
		if err != nil {
			return err
		}
		at += n
	}
	claim.Valid = true
	return nil
}

// splitWork takes the token of a work item apart.
func (t LockToken) splitWork() (l lease, err error) {
	claim, subject, err := t.split()
	if err != nil {
		return l, err
	}
	item, err := strconv.ParseInt(subject, 10, 64)
	if err != nil {
		return l, fmt.Errorf("%w: lock token %s", ErrLockLost, quote(string(t)))
	}
	return lease{item, claim}, nil
}

// lease is what the token of a work item stands for.
type lease struct {
	item  int64
	claim pgtype.UUID
}
