package daemon

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// Explain agrees with a login for every rule of access.
func TestExplainAgreesWithLogin(t *testing.T) {
	d := serve(t, accessConfig)
	for _, r := range accessRules {
		if r.target == "" || r.auth != nil || r.host == "host*" {
			continue // discovery, and rules that Explain cannot check
		}
		host := r.host
		if host == "" {
			host = "host1"
		}
		e := d.Explain(prefix+host, prefix+r.target, d.State().Portals[r.portal].Address, "127.0.0.1")
		status := r.status.String()
		if r.name == "CHAP is required" { // Explain assumes the right secret
			status = pdu.LoginSuccess.String()
		}
		if e.Status != status || e.Admitted != (status == pdu.LoginSuccess.String()) || len(e.Rules) == 0 {
			t.Errorf("%s: %+v, want %s", r.name, e, status)
		}
		var luns []string
		for _, v := range e.LUNs {
			if a := map[string]string{"read and write": "write", "read only": "read"}[v.Access]; a != "" {
				luns = append(luns, fmt.Sprintf("%d:%s", v.ID, a))
			}
		}
		if got := strings.Join(luns, " "); r.luns != "" && got != r.luns {
			t.Errorf("%s: LUNs %s, want %s", r.name, got, r.luns)
		}
	}
}

// A portal on all addresses of the machine is found by each of them.
func TestExplainFindsWildcardPortal(t *testing.T) {
	l := newLab(t, func(l *lab) { l.portals = `{listen: "0.0.0.0:0"}` })
	_, port, err := net.SplitHostPort(l.addr())
	if err != nil {
		t.Fatal(err)
	}
	for portal, admitted := range map[string]bool{
		"0.0.0.0:0": true, "0.0.0.0:" + port: true, "127.0.0.1:" + port: true, "192.0.2.7:" + port: true,
		"127.0.0.1:1": false, "127.0.0.1": false,
	} {
		if e := l.Explain(prefix+"host", store, portal, ""); e.Admitted != admitted {
			t.Errorf("portal %s: %+v", portal, e)
		}
	}
}
