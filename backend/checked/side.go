package checked

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/protection"
	"github.com/iser-target/iser-target/rdma/crc32c"
)

// The side file has a header, the map of regions, and the checksums. It is sparse.
const (
	mapAt  = 4096
	sumsAt = 8 << 20

	version = 1
)

// Suffix and ProtectionSuffix are the ends of the names of side files of a file, with checksums and with protection
// information.
const (
	Suffix           = ".sums"
	ProtectionSuffix = ".pi"
)

// A kind says what a side file has.
type kind struct {
	magic   string
	typ     protection.Type
	sumLen  int    // bytes for a block
	content string // in messages
	file    string // in messages
	remedy  string
}

// kinds has all kinds, by protection type.
var kinds = [...]*kind{
	protection.None:  {"ISERSUMS", protection.None, sumLen, "checksums", "file of checksums", Remedy},
	protection.Type1: {"ISERPI-1", protection.Type1, protection.Len, "protection information", "file of protection information", protectionRemedy(1)},
	protection.Type3: {"ISERPI-3", protection.Type3, protection.Len, "protection information", "file of protection information", protectionRemedy(3)},
}

func protectionRemedy(t protection.Type) string {
	return fmt.Sprintf("Restore it. Or accept the data as it is: serve the LUN without protection once, with lun create or lun set TARGET LUN protection=0; then lun set TARGET LUN protection=%d computes it from the data", t)
}

// Config describes a Store.
type Config struct {
	Path string // of the side file
	ID   string // of NewID; the side file has it, too, so that it cannot be that of other data
	// Protection is the type of the protection information that the side file has instead of checksums.
	Protection protection.Type
	// AwaitAppTags: nothing is computed in the background before SetAppTags was called.
	AwaitAppTags bool
	// Blank: the data is all zeros, so a side file that Open creates has nothing to compute.
	Blank bool
	// Create makes Open create the side file if it is absent. The checksums are then computed from the data in the background.
	Create bool
	// Corrupt, which may be nil, is called at most once a second when a block differs from its checksum, with
	// the offset of the block and the number of blocks that were not reported since the last call. It returns soon.
	Corrupt func(off int64, notReported uint64)
	// Rested, from a process that was at rest and has not crashed, says which checksums are trusted. nil: none of
	// regions with a bit.
	Rested *Rested
}

// Rested is what a Store at rest knows besides its files. It is for the process that opens them next.
type Rested struct {
	Stale []Span  `json:"stale,omitempty"` // regions whose checksums are not trusted, ascending
	Bad   []int64 `json:"bad,omitempty"`   // offsets of blocks that are known to be corrupt
}

// A Span is the number of a region and of the last one that follows it.
type Span struct {
	First int64 `json:"first"`
	Last  int64 `json:"last"`
}

// Remedy says what an operator can do without the side file.
const Remedy = "Restore it. Or accept the data as it is: serve the LUN without checksums once, with lun create or lun set TARGET LUN checksums=false; then lun set TARGET LUN checksums=true computes them from the data"

// A sideFile is the side file of a Store.
type sideFile struct {
	path  string
	store backend.Store
	id    [16]byte
	bs    uint32
	kind  *kind
}

// header is the beginning of the side file.
type header struct {
	Magic     [8]byte
	Version   uint32
	BlockSize uint32
	ID        [16]byte
	Size      int64 // of the data, in bytes
	Sum       uint32
}

const headerLen = 44 // bytes of a header

func (h *header) encode() []byte {
	b := make([]byte, sectorLen)
	copy(b, h.Magic[:])
	binary.LittleEndian.PutUint32(b[8:], h.Version)
	binary.LittleEndian.PutUint32(b[12:], h.BlockSize)
	copy(b[16:], h.ID[:])
	binary.LittleEndian.PutUint64(b[32:], uint64(h.Size))
	binary.LittleEndian.PutUint32(b[40:], crc32c.Checksum(b[:40]))
	return b
}

// decode decodes the header of a side file of that kind.
func (k *kind) decode(b []byte) (h header, err error) {
	copy(h.Magic[:], b)
	h.Version = binary.LittleEndian.Uint32(b[8:])
	h.BlockSize = binary.LittleEndian.Uint32(b[12:])
	copy(h.ID[:], b[16:])
	h.Size = int64(binary.LittleEndian.Uint64(b[32:]))
	h.Sum = binary.LittleEndian.Uint32(b[40:])
	switch {
	case string(h.Magic[:]) != k.magic:
		for _, other := range kinds {
			if other != nil && other != k && other.magic == string(h.Magic[:]) && other.typ != protection.None {
				return h, fmt.Errorf("it has protection information of type %d. It was not overwritten: move it away", other.typ)
			}
		}
		return h, fmt.Errorf("it is not a %s. It was not overwritten: move it away", k.file)
	case h.Sum != crc32c.Checksum(b[:headerLen-sumLen]):
		return h, fmt.Errorf("%w: the header. %s", errDamaged, k.remedy)
	case h.Version != version:
		return h, fmt.Errorf("it has version %d, and this program knows %d. Use the program that wrote it. Or: %s", h.Version, version, k.remedy)
	}
	return h, nil
}

// NewID returns an ID for a side file that Open creates. The caller keeps it.
func NewID() string {
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails
	return hex.EncodeToString(id[:])
}

// Open returns a Store on below, which belongs to it from then on. If Open fails, below stays open.
func Open(below backend.Store, c Config) (s *Store, err error) {
	if err := c.Protection.Validate(); err != nil {
		return nil, err
	}
	k := kinds[c.Protection]
	if s, err = k.open(below, c); err != nil {
		return nil, fmt.Errorf("%s %s: %w", k.file, c.Path, err)
	}
	go s.keep()
	return s, nil
}

// OpenMemory does what Open does with a side file in memory. side belongs to the Store from then on. It is one of NewSide,
// which may have got the content of another one. If OpenMemory fails, both stay open.
func OpenMemory(below backend.Store, side *backend.Memory, c Config) (s *Store, err error) {
	if err := c.Protection.Validate(); err != nil {
		return nil, err
	}
	c.Path, c.ID, c.Create, c.Blank = "in memory", memoryID, true, true
	k := kinds[c.Protection]
	if s, err = k.openOn(below, side, c); err != nil {
		return nil, fmt.Errorf("%s %s: %w", k.file, c.Path, err)
	}
	if info := below.Info(); info.AtomicUnit == 0 {
		s.info.AtomicWrite = info.AtomicWrite // no part of a write survives what ends the process, here either
	}
	go s.keep()
	return s, nil
}

// memoryID is the ID of side files in memory, which cannot be those of other data.
const memoryID = "00000000000000000000000000000000"

// NewSide returns a side file in memory for a Store of OpenMemory.
func NewSide(below backend.Info, t protection.Type) (*backend.Memory, error) {
	if err := t.Validate(); err != nil {
		return nil, err
	}
	s, err := backend.OpenMemory(backend.MemoryConfig{Size: kinds[t].sideSize(below.Size, below.BlockSize)})
	if err != nil {
		return nil, err
	}
	return s.(*backend.Memory), nil
}

func (k *kind) open(below backend.Store, c Config) (s *Store, err error) {
	info := below.Info()
	if info.Size > maxSize {
		return nil, fmt.Errorf("the LUN has %d bytes, and %s is possible for up to %d", info.Size, k.content, int64(maxSize))
	}
	st, err := os.Stat(c.Path)
	absent := errors.Is(err, fs.ErrNotExist)
	switch {
	case absent && !c.Create:
		return nil, fmt.Errorf("not found, but the LUN had one. %s", k.remedy)
	case absent && info.ReadOnly:
		return nil, errors.New("not found, and a read-only LUN gets none. Make the LUN writable first")
	case !absent && err != nil:
		return nil, err
	case !absent && st.Size() == 0 && !c.Create:
		return nil, fmt.Errorf("it is empty. %s", k.remedy)
	case !absent && st.Size() != 0 && st.Size() < sumsAt:
		return nil, fmt.Errorf("it has %d bytes, too few for any %s. %s", st.Size(), k.content, k.remedy)
	}
	fc := backend.FileConfig{Path: c.Path, ReadOnly: info.ReadOnly}
	if absent || st.Size() == 0 {
		fc.Size = k.sideSize(info.Size, info.BlockSize)
	}
	store, _, err := backend.OpenFile(fc)
	if err != nil {
		return nil, err
	}
	if s, err = k.openOn(below, store, c); err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return s, nil
}

// openOn returns a Store without its keeper. side is open, and has at least the bytes before the checksums.
func (k *kind) openOn(below, side backend.Store, c Config) (*Store, error) {
	info := below.Info()
	f := &sideFile{path: c.Path, store: side, bs: info.BlockSize, kind: k}
	id, err := hex.DecodeString(c.ID)
	if err != nil || copy(f.id[:], id) != len(f.id) || len(id) != len(f.id) {
		return nil, fmt.Errorf("its identity %q is not one of NewID", c.ID)
	}
	b := make([]byte, sectorLen)
	if err := side.ReadAt(b, 0); err != nil {
		return nil, err
	}
	regions := (info.Size + regionSpan - 1) / regionSpan
	if bytes.Equal(b, make([]byte, sectorLen)) && c.Create && !info.ReadOnly { // a new file, or the end of the process interrupted that
		return f.create(below, c, regions)
	}
	h, err := k.decode(b)
	switch {
	case err != nil:
		return nil, err
	case h.BlockSize != info.BlockSize:
		return nil, fmt.Errorf("it is for blocks of %d bytes, and the LUN has blocks of %d. %s", h.BlockSize, info.BlockSize, k.remedy)
	case h.ID != f.id && c.Create:
		return nil, fmt.Errorf("it is there already, and belongs to other data, or is old: its identity is %x. It was not overwritten: move it away", h.ID)
	case h.ID != f.id:
		return nil, fmt.Errorf("it belongs to other data, or is old: its identity is %x, and that of the LUN's is %s. %s", h.ID, c.ID, k.remedy)
	case h.Size <= 0 || h.Size > maxSize || side.Info().Size < k.sideSize(h.Size, h.BlockSize):
		return nil, fmt.Errorf("it has %d bytes, too few for the %s of %d bytes of data. %s", side.Info().Size, k.content, h.Size, k.remedy)
	}
	s := newStore(below, f, c)
	if err := s.intent.load(regions); err != nil {
		return nil, fmt.Errorf("%w. %s", err, k.remedy)
	}
	if c.Rested != nil {
		s.resume(c.Rested)
	}
	if err := s.adjust(h.Size, info.Size); err != nil {
		return nil, err
	}
	return s, nil
}

// create fills a new side file: all regions are stale. The header is last, so a file with one is complete.
func (f *sideFile) create(below backend.Store, c Config, regions int64) (*Store, error) {
	size := below.Info().Size
	if need := f.kind.sideSize(size, f.bs); f.store.Info().Size != need {
		if err := f.store.(backend.Resizer).Resize(need); err != nil {
			return nil, err
		}
	}
	s := newStore(below, f, c)
	s.intent.grow(regions)
	if !c.Blank {
		if err := s.intent.staleAll(0, regions-1); err != nil {
			return nil, err
		}
	}
	return s, f.writeHeader(size)
}

// writeHeader writes the header, durably.
func (f *sideFile) writeHeader(size int64) error {
	h := header{Version: version, BlockSize: f.bs, ID: f.id, Size: size}
	copy(h.Magic[:], f.kind.magic)
	return f.store.WriteDurable(h.encode(), 0)
}

// sideSize returns the bytes of the side file for that many bytes of data.
func (k *kind) sideSize(size int64, bs uint32) int64 {
	return (sumsAt + size/int64(bs)*int64(k.sumLen) + sectorLen - 1) &^ (sectorLen - 1)
}

// IDOf returns the ID of the side file at path, or an empty string if it is not one or cannot be read.
func IDOf(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	b := make([]byte, headerLen)
	if _, err := f.ReadAt(b, 0); err != nil || !slices.ContainsFunc(kinds[:], func(k *kind) bool { return k != nil && string(b[:len(k.magic)]) == k.magic }) {
		return ""
	}
	return hex.EncodeToString(b[16:32])
}

func (s *Store) getSum(b []byte) uint64 {
	if s.typ != protection.None {
		return binary.BigEndian.Uint64(b)
	}
	return uint64(binary.LittleEndian.Uint32(b))
}

func (s *Store) putSum(b []byte, sum uint64) {
	if s.typ != protection.None {
		binary.BigEndian.PutUint64(b, sum)
		return
	}
	binary.LittleEndian.PutUint32(b, uint32(sum))
}
