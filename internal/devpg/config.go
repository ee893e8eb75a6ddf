package devpg

// What a booted server is set to, and the environment that it runs in.

import (
	"context"
	"maps"
	"os"
	"slices"
	"strings"
	"unicode"
)

// settings are the lines that are added to postgresql.conf. There, rather than
// on the command line, a test may still change them with ALTER SYSTEM.
func settings(ctx context.Context, o *Options, bin *binaries) string {
	set := map[string]string{
		"listen_addresses":          "127.0.0.1",
		"max_connections":           "200",
		"max_prepared_transactions": "10",
		"fsync":                     onOff(o.Fsync),
		"full_page_writes":          onOff(o.Fsync),
		"synchronous_commit":        "on",
		"timezone":                  "UTC",
		"log_timezone":              "UTC",
	}
	var preload []string
	// Tests count statements with it. Many packages come without it.
	if bin.hasLibrary(ctx, "pg_stat_statements") {
		preload = append(preload, "pg_stat_statements")
	}
	if !o.Fsync {
		preload = append(preload, "plpgsql") // see shortSessions
	}
	set["shared_preload_libraries"] = strings.Join(preload, ",")
	for name, value := range o.Settings {
		set[strings.ToLower(name)] = value
	}
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(set)) {
		b.WriteString(name + " = '" + settingEscapes.Replace(set[name]) + "'\n")
	}
	return b.String()
}

// settingEscapes are those of a string in postgresql.conf.
var settingEscapes = strings.NewReplacer(`\`, `\\`, `'`, `''`)

func containsControl(s string) bool { return strings.ContainsFunc(s, unicode.IsControl) }

// Durability says, for people, what a server is good for that was booted with or without fsync.
func Durability(fsync bool) string {
	if fsync {
		return "fsync on"
	}
	return "fsync off, which is enough for tests"
}

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

// shortSessions are the settings of glibc's allocator for a server of tests. It begins thousands of sessions, none of which lasts, so
// they cost more than what they do: first of all page faults, half of which these save by memory in large pages that is not given back.
// Together with a plpgsql that no session has to load they take a fifth off the server's processor time. Other C libraries do not read
// them. A server with fsync, which is measured, has what a server in production has.
const shortSessions = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.top_pad=4194304:" +
	"glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=67108864"

// serverEnv is all that the server inherits: PGDATA, PGPORT and the like are meant
// for others, and messages in the user's language would be read by nobody here.
// With TZ set, initdb does not search for the name of the machine's time zone.
func serverEnv() []string {
	return []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "TZ=UTC"}
}
