package main

import (
	"fmt"
	"html"
	"math"
	"strconv"
	"strings"
)

// This file answers: how are lines and bars drawn as SVG? The pictures have a background of their own, so that they can
// be read on any page.

// scale maps values to a length, linearly or by their logarithm.
type scale struct {
	least, most float64
	log         bool
	from, to    float64
}

func (s scale) at(v float64) float64 {
	share := (v - s.least) / (s.most - s.least)
	if s.log {
		share = math.Log(max(v, s.least)/s.least) / math.Log(s.most/s.least)
	}
	return s.from + min(max(share, 0), 1)*(s.to-s.from)
}

// ticks are round values: powers of ten, or steps of 1, 2 or 5 times one.
func (s scale) ticks() (ticks []float64) {
	if s.log {
		for v := math.Pow(10, math.Ceil(math.Log10(s.least)-1e-9)); v <= s.most*(1+1e-9); v *= 10 {
			ticks = append(ticks, v)
		}
		return ticks
	}
	step := math.Pow(10, math.Floor(math.Log10((s.most-s.least)/4)))
	for _, f := range []float64{5, 2} {
		if (s.most-s.least)/(step*f) >= 4 {
			step *= f
			break
		}
	}
	for v := math.Ceil(s.least/step) * step; v <= s.most+step*1e-9; v += step {
		ticks = append(ticks, v)
	}
	return ticks
}

// logScale reaches from the power of ten below the least to the one above the most.
func logScale(least, most, from, to float64) scale {
	low, high := math.Floor(math.Log10(least)), math.Ceil(math.Log10(most))
	return scale{math.Pow(10, low), math.Pow(10, max(high, low+1)), true, from, to}
}

type point struct{ x, y float64 }

type series struct {
	name   string
	points []point
}

// lineChart has a legend on its right.
type lineChart struct {
	title, x, y string
	logX        bool
	series      []series
}

const (
	chartWidth, chartHeight             = 800, 400
	marginLeft, marginRight, marginTop  = 70, 250, 40
	marginBottom, barHeight, barLabels  = 50, 26, 300
	chartFont                           = `font-family="system-ui, sans-serif" font-size="12"`
	chartInk, chartGrid, chartPaper     = "#333", "#ddd", "#fff"
	legendLine, legendGap, legendIndent = 22, 20, 28
)

// markedPoints is up to how many points a line shows them.
const markedPoints = 20

var chartColors = []string{"#0b6e4f", "#d1495b", "#2e6fbb", "#e0a030", "#7a4fa3", "#777777", "#3aa6a6"}

// picture collects the elements of an SVG.
type picture struct{ strings.Builder }

func newPicture(width, height int, title string) *picture {
	p := &picture{}
	fmt.Fprintf(p, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" %s fill="%s">`+"\n", width, height, width, height, chartFont, chartInk)
	fmt.Fprintf(p, `<title>%s</title>`+"\n", html.EscapeString(title))
	fmt.Fprintf(p, `<rect width="%d" height="%d" fill="%s"/>`+"\n", width, height, chartPaper)
	p.text(float64(width)/2, marginTop/2+4, "middle", title, `font-weight="bold" font-size="14"`)
	return p
}

func (p *picture) text(x, y float64, anchor, text, more string) {
	fmt.Fprintf(p, `<text x="%s" y="%s" text-anchor="%s" %s>%s</text>`+"\n", coordinate(x), coordinate(y), anchor, more, html.EscapeString(text))
}

func (p *picture) line(x1, y1, x2, y2 float64, color string, width float64) {
	fmt.Fprintf(p, `<line x1="%s" y1="%s" x2="%s" y2="%s" stroke="%s" stroke-width="%g"/>`+"\n",
		coordinate(x1), coordinate(y1), coordinate(x2), coordinate(y2), color, width)
}

func (p *picture) end() string {
	p.WriteString("</svg>\n")
	return p.String()
}

func coordinate(v float64) string { return strconv.FormatFloat(v, 'f', 1, 64) }

func tick(v float64) string {
	switch {
	case v >= 1e6:
		return strconv.FormatFloat(v/1e6, 'g', 4, 64) + "M"
	case v >= 1e4:
		return strconv.FormatFloat(v/1e3, 'g', 4, 64) + "k"
	}
	return strconv.FormatFloat(v, 'g', 4, 64)
}

// svg draws the chart; "" if it has no points.
func (c *lineChart) svg() string {
	least, most, top := math.Inf(1), math.Inf(-1), 0.0
	for _, s := range c.series {
		for _, p := range s.points {
			least, most, top = min(least, p.x), max(most, p.x), max(top, p.y)
		}
	}
	if math.IsInf(least, 1) {
		return ""
	}
	const left, right, above, below = marginLeft, chartWidth - marginRight, marginTop, chartHeight - marginBottom
	x := scale{least, max(most, least+1), false, left, right}
	if c.logX {
		x = logScale(least, most, left, right)
	}
	y := scale{0, max(top, 1e-9), false, below, above}
	p := newPicture(chartWidth, chartHeight, c.title)
	for _, v := range y.ticks() {
		p.line(left, y.at(v), right, y.at(v), chartGrid, 1)
		p.text(left-8, y.at(v)+4, "end", tick(v), "")
	}
	for _, v := range x.ticks() {
		p.line(x.at(v), above, x.at(v), below, chartGrid, 1)
		p.text(x.at(v), below+18, "middle", tick(v), "")
	}
	p.text((left+right)/2, chartHeight-10, "middle", c.x, "")
	p.text(0, 0, "middle", c.y, fmt.Sprintf(`transform="translate(18 %d) rotate(-90)"`, (above+below)/2))
	for i, s := range c.series {
		color := chartColors[i%len(chartColors)]
		var path strings.Builder
		for n, at := range s.points {
			letter := "L"
			if n == 0 {
				letter = "M"
			}
			path.WriteString(letter + coordinate(x.at(at.x)) + " " + coordinate(y.at(at.y)))
		}
		fmt.Fprintf(p, `<path d="%s" fill="none" stroke="%s" stroke-width="2"/>`+"\n", path.String(), color)
		if len(s.points) <= markedPoints {
			for _, at := range s.points {
				fmt.Fprintf(p, `<circle cx="%s" cy="%s" r="3" fill="%s"/>`+"\n", coordinate(x.at(at.x)), coordinate(y.at(at.y)), color)
			}
		}
		row := float64(above + legendGap*i + 8)
		p.line(right+12, row, right+12+legendLine, row, color, 3)
		p.text(right+12+legendIndent, row+4, "start", s.name, "")
	}
	return p.end()
}

// bar of a barChart.
type bar struct {
	name, label string
	value       float64
}

// barChart has its bars below each other, by the logarithm of their values.
type barChart struct {
	title, unit string
	bars        []bar
}

// svg draws the chart; "" if it has no bars. A bar of 0 has no length.
func (c *barChart) svg() string {
	if len(c.bars) == 0 {
		return ""
	}
	least, most := math.Inf(1), 0.0
	for _, b := range c.bars {
		if b.value > 0 {
			least, most = min(least, b.value), max(most, b.value)
		}
	}
	if most == 0 {
		least, most = 0.1, 1
	}
	height := marginTop + barHeight*len(c.bars) + marginBottom
	x := logScale(least/2, most, barLabels, chartWidth-80)
	p := newPicture(chartWidth, height, c.title)
	below := float64(height - marginBottom)
	for _, v := range x.ticks() {
		p.line(x.at(v), marginTop, x.at(v), below, chartGrid, 1)
		p.text(x.at(v), below+18, "middle", tick(v), "")
	}
	for i, b := range c.bars {
		top := float64(marginTop + barHeight*i)
		end := x.from
		if b.value > 0 {
			end = x.at(b.value)
		}
		fmt.Fprintf(p, `<rect x="%s" y="%s" width="%s" height="%d" fill="%s"/>`+"\n",
			coordinate(x.from), coordinate(top+4), coordinate(end-x.from), barHeight-8, chartColors[i%len(chartColors)])
		p.text(barLabels-8, top+barHeight/2+4, "end", b.name, "")
		p.text(end+6, top+barHeight/2+4, "start", b.label, "")
	}
	p.text(barLabels+(chartWidth-80-barLabels)/2, float64(height-10), "middle", c.unit, "")
	return p.end()
}
