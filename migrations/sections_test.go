package migrations_test

import (
	"io/fs"
	"testing"
	"testing/fstest"

	"github.com/pgwake/pgwake/migrations"
	"github.com/stretchr/testify/require"
)

func TestBySection_EachSectionIsOneStatement(t *testing.T) {
	const marked = "-- +goose Up\n-- +goose StatementBegin\nSELECT 1;\nSELECT 2\n-- +goose StatementEnd\n" +
		"-- +goose Down\n-- +goose StatementBegin\nSELECT 3\n-- +goose StatementEnd\n"
	for what, text := range map[string]string{
		"statements":      "-- About it.\n\n-- +goose Up\nSELECT 1;\n-- +goose StatementBegin\nSELECT 2\n-- +goose StatementEnd\n\n-- +goose Down\nSELECT 3",
		"lines of DOS":    "-- +goose Up\r\nSELECT 1;\r\nSELECT 2\r\n-- +goose Down\r\nSELECT 3\r\n",
		"spaces at marks": "-- +goose Up \nSELECT 1;\nSELECT 2\n-- +goose Down\t\nSELECT 3\n",
	} {
		t.Run(what, func(t *testing.T) {
			got, err := fs.ReadFile(migrations.BySection(fstest.MapFS{"1.sql": {Data: []byte(text)}}), "1.sql")
			require.NoError(t, err)
			require.Equal(t, marked, string(got))
		})
	}
}

// Goose has the last word on whatever is not as the migrations here are.
func TestBySection_WhatGooseWouldTreatOtherwise_StaysAsItIs(t *testing.T) {
	for what, text := range map[string]string{
		"no transaction":     "-- +goose NO TRANSACTION\n-- +goose Up\nSELECT 1;\n",
		"variables":          "-- +goose Up\n-- +goose ENVSUB ON\nSELECT '$HOME';\n",
		"no way up":          "SELECT 1;\n",
		"nothing":            "",
		"text before it":     "SELECT 1;\n-- +goose Up\nSELECT 2;\n",
		"twice up":           "-- +goose Up\nSELECT 1;\n-- +goose Up\nSELECT 2;\n",
		"twice down":         "-- +goose Up\nSELECT 1;\n-- +goose Down\nSELECT 2;\n-- +goose Down\nSELECT 3;\n",
		"down before up":     "-- +goose Down\nSELECT 1;\n-- +goose Up\nSELECT 2;\n",
		"an indented mark":   "  -- +goose Up\nSELECT 1;\n",
		"marks spelt anyhow": "--+goose up\nSELECT 1;\n",
	} {
		t.Run(what, func(t *testing.T) {
			got, err := fs.ReadFile(migrations.BySection(fstest.MapFS{"1.sql": {Data: []byte(text)}}), "1.sql")
			require.NoError(t, err)
			require.Equal(t, text, string(got))
		})
	}
}
