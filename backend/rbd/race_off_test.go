//go:build !race

package rbd

const raceEnabled = false
