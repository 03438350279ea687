package capture

import (
	"errors"
	"fmt"
	"io"
)

// maxBlock bounds the blocks that CopyBlocks takes, in octets: no packet has more than 64
// KiB.
const maxBlock = 1 << 20

// A WriteError is what CopyBlocks could not write.
type WriteError struct{ Err error }

func (e *WriteError) Error() string { return e.Err.Error() }
func (e *WriteError) Unwrap() error { return e.Err }

// CopyBlocks copies a file from r to w, whole blocks only: if r ends anywhere, or fails,
// w has a file nevertheless. It returns how many octets the blocks have that w has taken,
// behind which w may have the begin of one more if it fails, and an error unless r has
// ended behind a block.
func CopyBlocks(w io.Writer, r io.Reader) (written int64, err error) {
	b := make([]byte, 0, maxBlock+flushLen)
	for {
		n, err := r.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		whole, wrong := blocks(b)
		if whole > 0 {
			n, err := w.Write(b[:whole])
			if err != nil {
				whole, _ = blocks(b[:n])
				return written + int64(whole), &WriteError{err}
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

var errNoBlock = errors.New("what comes is no pcapng")

// blocks is how many octets of b are whole blocks.
func blocks(b []byte) (n int, err error) {
	for len(b)-n >= 8 {
		l := le.Uint32(b[n+4:])
		if l < 12 || l > maxBlock || l%4 != 0 {
			return n, fmt.Errorf("%w: a block of %d octets", errNoBlock, l)
		}
		if int(l) > len(b)-n {
			break
		}
		n += int(l)
	}
	return n, nil
}
