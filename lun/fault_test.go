package lun

import (
	"errors"
	"fmt"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

// Every failure of a store is reported: every command, with every call that it makes and every
// error in the contract of backend.Store.
func TestEveryStoreFailureIsReported(t *testing.T) {
	cache := setup{info: volatile}
	through := setup{info: volatile, opt: Options{WriteThrough: true}}
	block := pattern(512, 1)
	zeros := make([]byte, 512)
	unmap := unhex("0016 0010 00000000  0000000000000000 00000008 00000000")
	type sense [3]byte
	changes := map[error]sense{
		syscall.EROFS:       {0x7, 0x27, 0x00}, // WRITE PROTECTED
		backend.ErrNoSpace:  {0x7, 0x27, 0x07}, // SPACE ALLOCATION FAILED WRITE PROTECT
		backend.ErrReadOnly: {0x7, 0x27, 0x00},
		backend.ErrUnsynced: {0x4, 0x0c, 0x00}, // no retry helps
		backend.ErrClosed:   {0x4, 0x44, 0x00},
		syscall.EIO:         {0x3, 0x0c, 0x00},
	}
	reads := map[error]sense{
		backend.ErrClosed: {0x4, 0x44, 0x00},
		syscall.EIO:       {0x3, 0x11, 0x00}, // UNRECOVERED READ ERROR
	}
	for _, s := range []struct {
		name  string
		setup setup
		cdb   string
		out   []byte
		op    backendtest.Op
		want  map[error]sense
	}{
		{"READ(6)", cache, extentCDB(0x08, 0, 0, 1), nil, backendtest.ReadAt, reads},
		{"READ(10)", cache, extentCDB(0x28, 0, 0, 1), nil, backendtest.ReadAt, reads},
		{"READ(16) FUA", cache, extentCDB(0x88, fua, 0, 1), nil, backendtest.Sync, changes},
		{"WRITE(6)", cache, extentCDB(0x0a, 0, 0, 1), block, backendtest.WriteAt, changes},
		{"WRITE(10)", cache, extentCDB(0x2a, 0, 0, 1), block, backendtest.WriteAt, changes},
		{"WRITE(12) FUA", cache, extentCDB(0xaa, fua, 0, 1), block, backendtest.WriteDurable, changes},
		{"WRITE(16), write-through", through, extentCDB(0x8a, 0, 0, 1), block, backendtest.WriteDurable, changes},
		{"SYNCHRONIZE CACHE(10)", cache, extentCDB(0x35, 0, 0, 0), nil, backendtest.Sync, changes},
		{"SYNCHRONIZE CACHE(10) IMMED", cache, extentCDB(0x35, 2, 0, 0), nil, backendtest.Sync, changes},
		{"SYNCHRONIZE CACHE(16), write-through", through, extentCDB(0x91, 0, 0, 0), nil, backendtest.Sync, changes},
		{"WRITE SAME(10)", cache, extentCDB(0x41, 0, 0, 8), block, backendtest.WriteAt, changes},
		{"WRITE SAME(16) zeros", cache, extentCDB(0x93, 0, 0, 8), zeros, backendtest.Zero, changes},
		{"WRITE SAME(16) UNMAP", cache, extentCDB(0x93, 8, 0, 8), zeros, backendtest.Discard, changes},
		{"WRITE SAME(16), write-through", through, extentCDB(0x93, 0, 0, 8), block, backendtest.Sync, changes},
		{"UNMAP", cache, "42 00 00000000 00 0018 00", unmap, backendtest.Discard, changes},
		{"UNMAP, write-through", through, "42 00 00000000 00 0018 00", unmap, backendtest.Sync, changes},
		{"VERIFY(10)", cache, extentCDB(0x2f, 0, 0, 1), nil, backendtest.ReadAt, reads},
		{"VERIFY(10) BYTCHK 01b", cache, extentCDB(0x2f, 2, 0, 1), zeros, backendtest.ReadAt, reads},
		{"VERIFY(16) BYTCHK 11b", cache, extentCDB(0x8f, 6, 0, 4), zeros, backendtest.ReadAt, reads},
		{"WRITE AND VERIFY(10)", cache, extentCDB(0x2e, 0, 0, 1), block, backendtest.WriteDurable, changes},
		{"WRITE AND VERIFY(12), reading back", cache, extentCDB(0xae, 0, 0, 1), block, backendtest.ReadAt, reads},
		{"WRITE AND VERIFY(16) BYTCHK, reading back", cache, extentCDB(0x8e, 2, 0, 1), block, backendtest.ReadAt, reads},
		{"ORWRITE(16), reading", cache, extentCDB(0x8b, 0, 0, 1), block, backendtest.ReadAt, reads},
		{"ORWRITE(16)", cache, extentCDB(0x8b, 0, 0, 1), block, backendtest.WriteAt, changes},
		{"COMPARE AND WRITE, reading", cache, extentCDB(0x89, 0, 9, 1), make([]byte, 1024), backendtest.ReadAt, reads},
		{"COMPARE AND WRITE", cache, extentCDB(0x89, 0, 9, 1), make([]byte, 1024), backendtest.WriteAt, changes},
		{"WRITE ATOMIC(16), reading", cache, extentCDB(0x9c, 0, 0, 1), block, backendtest.ReadAt, reads},
		{"WRITE ATOMIC(16), nor what was there again", cache, extentCDB(0x9c, 0, 0, 1), block, backendtest.WriteAt, map[error]sense{
			backend.ErrNoSpace:  {0x3, 0x0c, 0x00},
			backend.ErrReadOnly: {0x7, 0x27, 0x00}, // nothing was written
			backend.ErrClosed:   {0x4, 0x44, 0x00},
		}},
		{"WRITE ATOMIC(16) FUA", cache, extentCDB(0x9c, fua, 0, 1), block, backendtest.WriteDurable, changes},
		{"PRE-FETCH(10)", cache, extentCDB(0x34, 0, 0, 1), nil, backendtest.Prefetch, reads},
		{"GET LBA STATUS", cache, "9e 12 0000000000000000 00000018", nil, backendtest.Extent, reads},
		{"stop", cache, "1b", nil, backendtest.Sync, changes},
	} {
		t.Run(s.name, func(t *testing.T) {
			r := newRig(t, s.setup)
			for err, want := range s.want {
				r.store.Fail(s.op, fmt.Errorf("injected: %w", err))
				wantSense(t, r.run(s.cdb, s.out), want[0], want[1], want[2])
				r.store.Fail(s.op, nil)
				r.good("00", nil) // also after a stop that failed
			}
			r.good(s.cdb, s.out)
		})
	}
}

// A transfer that fails in its second piece ends there.
func TestTransferEndsAtFailedPiece(t *testing.T) {
	r := newRig(t, setup{})
	fail := func(at backendtest.Op) func(op backendtest.Op, off, n int64) error {
		return func(op backendtest.Op, off, n int64) error {
			if op == at && off >= 4096 {
				return errors.New("injected")
			}
			return nil
		}
	}
	r.store.Hook(fail(backendtest.WriteAt))
	res := r.run(extentCDB(0x2a, 0, 0, 64), pattern(64*512, 1))
	wantSense(t, res, 0x3, 0x0c, 0x00)
	if n := r.store.Calls(backendtest.WriteAt); res.consumed != 4096 || n != 2 {
		t.Errorf("%d bytes in %d writes, want 4096 in 2", res.consumed, n)
	}
	r.store.Hook(fail(backendtest.ReadAt))
	res = r.run(extentCDB(0x28, 0, 0, 64), nil)
	wantSense(t, res, 0x3, 0x11, 0x00)
	wantBytes(t, res.in, pattern(64*512, 1)[:4096])
}

// UNMAP stops at the first range that fails.
func TestUnmapStopsAtFailedRange(t *testing.T) {
	r := newRig(t, setup{})
	r.good(extentCDB(0x2a, 0, 0, 3), pattern(3*512, 1))
	r.store.Hook(func(op backendtest.Op, off, _ int64) error {
		if op == backendtest.Discard && off == 512 {
			return syscall.EIO
		}
		return nil
	})
	list := unhex("0036 0030 00000000  0000000000000000 00000001 00000000" +
		"0000000000000001 00000001 00000000  0000000000000002 00000001 00000000")
	wantSense(t, r.run("42 00 00000000 00 0038 00", list), 0x3, 0x0c, 0x00)
	want := pattern(3*512, 1)
	clear(want[:512])
	wantBytes(t, r.good(extentCDB(0x28, 0, 0, 3), nil), want)
}

// The inventory closes every unit and returns every failure.
func TestCloseReturnsEveryFailure(t *testing.T) {
	r, other := newRig(t, setup{}), newRig(t, setup{})
	r.add(1, other.unit)
	r.store.Fail(backendtest.Close, backend.ErrUnsynced)
	other.store.Fail(backendtest.Close, syscall.EIO)
	err := r.inv.Close()
	if !errors.Is(err, backend.ErrUnsynced) || !errors.Is(err, syscall.EIO) {
		t.Errorf("error %v, want both", err)
	}
	wantSense(t, r.run(extentCDB(0x28, 0, 0, 1), nil), 0x4, 0x44, 0x00)
	wantSense(t, r.run(extentCDB(0x2a, 0, 0, 1), make([]byte, 512)), 0x4, 0x44, 0x00)
}
