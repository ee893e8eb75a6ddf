//go:build unix

package main

import (
	"archive/zip"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// This file answers: can people install the command of a release, who have no checkout?

const (
	releasedRoot    = "github.com/pgwake/pgwake"
	releasedVersion = "v0.0.1-test"
)

// The release is served from a directory, and all else from what has been downloaded for this test to be built.
func TestInstall_OfARelease_FindsAllThatItNeeds(t *testing.T) {
	t.Parallel()
	cache := strings.TrimSpace(output(t, exec.Command("go", "env", "GOMODCACHE")))
	downloads := filepath.Join(cache, "cache", "download")
	if _, err := os.Stat(filepath.Join(downloads, "charm.land")); err != nil {
		t.Skip("the modules were not downloaded to the module cache")
	}
	proxy := t.TempDir()
	serve(t, proxy, releasedRoot, "../..", "")
	serve(t, proxy, releasedRoot+"/console", "../../console", "../../.ci/release")
	serve(t, proxy, releasedRoot+"/cmd/pgwake", ".", "../../.ci/release")
	install := exec.Command("go", "install", "-n", releasedRoot+"/cmd/pgwake@"+releasedVersion) // as far as compiling
	install.Dir = t.TempDir()
	install.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-modcacherw", "GOSUMDB=off", "GONOSUMDB=*", "GONOPROXY=none", "GOPRIVATE=",
		"GOPROXY=file://"+proxy+",file://"+downloads, "GOMODCACHE="+t.TempDir())
	require.Contains(t, output(t, install), "pgwake")
}

func output(t *testing.T, c *exec.Cmd) string {
	t.Helper()
	out, err := c.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return string(out)
}

// serve puts a module into a directory as a proxy has it. The script makes of it what it is as part of a release.
func serve(t *testing.T, proxy, module, from, script string) {
	t.Helper()
	dir := filepath.Join(proxy, module, "@v")
	require.NoError(t, os.MkdirAll(dir, 0o755))
	released := t.TempDir()
	mod, err := os.ReadFile(filepath.Join(from, "go.mod"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(released, "go.mod"), mod, 0o644))
	if script != "" {
		output(t, exec.Command(script, releasedVersion, released))
	}
	mod, err = os.ReadFile(filepath.Join(released, "go.mod"))
	require.NoError(t, err)
	require.NotContains(t, string(mod), "replace")
	require.NoError(t, os.WriteFile(filepath.Join(dir, releasedVersion+".mod"), mod, 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "list"), []byte(releasedVersion+"\n"), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(dir, releasedVersion+".info"), []byte(`{"Version":"`+releasedVersion+`"}`), 0o644))
	archive, err := os.Create(filepath.Join(dir, releasedVersion+".zip"))
	require.NoError(t, err)
	z := zip.NewWriter(archive)
	prefix := module + "@" + releasedVersion + "/"
	add := func(name string, data []byte) {
		w, err := z.Create(prefix + name)
		require.NoError(t, err)
		_, err = w.Write(data)
		require.NoError(t, err)
	}
	add("go.mod", mod)
	for name, data := range sources(t, from) {
		add(name, data)
	}
	require.NoError(t, z.Close())
	require.NoError(t, archive.Close())
}

// sources are what a module is built from, by path. Modules below it are others.
func sources(t *testing.T, dir string) map[string][]byte {
	t.Helper()
	all := make(map[string][]byte)
	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			_, err := os.Stat(filepath.Join(path, "go.mod"))
			if name != "." && (err == nil || strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata") {
				return filepath.SkipDir
			}
			return nil
		}
		if ext := filepath.Ext(name); !slices.Contains([]string{".go", ".sql", ".css", ".js", ".svg", ".html"}, ext) || strings.HasSuffix(name, "_test.go") {
			return nil
		}
		all[filepath.ToSlash(name)], err = os.ReadFile(path)
		return err
	}))
	return all
}
