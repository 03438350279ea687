package wire

// Sizes of a Send in bytes that Private can announce (RFC 8797, section 4.2).
const (
	MinInline = 1024
	MaxInline = 256 * 1024

	// PrivateLen is the size of encoded private data in bytes.
	PrivateLen = 8
)

const (
	privateFormat     = 0xf6ab0e18
	privateVersion    = 1
	flagInvalidate    = 0x01 // R
	privateVersionOff = 4
)

// Private is what a peer says of itself when it connects (RFC 8797, section 4).
//
//	0                 4         5         6           7
//	+-----------------+---------+---------+-----------+--------------+
//	|   f6 ab 0e 18   |    1    |       R | send size | receive size |
//	+-----------------+---------+---------+-----------+--------------+
type Private struct {
	Invalidate bool // R: supports remote invalidation
	Send       int  // the longest Send that the peer transmits, in bytes
	Receive    int  // the longest Send that the peer accepts, in bytes
}

// DefaultPrivate returns what holds for a peer that announces nothing (RFC 8797, section 5.1).
func DefaultPrivate() Private { return Private{Send: MinInline, Receive: MinInline} }

// Append encodes p to the end of b. Sizes are rounded down to a multiple of 1024, and up to 1024.
func (p Private) Append(b []byte) []byte {
	b = be.AppendUint32(b, privateFormat)
	flags := byte(0)
	if p.Invalidate {
		flags = flagInvalidate
	}
	return append(b, privateVersion, flags, encodeInline(p.Send), encodeInline(p.Receive))
}

func encodeInline(n int) byte { return byte(min(max(n, MinInline), MaxInline)/1024 - 1) }

func decodeInline(b byte) int { return (int(b) + 1) * 1024 }

// FindPrivate searches the private data of a startup frame, because other layers may put theirs in
// front (RFC 8797, section 5.2). ok says whether it has found a Private of version 1. If not, the
// result is DefaultPrivate.
func FindPrivate(b []byte) (p Private, ok bool) {
	for ; len(b) >= PrivateLen; b = b[1:] {
		if be.Uint32(b) == privateFormat && b[privateVersionOff] == privateVersion {
			return Private{b[5]&flagInvalidate != 0, decodeInline(b[6]), decodeInline(b[7])}, true
		}
	}
	return DefaultPrivate(), false
}

// IsPrivate reports whether the private data b of a startup frame is a Private of version 1 and nothing else. Unlike
// FindPrivate it takes no data of another protocol for one, so a server of several protocols can tell them apart.
func IsPrivate(b []byte) bool {
	return len(b) == PrivateLen && be.Uint32(b) == privateFormat && b[privateVersionOff] == privateVersion
}

// Threshold returns the longest Send in bytes from the peer that announces sender to the one that
// announces receiver (RFC 8797, section 4.2).
func Threshold(sender, receiver Private) int { return min(sender.Send, receiver.Receive) }
