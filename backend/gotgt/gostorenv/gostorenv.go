// Package gostorenv keeps gotgt from running programs when the process starts.
//
// The init function of gotgt/pkg/config looks for a directory of configuration files. Without
// $GOSTOR_CONFIG it takes the home directory, and without $HOME go-homedir runs getent(1) and
// sh(1) from $PATH to find that. This program reads none of those files, so this package sets
// $GOSTOR_CONFIG.
//
// It has to be initialized before gotgt/pkg/config. Of the packages whose imports are ready, Go
// initializes the first by import path (The Go Programming Language Specification, "Program
// initialization"). gotgt/pkg/config waits for github.com/mitchellh/go-homedir, whose path
// comes after this package's and which imports everything that this package does.
package gostorenv

import "os"

const variable = "GOSTOR_CONFIG"

func init() {
	if os.Getenv(variable) == "" {
		os.Setenv(variable, os.DevNull)
	}
}
