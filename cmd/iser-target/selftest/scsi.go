package selftest

import (
	"bytes"
	"encoding/binary"
	"errors"

	"github.com/iser-target/iser-target/iscsi/initiator"
)

// A unit is the LUN through one session.
type unit struct {
	*initiator.Disk
	t *T
	s *initiator.Session
}

// unit opens the LUN in a session of its own.
func (t *T) unit() *unit {
	s := t.login(nil)
	d, err := s.Open(t.ctx, t.o.LUN)
	t.check(err, "open")
	return &unit{d, t, s}
}

// do runs a command that must succeed, and returns the data-in. in is the room for it in bytes.
func (u *unit) do(what string, cdb []byte, out []byte, in int) []byte {
	c := u.command(cdb, out, in)
	u.t.check(u.s.Do(u.t.ctx, c), what)
	n := in - int(max(c.Residual, 0))
	if n < 0 {
		u.t.failf("%s: residual count %d of %d bytes", what, c.Residual, in)
	}
	return c.In[:n]
}

func (u *unit) command(cdb []byte, out []byte, in int) *initiator.Command {
	c := &initiator.Command{LUN: u.t.o.LUN, Out: out, In: make([]byte, in)}
	copy(c.CDB[:], cdb)
	return c
}

// refused runs a command that must end with CHECK CONDITION and that sense.
func (u *unit) refused(what string, cdb []byte, out []byte, in int, key, asc, ascq byte) {
	err := u.s.Do(u.t.ctx, u.command(cdb, out, in))
	var status *initiator.StatusError
	want := initiator.Sense{Key: key, ASC: asc, ASCQ: ascq}
	if !errors.As(err, &status) || status.Status != initiator.CheckCondition || status.Sense != want {
		u.t.failf("%s: %v, where CHECK CONDITION with %v is due", what, err, want)
	}
}

// rw returns a command of 16 bytes on n blocks from lba.
func rw(op, flags byte, lba uint64, n uint32) []byte {
	b := make([]byte, 16)
	b[0], b[1] = op, flags
	binary.BigEndian.PutUint64(b[2:], lba)
	binary.BigEndian.PutUint32(b[10:], n)
	return b
}

// writeAt writes data at a byte offset, and readAt reads.
func (u *unit) writeAt(data []byte, off int64) { u.t.check(u.Write(u.t.ctx, data, off), "WRITE") }

func (u *unit) readAt(n int, off int64) []byte {
	b := make([]byte, n)
	u.t.check(u.Read(u.t.ctx, b, off), "READ")
	return b
}

// holds fails the case unless the LUN has data at a byte offset.
func (u *unit) holds(data []byte, off int64) {
	if !bytes.Equal(u.readAt(len(data), off), data) {
		u.t.failf("the LUN does not have the data that it should, at byte %d", off)
	}
}

// pattern writes and reads data of many lengths.
func pattern(t *T, s *initiator.Session) {
	d, err := s.Open(t.ctx, t.o.LUN)
	t.check(err, "open")
	u := &unit{d, t, s}
	for i, n := range []int{1, 2, 7, 16, 17, 128, 256} { // blocks: immediate data, one burst and several
		data := random(n * d.BlockSize)
		off := int64(i * d.BlockSize)
		u.writeAt(data, off)
		u.holds(data, off)
	}
}

// scsiCases returns the cases about commands (SPC-4, SBC-3).
func scsiCases() (list []testCase) {
	add := func(id string, run func(u *unit)) {
		list = append(list, testCase{group: "SCSI", id: id, run: func(t *T) { run(t.unit()) }})
	}
	const illegal = initiator.IllegalRequest
	add("INQUIRY", func(u *unit) {
		b := u.do("INQUIRY", []byte{0x12, 0, 0, 0, 96}, nil, 96)
		if len(b) < 36 || b[0] != 0 || b[2] < 5 || int(b[4])+5 < len(b) || b[7]&2 == 0 {
			u.t.failf("standard data % x", b)
		}
	})
	add("INQUIRY with ALLOCATION LENGTH 5", func(u *unit) {
		if b := u.do("INQUIRY", []byte{0x12, 0, 0, 0, 5}, nil, 96); len(b) != 5 {
			u.t.failf("ISCSI-11.4-5: %d bytes came", len(b))
		}
	})
	add("INQUIRY of all VPD pages", func(u *unit) {
		b := u.do("page 00h", []byte{0x12, 1, 0, 0, 255}, nil, 255)
		if len(b) < 4 || len(b) != 4+int(b[3]) {
			u.t.failf("page 00h: % x", b)
		}
		need := map[byte]bool{0x83: true, 0xb0: true, 0xb1: true}
		for _, page := range b[4:] {
			v := u.do("VPD page", []byte{0x12, 1, page, 4, 0}, nil, 1024)
			if len(v) < 4 || v[1] != page || len(v) != 4+int(binary.BigEndian.Uint16(v[2:])) {
				u.t.failf("page %#02x: % x", page, v)
			}
			delete(need, page)
		}
		if len(need) > 0 {
			u.t.failf("pages that are missing: %v", need)
		}
	})
	add("INQUIRY of an unknown VPD page", func(u *unit) {
		u.refused("page ffh", []byte{0x12, 1, 0xff, 0, 255}, nil, 255, illegal, 0x24, 0)
	})
	add("MODE SENSE of all pages", func(u *unit) {
		six := u.do("MODE SENSE(6)", []byte{0x1a, 0, 0x3f, 0, 255}, nil, 255)
		ten := u.do("MODE SENSE(10)", []byte{0x5a, 0, 0x3f, 0, 0, 0, 0, 4, 0}, nil, 1024)
		if len(six) < 4 || len(six) != int(six[0])+1 || len(ten) < 8 || len(ten) != int(binary.BigEndian.Uint16(ten))+2 {
			u.t.failf("% x; % x", six, ten)
		}
	})
	add("MODE SENSE of an unknown page", func(u *unit) {
		u.refused("page 3eh", []byte{0x1a, 0, 0x3e, 0, 255}, nil, 255, illegal, 0x24, 0)
	})
	add("READ CAPACITY", func(u *unit) {
		ten := u.do("READ CAPACITY(10)", []byte{0x25}, nil, 8)
		sixteen := u.do("READ CAPACITY(16)", append([]byte{0x9e, 0x10}, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32), nil, 32)
		if len(ten) != 8 || len(sixteen) != 32 {
			u.t.failf("%d and %d bytes", len(ten), len(sixteen))
		}
		last := binary.BigEndian.Uint64(sixteen)
		if want := uint32(min(last, 0xffff_ffff)); binary.BigEndian.Uint32(ten) != want || !bytes.Equal(ten[4:], sixteen[8:12]) || last+1 != u.Blocks {
			u.t.failf("% x; % x", ten, sixteen)
		}
	})
	add("REPORT LUNS", func(u *unit) {
		luns, err := u.s.LUNs(u.t.ctx)
		u.t.check(err, "REPORT LUNS")
		for _, n := range luns {
			if n == u.t.o.LUN {
				return
			}
		}
		u.t.failf("LUN %d is not in %v", u.t.o.LUN, luns)
	})
	add("REPORT SUPPORTED OPERATION CODES", func(u *unit) {
		b := u.do("command", []byte{0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 0x40, 0}, nil, 0x4000)
		if len(b) < 4 || int(binary.BigEndian.Uint32(b)) != len(b)-4 {
			u.t.failf("%d bytes", len(b))
		}
	})
	add("ISCSI-11.4-7 an unknown operation code", func(u *unit) {
		u.refused("FFh", []byte{0xff}, nil, 0, illegal, 0x20, 0)
	})
	add("a reserved field that is set", func(u *unit) {
		u.refused("READ CAPACITY(16)", []byte{0x9e, 0x1f}, nil, 32, illegal, 0x24, 0)
	})
	add("a LUN that does not exist", func(u *unit) {
		c := u.command(make([]byte, 6), nil, 0)
		c.LUN = initiator.MaxLUN - 1
		err := u.s.Do(u.t.ctx, c)
		var status *initiator.StatusError
		if !errors.As(err, &status) || status.Sense != (initiator.Sense{Key: illegal, ASC: 0x25}) {
			u.t.failf("%v, where LOGICAL UNIT NOT SUPPORTED is due", err)
		}
	})
	add("WRITE and READ of many lengths", func(u *unit) { pattern(u.t, u.s) })
	add("WRITE and READ beyond the end", func(u *unit) {
		out := random(u.BlockSize)
		u.refused("WRITE(16)", rw(0x8a, 0, u.Blocks, 1), out, 0, illegal, 0x21, 0)
		u.refused("READ(16)", rw(0x88, 0, u.Blocks, 1), nil, u.BlockSize, illegal, 0x21, 0)
		u.refused("READ(16)", rw(0x88, 0, 1<<63, 1), nil, u.BlockSize, illegal, 0x21, 0)
	})
	add("SYNCHRONIZE CACHE and FUA", func(u *unit) {
		data := random(u.BlockSize)
		u.do("WRITE(16) with FUA", rw(0x8a, 8, 0, 1), data, 0)
		u.t.check(u.Sync(u.t.ctx), "SYNCHRONIZE CACHE")
		u.holds(data, 0)
	})
	add("VERIFY", func(u *unit) {
		data := random(4 * u.BlockSize)
		u.writeAt(data, 0)
		u.do("VERIFY(16)", rw(0x8f, 0, 0, 4), nil, 0)
		u.do("VERIFY(16) with BYTCHK 1", rw(0x8f, 2, 0, 4), data, 0)
		data[len(data)-1] ^= 1
		u.refused("VERIFY(16) of other data", rw(0x8f, 2, 0, 4), data, 0, initiator.Miscompare, 0x1d, 0)
	})
	add("WRITE AND VERIFY", func(u *unit) {
		data := random(2 * u.BlockSize)
		u.do("WRITE AND VERIFY(16)", rw(0x8e, 2, 8, 2), data, 0)
		u.holds(data, 8*int64(u.BlockSize))
	})
	add("COMPARE AND WRITE", func(u *unit) {
		old, next := random(u.BlockSize), random(u.BlockSize)
		u.writeAt(old, 0)
		cdb := rw(0x89, 0, 0, 0)
		cdb[10], cdb[11], cdb[12], cdb[13] = 0, 0, 0, 1
		u.do("COMPARE AND WRITE", cdb, append(bytes.Clone(old), next...), 0)
		u.holds(next, 0)
		u.refused("COMPARE AND WRITE of other data", cdb, append(bytes.Clone(old), old...), 0, initiator.Miscompare, 0x1d, 0)
		u.holds(next, 0)
	})
	add("WRITE SAME", func(u *unit) {
		data := random(u.BlockSize)
		u.do("WRITE SAME(16)", rw(0x93, 0, 4, 16), data, 0)
		u.holds(bytes.Repeat(data, 16), 4*int64(u.BlockSize))
	})
	add("UNMAP", func(u *unit) {
		if !u.Thin {
			u.t.skipf("the LUN is not thin provisioned")
		}
		u.writeAt(random(1<<20), 0)
		list := make([]byte, 24)
		binary.BigEndian.PutUint16(list, 22)
		binary.BigEndian.PutUint16(list[2:], 16)
		binary.BigEndian.PutUint32(list[16:], uint32(1<<20/u.BlockSize))
		u.do("UNMAP", []byte{0x42, 0, 0, 0, 0, 0, 0, 0, 24}, list, 0)
		if c := u.do("READ CAPACITY(16)", append([]byte{0x9e, 0x10}, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32), nil, 32); len(c) > 14 && c[14]&0x40 != 0 {
			u.holds(make([]byte, 1<<20), 0) // LBPRZ
		}
	})
	add("RESERVE and RELEASE", func(u *unit) {
		other := u.t.unit()
		u.do("RESERVE(6)", []byte{0x16}, nil, 0)
		other.conflict(rw(0x8a, 0, 0, 1), random(u.BlockSize))
		u.do("RELEASE(6)", []byte{0x17}, nil, 0)
		other.do("WRITE(16)", rw(0x8a, 0, 0, 1), random(u.BlockSize), 0)
	})
	add("PERSISTENT RESERVE", func(u *unit) {
		other := u.t.unit()
		const register, reserve, clear = 0, 1, 3
		out := func(action byte, key, service uint64) ([]byte, []byte) {
			list := make([]byte, 24)
			binary.BigEndian.PutUint64(list, key)
			binary.BigEndian.PutUint64(list[8:], service)
			return []byte{0x5f, action, 1, 0, 0, 0, 0, 0, 24}, list // Write Exclusive
		}
		cdb, list := out(register, 0, 0x73656c66)
		u.do("REGISTER", cdb, list, 0)
		cdb, list = out(reserve, 0x73656c66, 0)
		u.do("RESERVE", cdb, list, 0)
		other.conflict(rw(0x8a, 0, 0, 1), random(u.BlockSize))
		other.do("READ(16)", rw(0x88, 0, 0, 1), nil, u.BlockSize)
		keys := u.do("READ KEYS", []byte{0x5e, 0, 0, 0, 0, 0, 0, 1, 0}, nil, 256)
		if len(keys) != 16 || binary.BigEndian.Uint64(keys[8:]) != 0x73656c66 {
			u.t.failf("READ KEYS: % x", keys)
		}
		cdb, list = out(clear, 0x73656c66, 0)
		u.do("CLEAR", cdb, list, 0)
		if err := other.s.Do(u.t.ctx, other.command(rw(0x8a, 0, 0, 1), random(u.BlockSize), 0)); err != nil {
			var status *initiator.StatusError // a unit attention may say that the reservation has gone
			if !errors.As(err, &status) || status.Sense.Key != initiator.UnitAttention {
				u.t.failf("WRITE(16) after CLEAR: %v", err)
			}
		}
	})
	return list
}

// conflict runs a command that must end with RESERVATION CONFLICT.
func (u *unit) conflict(cdb, out []byte) {
	err := u.s.Do(u.t.ctx, u.command(cdb, out, 0))
	var status *initiator.StatusError
	if !errors.As(err, &status) || status.Status != initiator.ReservationConflict {
		u.t.failf("%v, where RESERVATION CONFLICT is due", err)
	}
}
