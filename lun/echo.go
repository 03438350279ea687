package lun

import (
	"encoding/binary"
	"sync"
)

// Values of MODE in READ BUFFER and WRITE BUFFER (SPC-4, sections 6.18 and 6.49). The target has only echo buffers: others would
// let an initiator read its memory or change its program.
const (
	bufferDescriptor     = 0x03
	bufferEcho           = 0x0a
	bufferEchoDescriptor = 0x0b
)

// echoCapacity is the length in bytes of an echo buffer. Each I_T_L nexus can have one, so it is short.
const echoCapacity = 256

// condSequence refuses a READ BUFFER of an echo buffer to which nothing was written: COMMAND SEQUENCE ERROR.
var condSequence = Sense{keyIllegalRequest, 0x2c, 0x00}

// An echoBuffer keeps what an initiator has written until it reads it, to test the path to the target. It is of one I_T nexus
// (EBOS), so that no other initiator overwrites it. A reset empties it.
type echoBuffer struct {
	mu   sync.Mutex
	data []byte // guarded by mu: nil: nothing was written
}

// set makes p the content. A nil p empties the buffer.
func (e *echoBuffer) set(p []byte) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.data = nil; p != nil {
		e.data = append(make([]byte, 0, len(p)), p...)
	}
}

// appendTo appends the content to b. ok is false if nothing was written.
func (e *echoBuffer) appendTo(b []byte) (all []byte, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append(b, e.data...), e.data != nil
}

// length24 returns the length of 3 bytes in b.
func length24(b []byte) uint32 { return uint32(b[0])<<16 | uint32(binary.BigEndian.Uint16(b[1:])) }

// beginWriteBuffer checks the CDB of WRITE BUFFER. A list without bytes changes nothing. BUFFER ID and BUFFER OFFSET mean
// nothing for an echo buffer.
func beginWriteBuffer(_ *Unit, c *Command) bool {
	n := length24(c.CDB[6:])
	switch {
	case c.CDB[1]&saMask != bufferEcho:
		return c.failCDB(1, 4)
	case n > echoCapacity:
		return c.failCDB(6, noField)
	}
	c.DataOut, c.Whole = uint64(n), true
	return true
}

// consumeWriteBuffer executes WRITE BUFFER.
func consumeWriteBuffer(_ *Unit, c *Command, p []byte, _ uint64) bool {
	c.itl.echo.set(p)
	return true
}

// readBuffer executes READ BUFFER. Its descriptor says that there are no other buffers than the echo buffer.
func readBuffer(_ *Unit, c *Command) bool {
	const ownBuffer = 0x01 // EBOS
	b := c.zeroed(4)
	switch c.CDB[1] & saMask {
	case bufferDescriptor:
	case bufferEchoDescriptor:
		b[0] = ownBuffer
		binary.BigEndian.PutUint16(b[2:], echoCapacity)
	case bufferEcho:
		var ok bool
		if b, ok = c.itl.echo.appendTo(b[:0]); !ok {
			return c.fail(condSequence)
		}
	default:
		return c.failCDB(1, 4)
	}
	return c.report(b, length24(c.CDB[6:]))
}
