// Package goworkflows is a backend for go-workflows.
package goworkflows
