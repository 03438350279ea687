package rdma

import (
	"errors"
	"fmt"
	"net"

	"github.com/iser-target/iser-target/rdma/wire"
)

// A StreamError ends a stream. If it is Remote, the Reason came in the peer's
// Terminate. Otherwise it was sent to the peer in a Terminate, if that was possible.
type StreamError struct {
	Reason wire.Reason
	Remote bool
	Err    error // details for the log; never sent
	// Terminate is the peer's Terminate with its copy of the refused message. It is
	// nil unless Remote.
	Terminate *wire.Terminate
}

// Error implements error.
func (e *StreamError) Error() string {
	s := e.Reason.String()
	if e.Remote {
		s = "peer terminated the stream: " + s
	}
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap returns e.Err.
func (e *StreamError) Unwrap() error { return e.Err }

// A RejectedError reports that the Responder rejected the connection in its Reply
// Frame (RFC 5044, section 7.1.2; RFC 6581, section 9.1).
type RejectedError struct {
	Private []byte      // the private data of the Reply
	Depths  wire.Depths // valid if Enhanced
	// Enhanced says that the Reply carried Depths. Their ORD may be what the Responder needs.
	Enhanced bool
}

// Error implements error.
func (e *RejectedError) Error() string {
	if e.Enhanced {
		return fmt.Sprintf("MPA: the responder rejected the connection (it asks for ORD %d)", e.Depths.ORD)
	}
	return "MPA: the responder rejected the connection"
}

var (
	// ErrClosed is what a Conn returns after Close. It is net.ErrClosed.
	ErrClosed = net.ErrClosed

	errNoORD   = errors.New("the peer accepts no RDMA Reads")
	errTooBig  = errors.New("the message is 4 GiB or longer")
	errWriting = errors.New("writing to the peer failed")
)

// fault returns a local StreamError.
func fault(r wire.Reason, format string, args ...any) *StreamError {
	return &StreamError{Reason: r, Err: fmt.Errorf(format, args...)}
}
