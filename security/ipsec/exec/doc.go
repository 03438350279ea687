// Package exec is the driver that asks a program of the site. It starts the program for each question, without a shell: the question is JSON on its
// standard input, and its standard output is a verdict in JSON (docs/ipsec-exec.md).
package exec
