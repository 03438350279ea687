package rbd

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"time"
)

// A monitor is a connection to the monitor of QEMU (QMP). Its methods are for one goroutine at a time.
type monitor struct {
	c net.Conn
	r *bufio.Reader
}

// A qmpError is the answer of the daemon to a command that failed.
type qmpError struct{ Class, Desc string }

// Error returns the text of the daemon.
func (e *qmpError) Error() string { return e.Desc }

// A message is what the daemon sends: a greeting, the result of a command, or an event.
type message struct {
	QMP    json.RawMessage
	Return json.RawMessage
	Error  *qmpError
	Event  string
}

// maxMessage bounds a message, in bytes.
const maxMessage = 1 << 20

// newMonitor takes over f, and waits for the greeting.
func newMonitor(f *os.File, until time.Time) (*monitor, error) {
	c, err := net.FileConn(f)
	f.Close()
	if err != nil {
		return nil, err
	}
	m := &monitor{c: c, r: bufio.NewReaderSize(c, maxMessage)}
	c.SetDeadline(until)
	msg, err := m.receive()
	if err == nil && msg.QMP == nil {
		err = errors.New("no greeting of QMP")
	}
	if err == nil {
		err = m.execute("qmp_capabilities", nil, nil, until)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return m, nil
}

// receive returns the next message.
func (m *monitor) receive() (msg message, err error) {
	line, err := m.r.ReadSlice('\n')
	if err != nil {
		return msg, err
	}
	if err := json.Unmarshal(line, &msg); err != nil {
		return msg, fmt.Errorf("a message of QMP: %w", err)
	}
	return msg, nil
}

// execute executes a command, and decodes its result into out, unless that is nil. The error is a *qmpError if the daemon has refused it.
func (m *monitor) execute(command string, arguments, out any, until time.Time) error {
	return m.executeUntil(command, "", arguments, out, until)
}

// executeUntil does what execute does, and waits for an event that follows from the command, or comes before its result.
func (m *monitor) executeUntil(command, event string, arguments, out any, until time.Time) error {
	m.c.SetDeadline(until)
	b, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
	}{command, arguments})
	if err != nil {
		return err
	}
	if _, err := m.c.Write(append(b, '\n')); err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	for answered, seen := false, event == ""; !answered || !seen; {
		msg, err := m.receive()
		switch {
		case err != nil:
			return fmt.Errorf("%s: %w", command, err)
		case msg.Event != "":
			seen = seen || msg.Event == event
		case msg.Error != nil:
			return msg.Error
		case msg.Return != nil:
			answered = true
			if out != nil {
				if err := json.Unmarshal(msg.Return, out); err != nil {
					return fmt.Errorf("%s: result: %w", command, err)
				}
			}
		}
	}
	return nil
}

func (m *monitor) close() { m.c.Close() }
