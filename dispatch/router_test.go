package dispatch

import (
	"testing"

	"github.com/pgwake/pgwake"
	"github.com/stretchr/testify/require"
)

// This file answers: who gets an item for which there is a rule, or none?

func TestRouter_NobodyIsForIt_HasNoHandler(t *testing.T) {
	h, err := Router([]Route{{Namespace: "a", MinPriority: 3, Handler: noHandler}}, nil)
	require.NoError(t, err)
	_, err = h(t.Context(), &pgwake.ClaimedWorkItem{Namespace: "b"})
	require.ErrorIs(t, err, ErrNoHandler)
}

func TestRouter_BadRules_AreRefused(t *testing.T) {
	for _, r := range []Route{{Namespace: "[", Handler: noHandler}, {Namespace: "a"}, {MinPriority: 10, Handler: noHandler}, {MinPriority: -1, Handler: noHandler}} {
		_, err := Router([]Route{{Handler: noHandler}, r}, nil)
		require.ErrorIs(t, err, pgwake.ErrConfig)
		require.ErrorContains(t, err, "Route 1")
	}
}

func TestHandleOthers_TwoOrNone_IsAnError(t *testing.T) {
	d := New(newFake(), nil)
	d.HandleOthers(noHandler)
	require.NoError(t, d.err)
	d.HandleOthers(noHandler)
	require.ErrorIs(t, d.Run(t.Context()), pgwake.ErrConfig)
	d = New(newFake(), nil)
	d.HandleOthers(nil)
	require.ErrorIs(t, d.Run(t.Context()), pgwake.ErrConfig)
}
