package rdma_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"net"

	"github.com/iser-target/iser-target/rdma"
)

// An Initiator gives the Responder access to a buffer and asks for data. The Responder
// writes the data into the buffer, and then says that it is there.
func Example() {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	go respond(l)

	nc, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		log.Fatal(err)
	}
	c, private, err := rdma.Initiate(context.Background(), nc, rdma.Options{Private: []byte("hello")})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	fmt.Printf("connected: %s\n", private)

	var region rdma.Region
	buf := make([]byte, 13)
	stag := c.Register(&region, buf, 0, rdma.RemoteWrite)
	defer c.Deregister(&region)
	ask := rdma.WorkRequest{Op: rdma.Send, Data: binary.BigEndian.AppendUint32(nil, uint32(stag))}
	if err := c.Post(&ask); err != nil {
		log.Fatal(err)
	}
	c.Flush()

	var ev rdma.Event
	if err := c.Receive(&ev); err != nil { // the data is placed before the Send is delivered
		log.Fatal(err)
	}
	fmt.Printf("%s: %s\n", ev.Data, buf)
	// Output:
	// connected: hello, too
	// written: data in place
}

// respond serves one connection.
func respond(l net.Listener) {
	nc, err := l.Accept()
	if err != nil {
		log.Fatal(err)
	}
	c, err := rdma.Respond(context.Background(), nc, rdma.Options{}, func(r *rdma.Request) rdma.Answer {
		return rdma.Answer{Private: append(r.Private, ", too"...)}
	})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	var ev rdma.Event
	for c.Receive(&ev) == nil {
		stag := rdma.STag(binary.BigEndian.Uint32(ev.Data))
		c.Post(&rdma.WorkRequest{Op: rdma.Write, Data: []byte("data in place"), STag: stag})
		c.Post(&rdma.WorkRequest{Op: rdma.Send, Data: []byte("written")})
		c.Flush()
	}
}
