package rdma

import (
	"errors"
	"fmt"
	"net"

	"github.com/iser-target/iser-target/rdma/wire"
)

// A StreamError ends a stream. A local one has been sent to the peer in a
// Terminate if that was possible; a Remote one came in the peer's Terminate.
type StreamError struct {
	Reason wire.Reason
	Remote bool
	Err    error // what was seen; never sent
	// Terminate is the peer's, with what it says about the refused message;
	// nil unless Remote.
	Terminate *wire.Terminate
}

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

func (e *StreamError) Unwrap() error { return e.Err }

// A RejectedError is the answer of a Responder that refused the connection
// with a Reply Frame (RFC 5044, section 7.1.2; RFC 6581, section 9.1).
type RejectedError struct {
	Private []byte      // the private data of the Reply
	Depths  wire.Depths // valid if Enhanced
	// Enhanced tells that Depths is there; its ORD may say what the
	// Responder needs.
	Enhanced bool
}

func (e *RejectedError) Error() string {
	if e.Enhanced {
		return fmt.Sprintf("MPA: the responder rejected the connection (it asks for ORD %d)", e.Depths.ORD)
	}
	return "MPA: the responder rejected the connection"
}

var (
	// ErrClosed answers use of a Conn after Close; it is net.ErrClosed.
	ErrClosed = net.ErrClosed

	errNoORD   = errors.New("the peer takes in no RDMA Reads")
	errTooBig  = errors.New("message of 2^32 octets or more")
	errWriting = errors.New("writing to the peer failed")
)

// fault makes a local StreamError.
func fault(r wire.Reason, format string, args ...any) *StreamError {
	return &StreamError{Reason: r, Err: fmt.Errorf(format, args...)}
}
