package main

import (
	"encoding/xml"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/pgwake/pgwake/bench/measure"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestScale_MapsItsEndsToItsEnds(t *testing.T) {
	linear := scale{10, 20, false, 0, 100}
	assert.Equal(t, 0.0, linear.at(10))
	assert.Equal(t, 50.0, linear.at(15))
	assert.Equal(t, 100.0, linear.at(30), "what is beyond is at the end")
	log := scale{0.1, 1000, true, 0, 100}
	assert.InDelta(t, 25, log.at(1), 1e-9)
	assert.InDelta(t, 0, log.at(0), 1e-9)
	down := scale{0, 10, false, 100, 0}
	assert.Equal(t, 90.0, down.at(1))
}

func TestScale_TicksAreRound(t *testing.T) {
	assert.InDeltaSlice(t, []float64{0, 5000, 10000, 15000, 20000}, scale{0, 21_900, false, 0, 1}.ticks(), 1e-6)
	assert.InDeltaSlice(t, []float64{0, 0.2, 0.4, 0.6, 0.8, 1}, scale{0, 1, false, 0, 1}.ticks(), 1e-9)
	assert.InDeltaSlice(t, []float64{0.1, 1, 10, 100}, logScale(0.3, 70, 0, 1).ticks(), 1e-9)
	assert.InDeltaSlice(t, []float64{1, 10}, logScale(1, 1, 0, 1).ticks(), 1e-9)
}

func TestCharts_AreWellFormed_AndNameTheirSeries(t *testing.T) {
	charts := everything().charts()
	require.Len(t, charts, 3)
	for name, svg := range charts {
		decoder := xml.NewDecoder(strings.NewReader(svg))
		for {
			_, err := decoder.Token()
			if err == io.EOF {
				break
			}
			require.NoError(t, err, name)
		}
		assert.NotContains(t, svg, "NaN", name)
		assert.NotContains(t, svg, "Inf", name)
	}
	assert.Contains(t, charts["latency.svg"], ">River, defaults, second</text>")
	assert.Contains(t, charts["writers.svg"], ">pgwake, plain SQL</text>")
	assert.Contains(t, charts["idle.svg"], ">160</text>")
}

func TestCharts_WithoutSamples_AreNone(t *testing.T) {
	assert.Empty(t, (&results{}).charts())
	files, err := (&results{}).writeCharts(t.TempDir() + "/none")
	require.NoError(t, err)
	assert.Empty(t, files)
}

func TestChart_TextIsEscaped(t *testing.T) {
	svg := (&barChart{title: "a < b & c", bars: []bar{{"<x>", "\"1\"", 1}}}).svg()
	assert.Contains(t, svg, "a &lt; b &amp; c")
	assert.Contains(t, svg, "&lt;x&gt;")
}

func TestDistribution_EndsAtTheSlowestSample(t *testing.T) {
	s := distribution("x", ms(3, 1, 2))
	assert.Equal(t, point{1, 0}, s.points[0])
	assert.Equal(t, point{3, 100}, s.points[len(s.points)-1])
	assert.Empty(t, distribution("x", nil).points)
}

func TestProgressLine_ShowsWhatIsKnown(t *testing.T) {
	assert.Equal(t, "  1:05  round 1 of 5: drain", progressLine(65*time.Second, "round 1 of 5: drain", measure.Progress{}))
	assert.Equal(t, "  0:00  x  █████░░░░░░░░░░░░░░░ 25/100  p50 2.00 ms",
		progressLine(0, "x", measure.Progress{Done: 25, Total: 100, Figures: ms(2).Summary()}))
	assert.Equal(t, "  0:00  x  7", progressLine(0, "x", measure.Progress{Done: 7}))
	assert.Equal(t, "  0:00  x  3s", progressLine(0, "x", measure.Progress{Elapsed: 3 * time.Second}))
}

func TestProgress_NotOnATerminal_IsSilent(t *testing.T) {
	file, err := os.Create(t.TempDir() + "/piped")
	require.NoError(t, err)
	defer file.Close()
	p := newProgress(file)
	p.scenario(1, 1, "x")
	p.tell(measure.Progress{Done: 1, Total: 2})
	p.clear()
	info, err := file.Stat()
	require.NoError(t, err)
	assert.Zero(t, info.Size())
}
