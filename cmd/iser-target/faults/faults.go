// Package faults passes connections on to a target and disturbs them: it drops, delays and corrupts
// whole PDUs and FPDUs, and cuts connections in the middle of one. The same seed disturbs the same
// units of a connection in the same way.
package faults

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"time"
)

// Options say what a Proxy does. Probabilities are from 0 to 1, for each unit.
type Options struct {
	To       string // address of the target
	Seed     uint64
	Drop     float64       // the unit does not arrive; an RDMA Write does, because no layer notices the loss of one
	Corrupt  float64       // one bit of the unit changes, in its header or in its data
	Cut      float64       // a part of the unit arrives, and the connection ends
	Withhold float64       // an RDMA Read Response does not arrive
	Delayed  float64       // the unit, and all that follow it, arrive later
	Delay    time.Duration // the longest time of that
	Startup  bool          // also disturb MPA startup and the login over TCP, which no digest covers
	// Log is called for each fault, and for the reason if the proxy itself ends a connection. Several
	// goroutines may call it at once.
	Log func(line string)
}

// Check returns what is wrong with o.
func (o *Options) Check() error {
	for _, p := range []struct {
		name string
		p    float64
	}{{"drop", o.Drop}, {"corrupt", o.Corrupt}, {"cut", o.Cut}, {"withhold", o.Withhold}, {"delayed", o.Delayed}} {
		if !(p.p >= 0 && p.p <= 1) {
			return fmt.Errorf("--%s: %v: a probability is a number from 0 to 1", p.name, p.p)
		}
	}
	if o.Delay < 0 {
		return fmt.Errorf("--delay: %v: must not be negative", o.Delay)
	}
	return nil
}

// A Proxy accepts connections and passes them on.
type Proxy struct {
	o     Options
	conns sync.WaitGroup
}

// New returns a proxy.
func New(o Options) (*Proxy, error) {
	if o.Log == nil {
		o.Log = func(string) {}
	}
	return &Proxy{o: o}, o.Check()
}

// Serve passes on the connections that l accepts, until ctx ends. It closes l and all connections.
func (p *Proxy) Serve(ctx context.Context, l net.Listener) error {
	defer p.conns.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	for n := uint64(1); ; n++ {
		nc, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		p.conns.Go(func() { p.pass(ctx, nc, n) })
	}
}

// pass passes on connection n until one of its ends is closed.
func (p *Proxy) pass(ctx context.Context, initiator net.Conn, n uint64) {
	defer initiator.Close()
	var d net.Dialer
	target, err := d.DialContext(ctx, "tcp", p.o.To)
	if err != nil {
		p.o.Log(fmt.Sprintf("connection %d: %v", n, err))
		return
	}
	defer target.Close()
	end := func() { initiator.Close(); target.Close() }
	defer context.AfterFunc(ctx, end)()
	to, from := NewSplitters()
	var both sync.WaitGroup
	for i, way := range []struct {
		name     string
		s        *Splitter
		src, dst net.Conn
	}{{"to the target", to, initiator, target}, {"from the target", from, target, initiator}} {
		both.Go(func() {
			// It ends with the stream, with a fault, or because the other direction has ended.
			err := p.copy(ctx, way.s, way.src, way.dst, decisions(p.o.Seed, n, i), fmt.Sprintf("connection %d, %s", n, way.name))
			switch {
			case errors.Is(err, io.EOF):
				if c, ok := way.dst.(interface{ CloseWrite() error }); ok {
					c.CloseWrite()
				}
			case !errors.Is(err, net.ErrClosed) && !errors.Is(err, errCut):
				p.o.Log(fmt.Sprintf("connection %d, %s: %v", n, way.name, err))
				end()
			default:
				end()
			}
		})
	}
	both.Wait()
}

// errCut is the end of a connection that the proxy has cut.
var errCut = errors.New("cut")

// decisions returns the random numbers of one direction of connection n.
func decisions(seed, n uint64, direction int) *rand.Rand {
	return rand.New(rand.NewPCG(seed, n<<1|uint64(direction)))
}

// A decision is what happens to one unit.
type decision struct {
	drop, corrupt, cut, withhold, delayed bool
	data                                  bool // corrupt its data, not its header
	at                                    float64
	bit                                   int
	delay                                 float64 // of the longest one
	reset                                 bool    // the end of the connection is a reset
}

// decide draws the same numbers for each unit, whatever it is, so that a decision depends only on the
// seed, the connection, the direction and the number of the unit.
func (o *Options) decide(rng *rand.Rand) decision {
	return decision{
		drop: rng.Float64() < o.Drop, corrupt: rng.Float64() < o.Corrupt, cut: rng.Float64() < o.Cut,
		withhold: rng.Float64() < o.Withhold, delayed: rng.Float64() < o.Delayed,
		data: rng.IntN(2) == 0, at: rng.Float64(), bit: rng.IntN(8), delay: rng.Float64(), reset: rng.IntN(2) == 0,
	}
}

// copy passes on one direction until it ends.
func (p *Proxy) copy(ctx context.Context, s *Splitter, src io.Reader, dst net.Conn, rng *rand.Rand, name string) error {
	var b []byte
	buf := make([]byte, 64<<10)
	for number := 1; ; {
		u, need, err := s.Split(b)
		if err != nil {
			return err
		}
		if need == 0 {
			d := p.o.decide(rng)
			if err := p.send(ctx, u, d, dst, fmt.Sprintf("%s, unit %d (%s, %d bytes)", name, number, u.Kind, len(u.Bytes))); err != nil {
				return err
			}
			b = b[len(u.Bytes):]
			number++
			continue
		}
		n, err := src.Read(buf)
		if b = append(b, buf[:n]...); n == 0 && err != nil {
			if errors.Is(err, io.EOF) && len(b) > 0 {
				if _, err := dst.Write(b); err != nil { // of a unit that its sender did not complete
					return err
				}
			}
			return err
		}
	}
}

// send passes on a unit, or does what was decided.
func (p *Proxy) send(ctx context.Context, u Unit, d decision, dst net.Conn, name string) error {
	if !u.Kind.Protected() && !p.o.Startup {
		d = decision{}
	}
	if d.delayed && p.o.Delay > 0 {
		delay := time.Duration(d.delay * float64(p.o.Delay))
		p.o.Log(fmt.Sprintf("%s: delayed by %v", name, delay))
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			return net.ErrClosed
		}
	}
	switch {
	case d.cut:
		n := int(d.at * float64(len(u.Bytes)))
		p.o.Log(fmt.Sprintf("%s: cut after %d bytes", name, n))
		dst.Write(u.Bytes[:n])
		if c, ok := dst.(*net.TCPConn); ok && d.reset {
			c.SetLinger(0)
		}
		return errCut
	case d.withhold && u.Kind == ReadResponse:
		p.o.Log(name + ": withheld")
		return nil
	case d.drop && u.Kind != RDMAWrite:
		p.o.Log(name + ": dropped")
		return nil
	case d.corrupt:
		from, end := 0, u.Header
		if d.data && u.Header < len(u.Bytes) {
			from, end = u.Header, len(u.Bytes)
		}
		at := from + int(d.at*float64(end-from))
		u.Bytes[at] ^= 1 << d.bit
		p.o.Log(fmt.Sprintf("%s: bit %d of byte %d changed", name, d.bit, at))
	}
	_, err := dst.Write(u.Bytes)
	return err
}
