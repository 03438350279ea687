package lun

import (
	"testing"
	"time"

	"github.com/iser-target/iser-target/lun/state/etcd"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/etcdserver"
)

// Gateways that share etcd have the same reservations, also after etcd was frozen or killed.
func TestSharedEtcd(t *testing.T) {
	members := etcdserver.Start(t, 1)
	// The leases outlast a machine that stands still.
	gr := &sharedGroup{T: t, ttl: time.Minute, limit: testkit.Patience}
	var g []*sharedGateway
	for i, name := range []string{"x", "y"} {
		home, err := etcd.Open(etcd.Config{Endpoints: etcdserver.Endpoints(members), Prefix: "/test"})
		if err != nil {
			t.Fatal(err)
		}
		defer home.Close()
		x := gr.prepareAt(home, name, uint16(i+1))
		defer x.stop()
		x.serve()
		g = append(g, x)
	}
	a, b := g[0].enter("a"), g[1].enter("b")
	gr.ok(a, prRegister, 0, 0, 1)
	gr.ok(b, prRegister, 0, 0, 2)
	aborted := make(chan struct{}, 1)
	b.OnPreempt(func([8]byte, *Command) { aborted <- struct{}{} })
	for i, fault := range []func(){func() {}, func() { members[0].Freeze(); time.AfterFunc(time.Second, members[0].Thaw) }, func() { members[0].Kill(); members[0].Start(); members[0].WaitHealthy() }} {
		fault()
		for _, g := range g { // their leases may have ended meanwhile
			g.join(g.unit)
		}
		began := time.Now()
		gr.ok(a, prPreemptAndAbort, 3, 1, 2)
		t.Logf("fault %d: PREEMPT AND ABORT took %v", i, time.Since(began))
		select {
		case <-aborted:
		default:
			t.Error("the commands of b have not ended")
		}
		gr.wantDue(b, "2a/05")
		gr.ok(b, prRegister, 0, 0, 2)
		if g[0].has() != g[1].has() {
			t.Errorf("the gateways have %s and %s", g[0].has(), g[1].has())
		}
	}
	began := time.Now()
	const changes = 50
	for range changes / 2 {
		gr.ok(a, prReserve, 3, 1, 0)
		gr.ok(a, prRelease, 3, 1, 0)
	}
	t.Logf("a change took %v", time.Since(began)/changes)
}
