package interop_test

import (
	"fmt"
	"net/url"
	"slices"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/etcdserver"
)

// joined waits until the gateway a has joined under a lease that is none of old, and returns all leases of etcd.
func joined(t *testing.T, m *etcdserver.Member, what string, old []string) []string {
	t.Helper()
	testkit.Eventually(t, what+": the gateway has joined", func() bool {
		l := m.LeaseOf("/iser-target/values/gateways/a")
		return l != "" && !slices.Contains(old, l)
	})
	return m.Leases()
}

// systemd kills the witness as soon as it has noticed the death of the main process. The next process then ends the leases, long before they
// expire, and joins under the same name. A stop leaves none.
func TestSystemdWitness(t *testing.T) {
	v := boot(t)
	need(t, "/lib/systemd/systemd", "etcd")
	member := etcdserver.Start(t, 1)[0]
	u, err := url.Parse(member.Endpoint())
	if err != nil {
		t.Fatal(err)
	}
	way := harness.NewProxy(t)
	way.To(u.Host)
	const lease, limit = time.Minute, 20 * time.Second
	left := func(old []string) (n int) { // leases that etcd still has
		for _, l := range member.Leases() {
			if slices.Contains(old, l) {
				n++
			}
		}
		return n
	}
	m := installService(t, v, serviceConfig+fmt.Sprintf("cluster: {name: a, etcd: [\"http://%s\"], lease: %v}\n", way.Addr(), lease))

	had := joined(t, member, "start", nil)
	for i, what := range []string{"kill -9", "another kill -9", "kill -9 after an upgrade"} {
		if i == 2 {
			m.run(t, "iser-target upgrade", quick)
			had = joined(t, member, "upgrade", had)
		}
		m.run(t, "await pgrep -f 'iser-target witness'", quick)
		begun := time.Now()
		m.run(t, "systemctl kill --signal=KILL --kill-whom=main iser-target.service", quick)
		for left(had) > 0 && time.Since(begun) < limit {
			time.Sleep(10 * time.Millisecond)
		}
		if n := left(had); n > 0 {
			t.Fatalf("%s: %d of %d leases are left after %v", what, n, len(had), limit)
		}
		ended := time.Since(begun)
		had = joined(t, member, what, had)
		t.Logf("%s: the leases had ended %.1f s after the order, and the gateway had joined after %.1f s", what, ended.Seconds(), time.Since(begun).Seconds())
		m.run(t, fmt.Sprintf("await is NRestarts %d\nawait is ActiveState active", i+1), quick)
	}
	m.run(t, `
TIMEFORMAT='%R s'
time systemctl restart iser-target.service`, quick)
	joined(t, member, "restart", had)
	m.run(t, `
TIMEFORMAT='%R s'
time systemctl stop iser-target.service
ls /var/lib/iser-target/leases.* && exit 1
must Result success`, quick)
	if n := len(member.Leases()); n > 0 {
		t.Errorf("%d leases are left after a stop", n)
	}
}
