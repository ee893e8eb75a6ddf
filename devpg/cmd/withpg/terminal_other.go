//go:build !unix

package main

import "os"

// fromTerminal is true: a console signals all of its processes.
func fromTerminal(os.Signal) bool { return true }
