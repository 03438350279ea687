package lun

import (
	"bytes"
	"encoding/binary"
	"errors"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

// A countRig runs a WRITE USING TOKEN of 1 MiB to LUN 0, in steps of 512 blocks.
type countRig struct {
	*odxRig
	token     []byte
	neighbour *Nexus // of another initiator
	abort     atomic.Bool
}

func newCountRig(t *testing.T, one, two setup) *countRig {
	r := &countRig{odxRig: newODXRig(t, one, two)}
	r.neighbour = r.third()
	r.write(1, 0, pattern(1<<20, 1))
	r.token = r.odxRig.token(1, blockRange{0, 2048})
	return r
}

// use executes the command, and calls f after its first step.
func (r *countRig) use(id uint32, f func()) result {
	reads := 0
	r.other.store.Hook(func(op backendtest.Op, _, _ int64) error {
		if op == backendtest.ReadAt {
			if reads++; reads == 2 {
				f()
			}
		}
		return nil
	})
	defer r.other.store.Hook(nil)
	list := writeList(0, 0, r.token, blockRange{0, 2048})
	return do(r.nexus, &Command{Abort: &r.abort}, [8]byte{}, tokenCDB(0x11, id, list), unhex(list), all)
}

// wantCount checks COPY OPERATION STATUS, the status of the command and TRANSFER COUNT of RECEIVE ROD TOKEN INFORMATION.
func (r *countRig) wantCount(id uint32, operation, status byte, blocks uint64) {
	r.t.Helper()
	res := tokenInfo(r.nexus, 0, id)
	wantGood(r.t, "RECEIVE ROD TOKEN INFORMATION", res)
	b := res.in
	if got := binary.BigEndian.Uint64(b[16:]); b[5] != operation || b[12] != status || b[15] != countBlocks || got != blocks {
		r.t.Errorf("COPY OPERATION STATUS %#x, status %#x, %d blocks in units %#x; want %#x, %#x, %d, %#x", b[5], b[12], got, b[15], operation, status, blocks, countBlocks)
	}
}

// Whatever ends a WRITE USING TOKEN at its destination, the initiator learns how many blocks were transferred without error, in the
// sense data and from RECEIVE ROD TOKEN INFORMATION.
func TestTransferCounts(t *testing.T) {
	fails := func(err error) func(*countRig) {
		return func(r *countRig) { r.store.Fail(backendtest.WriteAt, err) }
	}
	for name, s := range map[string]struct {
		end       func(r *countRig) // after 512 blocks
		want      Sense             // condNone: BUSY
		operation byte
	}{
		"no space":             {fails(backend.ErrNoSpace), condSpace, copyFailed},
		"a read-only store":    {fails(syscall.EROFS), condWriteProtected, copyFailed},
		"an error":             {fails(syscall.EIO), condWriteError, copyFailed},
		"a wrong checksum":     {fails(&backend.CorruptError{Offset: 1024}), condReadError, copyFailed},
		"a smaller unit":       {fails(backend.ErrRange), condLBARange, copyFailed},
		"a closed store":       {fails(backend.ErrClosed), condInternal, copyFailed},
		"a stopped unit":       {func(r *countRig) { r.unit.stopped.Store(true) }, condThirdPartyFailure, copyFailed},
		"a mask":               {func(r *countRig) { r.inv.SetMask(0, maskFor(":host", ReadOnly)) }, condThirdPartyFailure, copyFailed},
		"a reservation":        {func(r *countRig) { do(r.neighbour, new(Command), [8]byte{}, "16", nil, all) }, condThirdPartyFailure, copyFailed},
		"ABORT TASK":           {func(r *countRig) { r.abort.Store(true) }, condAborted, copyTerminated},
		"COPY OPERATION ABORT": {func(r *countRig) { wantGood(t, "COPY OPERATION ABORT", r.abort4(9)) }, condCopyStopped, copyTerminated},
		"a unit held up":       {func(r *countRig) { r.unit.detachedIn.Add(1) }, condNone, copyFailed},
	} {
		t.Run(name, func(t *testing.T) {
			r := newCountRig(t, setup{}, setup{})
			res := r.use(9, func() { s.end(r) })
			r.unit.stopped.Store(false)
			if r.unit.detachedIn.Swap(0); s.want == condNone {
				wantBusy(t, "WRITE USING TOKEN", res)
			} else {
				wantTransfer(t, res, s.want, 512)
			}
			do(r.neighbour, new(Command), [8]byte{}, "17", nil, all)
			r.settle(r.nexus)
			status := res.status
			if s.operation == copyTerminated {
				status = StatusTaskAborted
			}
			r.wantCount(9, s.operation, status, 512)
		})
	}
}

// A SANITIZE or FORMAT UNIT of the destination ends a WRITE USING TOKEN as it ends other writes, and one of the source cancels the token.
func TestTransferCountsOfSanitize(t *testing.T) {
	for _, s := range []struct {
		name, cdb string
		lun       byte
		want      Sense
	}{
		{"SANITIZE of the destination", "48 83 0000000000 0000 00", 0, condSanitizing},
		{"FORMAT UNIT of the destination", "04 10 0000 00 00", 0, condFormatting},
		{"SANITIZE of the source", "48 83 0000000000 0000 00", 1, condTokenCancelled},
		{"FORMAT UNIT of the source", "04 10 0000 00 00", 1, condTokenCancelled},
	} {
		t.Run(s.name, func(t *testing.T) {
			r := newCountRig(t, setup{opt: everything}, setup{opt: everything})
			unit, store := r.unit, r.store
			if s.lun == 1 {
				unit, store = r.other.unit, r.other.store
			}
			var gate *backendtest.Gate
			res := r.use(9, func() {
				gate = store.Shut(backendtest.WriteAt, backendtest.Zero, backendtest.Discard)
				wantGood(t, s.name, do(r.nexus, new(Command), [8]byte{0, s.lun}, s.cdb, unhex("00 02 0000"), all))
			})
			running := unit.isSanitizing()
			gate.Open()
			if !running {
				t.Fatal("the medium was erased before the next step")
			}
			blocks := uint32(512)
			if s.lun == 0 {
				if res.sense[15] != 0x80 { // SKSV: the progress
					t.Errorf("no progress: % x", res.sense)
				}
				clear(res.sense[15:])
			}
			wantTransfer(t, res, s.want, blocks)
			<-unit.sanitizer.run.done
			r.settle(r.nexus)
			r.wantCount(9, copyFailed, StatusCheckCondition, uint64(blocks))
			if s.lun == 1 {
				wantToken(t, r.use(9, func() {}), condTokenCancelled)
			}
		})
	}
}

// Without a write cache, an initiator that continues behind the blocks that were transferred loses none of them to a power cut.
func TestTransferCountsAreDurable(t *testing.T) {
	lost := errors.New("a device that loses its cache")
	for _, s := range []struct {
		name   string
		end    func(r *countRig)
		want   Sense
		blocks uint32
		syncs  int
	}{
		{"an error", func(r *countRig) { r.store.Fail(backendtest.WriteAt, syscall.EIO) }, condWriteError, 512, 1},
		{"COPY OPERATION ABORT", func(r *countRig) { wantGood(t, "COPY OPERATION ABORT", r.abort4(9)) }, condCopyStopped, 512, 1},
		{"ABORT TASK", func(r *countRig) { r.abort.Store(true) }, condAborted, 0, 0},
		{"an error, and none of sync", func(r *countRig) {
			r.store.Fail(backendtest.WriteAt, syscall.EIO)
			r.store.Fail(backendtest.Sync, lost)
		}, condWriteError, 0, 1},
		{"an error of sync", func(r *countRig) { r.store.Fail(backendtest.Sync, lost) }, condWriteError, 0, 1},
		{"a failure of sync", func(r *countRig) { r.store.Fail(backendtest.Sync, backend.ErrUnsynced) }, condUnsynced, 0, 1},
	} {
		t.Run(s.name, func(t *testing.T) {
			r := newCountRig(t, setup{info: volatile}, setup{})
			r.unit.mode.Store(r.unit.mode.Load() &^ modeWCE)
			syncs := r.store.Calls(backendtest.Sync)
			res := r.use(9, func() { s.end(r) })
			wantTransfer(t, res, s.want, s.blocks)
			if got := r.store.Calls(backendtest.Sync) - syncs; got != s.syncs {
				t.Errorf("%d calls of Sync, want %d", got, s.syncs)
			}
			operation, status := byte(copyFailed), res.status
			if s.want == condCopyStopped || s.want == condAborted {
				operation, status = copyTerminated, StatusTaskAborted
			}
			r.wantCount(9, operation, status, uint64(s.blocks))
		})
	}
}

// A WRITE USING TOKEN that writes from its end to its beginning has transferred nothing in order until it has ended.
func TestTransferCountOfABackwardWrite(t *testing.T) {
	r := newODXRig(t, setup{}, setup{})
	r.write(0, 0, pattern(1<<20, 1))
	token := r.token(0, blockRange{0, 1500})
	writes := 0
	r.store.Hook(func(op backendtest.Op, _, _ int64) error {
		if op == backendtest.WriteAt {
			if writes++; writes == 2 {
				return syscall.EIO
			}
		}
		return nil
	})
	res := writeToken(r.nexus, 0, 9, 0, token, blockRange{100, 1500})
	r.store.Hook(nil)
	wantTransfer(t, res, condWriteError, 0)
	if writes != 2 {
		t.Errorf("%d writes, want 2", writes)
	}
	(&countRig{odxRig: r}).wantCount(9, copyFailed, StatusCheckCondition, 0)
}

// A command that is refused takes the place of the one before with its list identifier, whose outcome is not taken for its own.
func TestRefusedCommandsHaveNoOutcome(t *testing.T) {
	r := newODXRig(t, setup{}, setup{})
	token := r.token(0, blockRange{0, 8})
	used := func() {
		t.Helper()
		wantGood(t, "WRITE USING TOKEN", writeToken(r.nexus, 0, 9, 0, token, blockRange{100, 8}))
	}
	used()
	(&countRig{odxRig: r}).wantCount(9, copyGood, StatusGood, 8)
	for name, refused := range map[string]func() result{
		"WRITE USING TOKEN":      func() result { return writeToken(r.nexus, 0, 9, 8, token, blockRange{100, 8}) },
		"a short list":           func() result { return do(r.nexus, new(Command), [8]byte{}, tokenCDB(0x11, 9, "00"), unhex("00"), all) },
		"POPULATE TOKEN":         func() result { return populate(r.nexus, 0, 9, blockRange{0, 1 << 20}) },
		"EXTENDED COPY(LID4)":    func() result { return r.copy4(copyList4(9, 2, 0, []string{cscdZero}, []string{blocks(0, 2, 1, 0, 0)})) },
		"EXTENDED COPY(LID1)":    func() result { return r.copy(copyList(9, 2, []string{cscdZero}, []string{blocks(0, 2, 1, 0, 0)})) },
		"of another list":        func() result { return writeToken(r.nexus, 0, 10, 8, token, blockRange{100, 8}) },
		"without an identifier":  func() result { return r.copy4(copyList4(0, 3, 0, []string{cscdZero}, []string{blocks(0, 2, 1, 0, 0)})) },
		"of another LUN":         func() result { return writeToken(r.nexus, 1, 9, 8, token, blockRange{100, 8}) },
		"of another initiator":   func() result { return writeToken(r.third(), 0, 9, 8, token, blockRange{100, 8}) },
		"of an identifier alike": func() result { return writeToken(r.nexus, 0, 9<<8, 8, token, blockRange{100, 8}) },
	} {
		used()
		if res := refused(); res.status != StatusCheckCondition {
			t.Errorf("%s: status %#x", name, res.status)
		}
		switch res := tokenInfo(r.nexus, 0, 9); name {
		case "of another list", "without an identifier", "of another LUN", "of another initiator", "of an identifier alike":
			wantGood(t, name, res)
		default:
			t.Log(name)
			wantField(t, res, 2, noField)
		}
	}
}

// A copy does not continue on a medium that was erased meanwhile, also if that is over when its next step begins.
func TestCopiesEndWithErasure(t *testing.T) {
	for name, cdb := range map[string]string{"SANITIZE": "48 03 0000000000 0000 00", "FORMAT UNIT": "04 00 0000 00 00"} {
		t.Run(name, func(t *testing.T) {
			r := newCountRig(t, setup{opt: everything}, setup{})
			res := r.use(9, func() { wantGood(t, name, do(r.nexus, new(Command), [8]byte{}, cdb, nil, all)) })
			if r.unit.isSanitizing() {
				t.Fatal("the erasure is in progress")
			}
			wantTransfer(t, res, condThirdPartyFailure, 512)
			if !bytes.Equal(r.read(0, 0, 2048), make([]byte, 1<<20)) {
				t.Error("something was written after the erasure")
			}
			r.wantCount(9, copyFailed, StatusCheckCondition, 512)
			wantGood(t, "WRITE USING TOKEN", r.use(9, func() {}))
		})
	}
	for _, of := range []string{"source", "destination"} {
		t.Run("EXTENDED COPY, "+of, func(t *testing.T) {
			r := newODXRig(t, setup{}, setup{})
			r.write(1, 0, pattern(4*512, 1))
			erased := r.unit
			if of == "source" {
				erased = r.other.unit
			}
			r.store.Hook(func(op backendtest.Op, _, _ int64) error {
				if op == backendtest.WriteAt {
					erased.sanitizer.begun.Add(1) // the step holds its range; an erasure is over before the next step
				}
				return nil
			})
			list := copyList(1, 2, []string{cscdZero, cscdOne}, []string{blocks(1, 0, 2, 0, 0), blocks(1, 0, 2, 2, 2)})
			wantCopyAborted(t, r.copy(list), 0x0d, 0x01, 1)
			r.store.Hook(nil)
			wantBytes(t, r.read(0, 2, 2), make([]byte, 2*512))
			wantGood(t, "EXTENDED COPY", r.copy(list))
		})
	}
}
