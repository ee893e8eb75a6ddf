package console

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"net/http"
	"strings"
)

// This file answers: how do style and script get to a browser? Under names that change with what is in them, so that they are kept for ever.

//go:embed assets/console.css assets/console.js assets/icon.svg
var assetFiles embed.FS

// asset is a file that pages refer to.
type asset struct {
	path, kind string
	data       []byte
}

// assets are by the names that pages have for them.
var assets = loadAssets()

func loadAssets() map[string]asset {
	all := make(map[string]asset)
	for name, kind := range map[string]string{
		"console.css": "text/css; charset=utf-8", "console.js": "text/javascript; charset=utf-8", "icon.svg": "image/svg+xml",
	} {
		data, err := assetFiles.ReadFile("assets/" + name)
		if err != nil {
			panic(err) // it is embedded
		}
		sum := sha256.Sum256(data)
		base, ext, _ := strings.Cut(name, ".")
		all[name] = asset{"assets/" + base + "." + hex.EncodeToString(sum[:6]) + "." + ext, kind, data}
	}
	return all
}

func serveAsset(w http.ResponseWriter, r *http.Request) {
	for _, a := range assets {
		if "/"+a.path != r.URL.Path {
			continue
		}
		tag := `"` + a.path + `"`
		w.Header().Set("Cache-Control", "public, max-age=31536000, immutable")
		w.Header().Set("ETag", tag)
		if r.Header.Get("If-None-Match") == tag {
			w.WriteHeader(http.StatusNotModified)
			return
		}
		w.Header().Set("Content-Type", a.kind)
		_, _ = w.Write(a.data) // whoever has gone needs it no more
		return
	}
	http.NotFound(w, r)
}
