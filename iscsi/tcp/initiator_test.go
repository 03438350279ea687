package tcp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"log/slog"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
	"github.com/iser-target/iser-target/tests/testkit/header"
)

const (
	blockLen   = 512
	storeLen   = 16 << 20
	targetName = "iqn.2026-11.io.example:store"
	firstCmdSN = 0xfffffff0 // ISCSI-4.2.2.1-1: it wraps soon
)

// A target is a Node with one memory LUN, served over loopback TCP.
type target struct {
	tb     testing.TB
	node   *iscsi.Node
	portal *iscsi.Portal
	store  *backendtest.Faulty
	lends  string // "memory": the LUN lends its memory. "file": the kernel refers to its pages. store is not used then
	unit   lun.Options
	l      net.Listener
	prefix int // bytes that are read before New
	opt    Options
	wrap   func(net.Conn) net.Conn // what the target's end of a connection becomes; nil: nothing
	made   func(*Conn)             // is called for each connection; nil: nothing
	wg     sync.WaitGroup
}

// startTarget serves until the test ends, and then checks that nothing remains.
func startTarget(tb testing.TB, change ...func(*target, *iscsi.Options)) *target {
	tb.Helper()
	goroutines := runtime.NumGoroutine()
	_, fuzzing := tb.(*testing.F)
	mem, err := backend.OpenMemory(backend.MemoryConfig{Size: storeLen, BlockSize: blockLen})
	if err != nil {
		tb.Fatal(err)
	}
	tg := &target{tb: tb, store: &backendtest.Faulty{Store: mem}}
	o := iscsi.Options{
		LogoutWait: 2 * time.Second, NopInterval: -1,
		Limits: keys.Limits{Digests: true}, Logger: slog.New(slog.DiscardHandler),
	}
	for _, f := range change {
		f(tg, &o)
	}
	tg.opt.MaxRecvDataSegmentLength = int(o.Limits.MaxRecvDataSegmentLength)
	inv := lun.NewInventory()
	id, err := state.Ephemeral().Get("test")
	if err != nil {
		tb.Fatal(err)
	}
	var store backend.Store = tg.store
	switch tg.lends {
	case "memory":
		store = mem
	case "file":
		if store, _, err = backend.OpenFile(backend.FileConfig{Path: backendtest.SpliceDir(tb) + "/lun.img", Size: storeLen, BlockSize: blockLen}); err != nil {
			tb.Fatal(err)
		}
	}
	tg.unit.Identity = id
	unit, err := lun.New(store, tg.unit)
	if err != nil {
		tb.Fatal(err)
	}
	if err := inv.Add(0, unit); err != nil {
		tb.Fatal(err)
	}
	all, err := security.Compile([]string{"*"})
	if err != nil {
		tb.Fatal(err)
	}
	tg.node = iscsi.NewNode(o)
	if err := tg.node.AddTarget(iscsi.TargetConfig{Name: targetName, Initiators: all, ResetsFor: all, LUNs: inv}); err != nil {
		tb.Fatal(err)
	}
	if tg.l, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		tb.Fatal(err)
	}
	if tg.lends != "" {
		testkit.Unpaced(tb, tg.l.(*net.TCPListener))
	}
	tg.portal = tg.node.AddPortal(iscsi.PortalConfig{Listen: tg.l.Addr().String(), TPGT: 1})
	tg.wg.Add(1)
	go tg.serve()
	tb.Cleanup(func() {
		tg.l.Close()
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
		defer cancel()
		if err := tg.node.Shutdown(ctx); err != nil {
			tb.Errorf("shutdown: %v", err)
		}
		tg.wg.Wait()
		if s := tg.node.Stats(); s.Sessions+s.Connections+s.TasksInFlight+s.BuffersOut+s.BufferOctets != 0 {
			tb.Errorf("not freed: %+v", s)
		}
		testkit.Eventually(tb, "no more goroutines than before", func() bool {
			return fuzzing || runtime.NumGoroutine() <= goroutines
		})
	})
	return tg
}

func (tg *target) serve() {
	defer tg.wg.Done()
	for {
		nc, err := tg.l.Accept()
		if err != nil {
			return
		}
		tg.wg.Add(1)
		go func() {
			defer tg.wg.Done()
			if tg.wrap != nil {
				nc = tg.wrap(nc)
			}
			o := tg.opt
			o.Prefix = make([]byte, tg.prefix)
			if _, err := io.ReadFull(nc, o.Prefix); err != nil {
				nc.Close()
				return
			}
			c := New(nc, o)
			if w, ok := nc.(*testkit.Watcher); ok {
				w.Unread = c.Unread
			}
			if tg.made != nil {
				tg.made(c)
			}
			tg.portal.Serve(c, iscsi.ServeOptions{})
		}()
	}
}

// digest returns the CRC32C of b in the byte order of RFC 7143, section 13.1.
func digest(b []byte) []byte {
	return binary.LittleEndian.AppendUint32(nil, crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
}

// A client is a scripted initiator. It checks what holds for every PDU of the target.
type client struct {
	tb             testing.TB
	nc             net.Conn
	chunk          int // bytes per write; 0: whole PDUs
	header, data   bool
	badHeader      bool   // the next header digest is wrong
	badData        bool   // the next data digest is wrong
	header.Numbers        // ExpStatSN follows statSN, unless acksLate
	statSN         uint32 // of the next status
	statSeen       bool
	acksLate       bool // the test sets ExpStatSN
	expCmdSN       uint32
	maxCmdSN       uint32
	isid           [6]byte
	tsih, cid      uint16
	limit          int // MaxRecvDataSegmentLength that we have declared
}

// A reply is a PDU of the target.
type reply struct {
	h    pdu.BHS
	data []byte
}

func (tg *target) connect(tb testing.TB) *client {
	tb.Helper()
	nc, err := net.Dial("tcp", tg.l.Addr().String())
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { nc.Close() })
	return &client{tb: tb, nc: nc, Numbers: header.Numbers{ITT: 0x100, CmdSN: firstCmdSN}, limit: 8192}
}

// login starts a normal session and receives the unit attention of its first command. keys are key=value
// each. MaxRecvDataSegmentLength is 8192 if they do not contain it.
func (tg *target) login(tb testing.TB, keys ...string) *client {
	tb.Helper()
	c := tg.connect(tb)
	c.login(keys...)
	for range 3 {
		if rsp := c.command(0, cdb.TestUnitReady, 0); rsp.h.Status() == 0 {
			return c
		}
	}
	tb.Fatal("TEST UNIT READY does not get GOOD")
	return nil
}

func (c *client) login(pairs ...string) map[string]string {
	c.tb.Helper()
	text := "InitiatorName=iqn.2026-11.io.github:test\x00TargetName=" + targetName + "\x00" +
		strings.Join(pairs, "\x00")
	if len(pairs) > 0 {
		text += "\x00"
	}
	if i := slices.IndexFunc(pairs,
		func(s string) bool { return strings.HasPrefix(s, "MaxRecvDataSegmentLength=") }); i >= 0 {
		c.limit = atoi(strings.TrimPrefix(pairs[i], "MaxRecvDataSegmentLength="))
	}
	if c.tsih == 0 {
		c.isid = newISID()
	}
	r := pdu.LoginRequest{Transit: true, CSG: 1, NSG: 3, ISID: c.isid, TSIH: c.tsih, CID: c.cid, ITT: c.ITT,
		CmdSN: c.CmdSN}
	c.send(r.Append(nil), []byte(text))
	rsp := c.want(pdu.LoginResp)
	if st := pdu.ParseLoginResponse(rsp.h).Status; st != 0 {
		c.tb.Fatalf("login status %v", st)
	}
	c.tsih = pdu.ParseLoginResponse(rsp.h).TSIH
	agreed := map[string]string{}
	for pair := range strings.SplitSeq(string(rsp.data), "\x00") {
		k, v, _ := strings.Cut(pair, "=")
		agreed[k] = v
	}
	c.header, c.data = agreed["HeaderDigest"] == "CRC32C", agreed["DataDigest"] == "CRC32C"
	return agreed
}

var isids atomic.Uint32

// newISID selects another ISID, so that the next login starts a new session.
func newISID() (isid [6]byte) {
	binary.BigEndian.PutUint32(isid[2:], isids.Add(1))
	return isid
}

func atoi(s string) (n int) {
	for _, d := range s {
		n = 10*n + int(d-'0')
	}
	return n
}

// encode returns a PDU as it is on the wire.
func (c *client) encode(h pdu.BHS, ahs, data []byte) []byte {
	h = bytes.Clone(h)
	h.SetTotalAHSLength(len(ahs))
	h.SetDataSegmentLength(len(data))
	b := append(h, ahs...)
	if c.header {
		d := digest(b)
		if c.badHeader {
			d[0] ^= 1
		}
		b = append(b, d...)
	}
	n := len(b)
	b = append(b, data...)
	b = append(b, make([]byte, pdu.Padded(len(data))-len(data))...)
	if c.data && len(data) > 0 {
		d := digest(b[n:])
		if c.badData {
			d[0] ^= 1
		}
		b = append(b, d...)
	}
	c.badHeader, c.badData = false, false
	return b
}

func (c *client) send(h pdu.BHS, data []byte) { c.tb.Helper(); c.write(c.encode(h, nil, data)) }

func (c *client) write(b []byte) {
	c.tb.Helper()
	for n := c.chunk; n > 0 && len(b) > n; b = b[n:] {
		if _, err := c.nc.Write(b[:n]); err != nil {
			c.tb.Fatal(err)
		}
	}
	if _, err := c.nc.Write(b); err != nil {
		c.tb.Fatal(err)
	}
}

// next reads a PDU. It returns an error at the end of the stream.
func (c *client) next() (reply, error) {
	c.nc.SetReadDeadline(time.Now().Add(testkit.Patience))
	b := make([]byte, pdu.BHSLen)
	if _, err := io.ReadFull(c.nc, b); err != nil {
		return reply{}, err
	}
	h := pdu.BHS(b)
	if h.TotalAHSLength() != 0 {
		c.tb.Fatalf("%v with AHS", h.Opcode())
	}
	if c.header {
		c.wantDigest(h.Opcode(), b)
	}
	data := make([]byte, pdu.Padded(h.DataSegmentLength()))
	if _, err := io.ReadFull(c.nc, data); err != nil {
		return reply{}, err
	}
	if c.data && len(data) > 0 {
		c.wantDigest(h.Opcode(), data)
	}
	for _, pad := range data[h.DataSegmentLength():] {
		if pad != 0 { // ISCSI-11-1
			c.tb.Fatalf("%v with padding of %#x", h.Opcode(), pad)
		}
	}
	return reply{h, data[:h.DataSegmentLength()]}, nil
}

// wantDigest reads the digest of b (ISCSI-11.2-6: it covers padding, and nothing else).
func (c *client) wantDigest(op pdu.Opcode, b []byte) {
	var d [4]byte
	if _, err := io.ReadFull(c.nc, d[:]); err != nil {
		c.tb.Fatal(err)
	}
	if !bytes.Equal(d[:], digest(b)) {
		c.tb.Fatalf("ISCSI-13.1-1: %v: digest %x, want %x", op, d, digest(b))
	}
}

// any returns the next PDU after it has checked what holds for all.
func (c *client) any() reply {
	c.tb.Helper()
	p, err := c.next()
	if err != nil {
		c.tb.Fatalf("no PDU: %v", err)
	}
	h, op := p.h, p.h.Opcode()
	if len(p.data) > c.limit { // ISCSI-11.7-1
		c.tb.Fatalf("%v with %d bytes of data, declared were %d", op, len(p.data), c.limit)
	}
	if op == pdu.LoginResp && h[36] != 0 {
		return p
	}
	if op != pdu.DataIn || h.Flags()&pdu.FlagS != 0 {
		// ISCSI-4.2.2.2-1, ISCSI-11.8-5: an R2T has the next StatSN and does not
		// advance it.
		if c.statSeen && h.StatSN() != c.statSN {
			c.tb.Fatalf("%v with StatSN %d instead of %d", op, h.StatSN(), c.statSN)
		}
		c.statSN, c.statSeen = h.StatSN(), true
		if op != pdu.R2T && (op != pdu.NOPIn || h.ITT() != pdu.ReservedTag) {
			c.statSN++
		}
	}
	if !c.acksLate {
		c.ExpStatSN = c.statSN
	}
	// ISCSI-4.2.2.1-5, and neither decreases.
	if op == pdu.LoginResp {
		c.expCmdSN, c.maxCmdSN = h.ExpCmdSN(), h.MaxCmdSN()
	}
	if pdu.Before(h.MaxCmdSN(), h.ExpCmdSN()-1) || h.ExpCmdSN()-c.expCmdSN > 1<<16 || h.MaxCmdSN()-c.maxCmdSN > 1<<16 {
		c.tb.Fatalf("%v with ExpCmdSN %d, MaxCmdSN %d after %d and %d", op, h.ExpCmdSN(), h.MaxCmdSN(), c.expCmdSN,
			c.maxCmdSN)
	}
	c.expCmdSN, c.maxCmdSN = h.ExpCmdSN(), h.MaxCmdSN()
	return p
}

// want returns the next PDU, which must be an op.
func (c *client) want(op pdu.Opcode) reply {
	c.tb.Helper()
	p := c.any()
	if p.h.Opcode() != op {
		c.tb.Fatalf("%v instead of %v: %x %x", p.h.Opcode(), op, []byte(p.h), p.data[:min(len(p.data), 64)])
	}
	return p
}

func (c *client) wantReject(reason pdu.RejectReason, of pdu.BHS) {
	c.tb.Helper()
	c.isReject(c.any(), reason, of)
}

// isReject checks a Reject (ISCSI-11.17-1, ISCSI-11.17-2).
func (c *client) isReject(p reply, reason pdu.RejectReason, of pdu.BHS) {
	c.tb.Helper()
	if p.h.Opcode() != pdu.Reject {
		c.tb.Fatalf("%v instead of a Reject: %x", p.h.Opcode(), []byte(p.h))
	}
	if p.h.Reason() != reason || p.h.ITT() != pdu.ReservedTag || len(p.data) < 48 ||
		!bytes.Equal(p.data[8:48], of[8:48]) {
		c.tb.Fatalf("Reject with reason %#x, want %#x, of %x", p.h.Reason(), reason, p.data)
	}
}

// wantRejectAndResponse receives a Reject of a Data-Out with F, and the SCSI Response of its command, in
// either order.
func (c *client) wantRejectAndResponse(reason pdu.RejectReason, of pdu.BHS) reply {
	c.tb.Helper()
	p := c.any()
	if p.h.Opcode() == pdu.SCSIResponse {
		c.wantReject(reason, of)
		return p
	}
	c.isReject(p, reason, of)
	return c.want(pdu.SCSIResponse)
}

// wantClosed checks that the stream ends without another PDU.
func (c *client) wantClosed() {
	c.tb.Helper()
	p, err := c.next()
	if err == nil {
		c.tb.Fatalf("%v instead of the end of the stream", p.h.Opcode())
	}
	var ne net.Error
	if errors.As(err, &ne) && ne.Timeout() {
		c.tb.Fatal("the connection is not closed")
	}
}

func (c *client) wantSense(p reply, key, asc, ascq byte) {
	c.tb.Helper()
	if p.h.Status() != 2 || len(p.data) < 16 || p.data[4]&15 != key || p.data[14] != asc || p.data[15] != ascq {
		c.tb.Fatalf("status %#x, sense % x, want %x %02x/%02x", p.h.Status(), p.data, key, asc, ascq)
	}
}

// wantAborted takes TASK ABORTED for h, of whose data so many bytes have not moved.
func (c *client) wantAborted(h pdu.BHS, rest uint32) reply {
	c.tb.Helper()
	p := c.want(pdu.SCSIResponse)
	if p.h.ITT() != h.ITT() || p.h.Status() != lun.StatusTaskAborted || p.h.Response() != pdu.CommandCompleted ||
		p.h.Flags() != pdu.FlagF|pdu.FlagUnderflow || p.h.Residual() != rest || len(p.data) != 0 {
		c.tb.Fatalf("SCSI Response %x, want TASK ABORTED of task %#x with residual %d", []byte(p.h), h.ITT(), rest)
	}
	return p
}

// scsi returns the header of a SCSI Command with a new tag and CmdSN.
func (c *client) scsi(flags byte, block [16]byte, edtl int) pdu.BHS {
	h := c.Request(pdu.SCSICommand, pdu.FlagF|flags|pdu.AttrSimple, false)
	h.SetEDTL(uint32(edtl))
	h.SetCDB(block[:])
	return h
}

// text sends a Text Request.
func (c *client) text(pairs string) pdu.BHS {
	c.tb.Helper()
	h := c.Request(pdu.TextReq, pdu.FlagF, false)
	h.SetTTT(pdu.ReservedTag)
	c.send(h, []byte(pairs))
	return h
}

// nopOut returns an immediate NOP-Out that asks for an answer.
func (c *client) nopOut() pdu.BHS {
	h := c.Request(pdu.NOPOut, pdu.FlagF, true)
	h.SetTTT(pdu.ReservedTag)
	return h
}

// command runs a command without data and returns the SCSI Response.
func (c *client) command(flags byte, block [16]byte, edtl int) reply {
	c.tb.Helper()
	c.send(c.scsi(flags, block, edtl), nil)
	return c.want(pdu.SCSIResponse)
}

// dataOut returns a Data-Out PDU for an R2T, or an unsolicited one if that is nil.
func dataOut(itt uint32, r2t pdu.BHS, sn, off uint32, final bool) pdu.BHS {
	h := make(pdu.BHS, pdu.BHSLen)
	h.Reset(pdu.DataOut, 0)
	if final {
		h.SetFlags(pdu.FlagF)
	}
	h.SetITT(itt)
	h.SetTTT(pdu.ReservedTag)
	if r2t != nil {
		h.SetTTT(r2t.TTT())
		h.SetLUN(r2t.LUN())
	}
	h.SetDataSN(sn)
	h.SetBufferOffset(off)
	return h
}

// readData collects the Data-In PDUs of one command, with burst as MaxBurstLength, up to the PDU with its
// status.
func (c *client) readData(h pdu.BHS, burst int) (data []byte, pdus int, status pdu.BHS) {
	c.tb.Helper()
	sequence := 0
	for {
		p := c.any()
		op := p.h.Opcode()
		if op != pdu.DataIn && op != pdu.SCSIResponse || p.h.ITT() != h.ITT() {
			c.tb.Fatalf("%v with tag %#x", op, p.h.ITT())
		}
		if op == pdu.SCSIResponse {
			return data, pdus, p.h
		}
		// ISCSI-4.2.2.4-1
		if p.h.DataSN() != uint32(pdus) || p.h.BufferOffset() != uint32(len(data)) {
			c.tb.Fatalf("DataSN %d, offset %d; want %d and %d", p.h.DataSN(), p.h.BufferOffset(), pdus, len(data))
		}
		flags := p.h.Flags()
		// ISCSI-11.7-2
		if flags&pdu.FlagS != 0 && (flags&pdu.FlagF == 0 || p.h.Status() != 0) || flags&pdu.FlagA != 0 ||
			p.h.TTT() != pdu.ReservedTag {
			c.tb.Fatalf("Data-In with flags %#x, status %d, TTT %#x", flags, p.h.Status(), p.h.TTT())
		}
		pdus++
		data = append(data, p.data...)
		if len(p.data)%4 != 0 && flags&pdu.FlagF == 0 { // RFC 7143, section 11.7.7
			c.tb.Fatalf("Data-In of %d bytes within a sequence", len(p.data))
		}
		if sequence += len(p.data); sequence > burst { // ISCSI-11.7-1
			c.tb.Fatalf("sequence of %d bytes, MaxBurstLength is %d", sequence, burst)
		}
		if flags&pdu.FlagF != 0 {
			sequence = 0
		}
		if flags&pdu.FlagS != 0 {
			return data, pdus, p.h
		}
	}
}

// read runs a READ that must succeed.
func (c *client) read(lba, blocks, burst int) []byte {
	c.tb.Helper()
	h := c.scsi(pdu.FlagR, cdb.Read16(uint64(lba), uint32(blocks)), blocks*blockLen)
	c.send(h, nil)
	data, _, status := c.readData(h, burst)
	if status.Status() != 0 || len(data) != blocks*blockLen {
		c.tb.Fatalf("status %#x after %d bytes", status.Status(), len(data))
	}
	return data
}

// writeData sends a WRITE with immediate bytes of data and answers its R2Ts with
// PDUs of at most segment bytes, up to the SCSI Response.
func (c *client) writeData(lba int, data []byte, immediate, segment, burst int) (rsp reply, r2ts int) {
	c.tb.Helper()
	h := c.scsi(pdu.FlagW, cdb.Write16(uint64(lba), uint32(len(data)/blockLen)), len(data))
	c.send(h, data[:immediate])
	off := immediate
	for {
		p := c.any()
		if p.h.Opcode() != pdu.R2T {
			return p, r2ts
		}
		n := int(p.h.DesiredDataTransferLength())
		// ISCSI-4.2.2.4-1, ISCSI-11.8-2, ISCSI-11.8-4, ISCSI-11.8-5
		if p.h.R2TSN() != uint32(r2ts) || int(p.h.BufferOffset()) != off || n == 0 || n > burst ||
			off+n > len(data) || p.h.TTT() == pdu.ReservedTag {
			c.tb.Fatalf("R2T %x, want R2TSN %d and offset %d", []byte(p.h), r2ts, off)
		}
		if len(p.data) != 0 { // ISCSI-11.6-3
			c.tb.Fatal("R2T with data")
		}
		r2ts++
		c.answer(h, p.h, data, segment)
		off += n
	}
}

// answer sends the data that an R2T asks for.
func (c *client) answer(cmd, r2t pdu.BHS, data []byte, segment int) {
	c.tb.Helper()
	off, end := int(r2t.BufferOffset()), int(r2t.BufferOffset()+r2t.DesiredDataTransferLength())
	var b []byte
	for sn := uint32(0); off < end; sn++ {
		n := min(segment, end-off)
		b = append(b, c.encode(dataOut(cmd.ITT(), r2t, sn, uint32(off), off+n == end), nil, data[off:off+n])...)
		off += n
	}
	c.write(b)
}

// writeAll runs a WRITE that must succeed.
func (c *client) writeAll(lba int, data []byte, immediate, segment, burst int) (r2ts int) {
	c.tb.Helper()
	rsp, r2ts := c.writeData(lba, data, immediate, segment, burst)
	if rsp.h.Opcode() != pdu.SCSIResponse || rsp.h.Status() != 0 ||
		rsp.h.Flags()&(pdu.FlagOverflow|pdu.FlagUnderflow) != 0 || rsp.h.ExpDataSN() != 0 {
		c.tb.Fatalf("response %x %x", []byte(rsp.h), rsp.data)
	}
	return r2ts
}

// stored returns size bytes of the LUN from block lba.
func (tg *target) stored(lba, size int) []byte {
	tg.tb.Helper()
	b := make([]byte, size)
	if err := tg.store.Store.ReadAt(b, int64(lba)*blockLen); err != nil {
		tg.tb.Fatal(err)
	}
	return b
}
