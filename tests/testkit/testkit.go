// Package testkit has what the tests of several packages need.
package testkit

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Unhex decodes hexadecimal bytes. Blanks are left out, and comments from # or // to
// the end of a line. It panics if there is anything else.
func Unhex(s string) []byte {
	var digits strings.Builder
	for line := range strings.Lines(s) {
		line, _, _ = strings.Cut(line, "#")
		line, _, _ = strings.Cut(line, "//")
		digits.WriteString(strings.Join(strings.Fields(line), ""))
	}
	b, err := hex.DecodeString(digits.String())
	if err != nil {
		panic(fmt.Sprintf("%q: %v", s, err))
	}
	return b
}

// A Log keeps what is written to it and can be read at the same time. The zero value is empty.
type Log struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write appends p.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// String returns what was written so far.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Lines returns the lines that contain s.
func (l *Log) Lines(s string) (found []string) {
	for line := range strings.Lines(l.String()) {
		if strings.Contains(line, s) {
			found = append(found, line)
		}
	}
	return found
}

// A WriteCounter is a connection, with the writev of a socket, that counts the system
// calls that write to it.
type WriteCounter struct {
	net.Conn
	Writes *atomic.Int64
}

// Write implements net.Conn.
func (c WriteCounter) Write(b []byte) (int, error) {
	c.Writes.Add(1)
	return c.Conn.Write(b)
}

// WriteBuffers writes b with one system call, which it counts as one.
func (c WriteCounter) WriteBuffers(b [][]byte) (int64, error) {
	c.Writes.Add(1)
	return (*net.Buffers)(&b).WriteTo(c.Conn)
}

// A SlowConn is a connection on a slow network: it sends Rate bytes per second.
type SlowConn struct {
	net.Conn
	Rate int
}

// Write implements net.Conn.
func (c SlowConn) Write(b []byte) (int, error) {
	time.Sleep(time.Duration(len(b)) * time.Second / time.Duration(c.Rate)) // the network's time
	return c.Conn.Write(b)
}

// A Watcher sees what is read from a connection, and where Unread, which is of who reads,
// says that PDUs begin.
type Watcher struct {
	net.Conn
	Unread       func() (unread []byte, rest int) // nil: not yet
	Got          []byte
	Begins       map[int]bool
	Ahead, Later int // how often there were unread bytes, and rest was not 0
}

// Read implements net.Conn.
func (w *Watcher) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	if w.Unread != nil && n > 0 {
		unread, rest := w.Unread()
		w.Begins[len(w.Got)-len(unread)+rest] = true
		w.Ahead += min(len(unread), 1)
		w.Later += min(rest, 1)
	}
	w.Got = append(w.Got, p[:n]...)
	return n, err
}
