package lun

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/lun/state"
)

// What ESXi asks of a disk before it leaves work to it, and the commands as it
// sends them (vStorage APIs for Array Integration).

// limits returns VPD page B0h with its header, so that offsets are those of SBC-3.
func (r *rig) limits() []byte {
	r.t.Helper()
	return r.good("12 01 b0 00ff 00", nil)
}

// ATS: COMPARE AND WRITE of one block takes the lock of a VMFS volume. Of many hosts that compete
// for it one gets it, and the others fail.
func TestVMwareATS(t *testing.T) {
	r := newRig(t, setup{})
	if got := r.limits()[5]; got < 1 {
		t.Fatalf("MAXIMUM COMPARE AND WRITE LENGTH %d", got)
	}
	lock := extentCDB(0x89, 0, 100, 1)
	free := make([]byte, 512)
	owned := func(host byte, beat int) []byte { return pattern(512, int(host)*1000+beat) }

	const hosts = 8
	won := make([]bool, hosts)
	var wg sync.WaitGroup
	for host := range hosts {
		n := r.login()
		wg.Go(func() {
			var c Command
			switch res := do(n, &c, [8]byte{}, lock, slices.Concat(free, owned(byte(host), 0)), all); {
			case res.status == StatusGood:
				won[host] = true
			case res.sense[2] != keyMiscompare:
				t.Errorf("host %d: sense % x", host, res.sense)
			}
		})
	}
	wg.Wait()
	owner := slices.Index(won, true)
	if owner < 0 || slices.Contains(won[owner+1:], true) {
		t.Fatalf("who has the lock: %v", won)
	}
	wantBytes(t, r.good(extentCDB(0x28, 0, 100, 1), nil), owned(byte(owner), 0))

	// The heartbeat: from one image to the next, and not from any other.
	for beat := range 3 {
		r.good(lock, slices.Concat(owned(byte(owner), beat), owned(byte(owner), beat+1)))
	}
	stale := owned(byte(owner), 3)
	stale[77] ^= 1
	res := r.run(lock, slices.Concat(stale, free))
	want := unhex("f0 00 0e 0000004d 0a 00000000 1d 00 00 000000") // MISCOMPARE at byte 77
	if res.status != StatusCheckCondition || !bytes.Equal(res.sense, want) {
		t.Errorf("status %#x, sense % x, want % x", res.status, res.sense, want)
	}
	r.good(lock, slices.Concat(owned(byte(owner), 3), free))

	// An initiator that mistakes what it sends gets no lock: both images have to come.
	if res := r.run(lock, free); res.status != StatusCheckCondition {
		t.Errorf("half of the data-out: status %#x", res.status)
	}
	// A reservation of somebody else is what ESXi 4 used instead.
	other := r.login()
	other.name.initiator.isid[5]++
	wantGood(t, "RESERVE(6)", do(other, &r.c, [8]byte{}, "16 00 0000 00 00", nil, all))
	wantConflict(t, "COMPARE AND WRITE", r.run(lock, slices.Concat(free, free)))
}

// XCOPY: the copy of a virtual disk, in pieces of 4 MiB, within a LUN and to another one that
// ESXi knows by the designator of VPD page 83h.
func TestVMwareXCOPY(t *testing.T) {
	const mib = 1 << 20
	r := newCopyRig(t, setup{size: 16 * mib}, setup{})
	target := newRig(t, setup{size: 16 * mib})
	target.unit.opt.Identity = state.Identity{NAA: [8]byte{0x3f, 7: 0xaa}, Serial: "3f000000000000aa"}
	r.add(2, target.unit)
	r.nexus = r.login()
	if in := r.good("12 00 00 00ff 00", nil); in[5]&0x08 == 0 {
		t.Fatal("INQUIRY: no 3PC")
	}
	res := do(r.nexus, &r.c, [8]byte{}, "84 03 0000000000000000 000000ff 00 00", nil, all)
	wantGood(t, "RECEIVE COPY OPERATING PARAMETERS", res)
	if p := res.in; binary.BigEndian.Uint16(p[8:]) < 2 || binary.BigEndian.Uint32(p[16:]) < 4*mib || !bytes.Contains(p[44:], []byte{0x02, 0xe4}) {
		t.Fatalf("RECEIVE COPY OPERATING PARAMETERS: % x", p)
	}

	// cscd makes an identification descriptor of what the LUN calls itself.
	cscd := func(lun byte) string {
		page := do(r.nexus, &r.c, [8]byte{0, lun}, "12 01 83 00ff 00", nil, all).in
		for d := page[4:]; len(d) > 0; d = d[4+d[3]:] {
			if d[1]&0x3f == desNAA {
				return fmt.Sprintf("e4 00 0000 %02x %02x 00 %02x %x %s 00 000200", d[0]&0x0f, d[1]&0x3f, d[3], d[4:][:d[3]], bytes.Repeat([]byte("00"), 20-int(d[3])))
			}
		}
		t.Fatalf("LUN %d has no NAA", lun)
		return ""
	}
	image := pattern(6*mib, 1)
	clear(image[mib:][:mib]) // a hole in the middle
	r.good(extentCDB(0x8a, 0, 0, 2048), image[:mib])
	r.good(extentCDB(0x8a, 0, 4096, 8192), image[2*mib:])
	for _, to := range []struct {
		lun  byte
		base uint64 // block
	}{{0, 16384}, {2, 1024}} {
		for at := uint64(0); at < 12288; at += 8192 { // 4 MiB, then the rest
			wantGood(t, "EXTENDED COPY", r.copy(copyList(int(at>>13)+1, 0, []string{cscd(0), cscd(to.lun)},
				[]string{blocks(0, 1, int(min(8192, 12288-at)), at, to.base+at)})))
		}
		if !bytes.Equal(r.read(to.lun, to.base, 12288), image) {
			t.Errorf("LUN %d: the copy differs", to.lun)
		}
		// A hole stays one.
		res := do(r.nexus, &r.c, [8]byte{0, to.lun}, fmt.Sprintf("9e 12 %016x 00000018 00 00", to.base+2048), nil, all)
		if d := res.in[8:]; d[12] != statusDeallocated || binary.BigEndian.Uint32(d[8:]) != 2048 {
			t.Errorf("LUN %d: the hole is % x", to.lun, d)
		}
	}
}

// WRITE SAME: the zeros of an eager zeroed disk, 1 MiB at a time.
func TestVMwareWriteSame(t *testing.T) {
	r := newRig(t, setup{size: 4 << 20})
	if got := binary.BigEndian.Uint64(r.limits()[36:]); got != 0 && got < 2048 {
		t.Fatalf("MAXIMUM WRITE SAME LENGTH %d", got)
	}
	r.good(extentCDB(0x8a, 0, 0, 8192), pattern(4<<20, 1))
	for lba := uint64(2048); lba < 6144; lba += 2048 {
		r.good(extentCDB(0x93, 0, lba, 2048), make([]byte, 512))
	}
	want := pattern(4<<20, 1)
	clear(want[1<<20:][:2<<20])
	if !bytes.Equal(r.good(extentCDB(0x88, 0, 0, 8192), nil), want) {
		t.Error("other bytes were read")
	}
}

// UNMAP: the space of a deleted virtual disk is free again, and LBPRZ promises that reads there
// return zeros. ESXi can tell a full store from a broken one, and then stops only the virtual
// machines that write (TP stun).
func TestVMwareUnmap(t *testing.T) {
	r := newRig(t, setup{size: 8 << 20})
	if in := r.good("9e 10 0000000000000000 00000020 00 00", nil); in[14]&0xc0 != 0xc0 {
		t.Fatalf("READ CAPACITY(16): no LBPME, LBPRZ: %#02x", in[14])
	}
	if in := r.good("12 01 b2 00ff 00", nil); in[5]&0x84 != 0x84 || in[6]&0x07 != 2 {
		t.Fatalf("VPD page B2h: % x", in)
	}
	be, b0 := binary.BigEndian, r.limits()
	count, descriptors, granularity := be.Uint32(b0[20:]), be.Uint32(b0[24:]), be.Uint32(b0[28:])
	if count < 2048 || descriptors < 2 || granularity == 0 || granularity > 2048 || b0[32]&0x80 == 0 {
		t.Fatalf("MAXIMUM UNMAP LBA COUNT %d, BLOCK DESCRIPTOR COUNT %d, GRANULARITY %d, alignment % x", count, descriptors, granularity, b0[32:36])
	}
	data := pattern(8<<20, 1)
	r.good(extentCDB(0x8a, 0, 0, 16384), data)
	r.good("42 00 00000000 00 0028 00", unhex(`
		0026 0020 00000000
		0000000000000800 00000800 00000000    # 1 MiB at 1 MiB
		0000000000002000 00001000 00000000    # 2 MiB at 4 MiB`))
	clear(data[1<<20:][:1<<20])
	clear(data[4<<20:][:2<<20])
	if !bytes.Equal(r.good(extentCDB(0x88, 0, 0, 16384), nil), data) {
		t.Error("other bytes were read")
	}
	wantBytes(t, r.good("9e 12 0000000000000000 00001000 00 00", nil), unhex(`
		00000054 00000000
		0000000000000000 00000800 00 000000
		0000000000000800 00000800 01 000000
		0000000000001000 00001000 00 000000
		0000000000002000 00001000 01 000000
		0000000000003000 00001000 00 000000`))

	r.store.Fail(backendtest.WriteAt, backend.ErrNoSpace)
	wantSense(t, r.run(extentCDB(0x8a, 0, 2048, 1), make([]byte, 512)), 0x7, 0x27, 0x07) // SPACE ALLOCATION FAILED WRITE PROTECT
	r.store.Fail(backendtest.WriteAt, nil)
	r.good(extentCDB(0x8a, 0, 2048, 1), make([]byte, 512))
}
