package model

// This file answers: what depends on what, and how far apart are they?

// Levels are the levels of the steps: 0 without parents, or else one more than the highest of a parent; -1 on a cycle, or
// behind one.
func (t Task) Levels() []int {
	levels := make([]int, len(t.Steps))
	for i := range levels {
		levels[i] = -1
	}
	for changed := true; changed; {
		changed = false
		for i, s := range t.Steps {
			if levels[i] >= 0 {
				continue
			}
			level, known := 0, true
			for _, p := range s.Parents {
				known = known && levels[p.Step] >= 0
				level = max(level, levels[p.Step]+1)
			}
			if known {
				levels[i], changed = level, true
			}
		}
	}
	return levels
}

// Ancestors are the steps that a step depends on, each with its distance: how many dependencies there are on the shortest
// way. A step on a cycle is none of its own.
func (t Task) Ancestors(step int) map[int]int {
	distances := map[int]int{step: 0}
	layer := []int{step}
	for distance := 1; len(layer) > 0; distance++ {
		var next []int
		for _, i := range layer {
			for _, p := range t.Steps[i].Parents {
				if _, seen := distances[p.Step]; !seen {
					distances[p.Step] = distance
					next = append(next, p.Step)
				}
			}
		}
		layer = next
	}
	delete(distances, step)
	return distances
}

// ClosesCycle reports whether there would be a cycle if one step, to, depended on another.
func (t Task) ClosesCycle(from, to int) bool {
	_, above := t.Ancestors(from)[to]
	return from == to || above
}
