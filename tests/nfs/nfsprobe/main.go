// Command nfsprobe is a client of NFSv4.1 over RPC-over-RDMA for the server of Linux. It creates a session whose back channel is
// its only connection, writes and reads 1 MiB, and answers CB_NULL, CB_SEQUENCE and CB_RECALL. It prints what it has seen, one line each.
//
//	nfsprobe ADDRESS DIRECTORY
//
// DIRECTORY is what the server exports as its root, in the same machine. nfsprobe opens the file small there to have a delegation recalled.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"path/filepath"
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
)

// probe is a session with the server.
type probe struct {
	ctx      context.Context
	conn     *rpcrdma.Conn
	clientID uint64
	session  [16]byte
	seq      uint32
	recalls  chan [16]byte // stateids
	nulls    chan struct{}
}

func main() {
	log.SetFlags(0)
	if len(os.Args) != 3 {
		log.Fatal("usage: nfsprobe ADDRESS DIRECTORY")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	p := &probe{ctx: ctx, recalls: make(chan [16]byte, 10), nulls: make(chan struct{}, 10)}
	if err := p.run(os.Args[1], os.Args[2]); err != nil {
		log.Fatalf("nfsprobe: %v", err)
	}
}

// connect connects to the server, and makes a NULL call.
func (p *probe) connect(address string) (err error) {
	callbacks := &rpcrdma.Programs{}
	callbacks.Register(callbackProgram, nfs.CallbackVersion, 0, func(_ context.Context, r *rpcrdma.Request) error {
		p.nulls <- struct{}{}
		return r.Args.End()
	})
	callbacks.Register(callbackProgram, nfs.CallbackVersion, nfs.Compound, p.callback)
	if p.conn, err = rpcrdma.Dial(p.ctx, "tcp", address, rpcrdma.Config{Programs: callbacks, Credits: 4, RDMA: rdma.Options{NoCRC: true}}); err != nil {
		return err
	}
	null := p.call()
	null.Procedure = 0
	null.Begin()
	if err := p.conn.Do(p.ctx, null); err != nil {
		return fmt.Errorf("NULL: %w", err)
	}
	return nil
}

func (p *probe) run(address, dir string) error {
	if err := p.connect(address); err != nil {
		return err
	}
	limit, _ := p.conn.Credits()
	fmt.Println("NULL answered, credits:", limit)
	for _, step := range []struct {
		name string
		f    func(dir string) error
	}{
		{"EXCHANGE_ID", p.exchangeID}, {"CREATE_SESSION", p.createSession}, {"CB_NULL", p.awaitNull},
		{"RECLAIM_COMPLETE", p.reclaimComplete}, {"write and read", p.readWrite}, {"delegation", p.delegation},
		{"DESTROY_SESSION", p.destroy},
	} {
		if err := step.f(dir); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return p.conn.Shutdown(p.ctx)
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

// sequence begins a COMPOUND with SEQUENCE and n operations more.
func (p *probe) sequence(call *rpcrdma.Call, n uint32) *oncrpc.Encoder {
	e := begin(call, n+1)
	p.seq++
	e.Uint32(nfs.OpSequence)
	e.Fixed(p.session[:])
	e.Uint32(p.seq)
	e.Uint32(0) // slot
	e.Uint32(0)
	e.Bool(false)
	return e
}

// do makes the call, and decodes the results up to that of SEQUENCE.
func (p *probe) do(call *rpcrdma.Call, sequence bool) (d *oncrpc.Decoder, err error) {
	if err := p.conn.Do(p.ctx, call); err != nil {
		return nil, err
	}
	d = &call.Results
	d.Uint32() // status of the last operation, which has its own, too
	d.String(1024)
	d.Count(20, 8)
	if sequence {
		if err := nfs.Op(d, nfs.OpSequence); err != nil {
			return nil, err
		}
		d.Fixed(16)
		for range 5 {
			d.Uint32()
		}
	}
	return d, d.Err()
}

func (p *probe) exchangeID(string) error {
	call := p.call()
	e := begin(call, 1)
	e.Uint32(nfs.OpExchangeID)
	e.Uint64(rand.Uint64())
	e.String("nfsprobe of rdma/rpcrdma")
	e.Uint32(0) // flags
	e.Uint32(0) // SP4_NONE
	e.Uint32(0) // no implementation id
	d, err := p.do(call, false)
	if err == nil {
		err = nfs.Op(d, nfs.OpExchangeID)
	}
	if err != nil {
		return err
	}
	p.clientID, p.seq = d.Uint64(), d.Uint32()
	fmt.Println("EXCHANGE_ID answered")
	return d.Err()
}

func (p *probe) createSession(string) error {
	call := p.call()
	e := begin(call, 1)
	e.Uint32(nfs.OpCreateSession)
	e.Uint64(p.clientID)
	e.Uint32(p.seq)
	e.Uint32(nfs.BackChannel)
	nfs.Channel{MaxRequest: fileSize + 4096, MaxResponse: fileSize + 4096, MaxCached: 4096, MaxOps: 16, MaxRequests: 16}.Append(e)
	nfs.Channel{MaxRequest: 4000, MaxResponse: 4000, MaxOps: 2, MaxRequests: 1}.Append(e)
	e.Uint32(callbackProgram)
	e.Uint32(1)
	e.Uint32(oncrpc.AuthNone)
	d, err := p.do(call, false)
	if err == nil {
		err = nfs.Op(d, nfs.OpCreateSession)
	}
	if err != nil {
		return err
	}
	copy(p.session[:], d.Fixed(16))
	d.Uint32()
	flags := d.Uint32()
	var fore nfs.Channel
	fore.Parse(d)
	p.seq = 0
	if flags&nfs.BackChannel == 0 {
		return errors.New("the server does not use the connection as back channel")
	}
	fmt.Println("CREATE_SESSION answered, back channel on the connection")
	return d.Err()
}

func (p *probe) awaitNull(string) error {
	select {
	case <-p.nulls:
		fmt.Println("CB_NULL answered")
		return nil
	case <-p.ctx.Done():
		return p.ctx.Err()
	}
}

func (p *probe) reclaimComplete(string) error {
	call := p.call()
	e := p.sequence(call, 1)
	e.Uint32(nfs.OpReclaimComplete)
	e.Bool(false)
	d, err := p.do(call, true)
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
	call := p.call()
	e := p.sequence(call, 3)
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
	d, err := p.do(call, true)
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
func (p *probe) withFile(call *rpcrdma.Call, o *opened, op uint32, args func(e *oncrpc.Encoder)) (*oncrpc.Decoder, error) {
	e := p.sequence(call, 2)
	e.Uint32(nfs.OpPutFH)
	e.Opaque(o.fh)
	e.Uint32(op)
	args(e)
	d, err := p.do(call, true)
	if err == nil {
		err = nfs.Op(d, nfs.OpPutFH)
	}
	if err == nil {
		err = nfs.Op(d, op)
	}
	return d, err
}

func (p *probe) closeFile(o *opened) error {
	_, err := p.withFile(p.call(), o, nfs.OpClose, func(e *oncrpc.Encoder) {
		e.Uint32(0)
		e.Fixed(o.stateid[:])
	})
	return err
}

// readWrite writes 4 times 1 MiB in a read chunk each, reads them in write chunks, and compares, also with the file in dir unless
// dir is "".
func (p *probe) readWrite(dir string) error {
	o, err := p.open("big", 3, true)
	if err != nil {
		return err
	}
	data := make([]byte, fileSize)
	rng := rand.NewChaCha8([32]byte{1})
	rng.Read(data)
	for n := range 4 {
		data[0] = byte(n)
		d, err := p.withFile(p.call(), &o, nfs.OpWrite, func(e *oncrpc.Encoder) {
			e.Fixed(o.stateid[:])
			e.Uint64(uint64(n) * fileSize)
			e.Uint32(fileSync)
			e.Item(data)
		})
		if err != nil {
			return fmt.Errorf("WRITE: %w", err)
		}
		if count := d.Uint32(); count != fileSize {
			return fmt.Errorf("WRITE of %d bytes", count)
		}
	}
	fmt.Println("WRITE of 4 times 1 MiB in read chunks answered")
	into := make([]byte, fileSize)
	for n := range 4 {
		data[0] = byte(n)
		clear(into)
		call := p.call()
		call.Into = [][]byte{into}
		d, err := p.withFile(call, &o, nfs.OpRead, func(e *oncrpc.Encoder) {
			e.Fixed(o.stateid[:])
			e.Uint64(uint64(n) * fileSize)
			e.Uint32(fileSize)
		})
		if err != nil {
			return fmt.Errorf("READ: %w", err)
		}
		d.Bool()
		got := d.Item(fileSize)
		if err := d.End(); err != nil || !bytes.Equal(got, data) || &got[0] != &into[0] {
			return fmt.Errorf("READ: %d bytes, they differ or are elsewhere: %w", len(got), err)
		}
	}
	fmt.Println("READ of 4 times 1 MiB in write chunks is what was written")
	if dir == "" {
		return p.closeFile(&o)
	}
	stored, err := os.ReadFile(filepath.Join(dir, "big"))
	if err != nil {
		return err
	}
	for n := range 4 {
		if data[0] = byte(n); len(stored) != 4*fileSize || !bytes.Equal(stored[n*fileSize:][:fileSize], data) {
			return fmt.Errorf("the file has %d bytes, or other data", len(stored))
		}
	}
	return p.closeFile(&o)
}

// delegation gets a read delegation, and lets a local open have it recalled.
func (p *probe) delegation(dir string) error {
	o, err := p.open("small", 1|nfs.WantReadDelegation, false)
	if err != nil {
		return err
	}
	if !o.delegated {
		return errors.New("the server has given no delegation")
	}
	fmt.Println("OPEN gave a read delegation")
	local := make(chan error, 1)
	go func() {
		f, err := os.OpenFile(filepath.Join(dir, "small"), os.O_WRONLY, 0)
		if err == nil {
			err = f.Close()
		}
		local <- err
	}()
	select {
	case id := <-p.recalls:
		if !bytes.Equal(id[4:], o.delegation[4:]) {
			return fmt.Errorf("CB_RECALL of stateid %x, not %x", id, o.delegation)
		}
		fmt.Println("CB_SEQUENCE and CB_RECALL answered")
	case err := <-local:
		return fmt.Errorf("the local open has not waited: %w", err)
	case <-p.ctx.Done():
		return p.ctx.Err()
	}
	if _, err := p.withFile(p.call(), &o, nfs.OpDelegReturn, func(e *oncrpc.Encoder) { e.Fixed(o.delegation[:]) }); err != nil {
		return fmt.Errorf("DELEGRETURN: %w", err)
	}
	if err := <-local; err != nil {
		return err
	}
	fmt.Println("DELEGRETURN answered, the local open continues")
	return p.closeFile(&o)
}

func (p *probe) destroy(string) error {
	call := p.call()
	e := begin(call, 1)
	e.Uint32(nfs.OpDestroySession)
	e.Fixed(p.session[:])
	d, err := p.do(call, false)
	if err != nil {
		return err
	}
	if err := nfs.Op(d, nfs.OpDestroySession); err != nil {
		return err
	}
	fmt.Println("DESTROY_SESSION answered")
	return nil
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
