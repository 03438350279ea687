package nbd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/iser-target/iser-target/backend"
	"golang.org/x/sys/unix"
)

// What the protocol calls NBD_… has the rest of that name here.
const (
	magicInit       = 0x4e42444d41474943 // NBDMAGIC
	magicOption     = 0x49484156454f5054 // IHAVEOPT
	magicReply      = 0x3e889045565a9    // of an option
	magicRequest    = 0x25609513
	magicSimple     = 0x67446698
	magicStructured = 0x668e33ef

	// Handshake flags.
	flagFixedNewstyle = 1 << 0
	flagNoZeroes      = 1 << 1

	optAbort           = 2
	optSTARTTLS        = 5
	optGo              = 7
	optStructuredReply = 8
	optSetMetaContext  = 10

	repAck         = 1
	repInfo        = 3
	repMetaContext = 4
	repError       = 1 << 31 // errors have this bit
	repUnsupported = repError + 1
	repPolicy      = repError + 2
	repTLSRequired = repError + 5
	repUnknown     = repError + 6

	infoExport    = 0
	infoBlockSize = 3

	// Transmission flags.
	flagHasFlags        = 1 << 0
	flagReadOnly        = 1 << 1
	flagSendFlush       = 1 << 2
	flagSendFUA         = 1 << 3
	flagSendWriteZeroes = 1 << 6
	flagSendDF          = 1 << 7

	cmdRead        = 0
	cmdWrite       = 1
	cmdDisconnect  = 2
	cmdFlush       = 3
	cmdWriteZeroes = 6
	cmdBlockStatus = 7

	cmdFUA    = 1 << 0
	cmdNoHole = 1 << 1
	cmdDF     = 1 << 2

	chunkDone        = 1 << 0 // flag
	chunkNone        = 0
	chunkData        = 1
	chunkHole        = 2
	chunkBlockStatus = 5
	chunkErrorBit    = 1 << 15
	chunkErrorOffset = chunkErrorBit + 2

	stateHole = 1 << 0
	stateZero = 1 << 1

	contextAllocation = "base:allocation"

	requestLen    = 28
	simpleLen     = 16
	structuredLen = 20

	maxOptionReply = 64 << 10 // bytes; a server that sends more is no server of NBD
	maxErrorText   = 4096
	maxExtents     = 1 << 16 // of one answer
)

var be = binary.BigEndian

// errProtocol begins the errors about a server that does not keep the protocol.
var errProtocol = errors.New("the server violates the protocol")

func violation(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errProtocol, fmt.Sprintf(format, args...))
}

// A header is that of an answer.
type header struct {
	structured bool
	flags      uint16 // of a structured one
	kind       uint16 // of a structured one
	errno      uint32 // of a simple one
	cookie     uint64
	length     uint32 // bytes of data that follow a structured one
}

// readHeader reads the header of an answer into buf, which has structuredLen bytes.
func readHeader(r io.Reader, buf []byte) (h header, err error) {
	if _, err := io.ReadFull(r, buf[:simpleLen]); err != nil {
		return h, err
	}
	switch magic := be.Uint32(buf); magic {
	case magicSimple:
		h.errno, h.cookie = be.Uint32(buf[4:]), be.Uint64(buf[8:])
		return h, nil
	case magicStructured:
		if _, err := io.ReadFull(r, buf[simpleLen:structuredLen]); err != nil {
			return h, unexpected(err)
		}
		h.structured, h.flags, h.kind = true, be.Uint16(buf[4:]), be.Uint16(buf[6:])
		h.cookie, h.length = be.Uint64(buf[8:]), be.Uint32(buf[16:])
		return h, nil
	default:
		return h, violation("an answer begins with %#x", magic)
	}
}

// unexpected returns io.ErrUnexpectedEOF for io.EOF.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// putRequest encodes the header of a request.
func putRequest(b []byte, flags, command uint16, cookie uint64, off int64, n int64) {
	be.PutUint32(b, magicRequest)
	be.PutUint16(b[4:], flags)
	be.PutUint16(b[6:], command)
	be.PutUint64(b[8:], cookie)
	be.PutUint64(b[16:], uint64(off))
	be.PutUint32(b[24:], uint32(n))
}

// A serverError is the error that a server has answered a request with.
type serverError struct {
	errno unix.Errno
	text  string // of the server; may be empty
}

// Error returns the message.
func (e *serverError) Error() string {
	s := fmt.Sprintf("the NBD server answers error %d", int(e.errno))
	switch e.errno {
	case unix.EPERM, unix.EIO, unix.ENOMEM, unix.EINVAL, unix.ENOSPC, unix.EOVERFLOW, unix.ENOTSUP, unix.ESHUTDOWN:
		s = fmt.Sprintf("the NBD server answers %q", e.errno.Error())
	}
	if e.text != "" {
		s += fmt.Sprintf(": %q", e.text)
	}
	return s
}

// Unwrap returns the error of package backend that it is.
func (e *serverError) Unwrap() error {
	switch e.errno {
	case unix.ENOSPC:
		return backend.ErrNoSpace
	case unix.EPERM:
		return backend.ErrReadOnly
	}
	return e.errno
}
