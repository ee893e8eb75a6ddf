package taskgraph

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"
)

// This file answers: how does Mermaid draw a task?

// Mermaid returns the view as a flowchart of Mermaid, as GitHub and others show in Markdown. By their default they draw up to 500
// edges.
func (v *View) Mermaid() string {
	var b strings.Builder
	b.WriteString("flowchart TD\n")
	fmt.Fprintf(&b, "  subgraph task[%s]\n", mermaidQuote(append([]string{v.title()}, v.aboutTask()...)...))
	used := make(map[string]stateStyle)
	for i := range v.Steps {
		s := &v.Steps[i]
		fmt.Fprintf(&b, "    s%d[%s]", i+1, mermaidQuote(append([]string{visible(s.Name)}, s.about()...)...))
		if style, known := stateStyles[s.state()]; known {
			class := strings.ReplaceAll(s.state(), " ", "_")
			used[class] = style
			b.WriteString(":::" + class)
		}
		b.WriteByte('\n')
	}
	b.WriteString("  end\n")
	for _, e := range v.edges() {
		if e.condition == "" {
			fmt.Fprintf(&b, "  s%d --> s%d\n", e.parent+1, e.child+1)
		} else {
			fmt.Fprintf(&b, "  s%d -.->|%s| s%d\n", e.parent+1, mermaidQuote(visible(e.condition)), e.child+1)
		}
	}
	for _, class := range slices.Sorted(maps.Keys(used)) {
		fmt.Fprintf(&b, "  classDef %s fill:%s,stroke:%s,color:#111827\n", class, used[class].fill, used[class].stroke)
	}
	return b.String()
}

// mermaidQuote returns lines as one label.
func mermaidQuote(lines ...string) string {
	for i, l := range lines {
		lines[i] = mermaidEscape(l)
	}
	return `"` + strings.Join(lines, "<br/>") + `"`
}

// mermaidEscape writes everything that could mean something, to Mermaid, Markdown or HTML, as an entity of Mermaid: everything
// but letters, digits, and what is between two of them and has a meaning nowhere then.
func mermaidEscape(text string) string {
	plain := func(r rune) bool { return unicode.In(r, unicode.L, unicode.M, unicode.Nd) }
	runes := []rune(text)
	var b strings.Builder
	for i, r := range runes {
		var before, after rune
		if i > 0 {
			before = runes[i-1]
		}
		if i+1 < len(runes) {
			after = runes[i+1]
		}
		if plain(r) || strings.ContainsRune(" _-", r) && plain(before) && plain(after) {
			b.WriteRune(r)
		} else {
			fmt.Fprintf(&b, "#%d;", r)
		}
		if strings.ContainsRune(`\:$ﬂ¶`, r) && (plain(after) || after == '$' || after == '°') {
			// Once there are no entities any more, Mermaid looks for \n, icons (fa:fa-x), formulas ($$x$$) and entities of its own
			// making (ﬂ°x¶ß). A word joiner is not seen, and keeps it from finding any.
			b.WriteString("#8288;")
		}
	}
	return b.String()
}
