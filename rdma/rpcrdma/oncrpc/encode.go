package oncrpc

import "math"

// An Item is data that a transport may move separately from the message.
type Item struct {
	At   int // where Data belongs in Encoder.Bytes: behind its count
	Data []byte
}

// An Encoder encodes XDR. The zero value is ready for use.
type Encoder struct {
	b     []byte
	items []Item
	extra int // bytes of all items, padding included
}

var zeros [4]byte

// Reset empties the Encoder and keeps its memory.
func (e *Encoder) Reset() {
	clear(e.items)
	e.b, e.items, e.extra = e.b[:0], e.items[:0], 0
}

// Bytes returns what is encoded, without the data of the items. It is valid until the next call.
func (e *Encoder) Bytes() []byte { return e.b }

// Items returns the items in the order of the stream.
func (e *Encoder) Items() []Item { return e.items }

// Len returns the length in bytes of the stream with all items in place.
func (e *Encoder) Len() int { return len(e.b) + e.extra }

// Uint32 encodes an unsigned integer (RFC 4506, section 4.2).
func (e *Encoder) Uint32(v uint32) { e.b = be.AppendUint32(e.b, v) }

// Uint64 encodes an unsigned hyper integer (section 4.5).
func (e *Encoder) Uint64(v uint64) { e.b = be.AppendUint64(e.b, v) }

// Bool encodes a boolean (section 4.4), also the flag of optional data (section 4.19).
func (e *Encoder) Bool(v bool) {
	if v {
		e.Uint32(1)
	} else {
		e.Uint32(0)
	}
}

// Fixed encodes opaque data whose length both ends know (section 4.9).
func (e *Encoder) Fixed(v []byte) {
	e.b = append(e.b, v...)
	e.b = append(e.b, zeros[:Pad(len(v))]...)
}

// Opaque encodes opaque data with its count (section 4.10). It panics if v has 4 GiB or more.
func (e *Encoder) Opaque(v []byte) {
	e.count(len(v))
	e.Fixed(v)
}

// String encodes a string (section 4.11).
func (e *Encoder) String(v string) {
	e.count(len(v))
	e.b = append(e.b, v...)
	e.b = append(e.b, zeros[:Pad(len(v))]...)
}

// Item encodes the count of opaque data and notes the data itself, which must not change while the
// message is in use. The receiver has to decode it by Decoder.Item.
func (e *Encoder) Item(v []byte) {
	e.count(len(v))
	e.items = append(e.items, Item{len(e.b), v})
	e.extra += len(v) + Pad(len(v))
}

func (e *Encoder) count(n int) {
	if int64(n) > math.MaxUint32 {
		panic("oncrpc: opaque data of 4 GiB or more")
	}
	e.Uint32(uint32(n))
}

// Append appends the whole stream to b, with all items in place.
func (e *Encoder) Append(b []byte) []byte {
	at := 0
	for _, item := range e.items {
		b = append(b, e.b[at:item.At]...)
		b = append(b, item.Data...)
		b = append(b, zeros[:Pad(len(item.Data))]...)
		at = item.At
	}
	return append(b, e.b[at:]...)
}
