package iscsi

import (
	"sync"
	"sync/atomic"

	"github.com/iser-target/iser-target/iscsi/fifo"
	"github.com/iser-target/iser-target/iscsi/pdu"
)

// Holds has the shared Buffers of a connection whose data has left, until the initiator has it. The zero value is ready. Any goroutine may call its methods.
type Holds struct {
	acked atomic.Uint32 // the latest ExpStatSN
	n     atomic.Int32  // Buffers in queue; written with mu held

	mu    sync.Mutex         // a leaf
	queue fifo.Queue[Buffer] // in the order in which they left
	ended bool
}

// Hold takes b, whose data has left before the status with a StatSN of until-1. The mover calls it instead of Release.
func (h *Holds) Hold(b *Buffer, until uint32) {
	b.Sent()
	b.until = until
	h.mu.Lock()
	h.queue.Push(b, &b.link)
	h.n.Add(1)
	h.mu.Unlock()
	h.release() // the acknowledgement may have come meanwhile
}

// Acknowledge takes the ExpStatSN of a PDU of the initiator. One goroutine at a time calls it.
func (h *Holds) Acknowledge(expStatSN uint32) {
	if h.acked.Load() != expStatSN { // a store that other processors see costs more
		h.acked.Store(expStatSN)
	}
	if h.n.Load() > 0 {
		h.release()
	}
}

// End ends the connection: nobody will know when the initiator has the data that it has not acknowledged.
func (h *Holds) End() {
	h.mu.Lock()
	h.ended = true
	h.mu.Unlock()
	h.release()
}

// Len returns how many Buffers are held.
func (h *Holds) Len() int { return int(h.n.Load()) }

// release releases the Buffers that the initiator has acknowledged; after End, all.
func (h *Holds) release() {
	for {
		h.mu.Lock()
		acked := h.acked.Load()
		b := h.queue.Front()
		if b == nil || !h.ended && pdu.Before(acked, b.until) {
			h.mu.Unlock()
			return
		}
		h.queue.Pop()
		h.n.Add(-1)
		h.mu.Unlock()
		if pdu.Before(acked, b.until) {
			b.abandon()
		} else {
			b.Release()
		}
	}
}
