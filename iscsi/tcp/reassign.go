package tcp

import "github.com/iser-target/iser-target/iscsi"

// This file is for ErrorRecoveryLevel 2 (RFC 7143, section 7.2.2).

// A stretch is the Data-In PDUs of one PutData that have not been acknowledged.
type stretch struct {
	sn, count            uint32 // DataSN of the first PDU, and number of PDUs
	off, from            uint32 // Buffer Offset of the data, and position of the first PDU in it
	size, segment, burst uint32 // bytes
}

// Detach implements iscsi.Reassigner. It releases the Buffers: the core can produce the
// data again.
func (c *Conn) Detach(it *iscsi.Task) iscsi.Progress {
	t := it.Mover.(*task)
	c.mu.Lock()
	defer c.mu.Unlock()
	next, sent := t.dataSN, t.sent
	if t.r2tSN > 0 {
		next = t.r2tSN
	}
	var kept []stretch
	for k := range t.kept.All() {
		kept = append(kept, stretch{k.sn, k.count, k.off, k.from, uint32(len(k.data)), k.segment, k.burst})
	}
	t.last = nil
	c.release(t)
	return iscsi.Progress{Next: next, Acknowledged: t.acked, Offset: func(sn uint32) uint32 {
		if sn == next {
			return sent
		}
		for _, k := range kept {
			if sn < k.sn || sn >= k.sn+k.count {
				continue
			}
			off := k.from
			for ; sn > k.sn; sn-- {
				off += cut(off, k.size, k.segment, k.burst)
			}
			return k.off + off
		}
		return 0 // no longer kept
	}}
}

// Advertised implements iscsi.Reassigner. TCP advertises nothing.
func (c *Conn) Advertised(*iscsi.Task) {}

// Rebind implements iscsi.Reassigner.
func (c *Conn) Rebind(it, _ *iscsi.Task, at iscsi.Resumption) error {
	t, h := it.Mover.(*task), it.Request()
	c.mu.Lock()
	defer c.mu.Unlock()
	t.t, t.itt, t.lun = it, h.ITT(), h.LUN()
	t.ttt += 1 << indexBits
	t.keeping, t.last = keeping{}, nil
	t.dataSN, t.r2tSN, t.sent = 0, 0, at.Offset
	if h.Read() {
		t.dataSN, t.acked = at.SN, at.SN
	} else {
		t.r2tSN = at.SN
	}
	return nil
}
