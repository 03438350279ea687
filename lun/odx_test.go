package lun

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/backend/protection"
	"github.com/iser-target/iser-target/security/limits"
	"github.com/iser-target/iser-target/tests/testkit"
)

// An odxRig is two units that share their tokens: LUN 0 of 1 MiB and LUN 1 of 2 MiB.
type odxRig struct{ *copyRig }

func newODXRig(t *testing.T, one, two setup) *odxRig {
	t.Helper()
	tokens := NewTokens(limits.New())
	one.opt.Tokens, two.opt.Tokens = tokens, tokens
	return &odxRig{newCopyRig(t, one, two)}
}

func (r *odxRig) tokens() *Tokens { return r.unit.opt.Tokens }

// A blockRange is an LBA and a number of blocks.
type blockRange struct {
	lba   uint64
	count uint32
}

func descriptors(ranges []blockRange) string {
	var s strings.Builder
	for _, d := range ranges {
		fmt.Fprintf(&s, "%016x %08x 00000000", d.lba, d.count)
	}
	return s.String()
}

// populateList returns the parameter list of POPULATE TOKEN (SBC-3, section 5.13.2).
func populateList(flags byte, timeout, rod uint32, ranges ...blockRange) string {
	return fmt.Sprintf("%04x %02x 00 %08x %08x 0000 %04x", 14+16*len(ranges), flags, timeout, rod, 16*len(ranges)) + descriptors(ranges)
}

// tokenCDB returns the CDB of POPULATE TOKEN or WRITE USING TOKEN.
func tokenCDB(sa byte, id uint32, list string) string {
	return fmt.Sprintf("83 %02x 00000000 %08x %08x 00 00", sa, id, len(unhex(list)))
}

// writeList returns the parameter list of WRITE USING TOKEN (SBC-3, section 5.50.2).
func writeList(flags byte, offset uint64, token []byte, ranges ...blockRange) string {
	return fmt.Sprintf("%04x %02x 0000000000 %016x %x 000000000000 %04x", 534+16*len(ranges), flags, offset, token, 16*len(ranges)) + descriptors(ranges)
}

var zeroToken = unhex("ffff0001 0000 01f8" + strings.Repeat("00", 504))

// populate executes POPULATE TOKEN with a Command of its own.
func populate(n *Nexus, lun byte, id uint32, ranges ...blockRange) result {
	list := populateList(0, 0, 0, ranges...)
	return do(n, new(Command), [8]byte{0, lun}, tokenCDB(0x10, id, list), unhex(list), all)
}

// writeToken executes WRITE USING TOKEN with a Command of its own.
func writeToken(n *Nexus, lun byte, id uint32, offset uint64, token []byte, ranges ...blockRange) result {
	list := writeList(0, offset, token, ranges...)
	return do(n, new(Command), [8]byte{0, lun}, tokenCDB(0x11, id, list), unhex(list), all)
}

// tokenInfo executes RECEIVE ROD TOKEN INFORMATION with a Command of its own.
func tokenInfo(n *Nexus, lun byte, id uint32) result {
	return do(n, new(Command), [8]byte{0, lun}, fmt.Sprintf("84 07 %08x 00000000 00000400 00 00", id), nil, all)
}

// token returns a token for ranges of that LUN.
func (r *odxRig) token(lun byte, ranges ...blockRange) []byte {
	r.t.Helper()
	return tokenOf(r.t, r.nexus, lun, ranges...)
}

func tokenOf(t testing.TB, n *Nexus, lun byte, ranges ...blockRange) []byte {
	t.Helper()
	const id = 0x70cc
	wantGood(t, "POPULATE TOKEN", populate(n, lun, id, ranges...))
	res := tokenInfo(n, lun, id)
	wantGood(t, "RECEIVE ROD TOKEN INFORMATION", res)
	if len(res.in) != 38+512 {
		t.Fatalf("%d bytes of ROD token information, % x", len(res.in), res.in)
	}
	return res.in[38:]
}

func (r *odxRig) write(lun byte, lba uint64, data []byte) {
	r.t.Helper()
	wantGood(r.t, "WRITE(16)", do(r.nexus, new(Command), [8]byte{0, lun}, extentCDB(0x8a, 0, lba, uint64(len(data)/512)), data, all))
}

// wantTransfer checks for sense data with a transfer count in INFORMATION (SBC-3, section 4.27.2).
func wantTransfer(t testing.TB, res result, k Sense, blocks uint32) {
	t.Helper()
	want := unhex(fmt.Sprintf("f0 00 %02x %08x 0a 00000000 %02x %02x 00 000000", k.Key, blocks, k.ASC, k.ASCQ))
	if res.status != StatusCheckCondition || !bytes.Equal(res.sense, want) {
		t.Fatalf("status %#x, sense % x, want % x", res.status, res.sense, want)
	}
}

// wantToken checks for the sense data of a token that cannot be used.
func wantToken(t testing.TB, res result, k Sense) {
	t.Helper()
	wantSense(t, res, k.Key, k.ASC, k.ASCQ)
}

// SBC-3, sections 5.13, 5.22 and 5.50; SPC-4, sections 5.17.6 and 6.26.
func TestTokens(t *testing.T) {
	r := newODXRig(t, setup{}, setup{})
	data := pattern(100*512, 1)
	r.write(0, 1000, data[:40*512])
	r.write(0, 100, data[40*512:])
	wantGood(t, "POPULATE TOKEN", populate(r.nexus, 0, 0x11223344, blockRange{1000, 40}, blockRange{5, 0}, blockRange{100, 60}))
	wantField(t, tokenInfo(r.rig.nexus, 0, 0x11223344), 2, noField) // of another nexus
	wantField(t, tokenInfo(r.nexus, 1, 0x11223344), 2, noField)     // of another unit

	short := do(r.nexus, new(Command), [8]byte{}, "84 07 11223344 00000000 00000020 00 00", nil, all)
	wantGood(t, "a short allocation length", short)
	status := r.status4(0x11223344)
	wantGood(t, "RECEIVE COPY STATUS(LID4)", status)
	res := tokenInfo(r.nexus, 0, 0x11223344)
	wantGood(t, "RECEIVE ROD TOKEN INFORMATION", res)
	wantBytes(t, short.in, res.in[:32])
	wantBytes(t, status.in[4:15], res.in[4:15])
	wantBytes(t, res.in[:38], unhex(`
		00000222              # AVAILABLE DATA
		10                    # RESPONSE TO SERVICE ACTION
		01                    # completed without errors
		0001                  # OPERATION COUNTER
		fffffffe              # ESTIMATED STATUS UPDATE DELAY
		00                    # EXTENDED COPY COMPLETION STATUS: GOOD
		00 00                 # no sense data
		f1                    # TRANSFER COUNT UNITS: blocks
		0000000000000064
		0000                  # SEGMENTS PROCESSED
		000000000000
		00000202              # ROD TOKEN DESCRIPTORS LENGTH
		0000                  # ID FOR CREATING ROD CSCD DESCRIPTOR`))
	wantField(t, tokenInfo(r.nexus, 0, 0x11223344), 2, noField) // it was returned

	token := res.in[38:]
	wantBytes(t, token[:8], unhex("00800001 0000 01f8")) // point in time copy, change vulnerable
	wantBytes(t, token[16:128], unhex(`
		e4 00 0000 01 03 00 08 3001020304050607 000000000000000000000000 00 000200
		0000000000000000 000000000000c800  # NUMBER OF BYTES REPRESENTED
		`+strings.Repeat("00", 32)+`
		00000200 00 00 c000                # LOGICAL BLOCK LENGTH; LBPME, LBPRZ
		`+strings.Repeat("00", 24)))
	name := append([]byte(testPort.TargetName), 0)
	for len(name)%4 != 0 {
		name = append(name, 0)
	}
	wantBytes(t, token[128:256], append(append(unhex("53 a8 00"), byte(len(name))), append(name, make([]byte, 124-len(name))...)...))
	if other := r.token(0, blockRange{1000, 40}); bytes.Equal(other[256:], token[256:]) || bytes.Equal(other[8:16], token[8:16]) {
		t.Error("two tokens are the same")
	}

	wantGood(t, "to another unit", writeToken(r.nexus, 1, 7, 0, token, blockRange{2000, 30}, blockRange{10, 70}))
	wantBytes(t, r.read(1, 2000, 30), data[:30*512])
	wantBytes(t, r.read(1, 10, 70), data[30*512:])
	wantBytes(t, tokenInfo(r.nexus, 1, 7).in, unhex(`
		00000020 11 01 0003 fffffffe 00 00 00 f1 0000000000000064 0000 000000000000
		00000000              # ROD TOKEN DESCRIPTORS LENGTH`))
	wantGood(t, "from an offset, within the unit", writeToken(r.nexus, 0, 7, 38, token, blockRange{500, 5}))
	wantBytes(t, r.read(0, 500, 5), data[38*512:43*512])
	wantGood(t, "RECEIVE COPY STATUS(LID4)", r.status4(7))

	// More than the token has: as much as there is, and an error (SBC-3, section 4.27.2).
	before := r.read(1, 300, 10)
	wantTransfer(t, writeToken(r.nexus, 1, 8, 95, token, blockRange{300, 10}), Sense{0xa, 0x0d, 0x04}, 5)
	wantBytes(t, r.read(1, 300, 10), append(data[95*512:], before[5*512:]...))
	wantBytes(t, tokenInfo(r.nexus, 1, 8).in, unhex(`
		00000034 11 03 0001 fffffffe 02
		14 12                 # sense data, padded to a multiple of four bytes
		f1 0000000000000005 0000 000000000000
		f0 00 0a 00000005 0a 00000000 0d 04 00 000000 0000
		00000000`))

	// Zeros (SBC-3, section 4.27.4).
	wantGood(t, "the zero token", writeToken(r.nexus, 1, 9, 3, zeroToken, blockRange{12, 8}))
	wantBytes(t, r.read(1, 10, 12), slices.Concat(data[30*512:32*512], make([]byte, 8*512), data[40*512:42*512]))

	// A token stays valid until it is deleted.
	list := writeList(tokenDelete, 0, token, blockRange{0, 1})
	wantGood(t, "DEL_TKN", do(r.nexus, &r.c, [8]byte{0, 1}, tokenCDB(0x11, 1, list), unhex(list), all))
	wantBytes(t, r.read(1, 0, 1), data[:512])
	wantToken(t, writeToken(r.nexus, 1, 1, 0, token, blockRange{0, 1}), condTokenDeleted)

	wantGood(t, "PARAMETER LIST LENGTH 0", do(r.nexus, &r.c, [8]byte{}, "83 10 00000000 00000001 00000000 00 00", nil, all))
	wantGood(t, "PARAMETER LIST LENGTH 0", do(r.nexus, &r.c, [8]byte{}, "83 11 00000000 00000001 00000000 00 00", nil, all))
	wantField(t, tokenInfo(r.nexus, 0, 1), 2, noField)
	wantGood(t, "no blocks", populate(r.nexus, 0, 2, blockRange{5, 0}))
	wantBytes(t, tokenInfo(r.nexus, 0, 2).in, unhex("00000020 10 01 0001 fffffffe 00 00 00 f1 0000000000000000 0000 000000000000 00000000"))

	// ALLOCATION LENGTH 0 discards the token's data.
	wantGood(t, "POPULATE TOKEN", populate(r.nexus, 0, 3, blockRange{5, 1}))
	wantGood(t, "ALLOCATION LENGTH 0", do(r.nexus, &r.c, [8]byte{}, "84 07 00000003 00000000 00000000 00 00", nil, all))
	wantField(t, tokenInfo(r.nexus, 0, 3), 2, noField)
	c := r.tokens().Counts()
	if want := (TokenCounts{Valid: 2, Made: 3, Ended: [4]uint64{3: 1}}); c != want {
		t.Errorf("%+v, want %+v", c, want)
	}
}

// The types that a POPULATE TOKEN can ask for (SPC-4, section 5.17.6.2.3).
func TestTokenTypes(t *testing.T) {
	r := newODXRig(t, setup{}, setup{})
	for _, s := range []struct {
		flags     byte
		rod, want uint32 // want 0: refused
	}{
		{0, 0x1234, rodVulnerable}, {tokenRTV, rodDefault, rodDefault}, {tokenRTV, rodVulnerable, rodVulnerable}, {tokenRTV, rodAny, rodVulnerable},
		{tokenRTV, 0, 0}, {tokenRTV, 0x10000, 0}, {tokenRTV, 0x800002, 0}, {tokenRTV, rodZero, 0},
	} {
		list := populateList(s.flags, 0, s.rod, blockRange{0, 8})
		res := do(r.nexus, &r.c, [8]byte{}, tokenCDB(0x10, 1, list), unhex(list), all)
		if s.want == 0 {
			wantListField(t, res, 8)
			continue
		}
		wantGood(t, "POPULATE TOKEN", res)
		token := tokenInfo(r.nexus, 0, 1).in[38:]
		if got := binary.BigEndian.Uint32(token); got != s.want {
			t.Errorf("type %08x, want %08x", got, s.want)
		}
		wantGood(t, "WRITE USING TOKEN", writeToken(r.nexus, 1, 1, 0, token, blockRange{0, 8}))
	}
}

// The offset and the ranges of WRITE USING TOKEN are in blocks of the destination. What is behind the data in its last block
// becomes zeros.
func TestTokenBlockSizes(t *testing.T) {
	r := newODXRig(t, setup{}, setup{blockSize: 4096})
	data := pattern(21*512, 1)
	r.write(0, 15, data[:6*512])
	r.write(0, 40, data[6*512:])
	token := r.token(0, blockRange{15, 6}, blockRange{40, 15})
	wantGood(t, "the second block", writeToken(r.nexus, 1, 1, 1, token, blockRange{5, 1}))
	wantBytes(t, r.read(1, 5, 1), data[4096:8192])
	wantGood(t, "a part of a block", writeToken(r.nexus, 1, 1, 2, token, blockRange{6, 1}))
	wantBytes(t, r.read(1, 6, 1), append(data[8192:], make([]byte, 4096-(21*512-8192))...))
	wantTransfer(t, writeToken(r.nexus, 1, 1, 2, token, blockRange{7, 2}), condCopyUnderrun, 1)
	wantBytes(t, r.read(1, 7, 2), append(append(data[8192:], make([]byte, 4096-(21*512-8192))...), make([]byte, 4096)...))
	wantListField(t, writeToken(r.nexus, 1, 1, 3, token, blockRange{7, 1}), 8)

	four := r.token(1, blockRange{5, 2})
	wantGood(t, "to smaller blocks", writeToken(r.nexus, 0, 1, 7, four, blockRange{1000, 2}))
	wantBytes(t, r.read(0, 1000, 2), data[4096+7*512:4096+9*512])
}

func TestTokenLists(t *testing.T) {
	r := newODXRig(t, setup{}, setup{})
	many := slices.Repeat([]blockRange{{0, 0}}, maxTokenRanges+1)
	change := func(list string, at int, b ...byte) string {
		p := unhex(list)
		copy(p[at:], b)
		return fmt.Sprintf("%x", p)
	}
	good := populateList(0, maxTokenTimeout, 0, blockRange{0, 8})
	token := r.token(0, blockRange{0, 8})
	use := writeList(0, 0, token, blockRange{100, 8})
	for _, s := range []struct {
		name, list string
		sa         byte
		want       Sense
		field      int // of the list, or 0
	}{
		{"half a header", fmt.Sprintf("%x", unhex(good)[:15]), 0x10, condListLength, 0},
		{"no whole descriptor", fmt.Sprintf("%x", unhex(good)[:31]), 0x10, condListLength, 0},
		{"POPULATE TOKEN DATA LENGTH", change(good, 0, 0, 29), 0x10, condListField, 0},
		{"INACTIVITY TIMEOUT", populateList(0, maxTokenTimeout+1, 0, blockRange{0, 8}), 0x10, condListField, 4},
		{"descriptor length", change(good, 14, 0, 15), 0x10, condListField, 14},
		{"an LBA twice", populateList(0, 0, 0, blockRange{8, 8}, blockRange{100, 1}, blockRange{1, 8}), 0x10, condListField, 16 + 32},
		{"too many ranges", populateList(0, 0, 0, many...), 0x10, condTooManySegments, 0},
		{"beyond the end", populateList(0, 0, 0, blockRange{2047, 2}), 0x10, condLBARange, 0},
		{"far beyond the end", populateList(0, 0, 0, blockRange{1<<64 - 1, 2}), 0x10, condLBARange, 0},

		{"half a header", fmt.Sprintf("%x", unhex(use)[:535]), 0x11, condListLength, 0},
		{"no whole descriptor", fmt.Sprintf("%x", unhex(use)[:551]), 0x11, condListLength, 0},
		{"WRITE USING TOKEN DATA LENGTH", change(use, 0, 2, 0x25), 0x11, condListField, 0},
		{"WRITE USING TOKEN DATA LENGTH of another list", change(use, 0, 2, 0x36), 0x11, condListField, 0},
		{"an LBA twice", writeList(0, 0, token, blockRange{100, 8}, blockRange{107, 1}), 0x11, condListField, 536 + 16},
		{"too many ranges", writeList(0, 0, token, many...), 0x11, condTooManySegments, 0},
		{"beyond the end", writeList(0, 0, token, blockRange{2047, 2}), 0x11, condLBARange, 0},
		{"OFFSET INTO ROD", writeList(0, 8, token, blockRange{100, 8}), 0x11, condListField, 8},
		{"far OFFSET INTO ROD", writeList(0, 1<<64-1, token, blockRange{100, 8}), 0x11, condListField, 8},
		{"far OFFSET INTO ROD of zeros", writeList(0, 1<<63, zeroToken, blockRange{100, 8}), 0x11, condListField, 8},
		{"ROD TOKEN LENGTH", change(use, 16+6, 1, 0xf7), 0x11, condTokenLength, 0},
		{"ROD TYPE", change(use, 16, 0, 1, 0, 0), 0x11, condTokenType, 0},
		{"a token of nobody", change(use, 16+256, ^token[256]), 0x11, condTokenUnknown, 0},
		{"a changed token", change(use, 16+63, 1), 0x11, condTokenCorrupt, 0},
	} {
		t.Run(s.name, func(t *testing.T) {
			res := do(r.nexus, &r.c, [8]byte{}, tokenCDB(s.sa, 1, s.list), unhex(s.list), all)
			wantSense(t, res, s.want.Key, s.want.ASC, s.want.ASCQ)
			if s.want == condListField {
				wantListField(t, res, s.field)
			}
			wantField(t, tokenInfo(r.nexus, 0, 1), 2, noField)
		})
	}
	if n := r.store.Calls(backendtest.WriteAt) + r.store.Calls(backendtest.Discard) + r.store.Calls(backendtest.Zero); n != 0 {
		t.Error("something was written")
	}
	if c := r.tokens().Counts(); c.Valid != 1 || c.Made != 1 {
		t.Errorf("%+v, want the only token", c)
	}
	big := newODXRig(t, setup{size: 4 << 30}, setup{})
	list := populateList(0, 0, 0, blockRange{0, 1 << 20}, blockRange{1 << 21, 1<<20 + 1})
	wantListField(t, do(big.nexus, &r.c, [8]byte{}, tokenCDB(0x10, 1, list), unhex(list), all), 16+16+8)
	wantField(t, do(r.nexus, &r.c, [8]byte{}, "83 10 00000000 00000000 00010001 00 00", nil, all), 10, noField)
	wantGood(t, "POPULATE TOKEN", do(r.nexus, &r.c, [8]byte{}, tokenCDB(0x10, 1, good), unhex(good), all))
	wantGood(t, "the list that the others are made of", do(r.nexus, &r.c, [8]byte{}, tokenCDB(0x11, 1, use), unhex(use), all))
}

// Whatever changes a block of a token cancels it, and what changes others does not.
func TestChangesCancelTokens(t *testing.T) {
	list := copyList(1, 2, []string{cscdZero, cscdOne}, []string{blocks(0, 0, 1, 500, 109)})
	lists := func(cdb string, list string) func(*odxRig) {
		return func(r *odxRig) { wantGood(r.t, cdb, do(r.nexus, new(Command), [8]byte{}, cdb, unhex(list), all)) }
	}
	command := func(op byte, flags byte, lba uint64, data int) func(*odxRig) {
		return func(r *odxRig) {
			cdb := extentCDB(op, flags, lba, 1)
			wantGood(r.t, cdb, do(r.nexus, new(Command), [8]byte{}, cdb, make([]byte, data), all))
		}
	}
	unmap := "42 00 00000000 00 0018 00"
	changes := map[string]func(*odxRig){
		"nothing":           func(*odxRig) {},
		"SYNCHRONIZE CACHE": lists("91 00 0000000000000000 00000000 00 00", ""),
		"UNMAP":             lists(unmap, "0016 0010 00000000 000000000000006d 00000001 00000000"),
		"EXTENDED COPY":     lists(copyCDB(list), list),
		"the zero token": func(r *odxRig) {
			wantGood(r.t, "WRITE USING TOKEN", writeToken(r.nexus, 0, 1, 0, zeroToken, blockRange{109, 1}))
		},
		"another token": func(r *odxRig) {
			wantGood(r.t, "WRITE USING TOKEN", writeToken(r.nexus, 0, 1, 0, r.token(0, blockRange{700, 1}), blockRange{109, 1}))
		},
		"a write that fails": func(r *odxRig) {
			r.store.Fail(backendtest.WriteAt, backend.ErrNoSpace)
			if res := do(r.nexus, new(Command), [8]byte{}, extentCDB(0x8a, 0, 109, 1), make([]byte, 512), all); res.status == StatusGood {
				r.t.Error("the write did not fail")
			}
			r.store.Fail(backendtest.WriteAt, nil)
		},
		"FORMAT UNIT":            lists("04 00 0000 00 00", ""),
		"SANITIZE":               lists("48 03 0000000000 0000 00", ""),
		"a smaller size":         func(r *odxRig) { r.unit.changing(109*512, 1<<62) },
		"an ejected medium":      lists("1b 00 0000 02 00", ""),
		"a sync that has failed": func(r *odxRig) { r.unit.NoteSyncFailure(backend.ErrUnsynced) },
	}
	for _, op := range writeOps {
		changes[fmt.Sprintf("write %02x", op)] = command(op, 0, 109, 512)
	}
	changes["WRITE AND VERIFY"] = command(0x8e, 2, 109, 512)
	changes["ORWRITE"] = command(0x8b, 0, 109, 512)
	changes["WRITE with FUA"] = command(0x8a, fua, 109, 512)
	changes["WRITE SAME"] = command(0x93, 0, 109, 512)
	changes["WRITE SAME with UNMAP"] = command(0x93, wsUnmap, 109, 512)
	changes["WRITE ATOMIC"] = func(r *odxRig) { lists("9c 00 000000000000006d 0000 0001 00 00", strings.Repeat("00", 512))(r) }
	changes["COMPARE AND WRITE"] = func(r *odxRig) {
		lists("89 00 000000000000006d 000000 01 00 00", fmt.Sprintf("%x", append(r.read(0, 109, 1), make([]byte, 512)...)))(r)
	}
	keeps := []string{"nothing", "SYNCHRONIZE CACHE"}
	all := map[string]bool{"FORMAT UNIT": true, "SANITIZE": true, "an ejected medium": true, "a sync that has failed": true}
	for name, change := range changes {
		t.Run(name, func(t *testing.T) {
			r := newODXRig(t, setup{opt: everything, info: func(i *backend.Info) { i.VolatileCache, i.AtomicWrite = true, 4096 }}, setup{})
			r.write(0, 90, pattern(40*512, 1))
			hit := r.token(0, blockRange{300, 10}, blockRange{100, 10})
			before, after, other := r.token(0, blockRange{99, 10}), r.token(0, blockRange{400, 1}, blockRange{110, 10}), r.token(1, blockRange{109, 1})
			change(r)
			if name == "an ejected medium" {
				wantGood(t, "load", do(r.nexus, new(Command), [8]byte{}, "1b 00 0000 03 00", nil, 0))
			}
			why := condTokenCancelled
			if slices.Contains(keeps, name) {
				why = condNone
			}
			check := func(what string, token []byte, why Sense) {
				t.Helper()
				res := writeToken(r.nexus, 1, 1, 0, token, blockRange{1000, 1})
				if t.Log(what); why == condNone {
					wantGood(t, what, res)
				} else {
					wantToken(t, res, why)
				}
			}
			check("the token", hit, why)
			if !all[name] {
				why = condNone
			}
			check("a token for blocks before", before, why)
			if name == "a smaller size" {
				why = condTokenCancelled
			}
			check("a token for blocks after", after, why)
			check("a token of another unit", other, condNone)
		})
	}
}

// What an administrator does to a unit revokes its tokens: to remove, replace, close or shrink it.
func TestRevokedTokens(t *testing.T) {
	for _, s := range []struct {
		name  string
		admin func(r *odxRig)
		want  Sense
	}{
		{"remove", func(r *odxRig) { r.inv.Remove(0).Close() }, condTokenRevoked},
		{"replace", func(r *odxRig) {
			next := newRig(r.t, setup{opt: Options{Tokens: r.tokens()}})
			r.inv.Replace(0, next.unit)
		}, condTokenRevoked},
		{"replace and put back", func(r *odxRig) {
			next := newRig(r.t, setup{opt: Options{Tokens: r.tokens()}})
			was := r.inv.Replace(0, next.unit)
			r.inv.Replace(0, was)
			do(r.nexus, new(Command), [8]byte{}, "00", nil, 0)
			do(r.nexus, new(Command), [8]byte{}, "00", nil, 0)
			r.token(0, blockRange{0, 1}) // the unit makes tokens again
		}, condTokenRevoked},
		{"close", func(r *odxRig) { r.unit.Close() }, condTokenRevoked},
		{"detach", func(r *odxRig) { r.unit.Detach() }, condTokenRevoked},
	} {
		t.Run(s.name, func(t *testing.T) {
			r := newODXRig(t, setup{}, setup{})
			token, other := r.token(0, blockRange{0, 8}), r.token(1, blockRange{0, 8})
			s.admin(r)
			for do(r.nexus, new(Command), [8]byte{0, 1}, "00", nil, 0).status != StatusGood {
			}
			wantToken(t, writeToken(r.nexus, 1, 1, 0, token, blockRange{100, 1}), s.want)
			wantGood(t, "a token of another unit", writeToken(r.nexus, 1, 1, 0, other, blockRange{100, 1}))
		})
	}
}

// The limits refuse tokens, and leave room for other initiators.
func TestTokenLimits(t *testing.T) {
	set := limits.New()
	set.Tokens.SetMax(5)
	set.TokensByName.SetMax(3)
	tokens := NewTokens(set)
	r := &odxRig{newCopyRig(t, setup{opt: Options{Tokens: tokens}}, setup{opt: Options{Tokens: tokens}})}
	port := testPort
	port.InitiatorName = "iqn.2026-11.io.example:third"
	third := r.inv.NewNexus(port)
	do(third, &r.c, [8]byte{}, "00", nil, all)
	var mine [][]byte
	for i := range 3 {
		mine = append(mine, r.token(0, blockRange{uint64(i), 1}))
	}
	wantTransfer(t, populate(r.nexus, 0, 1, blockRange{0, 1}), condNoTokens, 0)
	tokenOf(t, third, 0, blockRange{0, 1})
	tokenOf(t, third, 0, blockRange{0, 1})
	wantTransfer(t, populate(third, 0, 1, blockRange{0, 1}), condNoTokens, 0)
	wantBytes(t, tokenInfo(third, 0, 1).in[:32], unhex("00000034 10 02 0000 fffffffe 02 14 12 f1 0000000000000000 0000 000000000000"))
	r.write(0, 1, make([]byte, 512)) // cancels one
	tokenOf(t, third, 0, blockRange{0, 1})
	wantTransfer(t, populate(r.nexus, 0, 1, blockRange{0, 1}), condNoTokens, 0)
	if set.Tokens.State().Bites != 2 || set.TokensByName.State().Bites != 1 || set.TokensByName.UsedBy(testPort.InitiatorName) != 2 {
		t.Errorf("%+v, %+v", set.Tokens.State(), set.TokensByName.State())
	}
	wantToken(t, writeToken(r.nexus, 1, 1, 0, mine[1], blockRange{0, 1}), condTokenCancelled)
	r.unit.Close()
	r.other.unit.Close()
	if set.Tokens.Used() != 0 || set.TokensByName.Used() != 0 || tokens.Counts().Valid != 0 {
		t.Errorf("%d tokens remain, of one initiator %d", set.Tokens.Used(), set.TokensByName.Used())
	}
}

// A token expires after its inactivity timeout, which each use begins again.
func TestTokenTimeout(t *testing.T) {
	r := newODXRig(t, setup{}, setup{})
	list := populateList(0, 1, 0, blockRange{0, 8})
	wantGood(t, "POPULATE TOKEN", do(r.nexus, &r.c, [8]byte{}, tokenCDB(0x10, 1, list), unhex(list), all))
	token := tokenInfo(r.nexus, 0, 1).in[38:]
	k := r.tokens().of[secret(token[256:288])]
	if k.timeout != time.Second {
		t.Fatalf("a timeout of %v, want 1s", k.timeout)
	}
	used, why := r.tokens().use(token)
	if why != condNone {
		t.Fatal(why)
	}
	r.tokens().expire(k) // too early: it is in use
	wantGood(t, "in use", writeToken(r.nexus, 1, 1, 0, token, blockRange{0, 1}))
	r.tokens().done(used)
	begin := time.Now()
	testkit.Eventually(t, "the end of the token", func() bool { return k.failure() != condNone })
	if d := time.Since(begin); d < 900*time.Millisecond {
		t.Errorf("the token ended after %v, want 1s", d)
	}
	wantToken(t, writeToken(r.nexus, 1, 1, 0, token, blockRange{0, 1}), condTokenExpired)
	if r.unit.tokens.Load() != nil {
		t.Error("the unit still has a token")
	}
	other := r.token(0, blockRange{0, 8})
	if k := r.tokens().of[secret(other[256:288])]; k.timeout != defaultTokenTimeout*time.Second {
		t.Errorf("a timeout of %v, want the default", k.timeout)
	}
}

// The reasons of the last tokens are kept, of older ones not.
func TestEndedTokensAreBounded(t *testing.T) {
	r := newODXRig(t, setup{}, setup{})
	var first, second []byte
	for i := range maxEnded + 1 {
		token := r.token(0, blockRange{0, 1})
		switch i {
		case 0:
			first = token
		case 1:
			second = token
		}
		r.write(0, 0, make([]byte, 512))
	}
	wantToken(t, writeToken(r.nexus, 1, 1, 0, first, blockRange{0, 1}), condTokenUnknown)
	wantToken(t, writeToken(r.nexus, 1, 1, 0, second, blockRange{0, 1}), condTokenCancelled)
	if n := len(r.tokens().over); n != maxEnded {
		t.Errorf("%d reasons, want %d", n, maxEnded)
	}
}

// A WRITE USING TOKEN onto the data of its own token writes what the token stands for, and cancels it.
func TestTokenOntoItself(t *testing.T) {
	for _, s := range []struct {
		name string
		from []blockRange
		to   []blockRange
		ok   bool
	}{
		{"forward", []blockRange{{100, 1200}}, []blockRange{{3, 1200}}, true},
		{"back", []blockRange{{3, 1200}}, []blockRange{{100, 1200}}, true},
		{"in place", []blockRange{{3, 1200}}, []blockRange{{3, 1200}}, true},
		{"two ranges forward", []blockRange{{500, 600}, {1200, 600}}, []blockRange{{400, 600}, {1000, 600}}, true},
		{"two ranges back", []blockRange{{0, 600}, {700, 600}}, []blockRange{{100, 600}, {900, 600}}, true},
		{"an exchange", []blockRange{{0, 600}, {700, 600}}, []blockRange{{700, 600}, {0, 600}}, false},
	} {
		t.Run(s.name, func(t *testing.T) {
			r := newODXRig(t, setup{}, setup{})
			image := pattern(1<<20, 1)
			r.write(0, 0, image)
			wantGood(t, "UNMAP", do(r.nexus, &r.c, [8]byte{}, "42 00 00000000 00 0018 00", unhex("0016 0010 00000000 0000000000000200 00000080 00000000"), all))
			clear(image[0x200*512 : 0x280*512])
			want := bytes.Clone(image)
			var data []byte
			for _, f := range s.from {
				data = append(data, image[f.lba*512:][:f.count*512]...)
			}
			token := r.token(0, s.from...)
			res := writeToken(r.nexus, 0, 1, 0, token, s.to...)
			if !s.ok {
				wantToken(t, res, condTokenCause)
				wantBytes(t, r.read(0, 0, 2048), image)
				wantGood(t, "the token is as it was", writeToken(r.nexus, 1, 1, 0, token, blockRange{0, 8}))
				return
			}
			wantGood(t, "WRITE USING TOKEN", res)
			for _, to := range s.to {
				data = data[copy(want[to.lba*512:][:to.count*512], data):]
			}
			if !bytes.Equal(r.read(0, 0, 2048), want) {
				t.Error("the data differs")
			}
			wantBytes(t, tokenInfo(r.nexus, 0, 1).in[15:24], unhex("f1 00000000000004b0"))
			wantToken(t, writeToken(r.nexus, 1, 1, 0, token, blockRange{0, 8}), condTokenCancelled)
			if r.unit.tokens.Load() != nil || r.tokens().Counts().Valid != 0 {
				t.Error("the unit still has a token")
			}
		})
	}
}

// On a unit with protection information tokens copy the data, and the zero token writes what nothing checks.
func TestTokensOfProtectedUnits(t *testing.T) {
	r := newODXRig(t, setup{}, setup{protect: protection.Type1})
	data := pattern(16*512, 1)
	r.write(1, 8, data)
	wantGood(t, "WRITE USING TOKEN", writeToken(r.nexus, 0, 1, 0, r.token(1, blockRange{8, 16}), blockRange{100, 16}))
	wantBytes(t, r.read(0, 100, 16), data)
	wantGood(t, "WRITE USING TOKEN", writeToken(r.nexus, 1, 1, 0, r.token(0, blockRange{100, 16}), blockRange{200, 16}))
	res := do(r.nexus, &r.c, [8]byte{0, 1}, extentCDB(0x88, 0x20, 200, 16), nil, all) // RDPROTECT 001b: checked
	wantGood(t, "READ(16) with RDPROTECT", res)
	for i := range 16 {
		b := res.in[i*520:]
		wantBytes(t, b[:512], data[i*512:][:512])
		if ref := binary.BigEndian.Uint32(b[516:]); ref != uint32(200+i) {
			t.Errorf("block %d: reference tag %d", i, ref)
		}
	}
	wantGood(t, "zeros", writeToken(r.nexus, 1, 1, 0, zeroToken, blockRange{204, 2}))
	res = do(r.nexus, &r.c, [8]byte{0, 1}, extentCDB(0x88, 0x20, 203, 3), nil, all)
	wantGood(t, "READ(16) with RDPROTECT", res)
	wantBytes(t, res.in[520:], slices.Concat(make([]byte, 512), bytes.Repeat([]byte{0xff}, 8), make([]byte, 512), bytes.Repeat([]byte{0xff}, 8)))
	token := r.token(1, blockRange{200, 16})
	block := append(pattern(512, 5), unhex("0000 0000 00000000")...)
	protection.New(protection.CRC(block[:512]), 0, 203).Put(block[512:])
	wantGood(t, "WRITE(16) with WRPROTECT", do(r.nexus, &r.c, [8]byte{0, 1}, extentCDB(0x8a, 0x20, 203, 1), block, all))
	wantToken(t, writeToken(r.nexus, 0, 1, 0, token, blockRange{0, 8}), condTokenCancelled)
}

// A write with tokens for other ranges of its unit searches them, and allocates nothing.
func BenchmarkWriteWithTokens(b *testing.B) {
	m, err := backend.OpenMemory(backend.MemoryConfig{Size: 64 << 20})
	if err != nil {
		b.Fatal(err)
	}
	u, err := New(m, Options{Identity: testIdentity})
	if err != nil {
		b.Fatal(err)
	}
	inv := NewInventory()
	if err := inv.Add(0, u); err != nil {
		b.Fatal(err)
	}
	defer inv.Close()
	n := inv.NewNexus(testPort)
	defer n.Close()
	newTransfer(0x88, 0, 0, 512).run(n, 512) // takes the unit attention
	tokens := 0
	for _, many := range []int{0, 1, 512} {
		for ; tokens < many; tokens++ {
			wantGood(b, "POPULATE TOKEN", populate(n, 0, uint32(tokens%8), blockRange{uint64(tokens), 1}, blockRange{1<<16 + uint64(tokens), 1}))
		}
		b.Run(fmt.Sprintf("tokens=%d", many), func(b *testing.B) {
			x := newTransfer(0x8a, 0, 1<<15, 4096)
			b.ReportAllocs()
			for b.Loop() {
				if !x.run(n, 4096) {
					b.Fatalf("sense % x", x.c.Sense())
				}
			}
		})
	}
	if u.opt.Tokens.Counts().Valid != tokens {
		b.Error("tokens ended")
	}
}
