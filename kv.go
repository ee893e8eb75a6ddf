package pgwake

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// This file answers: which key-value pairs does an instance keep?
//
// The writes of the current execution are kept apart until it ends: clients read them at once, while turns see what
// the executions before left, so that a replay of the history meets the values that the first run met.

// KVOp is a kind of KVUpdate.
type KVOp int

const (
	// KVSet gives a key a value.
	KVSet KVOp = iota
	// KVClear removes a key; one that is not there is fine.
	KVClear
	// KVClearAll removes all keys.
	KVClearAll
)

// String returns what the SQL function apply_kv calls it.
func (o KVOp) String() string {
	switch o {
	case KVSet:
		return "set"
	case KVClear:
		return "clear"
	case KVClearAll:
		return "clear_all"
	}
	return fmt.Sprintf("KVOp(%d)", int(o))
}

// KVUpdate is a change that a turn makes to the key-value pairs of its instance, which together are bounded by MaxKVBytes: an ack that sets some and
// would leave more is refused with ErrInvalid.
type KVUpdate struct {
	Op    KVOp   // defaults to KVSet
	Key   string // at most 255 bytes; required, but empty for KVClearAll
	Value string // for KVSet: any text of at most Config.MaxPayload bytes, the empty one included
}

// GetKV returns the value of a key of an instance, as the latest acknowledged turn left it. found is false, without an
// error, if there is no such key, and for an unknown instance.
func (p *Provider) GetKV(ctx context.Context, instance, key string) (v string, found bool, err error) {
	err = p.do(ctx, "get key-value pair", func(ctx context.Context, q querier) error {
		if err := checkText("instance id", instance, true); err != nil {
			return err
		}
		if err := checkText("key", key, true); err != nil {
			return err
		}
		var text *string
		err := q.QueryRow(ctx, p.sql.getKV, instance, key).Scan(&text)
		v, found = value(text), text != nil
		return err
	})
	return v, found, err
}

// ListKV returns all key-value pairs of an instance, as the latest acknowledged turn left them; none for an unknown
// instance.
func (p *Provider) ListKV(ctx context.Context, instance string) (pairs map[string]string, err error) {
	err = p.do(ctx, "list key-value pairs", func(ctx context.Context, q querier) error {
		if err := checkText("instance id", instance, true); err != nil {
			return err
		}
		rows, err := q.Query(ctx, p.sql.listKV, instance)
		if err != nil {
			return err
		}
		all := make(map[string]string)
		var k, v string
		_, err = pgx.ForEachRow(rows, []any{&k, &v}, func() error {
			all[k] = v
			return nil
		})
		if err == nil {
			pairs = all
		}
		return err
	})
	return pairs, err
}

// kvColumns are updates as the arrays that apply_kv takes.
type kvColumns struct{ ops, keys, values []string }

func (c *kvColumns) args() []any { return []any{c.ops, c.keys, c.values} }

func (p *Provider) kvColumns(updates []KVUpdate) (*kvColumns, error) {
	c := &kvColumns{}
	for i := range updates {
		u := &updates[i]
		if err := p.checkKV(u); err != nil {
			return nil, at(i, len(updates), err)
		}
		c.ops = append(c.ops, u.Op.String())
		c.keys = append(c.keys, u.Key)
		c.values = append(c.values, u.Value)
	}
	if bytes := kvBytes(updates); bytes > MaxKVBytes { // with what there is, apply_kv knows
		return nil, invalid("the key-value pairs come to %d bytes, more than %d", bytes, MaxKVBytes)
	}
	return c, nil
}

// kvBytes is what MaxKVBytes bounds, of the pairs that these updates leave.
func kvBytes(updates []KVUpdate) (sum int) {
	left := make(map[string]int)
	for _, u := range updates {
		switch u.Op {
		case KVSet:
			left[u.Key] = len(u.Key) + len(u.Value) + 2
		case KVClear:
			delete(left, u.Key)
		case KVClearAll:
			clear(left)
		}
	}
	for _, bytes := range left {
		sum += bytes
	}
	return sum
}

func (p *Provider) checkKV(u *KVUpdate) error {
	switch {
	case u.Op < KVSet || u.Op > KVClearAll:
		return invalid("key-value operation %d is unknown", int(u.Op))
	case u.Op == KVClearAll && u.Key != "":
		return invalid("key %s is given to clear all", quote(u.Key))
	case u.Op != KVSet && u.Value != "":
		return invalid("a value is given to clear key %s", quote(u.Key))
	}
	if err := checkText("key", u.Key, u.Op != KVClearAll); err != nil {
		return err
	}
	return p.cfg.checkValue("value of key "+quote(u.Key), u.Value)
}
