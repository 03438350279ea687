package cli

import (
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// doctor reports a disk that does not answer, and does not wait for it.
func TestDoctorReportsAStuckDisk(t *testing.T) {
	gate, was := make(chan struct{}), useOf
	back := make(chan struct{})
	useOf = func(path string) (fileUse, error) {
		if path == "/dead" {
			defer close(back)
			<-gate
		}
		return was(path)
	}
	defer func() {
		close(gate)
		<-back
		useOf = was
	}()
	list := checkSpace(&schema.State{Targets: []schema.TargetState{{LUNs: []schema.LUNState{
		{Backend: "memory"}, {Backend: "file", Path: "/none"}, {Backend: "file", Path: "/dead"}, {Backend: "file", Path: "/behind"},
	}}}}, 50*time.Millisecond)
	if len(list) != 1 || list[0].Severity != problem || list[0].About != "disk of /dead" || !strings.Contains(list[0].Text, "does not answer within 50ms") {
		t.Errorf("findings %+v", list)
	}
}

// doctor names connections without CRCs, unless nothing on the way can change data, or ESP would notice.
func TestDoctorNamesConnectionsWithoutCRCs(t *testing.T) {
	connection := func(remote string, crc bool, suite string) schema.ConnectionState {
		c := schema.ConnectionState{Remote: remote, Framing: &schema.FramingState{CRC: crc}}
		if suite != "" {
			c.IPsec = &schema.ConnectionProtection{Suite: suite}
		}
		return c
	}
	list := checkCRCs(&schema.State{Sessions: []schema.SessionState{
		{TSIH: 1, Connections: []schema.ConnectionState{connection("192.0.2.1:40000", true, "")}},
		{TSIH: 2, Connections: []schema.ConnectionState{connection("127.0.0.1:40000", false, ""), connection("[::1]:40000", false, "")}},
		{TSIH: 3, Connections: []schema.ConnectionState{connection("192.0.2.1:40001", false, "esp-tunnel aes128gcm16 esn")}},
		{TSIH: 4, Connections: []schema.ConnectionState{{Remote: "192.0.2.1:40002"}}}, // over TCP
		{TSIH: 5, Connections: []schema.ConnectionState{connection("192.0.2.1:40003", false, "")}},
	}})
	if len(list) != 1 || list[0].Severity != warning || list[0].About != "session 5" ||
		list[0].Text != "has no CRCs on its connection from 192.0.2.1:40003" {
		t.Errorf("findings %+v", list)
	}
}

// doctor names certificates that expire within 30 days, and those that have.
func TestDoctorNamesCertificatesThatExpire(t *testing.T) {
	now := time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)
	st := &schema.State{}
	if got := checkCertificates(st, now); len(got) != 0 {
		t.Errorf("without certificates: %+v", got)
	}
	for _, days := range []int{29, -1, 31} {
		st.Certificates = append(st.Certificates, schema.CertificateState{
			Key: "control.tls.cert", Path: "/a.pem", Subject: "CN=a", Expires: now.AddDate(0, 0, days),
		})
	}
	got := checkCertificates(st, now)
	if len(got) != 2 || got[0].Severity != warning || got[0].Text != "/a.pem of CN=a expires at 2026-11-30T00:00:00Z" ||
		got[1].Severity != problem || got[1].Text != "/a.pem of CN=a has expired at 2026-10-31T00:00:00Z" {
		t.Errorf("findings %+v", got)
	}
	list := schema.CertificateState{Key: schema.RevocationKey, Path: "/crl.pem", Subject: "CN=a", Expires: now.Add(25 * time.Hour)}
	st.Certificates = append(st.Certificates[2:], list) // renewed each week, perhaps
	if got := checkCertificates(st, now); len(got) != 1 || got[0].Severity != fine {
		t.Errorf("with a certificate of 31 days, and a list of 25 hours: %+v", got)
	}
	st.Certificates[1].Expires = now.Add(23 * time.Hour)
	if got := checkCertificates(st, now); len(got) != 1 || got[0].Severity != warning || !strings.HasPrefix(got[0].Text, "/crl.pem of CN=a expires") {
		t.Errorf("with a list of 23 hours: %+v", got)
	}
}

// What clusterFindings says of a group.
func TestClusterFindings(t *testing.T) {
	good := func() *schema.ClusterState {
		return &schema.ClusterState{Name: "a", Gateways: []schema.GatewayState{{Name: "a"}, {Name: "b"}}, LUNs: []schema.SharedLUNState{{Target: "t", ID: 1, Owner: "b"}}}
	}
	for name, tt := range map[string]struct {
		change func(*schema.ClusterState)
		want   string
	}{
		"well":     {func(*schema.ClusterState) {}, "ok: 2 gateways, and shared LUNs 1"},
		"no etcd":  {func(s *schema.ClusterState) { s.Reason = "it is down"; s.Gateways = nil }, "problem: this gateway serves no shared LUN: it is down"},
		"conflict": {func(s *schema.ClusterState) { s.Conflict = "one portal group" }, "problem: one portal group"},
		"no owner": {func(s *schema.ClusterState) { s.LUNs[0].Owner = "" }, "problem: no gateway serves LUN 1 of t"},
		"alone":    {func(s *schema.ClusterState) { s.Gateways = s.Gateways[:1] }, "warning: 1 gateway takes LUNs, so that nobody takes over if it ends"},
		"draining": {func(s *schema.ClusterState) { s.Gateways[1].Draining = true }, "warning: 1 gateway takes LUNs, so that nobody takes over if it ends"},
		"an old configuration": {func(s *schema.ClusterState) { s.Gateways[1].Config, s.Gateways[1].ConfigReason = 7, "it lacks a file" },
			"problem: gateway b runs configuration 7 of the cluster, and cannot apply a newer one: it lacks a file"},
		"unable": {func(s *schema.ClusterState) { s.Gateways[1].Unable = 3 }, "warning: gateway b cannot serve 3 LUNs"},
	} {
		t.Run(name, func(t *testing.T) {
			s := good()
			tt.change(s)
			list := clusterFindings(s)
			if len(list) != 1 || list[0].Severity+": "+list[0].Text != tt.want || list[0].About != "cluster" {
				t.Errorf("findings %+v, want %q", list, tt.want)
			}
		})
	}
}
