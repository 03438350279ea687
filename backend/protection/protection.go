// Package protection has the protection information of T10 (SBC-3, section 4.22): 8 bytes that follow each
// logical block from the initiator to the medium and back, and its types 1 and 3.
package protection

import (
	"encoding/binary"
	"fmt"
)

// Len is how many bytes of protection information a block has.
const Len = 8

// A Type is a protection type. It says what the tags are.
type Type uint8

// Types of protection. With type 1, the reference tag has the low 32 bits of the LBA. With type 3, it belongs to the initiator.
const (
	None  Type = 0
	Type1 Type = 1
	Type3 Type = 3
)

// Validate returns an error unless t is None or one of the types of this package.
func (t Type) Validate() error {
	switch t {
	case None, Type1, Type3:
		return nil
	}
	return fmt.Errorf("protection type %d: must be 1 or 3", t)
}

// A Tuple is the protection information of a block: in descending order of bits, 16 of the guard, 16 of the
// application tag, and 32 of the reference tag.
type Tuple uint64

// Unwritten is the Tuple of blocks that were never written, or were unmapped. Nothing checks it.
const Unwritten = ^Tuple(0)

// New returns a Tuple of that guard, application tag and reference tag.
func New(guard, app uint16, ref uint32) Tuple {
	return Tuple(guard)<<48 | Tuple(app)<<32 | Tuple(ref)
}

// Get returns the Tuple in the first Len bytes of b, as it is on the wire.
func Get(b []byte) Tuple { return Tuple(binary.BigEndian.Uint64(b)) }

// Put writes t to the first Len bytes of b.
func (t Tuple) Put(b []byte) { binary.BigEndian.PutUint64(b, uint64(t)) }

// Guard returns the CRC of the block.
func (t Tuple) Guard() uint16 { return uint16(t >> 48) }

// App returns the application tag.
func (t Tuple) App() uint16 { return uint16(t >> 32) }

// Ref returns the reference tag.
func (t Tuple) Ref() uint32 { return uint32(t) }

// WithRef returns t with another reference tag.
func (t Tuple) WithRef(ref uint32) Tuple { return t>>32<<32 | Tuple(ref) }

// A Field is a part of protection information that differs from what it should be; 0: none does.
type Field uint8

// Fields.
const (
	Guard Field = 1 + iota
	App
	Ref
)

// String returns the name of f.
func (f Field) String() string {
	return [...]string{"nothing", "guard", "application tag", "reference tag"}[f]
}

// Checks says which fields are checked.
type Checks uint8

// What is checked.
const (
	CheckGuard Checks = 1 << iota
	CheckApp          // of blocks whose application tag is known
	CheckRef

	CheckNothing Checks = 0
	CheckAll            = CheckGuard | CheckApp | CheckRef
)

// EscapeTag is the application tag that disables checks: see Escapes.
const EscapeTag = 0xffff

// MaxRanges is how many ranges of blocks AppTags have.
const MaxRanges = 4

// A Range is Count blocks from First on, whose application tag is Tag.
type Range struct {
	First, Count uint64
	Tag          uint16
}

// AppTags says what the application tags of blocks are (SBC-3, section 6.5.3). Nothing is known of blocks in no range,
// and a nil AppTags knows nothing.
type AppTags [MaxRanges]Range

// Of returns the application tag of a block, if it is known.
func (a *AppTags) Of(lba uint64) (tag uint16, known bool) {
	if a == nil {
		return freeTag, false
	}
	for i := range a {
		if r := &a[i]; lba-r.First < r.Count {
			return r.Tag, true
		}
	}
	return freeTag, false
}

// freeTag is the application tag of a block that an initiator wrote without protection information, if its tag is not known.
const freeTag = 0

// Generate returns the Tuple of a block that an initiator wrote without one (SBC-3, section 5.32).
func (t Type) Generate(block []byte, lba uint64, a *AppTags) Tuple {
	return t.generate(CRC(block), lba, a)
}

// OfZeros returns the Tuple that Generate returns for a block of zeros.
func (t Type) OfZeros(lba uint64, a *AppTags) Tuple { return t.generate(0, lba, a) }

func (t Type) generate(guard uint16, lba uint64, a *AppTags) Tuple {
	ref := uint32(lba)
	if t == Type3 {
		ref = 0xffffffff
	}
	app, _ := a.Of(lba)
	return New(guard, app, ref)
}

// Escapes reports whether p disables all checks of a block that is read (SBC-3, section 4.22.2).
func (t Type) Escapes(p Tuple) bool {
	return p.App() == EscapeTag && (t != Type3 || p.Ref() == 0xffffffff)
}

// Check compares p with what it should be for the block at lba. It is for data from an initiator, which no tag exempts.
func (t Type) Check(block []byte, p Tuple, lba uint64, c Checks, a *AppTags) Field {
	if c&CheckGuard != 0 && CRC(block) != p.Guard() {
		return Guard
	}
	if c&CheckRef != 0 && t == Type1 && p.Ref() != uint32(lba) {
		return Ref
	}
	if c&CheckApp != 0 && a != nil {
		if tag, known := a.Of(lba); known && p.App() != tag {
			return App
		}
	}
	return 0
}

// CheckRead does what Check does for a block on the medium, unless p disables the checks.
func (t Type) CheckRead(block []byte, p Tuple, lba uint64, c Checks, a *AppTags) Field {
	if t.Escapes(p) {
		return 0
	}
	return t.Check(block, p, lba, c, a)
}

// Next returns the Tuple for the block behind the one that p is for, if both have the same data.
func (t Type) Next(p Tuple) Tuple {
	if t == Type1 {
		return p.WithRef(p.Ref() + 1)
	}
	return p
}
