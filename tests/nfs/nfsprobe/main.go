// Command nfsprobe is a client of NFSv4.1 over RPC-over-RDMA for the server of Linux. The back channel of its session is its only
// connection. It writes and reads 1 MiB per call, has delegations recalled, and loses the connection with calls outstanding. It
// prints one line for each step that has worked.
//
//	nfsprobe ADDRESS EXPORT MOUNT
//
// EXPORT is the directory that the server exports as its root, in the same machine. It has the files random with at most 1 MiB,
// small and small2. MOUNT is where another client has mounted it.
package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/rpcrdma"
	"github.com/iser-target/iser-target/rdma/rpcrdma/oncrpc"
	"github.com/iser-target/iser-target/tests/nfs"
)

const (
	callbackProgram = 0x40000000
	fileSize        = 1 << 20
	fileSync        = 2
	slots           = 4
)

// probe is a session with the server.
type probe struct {
	ctx         context.Context
	client      *rpcrdma.Client
	conn        *connection // the present one
	connections atomic.Int32
	outstanding atomic.Int32 // calls
	lost        int32        // calls that were outstanding when the connection was last replaced
	clientID    uint64
	createSeq   uint32
	session     [16]byte
	hasSession  atomic.Bool
	seqs        [slots]uint32
	recalls     chan [16]byte // stateids
	nulls       chan struct{}
}

func newProbe(ctx context.Context) *probe {
	return &probe{ctx: ctx, recalls: make(chan [16]byte, 10), nulls: make(chan struct{}, 10)}
}

func main() {
	log.SetFlags(0)
	if len(os.Args) != 4 {
		log.Fatal("usage: nfsprobe ADDRESS EXPORT MOUNT")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := newProbe(ctx).run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		log.Fatalf("nfsprobe: %v", err)
	}
}

// connection is a TCP connection that resets itself. It hides the methods by which package rdma could circumvent Read and Write.
type connection struct {
	net.Conn
	writes atomic.Int64 // how many bytes more to write before that; 0: no end
	reads  atomic.Bool  // at the next byte from the server, which gets lost
}

func (c *connection) reset() error {
	return errors.Join(io.ErrUnexpectedEOF, c.Conn.(*net.TCPConn).SetLinger(0), c.Close())
}

// Write implements net.Conn.
func (c *connection) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if left := c.writes.Load(); left > 0 && err == nil {
		if left -= int64(n); left <= 0 {
			return n, c.reset()
		}
		c.writes.Store(left)
	}
	return n, err
}

// Read implements net.Conn.
func (c *connection) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.reads.Load() && n > 0 {
		return 0, c.reset()
	}
	return n, err
}

// connect connects to the server, and makes a NULL call.
func (p *probe) connect(address string) error {
	callbacks := &rpcrdma.Programs{}
	callbacks.Register(callbackProgram, nfs.CallbackVersion, 0, func(_ context.Context, r *rpcrdma.Request) error {
		p.nulls <- struct{}{}
		return r.Args.End()
	})
	callbacks.Register(callbackProgram, nfs.CallbackVersion, nfs.Compound, p.callback)
	dial := func(ctx context.Context) (net.Conn, error) {
		p.lost = p.outstanding.Load()
		nc, err := new(net.Dialer).DialContext(ctx, "tcp", address)
		if err != nil {
			return nil, err
		}
		p.connections.Add(1)
		p.conn = &connection{Conn: nc}
		return p.conn, nil
	}
	config := rpcrdma.Config{Programs: callbacks, Credits: 4, RDMA: rdma.Options{NoCRC: true}}
	p.client = rpcrdma.NewClient(dial, config, p.ready)
	null := p.call()
	null.Procedure = 0
	null.Begin()
	if err := p.client.Do(p.ctx, null); err != nil {
		return fmt.Errorf("NULL: %w", err)
	}
	return nil
}

// ready makes a new connection the one of the session, and of its back channel (RFC 8881, section 18.34). So the server may
// call as soon as the client is ready (RFC 8167, section 6).
func (p *probe) ready(ctx context.Context, c *rpcrdma.Conn) error {
	if !p.hasSession.Load() {
		return nil
	}
	call := p.call()
	e := begin(call, 1)
	e.Uint32(nfs.OpBindConn)
	e.Fixed(p.session[:])
	e.Uint32(nfs.ForeOrBoth)
	e.Bool(false)
	if err := c.Do(ctx, call); err != nil {
		return err
	}
	d := &call.Results
	results(d)
	if err := nfs.Op(d, nfs.OpBindConn); err != nil {
		return err
	}
	d.Fixed(16)
	if dir := d.Uint32(); dir != nfs.Both {
		return fmt.Errorf("BIND_CONN_TO_SESSION: direction %d", dir)
	}
	return d.Err()
}

func (p *probe) run(address, export, mount string) error {
	if err := p.connect(address); err != nil {
		return err
	}
	defer p.client.Close()
	fmt.Println("NULL answered")
	for _, step := range []struct {
		name string
		f    func() error
	}{
		{"EXCHANGE_ID", p.exchangeID},
		{"CREATE_SESSION", p.createSession},
		{"RECLAIM_COMPLETE", p.reclaimComplete},
		{"write and read", func() error { return p.readWrite(export) }},
		{"read", p.readRandom},
		{"delegation", func() error { return p.delegation("small", mount) }},
		{"loss during WRITE", func() error { return p.loseWrites(export) }},
		{"loss of a reply", func() error { return p.loseReply(export) }},
		{"delegation after the loss", func() error { return p.delegation("small2", export) }},
		{"DESTROY_SESSION", p.destroy},
	} {
		if err := step.f(); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return nil
}

func (p *probe) call() *rpcrdma.Call {
	return &rpcrdma.Call{Program: nfs.Program, Version: nfs.Version, Procedure: nfs.Compound, MaxReply: 2000,
		Credential: (&oncrpc.Sys{Machine: "nfsprobe"}).Auth()}
}

// begin begins a COMPOUND of n operations.
func begin(call *rpcrdma.Call, n uint32) *oncrpc.Encoder {
	e := call.Begin()
	e.String("")
	e.Uint32(1) // minorversion
	e.Uint32(n)
	return e
}

// results decodes the results up to those of the first operation.
func results(d *oncrpc.Decoder) {
	d.Uint32() // status of the last operation, which has its own, too
	d.String(1024)
	d.Count(20, 8)
}

// alone makes a COMPOUND of one operation without SEQUENCE, and returns the results of op.
func (p *probe) alone(op uint32, args func(e *oncrpc.Encoder)) (*oncrpc.Decoder, error) {
	call := p.call()
	e := begin(call, 1)
	e.Uint32(op)
	args(e)
	if err := p.client.Do(p.ctx, call); err != nil {
		return nil, err
	}
	results(&call.Results)
	return &call.Results, nfs.Op(&call.Results, op)
}

// sequence makes a COMPOUND of SEQUENCE and n operations more in a slot, and returns the results of those. The server keeps the
// reply for a retransmission unless it has an item.
func (p *probe) sequence(call *rpcrdma.Call, slot, n uint32, args func(e *oncrpc.Encoder)) (*oncrpc.Decoder, error) {
	p.outstanding.Add(1)
	defer p.outstanding.Add(-1)
	p.seqs[slot]++
	for {
		e := begin(call, n+1)
		e.Uint32(nfs.OpSequence)
		e.Fixed(p.session[:])
		e.Uint32(p.seqs[slot])
		e.Uint32(slot)
		e.Uint32(slots - 1)
		e.Bool(len(call.Into) == 0)
		args(e)
		if err := p.client.Do(p.ctx, call); err != nil {
			return nil, err
		}
		d := &call.Results
		results(d)
		err := nfs.Op(d, nfs.OpSequence)
		var status *nfs.StatusError
		if errors.As(err, &status) && status.Op == nfs.OpSequence && status.Status == nfs.ErrDelay {
			// A retransmission has arrived before the server has finished the call. The slot has not changed.
			select {
			case <-time.After(100 * time.Millisecond):
				continue
			case <-p.ctx.Done():
			}
		}
		if err != nil {
			return nil, err
		}
		d.Fixed(16)
		for range 5 {
			d.Uint32()
		}
		return d, d.Err()
	}
}

func (p *probe) exchangeID() error {
	d, err := p.alone(nfs.OpExchangeID, func(e *oncrpc.Encoder) {
		e.Uint64(rand.Uint64())
		e.String("nfsprobe of rdma/rpcrdma")
		e.Uint32(0) // flags
		e.Uint32(0) // SP4_NONE
		e.Uint32(0) // no implementation id
	})
	if err != nil {
		return err
	}
	p.clientID, p.createSeq = d.Uint64(), d.Uint32()
	fmt.Println("EXCHANGE_ID answered")
	return d.Err()
}

func (p *probe) createSession() error {
	d, err := p.alone(nfs.OpCreateSession, func(e *oncrpc.Encoder) {
		e.Uint64(p.clientID)
		e.Uint32(p.createSeq)
		e.Uint32(nfs.BackChannel)
		nfs.Channel{MaxRequest: fileSize + 4096, MaxResponse: fileSize + 4096, MaxCached: 2048, MaxOps: 16, MaxRequests: slots}.Append(e)
		nfs.Channel{MaxRequest: 4000, MaxResponse: 4000, MaxOps: 2, MaxRequests: 1}.Append(e)
		e.Uint32(callbackProgram)
		e.Uint32(1)
		e.Uint32(oncrpc.AuthNone)
	})
	if err != nil {
		return err
	}
	copy(p.session[:], d.Fixed(16))
	d.Uint32()
	flags := d.Uint32()
	var fore nfs.Channel
	fore.Parse(d)
	if err := d.Err(); err != nil {
		return err
	}
	if flags&nfs.BackChannel == 0 {
		return errors.New("the server does not use the connection as back channel")
	}
	if fore.MaxRequests < slots || min(fore.MaxRequest, fore.MaxResponse) < fileSize+1024 {
		return fmt.Errorf("the session has %d slots, for calls of %d and replies of %d bytes", fore.MaxRequests, fore.MaxRequest, fore.MaxResponse)
	}
	p.hasSession.Store(true)
	fmt.Println("CREATE_SESSION answered, back channel on the connection")
	return nil
}

func (p *probe) reclaimComplete() error {
	d, err := p.sequence(p.call(), 0, 1, func(e *oncrpc.Encoder) {
		e.Uint32(nfs.OpReclaimComplete)
		e.Bool(false)
	})
	if err != nil {
		return err
	}
	return nfs.Op(d, nfs.OpReclaimComplete)
}

// opened is a file.
type opened struct {
	stateid    [16]byte
	fh         []byte
	delegated  bool
	delegation [16]byte
}

// open opens a file in the root.
func (p *probe) open(name string, access uint32, create bool) (o opened, err error) {
	d, err := p.sequence(p.call(), 0, 3, func(e *oncrpc.Encoder) {
		e.Uint32(nfs.OpPutRootFH)
		e.Uint32(nfs.OpOpen)
		e.Uint32(0)
		e.Uint32(access)
		e.Uint32(0)
		e.Uint64(p.clientID)
		e.String("owner")
		e.Bool(create)
		if create {
			e.Uint32(0) // UNCHECKED4
			e.Uint32(0) // no attributes
			e.Uint32(0)
		}
		e.Uint32(0) // CLAIM_NULL
		e.String(name)
		e.Uint32(nfs.OpGetFH)
	})
	if err == nil {
		err = nfs.Op(d, nfs.OpPutRootFH)
	}
	if err == nil {
		err = nfs.Op(d, nfs.OpOpen)
	}
	if err != nil {
		return o, err
	}
	copy(o.stateid[:], d.Fixed(16))
	d.Bool()
	d.Uint64()
	d.Uint64()
	d.Uint32()
	for range d.Count(3, 4) {
		d.Uint32()
	}
	switch kind := d.Uint32(); kind {
	case 0:
	case 1: // OPEN_DELEGATE_READ
		o.delegated = true
		copy(o.delegation[:], d.Fixed(16))
		d.Bool()
		for range 3 {
			d.Uint32()
		}
		d.String(1024)
	case 3: // OPEN_DELEGATE_NONE_EXT
		if why := d.Uint32(); why == 1 || why == 2 {
			d.Bool()
		}
	default:
		return o, fmt.Errorf("delegation of type %d", kind)
	}
	if err := nfs.Op(d, nfs.OpGetFH); err != nil {
		return o, err
	}
	o.fh = bytes.Clone(d.Opaque(128))
	return o, d.End()
}

// withFile makes a COMPOUND of SEQUENCE, PUTFH and op, and returns the results of op.
func (p *probe) withFile(call *rpcrdma.Call, slot uint32, o *opened, op uint32, args func(e *oncrpc.Encoder)) (*oncrpc.Decoder, error) {
	d, err := p.sequence(call, slot, 2, func(e *oncrpc.Encoder) {
		e.Uint32(nfs.OpPutFH)
		e.Opaque(o.fh)
		e.Uint32(op)
		args(e)
	})
	if err == nil {
		err = nfs.Op(d, nfs.OpPutFH)
	}
	if err == nil {
		err = nfs.Op(d, op)
	}
	return d, err
}

func (p *probe) closeFile(o *opened) error {
	_, err := p.withFile(p.call(), 0, o, nfs.OpClose, func(e *oncrpc.Encoder) {
		e.Uint32(0)
		e.Fixed(o.stateid[:])
	})
	return err
}

// write writes data, in a read chunk.
func (p *probe) write(slot uint32, o *opened, offset int, data []byte) error {
	d, err := p.withFile(p.call(), slot, o, nfs.OpWrite, func(e *oncrpc.Encoder) {
		e.Fixed(o.stateid[:])
		e.Uint64(uint64(offset))
		e.Uint32(fileSync)
		e.Item(data)
	})
	if err != nil {
		return fmt.Errorf("WRITE: %w", err)
	}
	if count := d.Uint32(); int(count) != len(data) {
		return fmt.Errorf("WRITE of %d bytes", count)
	}
	return nil
}

// read reads into the memory, in a write chunk, and returns what it has got. That has to be in the memory.
func (p *probe) read(o *opened, offset int, into []byte) ([]byte, error) {
	call := p.call()
	call.Into = [][]byte{into}
	d, err := p.withFile(call, 0, o, nfs.OpRead, func(e *oncrpc.Encoder) {
		e.Fixed(o.stateid[:])
		e.Uint64(uint64(offset))
		e.Uint32(uint32(len(into)))
	})
	if err != nil {
		return nil, fmt.Errorf("READ: %w", err)
	}
	d.Bool()
	got := d.Item(len(into))
	if err := d.End(); err != nil {
		return nil, fmt.Errorf("READ: %w", err)
	}
	if len(got) == 0 || &got[0] != &into[0] {
		return nil, fmt.Errorf("READ: %d bytes, or they are elsewhere", len(got))
	}
	return got, nil
}

// pattern returns n times 1 MiB, which depend on the seed.
func pattern(seed byte, n int) []byte {
	data := make([]byte, n*fileSize)
	rand.NewChaCha8([32]byte{seed}).Read(data)
	return data
}

// readWrite writes 4 times 1 MiB in a read chunk each, reads them in write chunks, and compares, also with the file in dir unless
// dir is "".
func (p *probe) readWrite(dir string) error {
	o, err := p.open("big", 3, true)
	if err != nil {
		return err
	}
	data := pattern(1, 4)
	for at := 0; at < len(data); at += fileSize {
		if err := p.write(0, &o, at, data[at:][:fileSize]); err != nil {
			return err
		}
	}
	into := make([]byte, fileSize)
	for at := 0; at < len(data); at += fileSize {
		clear(into)
		got, err := p.read(&o, at, into)
		if err != nil {
			return err
		}
		if !bytes.Equal(got, data[at:][:fileSize]) {
			return fmt.Errorf("READ: %d bytes at %d differ", len(got), at)
		}
	}
	fmt.Println("WRITE and READ of 4 times 1 MiB in chunks agree")
	fmt.Printf("written: %x big\n", sha256.Sum256(data))
	if dir != "" {
		err = stored(dir, "big", data)
	}
	return errors.Join(err, p.closeFile(&o))
}

// stored checks the file in the directory of the server.
func stored(dir, name string, want []byte) error {
	got, err := os.ReadFile(filepath.Join(dir, name))
	if err == nil && !bytes.Equal(got, want) {
		err = fmt.Errorf("%s has %d bytes, or other data than was written", name, len(got))
	}
	return err
}

// readRandom prints the checksum of a file of 1 MiB that the server's machine has written.
func (p *probe) readRandom() error {
	o, err := p.open("random", 1, false)
	if err != nil {
		return err
	}
	got, err := p.read(&o, 0, make([]byte, fileSize))
	if err != nil {
		return err
	}
	fmt.Printf("read: %x random\n", sha256.Sum256(got))
	return p.closeFile(&o)
}

// delegation gets a read delegation of a file, and has it recalled: the file is opened for writing in another directory.
func (p *probe) delegation(name, dir string) error {
	o, err := p.open(name, 1|nfs.WantReadDelegation, false)
	if err != nil {
		return err
	}
	if !o.delegated {
		return errors.New("the server has given no delegation")
	}
	fmt.Println("OPEN of", name, "gave a read delegation")
	other := make(chan error, 1)
	go func() {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_WRONLY, 0)
		if err == nil {
			err = f.Close()
		}
		other <- err
	}()
	select {
	case id := <-p.recalls:
		if !bytes.Equal(id[4:], o.delegation[4:]) {
			return fmt.Errorf("CB_RECALL of stateid %x, not %x", id, o.delegation)
		}
		fmt.Println("CB_SEQUENCE and CB_RECALL of", name, "answered")
	case err := <-other:
		return fmt.Errorf("the other open has not waited: %w", err)
	case <-p.ctx.Done():
		return fmt.Errorf("no CB_RECALL: %w", p.ctx.Err())
	}
	select {
	case err := <-other:
		return fmt.Errorf("the other open has not waited for DELEGRETURN: %w", err)
	default:
	}
	_, err = p.withFile(p.call(), 0, &o, nfs.OpDelegReturn, func(e *oncrpc.Encoder) { e.Fixed(o.delegation[:]) })
	if err != nil {
		return fmt.Errorf("DELEGRETURN: %w", err)
	}
	select {
	case err = <-other:
	case <-p.ctx.Done():
		err = fmt.Errorf("the other open still waits: %w", p.ctx.Err())
	}
	if err != nil {
		return err
	}
	fmt.Println("DELEGRETURN of", name, "answered, the other open continues")
	return p.closeFile(&o)
}

// loseWrites loses the connection when the server has read half of what 3 calls write. They end as if nothing had happened.
func (p *probe) loseWrites(dir string) error {
	o, err := p.open("lossy", 3, true)
	if err != nil {
		return err
	}
	const calls = 3
	data := pattern(2, calls)
	before := p.connections.Load()
	p.conn.writes.Store(calls * fileSize / 2)
	ended := make(chan error, calls)
	for i := range calls {
		go func() { ended <- p.write(uint32(i), &o, i*fileSize, data[i*fileSize:][:fileSize]) }()
	}
	for range calls {
		err = errors.Join(err, <-ended)
	}
	if err != nil {
		return err
	}
	if n := p.connections.Load() - before; n != 1 || p.lost < 2 {
		return fmt.Errorf("%d connections, %d calls were outstanding", n, p.lost)
	}
	if err := stored(dir, "lossy", data); err != nil {
		return err
	}
	fmt.Println("WRITE of 3 times 1 MiB answered, the connection was lost meanwhile")
	return p.closeFile(&o)
}

// loseReply loses the connection with the reply of a REMOVE, which the server must not execute again.
func (p *probe) loseReply(dir string) error {
	o, err := p.open("removed", 3, true)
	if err == nil {
		err = p.closeFile(&o)
	}
	if err != nil {
		return err
	}
	before := p.connections.Load()
	p.conn.reads.Store(true)
	d, err := p.sequence(p.call(), 0, 2, func(e *oncrpc.Encoder) {
		e.Uint32(nfs.OpPutRootFH)
		e.Uint32(nfs.OpRemove)
		e.String("removed")
	})
	if err == nil {
		err = nfs.Op(d, nfs.OpPutRootFH)
	}
	if err == nil {
		err = nfs.Op(d, nfs.OpRemove)
	}
	if err != nil {
		return err
	}
	if n := p.connections.Load() - before; n != 1 {
		return fmt.Errorf("%d connections", n)
	}
	if _, err := os.Stat(filepath.Join(dir, "removed")); !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("the file exists: %w", err)
	}
	fmt.Println("REMOVE answered once, on the connection after that of the call")
	return nil
}

func (p *probe) destroy() error {
	_, err := p.alone(nfs.OpDestroySession, func(e *oncrpc.Encoder) { e.Fixed(p.session[:]) })
	if err == nil {
		fmt.Println("DESTROY_SESSION answered")
	}
	return err
}

// callback answers CB_COMPOUND (RFC 8881, section 20).
func (p *probe) callback(_ context.Context, r *rpcrdma.Request) error {
	d, e := &r.Args, &r.Results
	tag := d.String(1024)
	d.Uint32() // minorversion
	d.Uint32() // callback_ident
	n := d.Count(8, 4)
	e.Uint32(nfs.OK)
	e.String(tag)
	e.Uint32(uint32(n))
	for range n {
		op := d.Uint32()
		e.Uint32(op)
		e.Uint32(nfs.OK)
		switch op {
		case nfs.OpCBSequence:
			e.Fixed(d.Fixed(16))
			e.Uint32(d.Uint32()) // sequenceid
			e.Uint32(d.Uint32()) // slotid
			highest := d.Uint32()
			d.Bool()
			for range d.Count(8, 20) {
				d.Fixed(16)
				for range d.Count(64, 8) {
					d.Uint64()
				}
			}
			e.Uint32(highest)
			e.Uint32(highest)
		case nfs.OpCBRecall:
			var id [16]byte
			copy(id[:], d.Fixed(16))
			d.Bool()
			d.Opaque(128)
			if d.Err() == nil {
				p.recalls <- id
			}
		default:
			return fmt.Errorf("operation %d in a callback", op)
		}
	}
	return d.End()
}
