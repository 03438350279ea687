package capture

import (
	"bufio"
	"encoding/binary"
	"io"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
)

// flushLen is the size of the write buffer of a file, in bytes.
const flushLen = 256 << 10

var le = binary.LittleEndian

// A file is in the format of draft-ietf-opsawg-pcapng: a section header, one interface
// whose packets are IP, enhanced packets, and interface statistics at the end. All
// numbers are little-endian, all times have nanoseconds.
type file struct {
	buf     *bufio.Writer // of ng, too: bufio.NewWriter returns a Writer that is large enough
	ng      *pcapgo.NgWriter
	written int64
	w       io.Writer
	err     error // the first one
}

// newFile begins a file.
func newFile(w io.Writer, application, name, description string) *file {
	f := &file{w: w}
	f.buf = bufio.NewWriterSize(f, flushLen)
	f.ng, f.err = pcapgo.NewNgWriterInterface(f.buf,
		pcapgo.NgInterface{Name: name, Description: description, LinkType: layers.LinkTypeRaw},
		pcapgo.NgWriterOptions{SectionInfo: pcapgo.NgSectionInfo{Application: application}})
	return f
}

// Write implements io.Writer below the buffer, to count what w has taken.
func (f *file) Write(b []byte) (int, error) {
	n, err := f.w.Write(b)
	f.written += int64(n)
	return n, err
}

// size returns the length of the file in bytes, buffered ones included.
func (f *file) size() int64 { return f.written + int64(f.buf.Buffered()) }

func (f *file) flush() { f.keep(f.buf.Flush()) }

func (f *file) keep(err error) {
	if f.err == nil {
		f.err = err
	}
}

// packetLen returns the length of the block of a packet of n bytes.
func packetLen(n, comment int) int64 {
	const header, options, trailer = 8 + 20, 8 + 4, 4 // options: flags, end of options
	l := header + n + -n&3 + options + trailer
	if comment > 0 {
		l += 4 + comment + -comment&3
	}
	return int64(l)
}

// packet appends a packet, of which missing bytes at its end are left out. The comment may be empty.
func (f *file) packet(ns int64, d direction, b []byte, missing int, comment string) {
	options := pcapgo.NgPacketOptions{Flags: &pcapgo.NgEpbFlags{Direction: pcapgo.NgEpbFlagDirectionInbound}}
	if d == toInitiator {
		options.Flags.Direction = pcapgo.NgEpbFlagDirectionOutbound
	}
	if comment != "" {
		options.Comments = []string{comment}
	}
	f.keep(f.ng.WritePacketWithOptions(gopacket.CaptureInfo{Timestamp: time.Unix(0, ns), CaptureLength: len(b), Length: len(b) + missing}, b, options))
}

// statistics appends the Interface Statistics Block that ends the file.
// pcapgo.NgWriter.WriteInterfaceStats cannot do that: it leaves the comment out.
func (f *file) statistics(start, end time.Time, packets, dropped uint64, comment string) {
	timestamp := func(b []byte, t time.Time) []byte { // two halves, the high one first
		ns := uint64(t.UnixNano())
		return le.AppendUint32(le.AppendUint32(b, uint32(ns>>32)), uint32(ns))
	}
	b := le.AppendUint32(nil, 5) // type
	b = le.AppendUint32(b, 0)    // length, set below
	b = le.AppendUint32(b, 0)    // interface
	b = timestamp(b, end)
	for _, o := range []struct {
		code  uint16
		value []byte
	}{
		{1, []byte(comment)},
		{2, timestamp(nil, start)},
		{3, timestamp(nil, end)},
		{4, le.AppendUint64(nil, packets)}, // received
		{5, le.AppendUint64(nil, dropped)},
		{0, nil}, // end of options
	} {
		b = le.AppendUint16(b, o.code)
		b = le.AppendUint16(b, uint16(len(o.value)))
		b = append(b, o.value...)
		b = append(b, "\x00\x00\x00"[:-len(b)&3]...)
	}
	n := uint32(len(b) + 4)
	le.PutUint32(b[4:], n)
	_, err := f.buf.Write(le.AppendUint32(b, n))
	f.keep(err)
}
