package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// This file answers: which licence is it?

// allowed are the licences that a dependency may have, each with what stands in its text and in that of none before it. All of them
// let anybody use, change and pass on what is linked with other code.
var allowed = []struct{ name, mark string }{
	{"Apache-2.0", "apache license version 2.0 january 2004"},
	{"MPL-2.0", "mozilla public license version 2.0"},
	{"BSD-3-Clause", "neither the name of"},
	{"BSD-3-Clause", "the names of its contributors may not be used"},
	{"BSD-2-Clause", "redistributions in binary form must reproduce the above copyright notice"},
	{"ISC", "permission to use copy modify and or distribute this software for any purpose with or without fee is hereby granted"},
	{"ISC", "permission to use copy modify and distribute this software for any purpose with or without fee is hereby granted"},
	{"MIT", "permission is hereby granted free of charge to any person obtaining a copy"},
	{"Unlicense", "this is free and unencumbered software released into the public domain"},
	{"CC0-1.0", "cc0 1.0 universal"},
	{"public domain", "put into the public domain"},
}

// refused are marks of licences that ask for more than to be named, also where an allowed one stands beside them.
var refused = []string{"gnu general public license", "gnu affero general public license", "gnu lesser general public license", "business source license",
	"server side public license", "elastic license", "commons clause"}

var space = regexp.MustCompile(`[\s*#,/]+`)

// licenceIn returns what the licence in the directory of a module is, "A and B" if its files have several.
func licenceIn(dir string) (string, error) {
	files, err := os.ReadDir(dir)
	if err != nil {
		return "", err
	}
	var found []string
	for _, f := range files {
		name := strings.ToLower(f.Name())
		if f.IsDir() || !strings.HasPrefix(name, "licen") && !strings.HasPrefix(name, "copying") && !strings.HasPrefix(name, "unlicense") || strings.HasSuffix(name, ".docs") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if err != nil {
			return "", err
		}
		licences, err := licencesOf(string(text))
		if err != nil {
			return "", fmt.Errorf("%s: %w", f.Name(), err)
		}
		found = append(found, licences...)
	}
	if found == nil {
		return "", fmt.Errorf("there is no licence in it")
	}
	slices.Sort(found)
	return strings.Join(slices.Compact(found), " and "), nil
}

// licencesOf returns those whose texts stand in a file.
func licencesOf(text string) (found []string, err error) {
	plain := strings.ToLower(space.ReplaceAllString(text, " "))
	// The texts of MPL-2.0 and others name the GNU licences only to say what they may be combined with.
	if !strings.Contains(plain, "mozilla public license version 2.0") {
		for _, mark := range refused {
			if strings.Contains(plain, mark) {
				return nil, fmt.Errorf("it speaks of the %s, which no dependency may have", mark)
			}
		}
	}
	for _, l := range allowed {
		if !strings.Contains(plain, l.mark) || slices.Contains(found, l.name) || l.name == "BSD-2-Clause" && slices.Contains(found, "BSD-3-Clause") {
			continue
		}
		found = append(found, l.name)
	}
	if found == nil {
		return nil, fmt.Errorf("no known licence that a dependency may have: %.80q", plain)
	}
	return found, nil
}
