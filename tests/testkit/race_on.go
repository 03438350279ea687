//go:build race

package testkit

// Race is true in programs with the race detector.
const Race = true
