// The console in the browser: keeps what is live up to date, and the keys. Pages work without it.
"use strict";

// morph makes one element like another, and leaves alone what is the same: so focus, selection and scrolling stay where they are.
function morph(from, to) {
  if (from.nodeType !== to.nodeType || from.nodeName !== to.nodeName || (from.id || "") !== (to.id || "")) {
    from.replaceWith(to);
    return;
  }
  if (from.nodeType !== Node.ELEMENT_NODE) {
    if (from.nodeValue !== to.nodeValue) from.nodeValue = to.nodeValue;
    return;
  }
  for (const a of [...from.attributes]) {
    if (!to.hasAttribute(a.name) && !(a.name === "open" && from.nodeName === "DETAILS")) from.removeAttribute(a.name);
  }
  for (const a of to.attributes) {
    if (from.getAttribute(a.name) !== a.value) from.setAttribute(a.name, a.value);
  }
  children(from, to);
}

// children does so with what is within. What has a key, such as a row, stays what it is wherever it goes: what is chosen in it, or about to be
// pressed, never becomes something else.
function children(from, to) {
  const keyOf = (n) => n.nodeType === Node.ELEMENT_NODE ? n.id || n.dataset.key || "" : "";
  const news = [...to.childNodes], wanted = new Set(news.map(keyOf)), olds = new Map();
  for (const n of [...from.childNodes]) {
    const key = keyOf(n);
    if (key && wanted.has(key)) olds.set(key, n);
    else if (key) n.remove();
  }
  let at = from.firstChild;
  for (const n of news) {
    const key = keyOf(n), old = key ? olds.get(key) : at && !keyOf(at) ? at : null;
    if (old && old === at) at = at.nextSibling;
    else from.insertBefore(old || n, at);
    if (old) morph(old, n);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

document.addEventListener("DOMContentLoaded", () => {
  const by = (id) => document.getElementById(id);
  const live = by("live"), pulse = by("pulse"), hold = by("hold"), said = by("said"), help = by("help");
  let held = false, waiting = null, lastSaid = 0, lastText = "";

  function show(state, text) {
    if (!pulse) return;
    pulse.dataset.state = state;
    by("pulse-text").textContent = text;
  }

  // trouble says what is wrong, or that nothing is any more.
  function trouble(text) {
    const at = by("trouble");
    if (at.textContent !== text) at.textContent = text;
    at.hidden = !text;
  }

  // say tells a screen reader how it is, not more often than it is of use.
  function say() {
    const of = live.querySelector("[data-say]");
    const text = of ? of.textContent : "";
    if (text === lastText || Date.now() - lastSaid < 20000) return;
    lastText = text;
    lastSaid = Date.now();
    said.textContent = text;
  }

  function draw(html) {
    const selection = getSelection();
    if (held || (selection && !selection.isCollapsed && live.contains(selection.anchorNode))) {
      waiting = html;
      return;
    }
    waiting = null;
    const focused = document.activeElement, within = live.contains(focused);
    const parsed = new DOMParser().parseFromString("<div id=\"live\">" + html + "</div>", "text/html");
    children(live, document.adoptNode(parsed.getElementById("live")));
    if (within && focused !== document.activeElement) (live.contains(focused) ? focused : by("main")).focus({ preventScroll: true }); // it was moved, or is gone
    say();
  }

  if (document.body.dataset.stream && live && window.EventSource) {
    lastSaid = Date.now();
    let source = null;
    const connect = () => {
      const own = source = new EventSource(document.body.dataset.stream);
      source.addEventListener("hello", () => { if (!held) show("live", "live"); });
      source.addEventListener("live", (e) => {
        if (!held) show("live", "live");
        trouble("");
        draw(JSON.parse(e.data));
      });
      source.addEventListener("trouble", (e) => { show("lost", "trouble"); trouble("This is not up to date. " + JSON.parse(e.data)); });
      source.addEventListener("error", () => {
        const refused = own.readyState === EventSource.CLOSED;
        show("lost", refused ? "not live" : "reconnecting");
        if (refused) setTimeout(() => { if (source === own) connect(); }, 10000);
      });
    };
    const disconnect = () => { if (source) source.close(); source = null; };
    // Not before the page is painted: what comes first is about the same once more.
    requestAnimationFrame(() => setTimeout(() => { if (!document.hidden && !source) connect(); }));
    // What nobody sees costs nothing.
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) disconnect();
      else if (!source) connect();
    });
    addEventListener("pagehide", disconnect);
    addEventListener("pageshow", (e) => { if (e.persisted && !source) connect(); });
    hold.hidden = false;
    hold.addEventListener("click", () => {
      held = !held;
      hold.setAttribute("aria-pressed", held);
      hold.textContent = held ? "Go on" : "Hold";
      show(held ? "held" : "live", held ? "held" : "live");
      if (!held && waiting !== null) draw(waiting);
    });
    document.addEventListener("selectionchange", () => { if (waiting !== null && !held) draw(waiting); });
  }

  // What came of an action was there before a screen reader listened to changes.
  const flash = document.querySelector(".flash");
  if (flash) setTimeout(() => { said.textContent = flash.textContent; }, 200);

  // On a phone the navigation is wider than the window.
  const here = document.querySelector("nav.side [aria-current]");
  if (here) here.closest("nav").scrollLeft = here.offsetLeft - 40;

  // The theme is in a cookie, so that a page has it from the start.
  const themes = ["system", "light", "dark"];
  let theme = document.documentElement.dataset.theme || "system";
  const button = by("theme");
  const label = () => { button.textContent = "Theme: " + theme; };
  label();
  button.hidden = false;
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    const below = new URL(document.querySelector(".brand").href).pathname, age = theme === "system" ? 0 : 31536000;
    try { document.cookie = `pgwake-theme=${theme}; path=${below}; max-age=${age}; samesite=lax`; } catch { /* it is for this page then */ }
    label();
  });

  by("help-open").hidden = false;
  by("help-open").addEventListener("click", () => help.showModal());

  // Of a list of which some can be chosen, all on the page.
  document.addEventListener("change", (e) => {
    if (e.target.matches("[data-all]")) for (const box of document.querySelectorAll("input[name=id]")) box.checked = e.target.checked;
  });

  // Single keys are in the way of those who speak to the machine, or have it press keys: they can be left to them.
  const on = by("keys-on");
  try { on.checked = localStorage.getItem("pgwake-keys") !== "off"; } catch { /* no storage: they are there */ }
  on.addEventListener("change", () => {
    try { localStorage.setItem("pgwake-keys", on.checked ? "on" : "off"); } catch { /* it is for this page then */ }
  });

  const places = { o: 0, q: 1, n: 2, i: 3, t: 4, e: 5, d: 6, s: 7 };
  let going = 0;
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || !on.checked || help.open || e.target.closest("input, select, textarea, [contenteditable]")) return;
    const went = Date.now() - going < 1500;
    going = 0;
    if (went && e.key in places) {
      document.querySelectorAll("nav.side a")[places[e.key]].click();
    } else if (e.key === "g") {
      going = Date.now();
    } else if (e.key === "?") {
      help.showModal();
    } else if (e.key === "/") {
      const search = document.querySelector("[data-search]");
      if (search) search.focus();
      else return;
    } else if (e.key === "p" && hold && !hold.hidden) {
      hold.click();
    } else if (e.key === "l") {
      button.click();
    } else if (e.key === "[" || e.key === "]") {
      const page = document.querySelector(".pager a[data-key=\"" + e.key + "\"]");
      if (page) page.click();
    } else {
      return;
    }
    e.preventDefault();
  });
});
