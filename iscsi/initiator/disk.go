package initiator

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// A Disk is a LUN that is a direct-access block device. Its methods may be called at any time. They repeat commands that the LUN
// has not done: at once after a unit attention, and after BUSY and TASK SET FULL for up to three minutes, or until the context ends.
type Disk struct {
	s   *Session
	lun int

	Vendor, Product, Revision string
	BlockSize                 int    // bytes
	Blocks                    uint64 // capacity
	Thin                      bool   // GET LBA STATUS says which blocks are mapped (LBPME)
	ReadOnly                  bool   // write protected
	MaxTransfer               int    // bytes of one READ or WRITE
}

// maxOpenTries limits how many unit attentions a command takes. Each condition comes once.
const maxOpenTries = 32

// LUNs returns the LUNs of the target, in ascending order (REPORT LUNS). It leaves out those above MaxLUN.
func (s *Session) LUNs(ctx context.Context) ([]int, error) {
	size := 16 + 8*256
	for {
		b := make([]byte, size)
		c := &Command{In: b}
		c.CDB[0] = 0xa0
		binary.BigEndian.PutUint32(c.CDB[6:], uint32(size))
		if err := s.doAgain(ctx, c); err != nil {
			return nil, err
		}
		got := b[:len(b)-int(max(c.Residual, 0))]
		if len(got) < 8 {
			return nil, fmt.Errorf("REPORT LUNS: %d bytes of data", len(got))
		}
		n := int64(binary.BigEndian.Uint32(got)) + 8
		if n > int64(size) && n <= 8+8*(MaxLUN+1) {
			size = int(n)
			continue
		}
		var luns []int
		for e := got[8:min(n, int64(len(got)))]; len(e) >= 8; e = e[8:] {
			if method := e[0] >> 6; method == 1 || e[0] == 0 {
				luns = append(luns, int(e[0]&0x3f)<<8|int(e[1]))
			}
		}
		slices.Sort(luns)
		return luns, nil
	}
}

// Repeats of a command that a LUN has not done.
const (
	againPause = 20 * time.Millisecond // after BUSY and TASK SET FULL
	againTime  = 3 * time.Minute       // for how long
)

// doAgain does c, and again as long as the LUN does not do it: at once after each unit attention, and after a pause after BUSY and
// TASK SET FULL (SAM-5, section 5.3.1), until ctx ends or againTime is over. Then it returns the *StatusError.
func (s *Session) doAgain(ctx context.Context, c *Command) error {
	var end time.Time
	for attentions := 0; ; {
		err := s.Do(ctx, c)
		var status *StatusError
		if !errors.As(err, &status) {
			return err
		}
		switch {
		case status.Status == CheckCondition && status.Sense.Key == UnitAttention:
			if attentions++; attentions == maxOpenTries {
				return err
			}
			continue
		case status.Status != Busy && status.Status != TaskSetFull:
			return err
		}
		if now := time.Now(); end.IsZero() {
			end = now.Add(againTime)
		} else if now.After(end) {
			return err
		}
		select {
		case <-time.After(againPause):
		case <-ctx.Done():
			return err
		}
	}
}

// Open returns the Disk of a LUN. It takes pending unit attentions, and waits for a LUN that is becoming ready until ctx ends.
func (s *Session) Open(ctx context.Context, lun int) (*Disk, error) {
	d := &Disk{s: s, lun: lun}
	if err := d.open(ctx); err != nil {
		return nil, fmt.Errorf("LUN %d: %w", lun, err)
	}
	return d, nil
}

func (d *Disk) open(ctx context.Context) error {
	b, err := d.get(ctx, 36, 0x12, 0, 0, 0, 36)
	if err != nil {
		return err
	}
	if q := b[0] >> 5; q != 0 {
		return errors.New("the target has no such LUN")
	}
	if t := b[0] & 0x1f; t != 0 {
		return fmt.Errorf("it is not a disk: its device type is %#02x", t)
	}
	text := func(b []byte) string { return strings.TrimSpace(strings.TrimRight(string(b), "\x00")) }
	d.Vendor, d.Product, d.Revision = text(b[8:16]), text(b[16:32]), text(b[32:36])
	if err := d.ready(ctx); err != nil {
		return err
	}
	if b, err = d.get(ctx, 32, 0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32); err != nil {
		return err
	}
	last, size := binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:])
	if size < 512 || size > 1<<20 || size&(size-1) != 0 || last >= 1<<63/uint64(size) {
		return fmt.Errorf("READ CAPACITY: %d blocks of %d bytes", last+1, size)
	}
	d.BlockSize, d.Blocks, d.Thin = int(size), last+1, b[14]&0x80 != 0
	d.MaxTransfer = min(MaxTransfer, 0xffff*int(size))
	if b, err = d.get(ctx, 192, 0x1a, 0x08, 0x3f, 0, 192); err == nil && len(b) > 3 { // MODE SENSE is optional
		d.ReadOnly = b[2]&0x80 != 0
	}
	if b, err = d.get(ctx, 64, 0x12, 1, 0xb0, 0, 64); err == nil && len(b) >= 12 { // and so is this page
		if n := uint64(binary.BigEndian.Uint32(b[8:])) * uint64(size); n > 0 {
			d.MaxTransfer = int(min(uint64(d.MaxTransfer), n))
		}
	}
	return ctx.Err()
}

// ready waits until TEST UNIT READY succeeds, unless the LUN is not becoming ready.
func (d *Disk) ready(ctx context.Context) error {
	for {
		err := d.s.doAgain(ctx, &Command{LUN: d.lun})
		var status *StatusError
		if !errors.As(err, &status) || status.Sense != (Sense{NotReady, 0x04, 0x01}) {
			return err
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}

// get does a command with up to n bytes of data-in and returns those that came. Commands with less than the fixed part of
// INQUIRY or READ CAPACITY are errors.
func (d *Disk) get(ctx context.Context, n int, cdb ...byte) ([]byte, error) {
	c := &Command{LUN: d.lun, In: make([]byte, n)}
	copy(c.CDB[:], cdb)
	if err := d.s.doAgain(ctx, c); err != nil {
		return nil, err
	}
	got := n - int(max(c.Residual, 0))
	if fixed := cdb[0] == 0x9e || cdb[0] == 0x12 && cdb[1] == 0; fixed && got < n {
		return nil, fmt.Errorf("%s: %d bytes of data came instead of %d", operation(cdb[0]), got, n)
	}
	return c.In[:max(got, 0)], nil
}

// LUN returns the number of the LUN.
func (d *Disk) LUN() int { return d.lun }

// Size returns the capacity in bytes.
func (d *Disk) Size() int64 { return int64(d.Blocks) * int64(d.BlockSize) }

// Session returns the session that d belongs to.
func (d *Disk) Session() *Session { return d.s }

// ReadCDB sets the CDB of c to a READ(16) of len(c.In) bytes at a byte offset. Both are multiples of BlockSize.
func (d *Disk) ReadCDB(c *Command, off int64) { d.cdb(c, 0x88, off, len(c.In)) }

// WriteCDB sets the CDB of c to a WRITE(16) of len(c.Out) bytes at a byte offset.
func (d *Disk) WriteCDB(c *Command, off int64) { d.cdb(c, 0x8a, off, len(c.Out)) }

// SyncCDB sets the CDB of c to a SYNCHRONIZE CACHE(16) of all blocks.
func (d *Disk) SyncCDB(c *Command) { d.cdb(c, 0x91, 0, 0) }

func (d *Disk) cdb(c *Command, op byte, off int64, n int) {
	c.LUN, c.CDB = d.lun, [pdu.CDBLen]byte{op}
	binary.BigEndian.PutUint64(c.CDB[2:], uint64(off)/uint64(d.BlockSize))
	binary.BigEndian.PutUint32(c.CDB[10:], uint32(n/d.BlockSize))
}

// Read reads len(p) bytes at a byte offset. Both are multiples of BlockSize.
func (d *Disk) Read(ctx context.Context, p []byte, off int64) error {
	return d.move(ctx, p, off, false)
}

// Write writes p at a byte offset. Both the offset and the length are multiples of BlockSize.
func (d *Disk) Write(ctx context.Context, p []byte, off int64) error {
	return d.move(ctx, p, off, true)
}

func (d *Disk) move(ctx context.Context, p []byte, off int64, write bool) error {
	switch size := int64(d.BlockSize); {
	case off%size != 0 || int64(len(p))%size != 0:
		return fmt.Errorf("LUN %d: %d bytes at offset %d: both must be multiples of the block size, %d", d.lun, len(p), off, size)
	case off < 0 || int64(len(p)) > d.Size()-off:
		return fmt.Errorf("LUN %d: %d bytes at offset %d: the LUN has %d", d.lun, len(p), off, d.Size())
	}
	c := &Command{}
	for len(p) > 0 {
		n := min(len(p), max(d.MaxTransfer, d.BlockSize))
		if write {
			c.Out = p[:n]
			d.WriteCDB(c, off)
		} else {
			c.In = p[:n]
			d.ReadCDB(c, off)
		}
		if err := d.s.doAgain(ctx, c); err != nil {
			return fmt.Errorf("LUN %d: %d bytes at offset %d: %w", d.lun, n, off, err)
		}
		if c.Residual != 0 {
			return fmt.Errorf("LUN %d: %d bytes at offset %d: %d were not transferred", d.lun, n, off, c.Residual)
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// Sync makes all acknowledged writes durable (SYNCHRONIZE CACHE).
func (d *Disk) Sync(ctx context.Context) error {
	c := &Command{}
	d.SyncCDB(c)
	if err := d.s.doAgain(ctx, c); err != nil {
		return fmt.Errorf("LUN %d: %w", d.lun, err)
	}
	return nil
}

// Mapped returns whether the blocks from a byte offset on have storage, and for how many bytes that holds (GET LBA STATUS).
// An error with the sense key IllegalRequest says that the LUN does not support the command.
func (d *Disk) Mapped(ctx context.Context, off int64) (mapped bool, length int64, err error) {
	var cdb [pdu.CDBLen]byte
	cdb[0], cdb[1] = 0x9e, 0x12
	binary.BigEndian.PutUint64(cdb[2:], uint64(off)/uint64(d.BlockSize))
	cdb[13] = 24
	b, err := d.get(ctx, 24, cdb[:]...)
	if err != nil {
		return false, 0, fmt.Errorf("LUN %d: GET LBA STATUS: %w", d.lun, err)
	}
	first, n := binary.BigEndian.Uint64(b[8:]), binary.BigEndian.Uint32(b[16:])
	if first != uint64(off)/uint64(d.BlockSize) || n == 0 {
		return false, 0, fmt.Errorf("LUN %d: GET LBA STATUS: %d blocks at LBA %d", d.lun, n, first)
	}
	return b[20]&0x0f == 0, int64(n) * int64(d.BlockSize), nil
}
