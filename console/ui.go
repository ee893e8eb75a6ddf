package console

// This file answers: how does a state look? By a colour, and by a sign and a word as well: nobody has to tell colours apart.

// tone is the colour of a state of whatever it is.
func tone(state any) string {
	switch s := words(state); s {
	case "complete", "Completed", "ok", "live":
		return "good"
	case "error", "Failed", "blocked by failures", "died", "dead":
		return "bad"
	case "waiting for retry", "enqueued as error for orchestration", "waiting for dependencies", "kept back", "paused", "polling", "no answer":
		return "warn"
	case "enqueued", "in progress", "enqueued for orchestration", "leased", "Running", "initializing", "enqueuing steps", "steps in process", "evaluating results", "due":
		return "busy"
	case "resolved manually":
		return "hand"
	case "pending", "delayed", "cancelled", "skipped", "ContinuedAsNew", "Cancelled", "stopped", "on demand", "":
		return "idle"
	}
	return "warn"
}

// glyph is the sign of a tone.
func glyph(tone string) string {
	switch tone {
	case "good":
		return "✓"
	case "bad":
		return "✕"
	case "warn":
		return "!"
	case "busy":
		return "▶"
	case "hand":
		return "✎"
	}
	return "○"
}
