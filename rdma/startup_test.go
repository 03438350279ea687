package rdma

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/rdma/llp"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/rdma/wire/vectors"
	"github.com/iser-target/iser-target/tests/testkit"
)

var all = RTR{Send: true, Write: true, Read: true}

// TestReply compares the Replies of a Responder byte by byte (RFC 5044, section 7.1; RFC 6581,
// sections 6, 9 and 10).
func TestReply(t *testing.T) {
	iser := Answer{Private: []byte{0x80, 0, 0, 0}}
	for _, tt := range []struct {
		id, request string
		o           Options
		a           Answer
		reply       string
		crc         bool
		ird, ord    int
	}{
		{"V-MPA-6 V-MPA-7 MPA2-6-4 MPA2-10-2 MPA2-10-4 MPA-7.1.1-1 MPA-7.1.1-3 MPA-7.1.1-13 MPA-7.1.1-18",
			reqKey + "40010000", Options{}, Answer{}, "40010000", true, 32, 1},
		{"MPA-7.1.1-8 MPA-4.4-5 we ask", reqKey + "00010000", Options{}, Answer{}, "40010000", true, 32, 1},
		{"MPA-7.1.1-8 MPA-4.4-5 the peer asks", reqKey + "40010000", Options{NoCRC: true}, Answer{}, "00010000",
			true, 32, 1},
		{"MPA-7.1.1-7 MPA-4.4-5 neither side asks", reqKey + "00010000", Options{NoCRC: true}, Answer{}, "00010000",
			false, 32, 1},
		{"MPA-7.1.1-10 MPA-7.1.1-12 R and Res bits are ignored", reqKey + "6f010000", Options{}, Answer{},
			"40010000", true, 32, 1},
		{"MPA-7.1.1-17 MPA-7.1.2-8 private data", reqKey + "00010003 010203", Options{},
			Answer{Private: []byte("abcde")}, "40010005 6162636465", true, 32, 1},
		{"a depth for peers that state none", reqKey + "40010000", Options{UnstatedORD: 4}, Answer{}, "40010000",
			true, 32, 4},
		{"MPA-C.3-1 MPA-7.1.1-5 we want Markers", reqKey + "00010000", Options{Markers: true}, Answer{}, "c0010000",
			true, 32, 1},
		{"MPA2-6-5 MPA2-10-2 MPA2-10-8 revision 2 without S", reqKey + "40020000", Options{}, Answer{}, "40020000",
			true, 32, 1},

		{"V-MPA2-1 V-MPA2-2 MPA2-6-1 MPA2-6-7 MPA2-9-1 MPA2-9.2-13 MPA2-9.2-14 MPA2-9.2-15 MPA2-10-1 MPA-1.2-2 " +
			"MPA-4.4-2 MPA-4.4-3 DDP-3-6",
			reqKey + "10020008 00800001 80000000", Options{}, iser, "50020008 00010020 80000000", true, 1, 32},
		{"V-MPA2-3 V-MPA2-4 MPA2-9.1-6 MPA2-9.2-4 MPA2-9.2-7", reqKey + "50020004 c004c000",
			Options{RTR: RTR{Write: true, Read: true}}, Answer{}, "50020004 8001c004", true, 1, 4},
		{"V-MPA2-5 MPA2-9.1-14 MPA2-9.1-15", reqKey + "50020004 3fff3fff", Options{IRD: 7, ORD: 9}, Answer{},
			"50020004 3fff3fff", true, 7, 9},
		{"MPA2-9.1-2 MPA2-9.1-5 IRD 0", reqKey + "50020004 00000001", Options{}, Answer{}, "50020004 00010000", true,
			1, 0},
		{"MPA2-9.1-2 IRD 4", reqKey + "50020004 00040000", Options{}, Answer{}, "50020004 00000004", true, 0, 4},
		{"MPA2-9.1-2 MPA2-9.1-18 IRD 0x3ffe", reqKey + "50020004 3ffe0000", Options{}, Answer{}, "50020004 00000020",
			true, 0, 32},
		{"MPA2-9.1-3 MPA2-12-1 ORD above our maximum", reqKey + "50020004 00043ffe", Options{IRD: 5}, Answer{},
			"50020004 00050004", true, 5, 4},
		{"MPA2-9.2-16 flags without A are ignored", reqKey + "10020004 4080c001", Options{}, Answer{},
			"50020004 00010020", true, 1, 32},
		{"MPA2-9.2-5 all three", reqKey + "50020004 c004c001", Options{}, Answer{}, "50020004 c001c004", true, 1, 4},
		{"MPA2-9.2-5 MPA2-9.2-3 B and C", reqKey + "50020004 c0048001", Options{}, Answer{}, "50020004 c0018004",
			true, 1, 4},
		{"MPA2-9.2-3 D alone", reqKey + "50020004 80044001", Options{}, Answer{}, "50020004 80014004", true, 1, 4},
		{"MPA2-9.2-6 restricted to C", reqKey + "50020004 c004c001", Options{RTR: RTR{Write: true}}, Answer{},
			"50020004 80018004", true, 1, 4},
		{"MPA2-9.2-9 nothing matches", reqKey + "50020004 80044001", Options{RTR: RTR{Write: true}}, Answer{},
			"50020004 80018004", true, 1, 4},
		{"MPA2-6-6 MPA2-6-9 reserved bits and C", reqKey + "5f020004 00040001", Options{}, Answer{},
			"50020004 00010004", true, 1, 4},
		{"MPA2-6-8 PD_Length 4", reqKey + "10020004 00040001", Options{}, Answer{}, "50020004 00010004", true, 1, 4},
	} {
		t.Run(tt.id, func(t *testing.T) {
			p, c, reply := respondTo(t, tt.request, tt.o, tt.a)
			if want := unhex(repKey + tt.reply); !bytes.Equal(reply, want) {
				t.Fatalf("Reply\n%x, want\n%x", reply, want)
			}
			if c.CRC() != tt.crc || c.IRD() != tt.ird || c.ORD() != tt.ord {
				t.Errorf("CRC %t, IRD %d, ORD %d", c.CRC(), c.IRD(), c.ORD())
			}
			// MPA-7.1-6, MPA-7.1.2-9, MPA2-9.3-2: the first FPDU is not lost,
			// and MPA-3-12: its DDP version is 1.
			if p.crc = tt.crc; tt.o.Markers {
				p.out = new(wire.MarkerGrid)
			}
			p.send("4143 00000000 00000000 00000001 00000000 77")
			if ev := receive(t, c); string(ev.Data) != "w" {
				t.Errorf("first Send: %x", ev.Data)
			}
		})
	}
}

// MPA-7.1.2-4, MPA-7.1.2-15, MPA-7.1.2-24, MPA-7.1.3-1, MPA-8-8, DDP-3-12: a bad
// Request closes TCP at once without a Reply.
func TestBadRequest(t *testing.T) {
	before := ReadStats()
	login := vectors.BadRequest{ID: "MPA-7.1.3-1 iSCSI login", Frame: "43870000 00000030" + strings.Repeat("00", 40)}
	for _, tt := range append(vectors.BadRequests(), login) {
		t.Run(tt.ID, func(t *testing.T) {
			p, nc := rawPair(t)
			p.write(unhex(tt.Frame))
			c, err := Respond(context.Background(), nc, Options{},
				func(*Request) Answer { t.Error("the ULP was asked"); return Answer{} })
			asFault(t, err, wire.ReasonStartup, false)
			if c != nil {
				t.Error("a Conn and an error")
			}
			// Unread bytes make this a reset. Either end is right, but no Reply.
			if n, err := p.nc.Read(make([]byte, 1)); n != 0 || isTimeout(err) {
				t.Fatalf("read %d bytes, %v", n, err)
			}
		})
	}
	t.Run("MPA-7.1.1-19 10 of 20 bytes of private data", func(t *testing.T) {
		p, nc := rawPair(t)
		p.write(unhex(reqKey + "40010014 00010203040506070809"))
		p.nc.(*net.TCPConn).CloseWrite()
		_, err := Respond(context.Background(), nc, Options{}, nil)
		if asFault(t, err, wire.ReasonStartup, false); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatal(err)
		}
		p.wantEOF()
	})
	if ReadStats() != before {
		t.Errorf("not freed: %+v, before %+v", ReadStats(), before)
	}
}

// MPA-7.1.1-16, MPA-7.1.1-20, MPA-7.1-7, MPA-7.1.2-23, MPA2-9.1-9, MPA2-9-1, MPA2-9-2: the ULP
// learns the content of the Request before anything else happens.
func TestRequestReachesTheULP(t *testing.T) {
	big := strings.Repeat("5a", 508)
	for _, tt := range []struct {
		id, request string
		want        Request
	}{
		{"MPA-7.1.1-16", reqKey + "00010002 0102", Request{Private: unhex("0102"), Rev: 1}},
		{"MPA2-6-5", reqKey + "40020004 01020304", Request{Private: unhex("01020304"), Rev: 2, CRC: true}},
		{"MPA2-9-3", reqKey + "10020008 00800001 80000000",
			Request{Private: unhex("80000000"), Rev: 2, Enhanced: true, Depths: wire.Depths{IRD: 128, ORD: 1}}},
		{"MPA2-9-4", reqKey + "90020004 bffe7ffe", Request{Private: []byte{}, Rev: 2, Markers: true, Enhanced: true,
			Depths: wire.Depths{PeerToPeer: true, RTR: RTR{Read: true}, IRD: 0x3ffe, ORD: 0x3ffe}}},
		{"MPA-7.1.2-23 512 bytes", reqKey + "00010200 00000000" + big,
			Request{Private: unhex("00000000" + big), Rev: 1}},
		{"MPA2-9-2 508 bytes", reqKey + "10020200 00000000" + big,
			Request{Private: unhex(big), Rev: 2, Enhanced: true}},
	} {
		t.Run(tt.id, func(t *testing.T) {
			p, nc := rawPair(t)
			// Bytes after the Request belong to the FPDU stream.
			p.write(append(unhex(tt.request), frame(unhex("4143 00000000 00000000 00000001 00000000 77"))...))
			c, err := Respond(context.Background(), nc, Options{MaxSend: 8}, func(r *Request) Answer {
				if !reflect.DeepEqual(*r, tt.want) {
					t.Errorf("the ULP got %+v", r)
				}
				p.silent("MPA-7.1.2-3: before the answer")
				return Answer{}
			})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if ev := receive(t, c); string(ev.Data) != "w" {
				t.Error("the bytes after the Request are lost")
			}
			if !reflect.DeepEqual(*c.Peer(), tt.want) {
				t.Errorf("Peer is %+v", c.Peer())
			}
		})
	}
}

// MPA-7.1.2-5, MPA-7.1.2-6, MPA-7.1.2-7, MPA-7.1.2-17, MPA-7.1.1-11,
// MPA2-9.1-7, MPA2-9.1-8, MPA2-10-1: after a reject the ULP closes the TCP connection.
func TestReject(t *testing.T) {
	no := errors.New("no")
	for _, tt := range []struct {
		id, request string
		o           Options
		a           Answer
		reply       string
	}{
		{"MPA-7.1.2-5", reqKey + "40010000", Options{}, Answer{Reject: no}, "60010000"},
		{"MPA-7.1.2-6", reqKey + "40010000", Options{}, Answer{Reject: no, Private: []byte("twelve octet")},
			"6001000c 7477656c7665206f63746574"},
		{"MPA2-10-1", reqKey + "50020004 00040001", Options{}, Answer{Reject: no}, "70020004 00010004"},
		{"V-MPA2-6 MPA2-9.1-7", reqKey + "50020004 00040000", Options{MinORD: 8}, Answer{}, "70020004 00000008"},
		{"MPA2-9.2-4 too small an IRD and A", reqKey + "50020004 c0008001", Options{MinORD: 1}, Answer{},
			"70020004 c0008001"},
		{"MPA2-9.2-4 the ULP rejects A", reqKey + "50020004 c0048001", Options{}, Answer{Reject: no},
			"70020004 c0018004"},
	} {
		t.Run(tt.id, func(t *testing.T) {
			p, nc := rawPair(t)
			p.write(unhex(tt.request))
			c, err := Respond(context.Background(), nc, tt.o, func(*Request) Answer { return tt.a })
			if err == nil || c != nil || tt.a.Reject != nil && !errors.Is(err, no) {
				t.Fatalf("%v, %v", c, err)
			}
			if got := p.startupFrame(); !bytes.Equal(got, unhex(repKey+tt.reply)) {
				t.Fatalf("Reply %x", got)
			}
			p.write([]byte("x"))
			var b [1]byte
			if _, err := nc.Read(b[:]); err != nil || b[0] != 'x' {
				t.Fatalf("MPA-7.1.2-7: %q, %v", b, err)
			}
			if _, err := nc.Write(b[:]); err != nil || p.read(1)[0] != 'x' {
				t.Fatal("MPA-7.1.2-7", err)
			}
		})
	}
}

// TestRequest compares the Requests of an Initiator byte by byte.
func TestRequest(t *testing.T) {
	for _, tt := range []struct {
		id, request string
		o           Options
		reply       string
		ird, ord    int
	}{
		{"MPA-7.1.2-1 MPA-7.1-5 MPA-4.3-15 MPA-4.4-4 MPA2-6-3 MPA2-10-3", "40010000", Options{Rev: 1}, "00010000",
			32, 1},
		{"MPA-7.1.2-2 private data", "40010004 80000000", Options{Rev: 1, Private: unhex("80000000")}, "40010000",
			32, 1},
		{"MPA-4.4-4 no CRC", "00010000", Options{Rev: 1, NoCRC: true}, "00010000", 32, 1},
		{"MPA2-6-2 MPA2-9.3-1 MPA2-9.1-12 RDMAP-6.1-5", "50020008 00040008 01020304",
			Options{IRD: 4, ORD: 8, Private: unhex("01020304")}, "50020008 00020004 0a0b0c0d", 4, 2},
		{"MPA2-9.1-16 MPA2-9.1-17 not negotiated", "50020004 00040008", Options{IRD: 4, ORD: 8}, "50020004 3fff3fff",
			4, 8},
		{"MPA2-9.1-11 MPA2-9.2-8 flags that were not asked for", "50020004 00200008", Options{ORD: 8},
			"50020004 c008c020", 32, 8},
	} {
		t.Run(tt.id, func(t *testing.T) {
			p, nc := rawPair(t)
			done := make(chan error, 1)
			var c *Conn
			var private []byte
			go func() {
				var err error
				c, private, err = Initiate(context.Background(), nc, tt.o)
				done <- err
			}()
			if got := p.startupFrame(); !bytes.Equal(got, unhex(reqKey+tt.request)) {
				t.Fatalf("Request %x", got)
			}
			p.silent("MPA-7.1.2-10: before the Reply")
			// MPA-7.1-1, MPA-7.1.2-13: an FPDU in the same TCP segment.
			reply := unhex(repKey + tt.reply)
			p.crc = !tt.o.NoCRC
			p.write(append(reply, frame(unhex("4143 00000000 00000000 00000001 00000000 77"))...))
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			skip := wire.StartupLen
			if reply[16]&0x10 != 0 {
				skip += wire.EnhancedLen
			}
			if !bytes.Equal(private, reply[skip:]) || c.IRD() != tt.ird || c.ORD() != tt.ord {
				t.Errorf("private data %x, IRD %d, ORD %d", private, c.IRD(), c.ORD())
			}
			if d := c.Peer().Depths; c.Peer().Enhanced && d.ORD != binary.BigEndian.Uint16(reply[22:])&0x3fff {
				t.Errorf("MPA2-9.1-9: %+v", d)
			}
			if ev := receive(t, c); string(ev.Data) != "w" {
				t.Errorf("MPA-7.1-1: %x", ev.Data)
			}
			post(t, c, &WorkRequest{Op: Send})
			p.want("MPA-7.1.2-13 MPA-7.1.2-19 MPA2-4.2-1", "4143 00000000 00000000 00000001 00000000")
		})
	}
}

// MPA-7.1.2-11, MPA-7.1.2-12, MPA-7.1.4-1, MPA2-9.1-10, MPA2-9.1-13, MPA2-9.2-12, MPA2-10-5,
// MPA2-10-6: Replies that end the startup.
func TestBadReply(t *testing.T) {
	before := ReadStats()
	for _, tt := range []struct {
		id, reply string
		o         Options
		want      wire.Reason // zero: rejected
		terminate string
	}{
		{"MPA-7.1.2-12", repKey + "60010002 0a0b", Options{Rev: 1}, wire.Reason{}, ""},
		{"MPA2-9.1-10", repKey + "70020006 00000008 0a0b", Options{}, wire.Reason{}, ""},
		{"MPA-7.1.1-4 MPA-7.1.2-11", "4d504120494420526570204672616d66 40010000", Options{Rev: 1},
			wire.ReasonStartup, ""},
		{"MPA-7.1.2-20", reqKey + "40010000", Options{Rev: 1}, wire.ReasonStartup, ""},
		{"MPA-C.2-2", repKey + "40000000", Options{Rev: 1}, wire.ReasonStartup, ""},
		{"MPA-7.1.2-22", repKey + "40010201", Options{Rev: 1}, wire.ReasonStartup, ""},
		{"MPA2-10-1 plain Reply", repKey + "40020000", Options{}, wire.ReasonStartup, ""},
		{"MPA2-10-2 enhanced Reply", repKey + "50020004 00010001", Options{Rev: 1}, wire.ReasonStartup, ""},
		{"MPA2-9.1-13", repKey + "50020004 00010040", Options{IRD: 16}, wire.ReasonIRD, "20060000"},
		{"MPA2-9.2-12 no flag", repKey + "50020004 80010001", Options{PeerToPeer: true}, wire.ReasonRTR, "20070000"},
		{"MPA2-9.2-12 no common flag", repKey + "50020004 c0014001",
			Options{PeerToPeer: true, RTR: RTR{Write: true}}, wire.ReasonRTR, "20070000"},
		{"MPA2-9.2-12 Read with ORD 0", repKey + "50020004 80004001", Options{PeerToPeer: true}, wire.ReasonRTR,
			"20070000"},
	} {
		t.Run(tt.id, func(t *testing.T) {
			p, nc := rawPair(t)
			done := make(chan error, 1)
			go func() {
				c, _, err := Initiate(context.Background(), nc, tt.o)
				if c != nil {
					err = errors.New("a Conn")
				}
				done <- err
			}()
			p.startupFrame()
			p.write(unhex(tt.reply))
			err := <-done
			if tt.want != (wire.Reason{}) {
				asFault(t, err, tt.want, false)
				if tt.terminate != "" {
					p.wantTerminate(tt.terminate)
				} else {
					p.wantEOF()
				}
				return
			}
			var re *RejectedError
			if !errors.As(err, &re) || string(re.Private) != "\n\v" || re.Enhanced && re.Depths.ORD != 8 {
				t.Fatalf("%v", err)
			}
			if _, err := nc.Write([]byte("x")); err != nil || p.read(1)[0] != 'x' {
				t.Fatalf("TCP is not left open: %v", err)
			}
		})
	}
	if ReadStats() != before {
		t.Errorf("not freed: %+v, before %+v", ReadStats(), before)
	}
}

// MPA2-10-7: after a refusal a second attempt with revision 1 succeeds.
func TestRetryWithRevision1(t *testing.T) {
	p, nc := rawPair(t)
	go func() { p.startupFrame(); p.nc.Close() }() // knows no enhanced frames
	if _, _, err := Initiate(context.Background(), nc, Options{}); err == nil {
		t.Fatal("connected")
	}
	initiator(t, Options{Rev: 1}, repKey+"40010000")
}

// MPA-7.1.2-16: the Initiator's ULP may read the Reply and close the stream.
func TestLeaveAfterTheReply(t *testing.T) {
	p, c := initiator(t, Options{}, repKey+"50020008 00200020 0a0b0c0d")
	c.Close()
	p.wantEOF()
}

// MPA-7.1.2-20: two Initiators notice their mistake.
func TestTwoInitiators(t *testing.T) {
	a, b := tcpPair(t)
	errs := make(chan error, 2)
	for _, nc := range []net.Conn{a, b} {
		go func() {
			_, _, err := Initiate(context.Background(), nc, Options{})
			errs <- err
		}()
	}
	if x, y := <-errs, <-errs; !errors.Is(x, wire.ErrRequestKey) && !errors.Is(y, wire.ErrRequestKey) {
		t.Fatalf("%v; %v", x, y)
	}
}

// MPA-7.1.1-21, MPA2-9-2: too much private data is refused before it is sent.
func TestOwnPrivateData(t *testing.T) {
	for _, tt := range []struct {
		rev uint8
		n   int
		ok  bool
	}{{1, 512, true}, {1, 513, false}, {2, 508, true}, {2, 509, false}} {
		p, nc := rawPair(t)
		errs := make(chan error, 1)
		go func() {
			_, _, err := Initiate(context.Background(), nc, Options{Rev: tt.rev, Private: make([]byte, tt.n)})
			errs <- err
		}()
		if !tt.ok {
			if err := <-errs; !errors.Is(err, wire.ErrPrivateData) {
				t.Fatalf("%+v: %v", tt, err)
			}
			p.wantEOF() // before any byte
			continue
		}
		if n := len(p.startupFrame()); n != wire.StartupLen+512 { // MPA-7.1.1-17
			t.Fatalf("frame of %d bytes", n)
		}
		p.nc.Close()
		<-errs
	}
	p, nc := rawPair(t)
	p.write(unhex(reqKey + "40010000"))
	if _, err := Respond(context.Background(), nc, Options{},
		func(*Request) Answer { return Answer{Private: make([]byte, 513)} }); !errors.Is(err, wire.ErrPrivateData) {
		t.Fatal(err)
	}
	p.wantEOF()
}

// MPA-7.1.2-21, MPA-7.1.2-25: every wait of the startup ends, even if bytes keep coming.
func TestStartupTimeout(t *testing.T) {
	before := ReadStats()
	const limit = 50 * time.Millisecond
	check := func(err error, began time.Time) {
		t.Helper()
		if !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(began) > testkit.Patience/2 {
			t.Fatalf("after %v: %v", time.Since(began), err)
		}
	}
	for _, n := range []int{0, 1, 19, 20, 25} {
		for drip := range 2 {
			p, nc := rawPair(t)
			frame := unhex(reqKey + "4001000a 01020304050607080900")
			stop := make(chan struct{})
			go func() {
				if drip == 0 {
					p.nc.Write(frame[:n])
					return
				}
				for i := 0; i < n; i++ { // never complete within the limit
					p.nc.Write(frame[i : i+1])
					select {
					case <-stop:
						return
					case <-time.After(limit / 5):
					}
				}
			}()
			began := time.Now()
			_, err := Respond(context.Background(), nc, Options{StartupTimeout: limit}, nil)
			check(err, began)
			close(stop)
		}
	}
	_, nc := rawPair(t)
	began := time.Now()
	_, _, err := Initiate(context.Background(), nc, Options{StartupTimeout: limit})
	check(err, began)

	t.Run("the context", func(t *testing.T) {
		p, nc := rawPair(t)
		ctx, cancel := context.WithCancel(context.Background())
		go func() { p.startupFrame(); cancel() }()
		if _, _, err := Initiate(ctx, nc, Options{}); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		p.wantEOF()
	})
	if ReadStats() != before {
		t.Errorf("not freed: %+v, before %+v", ReadStats(), before)
	}
}

func TestOptionsRefused(t *testing.T) {
	for _, o := range []Options{{IRD: -1}, {ORD: 16383}, {MinORD: 33}, {MaxSend: -1}, {MaxULPDU: 127},
		{MaxULPDU: 64769}, {Rev: 3}} {
		if _, err := Respond(context.Background(), nil, o, nil); err == nil {
			t.Errorf("Respond took %+v", o)
		}
		if _, _, err := Initiate(context.Background(), nil, o); err == nil {
			t.Errorf("Initiate took %+v", o)
		}
	}
}

// MPA2-4.4-1, MPA2-5-1, MPA2-5-2, MPA2-5-3, MPA2-9.2-1, MPA2-9.2-2,
// MPA2-9.2-10, MPA2-9.2-11: the RTR is the Initiator's first FPDU, and its ULP gets no completion
// for it.
func TestRTROfTheInitiator(t *testing.T) {
	for _, tt := range []struct {
		id, reply string
		rtr       RTR
		request   string
		want      string
	}{
		{"V-MPA2-7", "50020004 c001c004", all, "50020004 c020c020", "c140 00000001 0000000000000000"},
		{"V-MPA2-8", "50020004 c001c004", RTR{Read: true}, "50020004 80204020", ""},
		{"V-MPA2-10", "50020004 c001c004", RTR{Send: true}, "50020004 c0200020",
			"4143 00000000 00000000 00000001 00000000"},
		{"MPA2-9.2-11 the Responder takes Send only", "50020004 c0010004", all, "50020004 c020c020",
			"4143 00000000 00000000 00000001 00000000"},
	} {
		t.Run(tt.id, func(t *testing.T) {
			p, nc := rawPair(t)
			type result struct {
				c   *Conn
				err error
			}
			done := make(chan result, 1)
			go func() {
				c, _, err := Initiate(context.Background(), nc, Options{PeerToPeer: true, RTR: tt.rtr})
				done <- result{c, err}
			}()
			if got := p.startupFrame(); !bytes.Equal(got, unhex(reqKey+tt.request)) {
				t.Fatalf("Request %x", got)
			}
			p.write(unhex(repKey + tt.reply))
			r := <-done
			if r.err != nil {
				t.Fatal(r.err)
			}
			c := r.c
			defer c.Close()
			post(t, c, &WorkRequest{Op: Send, Head: []byte("w")})
			if tt.want == "" { // a Read: the sink STag is ours to choose
				u := p.fpdu()
				if !bytes.Equal(u[:18], unhex("4141 00000000 00000001 00000001 00000000")) ||
					!bytes.Equal(u[22:], unhex("0000000000000000 00000000 00000001 0000000000000000")) {
					t.Fatalf("RTR %x", u)
				}
				p.send("c142" + hex.EncodeToString(u[18:22]) + "0000000000000000")
			} else {
				p.want("RTR", tt.want)
			}
			msn := "00000001"
			if strings.HasPrefix(tt.want, "41") {
				msn = "00000002"
			}
			p.want("MPA2-5-2", "4143 00000000 00000000"+msn+"00000000 77")
			p.send("4143 00000000 00000000 00000001 00000000 78")
			if ev := receive(t, c); ev.Read != nil || string(ev.Data) != "x" {
				t.Fatalf("the ULP saw the RTR: %+v", ev)
			}
		})
	}
	t.Run("a Read RTR that is not answered", func(t *testing.T) {
		p, c := initiator(t, Options{PeerToPeer: true, RTR: RTR{Read: true}}, repKey+"50020004 80014004")
		p.fpdu()
		p.nc.Close()
		var ev Event
		if err := c.Receive(&ev); err != io.EOF {
			t.Fatalf("%+v, %v", ev, err)
		}
	})
}

// MPA2-9.2-17, MPA2-9.2-18, MPA2-9.2-19, MPA2-9.2-20, MPA2-9.2-21,
// MPA-7.1.2-14: each of these may be the first FPDU for a Responder, which sends nothing before.
func TestRTROfTheResponder(t *testing.T) {
	const ours = "4143 00000000 00000000 00000001 00000000 6f"
	for _, tt := range []struct {
		id, first string
		answer    string // besides ours; "" for none
		told      bool
		nextMSN   string
	}{
		{"V-MPA2-7 MPA2-9.2-18", "c140 00000001 0000000000000000", "", false, "00000001"},
		{"V-MPA2-8 V-MPA2-9 MPA2-9.2-20",
			"4141 00000000 00000001 00000001 00000000 00000001 0000000000000000 00000000 00000001 0000000000000000",
			"c142 00000001 0000000000000000", false, "00000001"},
		{"V-MPA2-10 MPA2-9.2-21", "4143 00000000 00000000 00000001 00000000", "", false, "00000002"},
		{"MPA2-9.2-19 an ordinary message", "4143 00000000 00000000 00000001 00000000 6d", "", true, "00000002"},
		{"MPA2-9.2-17 an empty Send with Invalidate is no RTR", "4144 00000100 00000000 00000001 00000000", "", true,
			"00000002"},
	} {
		t.Run(tt.id, func(t *testing.T) {
			p, c, _ := respondTo(t, reqKey+"50020004 c004c001", Options{}, Answer{})
			expose(c, 0x100, make([]byte, 4), 0, RemoteWrite)
			post(t, c, &WorkRequest{Op: Send, Head: []byte("o")})
			p.silent("MPA-7.1.2-14 MPA2-9.2-18")
			p.send(tt.first)
			events := serve(c)
			// Either may come first, our Send or the Read Response.
			want := [][]byte{unhex(ours)}
			if tt.answer != "" {
				want = append(want, unhex(tt.answer))
			}
			for len(want) > 0 {
				got := p.fpdu()
				i := slices.IndexFunc(want, func(w []byte) bool { return bytes.Equal(w, got) })
				if i < 0 {
					t.Fatalf("MPA-7.1.2-14: ULPDU %x, want one of %x", got, want)
				}
				want = slices.Delete(want, i, i+1)
			}
			if tt.told {
				next(t, events)
			}
			p.send("4143 00000000 00000000" + tt.nextMSN + "00000000 78")
			if ev := next(t, events); string(ev.Data) != "x" {
				t.Fatalf("%+v", ev)
			}
		})
	}
	t.Run("MPA2-9.2-21 MSN 1 again", func(t *testing.T) {
		p, c, _ := respondTo(t, reqKey+"50020004 c004c001", Options{}, Answer{})
		p.send("4143 00000000 00000000 00000001 00000000", "4143 00000000 00000000 00000001 00000000")
		events := serve(c)
		p.want("MPA2-9.2-21",
			"4147 00000000 00000002 00000001 00000000 1203c000 0012 4143 00000000 00000000 00000001 00000000")
		p.nc.Close()
		asFault(t, next(t, events).err, wire.ReasonMSN, false)
	})
	t.Run("MPA2-4.4-1 without B an empty Send is the ULP's", func(t *testing.T) {
		p, c, _ := respondTo(t, reqKey+"10020004 00040001", Options{}, Answer{})
		p.send("4143 00000000 00000000 00000001 00000000")
		if ev := receive(t, c); len(ev.Data) != 0 {
			t.Fatal(ev)
		}
	})
}

// MPA-7.1-3, MPA-7.1-4, MPA-4.3-10, MPA-7.1.5-1, MPA-7.1.5-2: MPA may start
// after bytes of another protocol. It consumes none of them and counts from its own first byte.
func TestStartLater(t *testing.T) {
	p, nc := rawPair(t)
	p.write(append([]byte("eleven octs"), unhex(reqKey+"c0010000")...))
	b := make([]byte, 11)
	if _, err := io.ReadFull(nc, b); err != nil {
		t.Fatal(err)
	}
	nc.Write([]byte("last words"))
	c, err := Respond(context.Background(), nc, Options{}, func(*Request) Answer { return Answer{} })
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if w := p.read(10); string(w) != "last words" {
		t.Fatalf("%q", w)
	}
	p.startupFrame()
	p.in = new(wire.MarkerGrid)
	p.send("c140 00000001 0000000000000000")
	events := serve(c)
	post(t, c, &WorkRequest{Op: Send, Data: make([]byte, 1500)})
	p.want("MPA-4.3-10", "4143 00000000 00000000 00000001 00000000"+strings.Repeat("00", 1500))
	p.nc.Close()
	next(t, events)
}

// Bytes that the ULP has read in streaming mode are the beginning of the stream: the Request and
// the FPDUs after it (RFC 5044, section 7.1.3).
func TestResponderPrefix(t *testing.T) {
	stream := unhex(reqKey + "50020004 00040001" + // then a Send of "w", MSN 1
		"0013 4143 00000000 00000000 00000001 00000000 77 000000")
	stream = binary.LittleEndian.AppendUint32(stream, wire.UpdateCRC(0, stream[24:]))
	for n := range len(stream) + 1 {
		p, nc := rawPair(t)
		r, err := NewResponder(Options{IRD: 16, ORD: 16})
		if err != nil {
			t.Fatal(err)
		}
		p.write(stream[n:])
		c, err := r.Respond(context.Background(), nc, stream[:n], testkit.Patience,
			func(*Request) Answer { return Answer{} })
		if err != nil {
			t.Fatalf("%d bytes read ahead: %v", n, err)
		}
		if reply := p.startupFrame(); !bytes.Equal(reply, unhex(repKey+"50020004 00010004")) {
			t.Fatalf("Reply %x", reply)
		}
		if ev := receive(t, c); string(ev.Data) != "w" {
			t.Fatalf("%d bytes read ahead: Send of %x", n, ev.Data)
		}
		if c.IRD() != 1 || c.ORD() != 4 {
			t.Fatalf("IRD %d, ORD %d", c.IRD(), c.ORD())
		}
		c.Close()
	}
	t.Run("a prefix above the limit is refused", func(t *testing.T) {
		p, nc := rawPair(t)
		r, err := NewResponder(Options{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.Respond(context.Background(), nc, make([]byte, llp.WindowLen+1), testkit.Patience,
			nil); err == nil {
			t.Error("a prefix of 65537 bytes was accepted")
		}
		if n, err := p.nc.Read(make([]byte, 1)); n != 0 || err == nil {
			t.Error("the connection is still open")
		}
	})
	t.Run("no time left", func(t *testing.T) {
		_, nc := rawPair(t)
		r, err := NewResponder(Options{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.Respond(context.Background(), nc, nil, -time.Second,
			nil); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error(err)
		}
	})
	if _, err := NewResponder(Options{IRD: -1}); err == nil {
		t.Error("IRD -1 is taken")
	}
}
