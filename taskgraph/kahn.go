package taskgraph

import "slices"

// This file answers: in which order can steps run, and which can never?
//
// Kahn, "Topological sorting of large networks", Communications of the ACM 5 (1962): what waits for nothing that is left is
// taken away, over and over. What remains is in a cycle, or behind one.

// kahn takes away what waits for nothing.
type kahn struct {
	parents, children [][]int
	unmet             []int // parents that are left
	taken             []bool
	levels            []int // of those that are taken: 0 for a root, and else 1 more than the highest of its parents
}

func newKahn(parents [][]int) *kahn {
	n := len(parents)
	k := &kahn{parents: parents, children: make([][]int, n), unmet: make([]int, n), taken: make([]bool, n), levels: make([]int, n)}
	for i, of := range parents {
		k.unmet[i] = len(of)
		for _, p := range of {
			k.children[p] = append(k.children[p], i)
		}
	}
	for i := range parents {
		if k.unmet[i] == 0 && !k.taken[i] {
			k.take(i)
		}
	}
	return k
}

// take takes a step away, and what waits for nothing any more then.
func (k *kahn) take(i int) {
	k.taken[i] = true
	for queue := []int{i}; len(queue) > 0; queue = queue[1:] {
		at := queue[0]
		for _, c := range k.children[at] {
			k.levels[c] = max(k.levels[c], k.levels[at]+1)
			if k.unmet[c]--; k.unmet[c] == 0 && !k.taken[c] {
				k.taken[c] = true
				queue = append(queue, c)
			}
		}
	}
}

// findCycles returns cycles that share no step, each in the order of its edges: every cycle there is shares a step with one of them.
func findCycles(parents [][]int) [][]int {
	k := newKahn(parents)
	var cycles [][]int
	for i := range parents {
		for !k.taken[i] {
			cycle := k.cycleAbove(i)
			cycles = append(cycles, cycle)
			for _, at := range cycle {
				if !k.taken[at] {
					k.take(at)
				}
			}
		}
	}
	return cycles
}

// cycleAbove returns the cycle that one gets into from i by going from child to parent, and on. Whatever is left has a parent that is.
func (k *kahn) cycleAbove(i int) []int {
	var way []int
	place := map[int]int{}
	for {
		if at, seen := place[i]; seen {
			cycle := way[at:]
			slices.Reverse(cycle)
			return cycle
		}
		place[i] = len(way)
		way = append(way, i)
		next := slices.IndexFunc(k.parents[i], func(p int) bool { return !k.taken[p] })
		i = k.parents[i][next]
	}
}
