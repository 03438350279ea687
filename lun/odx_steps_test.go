package lun

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/tests/testkit"
)

// third returns a nexus of another initiator, which knows of what has happened.
func (r *odxRig) third() *Nexus {
	r.t.Helper()
	port := testPort
	port.InitiatorName = "iqn.2026-11.io.example:third"
	n := r.inv.NewNexus(port)
	r.settle(n)
	return n
}

// settle takes the unit attentions of n.
func (r *odxRig) settle(n *Nexus) {
	for _, l := range n.list() {
		for do(n, new(Command), EncodeLUN(l.id), "00", nil, all).sense != nil {
		}
	}
}

// An initiator uses a token as it could read the source at that time: masks and reservations hold.
func TestTokenAccess(t *testing.T) {
	r := newODXRig(t, setup{}, setup{})
	r.write(0, 0, pattern(8*512, 1))
	third := r.third()
	token := r.token(0, blockRange{0, 8})
	use := func() result { return writeToken(third, 1, 1, 0, token, blockRange{100, 8}) }
	wantGood(t, "a token of another initiator", use())
	wantBytes(t, r.read(1, 100, 8), pattern(8*512, 1))

	mask := func(lun uint16, m Mask) {
		t.Helper()
		if err := r.inv.SetMask(lun, m); err != nil {
			t.Fatal(err)
		}
		r.settle(third)
	}
	mask(0, maskFor(":third", NoAccess))
	wantToken(t, use(), condTokenUnknown)
	mask(0, maskFor(":third", ReadOnly))
	wantGood(t, "an initiator that may only read the source", use())
	tokenOf(t, third, 0, blockRange{0, 8})
	wantSense(t, writeToken(third, 0, 1, 0, token, blockRange{100, 8}), 0x7, 0x27, 0x00)
	mask(0, nil)
	mask(1, maskFor(":third", ReadOnly))
	wantSense(t, use(), 0x7, 0x27, 0x00)
	mask(1, nil)
	wantGood(t, "an initiator with its rights back", use())

	r.settle(r.nexus)
	on := func(lun byte, cdb string) {
		t.Helper()
		wantGood(t, cdb, do(r.nexus, new(Command), [8]byte{0, lun}, cdb, nil, all))
	}
	on(0, "16")
	wantConflict(t, "a reserved source", use())
	wantConflict(t, "POPULATE TOKEN of a reserved unit", populate(third, 0, 1, blockRange{0, 8}))
	on(0, "17")
	on(1, "16")
	wantConflict(t, "a reserved destination", use())
	on(1, "17")
	wantGood(t, "without a reservation", use())
	r.unit.stopped.Store(true)
	wantTransfer(t, use(), condThirdPartyFailure, 0)
	r.unit.stopped.Store(false)
	wantGood(t, "a started source", use())
	third.Close()
	if u := r.tokens().of[secret(token[256:288])]; u.uses != 0 {
		t.Errorf("%d uses of a token that no command uses", u.uses)
	}
}

// A token of another target is good if the initiator could log in there.
func TestTokensBetweenTargets(t *testing.T) {
	r := newRig(t, setup{})
	f := newForeign(t, r, setup{opt: Options{Tokens: r.unit.opt.Tokens}})
	f.good(extentCDB(0x8a, 0, 7, 8), pattern(8*512, 1))
	token := tokenOf(t, f.nexus, 0, blockRange{7, 8})
	wantGood(t, "WRITE USING TOKEN", writeToken(r.nexus, 0, 1, 0, token, blockRange{100, 8}))
	wantBytes(t, r.good(extentCDB(0x88, 0, 100, 8), nil), pattern(8*512, 1))
	if len(f.closed) != 1 || slices.ContainsFunc(f.closed, func(n *Nexus) bool { _, open := f.inv.nexuses[n]; return open }) {
		t.Errorf("%d nexuses, and not all are closed", len(f.closed))
	}
	f.inv.SetMask(0, func(string) Access { return NoAccess })
	wantToken(t, writeToken(r.nexus, 0, 1, 0, token, blockRange{100, 8}), condTokenUnknown)
	f.inv.SetMask(0, nil)
	wantGood(t, "WRITE USING TOKEN", writeToken(r.nexus, 0, 1, 0, token, blockRange{100, 8}))
	r.nexus.SetOthers(func(func(*Inventory) bool) *Nexus { return nil })
	wantToken(t, writeToken(r.nexus, 0, 1, 0, token, blockRange{100, 8}), condTokenUnknown)
}

// A write to the source in the middle of a step: what the step has read is not written.
func TestChangeDuringTokenStep(t *testing.T) {
	r := newODXRig(t, setup{}, setup{})
	data := pattern(1024*512, 1)
	r.write(0, 0, data)
	token := r.token(0, blockRange{0, 1024})
	reads := 0
	r.store.Hook(func(op backendtest.Op, off, n int64) error {
		if op == backendtest.ReadAt {
			if reads++; reads == 2 { // of 256 KiB
				r.write(0, 700, make([]byte, 512))
			}
		}
		return nil
	})
	res := writeToken(r.nexus, 1, 1, 0, token, blockRange{0, 1024})
	r.store.Hook(nil)
	wantTransfer(t, res, condTokenCancelled, 512)
	if got := r.read(1, 0, 1024); !bytes.Equal(got[:512*512], data[:512*512]) || !bytes.Equal(got[512*512:], make([]byte, 512*512)) {
		t.Error("something was written after the change")
	}
	wantBytes(t, tokenInfo(r.nexus, 1, 1).in[:24], unhex("00000034 11 02 0001 fffffffe 02 14 12 f1 0000000000000200"))
}

// A source or destination that fails, and one that has too little space.
func TestTokenStepFails(t *testing.T) {
	r := newODXRig(t, setup{}, setup{})
	r.write(0, 0, pattern(8*512, 1))
	token := r.token(0, blockRange{0, 8})
	use := func() result { return writeToken(r.nexus, 1, 1, 0, token, blockRange{0, 8}) }
	r.store.Fail(backendtest.ReadAt, backend.ErrRange)
	wantTransfer(t, use(), condThirdPartyFailure, 0)
	r.store.Fail(backendtest.ReadAt, nil)
	r.store.Fail(backendtest.Extent, backend.ErrRange)
	wantTransfer(t, use(), condThirdPartyFailure, 0)
	r.store.Fail(backendtest.Extent, nil)
	r.other.store.Fail(backendtest.WriteAt, backend.ErrNoSpace)
	wantTransfer(t, use(), condSpace, 0)
	r.other.store.Fail(backendtest.WriteAt, nil)
	wantGood(t, "later", use())
}

// A source that hangs holds up nobody at the destination, also when the command is given up, and the other way round.
func TestTokenStepHangs(t *testing.T) {
	for _, hangs := range []string{"source", "destination"} {
		t.Run(hangs, func(t *testing.T) {
			r := newODXRig(t, setup{}, setup{})
			r.write(1, 0, pattern(8*512, 1))
			list := writeList(0, 0, r.token(1, blockRange{0, 8}), blockRange{0, 8})
			store, op := r.other.store, backendtest.ReadAt
			if hangs == "destination" {
				store, op = r.store, backendtest.WriteAt
			}
			gate := store.Shut(op)
			s := r.stuck(r.nexus, gate, tokenCDB(0x11, 1, list), unhex(list))
			neighbour := r.third()
			write := func(lun byte) result {
				return do(neighbour, new(Command), [8]byte{0, lun}, extentCDB(0x8a, 0, 4, 1), make([]byte, 512), all)
			}
			wants := func(lun byte) {
				t.Helper()
				wantGood(t, "COMPARE AND WRITE", do(neighbour, new(Command), [8]byte{0, lun}, "89 00 0000000000000014 000000 01 00 00", make([]byte, 1024), all))
				wantGood(t, "WRITE to what the command uses", write(lun))
			}
			if hangs == "source" {
				wants(0)
			} else {
				wants(1)
			}
			s.detach(t)
			if hangs == "source" {
				wants(0)
				wantGood(t, "WRITE to the source", write(1)) // the command only reads there
			} else {
				wantBusy(t, "the destination", write(0))
				wants(1)
			}
			gate.Open()
			<-s.done
			testkit.Eventually(t, "nothing that holds a unit up", func() bool { return !r.unit.heldUp() && !r.other.unit.heldUp() })
			wantGood(t, "WRITE", write(0))
			if got := r.read(0, 0, 4); hangs == "source" && !bytes.Equal(got, make([]byte, 4*512)) {
				t.Error("an aborted command has written")
			}
		})
	}
}

// A heldToken is a WRITE USING TOKEN of 1 MiB to LUN 0 with IMMED that has written its first step and waits within the second one.
type heldToken struct {
	*odxRig
	let    chan struct{}
	held   atomic.Bool
	octets atomic.Int64
}

func holdToken(t *testing.T) *heldToken {
	t.Helper()
	h := &heldToken{odxRig: newODXRig(t, setup{}, setup{}), let: make(chan struct{})}
	h.write(1, 0, pattern(1<<20, 1))
	token := h.token(1, blockRange{0, 2048})
	h.store.Hook(func(op backendtest.Op, off, n int64) error {
		if op == backendtest.WriteAt {
			if off > 0 {
				h.held.Store(true)
				<-h.let
			}
			h.octets.Add(n)
		}
		return nil
	})
	list := writeList(tokenImmed, 0, token, blockRange{0, 2048})
	wantGood(t, "WRITE USING TOKEN with IMMED", do(h.nexus, new(Command), [8]byte{}, tokenCDB(0x11, 7, list), unhex(list), all))
	testkit.Eventually(t, "the second step", h.held.Load)
	return h
}

// With IMMED the initiator follows the copy by RECEIVE ROD TOKEN INFORMATION.
func TestTokensInBackground(t *testing.T) {
	h := holdToken(t)
	testkit.Eventually(t, "the status of the first step", func() bool { return tokenInfo(h.nexus, 0, 7).in[7] == 1 })
	wantBytes(t, tokenInfo(h.nexus, 0, 7).in, unhex("00000020 11 12 0001 00000064 00 00 00 f1 0000000000000200 0000 000000000000 00000000"))
	wantSense(t, populate(h.nexus, 0, 7, blockRange{0, 1}), 0x5, 0x00, 0x16) // OPERATION IN PROGRESS
	close(h.let)
	var b []byte
	testkit.Eventually(t, "the end", func() bool {
		b = tokenInfo(h.nexus, 0, 7).in
		return b[5] != copyInBackground
	})
	wantBytes(t, b, unhex("00000020 11 01 0004 fffffffe 00 00 00 f1 0000000000000800 0000 000000000000 00000000"))
	if !bytes.Equal(h.read(0, 0, 2048), pattern(1<<20, 1)) {
		t.Error("the copy differs")
	}

	list := populateList(tokenImmed, 0, 0, blockRange{0, 8})
	wantGood(t, "POPULATE TOKEN with IMMED", do(h.nexus, new(Command), [8]byte{}, tokenCDB(0x10, 8, list), unhex(list), all))
	testkit.Eventually(t, "the token", func() bool {
		b = tokenInfo(h.nexus, 0, 8).in
		return b[5] != copyInBackground
	})
	if len(b) != 38+512 {
		t.Errorf("% x", b)
	}
}

// What ends a copy in the background ends it before its answer: nothing is written afterwards.
func TestTokensInBackgroundEnd(t *testing.T) {
	for name, end := range map[string]func(h *heldToken){
		"COPY OPERATION ABORT": func(h *heldToken) { wantGood(h.t, "COPY OPERATION ABORT", h.abort4(7)) },
		"LOGICAL UNIT RESET":   func(h *heldToken) { h.nexus.ResetUnit([8]byte{}, true) },
		"the end of the nexus": func(h *heldToken) { h.nexus.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			h := holdToken(t)
			l := &h.nexus.list()[0].copies
			ended := make(chan int64)
			go func() {
				end(h)
				ended <- h.octets.Load()
			}()
			testkit.Eventually(t, "the request", func() bool {
				l.mu.Lock()
				defer l.mu.Unlock()
				return l.of[7].stop.Load()
			})
			close(h.let)
			written := <-ended
			testkit.Eventually(t, "the end of the copy", func() bool {
				l.mu.Lock()
				defer l.mu.Unlock()
				return l.background == 0
			})
			if got := h.octets.Load(); got != written || got != 512<<10 {
				t.Errorf("%d bytes were written, %d of them after the answer", got, got-written)
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			if got := l.of[7].status; got != copyTerminated {
				t.Errorf("COPY OPERATION STATUS %#x, want %#x", got, copyTerminated)
			}
		})
	}
}

// A reset discards tokens that were not returned (SPC-4, section 6.26), and keeps those that were.
func TestResetAndTokens(t *testing.T) {
	r := newODXRig(t, setup{}, setup{})
	token := r.token(0, blockRange{0, 8})
	wantGood(t, "POPULATE TOKEN", populate(r.nexus, 0, 5, blockRange{0, 8}))
	r.nexus.ResetUnit([8]byte{}, true)
	r.settle(r.nexus)
	wantField(t, tokenInfo(r.nexus, 0, 5), 2, noField)
	wantGood(t, "a token after a reset", writeToken(r.nexus, 1, 1, 0, token, blockRange{0, 8}))
}

// Files copy what tokens stand for, by copy_file_range where the kernel can, and a smaller file cancels tokens.
func TestTokensOfFiles(t *testing.T) {
	c := filePair(t, t.TempDir(), 8<<20)
	tokens := c.inv.Unit(0).opt.Tokens
	c.inv.Unit(1).opt.Tokens = tokens
	r := &odxRig{c}
	data := pattern(4<<20, 1)
	r.write(0, 1, data)
	token := r.token(0, blockRange{0, 8193}, blockRange{9000, 4000})
	wantGood(t, "WRITE USING TOKEN", writeToken(r.nexus, 1, 1, 1, token, blockRange{7, 8192}, blockRange{10000, 100}))
	if !bytes.Equal(r.read(1, 7, 8192), data) || !bytes.Equal(r.read(1, 10000, 100), make([]byte, 100*512)) {
		t.Error("the copy differs")
	}
	if err := c.inv.Unit(0).Resize(4 << 20); err != nil { // 8192 blocks
		t.Fatal(err)
	}
	r.settle(r.nexus)
	wantToken(t, writeToken(r.nexus, 1, 1, 0, token, blockRange{0, 1}), condTokenCancelled)
	inside := r.token(0, blockRange{0, 8000})
	if err := c.inv.Unit(0).Resize(8000 << 9); err != nil {
		t.Fatal(err)
	}
	r.settle(r.nexus)
	wantGood(t, "a token that is still within the unit", writeToken(r.nexus, 1, 1, 0, inside, blockRange{0, 8000}))
}

// Random commands of all kinds: a token writes what was there when it was made, or it fails and writes nothing.
func TestTokenModel(t *testing.T) {
	const blocksOf, rounds = 256, 3000
	for seed := range uint64(4) {
		random := rand.New(rand.NewPCG(seed, 1))
		r := newODXRig(t, setup{size: blocksOf << 9, opt: everything, info: func(i *backend.Info) { i.AtomicWrite = 4096 }}, setup{})
		images := [2][]byte{make([]byte, blocksOf<<9), make([]byte, blocksOf<<9)}
		type snapshot struct {
			token, data []byte
			valid       bool
			lun         int
			ranges      []blockRange
		}
		var tokens []*snapshot
		extent := func() blockRange {
			n := 1 + random.Uint32N(12)
			return blockRange{uint64(random.Uint32N(blocksOf - n)), n}
		}
		disjoint := func() (ranges []blockRange) {
			for range 1 + random.IntN(3) {
				e := extent()
				if !slices.ContainsFunc(ranges, func(o blockRange) bool {
					return o.lba < e.lba+uint64(e.count) && e.lba < o.lba+uint64(o.count)
				}) {
					ranges = append(ranges, e)
				}
			}
			return ranges
		}
		// changed notes a change of the image.
		changed := func(lun int, e blockRange, data []byte) {
			copy(images[lun][e.lba<<9:], data)
			for _, s := range tokens {
				if s.lun == lun && slices.ContainsFunc(s.ranges, func(o blockRange) bool {
					return o.lba < e.lba+uint64(e.count) && e.lba < o.lba+uint64(o.count)
				}) {
					s.valid = false
				}
			}
		}
		of := func(lun int, ranges []blockRange) (data []byte) {
			for _, e := range ranges {
				data = append(data, images[lun][e.lba<<9:][:e.count<<9]...)
			}
			return data
		}
		for round := range rounds {
			lun, e := random.IntN(2), extent()
			data := pattern(int(e.count)<<9, round)
			on := func(cdb string, out []byte) {
				t.Helper()
				wantGood(t, cdb, do(r.nexus, new(Command), [8]byte{0, byte(lun)}, cdb, out, all))
			}
			switch random.IntN(12) {
			case 0:
				on(extentCDB(writeOps[random.IntN(len(writeOps))], 0, e.lba, uint64(e.count)), data)
				changed(lun, e, data)
			case 1:
				on(extentCDB(0x93, 0, e.lba, uint64(e.count)), data[:512])
				changed(lun, e, bytes.Repeat(data[:512], int(e.count)))
			case 2:
				on("42 00 00000000 00 0018 00", unhex(fmt.Sprintf("0016 0010 00000000 %016x %08x 00000000", e.lba, e.count)))
				changed(lun, e, make([]byte, len(data)))
			case 3:
				e.count = min(e.count, 8)
				data = data[:e.count<<9]
				on(fmt.Sprintf("89 00 %016x 000000 %02x 00 00", e.lba, e.count), append(of(lun, []blockRange{e}), data...))
				changed(lun, e, data)
			case 4:
				was := of(lun, []blockRange{e})
				for i := range was {
					was[i] |= data[i]
				}
				on(extentCDB(0x8b, 0, e.lba, uint64(e.count)), data)
				changed(lun, e, was)
			case 5:
				if lun == 0 {
					e.count = min(e.count, 8)
					on(fmt.Sprintf("9c 00 %016x 0000 %04x 00 00", e.lba, e.count), data[:e.count<<9])
					changed(lun, e, data[:e.count<<9])
				}
			case 6:
				to := extent()
				to.count = e.count
				to.lba = min(to.lba, blocksOf-uint64(to.count))
				from := of(1-lun, []blockRange{e})
				list := copyList(1, 3, []string{cscdZero, cscdOne}, []string{blocks(1-lun, lun, int(e.count), e.lba, to.lba)})
				list = "00" + list[2:]
				wantGood(t, "EXTENDED COPY", r.copy(list))
				changed(lun, to, from)
			case 7, 8:
				s := &snapshot{lun: lun, ranges: disjoint(), valid: true}
				s.data = of(lun, s.ranges)
				s.token = r.token(byte(lun), s.ranges...)
				tokens = append(tokens, s)
			default:
				if len(tokens) == 0 {
					continue
				}
				s, ranges := tokens[random.IntN(len(tokens))], disjoint()
				token, want := s.token, s.data
				if random.IntN(8) == 0 {
					token, want = zeroToken, make([]byte, blocksOf<<9)
				}
				total := 0
				for _, e := range ranges {
					total += int(e.count) << 9
				}
				res := writeToken(r.nexus, byte(lun), 1, 0, token, ranges...)
				switch short := total > len(want); {
				case len(want) == len(s.data) && &want[0] == &s.data[0] && !s.valid:
					wantToken(t, res, condTokenCancelled)
					continue
				case res.status == StatusGood && !short:
				case short && res.status == StatusCheckCondition && bytes.Equal(res.sense[12:14], []byte{0x0d, 0x04}):
				case s.lun == lun && res.status == StatusCheckCondition && bytes.Equal(res.sense[12:14], []byte{0x23, 0x00}):
					continue // an exchange
				default:
					t.Fatalf("seed %d, round %d: status %#x, sense % x; %d of %d bytes", seed, round, res.status, res.sense, total, len(want))
				}
				for _, e := range ranges {
					n := min(int(e.count)<<9, len(want))
					if n > 0 {
						changed(lun, blockRange{e.lba, uint32(n >> 9)}, want[:n])
					}
					want = want[n:]
				}
			}
			if round%50 == 0 || round == rounds-1 {
				for lun := range images {
					if got := r.read(byte(lun), 0, blocksOf); !bytes.Equal(got, images[lun]) {
						t.Fatalf("seed %d, round %d: LUN %d differs from the model", seed, round, lun)
					}
				}
			}
		}
		for _, s := range tokens {
			why := condNone
			if !s.valid {
				why = condTokenCancelled
			}
			k, got := r.tokens().use(s.token)
			if got != why {
				t.Errorf("seed %d: a token that is valid %t: %v", seed, s.valid, got)
			}
			if k != nil {
				r.tokens().done(k)
			}
		}
	}
}

// While others write all of the source with one value after another, a token has one value only.
func TestTokensDuringWrites(t *testing.T) {
	const count = 128
	r := newODXRig(t, setup{}, setup{})
	var stop atomic.Bool
	var group sync.WaitGroup
	for w := range 2 {
		n := r.login()
		group.Go(func() {
			for i := w; !stop.Load(); i += 2 {
				// One piece, so that no other command comes between its blocks.
				c := &Command{CDB: unhex(extentCDB(0x8a, 0, 0, count))}
				if n.Begin(c) {
					n.Consume(c, bytes.Repeat([]byte{byte(i)}, count*512), 0)
					n.End(c)
				}
				time.Sleep(time.Duration(i%4) * 100 * time.Microsecond)
			}
		})
	}
	good, cancelled := 0, 0
	for end := time.Now().Add(20 * time.Second); (good < 30 || cancelled < 5) && time.Now().Before(end); {
		if res := populate(r.nexus, 0, 1, blockRange{0, count}); res.status != StatusGood {
			t.Fatalf("POPULATE TOKEN: % x", res.sense)
		}
		token := tokenInfo(r.nexus, 0, 1).in[38:]
		switch res := writeToken(r.nexus, 1, 1, 0, token, blockRange{0, count}); {
		case res.status == StatusGood:
			good++
			if got := r.read(1, 0, count); !bytes.Equal(got, bytes.Repeat(got[:1], len(got))) {
				t.Fatal("a token has parts of two writes")
			}
		case res.sense[12] == 0x23 && res.sense[13] == 0x08:
			cancelled++
		default:
			t.Fatalf("WRITE USING TOKEN: % x", res.sense)
		}
	}
	stop.Store(true)
	group.Wait()
	if good == 0 || cancelled == 0 {
		t.Errorf("%d tokens were used, and %d cancelled", good, cancelled)
	}
}
