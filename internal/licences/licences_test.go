package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// This file answers: is a licence known for what it is, and does the page say all that is required?

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const mit = "MIT License\n\nPermission is hereby granted, free of charge, to any\n// person obtaining a copy of this"

func TestLicenceIn_KnownTexts_AreFound_AndOthersRefused(t *testing.T) {
	for text, want := range map[string]string{
		mit: "MIT",
		"Redistributions in binary form must\n   * reproduce the above copyright notice":                "BSD-2-Clause",
		"Redistributions in binary form must reproduce the above copyright notice. Neither the name of": "BSD-3-Clause",
		"   Apache License\n   Version 2.0, January 2004\n" + mit:                                       "Apache-2.0 and MIT",
		"Mozilla Public License, version 2.0 … GNU General Public License":                              "MPL-2.0",
		"GNU GENERAL PUBLIC LICENSE Version 3":                                                          "",
		mit + "\n Commons Clause":                                                                       "",
		"All rights reserved.":                                                                          "",
		"":                                                                                              "",
	} {
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, "LICENSE.txt"), []byte(text), 0o644))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "README.md"), []byte(mit), 0o644))
		got, err := licenceIn(dir)
		require.Equal(t, want, got, text)
		require.Equal(t, want == "", err != nil, text)
	}
	_, err := licenceIn(t.TempDir())
	require.Error(t, err, "there is none")
}

func TestWrite_SaysAll_AndMissesWhatIsNotNoted(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	all := []*dependency{
		{path: "a.org/new", version: "v1.0.0", direct: []string{".", "x"}, indirect: []string{"y"}, licence: "MIT", released: now, newest: now},
		{path: "a.org/old/v2", version: "v2.0.0", indirect: []string{"x"}, licence: "ISC", released: now.AddDate(-9, 0, 0), newest: now.AddDate(-3, 0, 0)},
		{path: "a.org/kept", version: "v0.1.0", indirect: []string{"x"}, licence: "ISC", released: now.AddDate(-9, 0, 0), newest: now.AddDate(-1, 0, 0)},
	}
	n, err := parseNotes("# of a\nuse a.org/new tests\n\nold a.org/old/... of new\n")
	require.NoError(t, err)
	text, err := write(all, n, now)
	require.NoError(t, err)
	require.Contains(t, text, "| a.org/new | v1.0.0 | MIT | 2030-01-01 | the library, x | tests |\n")
	require.Contains(t, text, "| a.org/old/v2 | 2027-01-01 | of new |\n")
	require.NoError(t, compare(text, all))
	all[0].version = "v1.1.0"
	require.ErrorContains(t, compare(text, all), "lacks a.org/new@v1.1.0 in the library, x")
	require.ErrorContains(t, compare(text, all[1:]), "has a.org/new@v1.0.0 in y")

	n, err = parseNotes("use a.org/gone tests")
	require.NoError(t, err)
	_, err = write(all, n, now)
	for _, part := range []string{"what is a.org/new used for", "of a.org/old/v2 nothing was released since 2027-01-01", `"use" a.org/gone`} {
		require.ErrorContains(t, err, part)
	}
	require.False(t, strings.Contains(err.Error(), "a.org/kept"), "an old version of what is still released")
	for _, bad := range []string{"use a.org/new", "because a.org/new of", "old a b\nold a c"} {
		_, err := parseNotes(bad)
		require.Error(t, err, bad)
	}
}
