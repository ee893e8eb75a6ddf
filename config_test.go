package pgwake

import (
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
)

// Inside the package, since what a Config resolves to cannot be seen from outside.

func TestConfig_NilOrZero_ResolvesToTheDocumentedDefaults(t *testing.T) {
	t.Parallel()
	for _, c := range []*Config{nil, {}} {
		r, err := c.resolve()
		require.NoError(t, err)
		require.Equal(t, Config{
			Schema:                  "pgwake",
			Mode:                    ModeHybrid,
			FallbackEnabled:         new(true),
			FallbackInterval:        time.Minute,
			MaxWait:                 30 * time.Second,
			AggressivePolicy:        OnTrouble,
			AggressiveDuration:      time.Minute,
			AggressiveInterval:      100 * time.Millisecond,
			AggressiveExitThreshold: 5,
			NotifyDeliveryTimeout:   100 * time.Millisecond,
			CoalesceInterval:        5 * time.Millisecond,
			PollInterval:            100 * time.Millisecond,
			WakeFanout:              2,
			QuietAbove:              200,
			HibernatePoll:           6 * time.Minute,
			MaxPayload:              1 << 20,
			Logger:                  slog.Default(),
			Propagator:              otel.GetTextMapPropagator(),
			MeterProvider:           otel.GetMeterProvider(),
		}, r)
	}
}

func TestConfig_ModeEventDriven_FallbackMustNotBeOn(t *testing.T) {
	t.Parallel()
	_, err := (&Config{Mode: ModeEventDriven}).resolve()
	require.NoError(t, err)
	_, err = (&Config{Mode: ModeEventDriven, FallbackEnabled: new(false)}).resolve()
	require.NoError(t, err)
	_, err = (&Config{Mode: ModeEventDriven, FallbackEnabled: new(true)}).resolve()
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "FallbackEnabled")
	r, err := (&Config{FallbackEnabled: new(false)}).resolve()
	require.NoError(t, err)
	require.False(t, *r.FallbackEnabled)
}

func TestConfig_Resolve_LeavesTheCallersConfigAlone(t *testing.T) {
	t.Parallel()
	c := Config{Schema: "mine", MaxPayload: 5}
	r, err := c.resolve()
	require.NoError(t, err)
	require.Equal(t, Config{Schema: "mine", MaxPayload: 5}, c)
	require.Equal(t, "mine", r.Schema)
	require.Equal(t, 5, r.MaxPayload)
}

// badKnobs has, for every knob that can be wrong, values that are.
var badKnobs = map[string][]Config{
	"Schema":                  {{Schema: strings.Repeat("x", 64)}, {Schema: strings.Repeat("é", 32)}, {Schema: "a\x00"}, {Schema: "\xff"}, {Schema: "pg_x"}},
	"Mode":                    {{Mode: -1}, {Mode: ModeDisabled + 1}},
	"Modes":                   {{Modes: map[string]Mode{"Bad": ModePolling}}, {Modes: map[string]Mode{"good": -1}}},
	"FallbackEnabled":         {{Mode: ModeEventDriven, FallbackEnabled: new(true)}},
	"FallbackInterval":        {{FallbackInterval: -1}, {FallbackInterval: 100*time.Millisecond - 1}, {FallbackInterval: 24*time.Hour + 1}},
	"MaxWait":                 {{MaxWait: -1}, {MaxWait: time.Millisecond - 1}},
	"TimerGrace":              {{TimerGrace: -1}, {TimerGrace: time.Second + 1}},
	"AggressivePolicy":        {{AggressivePolicy: -1}, {AggressivePolicy: Never + 1}},
	"AggressiveDuration":      {{AggressiveDuration: -1}, {AggressiveDuration: time.Millisecond - 1}, {AggressiveDuration: 24*time.Hour + 1}},
	"AggressiveInterval":      {{AggressiveInterval: -1}, {AggressiveInterval: 5*time.Millisecond - 1}, {AggressiveInterval: time.Hour + 1}},
	"AggressiveExitThreshold": {{AggressiveExitThreshold: -1}},
	"NotifyDeliveryTimeout":   {{NotifyDeliveryTimeout: -1}, {NotifyDeliveryTimeout: time.Minute + 1}},
	"CoalesceInterval":        {{CoalesceInterval: -1}, {CoalesceInterval: time.Millisecond - 1}, {CoalesceInterval: time.Second + 1}},
	"PollInterval":            {{PollInterval: -1}, {PollInterval: time.Millisecond - 1}, {PollInterval: time.Hour + 1}},
	"WakeFanout":              {{WakeFanout: -1}},
	"QuietAbove":              {{QuietAbove: -1}},
	"Notify":                  {{Notify: -1}, {Notify: NotifyBroadcast + 1}},
	"HibernateAfter":          {{HibernateAfter: -1}, {HibernateAfter: 100*time.Millisecond - 1}, {HibernateAfter: 24*time.Hour + 1}, {HibernateAfter: time.Minute, Mode: ModePolling}},
	"HibernatePoll":           {{HibernatePoll: -1}, {HibernatePoll: time.Second - 1}, {HibernatePoll: 24*time.Hour + 1}},
	"MeasureDepths":           {{MeasureDepths: -1}, {MeasureDepths: time.Second - 1}},
	"MaxPayload":              {{MaxPayload: -1}},
	"HistoryCache":            {{HistoryCache: -1}},
	"ArchiveFor":              {{ArchiveFor: -1}, {ArchiveFor: 10*365*24*time.Hour + 1}},
}

// free are the knobs that take any value.
var free = []string{"SkipMigrate", "DisableLongPoll", "ListenConfig", "Logger", "ValidateEvent", "Propagator", "MeterProvider"}

func TestConfig_EveryKnobThatCanBeWrong_IsRefusedByName(t *testing.T) {
	t.Parallel()
	for name, configs := range badKnobs {
		for _, c := range configs {
			_, err := c.resolve()
			require.ErrorIs(t, err, ErrConfig, name)
			require.ErrorContains(t, err, name)
			require.NotContains(t, err.Error(), ";", "one problem, one message: %s", name)
		}
	}
	// A knob that comes later must join one of the two lists.
	for field := range reflect.TypeFor[Config]().Fields() {
		if !field.IsExported() {
			continue
		}
		_, bad := badKnobs[field.Name]
		require.True(t, bad != slices.Contains(free, field.Name), "%s is in none of the lists, or in both", field.Name)
	}
}

func TestConfig_EverythingIsWrong_OneErrorListsItAll(t *testing.T) {
	t.Parallel()
	all := reflect.New(reflect.TypeFor[Config]()).Elem()
	for name, configs := range badKnobs {
		all.FieldByName(name).Set(reflect.ValueOf(configs[0]).FieldByName(name))
	}
	c := all.Interface().(Config)
	for _, mode := range []Mode{-1, ModeEventDriven} { // FallbackEnabled is wrong only with a good Mode
		c.Mode = mode
		_, err := c.resolve()
		require.ErrorIs(t, err, ErrConfig)
		for name := range badKnobs {
			if name == "FallbackEnabled" && mode == -1 || name == "Mode" && mode != -1 {
				continue
			}
			require.ErrorContains(t, err, name)
		}
		require.Equal(t, len(badKnobs)-2, strings.Count(err.Error(), ";"))
	}
}

func TestConfig_LimitsExactlyReached_AreAccepted(t *testing.T) {
	t.Parallel()
	for _, c := range []Config{
		{Schema: strings.Repeat("x", 63)}, {Schema: "PG_upper"}, {Schema: "pgwake"}, {Schema: " "},
		{FallbackInterval: 100 * time.Millisecond}, {FallbackInterval: 24 * time.Hour}, {MaxWait: time.Millisecond}, {MaxWait: 1<<63 - 1},
		{TimerGrace: time.Second}, {AggressiveInterval: 5 * time.Millisecond}, {AggressiveExitThreshold: 1},
		{CoalesceInterval: time.Millisecond}, {CoalesceInterval: time.Second}, {PollInterval: time.Millisecond}, {MaxPayload: 1},
		{Mode: ModePolling, AggressivePolicy: Never},
	} {
		_, err := c.resolve()
		require.NoError(t, err, "%+v", c)
	}
}

func TestOpen_BadConfig_ErrConfigBeforeAnythingIsDialled(t *testing.T) {
	t.Parallel()
	_, err := Open(t.Context(), "postgres://127.0.0.1:1/nobody-listens-here", &Config{MaxPayload: -1})
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "MaxPayload")
	require.False(t, retryable(err))
}

func TestModeAndPolicy_String_IsForPeople(t *testing.T) {
	t.Parallel()
	for want, v := range map[string]interface{ String() string }{
		"hybrid": ModeHybrid, "event-driven": ModeEventDriven, "polling": ModePolling, "Mode(7)": Mode(7),
		"on-trouble": OnTrouble, "on-every-wake": OnEveryWake, "never": Never, "AggressivePolicy(7)": AggressivePolicy(7),
	} {
		require.Equal(t, want, v.String())
	}
}
