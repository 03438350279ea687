//go:build nogotgt

// Package gotgt stands for the stores of github.com/gostor/gotgt in a program that is built
// without them.
package gotgt

import (
	"errors"

	"github.com/iser-target/iser-target/backend"
)

// Config has the fields of the Config of a program with gotgt.
type Config struct {
	Plugin, Path, Options string
	Size                  int64
	BlockSize             uint32
	ReadOnly              bool
}

// Open fails: there are no plug-ins.
func Open(Config) (backend.Store, error) {
	return nil, errors.New("backend gotgt: left out of this program, which was built with the tag nogotgt")
}
