// Package llp reads and writes the byte stream below a protocol of messages. RFC 5040 calls that
// stream the LLP, the lower layer protocol; it is a TCP connection.
//
// A Window reads: it holds what has come and is not consumed, and moves long data
// from the socket straight to where it belongs. A Gather writes: it collects
// headers and data, and hands them to the socket in few system calls.
package llp

import (
	"fmt"
	"io"
	"math"
	"math/bits"
)

const (
	// WindowLen is the size of a Window in bytes after Grow, unless a longer prefix came.
	WindowLen = 64 << 10

	// firstLen is the size of a Window until Grow is called, unless a message requires more.
	firstLen = 1 << 10

	// LongData is the number of bytes of payload above which data is read straight
	// to where it belongs. Below, one more copy is cheaper than one more system call: so it is
	// for FPDUs that fill segments of 9000 bytes.
	LongData = 16 << 10

	// FirstLong takes the place of LongData until Grow is called, so that a Window stays small.
	FirstLong = 8 << 10

	// thinRead is the number of bytes that are read at once while long data comes:
	// enough for headers and small messages, little enough to copy.
	thinRead = 2 << 10
)

// ErrTruncated reports a stream that ends inside a message.
var ErrTruncated = fmt.Errorf("the stream ends inside a message: %w", io.ErrUnexpectedEOF)

// A Window is the part of a stream that has been read and not consumed. It belongs
// to one goroutine at a time.
type Window struct {
	// Thin says that long data is coming: Fill reads little more than it has to, so
	// that the data is still in the socket when Read is called.
	Thin bool
	// Inside says that the message has begun although the Window holds nothing of
	// it. The end of the stream is then ErrTruncated and not io.EOF.
	Inside bool

	// Patience, if not nil, is asked before Fill waits for so many bytes. If it returns an error, so does Fill. The Window
	// then keeps little memory: what does not fit stays in the socket until the whole message has come.
	Patience func(missing int) error

	read func([]byte) (int, error)
	both func(p, q []byte) (int, error) // see Scatter
	buf  []byte                         // buf[r:w] is unread
	r, w int
	rest int // bytes of the present message after its header, see Unread

	missing int // see Missing
}

// Init allocates the Window and starts it with prefix, which has been read already.
// All else comes from read, which is like the Read of an io.Reader.
func (w *Window) Init(read func([]byte) (int, error), prefix []byte) {
	w.read = read
	w.Preload(prefix)
}

// Scatter makes Read bring what comes after long data to the Window at once: headers and small messages cost no system call of their own then. both reads to p, and to q
// what comes after that, and is otherwise like the read of Init.
func (w *Window) Scatter(both func(p, q []byte) (int, error)) { w.both = both }

// Preload puts prefix, at most WindowLen bytes, into an empty Window.
func (w *Window) Preload(prefix []byte) {
	w.grow(max(firstLen, len(prefix)))
	w.r, w.w = 0, copy(w.buf, prefix)
}

// Grow gives the Window its full size, for a peer that has shown who it is. The size is the most
// that one read returns.
func (w *Window) Grow() { w.grow(WindowLen) }

// grow makes the Window at least n bytes long.
func (w *Window) grow(n int) {
	if n <= len(w.buf) {
		return
	}
	var old []byte
	if w.buf != nil {
		old = w.buf[w.r:w.w]
	}
	w.buf = make([]byte, max(firstLen, 1<<bits.Len(uint(n-1))))
	w.r, w.w = 0, copy(w.buf, old)
}

// Len returns how many bytes Peek and Take can return without a Fill.
func (w *Window) Len() int { return w.w - w.r }

// Peek returns the next n bytes, which Fill has read. They stay valid until the next Fill or Read.
func (w *Window) Peek(n int) []byte { return w.buf[w.r:][:n:n] }

// Take returns and consumes the next n bytes, which Fill has read. They stay valid like
// those of Peek.
func (w *Window) Take(n int) []byte {
	b := w.buf[w.r:][:n:n]
	w.r += n
	return b
}

// TakeHeader takes the header of a message of which rest more bytes follow. Read and
// Skip count them down.
func (w *Window) TakeHeader(n, rest int) []byte {
	w.rest = rest
	return w.Take(n)
}

// TakeTrailer takes the last bytes of a message.
func (w *Window) TakeTrailer(n int) []byte {
	w.rest = 0
	return w.Take(n)
}

// Fill reads until Peek and Take can return n bytes; n is at most WindowLen. io.EOF
// means that the stream has ended between two messages.
func (w *Window) Fill(n int) error {
	if w.w-w.r >= n {
		return nil
	}
	return w.fill(n)
}

// Await asks Patience as Fill does. n may exceed WindowLen.
func (w *Window) Await(n int) error {
	if w.Patience == nil || w.Len() >= n {
		return nil
	}
	w.missing = n - w.Len()
	err := w.Patience(w.missing)
	if (err != nil || w.Len() == 0) && len(w.buf) > firstLen {
		old := w.buf[w.r:w.w]
		w.buf = nil
		w.Preload(old)
	}
	return err
}

// Missing returns how many bytes Fill wanted when Patience ended it.
func (w *Window) Missing() int { return w.missing }

func (w *Window) fill(n int) error {
	if err := w.Await(n); err != nil {
		return err
	}
	if w.grow(n); w.r == w.w {
		w.r, w.w = 0, 0
	} else if len(w.buf)-w.r < max(n, thinRead) {
		w.w = copy(w.buf, w.buf[w.r:w.w])
		w.r = 0
	}
	for w.w-w.r < n {
		end := len(w.buf)
		if w.Thin {
			end = min(end, max(w.r+n, w.w+thinRead))
		}
		m, err := w.read(w.buf[w.w:end])
		w.w += m
		switch {
		case m > 0 || err == nil:
		case err == io.EOF && (w.Inside || w.w > w.r):
			return ErrTruncated
		default:
			return err
		}
	}
	return nil
}

// Read moves bytes of the present message to p: those of the Window, or if it is
// empty what one read returns. p is not longer than the rest of the message. It implements io.Reader.
func (w *Window) Read(p []byte) (n int, err error) {
	if w.r < w.w {
		n = copy(p, w.buf[w.r:w.w])
		w.r += n
		w.rest -= n
		return n, nil
	}
	if w.both != nil && len(p) > 0 && len(w.buf) >= thinRead {
		w.r, w.w = 0, 0
		ahead := w.buf
		if w.Thin {
			ahead = ahead[:thinRead]
		}
		n, err = w.both(p, ahead)
		w.w = max(n-len(p), 0)
		n -= w.w
	} else {
		n, err = w.read(p)
	}
	if n > 0 {
		err = nil
	} else if err == io.EOF {
		err = ErrTruncated
	}
	w.rest -= n
	return n, err
}

// Drop consumes n bytes of the present message without a copy: those of the Window, and the rest by drop, which drops up to so many bytes
// of the stream before they are read, and returns how many.
func (w *Window) Drop(n int, drop func(n int) (int, error)) error {
	k := min(n, w.Len())
	w.r += k
	for w.rest -= k; k < n; {
		m, err := drop(n - k)
		k += m
		w.rest -= m
		switch {
		case m > 0:
		case err == io.EOF:
			return ErrTruncated
		case err != nil:
			return err
		}
	}
	return nil
}

// Skip consumes n bytes of the present message.
func (w *Window) Skip(n int) error {
	w.Thin = false
	for n > 0 {
		k := min(n, WindowLen/2)
		if err := w.Fill(k); err != nil {
			return err
		}
		w.r += k
		w.rest -= k
		n -= k
	}
	return nil
}

// Lose forgets what is unread. Where messages begin is not known from then on.
func (w *Window) Lose() { w.r, w.w, w.rest = 0, 0, math.MaxInt }

// Unread reports where messages begin, to a net.Conn that asks from within its Read: unread are the
// last bytes that it has returned. The first rest bytes, of these and of what follows them, belong
// to a message whose header has been consumed. rest is math.MaxInt if that is not known.
func (w *Window) Unread() (unread []byte, rest int) { return w.buf[w.r:w.w], w.rest }
