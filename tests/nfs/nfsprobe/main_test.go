package main

import (
	"context"
	"fmt"
	"net"
	"testing"

	"github.com/iser-target/iser-target/rdma/rpcrdma"
	"github.com/iser-target/iser-target/rdma/rpcrdma/oncrpc"
	"github.com/iser-target/iser-target/tests/nfs"
	"github.com/iser-target/iser-target/tests/testkit"
)

// The probe and the server work with each other, before either meets Linux.
func TestProbe(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	files := nfs.NewServer()
	server := &rpcrdma.Server{Config: rpcrdma.Config{Programs: files.Programs()}}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go server.Serve(l)
	defer server.Close()
	p := newProbe(ctx)
	if err := p.connect(l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	defer p.client.Close()
	back := make(chan error, 1)
	for _, step := range []func() error{p.exchangeID, func() error {
		if err := files.CallBack(ctx); err == nil {
			t.Error("BRPC-6-4: the server makes calls before CREATE_SESSION")
		}
		return nil
	}, p.createSession, func() error {
		go func() { back <- files.CallBack(ctx) }()
		select {
		case <-p.nulls:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}, p.reclaimComplete, func() error { return p.readWrite("") }, func() error {
		o, err := p.open("delegated", 3, true)
		if err == nil {
			err = p.closeFile(&o)
		}
		if err != nil {
			return err
		}
		if o, err = p.open("delegated", 1, false); err != nil || !o.delegated {
			return fmt.Errorf("no delegation: %w", err)
		}
		go func() { back <- files.CallBack(ctx) }()
		if id := <-p.recalls; id != o.delegation {
			return fmt.Errorf("recall of %x, not %x", id, o.delegation)
		}
		if _, err = p.withFile(p.call(), 0, &o, nfs.OpDelegReturn, func(e *oncrpc.Encoder) { e.Fixed(o.delegation[:]) }); err != nil {
			return err
		}
		if n := files.Grants(); n != 0 {
			return fmt.Errorf("%d delegations", n)
		}
		return p.closeFile(&o)
	}, p.destroy} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := <-back; err != nil {
			t.Error(err)
		}
	}
	if n := len(files.File("big")); n != 4*fileSize {
		t.Errorf("the file has %d bytes", n)
	}
}
