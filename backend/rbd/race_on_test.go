//go:build race

package rbd

const raceEnabled = true
