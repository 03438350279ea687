// Package verbs speaks the protocols of programs that use libibverbs and librdmacm, on the engine of package
// rdma: rping and rsockets (rstream, rcopy) of rdma-core, in both roles, and -R of perftest.
//
// The formats are those that rdma-core 44 sends on a little-endian machine.
package verbs

import (
	"errors"
	"fmt"
	"io"

	"github.com/iser-target/iser-target/rdma"
)

// A peer is a stream of the engine with one goroutine.
type peer struct {
	c  *rdma.Conn
	ev rdma.Event
}

// post posts and flushes operations whose memory stays as it is until the peer has answered them.
func (p *peer) post(wrs ...*rdma.WorkRequest) error {
	for _, wr := range wrs {
		if err := p.c.Post(wr); err != nil {
			return err
		}
	}
	p.c.Flush()
	return nil
}

// message returns the next Send, which has n bytes.
func (p *peer) message(n int) ([]byte, error) {
	if err := p.c.Receive(&p.ev); err != nil {
		return nil, err
	}
	if p.ev.Read != nil {
		return nil, errors.New("verbs: a Read ended that nobody waits for")
	}
	if len(p.ev.Data) != n {
		return nil, fmt.Errorf("verbs: a Send of %d bytes, want %d", len(p.ev.Data), n)
	}
	return p.ev.Data, nil
}

// read fills buf from the peer's memory.
func (p *peer) read(stag rdma.STag, to uint64, buf []byte) error {
	wr := rdma.WorkRequest{Op: rdma.Read, Data: buf, STag: stag, TO: to}
	if err := p.post(&wr); err != nil {
		return err
	}
	if err := p.c.Receive(&p.ev); err != nil {
		return err
	}
	if p.ev.Read != &wr {
		return fmt.Errorf("verbs: a Send of %d bytes came instead of the Read Response", len(p.ev.Data))
	}
	return p.ev.Err
}

// ended returns nil for the end of a stream between two messages.
func ended(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
