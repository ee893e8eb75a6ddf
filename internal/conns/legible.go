package conns

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// This file answers: does a session write instants and text as the driver reads them?
//
// The driver reads instants that come as text, in the modes exec and simple_protocol, in the style ISO alone, and text as UTF-8 whatever it is. A role, a
// database or the server may have other settings, which every session says when it begins.

// What a session says of itself.
const (
	dateStyle      = "DateStyle"
	clientEncoding = "client_encoding"
	serverEncoding = "server_encoding"
)

const (
	utf8     = "UTF8"
	anything = "SQL_ASCII" // bytes, which nobody converts
)

// settingTime bounds the statement that sets them: a pool gives no bound, and a pooler all of whose sessions are busy does not answer.
const settingTime = 25 * time.Second

// Legible has a session whose statements go in that mode write as the driver reads. It sends nothing where that is so already, nor for a setting that is among spared (see Named).
//
// It comes when the session is there, and not in the startup packet: there a style would bring the server's order of day and month, and take the
// role's away from whoever reads dates on the same connection.
func Legible(ctx context.Context, conn *pgconn.PgConn, mode pgx.QueryExecMode, spared ...string) error {
	var statements []string
	if !iso(conn) && !slices.Contains(spared, dateStyle) {
		statements = append(statements, "SET datestyle = 'ISO'")
	}
	if !inUTF8(conn, mode) && !slices.Contains(spared, clientEncoding) {
		statements = append(statements, "SET client_encoding = 'UTF8'")
	}
	if len(statements) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, settingTime)
	defer cancel()
	if err := conn.Exec(ctx, strings.Join(statements, "; ")).Close(); err != nil {
		return fmt.Errorf("have the session write what can be read (%s): %w", strings.Join(statements, "; "), err)
	}
	return nil
}

// Named are those settings that a configuration has a session begin with.
func Named(config *pgconn.Config) (names []string) {
	options := strings.ToLower(config.RuntimeParams["options"])
	for _, name := range []string{dateStyle, clientEncoding} {
		if strings.Contains(options, strings.ToLower(name)) || slices.ContainsFunc(slices.Collect(maps.Keys(config.RuntimeParams)), func(set string) bool {
			return strings.EqualFold(set, name)
		}) {
			names = append(names, name)
		}
	}
	return names
}

// Illegible says what the driver cannot read of a session whose statements go in that mode; nothing if it can read all.
func Illegible(conn *pgconn.PgConn, mode pgx.QueryExecMode) string {
	switch asText := mode == pgx.QueryExecModeExec || mode == pgx.QueryExecModeSimpleProtocol; {
	case !inUTF8(conn, mode):
		return fmt.Sprintf("client_encoding is %s, and what is sent and read is UTF8", conn.ParameterStatus(clientEncoding))
	case asText && !iso(conn):
		return fmt.Sprintf("DateStyle is %q, and in mode %s instants are read as ISO alone", conn.ParameterStatus(dateStyle), mode)
	}
	return ""
}

// iso reports whether instants come as ISO, or it is not said how they do.
func iso(conn *pgconn.PgConn) bool {
	style := conn.ParameterStatus(dateStyle)
	return style == "" || strings.HasPrefix(style, "ISO")
}

// inUTF8 reports whether text comes in UTF-8, or as what was sent: a database of SQL_ASCII holds what nobody has looked at, and a session that
// insists on UTF-8 could not have it back. In mode simple_protocol the driver insists.
func inUTF8(conn *pgconn.PgConn, mode pgx.QueryExecMode) bool {
	client, server := conn.ParameterStatus(clientEncoding), conn.ParameterStatus(serverEncoding)
	return client == "" || client == utf8 || mode != pgx.QueryExecModeSimpleProtocol && (server == anything || client == anything && server == utf8)
}
