package rpcrdma

import (
	"context"
	"fmt"

	"github.com/iser-target/iser-target/rdma/rpcrdma/oncrpc"
)

// A Procedure answers a call. It decodes Request.Args, calls Args.End before it changes anything, and
// encodes into Request.Results. ctx ends with the connection.
//
// Its error becomes the status of the reply: nil is SUCCESS, a *StatusError its own status, an error of
// package oncrpc GARBAGE_ARGS or ERR_CHUNK, ErrTooLong ERR_CHUNK, and every other error SYSTEM_ERR.
type Procedure func(ctx context.Context, r *Request) error

// Programs are the programs that an end serves. It must not change once it is in use. The zero value has
// no program.
type Programs struct{ byNumber map[uint32]*program }

type program struct {
	low, high  uint32
	versions   map[uint32]bool
	procedures map[procedureID]Procedure
}

type procedureID struct{ version, procedure uint32 }

// Register adds a procedure. A version of a program that has a procedure has the NULL procedure, too.
// Register panics if the procedure is registered already.
func (p *Programs) Register(number, version, procedure uint32, f Procedure) {
	if p.byNumber == nil {
		p.byNumber = map[uint32]*program{}
	}
	g := p.byNumber[number]
	if g == nil {
		g = &program{version, version, map[uint32]bool{}, map[procedureID]Procedure{}}
		p.byNumber[number] = g
	}
	g.low, g.high, g.versions[version] = min(g.low, version), max(g.high, version), true
	id := procedureID{version, procedure}
	if g.procedures[id] != nil {
		panic(fmt.Sprintf("rpcrdma: procedure %d of program %d version %d is registered twice", procedure, number,
			version))
	}
	g.procedures[id] = f
}

// null answers procedure 0, which every program has (RFC 5531, section 12.1).
func null(_ context.Context, r *Request) error { return r.Args.End() }

// empty reports whether no program is registered.
func (p *Programs) empty() bool { return len(p.byNumber) == 0 }

// find returns the procedure that h calls, or a *StatusError.
func (p *Programs) find(h *oncrpc.CallHeader) (Procedure, error) {
	g := p.byNumber[h.Program]
	if g == nil {
		return nil, errProgUnavail
	}
	f := g.procedures[procedureID{h.Version, h.Procedure}]
	switch {
	case f != nil:
		return f, nil
	case !g.versions[h.Version]:
		return nil, &StatusError{Status: oncrpc.ProgMismatch, Low: g.low, High: g.high}
	case h.Procedure == 0:
		return null, nil
	}
	return nil, errProcUnavail
}

var (
	errProgUnavail = &StatusError{Status: oncrpc.ProgUnavail}
	errProcUnavail = &StatusError{Status: oncrpc.ProcUnavail}
	errRPCMismatch = &StatusError{Status: oncrpc.RPCMismatch, Low: oncrpc.RPCVersion, High: oncrpc.RPCVersion}
	errGarbage     = &StatusError{Status: oncrpc.GarbageArgs}
	errSystem      = &StatusError{Status: oncrpc.SystemErr}
)
