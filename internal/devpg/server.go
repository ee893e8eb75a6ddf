package devpg

// The server that Start returns, whichever way it came by.

import (
	"context"
	"fmt"
	"path/filepath"
	"time"
)

// Server is a PostgreSQL that answered. Its methods are safe for concurrent use;
// those that act on the server run one after another.
type Server struct {
	URL     string // connects as a superuser if the server is owned
	Source  string // where it is from, for people
	Version string // such as "15.18" or "19beta1"

	cluster *cluster // nil if the server was given by its URL
}

// Mode is how a server is shut down, named as pg_ctl names it.
type Mode string

const (
	// Fast ends the sessions, writes everything out, and ends the server.
	Fast Mode = "fast"
	// Immediate ends the server as a crash would: the next start recovers from the
	// write-ahead log. Unlogged tables are empty after it.
	Immediate Mode = "immediate"
)

// restartPatience bounds the attempts to start a server again. After kill -9 of a
// postmaster, its data is in use until its last child has noticed.
const restartPatience = 30 * time.Second

// Major is the major version, such as 15.
func (s *Server) Major() int { return majorOf(s.Version) }

// Owned says whether Start booted the server, so that Stop ends it and the rest
// of the methods work.
func (s *Server) Owned() bool { return s.cluster != nil }

// DataDir is the server's data directory, or "" if the server is not owned.
func (s *Server) DataDir() string {
	if s.cluster == nil {
		return ""
	}
	return filepath.Join(s.cluster.dir, "data")
}

// LogPath is the file that an owned server logs to, which Stop removes; "" if it is not owned.
func (s *Server) LogPath() string {
	if s.cluster == nil {
		return ""
	}
	return s.cluster.logPath()
}

// Port is the port on 127.0.0.1 that an owned server keeps for its life, or 0.
func (s *Server) Port() int {
	if s.cluster == nil {
		return 0
	}
	return s.cluster.port
}

// PostmasterPID is the process to send signals to. It is another one after each
// Restart and Resume, and 0 after Halt and for a server that is not owned.
func (s *Server) PostmasterPID() int {
	if s.cluster == nil {
		return 0
	}
	return int(s.cluster.pid.Load())
}

// Stop ends an owned server and removes its directory. It may be called any
// number of times, and does nothing to a server that was given by its URL. It
// does not wait for a Halt, Resume or Restart that is under way, which fails with
// ErrStopped. If ctx ends first, Stop returns its error, and the server ends all
// the same.
func (s *Server) Stop(ctx context.Context) error {
	if s.cluster == nil {
		return nil
	}
	if err := s.cluster.close(ctx); err != nil {
		return fmt.Errorf("stop the server in %s: %w", s.cluster.dir, err)
	}
	return nil
}

// Halt shuts an owned server down and keeps its data and its port for Resume. It
// is no error if the server has ended already, as after kill -9, or if it is
// stopped by SIGSTOP; then it ends harshly.
func (s *Server) Halt(ctx context.Context, mode Mode) error {
	return s.act(ctx, "halt", func() error { return s.cluster.halt(ctx, mode) })
}

// Resume starts an owned server again after Halt, or after it was killed, and
// returns when it answers. The port is the same.
func (s *Server) Resume(ctx context.Context) error {
	return s.act(ctx, "resume", func() error { return s.cluster.resume(ctx) })
}

// Restart is Halt and then Resume.
func (s *Server) Restart(ctx context.Context, mode Mode) error {
	return s.act(ctx, "restart", func() error {
		if err := s.cluster.halt(ctx, mode); err != nil {
			return err
		}
		return s.cluster.resume(ctx)
	})
}

// act runs an action on an owned server.
func (s *Server) act(ctx context.Context, verb string, action func() error) error {
	if s.cluster == nil {
		return fmt.Errorf("%s the server of %s: %w", verb, s.Source, ErrNotOwned)
	}
	if err := s.cluster.act(ctx, action); err != nil {
		return fmt.Errorf("%s the server in %s: %w", verb, s.cluster.dir, err)
	}
	return nil
}
