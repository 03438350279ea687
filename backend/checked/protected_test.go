package checked

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/backend/protection"
)

// openProtected opens a Store with protection information in memory.
func openProtected(t testing.TB, typ protection.Type, size int64, bs uint32) *Store {
	t.Helper()
	below := memory(t, size, bs)
	side, err := NewSide(below.Info(), typ)
	must(t, "NewSide", err)
	s, err := OpenMemory(below, side, Config{Protection: typ})
	must(t, "OpenMemory", err)
	t.Cleanup(func() { s.Close() })
	return s
}

// eachType runs f for both types and block sizes.
func eachType(t *testing.T, f func(t *testing.T, typ protection.Type, bs uint32)) {
	for _, typ := range []protection.Type{protection.Type1, protection.Type3} {
		for _, bs := range []uint32{512, 4096} {
			t.Run(fmt.Sprintf("type %d, %d", typ, bs), func(t *testing.T) { f(t, typ, bs) })
		}
	}
}

// The contract of backend.Store holds, in memory and in files.
func TestProtectedStore(t *testing.T) {
	eachType(t, func(t *testing.T, typ protection.Type, bs uint32) {
		open := map[string]func(t *testing.T) *Store{
			"memory": func(t *testing.T) *Store { return openProtected(t, typ, testSize, bs) },
			"file": func(t *testing.T) *Store {
				s, _ := openFilesOf(t, typ, t.TempDir(), "", backend.FileConfig{Size: testSize, BlockSize: bs})
				settle(t, s)
				return s
			},
		}
		for name, open := range open {
			t.Run(name, func(t *testing.T) {
				backendtest.Run(t, func(t *testing.T) backend.Store {
					s := open(t)
					t.Cleanup(func() {
						if n := s.Counts(); n.Mismatches != 0 {
							t.Errorf("%d false mismatches", n.Mismatches)
						}
					})
					return s
				})
			})
		}
	})
}

// tag returns the protection information of a block.
func tag(t *testing.T, s *Store, lba int64) protection.Tuple {
	t.Helper()
	p := make([]byte, s.wireLen())
	must(t, "ReadProtected", s.ReadProtected(p, lba*s.bs, protection.CheckNothing))
	return protection.Get(p[s.bs:])
}

// Each way to change a block gives it the protection information that it has to have.
func TestProtectionOfChanges(t *testing.T) {
	eachType(t, func(t *testing.T, typ protection.Type, bs uint32) {
		s := openProtected(t, typ, testSize, bs)
		block := pattern(int(bs), 3)
		ref := func(lba int64) uint32 {
			if typ == protection.Type3 {
				return 0xffffffff
			}
			return uint32(lba)
		}
		want := func(what string, lba int64, want protection.Tuple) {
			t.Helper()
			if got := tag(t, s, lba); got != want {
				t.Errorf("%s: block %d has %016x, want %016x", what, lba, got, want)
			}
			if err := s.ReadAt(make([]byte, bs), lba*s.bs); err != nil {
				t.Errorf("%s: ReadAt: %v", what, err)
			}
		}
		many := bytes.Repeat(block, 9)
		crc := protection.CRC(block)
		want("nothing", 5, protection.Unwritten)
		must(t, "WriteAt", s.WriteAt(many, 3*s.bs))
		for lba := int64(3); lba < 12; lba++ {
			want("WriteAt", lba, protection.New(crc, 0, ref(lba)))
		}
		own := protection.New(crc, 0xbeef, ref(4))
		must(t, "WriteProtected", s.WriteProtected(protected(block, own), 4*s.bs, true))
		want("WriteProtected", 4, own)
		must(t, "Zero", s.Zero(5*s.bs, 2*s.bs))
		want("Zero", 5, protection.New(0, 0, ref(5)))
		must(t, "Discard", s.Discard(7*s.bs, s.bs))
		want("Discard", 7, protection.Unwritten)
		must(t, "Format", s.Format(3*s.bs, 2*s.bs, false))
		want("Format", 4, protection.Unwritten)
		must(t, "Format", s.Format(8*s.bs, s.bs, true))
		want("Format", 8, protection.Unwritten)
		must(t, "WriteAt of a part", s.WriteAt([]byte{9}, 9*s.bs+17))
		part := bytes.Clone(block)
		part[17] = 9
		want("WriteAt of a part", 9, protection.New(protection.CRC(part), 0, ref(9)))
		must(t, "Zero of a part", s.Zero(10*s.bs+1, s.bs-1))
		part = make([]byte, bs)
		part[0] = block[0]
		want("Zero of a part", 10, protection.New(protection.CRC(part), 0, ref(10)))
		want("the neighbour", 11, protection.New(crc, 0, ref(11)))

		must(t, "Resize", s.Resize(11*s.bs))
		must(t, "Resize", s.Resize(testSize))
		want("a block that was cut off", 11, protection.Unwritten)
	})
}

// A long call keeps data and protection information in order, in both directions.
func TestLongProtectedCalls(t *testing.T) {
	eachType(t, func(t *testing.T, typ protection.Type, bs uint32) {
		s := openProtected(t, typ, testSize, bs)
		n := 2<<20/int(bs) + 3
		wire := make([]byte, 0, n*s.wireLen())
		for i := range n {
			wire = append(wire, protected(pattern(int(bs), uint64(i)), protection.New(uint16(i), 0xffff, 0xffffffff))...)
		}
		sent := bytes.Clone(wire)
		must(t, "WriteProtected", s.WriteProtected(wire, 7*s.bs, false))
		if !bytes.Equal(sent, wire) {
			t.Error("WriteProtected has changed what it wrote")
		}
		got := make([]byte, len(wire))
		must(t, "ReadProtected", s.ReadProtected(got, 7*s.bs, protection.CheckAll))
		if !bytes.Equal(got, sent) {
			t.Error("ReadProtected returns something else than WriteProtected wrote")
		}
		for i := range n {
			p := make([]byte, bs)
			must(t, "ReadAt", s.ReadAt(p, int64(7+i)*s.bs))
			if !bytes.Equal(p, pattern(int(bs), uint64(i))) {
				t.Fatalf("block %d has other data", i)
			}
		}
		for _, call := range []error{
			s.ReadProtected(got[:1], 0, protection.CheckAll), s.WriteProtected(got[:int(bs)], 0, false),
			s.ReadProtected(got, testSize-s.bs, protection.CheckAll), s.WriteProtected(got, testSize-s.bs, false),
		} {
			if call == nil {
				t.Error("a call with a wrong length or range succeeds")
			}
		}
	})
}

// A read finds a block or a tag that differs, and names the field, unless it is not to check that.
func TestFaultsOfProtectedBlocks(t *testing.T) {
	eachType(t, func(t *testing.T, typ protection.Type, bs uint32) {
		s := openProtected(t, typ, testSize, bs)
		block := pattern(int(bs), 4)
		good := typ.Generate(block, 6, nil)
		for name, c := range map[string]struct {
			tuple protection.Tuple
			field protection.Field
		}{
			"guard":         {good ^ 1<<48, protection.Guard},
			"reference tag": {good ^ 1, protection.Ref},
			"none":          {good, 0},
			"app tag":       {good ^ 1<<32, protection.App},
			"exempt":        {protection.Unwritten, 0},
		} {
			if typ == protection.Type3 && c.field == protection.Ref {
				c.field = 0
			}
			must(t, "WriteProtected", s.WriteProtected(protected(block, c.tuple), 6*s.bs, false))
			s.SetAppTags(&protection.AppTags{{First: 0, Count: 7, Tag: 0}})
			p := make([]byte, s.wireLen())
			for checks := protection.CheckNothing; checks <= protection.CheckAll; checks++ {
				err := s.ReadProtected(p, 6*s.bs, checks)
				bad, _ := errors.AsType[*backend.CorruptError](err)
				found := c.field == protection.Guard && checks&protection.CheckGuard != 0 || c.field == protection.Ref && checks&protection.CheckRef != 0 ||
					c.field == protection.App && checks&protection.CheckApp != 0
				switch {
				case found && (bad == nil || bad.Field != c.field || bad.Offset != 6*s.bs):
					t.Errorf("%s, checks %b: %v", name, checks, err)
				case !found && (err != nil || !bytes.Equal(p, protected(block, c.tuple))):
					t.Errorf("%s, checks %b: %v, %x", name, checks, err, p[bs:])
				}
			}
			if err := s.ReadAt(make([]byte, 3*bs), 5*s.bs); (c.field != 0) != errors.Is(err, backend.ErrCorrupt) {
				t.Errorf("%s: ReadAt: %v", name, err)
			}
			// An application tag is no damage: nobody knows which of the two is wrong.
			damaged := c.field == protection.Guard || c.field == protection.Ref
			if n := s.Counts(); (n.Bad != 0) != damaged {
				t.Errorf("%s: %d bad blocks", name, n.Bad)
			}
			if bad, err := s.Scrub(make([]byte, 3*bs), 5*s.bs); err != nil || (bad != 0) != damaged {
				t.Errorf("%s: Scrub: %d, %v", name, bad, err)
			}
			if s.SetAppTags(nil); c.field == protection.App {
				must(t, "ReadAt without a known tag", s.ReadAt(make([]byte, 3*bs), 5*s.bs))
			}
		}
	})
}

// Damage below, of data or of the side file, is found, and a write mends it.
func TestDamageBelowProtection(t *testing.T) {
	eachType(t, func(t *testing.T, typ protection.Type, bs uint32) {
		dir := t.TempDir()
		c := backend.FileConfig{Size: testSize, BlockSize: bs}
		s, id := openFilesOf(t, typ, dir, "", c)
		block := pattern(int(bs), 5)
		must(t, "WriteAt", s.WriteAt(bytes.Repeat(block, 3), 20*s.bs))
		settle(t, s)
		at := s.sumAt(22 * s.bs)
		must(t, "Close", s.Close())
		flip(t, dir, 21*int64(bs)+100)
		f, err := os.OpenFile(filepath.Join(dir, "lun.img"+Suffix), os.O_RDWR, 0)
		must(t, "open", err)
		_, err = f.WriteAt([]byte{0x55, 0xaa}, at)
		must(t, "write", errors.Join(err, f.Close()))
		c.Size = 0
		s, _ = openFilesOf(t, typ, dir, id, c)
		must(t, "ReadAt of a sound block", s.ReadAt(make([]byte, bs), 20*s.bs))
		for lba := int64(21); lba <= 22; lba++ {
			err := s.ReadAt(make([]byte, bs), lba*s.bs)
			if bad, ok := errors.AsType[*backend.CorruptError](err); !ok || bad.Offset != lba*s.bs || bad.Field != protection.Guard {
				t.Errorf("block %d: %v", lba, err)
			}
		}
		if err := s.Inspect(); !errors.Is(err, backend.ErrCorrupt) || !strings.Contains(err.Error(), "2 blocks") {
			t.Errorf("Inspect: %v", err)
		}
		must(t, "WriteAt", s.WriteAt(bytes.Repeat(block, 2), 21*s.bs))
		must(t, "ReadAt of mended blocks", s.ReadAt(make([]byte, 3*bs), 20*s.bs))
	})
}

// A file of before gets protection information from its data, and a side file of another kind is refused.
func TestProtectionOfOldData(t *testing.T) {
	eachType(t, func(t *testing.T, typ protection.Type, bs uint32) {
		dir := t.TempDir()
		c := backend.FileConfig{Path: filepath.Join(dir, "lun.img"), Size: testSize, BlockSize: bs}
		f, _, err := backend.OpenFile(c)
		must(t, "OpenFile", err)
		block := pattern(int(bs), 6)
		must(t, "WriteAt", f.WriteAt(block, 30*int64(bs)))
		must(t, "Close", f.Close())
		c.Size = 0
		s, id := openFilesOf(t, typ, dir, "", c)
		settle(t, s)
		if got, want := tag(t, s, 30), typ.Generate(block, 30, nil); got != want {
			t.Errorf("old data has %016x, want %016x", got, want)
		}
		if got := tag(t, s, 31); got != protection.Unwritten {
			t.Errorf("a hole has %016x", got)
		}
		must(t, "Close", s.Close())
		f, _, err = backend.OpenFile(c)
		must(t, "OpenFile", err)
		defer f.Close()
		for _, other := range types {
			if other == typ {
				continue
			}
			_, err := Open(f, Config{Path: c.Path + Suffix, ID: id, Protection: other})
			if want := "move it away"; err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("type %d: %v", other, err)
			}
		}
		if IDOf(c.Path+Suffix) != id {
			t.Error("IDOf does not know the side file")
		}
	})
}

// What initiators write without protection information gets the application tag that is known, and so does a block of a stale
// region, even if the tags become known after the Store has opened.
func TestAppTagsOfOldData(t *testing.T) {
	eachType(t, func(t *testing.T, typ protection.Type, bs uint32) {
		dir := t.TempDir()
		c := backend.FileConfig{Path: filepath.Join(dir, "lun.img"), Size: testSize, BlockSize: bs}
		below, _, err := backend.OpenFile(c)
		must(t, "OpenFile", err)
		block := pattern(int(bs), 6)
		must(t, "WriteAt", below.WriteAt(bytes.Repeat(block, 2), 30*int64(bs)))
		s, err := Open(below, Config{Path: c.Path + Suffix, ID: NewID(), Create: true, Protection: typ, AwaitAppTags: true})
		must(t, "Open", err)
		defer s.Close()
		s.wakeKeeper()
		time.Sleep(20 * time.Millisecond)
		if n := s.Counts(); n.Adopted != 0 || n.Stale == 0 {
			t.Errorf("%d blocks were adopted before the tags are known, %d bytes are stale", n.Adopted, n.Stale)
		}
		s.SetAppTags(&protection.AppTags{{First: 0, Count: 31, Tag: 0x1111}, {First: 31, Count: 5, Tag: 0x2222}})
		settle(t, s)
		must(t, "WriteAt", s.WriteAt(bytes.Repeat(block, 2), 35*s.bs))
		must(t, "Zero", s.Zero(34*s.bs, s.bs))
		for lba, want := range map[int64]uint16{30: 0x1111, 31: 0x2222, 33: 0xffff, 34: 0x2222, 35: 0x2222, 36: 0} {
			if got := tag(t, s, lba); got.App() != want {
				t.Errorf("block %d has %016x, want application tag %04x", lba, got, want)
			}
		}
	})
}

// ENOSPC of the side file ends the write with that error. The block has protection information of what it is then, and
// nothing else is lost.
func TestFullSideFile(t *testing.T) {
	below := memory(t, testSize, 512)
	side := &backendtest.Faulty{Store: memory(t, kinds[1].sideSize(testSize, 512), 512)}
	s, err := openOn(below, resizable{side}, Config{ID: NewID(), Create: true, Blank: true, Protection: protection.Type1})
	must(t, "openOn", err)
	go s.keep()
	defer s.Close()
	old := protected(pattern(512, 1), protection.New(protection.CRC(pattern(512, 1)), 0x77, 1))
	must(t, "WriteProtected", s.WriteProtected(old, 512, false))
	side.Fail(backendtest.WriteAt, backend.ErrNoSpace)
	if err := s.WriteAt(pattern(512, 2), 2*512); !errors.Is(err, backend.ErrNoSpace) {
		t.Errorf("WriteAt: %v", err)
	}
	side.Fail(backendtest.WriteAt, nil)
	settle(t, s)
	must(t, "ReadAt", s.ReadAt(make([]byte, 4*512), 0))
	if got, want := tag(t, s, 1), protection.Get(old[512:]); got != want {
		t.Errorf("the neighbour has %016x, want %016x", got, want)
	}
	if n := s.Counts(); n.Mismatches != 0 {
		t.Errorf("%d mismatches", n.Mismatches)
	}
}

// A sync that fails in the side file is as final as one of the data: tags of initiators may be lost.
func TestSyncOfSideFile(t *testing.T) {
	boom := errors.New("boom")
	for name, typ := range types {
		side := &backendtest.Faulty{Store: memory(t, kinds[typ].sideSize(testSize, 512), 512)}
		s, err := openOn(memory(t, testSize, 512), resizable{side}, Config{ID: NewID(), Create: true, Blank: true, Protection: typ})
		must(t, "openOn", err)
		must(t, "WriteAt", s.WriteAt(pattern(512, 1), 0))
		side.Fail(backendtest.Sync, boom)
		if err := s.Sync(); errors.Is(err, boom) != (typ != protection.None) {
			t.Errorf("%s: Sync: %v", name, err)
		}
		side.Fail(backendtest.Sync, nil)
		side.Fail(backendtest.WriteDurable, boom)
		if err := s.WriteDurable(pattern(512, 2), 0); errors.Is(err, boom) != (typ != protection.None) {
			t.Errorf("%s: WriteDurable: %v", name, err)
		}
	}
}
