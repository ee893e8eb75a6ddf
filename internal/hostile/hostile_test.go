package hostile

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A test that takes these for good, or for bad, must not be wrong about them.
func TestTexts_AreWhatTheySay(t *testing.T) {
	const most = 64
	seen := map[string]bool{}
	full := 0
	for _, text := range Texts(most) {
		require.False(t, seen[text], "%q is there twice", text)
		seen[text] = true
		require.True(t, utf8.ValidString(text) && !strings.ContainsRune(text, 0) && text != "" && len(text) <= most, "%q", text)
		if len(text) == most {
			full++
		}
	}
	require.Equal(t, 3, full)
	for what, text := range Refused(most) {
		require.True(t, len(text) > most || !utf8.ValidString(text) || strings.ContainsRune(text, 0), what)
		require.NotEqual(t, most, len(text), what)
	}
}

func TestIsLine_WhatBreaksALine_IsNone(t *testing.T) {
	for _, text := range []string{"a\nb", "\x1b[2J", "a\u202e", "\u2066", "\u200f", "\u0085", "\xff"} {
		require.False(t, IsLine(text), "%q", text)
	}
	require.True(t, IsLine(`a "b" é \n`))
}
