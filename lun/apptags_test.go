package lun

import (
	"bytes"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/backend/protection"
)

const (
	controlATMPE = "0a 0a 02 10 00 e0 0000 ffff 0000 " // ATO, TAS, ATMPE
	controlATO   = "0a 0a 02 10 00 c0 0000 ffff 0000 "
)

// tagPage returns an Application Tag mode page: LAST, tag, LBA and count of four descriptors (SBC-3, section 6.5.3).
func tagPage(descriptors ...[4]uint64) string {
	s := "4a 02 006c 000000000000000000000000 "
	for i := range 4 {
		var d [4]uint64
		if i < len(descriptors) {
			d = descriptors[i]
		}
		s += fmt.Sprintf("%02x 0000000000 %04x %016x %016x ", d[0], d[1], d[2], d[3])
	}
	return s
}

// wantTagCheck checks for LOGICAL BLOCK APPLICATION TAG CHECK FAILED.
func wantTagCheck(t testing.TB, what string, res result, lba uint32) {
	t.Helper()
	wantCheck(t, what, res, 2, lba)
}

// With ATMPE, the blocks of the Application Tag mode page have the tags that it says: other tags are refused by the values of
// the protect fields that check them, and writes without protection information get them. Other initiators
// are notified (SBC-4, sections 4.21.3 and 6.5.3).
func TestApplicationTags(t *testing.T) {
	eachProtection(t, func(t *testing.T, r *rig, bs int) {
		other := r.login()
		blocks := r.unit.blocks.Load()
		page := tagPage([4]uint64{0, 0x1111, 0, 20}, [4]uint64{0, 0x7777, 3, 0}, [4]uint64{0x80, 0x2222, 20, blocks - 21}) // the last block is in none
		with := func(app uint16) func(block []byte, lba uint64) protection.Tuple {
			return func(block []byte, lba uint64) protection.Tuple {
				return protection.New(protection.CRC(block), app, uint32(lba))
			}
		}
		block := pattern(bs, 3)
		r.good(extentCDB(0x8a, 1<<5, 19, 1), onWire(block, bs, 19, with(0x2222))) // not known yet
		wantGood(t, "the page alone", r.modeSelect(false, "00 00 00 00"+page))
		wantSense(t, do(other, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x2a, 0x01)
		r.good(extentCDB(0x88, 1<<5, 19, 1), nil)
		wantGood(t, "ATMPE", r.modeSelect(false, "00 00 00 00"+controlATMPE))
		wantSense(t, do(other, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x2a, 0x01)
		wantBytes(t, r.good("1a 08 0a 02 ff 00", nil), unhex("73 00 10 00"+
			tagPage([4]uint64{0, 0x1111, 0, 20}, [4]uint64{0x80, 0x2222, 20, blocks - 21})))
		if res := r.good("1a 00 3f ff ff 00", nil); int(res[0])+1 != len(res) {
			t.Errorf("MODE DATA LENGTH %d of all pages, which have %d bytes", res[0], len(res))
		}

		for field := byte(0); field <= 5; field++ {
			checks := field == 0 || field == 1 || field == 2 || field == 5
			for _, op := range []byte{0x88, 0x8f} {
				if res := r.run(extentCDB(op, field<<5, 19, 1), nil); checks {
					wantTagCheck(t, fmt.Sprintf("command %x, field %d", op, field), res, 19)
				} else {
					wantGood(t, fmt.Sprintf("command %x, field %d", op, field), res)
				}
			}
			if field == 0 {
				continue
			}
			res := r.run(extentCDB(0x8a, field<<5, 21, 1), onWire(block, bs, 21, with(0x1111)))
			if checks {
				wantTagCheck(t, fmt.Sprintf("WRITE, field %d", field), res, 21)
			} else {
				wantGood(t, fmt.Sprintf("WRITE, field %d", field), res)
			}
			r.good(extentCDB(0x8a, field<<5, 21, 1), onWire(block, bs, 21, with(0x2222)))
		}
		if n, ok := r.unit.Checksums(); !ok || n.Bad != 0 {
			t.Errorf("%d bad blocks: a tag of an initiator is no damage", n.Bad)
		}
		wantTagCheck(t, "a tag that exempts, in a WRITE", r.run(extentCDB(0x8a, 1<<5, 19, 1), onWire(block, bs, 19, with(0xffff))), 19)

		// Both sides of the border, and the block that is in no range.
		r.good(extentCDB(0x8a, 0, 19, 2), append(bytes.Clone(block), block...))
		r.good("93 00 "+fmt.Sprintf("%016x", blocks-2)+" 00000002 00 00", block)
		for lba, want := range map[uint64]uint16{19: 0x1111, 20: 0x2222, blocks - 2: 0x2222, blocks - 1: 0} {
			if got := protection.Get(r.good(extentCDB(0x88, 1<<5, lba, 1), nil)[bs:]).App(); got != want {
				t.Errorf("block %d has tag %04x, want %04x", lba, got, want)
			}
		}
		// The compare operation compares tags that are known.
		r.good(extentCDB(0x8a, 3<<5, 30, 1), onWire(block, bs, 30, with(0x3333)))
		res := r.run(extentCDB(0x8f, 3<<5|2, 30, 1), onWire(block, bs, 30, with(0x2222)))
		if res.status != StatusCheckCondition || res.sense[2] != 0x0e || res.sense[12] != 0x10 || res.sense[13] != 2 {
			t.Errorf("VERIFY with another tag: %x", res.sense)
		}
		wantGood(t, "no ATMPE", r.modeSelect(false, "00 00 00 00"+controlATO))
		r.good(extentCDB(0x8f, 3<<5|2, 30, 1), onWire(block, bs, 30, with(0x2222)))
		r.good(extentCDB(0x88, 1<<5, 30, 1), nil)

		// What is not saved ends with a reset.
		wantGood(t, "ATMPE", r.modeSelect(false, "00 00 00 00"+controlATMPE))
		if !slices.ContainsFunc(r.unit.Settings(), func(s Setting) bool {
			return s.Name == settingAppTagRanges && s.Value == fmt.Sprintf("0-19:1111 20-%d:2222", blocks-2) && s.Saved == "none"
		}) {
			t.Errorf("settings: %+v", r.unit.Settings())
		}
		r.reset(r.nexus)
		r.good(extentCDB(0x88, 1<<5, 30, 1), nil)
		wantBytes(t, r.good("1a 08 0a ff ff 00", nil), unhex("7f 00 10 00"+controlATO+tagPage([4]uint64{0x80, 0, 0, 0})))
	})
}

// Ranges that are not the medium, in order, are refused with the offset of the field, and have no effect.
func TestApplicationTagPageIsChecked(t *testing.T) {
	r := newRig(t, setup{protect: protection.Type1})
	const blocks = 2048
	for list, octet := range map[string]int{
		tagPage(): 16, // no LAST
		tagPage([4]uint64{0x80, 1, 1, blocks - 1}):                                           16 + 8,
		tagPage([4]uint64{0x80, 1, 0, blocks + 1}):                                           16 + 16,
		tagPage([4]uint64{0x80, 1, 0, blocks - 2}):                                           16 + 16,
		tagPage([4]uint64{0x80, 0xffff, 0, blocks}):                                          16 + 6,
		tagPage([4]uint64{0, 1, 0, 10}, [4]uint64{0x80, 2, 11, blocks - 11}):                 16 + 24 + 8,
		tagPage([4]uint64{0, 1, 0, 10}, [4]uint64{0x80, 2, 10, 1<<64 - 10}):                  16 + 24 + 16,
		tagPage([4]uint64{0, 1, 0, 10}, [4]uint64{0x80, 2, 0, 0}):                            16 + 24 + 16,
		tagPage([4]uint64{0x81, 1, 0, blocks}):                                               16,
		"4a 02 006c 000000000000000000000001 " + tagPage([4]uint64{0x80, 1, 0, blocks})[36:]: 15,
		"4a 02 006b 000000000000000000000000 " + tagPage([4]uint64{0x80, 1, 0, blocks})[36:]: 2,
		"0a 0a 02 10 00 40 0000 ffff 0000":                                                   5, // ATO 0
	} {
		wantListField(t, r.modeSelect(false, "00 00 00 00"+list), 4+octet)
	}
	wantBytes(t, r.good("1a 08 0a 02 ff 00", nil), unhex("73 00 10 00"+tagPage([4]uint64{0x80, 0, 0, 0})))
	for _, list := range []string{tagPage([4]uint64{0x80, 1, 0, blocks}), tagPage([4]uint64{0x80, 1, 0, blocks - 1}), tagPage([4]uint64{0x80, 0, 0, 0})} {
		wantGood(t, list, r.modeSelect(false, "00 00 00 00"+list))
	}
	r = newRig(t, setup{}) // no protection
	wantField(t, r.run("1a 08 0a 02 ff 00", nil), 3, noField)
	wantListField(t, r.modeSelect(false, "00 00 00 00"+tagPage([4]uint64{0x80, 1, 0, blocks})), 4)
	wantListField(t, r.modeSelect(false, "00 00 00 00 0a 0a 02 10 00 60 0000 ffff 0000"), 4+5) // ATMPE
}

// Saved tags are there after a restart, tags of now in the process that takes over, and in the unit that follows another.
func TestApplicationTagsRemain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "settings.json")
	opt := Options{Settings: openSettings(t, path)}
	r := newRig(t, setup{protect: protection.Type1, opt: opt})
	b := unhex("00 00 00 00" + controlATMPE + tagPage([4]uint64{0x80, 0x1111, 0, 2048}))
	r.good(fmt.Sprintf("15 11 0000 %02x 00", len(b)), b)
	want := func(what string, r *rig, tag uint16) {
		t.Helper()
		r.good(extentCDB(0x8a, 0, 9, 1), pattern(512, 1))
		if got := protection.Get(r.good(extentCDB(0x88, 1<<5, 9, 1), nil)[512:]).App(); got != tag {
			t.Errorf("%s: tag %04x, want %04x", what, got, tag)
		}
	}
	want("now", r, 0x1111)
	opt.Settings.Close()
	opt.Settings = openSettings(t, path)
	r = newRig(t, setup{protect: protection.Type1, opt: opt})
	want("after a restart", r, 0x1111)

	wantGood(t, "other tags", r.modeSelect(false, "00 00 00 00"+tagPage([4]uint64{0x80, 0x2222, 0, 2048})))
	next := newRig(t, setup{protect: protection.Type1})
	if err := next.unit.Restore(throughJSON(t, r.unit.State())); err != nil {
		t.Fatal(err)
	}
	want("in another process", next, 0x2222)
	next = newRig(t, setup{protect: protection.Type1})
	next.unit.InheritFrom(r.unit)
	want("in the next unit", next, 0x2222)
	bad := r.unit.State()
	bad.AppTags.Ranges[0].First = 1
	if err := next.unit.Restore(bad); err == nil {
		t.Error("ranges that do not begin at 0 are accepted")
	}
	if changed, err := r.unit.ResetSettings(); err != nil || !changed {
		t.Errorf("ResetSettings: %v, %v", changed, err)
	}
	wantSense(t, r.run("00", nil), 0x6, 0x2a, 0x01)
	want("with the defaults", r, 0)
}

// WRITE ATOMIC of a protected unit in memory writes data and protection information, or neither, whatever was there.
func TestWriteAtomicProtected(t *testing.T) {
	eachProtection(t, func(t *testing.T, r *rig, bs int) {
		const lba, count = 10, 40
		old, now := onWire(pattern(count*bs, 1), bs, lba, own), onWire(pattern(count*bs, 2), bs, lba, own)
		r.good(extentCDB(0x8a, 1<<5, lba, count), old)
		r.good(extentCDB(0x9c, 1<<5, lba, count), now)
		wantBytes(t, r.good(extentCDB(0x88, 1<<5, lba, count), nil), now)

		bad := bytes.Clone(old)
		bad[len(bad)-8] ^= 1 // the guard of the last block
		wantCheck(t, "a wrong guard", r.run(extentCDB(0x9c, 1<<5, lba, count), bad), 1, lba+count-1)
		wantBytes(t, r.good(extentCDB(0x88, 1<<5, lba, count), nil), now)
		wantField(t, r.run(extentCDB(0x9c, 6<<5, lba, count), bad), 1, 7)

		// A block that is damaged is overwritten, and is as it was when the write fails.
		if err := r.store.WriteAt([]byte{^now[5]}, lba*int64(bs)+5); err != nil {
			t.Fatal(err)
		}
		first := true
		r.store.Hook(func(op backendtest.Op, _, _ int64) error {
			if op != backendtest.WriteAt || !first {
				return nil
			}
			first = false
			return backend.ErrNoSpace
		})
		for _, field := range []byte{0, 1} {
			out := old
			if field == 0 {
				out = pattern(count*bs, 1)
			}
			first = true
			wantSense(t, r.run(extentCDB(0x9c, field<<5, lba, count), out), 0x7, 0x27, 0x07)
			wantBytes(t, r.good(extentCDB(0x88, 1<<5, lba+1, count-1), nil), now[bs+8:])
		}
		first = false
		r.good(extentCDB(0x9c, 0, lba, count), pattern(count*bs, 1))
		wantBytes(t, r.good(extentCDB(0x88, 1<<5, lba, count), nil), onWire(pattern(count*bs, 1), bs, lba, func(b []byte, at uint64) protection.Tuple {
			return r.unit.protection.Generate(b, at, nil)
		}))
	})
	// Data in a file and its protection information are two writes, however atomic each of them is.
	r := newRig(t, setup{protect: protection.Type1, info: func(i *backend.Info) { i.AtomicUnit, i.AtomicWrite = 4096, 65536 }})
	wantSense(t, r.run(extentCDB(0x9c, 0, 0, 8), make([]byte, 4096)), 0x5, 0x20, 0x00)
	if p := r.good("12 01 b0 00ff 00", nil); !bytes.Equal(p[44:60], make([]byte, 16)) {
		t.Errorf("limits of atomic writes: %x", p[44:60])
	}
}
