package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestConditions_ManySeeds_EachIsSo(t *testing.T) {
	ahead, skewed, open := map[time.Duration]bool{}, map[bool]bool{}, map[bool]bool{}
	for seed := range uint64(100) {
		c := options{seed: seed}.conditions()
		assert.Equal(t, c, options{seed: seed, length: time.Hour, nodes: 9}.conditions())
		ahead[c.ahead], skewed[c.skewed], open[c.heldOpen] = true, true, true
	}
	assert.Len(t, ahead, 5)
	assert.True(t, ahead[-7*time.Hour] && ahead[0] && ahead[7*time.Hour])
	assert.Len(t, skewed, 2)
	assert.Len(t, open, 2)
}

func TestSkew_IsOfOneLifeOfAProcess(t *testing.T) {
	wrong := conditions{skewed: true}
	first, next := &order{Role: worker, Seed: 7, Node: 8}, &order{Role: worker, Seed: 7, Node: 8, Generation: 1}
	assert.NotZero(t, wrong.skew(first))
	assert.Equal(t, wrong.skew(first), wrong.skew(first))
	assert.NotEqual(t, wrong.skew(first), wrong.skew(next))
	assert.Zero(t, conditions{}.skew(first))
	assert.Zero(t, wrong.skew(&order{Role: dispatcher, Seed: 7}), "it measures leases on the machine's clock as well")
}

func TestLocal_ServerIsAhead_ItsInstantsAreBroughtBack(t *testing.T) {
	w := &workload{order: order{Ahead: 7 * time.Hour}}
	assert.Equal(t, at(5), w.local(at(5).Add(7*time.Hour)))
	assert.Zero(t, w.local(time.Time{}))
}
