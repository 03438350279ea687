package lun

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

// Every backend does what the pages B0h and B2h and READ CAPACITY(16) say about provisioning: it
// gives back a granule, and nothing smaller, and GET LBA STATUS reports what takes space.
func TestProvisioningIsTrue(t *testing.T) {
	const size = 16 << 20
	for _, s := range []struct {
		name  string
		open  func(t *testing.T) (s backend.Store, taken func() int64) // taken: bytes on the medium; nil: unknown
		holes bool                                                     // the backend knows them
	}{
		{"memory", func(t *testing.T) (backend.Store, func() int64) {
			m, err := backend.OpenMemory(backend.MemoryConfig{Size: size})
			if err != nil {
				t.Fatal(err)
			}
			return m, func() int64 {
				used, _, err := backend.Usage(m)
				if err != nil {
					t.Error(err)
				}
				return used
			}
		}, true},
		{"file", func(t *testing.T) (backend.Store, func() int64) {
			path := filepath.Join(t.TempDir(), "lun.img")
			f, _, err := backend.OpenFile(backend.FileConfig{Path: path, Size: size})
			if err != nil {
				t.Fatal(err)
			}
			return f, func() int64 { return bytesOnMedium(t, path) }
		}, true},
		{"block", func(t *testing.T) (backend.Store, func() int64) {
			device, file := backendtest.LoopDevice(t, make([]byte, size), 512, false)
			b, err := backend.OpenBlock(backend.BlockConfig{Path: device})
			if err != nil {
				t.Fatal(err)
			}
			return b, func() int64 { return bytesOnMedium(t, file) }
		}, false},
	} {
		t.Run(s.name, func(t *testing.T) {
			store, taken := s.open(t)
			r := &rig{t: t, inv: NewInventory()}
			var err error
			if r.unit, err = New(store, Options{Identity: testIdentity}); err != nil {
				t.Fatal(err)
			}
			if err := r.inv.Add(0, r.unit); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { r.inv.Close() })
			r.nexus = r.login()

			if in := r.good("9e 10 0000000000000000 00000020 00 00", nil); in[14]&0xc0 != 0xc0 {
				t.Fatalf("READ CAPACITY(16): % x, want LBPME and LBPRZ", in)
			}
			want := unhex("00 b2 0004 07 e4 02 00") // THRESHOLD EXPONENT 7; LBPU, LBPWS, LBPWS10, LBPRZ; thin
			if _, _, err := backend.Usage(store); err != nil {
				want[4] = 0 // no thresholds
			}
			wantBytes(t, r.good("12 01 b2 0040 00", nil), want)
			limits := r.good("12 01 b0 0040 00", nil)
			be := binary.BigEndian
			granule, alignment := uint64(be.Uint32(limits[28:])), uint64(be.Uint32(limits[32:])&^(1<<31))
			if want := uint64(store.Info().DiscardGranularity / 512); granule != want || granule == 0 {
				t.Fatalf("OPTIMAL UNMAP GRANULARITY %d, want %d", granule, want)
			}
			if limits[32]&0x80 == 0 {
				t.Fatal("UGAVALID is not set")
			}
			if n := be.Uint32(limits[20:]); n < size/512 {
				t.Errorf("MAXIMUM UNMAP LBA COUNT %d", n)
			}

			const granules = 8
			at := func(n uint64) uint64 { return alignment + n*granule }
			ones := bytes.Repeat([]byte{0xff}, int(granules*granule*512))
			unmap := func(lba, n uint64) {
				t.Helper()
				r.good("42 00 00000000 00 0018 00", unhex(fmt.Sprintf("0016 0010 00000000 %016x %08x 00000000", lba, n)))
			}
			mapped := func(lba uint64) (yes bool, n uint64) {
				t.Helper()
				in := r.good(fmt.Sprintf("9e 12 %016x 00000018 00 00", lba), nil)
				return in[20] == statusMapped, uint64(be.Uint32(in[16:]))
			}
			synced := func() int64 {
				t.Helper()
				r.good(extentCDB(0x35, 0, 0, 0), nil)
				return taken()
			}
			r.good(extentCDB(0x8a, 0, at(0), granules*granule), ones)
			full := synced()

			unmap(at(1), granule)
			r.good(extentCDB(0x93, wsUnmap, at(3), granule), make([]byte, 512))
			if got := full - synced(); got < int64(granule*512) {
				t.Errorf("two granules were unmapped, and %d bytes given back", got)
			}
			unmap(at(5), granule-1)                                       // a granule except one block
			r.good(extentCDB(0x93, 0, at(6), granule), make([]byte, 512)) // zeros that are to take space
			copy(ones[1*granule*512:], make([]byte, granule*512))
			copy(ones[3*granule*512:], make([]byte, granule*512))
			copy(ones[5*granule*512:], make([]byte, (granule-1)*512))
			copy(ones[6*granule*512:], make([]byte, granule*512))
			if !bytes.Equal(r.good(extentCDB(0x88, 0, at(0), granules*granule), nil), ones) {
				t.Error("the medium differs")
			}
			for n := range uint64(granules) {
				unmapped := n == 1 || n == 3
				if yes, blocks := mapped(at(n)); s.holes && (yes == unmapped || unmapped && blocks != granule) {
					t.Errorf("granule %d: mapped %t, for %d blocks", n, yes, blocks)
				} else if !s.holes && !yes {
					t.Errorf("granule %d is not mapped, as if the backend knew", n)
				}
			}
		})
	}
}

// bytesOnMedium returns the space that a file takes on the medium.
func bytesOnMedium(t *testing.T, path string) int64 {
	t.Helper()
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}
