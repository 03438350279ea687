package client

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// maxBlock bounds the blocks of a pcapng file that copyBlocks takes, in bytes. No packet
// has more than 64 KiB.
const maxBlock = 1 << 20

// bufferLen is the size of the buffer of copyBlocks beyond one block, in bytes.
const bufferLen = 256 << 10

// A writeError is an error of the Writer of copyBlocks.
type writeError struct{ error }

// copyBlocks copies a pcapng file from r to w. It writes whole blocks only, so that w has a
// valid file wherever r ends or fails. It returns the length in bytes of the blocks that w
// has taken; if w fails, it may have the beginning of one more block. The error is a
// *writeError if w fails. It is nil only if r ends at the end of a block.
func copyBlocks(w io.Writer, r io.Reader) (written int64, err error) {
	b := make([]byte, 0, maxBlock+bufferLen)
	for {
		n, err := r.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		whole, wrong := blocks(b)
		if whole > 0 {
			n, err := w.Write(b[:whole])
			if err != nil {
				whole, _ = blocks(b[:n])
				return written + int64(whole), &writeError{err}
			}
			written += int64(n)
			b = b[:copy(b, b[whole:])]
		}
		switch {
		case wrong != nil:
			return written, wrong
		case err == io.EOF && len(b) > 0:
			return written, io.ErrUnexpectedEOF
		case err == io.EOF:
			return written, nil
		case err != nil:
			return written, err
		}
	}
}

var errNoBlock = errors.New("the data is not pcapng")

// blocks returns the length of the whole blocks that b begins with, in bytes.
func blocks(b []byte) (n int, err error) {
	for len(b)-n >= 8 {
		l := binary.LittleEndian.Uint32(b[n+4:])
		if l < 12 || l > maxBlock || l%4 != 0 {
			return n, fmt.Errorf("%w: a block of %d bytes", errNoBlock, l)
		}
		if int(l) > len(b)-n {
			break
		}
		n += int(l)
	}
	return n, nil
}
