package iser

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/rdma"
)

// pair returns a connection in the full feature phase, and its initiator.
func pair(t *testing.T) (*Conn, *rdma.Conn) {
	t.Helper()
	c, rc := newcomers(t)
	if err := c.EnterFullFeature(iscsi.Params{RDMAExtensions: true, TargetRecvDataSegmentLength: 8192}, 1); err != nil {
		t.Fatal(err)
	}
	return c, rc
}

// newcomers returns a connection before login, and its initiator.
func newcomers(t *testing.T) (*Conn, *rdma.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	made := make(chan *rdma.Conn, 1)
	go func() {
		nc, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			made <- nil
			return
		}
		rc, _, err := rdma.Initiate(context.Background(), nc, rdma.Options{})
		if err != nil {
			rc = nil
		}
		made <- rc
	}()
	nc, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c, err := Accept(context.Background(), nc, Options{})
	rc := <-made
	if err != nil || rc == nil {
		t.Fatal("startup: ", err)
	}
	t.Cleanup(func() { rc.Close(); c.Close() })
	return c, rc
}

// Only a session that has agreed on it sends long data segments. An initiator that has not logged in cannot make the target
// allocate for them, and the memory that a session may take is counted before it has it.
func TestLongSegments(t *testing.T) {
	for _, tt := range []struct {
		name string
		p    *iscsi.Params // of the login; nil before it
		most int           // bytes of data
	}{
		{"before login", nil, 8192},
		{"discovery", &iscsi.Params{RDMAExtensions: true, Discovery: true}, 8192},
		{"8192 agreed on", &iscsi.Params{RDMAExtensions: true, TargetRecvDataSegmentLength: 8192}, 8192},
		{"512 agreed on", &iscsi.Params{RDMAExtensions: true, TargetRecvDataSegmentLength: 512}, 8192},
		{"65536 agreed on", &iscsi.Params{RDMAExtensions: true, TargetRecvDataSegmentLength: 65536}, 65536},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, rc := newcomers(t)
			longest := headLen + maxAHS + tt.most + maxPad
			if tt.p != nil {
				if size := c.Size(tt.p); size < longest {
					t.Errorf("%d bytes of memory for Sends of %d bytes", size, longest)
				}
				if err := c.EnterFullFeature(*tt.p, 1); err != nil {
					t.Fatal(err)
				}
			}
			send := func(n int) error {
				wr := &rdma.WorkRequest{Op: rdma.Send, Data: make([]byte, n)}
				if err := rc.Post(wr); err != nil {
					t.Fatal(err)
				}
				go rc.Flush()
				var ev rdma.Event
				return c.rc.Receive(&ev)
			}
			if err := send(longest); err != nil {
				t.Errorf("a Send of %d bytes: %v", longest, err)
			}
			if err := send(longest + 1); err == nil || !strings.Contains(err.Error(), "Send of more than") {
				t.Errorf("ISER-10.1.2.1-1: a Send of %d bytes: %v", longest+1, err)
			}
		})
	}
}

// Data moves only for a task whose STags are known.
func TestUnknownTask(t *testing.T) {
	c, _ := pair(t)
	it := &iscsi.Task{Mover: c.NewTask()}
	if err := c.PutData(it, 0, make([]byte, 512), nil); err == nil || !strings.Contains(err.Error(), "no Read STag") {
		t.Errorf("ISER-7.3.5-2: %v", err)
	}
	if err := c.GetData(it, 0, make([]byte, 512)); err == nil || !strings.Contains(err.Error(), "no Write STag") {
		t.Errorf("ISER-7.3.6-3: %v", err)
	}
	// After the end of the task they are unknown.
	it.Mover.(*task).remote = Header{Write: Remote{Valid: true, STag: 1}, Read: Remote{Valid: true, STag: 2}}
	c.Unbind(it)
	if c.PutData(it, 0, make([]byte, 512), nil) == nil || c.GetData(it, 0, make([]byte, 512)) == nil {
		t.Error("ISER-3.1.9-1: a task without binding moves data")
	}
}

// Resources are allocated before the connection exists. Unused ones leave nothing that has to be freed.
func TestAllocate(t *testing.T) {
	before := rdma.ReadStats()
	p := iscsi.Params{RDMAExtensions: true, TargetRecvDataSegmentLength: 65536, ISERHelloRequired: true}
	if _, err := Allocate(Options{}, p, 1); err != nil {
		t.Fatal(err)
	}
	p.TargetRecvDataSegmentLength = 65537
	if _, err := Allocate(Options{}, p, 1); err == nil {
		t.Error("ISER-5.1.2-6: 65537 bytes where there is room for 65536")
	}
	if _, err := Allocate(Options{RDMA: rdma.Options{IRD: -1}}, iscsi.Params{}, 1); err == nil {
		t.Error("ISER-5.1.2-6: IRD -1")
	}
	if now := rdma.ReadStats(); now != before {
		t.Errorf("ISER-3.1.5-1: %+v, was %+v", now, before)
	}
	enable, err := Allocate(Options{}, iscsi.Params{}, 1)
	if err != nil {
		t.Fatal(err)
	}
	near, far := net.Pipe()
	defer far.Close()
	if _, err := enable(near, nil, 10*time.Millisecond); err == nil {
		t.Error("enabled without an MPA Request")
	}
	if _, err := far.Read(make([]byte, 1)); err == nil {
		t.Error("ISER-10.1.1.1-2: the connection is still open")
	}
	if now := rdma.ReadStats(); now != before {
		t.Errorf("ISER-10.1.1.1-2: %+v, was %+v", now, before)
	}
}
