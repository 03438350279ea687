package tests

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
	"github.com/iser-target/iser-target/tests/testkit/header"
)

// streamPDU returns a PDU as it is on the byte stream.
func streamPDU(bhs pdu.BHS, data []byte) []byte {
	bhs.SetDataSegmentLength(len(data))
	return slices.Concat(bhs, data, make([]byte, pdu.Padded(len(data))-len(data)))
}

// wantStream takes a bare PDU from the byte stream: no iSER header, no digest.
func (p *raw) wantStream(op pdu.Opcode) (bhs pdu.BHS, data []byte) {
	p.t.Helper()
	bhs = p.read(pdu.BHSLen)
	if bhs.Opcode() != op || bhs.TotalAHSLength() != 0 {
		p.t.Fatalf("% x where %v is due", []byte(bhs), op)
	}
	n := bhs.DataSegmentLength()
	return bhs, p.read(pdu.Padded(n))[:n]
}

// streamLogin logs in on the byte stream in one exchange and returns the target's
// text. RDMA mode, if that was agreed on, has not begun.
func (p *raw) streamLogin() string {
	p.t.Helper()
	p.write(streamPDU(p.o.LoginRequest()))
	return p.streamLoggedIn()
}

// streamLoggedIn takes the final Login Response from the byte stream.
func (p *raw) streamLoggedIn() string {
	p.t.Helper()
	bhs, data := p.wantStream(pdu.LoginResp)
	rsp := pdu.ParseLoginResponse(bhs)
	if rsp.Status != 0 || !rsp.Transit || rsp.NSG != pdu.FullFeaturePhase {
		p.t.Fatalf("%+v", rsp)
	}
	p.CmdSN, p.maxCmdSN, p.ExpStatSN, p.full = rsp.ExpCmdSN, rsp.MaxCmdSN, rsp.StatSN+1, true
	return string(data)
}

// stepUp logs in on the byte stream and enters RDMA mode.
func (tg *target) stepUp(t testing.TB, o initiator.Options) *raw {
	t.Helper()
	o.Target = targetName
	p := tg.dialStream(t, o)
	if text := p.streamLogin(); !strings.Contains(text, "RDMAExtensions=Yes\x00") {
		t.Fatalf("ISER-5.1-3: %q", text)
	}
	p.startMPA()
	return p
}

// wantSilence sees nothing of the target for a while.
func (p *raw) wantSilence(when string) {
	p.t.Helper()
	p.nc.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	var b [1]byte
	if n, err := p.nc.Read(b[:]); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		p.t.Fatalf("%s: % x, %v", when, b[:n], err)
	}
	p.nc.SetReadDeadline(time.Now().Add(testkit.Patience))
}

// The whole of it as bytes (RFC 7145, sections 5.1 and 9; RFC 5044, section 7.1.3).
func TestStepUpOctets(t *testing.T) {
	tg := startTarget(t, targetOptions{stream: loginFirst})
	want := random(1024)
	if err := tg.store.Store.WriteAt(want, 0); err != nil {
		t.Fatal(err)
	}
	p := tg.dialStream(t, initiator.Options{Target: targetName})
	text := "InitiatorName=iqn.2026-11.io.github.iser-target:initiator\x00TargetName=" + targetName + "\x00" +
		"HeaderDigest=CRC32C,None\x00DataDigest=CRC32C\x00RDMAExtensions=Yes\x00iSERHelloRequired=Yes\x00"
	login := unhex(`
		43 87 0000 00                // Login Request, I; T, CSG 1, NSG 3; version 0; no AHS
		000000 00023d000001 0000     // DataSegmentLength; ISID, TSIH 0
		00000001 0000 0000           // ITT 1, CID 0
		00000012 00000000            // CmdSN, ExpStatSN
		00000000000000000000000000000000`)
	binary.BigEndian.PutUint16(login[6:], uint16(len(text)))
	p.write(append(login, text+strings.Repeat("\x00", pdu.Padded(len(text))-len(text))...))

	// ISER-5.1.2-8, ISER-7.3.9-1: a bare PDU on the stream. The digests are None, or
	// nothing, although CRC32C comes first (ISER-5.1-10, ISER-6.1-1); DataDigest=CRC32C
	// leaves no choice but Reject, after which the default is in force: None.
	answer := "RDMAExtensions=Yes\x00HeaderDigest=None\x00DataDigest=Reject\x00TargetPortalGroupTag=1\x00"
	rsp := unhex(`
		23 87 00 00 00               // Login Response; T, CSG 1, NSG 3; version 0; no AHS
		000000 00023d000001 0001     // DataSegmentLength; ISID, TSIH
		00000001 00000000            // ITT 1
		00000000 00000012 00000091   // StatSN, ExpCmdSN, MaxCmdSN
		0000 0000 0000000000000000   // success`)
	binary.BigEndian.PutUint16(rsp[6:], uint16(len(answer)))
	rsp = append(rsp, answer+strings.Repeat("\x00", pdu.Padded(len(answer))-len(answer))...)
	if got := p.read(len(rsp)); !bytes.Equal(got, rsp) {
		t.Fatalf("ISER-5.1.2-8 ISER-7.3.9-1:\n% x, want\n% x", got, rsp)
	}
	// The target is the MPA Responder: until the Request comes it says nothing.
	p.wantSilence("before the MPA Request")
	p.write(unhex(`
		4d504120494420526571204672616d65 // MPA ID Req Frame
		50 02 0008                       // CRC, S; revision 2; PD_Length
		0080 0001 80000000               // IRD 128, ORD 1; private data`))
	if got, reply := p.read(28), unhex(`
		4d504120494420526570204672616d65 // MPA ID Rep Frame
		50 02 0008
		0001 0020 80000000               // IRD 1, ORD 32`); !bytes.Equal(got, reply) {
		t.Fatalf("% x, want\n% x", got, reply)
	}
	p.wantSilence("before the first FPDU") // MPA-7.1.2-9
	p.write(unhex(`
		002e 4145 00000000 00000000 00000001 00000000            // V-ISER-5: FPDU, Send with SE, MSN 1
		20aa0080 000000000000000000000000000000000000000000000000 // Hello, iSER-IRD 128
		303c011f`))
	if m, reply := p.next(), unhex(`
		002e 4143 00000000 00000000 00000001 00000000
		30aa0020 000000000000000000000000000000000000000000000000 // V-ISER-6: HelloReply, iSER-ORD 32`); !bytes.Equal(m.fpdu, reply) {
		t.Fatalf("ISER-5.1.2-9 ISER-5.1.3-3: % x, want\n% x", m.fpdu, reply)
	}
	p.sendMSN, p.ExpStatSN, p.CmdSN, p.full = 2, 1, 0x12, true
	h := p.scsi(0, 0, cdb.TestUnitReady)
	p.send(iser.Header{}, h, nil)
	p.wantStatus(h, 0x02) // unit attention
	p.ping()
	read := unhex(`
		005e 4143 00000000 00000000 00000004 00000000         // V-ISER-7 with another MSN and CmdSN
		14000000 00000000 0000000000000000 0004d101 ffff888012345000
		01c00000 00000000 0000000000000000 14000000 00000400 00000013 00000003
		28000000 00000000 02000000 00000000`)
	p.write(binary.LittleEndian.AppendUint32(read, wire.UpdateCRC(0, read)))
	p.sendMSN++
	m := p.next()
	if head := unhex("040e c140 0004d101 ffff888012345000"); !bytes.Equal(m.fpdu[:len(head)], head) ||
		!bytes.Equal(m.payload, want) {
		t.Fatalf("V-ISER-8: % x ...", m.fpdu[:len(head)])
	}
	m = p.next()
	if rsp := unhex(`
		005e 4144 0004d101 00000000 00000004 00000000         // V-ISER-9: Send with Invalidate
		10000000 00000000 0000000000000000 00000000 0000000000000000
		21800000 00000000 0000000000000000 14000000 00000000 00000003 00000014 00000093
		00000001 00000000 00000000`); !bytes.Equal(m.fpdu, rsp) {
		t.Fatalf("V-ISER-9:\n% x, want\n% x", m.fpdu, rsp)
	}
	p.CmdSN++
	p.logout()
	tg.log.wantLine("login", "transport=iser", "outcome=accepted", "session=normal")
	tg.log.wantLine(`"session ended"`, "transport=iser", "reason=logout")
	tg.waitIdle(t)
}

// What is written is read back after a login on the byte stream, with and without
// Hello, immediate data and Send with Invalidate, and with both meanings of the
// Write Base Offset.
func TestStepUpReadAndWrite(t *testing.T) {
	for _, tt := range []struct {
		name string
		o    initiator.Options
	}{
		{"ISER-4.1-9 ISER-5.1-1", initiator.Options{}},
		{"ISER-5.1.3-4 ISER-6.10-2 Hello", initiator.Options{Hello: true}},
		{"ISER-5.1.3-5 Hello, IRD 4", initiator.Options{Hello: true, RDMA: rdma.Options{IRD: 4}}},
		{"ISER-1.5.2-3 no invalidation", initiator.Options{NoInvalidate: true}},
		{"ISER-7.3.1-7 TaggedBufferForSolicitedDataOnly=Yes",
			initiator.Options{Keys: []string{"TaggedBufferForSolicitedDataOnly=Yes"}}},
		{"ISER-7.3.1-7 TaggedBufferForSolicitedDataOnly=No",
			initiator.Options{Keys: []string{"TaggedBufferForSolicitedDataOnly=No"}}},
		{"ISER-8.3.1-1 unsolicited data in many sizes", initiator.Options{RDMA: rdma.Options{MaxULPDU: 1442}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tg := startTarget(t, targetOptions{stream: loginFirst})
			tt.o.Stream = true
			s := tg.login(t, tt.o)
			tg.log.wantLine("login", "transport=iser", "outcome=accepted", fmt.Sprint("tsih=", s.TSIH))
			if want := uint16(s.Stream().IRD()); tt.o.Hello && s.ORD != min(want, 32) {
				t.Errorf("iSER-ORD %d", s.ORD)
			}
			for _, blocks := range []uint32{1, 17, 1024, 8192} {
				for _, immediate := range []int{0, 512, 8192} {
					want := random(int(blocks) * 512)
					w := &initiator.Command{CDB: cdb.Write16(uint64(blocks), blocks), Out: want,
						Immediate: min(immediate, len(want))}
					do(t, s, w)
					r := &initiator.Command{CDB: cdb.Read16(uint64(blocks), blocks), In: make([]byte, len(want))}
					do(t, s, r)
					if !bytes.Equal(r.In, want) {
						t.Fatalf("%d blocks, %d bytes immediate: what is read is not what was written", blocks,
							immediate)
					}
					if r.Invalidated == tt.o.NoInvalidate ||
						w.Invalidated == (tt.o.NoInvalidate || w.Immediate == len(want)) {
						t.Fatalf("ISER-7.3.2-3 ISER-7.3.2-4 ISER-7.3.2-5: invalidated: read %t, write %t",
							r.Invalidated, w.Invalidated)
					}
				}
			}
			if err := s.Logout(testContext(t)); err != nil {
				t.Fatal(err)
			}
			tg.log.wantLine(`"session ended"`, "transport=iser", "reason=logout")
			tg.waitIdle(t)
		})
	}
}

// ISER-3.1.8-1, ISER-7.3.1-7: where an RDMA Read begins after 512 bytes of immediate data.
func TestWriteBaseOffset(t *testing.T) {
	for _, tt := range []struct {
		id     string
		stream stream
		key    []string
		skip   uint64 // of the advertised buffer
	}{
		{"ISER-6.9-2 on the byte stream", loginFirst, nil, 512},
		{"ISER-6.9-2 on the byte stream", loginFirst, []string{"TaggedBufferForSolicitedDataOnly=No"}, 512},
		{"ISER-6.9-2 on the byte stream", loginFirst, []string{"TaggedBufferForSolicitedDataOnly=Yes"}, 0},
		{"L1 as Linux", rdmaFirst, nil, 0},
		{"ISER-6.9-2 in RDMA mode", rdmaFirst, []string{"TaggedBufferForSolicitedDataOnly=No"}, 512},
		{"ISER-6.9-2 in RDMA mode", rdmaFirst, []string{"TaggedBufferForSolicitedDataOnly=Yes"}, 0},
	} {
		t.Run(fmt.Sprint(tt.id, tt.key), func(t *testing.T) {
			tg := startTarget(t, targetOptions{stream: tt.stream})
			o := initiator.Options{Keys: tt.key}
			var p *raw
			if tt.stream == loginFirst {
				p = tg.stepUp(t, o)
			} else {
				p = tg.rawLogin(t, o)
			}
			h := p.scsi(0, 0, cdb.TestUnitReady)
			p.send(iser.Header{}, h, nil)
			p.wantStatus(h, 0x02) // unit attention
			data := random(2048)
			block := cdb.Write16(0, 4)
			write := func(base uint64) pdu.BHS {
				h := p.scsi(pdu.FlagW, 2048, block)
				p.send(source(6, base), h, data[:512])
				return h
			}
			// The buffer that is advertised may end at 2^64, but not beyond.
			for _, base := range []uint64{p.o.BaseOffset, -(1536 + tt.skip)} {
				h = write(base)
				r := p.wantRead()
				if r.Size != 1536 || r.SrcSTag != 6 || r.SrcTO != base+tt.skip {
					t.Errorf("%+v", r)
				}
				p.answer(r, data[512:])
				p.wantStatus(h, 0)
				if !bytes.Equal(tg.stored(t, 0, 2048), data) {
					t.Error("other bytes are stored")
				}
			}
			h = write(-(1536 + tt.skip) + 1)
			p.wantSense(h, 0x05, 0x0e, 0x03) // INVALID FIELD IN COMMAND INFORMATION UNIT
			p.logout()
		})
	}
}

// plainIO runs a ping, a WRITE with R2T and a READ with Data-In on the byte stream.
func (p *raw) plainIO() {
	p.t.Helper()
	h := p.Request(pdu.NOPOut, pdu.FlagF, true)
	h.SetTTT(pdu.ReservedTag)
	p.write(streamPDU(h, []byte("ping")))
	if _, data := p.wantStream(pdu.NOPIn); string(data) != "ping" {
		p.t.Fatalf("%q", data)
	}
	h = p.scsi(0, 0, cdb.TestUnitReady)
	p.write(streamPDU(h, nil))
	p.wantStream(pdu.SCSIResponse) // unit attention
	want := random(1024)
	block := cdb.Write16(0, 2)
	h = p.scsi(pdu.FlagW, 1024, block)
	p.write(streamPDU(h, want[:512]))
	r2t, _ := p.wantStream(pdu.R2T)
	out := p.Request(pdu.DataOut, pdu.FlagF, true)
	out[0] = byte(pdu.DataOut)
	out.SetITT(h.ITT())
	out.SetTTT(r2t.TTT())
	out.SetBufferOffset(512)
	p.write(streamPDU(out, want[512:]))
	if rsp, _ := p.wantStream(pdu.SCSIResponse); rsp.Status() != 0 {
		p.t.Fatalf("WRITE: status %#x", rsp.Status())
	}
	block = cdb.Read16(0, 2)
	h = p.scsi(pdu.FlagR, 1024, block)
	p.write(streamPDU(h, nil))
	in, data := p.wantStream(pdu.DataIn)
	if !bytes.Equal(data, want) || in.ITT() != h.ITT() {
		p.t.Fatalf("READ: % x", []byte(in))
	}
	if in.Flags()&pdu.FlagS == 0 { // the data was on its way when the status came
		in, _ = p.wantStream(pdu.SCSIResponse)
	}
	if in.Status() != 0 {
		p.t.Fatalf("READ: status %#x", in.Status())
	}
}

// stepUpNegotiations lists what initiators offer over TCP, and the answers.
var stepUpNegotiations = []struct {
	id      string
	stream  stream
	rounds  [][]string // of the operational stage
	answers []string   // to each
	iser    bool
}{
	{"ISER-3.3-1 ISER-5.1-3", loginFirst, [][]string{{"RDMAExtensions=Yes"}}, []string{"RDMAExtensions=Yes"}, true},
	{"ISER-3.3-2 ISER-5.1-4 absent", loginFirst, [][]string{nil}, []string{"MaxRecvDataSegmentLength=262144"}, false},
	{"ISER-3.3-2 ISER-6.3-2 No", loginFirst, [][]string{{"RDMAExtensions=No"}},
		[]string{"RDMAExtensions=No MaxRecvDataSegmentLength=262144"}, false},
	{"ISER-6.3-2 ISER-5.1-4 iSER is not possible here", noRDMA, [][]string{{"RDMAExtensions=Yes"}},
		[]string{"RDMAExtensions=No MaxRecvDataSegmentLength=262144"}, false},
	{"ISER-3.3-7 keys of iSER without it", loginFirst,
		[][]string{{"InitiatorRecvDataSegmentLength=262144", "TargetRecvDataSegmentLength=8192", "MaxAHSLength=512",
			"iSERHelloRequired=Yes", "TaggedBufferForSolicitedDataOnly=Yes", "MaxOutstandingUnexpectedPDUs=2"}},
		[]string{"InitiatorRecvDataSegmentLength=8192 TargetRecvDataSegmentLength=8192 MaxRecvDataSegmentLength=262144"}, false},
	{"ISER-6.2-1 ISER-6.6-1 what is irrelevant", loginFirst,
		[][]string{{"MaxRecvDataSegmentLength=512", "OFMarker=Yes", "IFMarker=No", "HeaderDigest=CRC32C,None",
			"DataDigest=None", "RDMAExtensions=Yes"}},
		[]string{"RDMAExtensions=Yes OFMarker=Reject IFMarker=Reject HeaderDigest=None DataDigest=None"}, true},
	{"ISER-6.3-3 in a later request", loginFirst, [][]string{{"InitialR2T=Yes"}, {"RDMAExtensions=Yes"}},
		[]string{"InitialR2T=Yes MaxRecvDataSegmentLength=262144", "RDMAExtensions=Yes"}, true},
	{"ISER-5.1-10 ISER-6.3-3 a digest is there already", loginFirst,
		[][]string{{"HeaderDigest=CRC32C"}, {"RDMAExtensions=Yes"}},
		[]string{"HeaderDigest=CRC32C MaxRecvDataSegmentLength=262144", "RDMAExtensions=No"}, false},
	{"ISER-5.1-10 a digest comes later", loginFirst,
		[][]string{{"RDMAExtensions=Yes"}, {"HeaderDigest=CRC32C,None", "DataDigest=CRC32C"}},
		[]string{"RDMAExtensions=Yes", "HeaderDigest=None DataDigest=Reject"}, true},
}

// What becomes of RDMAExtensions on the byte stream: iSER or plain iSCSI.
func TestStepUpNegotiation(t *testing.T) {
	for _, tt := range stepUpNegotiations {
		t.Run(tt.id, func(t *testing.T) {
			tg := startTarget(t, targetOptions{stream: tt.stream,
				node: iscsi.Options{Limits: keys.Limits{Digests: true}}})
			p := tg.dialStream(t, initiator.Options{Target: targetName})
			for i, offers := range tt.rounds {
				last := i == len(tt.rounds)-1
				if i == 0 {
					offers = append([]string{"InitiatorName=" + p.o.Name, "TargetName=" + targetName}, offers...)
				}
				req := pdu.LoginRequest{CSG: pdu.LoginOperationalNegotiation, ISID: p.o.ISID, CmdSN: p.o.CmdSN}
				if last {
					req.Transit, req.NSG = true, pdu.FullFeaturePhase
				}
				p.write(streamPDU(req.Append(nil), []byte(strings.Join(offers, "\x00")+"\x00")))
				var text string
				if last {
					text = p.streamLoggedIn()
				} else {
					_, data := p.wantStream(pdu.LoginResp)
					text = string(data)
				}
				want := strings.ReplaceAll(tt.answers[i], " ", "\x00") + "\x00"
				if i == 0 { // MaxRecvDataSegmentLength is declared, and comes last
					text = strings.Replace(text, "TargetPortalGroupTag=1\x00", "", 1)
				}
				if text != want {
					t.Errorf("round %d: %q, want %q", i, text, want)
				}
			}
			switch {
			case tt.iser:
				p.startMPA()
				h := p.scsi(0, 0, cdb.TestUnitReady)
				p.send(iser.Header{}, h, nil)
				p.wantStatus(h, 0x02)
				p.ping() // ISER-5.1-10: no digest behind the PDU
				p.logout()
				tg.log.wantLine("login", "transport=iser")
			case strings.Contains(tt.answers[0], "CRC32C"):
				h := p.Request(pdu.NOPOut, pdu.FlagF, true)
				h.SetTTT(pdu.ReservedTag)
				p.write(binary.LittleEndian.AppendUint32(streamPDU(h, nil), wire.UpdateCRC(0, h)))
				rsp, _ := p.wantStream(pdu.NOPIn)
				if crc := p.read(4); wire.UpdateCRC(0, rsp) != binary.LittleEndian.Uint32(crc) {
					t.Error("header digest is wrong")
				}
			default:
				p.plainIO()
				tg.log.wantLine("login", "transport=tcp")
			}
		})
	}
}

// ISER-5.1-5, ISER-5.1-6, ISER-6.3-1: RDMAExtensions is irrelevant in a discovery session.
func TestStepUpIsIrrelevantToDiscovery(t *testing.T) {
	tg := startTarget(t, targetOptions{stream: loginFirst})
	p := tg.dialStream(t, initiator.Options{Keys: []string{"RDMAExtensions=Yes"}})
	req, text := p.o.LoginRequest()
	first, rest, _ := strings.Cut(string(text), "SessionType=Discovery\x00")
	p.write(streamPDU(req, []byte(first+rest+"SessionType=Discovery\x00"))) // text has no order
	if got := p.streamLoggedIn(); !strings.Contains(got, "RDMAExtensions=Irrelevant\x00") {
		t.Errorf("%q", got)
	}
	h := p.Request(pdu.TextReq, pdu.FlagF, false)
	h.SetTTT(pdu.ReservedTag)
	p.write(streamPDU(h, []byte("SendTargets=All\x00")))
	if _, data := p.wantStream(pdu.TextResp); !strings.Contains(string(data), targetName) {
		t.Errorf("%q", data)
	}
}

// ISER-5.1-2: RDMAExtensions does not belong to the security stage.
func TestStepUpInTheSecurityStageIsRefused(t *testing.T) {
	tg := startTarget(t, targetOptions{stream: loginFirst})
	p := tg.dialStream(t, initiator.Options{})
	req := pdu.LoginRequest{CSG: pdu.SecurityNegotiation, ISID: p.o.ISID}
	p.write(streamPDU(req.Append(nil),
		[]byte("InitiatorName="+p.o.Name+"\x00TargetName="+targetName+"\x00AuthMethod=None\x00RDMAExtensions=Yes\x00")))
	if bhs, _ := p.wantStream(pdu.LoginResp); pdu.ParseLoginResponse(bhs).Status != pdu.LoginInitiatorError {
		t.Errorf("% x", []byte(bhs))
	}
	p.wantEOF()
}

// ISER-5.1.2-3: resources are allocated when login ends, not before.
func TestStepUpAfterTheSecurityStage(t *testing.T) {
	tg := startTarget(t, targetOptions{stream: loginFirst})
	settled := rdma.ReadStats()
	p := tg.dialStream(t, initiator.Options{})
	req := pdu.LoginRequest{Transit: true, CSG: pdu.SecurityNegotiation, NSG: pdu.LoginOperationalNegotiation,
		ISID: p.o.ISID, CmdSN: 1}
	p.write(streamPDU(req.Append(nil),
		[]byte("InitiatorName="+p.o.Name+"\x00TargetName="+targetName+"\x00AuthMethod=None\x00")))
	p.wantStream(pdu.LoginResp)
	req.CSG, req.NSG = pdu.LoginOperationalNegotiation, pdu.FullFeaturePhase
	p.write(streamPDU(req.Append(nil), []byte("RDMAExtensions=Yes\x00")))
	if text := p.streamLoggedIn(); text != "RDMAExtensions=Yes\x00" {
		t.Errorf("ISER-5.1-7: %q", text)
	}
	if now := rdma.ReadStats(); now != settled {
		t.Errorf("%+v, was %+v", now, settled)
	}
	p.startMPA()
	h := p.scsi(0, 0, cdb.TestUnitReady)
	p.send(iser.Header{}, h, nil)
	p.wantStatus(h, 0x02)
	p.logout()
}

// The MPA Request and what follows it come in pieces, in one piece with what is
// before them, and ahead of what they should wait for. Nothing of it is lost.
func TestStepUpIsAtomic(t *testing.T) {
	tg := startTarget(t, targetOptions{stream: loginFirst})
	start := func(t *testing.T) (p *raw, login, request, ping []byte) {
		p = tg.dialStream(t, initiator.Options{Target: targetName, CmdSN: 7})
		login, request = streamPDU(p.o.LoginRequest()), p.mpaRequest()
		p.CmdSN = 7
		h := p.Request(pdu.NOPOut, pdu.FlagF, true)
		h.SetTTT(pdu.ReservedTag)
		return p, login, request, p.message(pduBytes(iser.Header{}, h, nil))
	}
	finish := func(p *raw) {
		p.t.Helper()
		p.want(pdu.NOPIn)
		p.logout()
	}
	t.Run("ISER-5.1.2-11 ISER-3.1.6-2 the Request is cut at any octet", func(t *testing.T) {
		_, _, request, _ := start(t)
		for n := range len(request) {
			p, login, request, ping := start(t)
			p.write(slices.Concat(login, request[:n]))
			p.streamLoggedIn()
			p.write(request[n:])
			p.wantReply()
			p.write(ping)
			finish(p)
		}
	})
	t.Run("ISER-5.1.2-11 octet by octet", func(t *testing.T) {
		p, login, request, ping := start(t)
		p.nc.(*net.TCPConn).SetNoDelay(true)
		for _, b := range slices.Concat(login, request) {
			p.write([]byte{b})
		}
		p.streamLoggedIn()
		p.wantReply()
		p.write(ping)
		finish(p)
	})
	t.Run("ISER-5.1.2-11 FPDU before the MPA Reply", func(t *testing.T) {
		for _, ahead := range []bool{false, true} { // also of the final Login Response
			p, login, request, ping := start(t)
			if ahead {
				p.write(slices.Concat(login, request, ping))
				p.streamLoggedIn()
			} else {
				p.write(login)
				p.streamLoggedIn()
				p.write(slices.Concat(request, ping))
			}
			p.wantReply()
			finish(p)
		}
	})
	t.Run("ISER-5.1.2-11 many times", func(t *testing.T) {
		for range 200 {
			p, login, request, ping := start(t)
			p.write(login)
			p.streamLoggedIn()
			p.write(request)
			p.wantReply()
			p.write(ping)
			finish(p)
		}
	})
	tg.waitIdle(t)
}

// What does not belong where it comes ends the connection, with a reason in the
// log, and leaves nothing behind.
func TestStepUpWrongSequence(t *testing.T) {
	none := func(p *raw) {}
	terminate := func(p *raw) { p.wantTerminate(wire.ReasonLocalCatastrophic) }
	send := func(b []byte) func(*raw) { return func(p *raw) { p.write(b) } }
	message := func(b []byte) func(*raw) { return func(p *raw) { p.startMPA(); p.sendRaw(b) } }
	ping := func() []byte {
		p := &raw{o: initiator.Options{}.Complete(), Numbers: header.Numbers{CmdSN: 1}}
		h := p.Request(pdu.NOPOut, pdu.FlagF, true)
		h.SetTTT(pdu.ReservedTag)
		return pduBytes(iser.Header{}, h, nil)
	}()
	startup := func(f wire.Startup) []byte {
		b, err := f.Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	const key = "MPA ID Req Frame"
	for _, tt := range []struct {
		id   string
		keys []string
		do   func(p *raw) // after the final Login Response
		end  func(p *raw)
		line string // "login", or the end of the session
		log  []string
	}{
		// Until MPA has started the attempt counts as a login that failed.
		{"an FPDU instead of the MPA Request", nil, send(fpdu(untagged(wire.OpSend, 1, ping))), none, "login",
			[]string{"stage=mpa", "key"}},
		{"a PDU on the byte stream", nil, send(ping[iser.HeaderLen:]), none, "login", []string{"stage=mpa", "key"}},
		{"another Login Request", nil, func(p *raw) { p.write(streamPDU(p.o.LoginRequest())) }, none, "login",
			[]string{"stage=mpa", "key"}},
		{"MPA-7.1.2-20 the Reply", nil, send(startup(wire.Startup{Reply: true, Rev: 2, CRC: true, Enhanced: true})),
			none, "login", []string{"stage=mpa", "Reply"}},
		{"MPA revision 3", nil, send(append([]byte(key), 0x50, 3, 0, 4, 0, 1, 0, 1)), none, "login",
			[]string{"stage=mpa", "revision 3"}},
		{"too much private data", nil, send(append([]byte(key), 0x50, 2, 2, 1)), none, "login",
			[]string{"stage=mpa", "513"}},
		{"ISER-5.1.1-2 IRD 0", nil, send(startup(wire.Startup{Rev: 2, CRC: true, Enhanced: true})), func(p *raw) {
			if f, n, err := wire.ParseStartup(p.read(wire.StartupLen), true); err != nil || !f.Reject ||
				len(p.read(n)) != n {
				p.t.Errorf("Reply %+v, %v", f, err)
			}
		}, "login", []string{"stage=mpa", "accepts 0 RDMA Reads"}},
		{"ISER-10.1.1.1-2 closed before the MPA Request", nil, func(p *raw) { p.nc.(*net.TCPConn).CloseWrite() },
			none, "login", []string{"stage=mpa", "after 0 bytes of an MPA startup frame"}},
		{"ISER-10.1.1.1-2 closed within the MPA Request", nil,
			func(p *raw) { p.write([]byte(key)[:7]); p.nc.(*net.TCPConn).CloseWrite() }, none, "login",
			[]string{"stage=mpa", "after 7 bytes"}},
		{"ISER-10.1.1.1-2 reset", nil, func(p *raw) { p.write([]byte(key)[:7]); p.reset() }, nil, "login",
			[]string{"stage=mpa", "reset"}},
		// From then on it is a session.
		{"closed after the MPA Request", nil, func(p *raw) { p.startMPA(); p.nc.(*net.TCPConn).CloseWrite() }, none,
			`"session ended"`, []string{"initiator closed the connection"}},
		{"closed within the first FPDU", nil,
			func(p *raw) { p.startMPA(); p.write([]byte{0}); p.nc.(*net.TCPConn).CloseWrite() }, none,
			`"session ended"`, []string{"connection failed"}},
		{"ISER-5.1.3-1 ISER-10.1.3.4-1 no Hello", []string{"iSERHelloRequired=Yes"}, message(ping), terminate,
			`"session ended"`, []string{"no iSER Hello came"}},
		{"ISER-5.1.2-10 a Hello in spite of No", []string{"iSERHelloRequired=No"}, message(hello(10, 10, 4)),
			terminate, `"session ended"`, []string{"iSERHelloRequired=No"}},
		{"Hello is not the first message", nil,
			func(p *raw) { p.startMPA(); p.sendRaw(ping); p.want(pdu.NOPIn); p.sendRaw(hello(10, 10, 4)) }, terminate,
			`"session ended"`, []string{"not the first message"}},
		{"Hello twice", []string{"iSERHelloRequired=Yes"}, func(p *raw) {
			p.startMPA()
			p.sendRaw(hello(10, 10, 4))
			p.wantHelloReply("30aa0004")
			p.sendRaw(hello(10, 10, 4))
		}, terminate, `"session ended"`, []string{"not the first message"}},
		{"ISER-5.1.3-7 ISER-10.1.3.2-1 no common version", []string{"iSERHelloRequired=Yes"},
			func(p *raw) { p.startMPA(); p.sendRaw(hello(11, 11, 4)); p.wantHelloReply("31aa0004") }, terminate,
			`"session ended"`, []string{"versions 11..11"}},
		{"ISER-9.3-1 a long Hello", []string{"iSERHelloRequired=Yes"}, message(append(hello(10, 10, 4), 0)),
			terminate, `"session ended"`, []string{"Hello of 29 bytes"}},
		{"a HelloReply", nil, message(append([]byte{0x30, 0xaa}, make([]byte, 26)...)), terminate, `"session ended"`,
			[]string{"opcode 3"}},
	} {
		t.Run(tt.id, func(t *testing.T) {
			tg := startTarget(t, targetOptions{stream: loginFirst})
			p := tg.dialStream(t, initiator.Options{Target: targetName, Keys: tt.keys})
			p.streamLogin()
			p.ExpStatSN = 1
			tt.do(p)
			if tt.end != nil {
				tt.end(p)
				p.nc.SetDeadline(time.Now().Add(testkit.Patience))
				io.Copy(io.Discard, p.nc) // ends: the target closes
			}
			if tt.line == "login" {
				tg.log.wantLine("login", append(tt.log, "outcome=refused", "transport=tcp")...)
			} else {
				tg.log.wantLine("login", "outcome=accepted", "transport=iser")
				tg.log.wantLine(tt.line, append(tt.log, "transport=iser")...)
			}
			tg.waitIdle(t)
			if st, refused := tg.node.Stats(), uint64(strings.Count(tt.line, "login")); st.LoginsRefused != refused ||
				st.LoginsAccepted != 1-refused {
				t.Errorf("%+v", st)
			}
		})
	}
}

// ISER-5.1.3-9, ISER-10.1.3.4-2: a Hello is answered although iSERHelloRequired was not agreed.
func TestHelloWithoutAgreementIsAnswered(t *testing.T) {
	tg := startTarget(t, targetOptions{stream: loginFirst})
	p := tg.stepUp(t, initiator.Options{})
	p.sendRaw(hello(10, 10, 4))
	p.wantHelloReply("30aa0004")
	p.ping()
	p.logout()
}

// ISCSI-8.1.4-2: LoginTimeout is for all of it, MPA startup included, and is over when
// login is.
func TestStepUpTimeout(t *testing.T) {
	const timeout, pause = 1500 * time.Millisecond, 500 * time.Millisecond
	cases := []struct {
		sent  int
		octet string
	}{
		{0, "after 0 bytes"},
		{10, "after 10 bytes"},                     // half a frame
		{20, "after 0 of 8 bytes of private data"}, // none of it
	}
	soon := func() bool {
		tg := startTarget(t, targetOptions{stream: loginFirst, node: iscsi.Options{LoginTimeout: timeout}})
		stays := tg.stepUp(t, initiator.Options{ISID: [6]byte{9}})
		begin := time.Now()
		var conns []*raw
		for i := range cases {
			conns = append(conns, tg.dialStream(t, initiator.Options{Target: targetName, ISID: [6]byte{byte(i + 1)}}))
		}
		time.Sleep(pause) // which MPA startup does not get back
		for i, p := range conns {
			p.streamLogin()
			p.write(p.mpaRequest()[:cases[i].sent])
		}
		for i, p := range conns {
			p.wantEnd()
			if d := time.Since(begin); d < timeout {
				t.Errorf("%d bytes: ended after %v", cases[i].sent, d)
			}
		}
		took := time.Since(begin)
		for _, c := range cases {
			testkit.Eventually(t, "the end in the log", func() bool { return len(tg.log.Lines(c.octet)) == 1 })
			for _, part := range []string{"msg=login ", "stage=mpa ", "i/o timeout"} {
				if line := tg.log.Lines(c.octet)[0]; !strings.Contains(line, part) {
					t.Errorf("no %q in the line\n%s", part, line)
				}
			}
		}
		stays.ping()
		stays.logout()
		tg.waitIdle(t)
		return took < timeout+pause
	}
	for try := 1; !soon(); try++ {
		if try == 5 { // a machine that has much to do can be late, but not always
			t.Fatalf("MPA startup has had %v of its own", timeout)
		}
	}
}

// Another connection of a session uses iSER, without being asked, or none.
func TestStepUpOfAnotherConnection(t *testing.T) {
	tg := startTarget(t, targetOptions{stream: loginFirst,
		node: iscsi.Options{Limits: keys.Limits{MaxConnections: 2, Digests: true}}})
	lead := func(t *testing.T, key string) (p *raw, join func(offers ...string) (*raw, pdu.LoginResponse, string)) {
		p = tg.dialStream(t, initiator.Options{Target: targetName})
		req := pdu.LoginRequest{Transit: true, CSG: pdu.LoginOperationalNegotiation, NSG: pdu.FullFeaturePhase,
			ISID: p.o.ISID, CmdSN: 1}
		text := "InitiatorName=" + p.o.Name + "\x00TargetName=" + targetName + "\x00"
		p.write(streamPDU(req.Append(nil), []byte(text+key+"MaxConnections=2\x00")))
		bhs, _ := p.wantStream(pdu.LoginResp)
		rsp := pdu.ParseLoginResponse(bhs)
		p.CmdSN, p.ExpStatSN, p.full = 1, 1, true
		return p, func(offers ...string) (*raw, pdu.LoginResponse, string) {
			q := tg.dialStream(t, initiator.Options{})
			req.TSIH, req.CID = rsp.TSIH, 1
			q.write(streamPDU(req.Append(nil), []byte(text+strings.Join(offers, ""))))
			bhs, answers := q.wantStream(pdu.LoginResp)
			q.CmdSN, q.ExpStatSN, q.full = 1, 1, true
			return q, pdu.ParseLoginResponse(bhs), string(answers)
		}
	}
	t.Run("ISER-5.1-8 ISER-5.1-10 iSER", func(t *testing.T) {
		p, join := lead(t, "RDMAExtensions=Yes\x00")
		p.startMPA()
		h := p.scsi(0, 0, cdb.TestUnitReady)
		p.send(iser.Header{}, h, nil)
		p.wantStatus(h, 0x02) // unit attention
		q, rsp, answers := join("HeaderDigest=CRC32C,None\x00")
		if rsp.Status != 0 || answers != "HeaderDigest=None\x00TargetPortalGroupTag=1\x00" {
			t.Fatalf("%+v, %q", rsp, answers)
		}
		q.startMPA()
		q.CmdSN = p.CmdSN
		block := cdb.Write16(0, 1)
		data := random(512)
		h = q.scsi(pdu.FlagW, 512, block)
		q.send(source(9, q.o.BaseOffset), h, nil)
		q.answer(q.wantRead(), data)
		q.wantStatus(h, 0)
		p.CmdSN = q.CmdSN
		p.ping()
		if !bytes.Equal(tg.stored(t, 0, 512), data) {
			t.Error("other bytes are stored")
		}
		if got := tg.log.Lines("msg=login transport=iser"); len(got) != 2 {
			t.Errorf("%q", got)
		}
		p.logout()
		tg.waitIdle(t)
	})
	t.Run("ISER-5.1-9 plain", func(t *testing.T) {
		p, join := lead(t, "")
		q, rsp, _ := join("RDMAExtensions=Yes\x00")
		if rsp.Status != pdu.LoginInitiatorError {
			t.Errorf("%+v", rsp)
		}
		q.wantEOF()
		q.nc.Close()
		q, rsp, _ = join()
		if rsp.Status != 0 {
			t.Errorf("%+v", rsp)
		}
		p.nc.Close()
		q.nc.Close()
		tg.waitIdle(t)
	})
}

// The lengths that login on the byte stream has agreed on are in force in RDMA
// mode.
func TestStepUpLengths(t *testing.T) {
	tg := startTarget(t, targetOptions{stream: loginFirst})
	p := tg.dialStream(t, initiator.Options{Target: targetName})
	bhs, text := p.o.LoginRequest()
	text = bytes.Replace(text, []byte("TargetRecvDataSegmentLength=8192"),
		[]byte("TargetRecvDataSegmentLength=512\x00MaxRecvDataSegmentLength=16384"), 1)
	p.write(streamPDU(bhs, text))
	if text := p.streamLoggedIn(); !strings.Contains(text, "TargetRecvDataSegmentLength=512\x00") ||
		strings.Contains(text, "\x00MaxRecvDataSegmentLength") {
		t.Errorf("ISER-6.2-1: %q", text)
	}
	p.startMPA()
	for _, octets := range []int{512, 513} {
		h := p.Request(pdu.NOPOut, pdu.FlagF, true)
		h.SetTTT(pdu.ReservedTag)
		p.send(iser.Header{}, h, make([]byte, octets))
		if octets == 512 {
			p.want(pdu.NOPIn)
		} else {
			p.wantEnd() // ISER-6.2-2, ISER-6.4-2
		}
	}
	tg.log.wantLine(`"session ended"`, "data segment of 513 bytes, but the limit is 512")
}

// What does not succeed is refused on the byte stream.
func TestStepUpRefusals(t *testing.T) {
	for _, tt := range []struct {
		id     string
		o      initiator.Options
		limits keys.Limits
		status pdu.LoginStatus
		log    string
	}{
		{"ISER-10.1.4.6-2 no such target", initiator.Options{Target: "iqn.2026-11.io.example:nothing"}, keys.Limits{},
			pdu.LoginNotFound, "no such target"},
		{"ISER-5.1.2-1 ISER-5.1.2-7 ISER-3.3-3 ISER-10.1.3.1-2 ISER-10.1.3.1-3 ISER-10.1.3.1-4 no resources",
			initiator.Options{Target: targetName, Keys: []string{"MaxAHSLength=0"}},
			keys.Limits{TargetRecvDataSegmentLength: 16384}, pdu.LoginOutOfResources, "more than the limit of 8192"},
	} {
		t.Run(tt.id, func(t *testing.T) {
			tg := startTarget(t, targetOptions{stream: loginFirst, node: iscsi.Options{Limits: tt.limits}})
			p := tg.dialStream(t, tt.o)
			bhs, text := p.o.LoginRequest()
			p.write(streamPDU(bhs, bytes.Replace(text, []byte("TargetRecvDataSegmentLength=8192"),
				[]byte("TargetRecvDataSegmentLength=16384"), 1)))
			rsp, _ := p.wantStream(pdu.LoginResp)
			if got := pdu.ParseLoginResponse(rsp); got.Status != tt.status || got.Transit {
				t.Errorf("%+v", got)
			}
			p.wantEOF()
			p.nc.Close()
			tg.log.wantLine("login", "transport=tcp", "outcome=refused", "stage=operational", tt.log)
			tg.waitIdle(t)
		})
	}
}

// A connection that waits for the MPA Request can be ended by others.
func TestStepUpInterrupted(t *testing.T) {
	t.Run("session reinstatement", func(t *testing.T) {
		tg := startTarget(t, targetOptions{stream: loginFirst})
		p := tg.dialStream(t, initiator.Options{Target: targetName})
		p.streamLogin()
		q := tg.stepUp(t, initiator.Options{})
		p.wantEnd()
		testkit.Eventually(t, "the log", func() bool { return len(tg.log.Lines("replaced by a new login")) == 1 })
		h := q.scsi(0, 0, cdb.TestUnitReady)
		q.send(iser.Header{}, h, nil)
		q.wantStatus(h, 0x02)
		q.logout()
		if got := tg.log.Lines("outcome=refused"); len(got) != 1 || !strings.Contains(got[0], "stage=mpa") {
			t.Errorf("%q", got)
		}
	})
	t.Run("shutdown", func(t *testing.T) {
		tg := startTarget(t, targetOptions{stream: loginFirst})
		p := tg.dialStream(t, initiator.Options{Target: targetName})
		p.streamLogin()
		if err := tg.node.Shutdown(testContext(t)); err != nil {
			t.Fatal(err)
		}
		p.wantEnd()
		tg.log.wantLine("login", "outcome=refused", "stage=mpa", "target shuts down")
	})
	t.Run("many logins of one initiator port at once", func(t *testing.T) {
		tg := startTarget(t, targetOptions{stream: loginFirst})
		done := make(chan struct{})
		const n = 8
		for range n {
			go func() {
				defer func() { done <- struct{}{} }()
				for range 10 {
					s, err := initiator.Login(testContext(t), tg.addr,
						initiator.Options{Target: targetName, Stream: true})
					if err == nil { // replaced by another one at any time
						s.Do(&initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)})
						s.Close()
						<-s.Done()
					}
				}
			}()
		}
		for range n {
			<-done
		}
		tg.waitIdle(t)
		s := tg.login(t, initiator.Options{Stream: true})
		do(t, s, &initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)})
	})
}

// FuzzStepUp sends arbitrary bytes after a login on the byte stream: where the
// MPA Request is due, and behind it. The connection ends soon after the initiator
// has closed its side, and nothing is left of it.
func FuzzStepUp(f *testing.F) {
	tg := startTarget(f, targetOptions{quiet: true, stream: loginFirst,
		node: iscsi.Options{QueueDepth: 16, LogoutWait: time.Second, ConnectionMemory: 1 << 20,
			MaxTransferPiece: 64 << 10}})
	p := &raw{t: f, o: initiator.Options{}.Complete(), Numbers: header.Numbers{CmdSN: 1}, sendMSN: 1}
	request := p.mpaRequest()
	nop := p.Request(pdu.NOPOut, pdu.FlagF, true)
	nop.SetTTT(pdu.ReservedTag)
	block := cdb.Read16(0, 8)
	greet := p.message(hello(10, 10, 4))
	ping := p.message(pduBytes(iser.Header{}, nop, nil))
	read := p.message(pduBytes(sink(1, 1<<63), p.scsi(pdu.FlagR, 4096, block), nil))
	f.Add(false, request, greet)
	f.Add(true, slices.Concat(request, greet, ping, read), []byte{})
	f.Add(false, []byte{}, request)
	f.Add(true, request[:7], request[7:])
	f.Add(true, ping, request)
	f.Add(false, streamPDU(nop, nil), []byte{})
	f.Add(false, slices.Concat(request[:18], []byte{2, 1}), []byte{})
	f.Add(true, slices.Concat([]byte("MPA ID Rep Frame"), request[16:]), greet)
	settled := rdma.ReadStats()

	f.Fuzz(func(t *testing.T, hello bool, ahead, behind []byte) {
		var o initiator.Options
		o.Target = targetName
		if hello {
			o.Keys = []string{"iSERHelloRequired=Yes"}
		}
		p := tg.dialStream(t, o)
		p.write(slices.Concat(streamPDU(p.o.LoginRequest()), ahead[:min(len(ahead), 64<<10)]))
		p.streamLoggedIn()
		p.nc.Write(behind[:min(len(behind), 64<<10)]) // the target may have ended it
		p.nc.(*net.TCPConn).CloseWrite()
		if _, err := io.Copy(io.Discard, p.nc); isTimeout(err) {
			t.Fatal("the connection does not end")
		}
		p.nc.Close()
		testkit.Eventually(t, "the end of the session", func() bool { return tg.idle() && rdma.ReadStats() == settled })
	})
}
