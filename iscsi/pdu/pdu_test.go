package pdu

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"hash/crc32"
	"reflect"
	"testing"

	"github.com/iser-target/iser-target/tests/testkit"
)

var unhex = testkit.Unhex

// digest returns the CRC32C of b in the byte order of RFC 7143, section 13.1.
func digest(b []byte) []byte {
	return binary.LittleEndian.AppendUint32(nil, crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
}

// Golden headers: the bytes come from RFC 7143, appendix A, or were computed
// independently of this encoder, like their digests.
var golden = []struct {
	id     string
	wire   string
	digest string
	build  func(b BHS)
}{
	{"V-ISCSI-1 READ(10)", `01c00000 00000000 00000000 00000000 14000000 00000400 00000014 00000018
		28000000 00000000 02000000 00000000`, "563a96d9", func(b BHS) {
		b.Reset(SCSICommand, FlagF|FlagR)
		b.SetITT(0x14000000)
		b.SetEDTL(1024)
		b.SetCmdSN(0x14)
		b.SetExpStatSN(0x18)
		b.SetCDB([]byte{0x28, 0, 0, 0, 0, 0, 0, 0, 2, 0})
	}},
	{"V-ISCSI-2 NOP-Out", `40800000 00000000 00000000 00000000 00000010 ffffffff 00000020 00000030
		00000000 00000000 00000000 00000000`, "ef7255cd", func(b BHS) {
		b.Reset(NOPOut, FlagF)
		b.SetImmediate()
		b.SetITT(0x10)
		b.SetTTT(ReservedTag)
		b.SetCmdSN(0x20)
		b.SetExpStatSN(0x30)
	}},
	{"V-ISCSI-3 NOP-In", `20800000 00000000 00000000 00000000 00000010 ffffffff 00000030 00000020
		0000009f 00000000 00000000 00000000`, "0715db63", func(b BHS) {
		b.Reset(NOPIn, FlagF)
		b.SetITT(0x10)
		b.SetTTT(ReservedTag)
		setSNs(b, 0x30, 0x20, 0x9f)
	}},
	{"V-ISCSI-4 R2T", `31800000 00000000 00000000 00000000 00000002 00000055 00000030 00000021
		000000a0 00000000 00000000 00010000`, "963c712d", func(b BHS) {
		b.Reset(R2T, FlagF)
		b.SetITT(2)
		b.SetTTT(0x55)
		setSNs(b, 0x30, 0x21, 0xa0)
		b.SetR2TSN(0)
		b.SetBufferOffset(0)
		b.SetDesiredDataTransferLength(65536)
	}},
	{"V-ISCSI-5 SCSI Response CHECK CONDITION", `21800002 00000014 00000000 00000000 00000002 00000000
		00000031 00000022 000000a1 00000000 00000000 00000000`, "eb1338ce", func(b BHS) {
		b.Reset(SCSIResponse, FlagF)
		b.SetResponse(CommandCompleted)
		b.SetStatus(2)
		b.SetDataSegmentLength(20)
		b.SetITT(2)
		setSNs(b, 0x31, 0x22, 0xa1)
	}},
	{"V-ISCSI-7 Login Response 0201", `23000000 00000000 00023d00 00000000 00000000 00000000 00000000 00000000
		00000000 02010000 00000000 00000000`, "", func(b BHS) {
		LoginResponse{ISID: [6]byte{0, 2, 0x3d}, Status: LoginAuthentication}.Put(b)
	}},
	{"V-ISCSI-8 final Login Response", `23870000 00000000 00023d00 00000001 00000000 00000000 00000000 00000001
		00000080 00000000 00000000 00000000`, "", func(b BHS) {
		LoginResponse{Transit: true, CSG: LoginOperationalNegotiation, NSG: FullFeaturePhase,
			ISID: [6]byte{0, 2, 0x3d}, TSIH: 1, ExpCmdSN: 1, MaxCmdSN: 0x80}.Put(b)
	}},
	{"V-ISCSI-9 Logout Response", `26800000 00000000 00000000 00000000 00000003 00000000 00000032 00000023
		000000a2 00000000 00020000 00000000`, "5e80202a", func(b BHS) {
		b.Reset(LogoutResp, FlagF)
		b.SetResponse(LogoutSuccess)
		b.SetITT(3)
		setSNs(b, 0x32, 0x23, 0xa2)
		b.SetTime2Wait(2)
		b.SetTime2Retain(0)
	}},
	{"V-ISCSI-10 Reject", `3f800900 00000030 00000000 00000000 ffffffff 00000000 00000033 00000023
		000000a2 00000000 00000000 00000000`, "5d74222b", func(b BHS) {
		b.Reset(Reject, FlagF)
		b.SetReason(RejectInvalidField)
		b.SetDataSegmentLength(BHSLen)
		b.SetITT(ReservedTag)
		setSNs(b, 0x33, 0x23, 0xa2)
	}},
	{"V-ISCSI-11 Async logout request", `32800000 00000000 00000000 00000000 ffffffff 00000000 00000034 00000023
		000000a2 01000000 00000003 00000000`, "0e816e72", func(b BHS) {
		b.Reset(AsyncMessage, FlagF)
		b.SetITT(ReservedTag)
		setSNs(b, 0x34, 0x23, 0xa2)
		b.SetAsync(AsyncLogoutRequest, 0, 0, 3)
	}},
}

func setSNs(b BHS, stat, exp, maxCmd uint32) {
	b.SetStatSN(stat)
	b.SetExpCmdSN(exp)
	b.SetMaxCmdSN(maxCmd)
}

func TestGolden(t *testing.T) {
	for _, g := range golden {
		t.Run(g.id, func(t *testing.T) {
			want := unhex(g.wire)
			got := bytes.Repeat([]byte{0xee}, BHSLen) // a setter must not leave old bytes behind
			g.build(got)
			if !bytes.Equal(got, want) {
				t.Errorf("built\n%x, want\n%x", got, want)
			}
			if g.digest != "" && hex.EncodeToString(digest(want)) != g.digest {
				t.Errorf("digest %x, want %s", digest(want), g.digest)
			}
		})
	}
	t.Run("V-ISCSI-6 sense data", func(t *testing.T) {
		// RFC 7143, section 11.4.7: SenseLength, then fixed format sense 0b 0c/0c.
		data := unhex("0012 70000b000000000a000000000c0c00000000")
		if n := int(binary.BigEndian.Uint16(data)); n != len(data)-2 || len(data) != 20 {
			t.Errorf("SenseLength %d in %d bytes", n, len(data))
		}
		if d := hex.EncodeToString(digest(data)); d != "3a726959" {
			t.Errorf("data digest %s", d)
		}
	})
}

// The getters return the fields of captured PDUs.
func TestGetters(t *testing.T) {
	cmd := BHS(unhex(golden[0].wire))
	if cmd.Opcode() != SCSICommand || cmd.Immediate() || !cmd.Final() || !cmd.Read() || cmd.Write() ||
		cmd.Attr() != AttrUntagged ||
		cmd.ITT() != 0x14000000 || cmd.EDTL() != 1024 || cmd.CmdSN() != 0x14 || cmd.ExpStatSN() != 0x18 ||
		!bytes.Equal(cmd.CDB()[:10], []byte{0x28, 0, 0, 0, 0, 0, 0, 0, 2, 0}) {
		t.Errorf("READ(10) read back as %x", []byte(cmd))
	}
	nop := BHS(unhex(golden[1].wire))
	if nop.Opcode() != NOPOut || !nop.Immediate() || nop.TTT() != ReservedTag {
		t.Errorf("NOP-Out read back as %x", []byte(nop))
	}
	r2t := BHS(unhex(golden[3].wire))
	if r2t.StatSN() != 0x30 || r2t.ExpCmdSN() != 0x21 || r2t.MaxCmdSN() != 0xa0 ||
		r2t.DesiredDataTransferLength() != 65536 {
		t.Errorf("R2T read back as %x", []byte(r2t))
	}
	tmf := make(BHS, BHSLen)
	tmf.Reset(TaskMgmtReq, FlagF|AbortTask)
	tmf.SetReferencedTaskTag(7)
	tmf.SetRefCmdSN(9)
	if tmf.Function() != AbortTask || tmf.ReferencedTaskTag() != 7 || tmf.RefCmdSN() != 9 ||
		binary.BigEndian.Uint32(tmf[32:]) != 9 {
		t.Errorf("TMF read back as %x", []byte(tmf))
	}
	async := BHS(unhex(golden[9].wire))
	if async.AsyncEvent() != AsyncLogoutRequest || async.Parameter(3) != 3 || async.AsyncVCode() != 0 {
		t.Errorf("Async Message read back as %x", []byte(async))
	}
	rej := BHS(unhex(golden[8].wire))
	if rej.Reason() != RejectInvalidField || rej.DataSegmentLength() != 48 {
		t.Errorf("Reject read back as %x", []byte(rej))
	}
}

// The two lengths share a word, but a setter changes only one.
func TestLengths(t *testing.T) {
	b := make(BHS, BHSLen)
	b.SetTotalAHSLength(MaxAHS)
	b.SetDataSegmentLength(MaxData)
	if b.TotalAHSLength() != MaxAHS || b.DataSegmentLength() != MaxData {
		t.Fatalf("%d, %d", b.TotalAHSLength(), b.DataSegmentLength())
	}
	b.SetDataSegmentLength(0)
	if b.TotalAHSLength() != MaxAHS || b.DataSegmentLength() != 0 {
		t.Fatalf("%d, %d", b.TotalAHSLength(), b.DataSegmentLength())
	}
}

// ISCSI-4.2.2.1-1: 32-bit serial number arithmetic (RFC 1982).
func TestBefore(t *testing.T) {
	for _, c := range []struct {
		a, b uint32
		want bool
	}{
		{0, 1, true}, {1, 0, false}, {5, 5, false},
		{0xffffffff, 0, true}, {0xfffffffe, 6, true}, {6, 0xfffffffe, false},
		{0, 0x7fffffff, true}, {0x7fffffff, 0, false},
		{0, 0x80000000, false}, {0x80000000, 0, false}, // undefined by RFC 1982: neither
		{1, 0x80000002, false}, {0x80000002, 1, true},
	} {
		if got := Before(c.a, c.b); got != c.want {
			t.Errorf("Before(%#x, %#x) = %v", c.a, c.b, got)
		}
	}
}

func TestLoginRoundTrip(t *testing.T) {
	req := LoginRequest{Transit: true, CSG: SecurityNegotiation, NSG: LoginOperationalNegotiation, VersionMax: 1,
		VersionMin: 2,
		ISID:       [6]byte{0x80, 1, 2, 3, 4, 5}, TSIH: 6, ITT: 7, CID: 8, CmdSN: 9, ExpStatSN: 10}
	wire := req.Append([]byte{0xaa})
	// RFC 7143, section 11.12.
	want := unhex(`aa 43 81 01 02 00000000 800102030405 0006 00000007 0008 0000 00000009 0000000a
		00000000 00000000 00000000 00000000`)
	if !bytes.Equal(wire, want) {
		t.Errorf("wrote\n%x, want\n%x", wire, want)
	}
	if got := ParseLoginRequest(wire[1:]); got != req {
		t.Errorf("came back as %+v", got)
	}
	rsp := LoginResponse{Continue: true, CSG: LoginOperationalNegotiation, ISID: req.ISID, TSIH: 3, ITT: 7,
		StatSN: 1, ExpCmdSN: 2,
		MaxCmdSN: 3, Status: LoginOutOfResources, DataSegmentLength: 77}
	b := make(BHS, BHSLen)
	rsp.Put(b)
	if got := ParseLoginResponse(b); got != rsp {
		t.Errorf("came back as %+v", got)
	}
	if b[36] != 3 || b[37] != 2 {
		t.Errorf("Status-Class and -Detail %x", b[36:38])
	}
}

// ISCSI-11.2-4, ISCSI-11.2-5: AHS types 1 and 2. Unknown types are skipped. Lengths that do not fit are
// format errors.
func TestParseAHS(t *testing.T) {
	cdb32 := make([]byte, 32)
	for i := range cdb32 {
		cdb32[i] = byte(i)
	}
	long := AppendExtendedCDB(nil, cdb32)
	if !bytes.Equal(long, unhex("0011 01 00 101112131415161718191a1b1c1d1e1f")) {
		t.Fatalf("extended CDB of 32 bytes: %x", long) // ISCSI-11.2-5: length field 17
	}
	for _, c := range []struct {
		name string
		area []byte
		want Extensions
		err  error
	}{
		{"nothing", nil, Extensions{}, nil},
		{"extended CDB", long, Extensions{CDB: cdb32[16:]}, nil},
		{"17 bytes, padded", AppendExtendedCDB(nil, cdb32[:17]), Extensions{CDB: []byte{16}}, nil},
		{"bidirectional", unhex("0005 02 00 00010000"), Extensions{Bidi: true, ReadLength: 65536}, nil},
		{"both", AppendBidiReadLength(bytes.Clone(long), 5), Extensions{CDB: cdb32[16:], Bidi: true, ReadLength: 5},
			nil},
		{"unknown type of length 0", unhex("0000 3f 00 0005 02 00 00000009"), Extensions{Bidi: true, ReadLength: 9},
			nil},
		{"all zeros", make([]byte, MaxAHS), Extensions{}, nil},
		{"runs over", unhex("0006 01 00 00000000"), Extensions{}, ErrAHSTruncated},
		{"runs far over", unhex("ffff 07 00"), Extensions{}, ErrAHSTruncated},
		{"two bytes", unhex("0000"), Extensions{}, ErrAHSTruncated},
		{"CDB of 16", unhex("0001 01 00"), Extensions{}, ErrAHSCDB},
		{"CDB of nothing", unhex("0000 01 00"), Extensions{}, ErrAHSCDB},
		{"short read length", unhex("0004 02 00 00000100"), Extensions{}, ErrAHSBidi},
		{"CDB twice", append(bytes.Clone(long), long...), Extensions{}, ErrAHSRepeated},
		{"read length twice", AppendBidiReadLength(AppendBidiReadLength(nil, 1), 1), Extensions{}, ErrAHSRepeated},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := ParseAHS(c.area)
			if err != c.err || !reflect.DeepEqual(got, c.want) {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
}

// Logs show the name of an opcode or status, or the number if it has none.
func TestNames(t *testing.T) {
	for got, want := range map[string]string{
		NOPOut.String(): "NOP-Out", Opcode(0x1c).String(): "opcode 0x1c",
		LoginNotFound.String(): "target not found (0x0203)", LoginStatus(0x0401).String(): "login status 0x0401",
		FullFeaturePhase.String(): "full feature", Stage(7).String(): "full feature",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if NOPOut.FromTarget() || SNACK.FromTarget() || !NOPIn.FromTarget() || !Reject.FromTarget() {
		t.Error("FromTarget")
	}
}

// FuzzBHS checks that no header or AHS area panics, and that a login header survives a round trip.
func FuzzBHS(f *testing.F) {
	for _, g := range golden {
		f.Add(unhex(g.wire))
	}
	f.Add(LoginRequest{Transit: true, CSG: 1, NSG: 3}.Append(nil))
	f.Add(append(unhex(golden[0].wire), unhex("0011 01 00 101112131415161718191a1b1c1d1e1f")...))
	testkit.FuzzBytes(f, func(t testing.TB, b []byte) {
		if len(b) < BHSLen || len(b) > BHSLen+MaxAHS {
			return
		}
		h := BHS(b[:BHSLen])
		for _, n := range []int{h.TotalAHSLength(), h.DataSegmentLength()} {
			if n < 0 || n > MaxData {
				t.Fatalf("length %d", n)
			}
		}
		_ = h.Opcode().String()
		req := ParseLoginRequest(h)
		if got := ParseLoginRequest(req.Append(nil)); got != req {
			t.Fatalf("%+v came back as %+v", req, got)
		}
		rsp := ParseLoginResponse(h)
		out := make(BHS, BHSLen)
		rsp.Put(out)
		if got := ParseLoginResponse(out); got != rsp {
			t.Fatalf("%+v came back as %+v", rsp, got)
		}
		x, err := ParseAHS(b[BHSLen:])
		if err != nil {
			if !reflect.DeepEqual(x, Extensions{}) {
				t.Fatalf("%v, and %+v", err, x)
			}
			return
		}
		if x.CDB != nil {
			cdb := append(bytes.Clone(h.CDB()), x.CDB...)
			if len(cdb) > MaxCDB {
				t.Fatalf("CDB of %d bytes", len(cdb))
			}
			if y, err := ParseAHS(AppendExtendedCDB(nil, cdb)); err != nil || !bytes.Equal(y.CDB, x.CDB) {
				t.Fatalf("%x came back as %x, %v", x.CDB, y.CDB, err)
			}
		}
	})
}
