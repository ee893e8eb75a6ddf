package console_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	cdplog "github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/console"
	"github.com/pgwake/pgwake/internal/testschema"
	"github.com/stretchr/testify/require"
)

// This file answers: how do the tests look at pages, as people do? In one Chromium for all of them, without a window.

const (
	patience  = 2 * time.Minute // a machine may have much else to do
	pollEvery = 20 * time.Millisecond
)

var (
	browserOnce sync.Once
	browserCtx  context.Context
	browserEnd  = func() {}
	browserErr  error
)

// openBrowser starts it, once.
func openBrowser() {
	path, err := exec.LookPath("chromium")
	if err != nil {
		browserErr = fmt.Errorf("there is no chromium: %w", err)
		return
	}
	options := []chromedp.ExecAllocatorOption{chromedp.Headless, chromedp.DisableGPU, chromedp.ExecPath(path), chromedp.Flag("hide-scrollbars", true)}
	if os.Geteuid() == 0 {
		options = append(options, chromedp.NoSandbox)
	}
	allocator, endAllocator := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, endBrowser := chromedp.NewContext(allocator)
	if browserErr = chromedp.Do(ctx); browserErr != nil {
		endBrowser()
		endAllocator()
		return
	}
	browserCtx, browserEnd = ctx, func() {
		_ = chromedp.Cancel(ctx) // it ends, and is waited for
		endAllocator()
	}
}

func closeBrowser() { browserEnd() }

// site is a console that is served, on a schema of its own.
type site struct {
	*pgwake.Provider
	url     string // of the overview
	handler http.Handler
}

// newSite mounts a console below a path, as programs do. The Provider is on a fresh schema, unless there is one.
func newSite(t *testing.T, p *pgwake.Provider, o *console.Options) *site {
	t.Helper()
	if p == nil {
		p = testschema.Core.New(t, nil)
	}
	s := &site{Provider: p, handler: console.Handler(p, o)}
	mux := http.NewServeMux()
	mux.Handle("/ops/console/", http.StripPrefix("/ops/console", s.handler))
	server := httptest.NewServer(mux)
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
		http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	})
	s.url = server.URL + "/ops/console/"
	return s
}

// tab is one page in the browser.
type tab struct {
	t      *testing.T
	of     context.Context
	ctx    context.Context // of what is being done
	cancel context.CancelFunc

	mu       sync.Mutex
	errors   []string // that the page has thrown, or written to its console
	requests []string // to others than the console
}

// phone is the narrowest that people have, and what is left of a window of 1280 when all is shown four times as large.
const phoneWidth, phoneHeight = 320, 740

// open opens a page. What it throws, and what it loads from elsewhere, fails the test in the end.
func open(t *testing.T, url string, width, height int64) *tab {
	t.Helper()
	axe.Do(loadAxe) // before the time of the page begins
	browserOnce.Do(openBrowser)
	if browserErr != nil {
		t.Skip(browserErr)
	}
	of, end := chromedp.NewContext(browserCtx)
	require.NoError(t, chromedp.Do(of)) // the tab is there
	x := &tab{t: t, of: of, cancel: func() {}}
	x.again()
	t.Cleanup(func() {
		x.cancel()
		end()
		x.mu.Lock()
		defer x.mu.Unlock()
		require.Empty(t, x.errors, "the page complains")
		require.Empty(t, x.requests, "the page asks others")
	})
	origin := url[:strings.Index(url[8:], "/")+8]
	require.NoError(t, chromedp.Listen(of, func(e any) {
		x.mu.Lock()
		defer x.mu.Unlock()
		switch e := e.(type) {
		case *runtime.EventExceptionThrown:
			x.errors = append(x.errors, fmt.Sprintf("%+v %+v", *e.ExceptionDetails, e.ExceptionDetails.Exception))
		case *cdplog.EventEntryAdded:
			if e.Entry.Level == "error" || e.Entry.Source == "security" {
				x.errors = append(x.errors, string(e.Entry.Source)+": "+e.Entry.Text+" "+e.Entry.URL)
			}
		case *runtime.EventConsoleAPICalled:
			if e.Type == "error" {
				x.errors = append(x.errors, fmt.Sprint(e.Args))
			}
		case *network.EventRequestWillBeSent:
			if !strings.HasPrefix(e.Request.URL, origin) && !strings.HasPrefix(e.Request.URL, "data:") {
				x.requests = append(x.requests, e.Request.URL)
			}
		}
	}))
	command(x, network.Enable, network.EnableParams{})
	command(x, cdplog.Enable, cdp.Empty{})
	x.run(chromedp.EmulateViewport(width, height), chromedp.Navigate(url))
	x.arrives()
	return x
}

func (x *tab) run(steps ...chromedp.Action[chromedp.Void]) {
	x.t.Helper()
	require.NoError(x.t, chromedp.Do(x.ctx, steps...))
}

// again has the time begin anew, for a test of many pages.
func (x *tab) again() {
	x.cancel()
	x.ctx, x.cancel = context.WithTimeout(x.of, patience)
}

// command sends a command of the protocol.
func command[P, R any](x *tab, c cdp.Command[P, R], params P) {
	x.t.Helper()
	_, err := chromedp.Call(x.ctx, c, params)
	require.NoError(x.t, err)
}

// forgive leaves out what the page complained of so far, of which the test knows.
func (x *tab) forgive() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.errors = nil
}

// eval evaluates JavaScript by way of the debugger, which is not held to the policy of the page.
func eval[T any](x *tab, script string) (v T) {
	x.t.Helper()
	v, err := chromedp.Run(x.ctx, chromedp.Evaluate[T](script, chromedp.EvalAwaitPromise))
	require.NoError(x.t, err, script[:min(len(script), 200)])
	return v
}

// arrives waits until all of the page is there.
func (x *tab) arrives() {
	x.t.Helper()
	require.Eventually(x.t, func() bool {
		there, err := chromedp.Run(x.ctx, chromedp.Evaluate[bool](`document.readyState == "complete" && !!document.querySelector("main")`))
		return err == nil && there // an error: it is between two pages
	}, patience, pollEvery, "there is no page")
}

// text is all that can be read on the page.
func (x *tab) text() string {
	x.t.Helper()
	x.arrives()
	return eval[string](x, `document.querySelector("main").innerText`)
}

// reads waits until the page has a text.
func (x *tab) reads(want string) {
	x.t.Helper()
	require.Eventually(x.t, func() bool { return strings.Contains(x.text(), want) }, patience, 20*time.Millisecond, "%q is not there", want)
}

// fits requires that nothing has to be scrolled sideways but what is in a region for that.
func (x *tab) fits() {
	x.t.Helper()
	wide := eval[[]string](x, `(() => { const w = document.documentElement.clientWidth; if (document.documentElement.scrollWidth <= w) return [];
		return [...document.querySelectorAll("*")].filter(e => e.getBoundingClientRect().right > w + 1 && !e.closest(".scroll, .graph, .side, pre")).map(e => e.outerHTML.slice(0, 120)); })()`)
	require.Empty(x.t, wide, "wider than the window")
}

var axe struct {
	sync.Once
	script string
	err    error
}

const axeVersion = "4.11.0"

// loadAxe has npm fetch axe-core, which examines pages by the rules of WCAG, into a cache.
func loadAxe() {
	cache, err := os.UserCacheDir()
	if err != nil {
		axe.err = err
		return
	}
	dir := filepath.Join(cache, "pgwake-axe-"+axeVersion)
	path := filepath.Join(dir, "node_modules", "axe-core", "axe.min.js")
	if _, err := os.Stat(path); err != nil {
		if axe.err = os.MkdirAll(dir, 0o755); axe.err != nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		out, err := exec.CommandContext(ctx, "npm", "install", "--prefix", dir, "--no-save", "--no-audit", "--no-fund", "--ignore-scripts", "axe-core@"+axeVersion).CombinedOutput()
		if err != nil {
			axe.err = fmt.Errorf("npm cannot fetch axe-core: %w: %s", err, out)
			return
		}
	}
	data, err := os.ReadFile(path)
	axe.script, axe.err = string(data), err
}

// accessible requires that axe-core has nothing to object to. It is left out, with a word, where npm cannot fetch it.
func (x *tab) accessible(themes ...string) {
	x.t.Helper()
	if axe.err != nil {
		x.t.Log("not examined by axe-core:", axe.err)
		return
	}
	eval[chromedp.Void](x, axe.script)
	for _, theme := range themes {
		x.examined(theme, `{resultTypes: ["violations"]}`)
	}
}

// contrasts requires no more than that all can be told from what is behind it.
func (x *tab) contrasts(theme string) {
	x.t.Helper()
	if axe.err == nil {
		x.examined(theme, `{resultTypes: ["violations"], runOnly: ["color-contrast"]}`)
	}
}

func (x *tab) examined(theme, options string) {
	x.t.Helper()
	command(x, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{
		{Name: "prefers-color-scheme", Value: theme}, {Name: "prefers-reduced-motion", Value: "reduce"}}})
	found := eval[[]string](x, `axe.run(`+options+`).then(r => r.violations.map(v => v.id + ": " + v.help + ": " + v.nodes.slice(0, 3).map(n => n.html + " " + n.failureSummary).join(" | ")))`)
	require.Empty(x.t, found, theme)
}
