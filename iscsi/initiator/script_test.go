package initiator

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A script is a target that sends what a test says.
type script struct {
	t  testing.TB
	nc net.Conn
}

// scripted returns the two ends of a connection.
func scripted(t testing.TB) (*script, Transport) {
	ours, theirs := net.Pipe()
	t.Cleanup(func() { ours.Close(); theirs.Close() })
	ours.SetDeadline(time.Now().Add(testkit.Patience))
	dial := func(context.Context, string, string) (net.Conn, error) { return theirs, nil }
	return &script{t, ours}, TCP{Dialer: dial}
}

// open returns a session with the script, and a context for what the test does with it.
func open(t testing.TB, transport Transport) (context.Context, *Session) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	t.Cleanup(cancel)
	s, err := Connect(ctx, "script:3260", Config{Target: scriptTarget, Transport: transport})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return ctx, s
}

// next returns the next PDU of the initiator, or nil at the end of the stream.
func (tg *script) next() (pdu.BHS, []byte) {
	h := make(pdu.BHS, pdu.BHSLen)
	if _, err := io.ReadFull(tg.nc, h); err != nil {
		return nil, nil
	}
	data := make([]byte, pdu.Padded(h.DataSegmentLength()))
	if _, err := io.ReadFull(tg.nc, data); err != nil {
		return nil, nil
	}
	return h, data[:h.DataSegmentLength()]
}

// send sends a PDU.
func (tg *script) send(h pdu.BHS, data []byte) {
	h.SetDataSegmentLength(len(data))
	b := append(append([]byte(nil), h...), data...)
	tg.nc.Write(append(b, make([]byte, pdu.Padded(len(data))-len(data))...))
}

// login answers the Login Request.
func (tg *script) login(change func(*pdu.LoginResponse), text ...string) {
	h, _ := tg.next()
	if h == nil {
		return
	}
	req := pdu.ParseLoginRequest(h)
	rsp := pdu.LoginResponse{Transit: true, CSG: pdu.LoginOperationalNegotiation, NSG: pdu.FullFeaturePhase, ISID: req.ISID, TSIH: 1,
		ITT: req.ITT, ExpCmdSN: 1, MaxCmdSN: 8}
	if change != nil {
		change(&rsp)
	}
	b := make(pdu.BHS, pdu.BHSLen)
	rsp.Put(b)
	var data []byte
	for _, kv := range text {
		data = append(append(data, kv...), 0)
	}
	tg.send(b, data)
}

// response returns a PDU of the target, in answer to h.
func response(op pdu.Opcode, h pdu.BHS, flags byte) pdu.BHS {
	b := make(pdu.BHS, pdu.BHSLen)
	b.Reset(op, pdu.FlagF|flags)
	b.SetITT(h.ITT())
	if op != pdu.SCSIResponse {
		b.SetTTT(pdu.ReservedTag)
	}
	b.SetMaxCmdSN(8)
	return b
}

const scriptTarget = "iqn.2026-11.io.example:script"

// Whatever is wrong with a login ends it with an error that names the problem.
func TestBadLogins(t *testing.T) {
	for _, tc := range []struct {
		name, want string
		do         func(*script)
	}{
		{"refused", "refused the login: target error", func(tg *script) {
			tg.login(func(r *pdu.LoginResponse) { r.Status, r.Transit = pdu.LoginTargetError, false })
		}},
		{"moved nowhere", "names no address", func(tg *script) {
			tg.login(func(r *pdu.LoginResponse) { r.Status, r.Transit = pdu.LoginMovedTemporarily, false })
		}},
		{"no handle", "TSIH is 0", func(tg *script) { tg.login(func(r *pdu.LoginResponse) { r.TSIH = 0 }) }},
		{"other task", "Login Response to task 0x63", func(tg *script) { tg.login(func(r *pdu.LoginResponse) { r.ITT = 99 }) }},
		{"other stage", "instead of the full feature phase", func(tg *script) {
			tg.login(func(r *pdu.LoginResponse) { r.NSG = pdu.LoginOperationalNegotiation })
		}},
		{"no end", "has not ended after 32 exchanges", func(tg *script) {
			for range maxRounds {
				tg.login(func(r *pdu.LoginResponse) { r.Transit = false })
			}
		}},
		{"long text", "more than 16384 bytes", func(tg *script) {
			for range 3 {
				tg.login(func(r *pdu.LoginResponse) { r.Transit, r.Continue = false, true }, "X-a="+strings.Repeat("a", 8000))
			}
		}},
		{"key twice", "answered MaxConnections twice", func(tg *script) { tg.login(nil, "MaxConnections=1", "MaxConnections=1") }},
		{"no pair", `"MaxConnections" has no "="`, func(tg *script) { tg.login(nil, "MaxConnections") }},
		{"number", `MaxBurstLength="lots" of the target is not a number`, func(tg *script) { tg.login(nil, "MaxBurstLength=lots") }},
		{"range", `FirstBurstLength="1" of the target is not a number from 512`, func(tg *script) { tg.login(nil, "FirstBurstLength=1") }},
		{"more connections than offered", `MaxConnections="7"`, func(tg *script) { tg.login(nil, "MaxConnections=7") }},
		{"unexpected PDUs", `MaxOutstandingUnexpectedPDUs="1" of the target is neither 0`, func(tg *script) {
			tg.login(nil, "RDMAExtensions=Yes", "MaxOutstandingUnexpectedPDUs=1")
		}},
		{"boolean", `ImmediateData="maybe"`, func(tg *script) { tg.login(nil, "ImmediateData=maybe") }},
		{"digest not offered", `HeaderDigest: the target answered "CRC32C" instead of None`, func(tg *script) { tg.login(nil, "HeaderDigest=CRC32C") }},
		{"bursts", "is above MaxBurstLength", func(tg *script) { tg.login(nil, "FirstBurstLength=65536", "MaxBurstLength=512") }},
		{"reject", "rejected a Login Request: reason 0x04", func(tg *script) {
			h, _ := tg.next()
			r := response(pdu.Reject, h, 0)
			r.SetReason(pdu.RejectProtocolError)
			tg.send(r, h)
		}},
		{"other PDU", "where a Login Response is due", func(tg *script) { h, _ := tg.next(); tg.send(response(pdu.NOPIn, h, 0), nil) }},
		{"segment", "declared a limit of", func(tg *script) {
			h, _ := tg.next()
			r := response(pdu.LoginResp, h, 0)
			r.SetDataSegmentLength(pdu.MaxData)
			tg.nc.Write(r)
		}},
		{"end", "closed the connection", func(tg *script) { tg.next(); tg.nc.Close() }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tg, transport := scripted(t)
			go tc.do(tg)
			ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
			defer cancel()
			s, err := Connect(ctx, "script:3260", Config{Target: scriptTarget, Transport: transport})
			if s != nil {
				s.Close()
			}
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("the error is %v, want %q", err, tc.want)
			}
		})
	}
}

// A target that does not answer ends the login when its context ends.
func TestSilentLogin(t *testing.T) {
	tg, transport := scripted(t)
	ctx, cancel := context.WithCancel(context.Background())
	go func() { tg.next(); cancel() }()
	if _, err := Connect(ctx, "script:3260", Config{Target: scriptTarget, Transport: transport}); !errors.Is(err, context.Canceled) {
		t.Errorf("the error is %v", err)
	}
}

// What a target may not send ends the session, and every command with an error that names the problem.
func TestBadPDUs(t *testing.T) {
	dataIn := func(tg *script, h pdu.BHS, off uint32, n int) {
		r := response(pdu.DataIn, h, 0)
		r.SetBufferOffset(off)
		tg.send(r, make([]byte, n))
	}
	r2t := func(tg *script, h pdu.BHS, sn, off, n uint32) {
		r := response(pdu.R2T, h, 0)
		r.SetTTT(7)
		r.SetR2TSN(sn)
		r.SetBufferOffset(off)
		r.SetDesiredDataTransferLength(n)
		tg.send(r, nil)
	}
	for _, tc := range []struct {
		name, want string
		write      bool
		do         func(*script, pdu.BHS)
	}{
		{"end", "closed the connection", false, func(tg *script, h pdu.BHS) { tg.nc.Close() }},
		{"end in a PDU", "inside a message", false, func(tg *script, h pdu.BHS) { tg.nc.Write(make([]byte, 20)); tg.nc.Close() }},
		{"opcode of an initiator", "which only initiators send", false, func(tg *script, h pdu.BHS) { tg.send(response(pdu.SCSICommand, h, 0), nil) }},
		{"unknown opcode", "nothing has asked for", false, func(tg *script, h pdu.BHS) { tg.send(response(0x3a, h, 0), nil) }},
		{"AHS", "additional header segments", false, func(tg *script, h pdu.BHS) {
			r := response(pdu.SCSIResponse, h, 0)
			r.SetTotalAHSLength(4)
			tg.send(r, nil)
		}},
		{"long segment", "declared a limit of 262144", false, func(tg *script, h pdu.BHS) {
			r := response(pdu.DataIn, h, 0)
			r.SetDataSegmentLength(receiveSegment + 1)
			tg.nc.Write(r)
		}},
		{"response of no task", "which is not in progress", false, func(tg *script, h pdu.BHS) {
			h.SetITT(h.ITT() + 0x10000)
			tg.send(response(pdu.SCSIResponse, h, 0), nil)
		}},
		{"data of no task", "Data-In of task", false, func(tg *script, h pdu.BHS) { h.SetITT(77); dataIn(tg, h, 0, 512) }},
		{"data behind the end", "Data-In of task", false, func(tg *script, h pdu.BHS) { dataIn(tg, h, 0, 8192) }},
		{"data at a far offset", "at offset 4294967295", false, func(tg *script, h pdu.BHS) { dataIn(tg, h, 1<<32-1, 512) }},
		{"data out of order", "where 0 of 4096 bytes came before", false, func(tg *script, h pdu.BHS) { dataIn(tg, h, 512, 512) }},
		{"data for a WRITE", "Data-In of task", true, func(tg *script, h pdu.BHS) { dataIn(tg, h, 0, 512) }},
		{"missing data", "0 bytes of data came instead of 4096", false, func(tg *script, h pdu.BHS) { tg.send(response(pdu.SCSIResponse, h, 0), nil) }},
		{"residual", "bytes are missing of 4096", false, func(tg *script, h pdu.BHS) {
			r := response(pdu.SCSIResponse, h, pdu.FlagUnderflow)
			r.SetResidual(5000)
			tg.send(r, nil)
		}},
		{"sense", "300 bytes of sense data in a data segment of 10", false, func(tg *script, h pdu.BHS) {
			r := response(pdu.SCSIResponse, h, 0)
			r.SetStatus(CheckCondition)
			tg.send(r, append(binary.BigEndian.AppendUint16(nil, 300), make([]byte, 8)...))
		}},
		{"R2T of no task", "R2T of task", true, func(tg *script, h pdu.BHS) { h.SetITT(77); r2t(tg, h, 0, 0, 512) }},
		{"R2T for a READ", "R2T of task", false, func(tg *script, h pdu.BHS) { r2t(tg, h, 0, 0, 512) }},
		{"R2T of nothing", "0 bytes at offset 0", true, func(tg *script, h pdu.BHS) { r2t(tg, h, 0, 0, 0) }},
		{"R2T behind the end", "4096 bytes at offset 512 of 4096", true, func(tg *script, h pdu.BHS) { r2t(tg, h, 0, 512, 4096) }},
		{"R2T at a far offset", "at offset 4294967295", true, func(tg *script, h pdu.BHS) { r2t(tg, h, 0, 1<<32-1, 512) }},
		{"R2T that leaves out data", "at offset 512, where offset 0 is due", true, func(tg *script, h pdu.BHS) { r2t(tg, h, 0, 512, 512) }},
		{"R2TSN", "R2TSN 1 where 0 is due", true, func(tg *script, h pdu.BHS) { r2t(tg, h, 1, 0, 512) }},
		{"reject", "rejected a SCSI Command: reason 0x09", false, func(tg *script, h pdu.BHS) {
			r := response(pdu.Reject, h, 0)
			r.SetReason(pdu.RejectInvalidField)
			tg.send(r, h)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tg, transport := scripted(t)
			go func() {
				tg.login(nil, "ImmediateData=No")
				h, _ := tg.next()
				tc.do(tg, h)
				for h != nil { // takes what still comes
					h, _ = tg.next()
				}
			}()
			ctx, s := open(t, transport)
			c := &Command{}
			if tc.write {
				c.Out = make([]byte, 4096)
			} else {
				c.In = make([]byte, 4096)
			}
			if err := s.Do(ctx, c); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("the error is %v, want %q", err, tc.want)
			}
			<-s.Done()
		})
	}
}

// A target asks for the next data of a command as soon as it has that of the last R2T, while the initiator still sends other data.
func TestR2TsWhileSending(t *testing.T) {
	const burst = 1 << 16
	tg, transport := scripted(t)
	r2t := func(h pdu.BHS, sn uint32) pdu.BHS {
		r := response(pdu.R2T, h, 0)
		r.SetTTT(7)
		r.SetR2TSN(sn)
		r.SetBufferOffset(sn * burst)
		r.SetDesiredDataTransferLength(burst)
		return r
	}
	go func() {
		tg.login(nil, "ImmediateData=No", "MaxBurstLength=65536", "MaxRecvDataSegmentLength=512")
		var long, one, two pdu.BHS
		for range 3 {
			switch h, _ := tg.next(); {
			case h.EDTL() > burst:
				long = h
			case one == nil:
				one = h
			default:
				two = h
			}
		}
		got := map[uint32]int{} // bytes of each task
		until := func(h pdu.BHS, n int) {
			for got[h.ITT()] < n {
				h, data := tg.next()
				if h == nil {
					return
				}
				got[h.ITT()] += len(data)
			}
		}
		ask := func(r2ts ...pdu.BHS) {
			var b []byte
			for _, r := range r2ts {
				b = append(b, r...)
			}
			tg.nc.Write(b)
		}
		ask(r2t(long, 0), r2t(one, 0))
		until(long, burst)
		ask(r2t(long, 1), r2t(two, 0)) // the data of one is on its way
		until(one, burst)
		until(long, 2*burst)
		ask(r2t(long, 2)) // that of two is
		until(two, burst)
		until(long, 3*burst)
		for _, h := range []pdu.BHS{long, one, two} {
			tg.send(response(pdu.SCSIResponse, h, 0), nil)
		}
		for h, _ := tg.next(); h != nil; {
			h, _ = tg.next()
		}
	}()
	ctx, s := open(t, transport)
	errs := make(chan error, 3)
	for _, bursts := range []int{3, 1, 1} {
		go func() { errs <- s.Do(ctx, &Command{Out: make([]byte, bursts*burst)}) }()
	}
	for range 3 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

// A failure of the target is an error of the command, not of the session.
func TestTargetFailure(t *testing.T) {
	tg, transport := scripted(t)
	go func() {
		tg.login(nil)
		for _, code := range []byte{pdu.TargetFailure, 0x80} {
			h, _ := tg.next()
			r := response(pdu.SCSIResponse, h, 0)
			r.SetResponse(code)
			tg.send(r, nil)
		}
		h, _ := tg.next()
		r := response(pdu.SCSIResponse, h, 0)
		r.SetStatus(CheckCondition)
		tg.send(r, append([]byte{0, 18}, 0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x21, 0, 0, 0, 0, 0))
	}()
	ctx, s := open(t, transport)
	for _, want := range []string{"response 0x01", "response 0x80", "logical block address out of range (5/21/00)"} {
		if err := s.Do(ctx, &Command{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error is %v, want %q", err, want)
		}
	}
}

// The initiator answers the pings of the target, with their data.
// With SkipCopy, the kernel drops long data-in. It counts as received, and what follows it arrives.
func TestSkipCopy(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	const size, segment = 400_001, 200_000 // the last one has padding
	sent := bytes.Repeat([]byte{1}, size)
	go func() {
		nc, err := l.Accept()
		if err != nil {
			return
		}
		defer nc.Close()
		tg := &script{t, nc}
		tg.login(nil)
		var h pdu.BHS
		for _, end := range []int{size, size, segment} {
			if h, _ = tg.next(); h == nil {
				return
			}
			for off := 0; off < end; off += segment {
				in := response(pdu.DataIn, h, 0)
				in.SetBufferOffset(uint32(off))
				tg.send(in, sent[off:min(off+segment, size)])
			}
			if end == size {
				tg.send(response(pdu.SCSIResponse, h, 0), nil)
			}
		}
		in := response(pdu.DataIn, h, 0)
		in.SetBufferOffset(segment)
		in.SetDataSegmentLength(segment)
		nc.Write(append(in, sent[:1000]...))
	}()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	s, err := Connect(ctx, l.Addr().String(), Config{Target: scriptTarget})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ones := func(c *Command) int { return bytes.Count(c.In, []byte{1}) }
	c := &Command{In: make([]byte, size), SkipCopy: true}
	if err := s.Do(ctx, c); err != nil || c.Check() != nil || ones(c) > size/2 {
		t.Errorf("with SkipCopy: %v, %v, %d bytes came", err, c.Check(), ones(c))
	}
	c.SkipCopy = false
	if err := s.Do(ctx, c); err != nil || c.Check() != nil || ones(c) != size {
		t.Errorf("then without: %v, %v, %d bytes came", err, c.Check(), ones(c))
	}
	c.SkipCopy = true
	if err := s.Do(ctx, c); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the connection ended in the data: %v", err)
	}
}

func TestPong(t *testing.T) {
	tg, transport := scripted(t)
	ponged := make(chan string, 1)
	go func() {
		tg.login(nil)
		r := make(pdu.BHS, pdu.BHSLen)
		r.Reset(pdu.NOPIn, pdu.FlagF)
		r.SetITT(pdu.ReservedTag)
		r.SetTTT(5)
		tg.send(r, []byte("hello"))
		h, data := tg.next()
		ponged <- fmt.Sprint(h.Opcode(), h.Immediate(), h.ITT() == pdu.ReservedTag, h.TTT(), string(data))
	}()
	open(t, transport)
	if got, want := <-ponged, fmt.Sprint(pdu.NOPOut, true, true, 5, "hello"); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// ISER-8.1.1.3-3, ISER-8.1.1.3-4: requests of a session stay within what the target admits without a place in its window. At that limit they
// take one, and wait for it. A target retires them when it has come beyond a later request of the connection that has a place.
func TestUnexpectedRequests(t *testing.T) {
	tg, transport := scripted(t)
	type seen struct {
		op        pdu.Opcode
		immediate bool
		cmdSN     uint32
	}
	requests, expCmdSN := make(chan seen, 1), make(chan uint32, 1)
	go func() {
		defer close(requests)
		tg.login(nil, "RDMAExtensions=Yes", "MaxOutstandingUnexpectedPDUs=2")
		for {
			h, data := tg.next()
			if h == nil {
				return
			}
			requests <- seen{h.Opcode(), h.Immediate(), h.CmdSN()}
			r := response(map[pdu.Opcode]pdu.Opcode{pdu.NOPOut: pdu.NOPIn, pdu.SCSICommand: pdu.SCSIResponse, pdu.TaskMgmtReq: pdu.TaskMgmtResp}[h.Opcode()], h, 0)
			r.SetExpCmdSN(<-expCmdSN)
			if h.Opcode() != pdu.NOPOut {
				data = nil
			}
			tg.send(r, data)
		}
	}()
	ctx, s := open(t, transport)
	ping := func(ctx context.Context) error { return s.Ping(ctx) }
	command := func(ctx context.Context) error { return s.Do(ctx, &Command{}) }
	reset := func(ctx context.Context) error { _, err := s.TaskManagement(ctx, pdu.LogicalUnitReset, 0); return err }
	type exchange struct {
		do       func(context.Context) error
		want     seen
		expCmdSN uint32
	}
	begin := func(do func(context.Context) error) <-chan error {
		done := make(chan error, 1)
		go func() { done <- do(ctx) }()
		return done
	}
	end := func(name any, done <-chan error, want seen, answer uint32) {
		t.Helper()
		if got := <-requests; got != want {
			t.Fatalf("request %v: %+v, want %+v", name, got, want)
		}
		expCmdSN <- answer
		if err := <-done; err != nil {
			t.Fatalf("request %v: %v", name, err)
		}
	}
	for i, tt := range []exchange{
		{ping, seen{pdu.NOPOut, true, 1}, 1},
		{reset, seen{pdu.TaskMgmtReq, true, 1}, 1},
		{ping, seen{pdu.NOPOut, false, 1}, 2}, // two are outstanding; its answer retires them
		{ping, seen{pdu.NOPOut, true, 2}, 2},
		{ping, seen{pdu.NOPOut, true, 2}, 2},
		{command, seen{pdu.SCSICommand, false, 2}, 2}, // the target has answered it, but not come beyond it
		{reset, seen{pdu.TaskMgmtReq, false, 3}, 3},   // it retires the pings by the command
		{ping, seen{pdu.NOPOut, true, 4}, 4},
		{ping, seen{pdu.NOPOut, true, 4}, 4},
		{command, seen{pdu.SCSICommand, false, 4}, 5},
		{ping, seen{pdu.NOPOut, true, 5}, 5},
		{ping, seen{pdu.NOPOut, true, 5}, 5},
		{command, seen{pdu.SCSICommand, false, 5}, 5},
		{command, seen{pdu.SCSICommand, false, 6}, 5},
		{command, seen{pdu.SCSICommand, false, 7}, 5},
		{command, seen{pdu.SCSICommand, false, 8}, 5},
	} {
		end(i, begin(tt.do), tt.want, tt.expCmdSN)
	}
	// The window ends with 8.
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	if err := s.Ping(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("without a place: %v", err)
	}
	waits := begin(ping)
	time.Sleep(20 * time.Millisecond)
	select {
	case got := <-requests:
		t.Fatalf("without a place: %+v", got)
	default:
	}
	r := make(pdu.BHS, pdu.BHSLen)
	r.Reset(pdu.NOPIn, pdu.FlagF)
	r.SetITT(pdu.ReservedTag)
	r.SetTTT(pdu.ReservedTag)
	r.SetExpCmdSN(5)
	r.SetMaxCmdSN(9)
	tg.send(r, nil)
	end("with a place", waits, seen{pdu.NOPOut, false, 9}, 10)
	end("after all", begin(ping), seen{pdu.NOPOut, true, 10}, 10)
}

func TestParseURL(t *testing.T) {
	for _, tc := range []struct{ in, want, err string }{
		{"iscsi://host/iqn.2026-11.io.example:a/0", "iscsi://host:3260/iqn.2026-11.io.example:a/0", ""},
		{"iser://[2001:db8::1]:3299/IQN.2026-11.io.example:A/16383", "iser://[2001:db8::1]:3299/iqn.2026-11.io.example:a/16383", ""},
		{"iscsi://host", "iscsi://host:3260", ""},
		{"iscsi://host/", "iscsi://host:3260", ""},
		{"iscsi://host/iqn.2026-11.io.example:a", "iscsi://host:3260/iqn.2026-11.io.example:a", ""},
		{"host", "", "does not begin with iscsi:// or iser://"},
		{"nvme://host", "", "does not begin with"},
		{"iscsi://", "", "has no host"},
		{"iscsi://anna%secret@host/iqn.2026-11.io.example:a/0", "", "not a URL"},
		{"iscsi://anna:secret@host/iqn.2026-11.io.example:a/0", "", "must not contain a user"},
		{"iscsi://host:0/iqn.2026-11.io.example:a/0", "", `port "0"`},
		{"iscsi://host:70000/iqn.2026-11.io.example:a/0", "", `port "70000"`},
		{"iscsi://host/disk/0", "", `target name "disk"`},
		{"iscsi://host/iqn.2026-11.io.example:a/x", "", `LUN "x"`},
		{"iscsi://host/iqn.2026-11.io.example:a/-1", "", `LUN "-1"`},
		{"iscsi://host/iqn.2026-11.io.example:a/16384", "", "from 0 to 16383"},
		{"iscsi://host/iqn.2026-11.io.example:a/0/0", "", "more than a target and a LUN"},
		{"iscsi://host/iqn.2026-11.io.example:a/0?x=1", "", "has a query"},
	} {
		u, err := ParseURL(tc.in)
		if tc.err == "" && (err != nil || u.String() != tc.want) || tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)) {
			t.Errorf("%s: %v, %v, want %q, %q", tc.in, u, err, tc.want, tc.err)
		}
	}
}

func TestBadConfigs(t *testing.T) {
	for _, tc := range []struct {
		cfg  Config
		want string
	}{
		{Config{}, `target name ""`},
		{Config{Name: "me", Target: scriptTarget}, `initiator name "me"`},
		{Config{Target: scriptTarget, Connections: 65}, "65 connections"},
		{Config{Target: scriptTarget, Connections: -1}, "-1 connections"},
		{Config{Target: scriptTarget, QueueDepth: 5000}, "queue depth 5000"},
		{Config{Target: scriptTarget, CHAP: &CHAP{Name: "a\x00b"}}, "zero byte"},
	} {
		if _, err := Connect(context.Background(), "192.0.2.1:3260", tc.cfg); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%+v: %v, want %q", tc.cfg, err, tc.want)
		}
	}
}

// FuzzTarget sends any bytes in place of a target, after a login and a command of each kind. The session ends, and with it
// the commands.
func FuzzTarget(f *testing.F) {
	h := make(pdu.BHS, pdu.BHSLen)
	h.SetITT(0x10000)
	f.Add([]byte(response(pdu.SCSIResponse, h, 0)))
	in := response(pdu.DataIn, h, pdu.FlagS)
	in.SetDataSegmentLength(512)
	f.Add(append(append([]byte(nil), in...), make([]byte, 512)...))
	h.SetITT(0x10001)
	r2t := response(pdu.R2T, h, 0)
	r2t.SetDesiredDataTransferLength(512)
	f.Add([]byte(r2t))
	f.Add(append(append([]byte(nil), r2t...), r2t...))
	testkit.FuzzBytes(f, func(t testing.TB, b []byte) {
		tg, transport := scripted(t)
		go func() {
			tg.login(nil, "ImmediateData=No")
			tg.next()
			tg.next()
			go io.Copy(io.Discard, tg.nc)
			tg.nc.Write(b)
			tg.nc.Close()
		}()
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
		defer cancel()
		s, err := Connect(ctx, "script:3260", Config{Target: scriptTarget, Transport: transport})
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan *Command, 2)
		read, write := &Command{In: make([]byte, 512), Done: done}, &Command{Out: make([]byte, 512), Done: done}
		started := 0
		for _, c := range []*Command{read, write} {
			if s.Start(ctx, c) == nil {
				started++
			}
		}
		for range started {
			<-done
		}
		s.Close()
	})
}

// connected returns a session with a target that has answered the login, and does nothing else.
func connected(t *testing.T) *Session {
	tg, transport := scripted(t)
	go tg.login(nil)
	_, s := open(t, transport)
	return s
}

// Do, Start and Logout return soon after their context has ended, whatever the target leaves undone: this one reads nothing, so that
// nothing can be sent, and another request is in progress for ever.
func TestDeadlines(t *testing.T) {
	for name, do := range map[string]func(*Session, context.Context) error{
		"Do": func(s *Session, ctx context.Context) error { return s.Do(ctx, &Command{Out: make([]byte, 1<<20)}) },
		"Start": func(s *Session, ctx context.Context) error {
			done := make(chan *Command, 1)
			if err := s.Start(ctx, &Command{Out: make([]byte, 1<<20), Done: done}); err != nil {
				return err
			}
			return (<-done).Err
		},
		"Ping": func(s *Session, ctx context.Context) error { return s.Ping(ctx) },
		"TaskManagement": func(s *Session, ctx context.Context) error {
			_, err := s.TaskManagement(ctx, pdu.LogicalUnitReset, 0)
			return err
		},
		"Logout": func(s *Session, ctx context.Context) error { return s.Logout(ctx) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := connected(t)
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				s.Ping(context.Background()) // its answer never comes
			}()
			testkit.Eventually(t, "the ping", func() bool { return len(s.requests) == 1 })
			ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			defer cancel()
			began := time.Now()
			err := do(s, ctx)
			if d := time.Since(began); err == nil || d > abortTime+20*time.Second {
				t.Errorf("%v after %v", err, d)
			}
			s.Close()
			<-ended
		})
	}
}

// A Disk repeats what the LUN has not done, until its context ends. Other statuses are errors at once.
func TestDiskRepeats(t *testing.T) {
	attention := []byte{0, 18, 0x70, 0, UnitAttention, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x29, 0, 0, 0, 0, 0}
	for _, tc := range []struct {
		name     string
		statuses []byte // the last one holds for what follows
		commands int    // that come; 0: several
		want     string
	}{
		{"each kind", []byte{CheckCondition, Busy, TaskSetFull, Busy, CheckCondition, Good}, 6, ""},
		{"busy for ever", []byte{Busy}, 0, "the LUN is busy"},
		{"unit attentions for ever", []byte{CheckCondition}, maxOpenTries, "unit attention: power on, reset"},
		{"reservation conflict", []byte{Busy, ReservationConflict}, 2, "reservation conflict"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tg, transport := scripted(t)
			came := make(chan int, 1)
			go func() {
				tg.login(nil)
				n := 0
				for ; ; n++ {
					h, _ := tg.next()
					if h == nil || h.Opcode() != pdu.SCSICommand {
						break
					}
					r := response(pdu.SCSIResponse, h, 0)
					status := tc.statuses[min(n, len(tc.statuses)-1)]
					r.SetStatus(status)
					r.SetExpCmdSN(h.CmdSN() + 1)
					r.SetMaxCmdSN(h.CmdSN() + 8)
					if status == CheckCondition {
						tg.send(r, attention)
					} else {
						tg.send(r, nil)
					}
				}
				came <- n
			}()
			ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
			defer cancel()
			s, err := Connect(ctx, "script:3260", Config{Target: scriptTarget, Transport: transport})
			if err != nil {
				t.Fatal(err)
			}
			if tc.commands == 0 {
				ctx, cancel = context.WithTimeout(ctx, 10*againPause)
				defer cancel()
			}
			err = (&Disk{s: s, BlockSize: 512, Blocks: 8}).Sync(ctx)
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("the error is %v, want %q", err, tc.want)
			}
			s.Close()
			if n := <-came; n != tc.commands && tc.commands > 0 || n < 2 || n > maxOpenTries {
				t.Errorf("%d commands came, want %d", n, tc.commands)
			}
		})
	}
}

// Immediate data is what the command, the login and the connection admit.
func TestImmediateLength(t *testing.T) {
	for _, tc := range []struct {
		immediate int
		p         Params
		want      int
	}{
		{0, Params{ImmediateData: true, FirstBurstLength: 4096, MaxSendSegment: 8192}, 4096},
		{0, Params{ImmediateData: true, FirstBurstLength: 65536, MaxSendSegment: 8192}, 8192},
		{0, Params{ImmediateData: true, FirstBurstLength: 65536, MaxSendSegment: 65536}, 10000},
		{0, Params{FirstBurstLength: 65536, MaxSendSegment: 65536}, 0},
		{512, Params{ImmediateData: true, FirstBurstLength: 4096, MaxSendSegment: 8192}, 512},
		{5000, Params{ImmediateData: true, FirstBurstLength: 4096, MaxSendSegment: 8192}, 4096},
		{512, Params{FirstBurstLength: 4096, MaxSendSegment: 8192}, 0},
		{-1, Params{ImmediateData: true, FirstBurstLength: 4096, MaxSendSegment: 8192}, 0},
	} {
		c := Command{Out: make([]byte, 10000), Immediate: tc.immediate}
		if got := c.ImmediateLength(&tc.p); got != tc.want {
			t.Errorf("Immediate %d, %+v: %d bytes, want %d", tc.immediate, tc.p, got, tc.want)
		}
	}
}
