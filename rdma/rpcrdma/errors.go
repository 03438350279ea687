package rpcrdma

import (
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/iser-target/iser-target/rdma/rpcrdma/oncrpc"
	"github.com/iser-target/iser-target/rdma/rpcrdma/wire"
)

var (
	// ErrLost reports that the connection ended before the reply. The peer may have executed the call.
	ErrLost = errors.New("rpcrdma: the connection was lost before the reply")
	// ErrClosed is what Do returns after Close or Shutdown. It is net.ErrClosed.
	ErrClosed = net.ErrClosed
	// ErrReverse reports a call in the reverse direction before EnableReverse.
	ErrReverse = errors.New("rpcrdma: the program has not enabled calls in the reverse direction")
	// ErrTooLong reports a message that requires chunks where none are allowed, or results that
	// exceed the memory that the requester offers.
	ErrTooLong = errors.New("rpcrdma: the message is too long")
	// ErrReply reports a reply that breaks a rule of the transport. The call has failed permanently.
	ErrReply = errors.New("rpcrdma: the reply breaks a rule of the transport")

	errStalled  = errors.New("rpcrdma: the peer has stalled")
	errIdle     = errors.New("rpcrdma: the connection was idle")
	errCredits  = errors.New("rpcrdma: the peer has exceeded its credits")
	errForeign  = errors.New("rpcrdma: the peer has invalidated an STag that is not of this call")
	errXID      = errors.New("rpcrdma: a call with this XID is unanswered")
	errBusyCall = errors.New("rpcrdma: the Call is in use")
	errNotBegun = errors.New("rpcrdma: the Call was not begun")
	errFence    = errors.New("rpcrdma: the memory of a call could not be fenced")
)

// inOrder reports whether err is the end of a connection that one of both ends has closed between calls.
func inOrder(err error) bool { return err == io.EOF || err == ErrClosed || err == errIdle }

// A RefusedError is the peer's RDMA_ERROR. The call has failed permanently (RFC 8166, section 4.5).
type RefusedError struct {
	Code      wire.Code
	Low, High uint32 // the versions that the peer supports, if Code is wire.CodeVersion
}

// Error implements error.
func (e *RefusedError) Error() string {
	if e.Code == wire.CodeVersion {
		return fmt.Sprintf("rpcrdma: the peer refused the message: %v, it supports versions %d to %d", e.Code, e.Low,
			e.High)
	}
	return fmt.Sprintf("rpcrdma: the peer refused the message: %v", e.Code)
}

// A StatusError is the status of a call that was not executed, or an answer of that kind by a Procedure.
type StatusError struct {
	Status    oncrpc.Status
	Low, High uint32 // the versions that the server has: ProgMismatch and RPCMismatch
	Why       uint32 // auth_stat of AuthError
}

// Error implements error.
func (e *StatusError) Error() string {
	switch e.Status {
	case oncrpc.ProgMismatch, oncrpc.RPCMismatch:
		return fmt.Sprintf("rpcrdma: %v, the server has versions %d to %d", e.Status, e.Low, e.High)
	case oncrpc.AuthError:
		return fmt.Sprintf("rpcrdma: %v %d", e.Status, e.Why)
	}
	return "rpcrdma: " + e.Status.String()
}
