package lun

import (
	"sync"
	"testing"
)

// counted runs a command like do, with the counts of a transport. It returns the counts of the
// unit for the transport of n.
func (r *rig) counted(n *Nexus, c *Command, cdb string, out []byte, aborted bool) Counts {
	r.t.Helper()
	res := do(n, c, [8]byte{}, cdb, out, all)
	if r.unit.Counts()[n.transport].InFlight != 1 {
		r.t.Error("a command that has not ended is not in flight")
	}
	if !n.Count(c, uint64(res.consumed+len(res.in)), aborted) || n.Count(c, 1, false) {
		r.t.Error("a command does not count once")
	}
	return r.unit.Counts()[n.transport]
}

// forget sets the counts of the unit and of the nexuses to zero. Logins run commands that no test
// counts.
func (r *rig) forget(nexuses ...*Nexus) {
	r.unit.counts = unitCounts{}
	for _, n := range nexuses {
		n.counts = &nexusCounts{}
	}
}

// The nexus and the unit count each outcome in the right place.
func TestCountsOfEachOutcome(t *testing.T) {
	const read, write, unmap = "28000000000000000200", "2a000000000000000200", "42000000000000001800"
	r := newRig(t, setup{})
	other := r.login()
	other.SetTransport(ISER)
	r.forget(r.nexus, other)
	block := make([]byte, 1024)
	want := Counts{}
	check := func(what string, got Counts) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %+v, want %+v", what, got, want)
		}
		if n := r.nexus.Counts(); n != want {
			t.Errorf("%s: nexus %+v, want %+v", what, n, want)
		}
	}
	want.Commands[KindWrite], want.Bytes[KindWrite] = 1, 1024
	check("WRITE", r.counted(r.nexus, &r.c, write, block, false))
	want.Commands[KindRead], want.Bytes[KindRead] = 1, 1024
	check("READ", r.counted(r.nexus, &r.c, read, nil, false))
	want.Aborted, want.Bytes[KindRead] = 1, 2048
	check("aborted READ", r.counted(r.nexus, &r.c, read, nil, true))
	list := make([]byte, 24)
	list[1], list[3] = 22, 16
	want.Commands[KindOther], want.Bytes[KindOther] = 1, 24
	check("UNMAP", r.counted(r.nexus, &r.c, unmap, list, false))
	want.Commands[KindRead], want.CheckConditions[KindRead][keyIllegalRequest] = 2, 1
	check("READ beyond the end", r.counted(r.nexus, &r.c, "28007fffffff00000200", nil, false))

	r.nexus.Refuse(&r.c, Sense{keyAbortedCommand, 0x0c, 0x0d})
	r.nexus.Count(&r.c, 0, false)
	want.Commands[KindRead], want.CheckConditions[KindRead][keyAbortedCommand] = 3, 1
	check("refused READ", r.unit.Counts()[TCP])
	if n := r.unit.Counts()[TCP]; n.Failed() != 2 {
		t.Errorf("%d have failed", n.Failed())
	} else if n.FailedOf(KindRead) != 2 || n.FailedOf(KindWrite) != 0 {
		t.Errorf("%d READs and %d writes have failed", n.FailedOf(KindRead), n.FailedOf(KindWrite))
	}
	attention := Counts{CheckConditions: [Kinds][16]uint64{KindOther: {keyUnitAttention: 1, keyNotReady: 1}}}
	if n := attention.Failed(); n != 1 {
		t.Errorf("%d have failed, where one of two reported a unit attention", n)
	}

	wantGood(t, "RESERVE", do(other, &r.c, [8]byte{}, "160000000000", nil, all))
	other.Count(&r.c, 0, false)
	want.Commands[KindWrite], want.OtherStatuses = 2, 1
	check("conflict", r.counted(r.nexus, &r.c, write, block, false))
	r.nexus.CountResidual(&r.c, true)
	want.Overflows = 1
	check("residual", r.unit.Counts()[TCP])
	if n := r.unit.Counts()[ISER]; n.Commands[KindOther] != 1 || n != other.Counts() {
		t.Errorf("other transport: %+v, its nexus %+v", n, other.Counts())
	}

	// No logical unit: the nexus alone counts.
	before := r.unit.Counts()
	do(r.nexus, &r.c, EncodeLUN(9), read, nil, all)
	r.nexus.Count(&r.c, 0, false)
	want.Commands[KindRead]++
	want.CheckConditions[KindRead][keyIllegalRequest]++
	check("no unit", r.nexus.Counts())
	if r.unit.Counts() != before {
		t.Error("a command for another LUN counts for the unit")
	}
}

// Nexuses that count at the same time lose nothing.
func TestCountsOfManyNexuses(t *testing.T) {
	r := newRig(t, setup{})
	const nexuses, commands = 2*countShards + 1, 50
	var all []*Nexus
	for range nexuses {
		all = append(all, r.login())
	}
	r.forget(all...)
	var wg sync.WaitGroup
	for _, n := range all {
		wg.Go(func() {
			var c Command
			for range commands {
				do(n, &c, [8]byte{}, "28000000000000000100", nil, 512)
				n.Count(&c, 512, false)
			}
		})
	}
	for range 20 {
		if n := r.unit.Counts()[TCP].InFlight; n < 0 {
			t.Errorf("%d in flight", n)
		}
	}
	wg.Wait()
	if n := r.unit.Counts()[TCP]; n.Commands[KindRead] != nexuses*commands || n.Bytes[KindRead] != nexuses*commands*512 || n.InFlight != 0 {
		t.Errorf("%+v", n)
	}
}
