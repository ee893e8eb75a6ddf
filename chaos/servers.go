package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake/internal/devpg"
)

// This file answers: what is special about the servers of a run?
//
// They are booted by scripts in place of initdb and postgres. These have the data be on a small file system, which can be
// filled; have the clock be wrong; and make a standby by pg_basebackup. What a machine does not have for that is left out.

// premises is where the servers of a run live.
type premises struct {
	dir   string
	bin   string // of PostgreSQL's own programs; "": there are no scripts
	clock string // what postgres is started with so that its clock is wrong
	store string // the small file system; "" if there is none
	made  int    // directories of scripts
}

// storeSize is room for two servers in a run, and not for much more.
const storeSize = 768 << 20

var serverSettings = map[string]string{"log_lock_waits": "on", "max_wal_size": "64MB", "min_wal_size": "32MB"}

// newPremises looks what this machine has.
func newPremises() (p *premises, err error) {
	p = &premises{bin: os.Getenv(devpg.EnvBinDir)}
	if found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/postgres"); p.bin == "" && len(found) > 0 {
		p.bin = filepath.Dir(found[len(found)-1])
	}
	if p.dir, err = os.MkdirTemp("", "pgwake-chaos-servers-"); err != nil {
		return nil, err
	}
	return p, os.Chmod(p.dir, 0o755) // the server may run as another user
}

// mount makes the small file system, which takes root.
func (p *premises) mount() error {
	store := filepath.Join(p.dir, "store")
	if err := os.Mkdir(store, 0o755); err != nil {
		return err
	}
	said, err := exec.Command("mount", "-t", "tmpfs", "-o", fmt.Sprintf("size=%d,mode=1777", storeSize), "pgwake-chaos", store).CombinedOutput()
	if err != nil {
		return fmt.Errorf("mount a small file system: %w: %s", err, said)
	}
	p.store = store
	return nil
}

// setClock has the clocks of the servers be ahead by so much.
func (p *premises) setClock(ahead time.Duration) error {
	library, _ := filepath.Glob("/usr/lib/*/faketime/libfaketime.so.1")
	if len(library) == 0 {
		return errors.New("there is no libfaketime")
	}
	p.clock = fmt.Sprintf("LD_PRELOAD=%s FAKETIME=%+d FAKETIME_DONT_FAKE_MONOTONIC=1 FAKETIME_DISABLE_SHM=1 NO_FAKE_STAT=1 ",
		library[0], int(ahead.Seconds()))
	return nil
}

// programs writes the scripts. What they make is an empty server, or a standby of the server at that URL.
func (p *premises) programs(primary string) (dir string, err error) {
	p.made++
	dir = filepath.Join(p.dir, fmt.Sprint("bin", p.made))
	place := ""
	if p.store != "" {
		data := filepath.Join(p.store, fmt.Sprint(p.made))
		place = fmt.Sprintf("mkdir -m 700 %s && ln -s %s \"$2\" || exit 1\n", data, data)
	}
	makes := p.bin + `/initdb "$@"`
	if primary != "" {
		makes = fmt.Sprintf(`%s/pg_basebackup -D "$2" -d '%s' -R -X stream -c fast --no-sync`, p.bin, primary)
	}
	scripts := map[string]string{
		"initdb":   fmt.Sprintf("#!/bin/sh\n[ \"$1\" = -D ] || exec %s/initdb \"$@\"\n%sexec %s\n", p.bin, place, makes),
		"postgres": fmt.Sprintf("#!/bin/sh\n%sexec %s/postgres \"$@\"\n", p.clock, p.bin),
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", err
	}
	for name, script := range scripts {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755); err != nil {
			return "", err
		}
	}
	return dir, nil
}

// boot starts a server, or a standby.
func (p *premises) boot(ctx context.Context, primary string) (_ *devpg.Server, err error) {
	o := &devpg.Options{IgnoreURL: true, Settings: serverSettings}
	if p.bin != "" {
		if o.BinDir, err = p.programs(primary); err != nil {
			return nil, err
		}
	}
	return devpg.Start(ctx, o)
}

// remove is for when no server runs.
func (p *premises) remove() error {
	if p.store != "" {
		if said, err := exec.Command("umount", p.store).CombinedOutput(); err != nil {
			return fmt.Errorf("umount %s: %w: %s", p.store, err, said)
		}
	}
	return os.RemoveAll(p.dir)
}

// bootServer prepares the premises and starts the first server on them.
func (c *chaos) bootServer(ctx context.Context) (err error) {
	if c.premises, err = newPremises(); err != nil {
		return err
	}
	if err := c.mount(); err != nil {
		c.log("%s: %v: %v", diskFull, errLeftOut, err)
	}
	if c.ahead != 0 {
		if c.bin == "" {
			err = errors.New("there are no server programs in the usual places")
		} else {
			err = c.setClock(c.ahead)
		}
		if err != nil {
			c.log("the server's clock: %v: %v", errLeftOut, err)
			c.ahead = 0
		}
	}
	c.server, err = c.boot(ctx, "")
	return err
}

// endServer keeps the log of a server and ends it.
func (c *chaos) endServer(ctx context.Context) error {
	if c.server == nil {
		return nil
	}
	stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	return errors.Join(c.keepServerLog(), c.server.Stop(stopping))
}

// The kinds that take what not every machine has.
const (
	diskFull = "disk full"
	failover = "failover"
)

// fillDisk leaves no room for the server: what is to be written to tables fails, and when the log cannot be written the
// server ends, and begins again and again until there is room.
func (c *chaos) fillDisk(ctx context.Context, _ fault, _ *node) (func() error, error) {
	if c.store == "" {
		return nil, errLeftOut
	}
	began := time.Now()
	path := filepath.Join(c.store, "fill")
	full, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	for size := 1 << 20; size > 0; { // down to the last byte
		if _, err := full.Write(make([]byte, size)); err != nil {
			size /= 2
		}
	}
	full.Close()
	// Segments of the log that are there already are enough for a while.
	_ = c.ask(ctx, func(ctx context.Context, conn *pgx.Conn) (err error) {
		for range 2 + 64/16 {
			if _, err = conn.Exec(ctx, `SELECT pg_switch_wal(), pg_logical_emit_message(false, 'chaos', '')`); err != nil {
				c.log("the server says: %v", err)
				return err
			}
		}
		return nil
	})
	return func() error {
		if err := os.Remove(path); err != nil {
			return err
		}
		err := c.revive(ctx)
		c.crashed(began)
		return err
	}, nil
}

// revive waits until the server answers. One that gave up is started again.
func (c *chaos) revive(ctx context.Context) error {
	for patience := time.Now().Add(2 * time.Second); time.Now().Before(patience); {
		if c.ask(ctx, func(ctx context.Context, conn *pgx.Conn) error { return conn.Ping(ctx) }) == nil {
			return nil
		}
		nap(ctx, 20*time.Millisecond)
	}
	c.log("the server had given up; it is started again")
	return c.server.Resume(ctx)
}

// failOver has a standby take the place of the server, which is gone at once and for good. Replication is synchronous before
// that, but if an asynchronous one is planted, which loses what was acknowledged.
func (c *chaos) failOver(ctx context.Context, f fault, _ *node) (func() error, error) {
	if _, err := os.Stat(filepath.Join(c.bin, "pg_basebackup")); c.bin == "" || err != nil {
		return nil, errLeftOut
	}
	standby, err := c.boot(ctx, c.server.URL)
	if err != nil {
		return nil, err
	}
	err = c.replicate(ctx, standby)
	nap(ctx, time.Second) // under way while replication is synchronous
	var mark int64
	if err == nil {
		mark, err = c.mark(ctx)
	}
	began := time.Now()
	if err == nil {
		err = c.server.Halt(ctx, devpg.Immediate)
	}
	if err == nil {
		err = errors.Join(c.readServerLog(), c.endServer(ctx))
	}
	if err != nil {
		return nil, errors.Join(err, standby.Stop(context.WithoutCancel(ctx)))
	}
	c.server = standby
	if f.Size == 1 { // until it is promoted, processes find a server that only reads, and otherwise nobody
		err = c.lead()
	}
	return func() error {
		err := c.ask(ctx, func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `SELECT pg_promote()`)
			return err
		})
		switch {
		case f.Size != 1: // nobody has written anything yet
			err = errors.Join(err, c.checkUnlogged(ctx, math.MaxInt64), c.lead())
		case !c.planted(plantAsync): // which knows nothing of the mark
			err = errors.Join(err, c.checkUnlogged(ctx, mark))
		}
		c.crashed(began)
		return err
	}, err
}

// mark returns the id of a transaction that is on the disk, and with a synchronous standby: whatever the server writes when it is back, or
// the standby when it is promoted, has a higher one.
func (c *chaos) mark(ctx context.Context) (xid int64, err error) {
	err = c.ask(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		return conn.QueryRow(ctx, `SELECT pg_current_xact_id()::text::bigint FROM pg_logical_emit_message(true, 'chaos', '')`).Scan(&xid)
	})
	return xid, err
}

// checkUnlogged complains about rows of unlogged tables that transactions up to that one have written. After a crash, and after a
// failover, there are none.
func (c *chaos) checkUnlogged(ctx context.Context, mark int64) error {
	return c.ask(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		var schema, table string
		tables := map[string][]string{}
		err := each(ctx, conn, `SELECT n.nspname, c.oid::regclass::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
			WHERE c.relkind = 'r' AND c.relpersistence = 'u'`, []any{&schema, &table}, func() { tables[schema] = append(tables[schema], table) })
		if err != nil {
			return err
		}
		for _, schema := range allSchemas {
			if len(tables[schema]) == 0 {
				c.complain(fmt.Errorf("schema %s has no unlogged tables, of which something could be left", schema))
			}
			for _, table := range tables[schema] {
				var left int
				if err := conn.QueryRow(ctx, `SELECT count(*) FROM `+table+` WHERE xmin::text::bigint <= $1`, mark).Scan(&left); err != nil {
					return err
				}
				if left > 0 {
					c.complain(fmt.Errorf("%d rows of %s, which is unlogged, are from before the server was gone", left, table))
				}
			}
		}
		return nil
	})
}

// replicate waits until commits wait for the standby.
func (c *chaos) replicate(ctx context.Context, standby *devpg.Server) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	until := func(state string) error {
		for {
			var so bool
			err := c.ask(ctx, func(ctx context.Context, conn *pgx.Conn) error {
				return conn.QueryRow(ctx, `SELECT count(*) > 0 FROM pg_stat_replication WHERE `+state).Scan(&so)
			})
			if err != nil || so {
				return err
			}
			if !nap(ctx, 20*time.Millisecond) {
				return fmt.Errorf("the standby did not come to be %s", state)
			}
		}
	}
	tell := func(url string, statements ...string) error {
		conn, err := pgx.Connect(ctx, url)
		if err != nil {
			return err
		}
		defer conn.Close(context.WithoutCancel(ctx))
		for _, s := range append(statements, `SELECT pg_reload_conf()`) {
			if _, err := conn.Exec(ctx, s); err != nil {
				return err
			}
		}
		return nil
	}
	err := until(`state = 'streaming'`)
	if err == nil && c.planted(plantAsync) {
		return tell(standby.URL, `ALTER SYSTEM SET primary_conninfo = ''`)
	}
	if err == nil {
		err = tell(c.server.URL, `ALTER SYSTEM SET synchronous_standby_names = '*'`)
	}
	if err == nil {
		err = until(`sync_state = 'sync'`)
	}
	if err == nil { // whatever is older is there when this is
		err = tell(c.server.URL, `SELECT pg_logical_emit_message(true, 'chaos', '')`)
	}
	return err
}

// lead has all ways go to the server as it is now.
func (c *chaos) lead() (err error) {
	c.net.upstream = fmt.Sprintf("127.0.0.1:%d", c.server.Port())
	for _, n := range c.nodes {
		for _, w := range []*way{n.pool, n.listen} {
			err = errors.Join(err, w.lead(c.net.upstream))
		}
	}
	return err
}
