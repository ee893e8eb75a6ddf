package model

// This file answers: how are many millions of states kept?
//
// Each is a few words in a list, which is at once the queue of the breadth-first search; a table of their numbers,
// with open addressing, finds them again. Beside a number it has 32 bits of the state's hash, so that hardly any state is
// looked at in vain. Nothing is approximated: equal means equal in every bit.

import "math/bits"

const chunk = 1 << 12 // states

type space struct {
	words   int
	count   int
	states  [][]uint64
	parents [][]uint32
	table   []uint64 // 32 bits of the hash, which say where it belongs, and the number + 1; 0: free
}

func newSpace(words int) *space {
	return &space{words: words, table: make([]uint64, 1<<10)}
}

func (s *space) len() int { return s.count }

func (s *space) at(i int) (e encoded) {
	copy(e[:], s.states[i/chunk][i%chunk*s.words:][:s.words])
	return e
}

func (s *space) parent(i int) int { return int(s.parents[i/chunk][i%chunk]) }

// add keeps the state unless it is known, and returns its number.
func (s *space) add(e encoded, parent int) int {
	slot, print, number := s.slot(&e)
	if number >= 0 {
		return number
	}
	if s.count%chunk == 0 {
		s.states = append(s.states, make([]uint64, 0, chunk*s.words))
		s.parents = append(s.parents, make([]uint32, 0, chunk))
	}
	last := len(s.states) - 1
	s.states[last] = append(s.states[last], e[:s.words]...)
	s.parents[last] = append(s.parents[last], uint32(parent))
	s.count++
	s.table[slot] = print | uint64(s.count)
	if s.count*4 > len(s.table)*3 {
		s.grow()
	}
	return s.count - 1
}

// find returns the number of a state; negative: it is not known.
func (s *space) find(e encoded) int {
	_, _, number := s.slot(&e)
	return number
}

// slot returns where the state belongs, the part of its hash that is kept there, and its number if it is known.
func (s *space) slot(e *encoded) (slot int, print uint64, number int) {
	const bits32 = 1<<32 - 1
	print = e.hash(s.words) &^ bits32
	mask := len(s.table) - 1
	for slot = int(print>>32) & mask; s.table[slot] != 0; slot = (slot + 1) & mask {
		if s.table[slot]&^bits32 != print {
			continue
		}
		number = int(s.table[slot]&bits32) - 1
		stored := s.states[number/chunk][number%chunk*s.words:][:s.words]
		same := true
		for w, v := range stored {
			same = same && e[w] == v
		}
		if same {
			return slot, print, number
		}
	}
	return slot, print, -1
}

func (s *space) grow() {
	old := s.table
	s.table = make([]uint64, 2*len(old))
	mask := len(s.table) - 1
	for _, v := range old {
		if v == 0 {
			continue
		}
		slot := int(v>>32) & mask
		for s.table[slot] != 0 {
			slot = (slot + 1) & mask
		}
		s.table[slot] = v
	}
}

// hash folds the words together as wyhash does: a product of 128 bits, its halves added without carry. A sketch relies
// on all of its bits.
func (e *encoded) hash(words int) uint64 {
	h := uint64(0x2D358DCCAA6C78A5)
	for _, v := range e[:words] {
		high, low := bits.Mul64(h^v, 0x9E3779B97F4A7C15^v>>32)
		h = high ^ low ^ v
	}
	high, low := bits.Mul64(h^0x8BB84B93962EACC9, 0x4B33A62ED433D4A3)
	return high ^ low
}

// sketch keeps of each state only where it belongs in a table and 32 bits of its hash, and the states themselves of two
// levels of the search: an eighth of the memory, and no way back for a trace. Two states that agree in those 32 bits, and
// meet in the table, are taken for one, and what follows from the other goes unseen. With n states in a table that is at
// most six sevenths full, fewer than n/2^29 are to be expected to be lost.
type sketch struct {
	words int
	count int
	table []uint32 // 0: free
	next  []uint64 // states of the next level
}

func newSketch(words, slots int) *sketch { return &sketch{words: words, table: make([]uint32, slots)} }

// add keeps the state unless it, or its double, is known.
func (s *sketch) add(e encoded) {
	h := e.hash(s.words)
	print := uint32(h>>32) | 1
	mask := uint64(len(s.table) - 1)
	slot := (h ^ h>>17) & mask
	for ; s.table[slot] != 0; slot = (slot + 1) & mask {
		if s.table[slot] == print {
			return
		}
	}
	s.table[slot] = print
	s.next = append(s.next, e[:s.words]...)
	s.count++
}

func (s *sketch) full() bool { return s.count > len(s.table)/7*6 }
