package tcp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A time-out between PDUs, or within a header, loses nothing.
func TestReceiveDeadline(t *testing.T) {
	near, far := net.Pipe()
	defer far.Close()
	c := New(near, Options{})
	defer c.Close()
	h := make(pdu.BHS, pdu.BHSLen)
	h.Reset(pdu.NOPOut, pdu.FlagF)
	h.SetITT(5)
	rest := make(chan struct{})
	go func() {
		far.Write(h[:13])
		<-rest
		far.Write(h[13:])
	}()
	var n iscsi.Notice
	timeouts := 0
	for {
		c.SetReceiveDeadline(time.Now().Add(3 * time.Millisecond))
		err := c.Receive(&n)
		if err == nil {
			break
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) || timeouts > 1000 {
			t.Fatal(err)
		}
		if timeouts++; timeouts == 3 {
			close(rest)
		}
	}
	if timeouts < 3 || !bytes.Equal(n.BHS, h) {
		t.Fatalf("%d time-outs, %x", timeouts, n.BHS)
	}
	far.Close()
	c.SetReceiveDeadline(time.Time{})
	if err := c.Receive(&n); err != io.EOF {
		t.Fatalf("orderly close: %v", err)
	}
}

// A Conn describes itself before login, and refuses everything after Close.
func TestConn(t *testing.T) {
	near, far := net.Pipe()
	defer far.Close()
	c := New(near, Options{Prefix: []byte("abc")})
	if c.RDMA() || c.Transport() != "tcp" || c.LocalAddr() == nil || c.RemoteAddr() == nil ||
		c.MaxSendSegment() != 8192 {
		t.Error("a connection before login")
	}
	if err := c.EnterFullFeature(iscsi.Params{}, maxTasks+1); err == nil {
		t.Error("more tasks than Target Transfer Tags")
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	var n iscsi.Notice
	if err := c.Receive(&n); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Receive after Close: %v", err)
	}
	it := &iscsi.Task{Mover: c.NewTask()}
	if c.PutData(it, 0, nil, nil) == nil || c.GetData(it, 0, nil) == nil || c.SendControl(it) == nil {
		t.Error("a closed connection takes work")
	}
	c.Flush()
	c.CloseWrite()
}

// ISCSI-11.8-5: no tag is ffffffff, also when the count wraps.
func TestTargetTransferTags(t *testing.T) {
	nc, _ := testkit.Pair(t)
	c := New(nc, Options{})
	var last *task
	for range maxTasks {
		last = c.NewTask().(*task)
	}
	c.burst = 512
	c.mu.Lock()
	defer c.mu.Unlock()
	seen := map[uint32]bool{}
	for range 1 << 16 {
		last.data = make([]byte, 1)
		c.ask(last)
		if last.ttt == pdu.ReservedTag || seen[last.ttt] || last.ttt&maxTasks != maxTasks-1 {
			t.Fatalf("Target Transfer Tag %#x", last.ttt)
		}
		seen[last.ttt] = true
		c.free = list{} // what is in the queue does not matter
		c.queue = list{}
	}
}

// Without RDMA a login agrees on digests if they are allowed (ISCSI-6.2.1-1, ISCSI-6.2.1-2), on our data
// segments, on one R2T at a time and on no RDMAExtensions.
func TestNegotiation(t *testing.T) {
	offer := []string{"HeaderDigest=Foo,CRC32C,None", "DataDigest=None,CRC32C", "InitialR2T=No", "ImmediateData=Yes",
		"MaxOutstandingR2T=8",
		"MaxBurstLength=16776192", "FirstBurstLength=262144", "MaxConnections=4", "ErrorRecoveryLevel=2",
		"RDMAExtensions=Yes"}
	for _, tt := range []struct {
		digests bool
		want    map[string]string
	}{
		{true, map[string]string{"HeaderDigest": "CRC32C", "DataDigest": "None"}},
		{false, map[string]string{"HeaderDigest": "None", "DataDigest": "None"}},
	} {
		t.Run(fmt.Sprintf("digests allowed: %t", tt.digests), func(t *testing.T) {
			tg := startTarget(t, func(_ *target, o *iscsi.Options) { o.Limits.Digests = tt.digests })
			got := tg.connect(t).login(offer...)
			want := map[string]string{"InitialR2T": "Yes", "ImmediateData": "Yes", "MaxOutstandingR2T": "1",
				"MaxBurstLength":   "1048576",
				"FirstBurstLength": "65536", "MaxConnections": "1", "ErrorRecoveryLevel": "0",
				"RDMAExtensions": "No", "MaxRecvDataSegmentLength": "262144"}
			maps.Copy(want, tt.want)
			for k, v := range want {
				if got[k] != v {
					t.Errorf("%s=%s, want %s", k, got[k], v)
				}
			}
		})
	}
}

// ExpCmdSN and MaxCmdSN of Data-In and R2T come from the time when these were queued. They do not fall
// below those of a PDU that left before, also where they wrap.
func TestSerialNumbersDoNotGoBack(t *testing.T) {
	c := &Conn{}
	login := make(pdu.BHS, pdu.BHSLen)
	login.Reset(pdu.LoginResp, pdu.FlagT)
	login.SetExpCmdSN(0xffffffe0)
	login.SetMaxCmdSN(0xffffffee)
	c.tx.status(login)
	for _, tt := range []struct{ exp, max, wantExp, wantMax uint32 }{
		{0xfffffff0, 0xfffffffe, 0xfffffff0, 0xfffffffe},
		{0xffffffef, 0xfffffffd, 0xfffffff0, 0xfffffffe},
		{1, 0x10, 1, 0x10},
		{0xffffffff, 0x11, 1, 0x11},
		{2, 9, 2, 0x11},
	} {
		at := len(c.tx.out.Slab)
		if err := c.sendR2T(&item{expCmdSN: tt.exp, maxCmdSN: tt.max}); err != nil {
			t.Fatal(err)
		}
		if h := pdu.BHS(c.tx.out.Slab[at:]); h.ExpCmdSN() != tt.wantExp || h.MaxCmdSN() != tt.wantMax {
			t.Errorf("%#x, %#x became %#x, %#x", tt.exp, tt.max, h.ExpCmdSN(), h.MaxCmdSN())
		}
	}
}

// ISER-5.1.2-11: Upgrade returns the connection and what was read after the last PDU.
func TestUpgrade(t *testing.T) {
	near, far := net.Pipe()
	defer far.Close()
	login := append(make([]byte, pdu.BHSLen), "abc"...)
	login[0] = byte(pdu.LoginReq)
	c := New(near, Options{Prefix: login})
	var n iscsi.Notice
	if err := c.Receive(&n); err != nil {
		t.Fatal(err)
	}
	nc, prefix, err := c.Upgrade()
	if nc != near || string(prefix) != "abc" || err != nil {
		t.Errorf("%v, %q, %v", nc, prefix, err)
	}
	if _, _, err := c.Upgrade(); err == nil {
		t.Error("a second Upgrade")
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if _, err := far.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("Close before the hand-over is complete: %v", err)
	}
	t.Run("after a failure", func(t *testing.T) {
		near, far := net.Pipe()
		far.Close()
		c := New(near, Options{})
		c.abandon(io.ErrClosedPipe)
		if _, _, err := c.Upgrade(); !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("the final Login Response has not left: %v", err)
		}
		c.Close()
	})
}
