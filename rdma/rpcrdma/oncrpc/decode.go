package oncrpc

import (
	"errors"
	"math"
)

var (
	// ErrGarbage reports a stream that does not have the form that its reader expects. A server answers
	// it by GARBAGE_ARGS.
	ErrGarbage = errors.New("XDR: the data cannot be decoded")
	// ErrNotEligible reports a chunk that takes the place of data which must stay in the message (RFC
	// 8166, section 6.1).
	ErrNotEligible = errors.New("XDR: a chunk replaces data that must stay in the message")
	// ErrNotReduced reports a reply with data in the message for which a write chunk was available (RFC
	// 8166, section 6.1).
	ErrNotReduced = errors.New("XDR: data is in the message instead of in its write chunk")
)

// A Chunk is data that was moved separately from the message. In a call, Position is its offset in
// the whole stream. In a reply the order counts, and Position is AnyPosition.
type Chunk struct {
	Position uint32
	Data     []byte
}

// AnyPosition is the Position of the chunks of a reply.
const AnyPosition = math.MaxUint32

// A Decoder decodes XDR. After the first error every method returns a zero value, and Err the error.
// The bytes that it returns are those of the message.
type Decoder struct {
	b      []byte
	pos    uint64 // of b in the stream with all chunks in place
	chunks []Chunk
	err    error
}

// Reset makes d decode b, from which chunks were removed, in the order of the stream.
func (d *Decoder) Reset(b []byte, chunks []Chunk) { *d = Decoder{b: b, chunks: chunks} }

// Err returns the first error.
func (d *Decoder) Err() error { return d.err }

// Rest returns the bytes of the message that were not decoded yet.
func (d *Decoder) Rest() []byte { return d.b }

// Fail makes err the error of d, unless it has one. A caller uses it for values that it does not accept.
func (d *Decoder) Fail(err error) {
	if d.err == nil {
		d.err, d.b = err, nil
	}
}

// End checks that the whole stream was decoded, and returns Err.
func (d *Decoder) End() error {
	for i := range d.chunks {
		if c := &d.chunks[i]; c.Position != AnyPosition || len(c.Data) > 0 {
			d.Fail(ErrNotEligible)
		}
	}
	if len(d.b) > 0 {
		d.Fail(ErrGarbage)
	}
	return d.err
}

// take consumes n bytes of the message and their padding.
func (d *Decoder) take(n int) []byte {
	padded := uint64(n) + uint64(Pad(n))
	switch {
	case d.err != nil:
		return nil
	case padded > 0 && len(d.chunks) > 0 && d.pos+padded > uint64(d.chunks[0].Position) &&
		d.chunks[0].Position != AnyPosition:
		d.Fail(ErrNotEligible)
		return nil
	case padded > uint64(len(d.b)):
		d.Fail(ErrGarbage)
		return nil
	}
	v := d.b[:n:n]
	d.b = d.b[padded:]
	d.pos += padded
	return v
}

// Uint32 decodes an unsigned integer.
func (d *Decoder) Uint32() uint32 {
	if v := d.take(4); v != nil {
		return be.Uint32(v)
	}
	return 0
}

// Uint64 decodes an unsigned hyper integer.
func (d *Decoder) Uint64() uint64 {
	if v := d.take(8); v != nil {
		return be.Uint64(v)
	}
	return 0
}

// Bool decodes a boolean, or the flag of optional data.
func (d *Decoder) Bool() bool {
	v := d.Uint32()
	if v > 1 {
		d.Fail(ErrGarbage)
	}
	return v == 1
}

// Fixed decodes opaque data of n bytes.
func (d *Decoder) Fixed(n int) []byte { return d.take(n) }

// Opaque decodes opaque data of at most most bytes.
func (d *Decoder) Opaque(most int) []byte {
	n, ok := d.count(most)
	if !ok {
		return nil
	}
	return d.take(n)
}

// String decodes a string of at most most bytes.
func (d *Decoder) String(most int) string { return string(d.Opaque(most)) }

// count decodes a count that is at most most.
func (d *Decoder) count(most int) (n int, ok bool) {
	v := d.Uint32()
	if d.err == nil && int64(v) > int64(most) {
		d.Fail(ErrGarbage)
	}
	return int(v), d.err == nil
}

// Count decodes the number of elements of an array. size is the least that one element takes in the
// message, in bytes, so that a number that cannot be right allocates nothing.
func (d *Decoder) Count(most, size int) int {
	n, ok := d.count(most)
	if ok && size > 0 && n > len(d.b)/size {
		d.Fail(ErrGarbage)
	}
	if d.err != nil {
		return 0
	}
	return n
}

// Item decodes opaque data of at most most bytes that Encoder.Item has encoded, from the message or
// from a chunk. The chunk of a call may include the padding (RFC 8166, section 3.4.5.2), that of a
// reply must not (section 3.4.6.2).
func (d *Decoder) Item(most int) []byte {
	n, ok := d.count(most)
	if !ok {
		return nil
	}
	padded := uint64(n) + uint64(Pad(n))
	if len(d.chunks) == 0 {
		return d.take(n)
	}
	c := d.chunks[0]
	size := uint64(len(c.Data))
	switch {
	case c.Position != AnyPosition:
		if uint64(c.Position) != d.pos {
			return d.take(n)
		}
		if size != uint64(n) && size != padded {
			d.Fail(ErrGarbage)
			return nil
		}
	case c.Data == nil: // an empty write chunk: the data is in the message
		d.chunks = d.chunks[1:]
		return d.take(n)
	case size == 0 && n > 0:
		d.Fail(ErrNotReduced)
		return nil
	case size != uint64(n):
		d.Fail(ErrGarbage)
		return nil
	}
	d.chunks = d.chunks[1:]
	d.pos += padded
	return c.Data[:n:n]
}
