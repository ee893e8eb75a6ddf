package console_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/dispatch"
	"github.com/stretchr/testify/require"
)

// The pictures of docs/console.md, by `make screenshots`: a shop at work.
func TestScreenshots_ForTheDocs(t *testing.T) {
	to := os.Getenv("PGWAKE_SCREENSHOTS")
	if to == "" {
		t.Skip("PGWAKE_SCREENSHOTS names no directory; see make screenshots")
	}
	w := makeWorld(t, console.Options{Authorize: anybody}, false)
	stop := w.work(t)
	defer stop()
	x := open(t, w.url, 1280, 860)
	for range 3 { // the nodes are asked once in 8 seconds, and what is new is known from the second answer on
		time.Sleep(8 * time.Second)
		x.again()
	}
	for _, of := range []struct {
		name, path, theme string
		width, height     int64
	}{
		{"overview", "", "light", 1280, 860}, {"task", "task?id=" + w.task, "dark", 1280, 860}, {"letters", "letters", "light", 1280, 400},
		{"instance", "instance?id=order-7", "light", 1280, 700}, {"phone", "", "dark", 360, 740},
	} {
		x.again()
		command(x, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: of.theme}}})
		x.run(chromedp.EmulateViewport(of.width, of.height))
		if eval[string](x, "location.href") != w.url+of.path {
			x.run(chromedp.Navigate(w.url + of.path))
		}
		time.Sleep(1500 * time.Millisecond) // something has changed since
		x.save(to, of.name)
	}
}

// save writes what is to be seen of the page to a file.
func (x *tab) save(dir, name string) {
	x.t.Helper()
	eval[string](x, `document.querySelector(".schema").textContent = "pgwake"`)
	data, err := chromedp.Run(x.ctx, chromedp.CaptureScreenshot())
	require.NoError(x.t, err)
	require.NoError(x.t, os.MkdirAll(dir, 0o755))
	require.NoError(x.t, os.WriteFile(filepath.Join(dir, name+".png"), data, 0o644))
}

// work has things come and go until stop is called.
func (w *world) work(t *testing.T) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	d := dispatch.New(w.Provider, &dispatch.Config{Namespaces: []string{"orders"}, Concurrency: 8, Logger: silent})
	dispatch.Handle(d, "order.place", func(context.Context, struct{}) (struct{}, error) { return struct{}{}, nil })
	ended := make(chan struct{}, 2)
	go func() { _ = d.Run(ctx); ended <- struct{}{} }()
	go func() {
		defer func() { ended <- struct{}{} }()
		for i := 0; ctx.Err() == nil; i++ {
			delay := time.Duration(0)
			if i%5 == 0 {
				delay = 3 * time.Second
			}
			_, _ = w.EnqueueForWorker(ctx, pgwake.WorkItem{Name: "order.place", Input: []byte("{}")}, &pgwake.EnqueueOptions{Namespace: "orders", Delay: delay})
			time.Sleep(time.Duration(5+20*(i/40%3)) * time.Millisecond)
		}
	}()
	return func() {
		cancel()
		<-ended
		<-ended
	}
}
