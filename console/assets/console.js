// The console in the browser: keeps what is live up to date, and the keys. Pages work without it.
"use strict";

// The theme is set before anything is painted.
const themes = ["system", "light", "dark"];
let theme = "system";
try { theme = localStorage.getItem("pgwake-theme") || "system"; } catch { /* no storage: as the system has it */ }
function wear() {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}
wear();

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

function children(from, to) {
  const olds = [...from.childNodes], news = [...to.childNodes];
  for (let i = 0; i < news.length; i++) {
    if (i < olds.length) morph(olds[i], news[i]);
    else from.append(news[i]);
  }
  for (let i = news.length; i < olds.length; i++) olds[i].remove();
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
    const parsed = new DOMParser().parseFromString("<div id=\"live\">" + html + "</div>", "text/html");
    children(live, document.adoptNode(parsed.getElementById("live")));
    say();
  }

  if (document.body.dataset.stream && live && window.EventSource) {
    lastSaid = Date.now();
    let source = null;
    const connect = () => {
      source = new EventSource(document.body.dataset.stream);
      source.addEventListener("hello", () => { if (!held) show("live", "live"); });
      source.addEventListener("live", (e) => {
        if (!held) show("live", "live");
        draw(JSON.parse(e.data));
      });
      source.addEventListener("trouble", (e) => { show("lost", "trouble"); pulse.title = JSON.parse(e.data); });
      source.addEventListener("error", () => {
        show("lost", "reconnecting");
        if (source.readyState === EventSource.CLOSED) setTimeout(connect, 10000); // it was refused
      });
    };
    const disconnect = () => { if (source) source.close(); source = null; };
    connect();
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

  // On a phone the navigation is wider than the window.
  const here = document.querySelector("nav.side [aria-current]");
  if (here) here.closest("nav").scrollLeft = here.offsetLeft - 40;

  const button = by("theme");
  const label = () => { button.textContent = "Theme: " + theme; };
  label();
  button.hidden = false;
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    try { localStorage.setItem("pgwake-theme", theme); } catch { /* it is for this page then */ }
    wear();
    label();
  });

  by("help-open").hidden = false;
  by("help-open").addEventListener("click", () => help.showModal());

  // Of a list of which some can be chosen, all on the page.
  document.addEventListener("change", (e) => {
    if (e.target.matches("[data-all]")) for (const box of document.querySelectorAll("input[name=id]")) box.checked = e.target.checked;
  });

  const places = { o: 0, q: 1, n: 2, i: 3, t: 4, e: 5, d: 6, s: 7 };
  let going = 0;
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || help.open || e.target.closest("input, select, textarea, [contenteditable]")) return;
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
