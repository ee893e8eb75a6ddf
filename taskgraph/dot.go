package taskgraph

import (
	"fmt"
	"strings"
)

// This file answers: how does Graphviz draw a task?

// DOT returns the view in the language of Graphviz.
func (v *View) DOT() string {
	var b strings.Builder
	fmt.Fprintf(&b, "digraph %s {\n", dotQuote(v.title()))
	fmt.Fprintf(&b, "  label=%s;\n", dotQuote(append([]string{v.title()}, v.aboutTask()...)...))
	b.WriteString("  labelloc=t;\n  fontname=\"Helvetica\";\n")
	b.WriteString("  node [shape=box, style=\"rounded,filled\", fontname=\"Helvetica\", fillcolor=\"#ffffff\"];\n")
	b.WriteString("  edge [fontname=\"Helvetica\", fontsize=10];\n")
	for i := range v.Steps {
		s := &v.Steps[i]
		fmt.Fprintf(&b, "  s%d [label=%s", i+1, dotQuote(append([]string{visible(s.Name)}, s.about()...)...))
		if style, known := stateStyles[s.state()]; known {
			fmt.Fprintf(&b, ", fillcolor=%q, color=%q", style.fill, style.stroke)
		}
		if s.OnDemand || s.Skipped {
			b.WriteString(`, style="rounded,filled,dashed"`)
		}
		b.WriteString("];\n")
	}
	for _, e := range v.edges() {
		fmt.Fprintf(&b, "  s%d -> s%d", e.parent+1, e.child+1)
		if e.condition != "" {
			fmt.Fprintf(&b, " [label=%s, style=dashed]", dotQuote(visible(e.condition)))
		}
		b.WriteString(";\n")
	}
	b.WriteString("}\n")
	return b.String()
}

// dotEscapes are for what means something within quotes: the quote, escapes, and entities of HTML.
var dotEscapes = strings.NewReplacer(`"`, `\"`, `\`, `\\`, `&`, `&amp;`)

// dotQuote returns lines as one string.
func dotQuote(lines ...string) string {
	for i, l := range lines {
		lines[i] = dotEscapes.Replace(l)
	}
	return `"` + strings.Join(lines, `\n`) + `"`
}
