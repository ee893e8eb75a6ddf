package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// This file answers: is the schema what this version of pgwake works with, and may the role work with it?

func checkSchema(ctx context.Context, at *patient) finding {
	s, err := stateOf(ctx, at.conn, at.schema, layers[0])
	if err != nil {
		return unknown(err)
	}
	switch s.State {
	case "missing":
		return fail(at.pgwake("migrate up")+", or --schema with the name of the one that is", "schema %s is not there, or has nothing of pgwake", at.schema)
	case "behind":
		return fail(at.pgwake("migrate up"), "it is at version %d of %d", s.Version, s.Latest)
	case "foreign":
		return fail("--schema with another name; what it holds has to be moved by hand", "%s", s.Error)
	case "newer":
		return ok("version %d; this program knows %d", s.Version, s.Latest)
	}
	return ok("version %d", s.Version)
}

func checkLayers(ctx context.Context, at *patient) finding {
	var there, wrong, behind []string
	for _, l := range layers[1:] {
		s, err := stateOf(ctx, at.conn, at.schema, l)
		if err != nil {
			return unknown(err)
		}
		switch s.State {
		case "missing":
			there = append(there, "no "+l.name)
		case "foreign":
			wrong = append(wrong, s.Error)
		case "behind":
			wrong = append(wrong, fmt.Sprintf("%s is at version %d of %d", l.name, s.Version, s.Latest))
			behind = append(behind, l.name)
		default:
			there = append(there, fmt.Sprintf("%s version %d", l.name, s.Version))
		}
	}
	if len(wrong) > 0 {
		fix := "--schema with another name; what it holds has to be moved by hand"
		if len(behind) > 0 {
			fix = at.pgwake("migrate up --layer " + strings.Join(behind, ","))
		}
		return fail(fix, "%s", strings.Join(wrong, "; "))
	}
	return ok("%s", strings.Join(there, ", "))
}

func checkRights(ctx context.Context, at *patient) finding {
	if at.missing(ctx) {
		return skip("see schema")
	}
	var role string
	var reads bool
	var unread []string
	if err := at.conn.QueryRow(ctx, query("reader"), at.schema).Scan(&role, &reads, &unread); err != nil {
		return unknown(err)
	}
	if reads {
		return readerRights(role, unread)
	}
	rows, err := at.conn.Query(ctx, query("rights"), at.schema)
	if err != nil {
		return unknown(err)
	}
	var lacks, grants []string
	var right, grant string
	var of []string
	_, err = pgx.ForEachRow(rows, []any{&right, &of, &grant}, func() error {
		lacks = append(lacks, right+" "+few(of))
		if len(grants) == 0 || grants[len(grants)-1] != grant {
			grants = append(grants, grant)
		}
		return nil
	})
	if err != nil {
		return unknown(err)
	}
	if len(lacks) > 0 {
		return fail(strings.Join(grants, " "), "role %s lacks %s", role, strings.Join(lacks, ", "))
	}
	return ok("role %s may do all that a node does", role)
}

// readerRights is the finding for a role that changes nothing, which is what some are for.
func readerRights(role string, unread []string) finding {
	if len(unread) > 0 {
		return fail("the grants of docs/security.md for a reader", "role %s reads, and lacks EXECUTE on functions %s", role, few(unread))
	}
	return ok("role %s reads, and changes nothing; what a node's role lacks is seen as that role", role)
}

// missing says that the schema has nothing to look at.
func (at *patient) missing(ctx context.Context) bool {
	var there bool
	err := at.conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)`, at.schema).Scan(&there)
	return err == nil && !there
}

// few are the first of many names.
func few(names []string) string {
	const most = 3
	if len(names) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}
