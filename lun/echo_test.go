package lun

import (
	"fmt"
	"testing"
)

// SPC-4, sections 6.18 and 6.49: each initiator reads what it has written itself, as long as no reset comes. The target has no other
// buffers.
func TestEchoBuffer(t *testing.T) {
	r := newRig(t, setup{})
	other := r.login()
	write := func(n *Nexus, data []byte) result {
		return do(n, new(Command), [8]byte{}, fmt.Sprintf("3b 0a 07 123456 %06x 00", len(data)), data, all)
	}
	read := func(n *Nexus, mode byte, length int) result {
		return do(n, new(Command), [8]byte{}, fmt.Sprintf("3c %02x 07 123456 %06x 00", mode, length), nil, all)
	}
	wantBytes(t, read(r.nexus, 0x0b, 252).in, unhex("01 00 0100")) // EBOS, BUFFER CAPACITY
	wantBytes(t, read(r.nexus, 0x0b, 3).in, unhex("01 00 01"))
	wantBytes(t, read(r.nexus, 0x03, 252).in, unhex("00 000000")) // no other buffer
	wantSense(t, read(r.nexus, 0x0a, 252), 0x5, 0x2c, 0x00)       // COMMAND SEQUENCE ERROR
	wantGood(t, "WRITE BUFFER without data", write(r.nexus, nil))
	wantSense(t, read(r.nexus, 0x0a, 252), 0x5, 0x2c, 0x00)

	mine, theirs := pattern(echoCapacity, 1), pattern(12, 2)
	wantGood(t, "WRITE BUFFER", write(r.nexus, mine))
	wantSense(t, read(other, 0x0a, 252), 0x5, 0x2c, 0x00)
	wantGood(t, "WRITE BUFFER of the neighbour", write(other, theirs))
	wantBytes(t, read(r.nexus, 0x0a, 1<<20).in, mine)
	wantBytes(t, read(r.nexus, 0x0a, 100).in, mine[:100])
	wantBytes(t, read(other, 0x0a, 1<<20).in, theirs)
	wantGood(t, "ALLOCATION LENGTH 0", read(r.nexus, 0x0a, 0))
	theirs[0]++ // the buffer has a copy
	wantGood(t, "a shorter list", write(r.nexus, mine[:5]))
	wantBytes(t, read(r.nexus, 0x0a, 1<<20).in, mine[:5])
	wantBytes(t, read(other, 0x0a, 1<<20).in, pattern(12, 2))

	wantField(t, write(r.nexus, make([]byte, echoCapacity+1)), 6, noField)
	short := do(r.nexus, new(Command), [8]byte{}, "3b 0a 00 000000 000010 00", mine[:4], all)
	wantSense(t, short, 0x5, 0x0e, 0x03)
	wantBytes(t, read(r.nexus, 0x0a, 1<<20).in, mine[:5]) // none of which did anything
	for mode := range byte(32) {
		if mode != 0x0a {
			wantField(t, do(r.nexus, new(Command), [8]byte{}, fmt.Sprintf("3b %02x 00 000000 000000 00", mode), nil, all), 1, 4)
		}
		if mode != 0x03 && mode != 0x0a && mode != 0x0b {
			wantField(t, read(r.nexus, mode, 252), 1, 4)
		}
	}

	// Neither a reservation of another initiator nor a medium that is not ready empties it; a reset does, for all.
	r.unit.stopped.Store(true)
	wantBytes(t, read(r.nexus, 0x0a, 1<<20).in, mine[:5])
	r.unit.stopped.Store(false)
	wantGood(t, "RESERVE", do(other, new(Command), [8]byte{}, "16", nil, all))
	wantConflict(t, "WRITE BUFFER", write(r.nexus, mine))
	wantConflict(t, "READ BUFFER", read(r.nexus, 0x0a, 252))
	wantGood(t, "RELEASE", do(other, new(Command), [8]byte{}, "17", nil, all))
	wantBytes(t, read(r.nexus, 0x0a, 1<<20).in, mine[:5])
	r.reset(r.nexus)
	wantSense(t, do(other, new(Command), [8]byte{}, "00", nil, all), 0x6, 0x29, 0x03)
	wantSense(t, read(r.nexus, 0x0a, 252), 0x5, 0x2c, 0x00)
	wantSense(t, read(other, 0x0a, 252), 0x5, 0x2c, 0x00)

	// A reset of an initiator without that right empties its own one only.
	third := testPort
	third.InitiatorName = "iqn.2026-11.io.example:third"
	n := r.inv.NewNexus(third)
	do(n, new(Command), [8]byte{}, "00", nil, all)
	wantGood(t, "WRITE BUFFER", write(n, theirs))
	wantGood(t, "WRITE BUFFER", write(r.nexus, mine))
	n.ResetUnit([8]byte{}, false)
	wantSense(t, do(n, new(Command), [8]byte{}, "00", nil, all), 0x6, 0x29, 0x03)
	wantSense(t, read(n, 0x0a, 252), 0x5, 0x2c, 0x00)
	wantBytes(t, read(r.nexus, 0x0a, 1<<20).in, mine)
}
