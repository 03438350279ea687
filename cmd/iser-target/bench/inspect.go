package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/iser-target/iser-target/iscsi/initiator"
)

// A mark is a signature of a partition table, a file system or another format, at a byte offset.
type mark struct {
	offset int64
	bytes  string
	what   string
}

// marks are the formats that Inspect knows by name, from the start of the LUN. Others are found as data.
var marks = []mark{
	{512, "EFI PART", "a GPT partition table"}, {4096, "EFI PART", "a GPT partition table"},
	{1080, "\x53\xef", "an ext2, ext3 or ext4 file system"},
	{0, "XFSB", "an XFS file system"},
	{65600, "_BHRfS_M", "a btrfs file system"},
	{1024, "\x10\x20\xf5\xf2", "an F2FS file system"},
	{3, "NTFS    ", "an NTFS file system"}, {3, "EXFAT   ", "an exFAT file system"},
	{54, "FAT1", "a FAT file system"}, {82, "FAT32", "a FAT file system"},
	{512, "LABELONE", "an LVM physical volume"}, {0, "LABELONE", "an LVM physical volume"},
	{0, "LUKS\xba\xbe", "a LUKS encrypted volume"},
	{4086, "SWAPSPACE2", "a swap area"},
	{4096, "\xfc\x4e\x2b\xa9", "a member of a Linux software RAID"}, {0, "\xfc\x4e\x2b\xa9", "a member of a Linux software RAID"},
	{32769, "CD001", "an ISO 9660 file system"},
	{0, "hsqs", "a SquashFS file system"},
	{0, "QFI\xfb", "a qcow2 image"},
	{510, "\x55\xaa", "an MBR partition table or a boot sector"},
}

const (
	headLen    = 1 << 20 // bytes that are read at each end of the LUN
	sampleLen  = 64 << 10
	samples    = 256  // in what may have data
	maxExtents = 4096 // that GET LBA STATUS returns, one by one
)

// Inspect looks for data on a LUN, and returns what it has found first, or "". It reads both ends of the LUN, and then samples
// of those parts that have storage by GET LBA STATUS, or of the whole LUN if the LUN does not support that.
func Inspect(ctx context.Context, d *initiator.Disk) (found string, err error) {
	size := d.Size()
	head := make([]byte, min(headLen, size))
	if err := readWithin(ctx, d, head, 0); err != nil {
		return "", err
	}
	if found := recognize(head); found != "" {
		return found, nil
	}
	extents, err := mapped(ctx, d)
	if err != nil {
		return "", err
	}
	var all int64
	for _, e := range extents {
		all += e.length
	}
	buf := make([]byte, min(sampleLen, size))
	look := func(off int64) error {
		off = max(min(off, size-int64(len(buf))), 0)
		off -= off % int64(d.BlockSize)
		if err := readWithin(ctx, d, buf, off); err != nil {
			return err
		}
		found = describe(buf, off)
		return nil
	}
	if err := look(size); err != nil || found != "" { // the end
		return found, err
	}
	r := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	for i, n := 0, int64(0); i < samples && all > 0; i++ {
		at := all/samples*int64(i) + r.Int64N(max(all/samples, 1)) // one in each part, at random
		if i == 0 {
			at = 0
		}
		for n = 0; at >= extents[n].length; n++ {
			at -= extents[n].length
		}
		if err := look(extents[n].offset + at); err != nil || found != "" {
			return found, err
		}
	}
	return "", nil
}

// recognize describes the data at the start of a LUN.
func recognize(head []byte) string {
	for _, m := range marks {
		if int(m.offset)+len(m.bytes) <= len(head) && string(head[m.offset:][:len(m.bytes)]) == m.bytes {
			return m.what
		}
	}
	return describe(head, 0)
}

// describe describes data at a byte offset of a LUN, or returns "" if all is zero.
func describe(b []byte, off int64) string {
	at := bytes.IndexFunc(b, func(r rune) bool { return r != 0 })
	if at < 0 {
		return ""
	}
	if i := at - at%512; bytes.HasPrefix(b[i:], []byte(signature)) {
		return fmt.Sprintf("the data of an earlier bench, at byte %d", off+int64(i))
	}
	return fmt.Sprintf("byte %d is not zero: % x ...", off+int64(at), b[at:min(at+8, len(b))])
}

// An extent is a part of a LUN, in bytes.
type extent struct{ offset, length int64 }

// mapped returns the parts of a LUN that have storage; all of it if that is not known.
func mapped(ctx context.Context, d *initiator.Disk) ([]extent, error) {
	all := []extent{{0, d.Size()}}
	if !d.Thin {
		return all, nil
	}
	var list []extent
	for off, n := int64(0), 0; off < d.Size(); n++ {
		if n == maxExtents { // what follows counts as mapped
			return append(list, extent{off, d.Size() - off}), nil
		}
		is, length, err := d.Mapped(ctx, off)
		var status *initiator.StatusError
		if errors.As(err, &status) && status.Sense.Key == initiator.IllegalRequest {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		length = min(length, d.Size()-off)
		if is {
			list = append(list, extent{off, length})
		}
		off += length
	}
	return list, nil
}
