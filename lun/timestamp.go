package lun

import (
	"encoding/binary"
	"time"
)

// A deviceClock is the device clock of a unit (SPC-4, section 5.2): that of the machine, until an
// initiator sets another time. TARGET COLD RESET and a restart bring back the time of the machine.
type deviceClock struct {
	at   int64     // ms since 1970 that an initiator has set
	when time.Time // when it has; zero: never
}

// Values of TIMESTAMP ORIGIN.
const (
	originSet   = 0b010 // SET TIMESTAMP
	originOther = 0b011 // another method: the clock of the machine
)

// timestampLen is the length in bytes of the parameter data of REPORT TIMESTAMP and of SET TIMESTAMP,
// and timestampMask has the bits of a TIMESTAMP.
const (
	timestampLen  = 12
	timestampMask = 1<<48 - 1
)

// read returns the time in ms since 1970, and its TIMESTAMP ORIGIN. A nil clock was never set. The time that an
// initiator has set advances with the monotonic clock of the machine.
func (c *deviceClock) read() (ms uint64, origin byte) {
	if c == nil {
		return uint64(time.Now().UnixMilli()) & timestampMask, originOther
	}
	return uint64(c.at+time.Since(c.when).Milliseconds()) & timestampMask, originSet
}

// reportTimestamp executes REPORT TIMESTAMP (SPC-4, section 6.38).
func reportTimestamp(u *Unit, c *Command) bool {
	b := c.zeroed(timestampLen)
	ms, origin := u.clock.Load().read()
	binary.BigEndian.PutUint64(b[2:], ms) // its first two bytes are 0
	b[1], b[2] = timestampLen-2, origin
	return c.report(b, binary.BigEndian.Uint32(c.CDB[6:]))
}

// beginSetTimestamp checks the CDB of SET TIMESTAMP. Without a list, nothing changes.
func beginSetTimestamp(_ *Unit, c *Command) bool {
	n := binary.BigEndian.Uint32(c.CDB[6:])
	if n != 0 && n != timestampLen {
		return c.fail(condListLength)
	}
	c.DataOut, c.Whole = uint64(n), true
	return true
}

// consumeSetTimestamp executes SET TIMESTAMP (SPC-4, section 6.46). The clock is that of the unit, so
// the other initiators are notified.
func consumeSetTimestamp(u *Unit, c *Command, p []byte, _ uint64) bool {
	for _, i := range []int{0, 1, 2, 3, 10, 11} {
		if p[i] != 0 {
			return c.failList(i)
		}
	}
	u.clock.Store(&deviceClock{at: int64(binary.BigEndian.Uint64(p[2:]) & timestampMask), when: time.Now()})
	u.raise(condTimestampChanged, c.nexus)
	return true
}

// A clockState is a deviceClock that another process continues.
type clockState struct {
	Set int64 `json:"set"` // ms since 1970 that an initiator has set
	At  int64 `json:"at"`  // when it has, by the clock of the machine: ms since 1970
}

// state returns what another process needs of c, which may be nil.
func (c *deviceClock) state() *clockState {
	if c == nil {
		return nil
	}
	return &clockState{Set: c.at, At: c.when.UnixMilli()}
}

// clock returns the clock that has that state. Between the processes, it has advanced with the wall clock of the machine.
func (st *clockState) clock() *deviceClock {
	if st == nil {
		return nil
	}
	now := time.Now()
	return &deviceClock{at: st.Set, when: now.Add(-time.Duration(now.UnixMilli()-st.At) * time.Millisecond)}
}
