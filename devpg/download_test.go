//go:build unix

package devpg

import (
	"archive/zip"
	"bytes"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// archiveServer serves, for each version, an archive whose programs are those of
// the directory bin. It stands for Maven Central.
func archiveServer(t *testing.T, bin string) *atomic.Int64 {
	t.Helper()
	tree := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(tree, "bin"), 0o755))
	for _, name := range []string{"initdb", "postgres", "pg_ctl"} {
		script := "#!/bin/sh\nexec " + bin + "/" + name + " \"$@\"\n"
		require.NoError(t, os.WriteFile(filepath.Join(tree, "bin", name), []byte(script), 0o755))
	}
	packed, err := exec.Command("tar", "-C", tree, "-cJf", "-", "bin").Output()
	if err != nil {
		t.Skipf("tar cannot make the archive: %v", err)
	}
	var jar bytes.Buffer
	archive := zip.NewWriter(&jar)
	f, err := archive.Create("postgres.txz")
	require.NoError(t, err)
	_, err = f.Write(packed)
	require.NoError(t, err)
	require.NoError(t, archive.Close())

	var fetched atomic.Int64
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasSuffix(r.URL.Path, ".jar") {
			http.NotFound(w, r)
			return
		}
		fetched.Add(1)
		_, _ = w.Write(jar.Bytes())
	}))
	t.Cleanup(srv.Close)
	use(t, srv.URL)
	return &fetched
}

// use makes url the repository for the length of the test.
func use(t *testing.T, url string) {
	t.Helper()
	before := repository
	repository = url
	t.Cleanup(func() { repository = before })
}

// cacheFor makes a cache directory that the server's user can read.
func cacheFor(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "devpg-cache-")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o755))
	return dir
}

func TestFromDownload_FetchesOnceAndBoots(t *testing.T) {
	here := started(t)
	bin := ask(t, here, "SELECT setting FROM pg_config() WHERE name = 'BINDIR'")
	major, _, _ := strings.Cut(here.Version, ".")
	if _, known := downloads[major]; !known || !complete(filepath.Dir(bin)) {
		t.Skipf("the binaries of PostgreSQL %s in %s cannot stand for a download", major, bin)
	}
	fetched := archiveServer(t, bin)
	cache, temp := cacheFor(t), cacheFor(t)
	require.NoError(t, os.Chmod(temp, 0o777))
	t.Setenv("TMPDIR", temp)
	for range 2 {
		srv, err := fromDownload(t.Context(), &Options{Version: major, CacheDir: cache})
		require.NoError(t, err)
		assert.True(t, srv.Owned())
		assert.Equal(t, here.Version, srv.Version)
		assert.Contains(t, srv.Source, "embedded-postgres, "+cache)
		assert.Equal(t, "off", ask(t, srv, "SHOW fsync"))
		stopped(t, srv)
	}
	assert.EqualValues(t, 1, fetched.Load())
	kept, err := os.ReadDir(cache)
	require.NoError(t, err)
	assert.Len(t, kept, 1, "no temporary file is left in the cache")
	left, err := os.ReadDir(temp)
	require.NoError(t, err)
	assert.Empty(t, left)
}

func TestFromDownload_Offline_SaysFromWhereInOneLine(t *testing.T) {
	use(t, "http://127.0.0.1:1")
	cache := cacheFor(t)
	_, err := fromDownload(t.Context(), &Options{Version: "17", CacheDir: cache})
	require.EqualError(t, err, "download PostgreSQL "+string(downloads["17"])+": unable to connect to http://127.0.0.1:1")
	left, err := os.ReadDir(cache)
	require.NoError(t, err)
	assert.Empty(t, left)
}

func TestFromDownload_VersionWithoutDownload_IsRefused(t *testing.T) {
	_, err := fromDownload(t.Context(), &Options{Version: "9", CacheDir: cacheFor(t)})
	require.EqualError(t, err, "there is no download of PostgreSQL 9")
}

// The real one, where the repository can be reached.
func TestFromDownload_MavenCentral_Boots(t *testing.T) {
	resp, err := http.Head(repository + "/io/zonky/test/postgres/")
	if err != nil {
		t.Skipf("the repository cannot be reached: %v", err)
	}
	resp.Body.Close()
	srv, err := fromDownload(t.Context(), &Options{Version: defaultMajor, CacheDir: cacheFor(t)})
	require.NoError(t, err)
	defer stopped(t, srv)
	assert.Equal(t, "1", ask(t, srv, "SELECT '1'"))
}
