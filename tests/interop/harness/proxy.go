package harness

import (
	"io"
	"net"
	"sync"
	"testing"

	"github.com/iser-target/iser-target/tests/interop/vm"
)

// A Proxy is a way to a portal that can be lost: it passes TCP connections on.
type Proxy struct {
	l  net.Listener
	to string // address of the portal; set before anybody is told of the proxy

	wg      sync.WaitGroup
	mu      sync.Mutex // guards what follows
	changed sync.Cond  // of mode
	mode    mode
	conns   map[net.Conn]bool // both ends of what is passed on
}

// A mode is what a Proxy does.
type mode int

const (
	passing mode = iota
	holding
	refusing
)

// NewProxy returns a proxy that passes, and lives as long as t.
func NewProxy(t testing.TB) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{l: l, conns: make(map[net.Conn]bool)}
	p.changed.L = &p.mu
	p.wg.Go(p.accept)
	t.Cleanup(func() {
		l.Close()
		p.Refuse()
		p.wg.Wait()
	})
	return p
}

// Addr returns the address at which the guest reaches the proxy.
func (p *Proxy) Addr() string { return hostPort(vm.HostAddr, p.l.Addr().(*net.TCPAddr).Port) }

// To makes the proxy lead to an address of the host, before anybody is told of the proxy.
func (p *Proxy) To(addr string) { p.to = addr }

// Pass passes on what comes from now on.
func (p *Proxy) Pass() { p.set(passing) }

// Hold leaves connections open but lets nothing through, as a cable that is
// pulled: only by the time can a peer tell. What comes meanwhile is lost, and
// its connection ends with the next Pass: a write that the initiator has given
// up for lost, and may have repeated elsewhere, must not be done then.
func (p *Proxy) Hold() { p.set(holding) }

// Refuse ends all connections, and new ones at once.
func (p *Proxy) Refuse() { p.set(refusing) }

func (p *Proxy) set(m mode) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mode = m
	if m == refusing {
		for c := range p.conns {
			c.Close()
		}
		clear(p.conns)
	}
	p.changed.Broadcast()
}

func (p *Proxy) accept() {
	for {
		from, err := p.l.Accept()
		if err != nil {
			return // closed
		}
		p.wg.Go(func() { p.serve(from) })
	}
}

// serve passes on what comes on one connection until one of its ends is closed.
func (p *Proxy) serve(from net.Conn) {
	defer from.Close()
	if !p.passes() {
		return
	}
	to, err := net.Dial("tcp", p.to)
	if err != nil {
		return
	}
	defer to.Close()
	p.mu.Lock()
	if p.mode == refusing {
		p.mu.Unlock()
		return
	}
	p.conns[from], p.conns[to] = true, true
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.conns, from)
		delete(p.conns, to)
	}()
	var back sync.WaitGroup
	back.Go(func() { p.copy(from, to) })
	p.copy(to, from)
	back.Wait()
}

// copy copies until one of the connections has ended, then ends both.
func (p *Proxy) copy(dst, src net.Conn) {
	defer dst.Close()
	defer src.Close()
	io.Copy(gate{dst, p}, src)
}

// A gate is a connection that is written to while its proxy passes.
type gate struct {
	io.Writer
	p *Proxy
}

func (g gate) Write(b []byte) (int, error) {
	if !g.p.passes() {
		return 0, net.ErrClosed
	}
	return g.Writer.Write(b)
}

// passes reports whether p passes. If p holds, passes waits until it no longer does.
func (p *Proxy) passes() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mode == passing {
		return true
	}
	for p.mode == holding {
		p.changed.Wait()
	}
	return false
}
