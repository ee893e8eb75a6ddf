package devpg

// Candidates tells tests whether there is anything to boot.
var Candidates = candidates

// WatchdogPID is for tests that attack the watchdog itself.
func WatchdogPID(s *Server) int { return s.cluster.cmd.Process.Pid }
