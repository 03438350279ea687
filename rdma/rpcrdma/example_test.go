package rpcrdma_test

import (
	"context"
	"fmt"
	"log"
	"net"
	"strings"
	"time"

	"github.com/iser-target/iser-target/rdma/rpcrdma"
)

// The numbers of the example: a program of the server, and one of its clients.
const (
	textProgram   = 0x20000100
	noticeProgram = 0x20000101
	version       = 1
	upper         = 1 // opaque -> opaque
	notice        = 1 // string -> nothing
)

// A server turns text into capital letters. Before it answers, it makes a call in the other direction.
func Example() {
	text := &rpcrdma.Programs{}
	text.Register(textProgram, version, upper, func(ctx context.Context, r *rpcrdma.Request) error {
		s := r.Args.Item(1 << 20) // moved by RDMA Read if it is long
		if err := r.Args.End(); err != nil {
			return err
		}
		r.Conn().EnableReverse() // this client serves noticeProgram, by agreement
		call := rpcrdma.Call{Program: noticeProgram, Version: version, Procedure: notice}
		call.Begin().String("working")
		if err := r.Conn().Do(ctx, &call); err != nil {
			return err
		}
		r.Results.Item([]byte(strings.ToUpper(string(s)))) // by RDMA Write, into the memory of the client
		return nil
	})
	server := &rpcrdma.Server{Config: rpcrdma.Config{Programs: text}}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	go server.Serve(l)

	notices := &rpcrdma.Programs{}
	notices.Register(noticeProgram, version, notice, func(_ context.Context, r *rpcrdma.Request) error {
		fmt.Println("notice:", r.Args.String(100))
		return r.Args.End()
	})
	ctx := context.Background()
	conn, err := rpcrdma.Dial(ctx, "tcp", l.Addr().String(), rpcrdma.Config{Programs: notices})
	if err != nil {
		log.Fatal(err)
	}
	call := rpcrdma.Call{Program: textProgram, Version: version, Procedure: upper,
		MaxReply: 4, Into: [][]byte{make([]byte, 100)}}
	call.Begin().Item([]byte("remote procedure call"))
	if err := conn.Do(ctx, &call); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", call.Results.Item(100))
	conn.Shutdown(ctx)
	server.Shutdown(ctx)
	// Output:
	// notice: working
	// REMOTE PROCEDURE CALL
}

// A Client retransmits its calls when a connection is lost. Here the server is restarted while one waits.
func ExampleClient() {
	text := &rpcrdma.Programs{}
	text.Register(textProgram, version, upper, func(_ context.Context, r *rpcrdma.Request) error {
		r.Results.String(strings.ToUpper(r.Args.String(100)))
		return r.Args.End()
	})
	listen := func(addr string) (*rpcrdma.Server, net.Listener) {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			log.Fatal(err)
		}
		s := &rpcrdma.Server{Config: rpcrdma.Config{Programs: text}}
		go s.Serve(l)
		return s, l
	}
	server, l := listen("127.0.0.1:0")
	addr := l.Addr().String()

	client := rpcrdma.NewClient(func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", addr)
	}, rpcrdma.Config{}, nil)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	call := rpcrdma.Call{Program: textProgram, Version: version, Procedure: upper, MaxReply: 104}
	for _, s := range []string{"before", "after"} {
		call.Begin().String(s)
		if err := client.Do(ctx, &call); err != nil {
			log.Fatal(err)
		}
		fmt.Println(call.Results.String(100))
		server.Close()
		server, _ = listen(addr)
	}
	if err := client.Shutdown(ctx); err != nil {
		log.Fatal(err)
	}
	server.Shutdown(ctx)
	// Output:
	// BEFORE
	// AFTER
}
