package tests

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
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
