package tcp

import "github.com/iser-target/iser-target/iscsi"

// This file is for ErrorRecoveryLevel 2 (RFC 7143, section 7.2.2).

// Detach implements iscsi.Reassigner. It releases the Buffers: the core can produce the data again.
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
		kept = append(kept, k.stretch)
	}
	t.last = nil
	c.release(t)
	return iscsi.Progress{Next: next, Acknowledged: t.acked, Offset: func(sn uint32) uint32 {
		if sn == next {
			return sent
		}
		for _, k := range kept {
			if k.sn <= sn && sn < k.sn+k.count {
				return k.off + k.seek(sn)
			}
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
