package client

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"testing"
)

// copyBlocks writes whole blocks only, wherever the file is cut off.
func TestCopyBlocksWritesWholeBlocks(t *testing.T) {
	var file bytes.Buffer
	ends := map[int]bool{0: true}
	for _, n := range []uint32{12, 28, 100} {
		b := make([]byte, n)
		binary.LittleEndian.PutUint32(b[4:], n)
		file.Write(b)
		ends[file.Len()] = true
	}
	for n := range file.Len() + 1 {
		var out bytes.Buffer
		written, err := copyBlocks(&out, io.LimitReader(&trickle{file.Bytes()}, int64(n)))
		if !ends[out.Len()] || written != int64(out.Len()) || (err == nil) != ends[n] || ends[n] && out.Len() != n {
			t.Errorf("of %d bytes %d are copied, %d counted: %v", n, out.Len(), written, err)
		}
	}
	for _, n := range []uint32{0, 8, 13, maxBlock + 4} {
		b := make([]byte, 16)
		binary.LittleEndian.PutUint32(b[4:], n)
		if _, err := copyBlocks(io.Discard, bytes.NewReader(b)); !errors.Is(err, errNoBlock) {
			t.Errorf("block of %d bytes: %v", n, err)
		}
	}
	var full *writeError
	for n := range file.Len() {
		written, err := copyBlocks(&failing{n}, bytes.NewReader(file.Bytes()))
		if !errors.As(err, &full) || !ends[int(written)] || written > int64(n) || written < int64(n-100) {
			t.Errorf("room for %d bytes, %d are counted: %v", n, written, err)
		}
	}
}

// A trickle is a Reader that returns a few bytes at a time.
type trickle struct{ b []byte }

func (f *trickle) Read(p []byte) (int, error) {
	n := copy(p[:min(len(p), 5)], f.b)
	f.b = f.b[n:]
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

// A failing is a Writer that takes room bytes.
type failing struct{ room int }

func (f *failing) Write(b []byte) (int, error) {
	n := min(len(b), f.room)
	f.room -= n
	if n < len(b) {
		return n, io.ErrShortWrite
	}
	return n, nil
}

func FuzzCopyBlocks(f *testing.F) {
	f.Add([]byte("\x0a\x0d\x0d\x0a\x0c\x00\x00\x00\x0c\x00\x00\x00\x06\x00\x00\x00\x10\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var out bytes.Buffer
		n, err := copyBlocks(&out, bytes.NewReader(b))
		if int(n) != out.Len() || !bytes.HasPrefix(b, out.Bytes()) || err == nil && out.Len() != len(b) {
			t.Errorf("%d bytes of %d, %v", n, len(b), err)
		}
	})
}
