package lun

import (
	"bytes"
	"fmt"
	"sync"
	"testing"
)

// What the validation of a Windows failover cluster does with the disks it is
// to share. The nodes are a, with its second path b, and c.

const (
	writeExclusiveRO = 5 // Write Exclusive - Registrants Only: a disk of the cluster
	writeExclusiveAR = 7 // Write Exclusive - All Registrants: a disk of a storage pool

	write1 = "2a 00 00000000 00 0001 00"
	read1  = "28 00 00000000 00 0001 00"
)

// Validate SCSI device Vital Product Data: all nodes and paths see the same disk.
func TestWindowsClusterUniqueID(t *testing.T) {
	r := newPRRig(t, setup{})
	for _, page := range []string{"80", "83"} {
		want := r.on(r.a, "12 01 "+page+" 00ff 00", nil).in
		for _, n := range []*Nexus{r.b, r.c} {
			wantBytes(t, r.on(n, "12 01 "+page+" 00ff 00", nil).in, want)
		}
	}
	// A designator of the logical unit of type 3 (NAA) has to be there.
	if page := r.on(r.a, "12 01 83 00ff 00", nil).in; !bytes.Contains(page, append(unhex("01 03 00 08"), testIdentity.NAA[:]...)) {
		t.Errorf("no NAA in % x", page)
	}
}

// Validate SCSI-3 Persistent Reservation: a node registers by all of its paths, reserves,
// defends, and loses the disk to the node that takes over.
func TestWindowsClusterPersistentReservation(t *testing.T) {
	r := newPRRig(t, setup{})
	block := make([]byte, 512)
	r.wantKeys()
	for _, n := range []*Nexus{r.a, r.b} {
		r.ok(n, prRegisterAndIgnore, 0, prList(0, keyA, 0))
	}
	r.wantKeys(keyA, keyA)
	r.ok(r.a, prReserve, writeExclusiveRO, prList(keyA, 0, 0))
	r.wantReservation(writeExclusiveRO, keyA)
	for _, n := range []*Nexus{r.a, r.b} {
		wantGood(t, "WRITE(10) of the owner, by any path", r.on(n, write1, block))
	}

	// The other node reads, but neither writes nor reserves.
	wantGood(t, "READ(10) of the other node", r.on(r.c, read1, nil))
	wantConflict(t, "WRITE(10) of the other node", r.on(r.c, write1, block))
	wantConflict(t, "RESERVE without a registration", r.out(r.c, prReserve, writeExclusiveRO, prList(keyC, 0, 0)))
	wantConflict(t, "RESERVE(6)", r.on(r.c, "16 00 0000 00 00", nil))
	r.ok(r.c, prRegisterAndIgnore, 0, prList(0, keyC, 0))
	wantConflict(t, "RESERVE of a registered node", r.out(r.c, prReserve, writeExclusiveRO, prList(keyC, 0, 0)))
	wantGood(t, "RELEASE of who does not hold", r.out(r.c, prRelease, writeExclusiveRO, prList(keyC, 0, 0)))
	r.wantReservation(writeExclusiveRO, keyA)

	// A reset of the bus does not help it: reservations stay.
	r.c.ResetUnit([8]byte{}, true)
	for _, n := range []*Nexus{r.a, r.b, r.c, r.see} {
		wantSense(t, r.on(n, "00", nil), 0x6, 0x29, 0x03)
	}
	r.wantReservation(writeExclusiveRO, keyA)

	// It takes over: all paths of the owner are out, and hear of it once.
	r.ok(r.c, prPreempt, writeExclusiveRO, prList(keyC, keyA, 0))
	r.wantReservation(writeExclusiveRO, keyC)
	r.wantKeys(keyC)
	for _, n := range []*Nexus{r.a, r.b} {
		r.wantAttention(n, registrationsPreempted)
		wantConflict(t, "WRITE(10) of who has lost the disk", r.on(n, write1, block))
		wantConflict(t, "RESERVE with the old key", r.out(n, prReserve, writeExclusiveRO, prList(keyA, 0, 0)))
	}
	wantGood(t, "WRITE(10) of the new owner", r.on(r.c, write1, block))

	// It comes back, and gets the disk when that is given up.
	r.ok(r.a, prRegisterAndIgnore, 0, prList(0, keyA, 0))
	r.ok(r.c, prRelease, writeExclusiveRO, prList(keyC, 0, 0))
	r.wantAttention(r.a, reservationsReleased)
	r.ok(r.a, prReserve, writeExclusiveRO, prList(keyA, 0, 0))
	r.wantReservation(writeExclusiveRO, keyA)

	// Clear-ClusterDiskReservation.
	r.ok(r.c, prClear, 0, prList(keyC, 0, 0))
	r.wantAttention(r.a, reservationsPreempted)
	r.wantKeys()
	r.wantReservation(0, 0)
	wantGood(t, "WRITE(10) where nothing is reserved", r.on(r.b, write1, block))
}

// Validate disk arbitration: when the owner fails, all other nodes try to take over at once, and
// one succeeds.
func TestWindowsClusterArbitration(t *testing.T) {
	r := newPRRig(t, setup{})
	r.ok(r.a, prRegisterAndIgnore, 0, prList(0, keyA, 0))
	r.ok(r.a, prReserve, writeExclusiveRO, prList(keyA, 0, 0))
	const nodes = 6
	var won [nodes]bool
	var wg sync.WaitGroup
	for i := range nodes {
		n := r.enter(Port{InitiatorName: fmt.Sprintf("iqn.2026-11.io.example:node%d", i), TargetName: testPort.TargetName, TPGT: 1})
		key := uint64(100 + i)
		r.ok(n, prRegisterAndIgnore, 0, prList(0, key, 0))
		wg.Go(func() {
			var c Command
			list := prList(key, keyA, 0)
			won[i] = do(n, &c, [8]byte{}, "5f 04 05 0000 00000018 00", list, all).status == StatusGood
		})
	}
	wg.Wait()
	winner := -1
	for i, w := range won {
		if w && winner >= 0 {
			t.Fatalf("nodes %d and %d have the disk", winner, i)
		}
		if w {
			winner = i
		}
	}
	if winner < 0 {
		t.Fatal("nobody has the disk")
	}
	r.wantReservation(writeExclusiveRO, uint64(100+winner))
}

// Validate Storage Spaces Persistent Reservation: all registered nodes hold the disk, which stays
// reserved until the last of them unregisters.
func TestWindowsClusterStorageSpaces(t *testing.T) {
	r := newPRRig(t, setup{})
	block := make([]byte, 512)
	r.ok(r.a, prRegisterAndIgnore, 0, prList(0, keyA, 0))
	r.ok(r.a, prReserve, writeExclusiveAR, prList(keyA, 0, 0))
	r.wantReservation(writeExclusiveAR, 0)
	wantConflict(t, "WRITE(10) of a node that is not registered", r.on(r.c, write1, block))
	r.ok(r.c, prRegisterAndIgnore, 0, prList(0, keyC, 0))
	for _, n := range []*Nexus{r.a, r.c} {
		wantGood(t, "WRITE(10)", r.on(n, write1, block))
		r.ok(n, prReserve, writeExclusiveAR, prList(map[*Nexus]uint64{r.a: keyA, r.c: keyC}[n], 0, 0)) // holds it already
	}
	// A node is thrown out by the others.
	r.ok(r.c, prPreempt, writeExclusiveAR, prList(keyC, keyA, 0))
	r.wantAttention(r.a, registrationsPreempted)
	wantConflict(t, "WRITE(10) of a node that was thrown out", r.on(r.a, write1, block))
	wantGood(t, "WRITE(10)", r.on(r.c, write1, block))
	r.wantReservation(writeExclusiveAR, 0)
	r.ok(r.c, prRegister, 0, prList(keyC, 0, 0))
	r.wantReservation(0, 0)
	wantGood(t, "WRITE(10) when nobody holds the disk", r.on(r.a, write1, block))
}
