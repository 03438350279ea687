package main

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/iscsi/initiator"
	iserinitiator "github.com/iser-target/iser-target/iser/initiator"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/tests/testkit"
)

// The settings of mpa reach the streams of sessions that log in after a change, and session show has what MPA has agreed on. The loopback has
// segments of more than 16 KiB, so there auto asks for no CRCs: TestSegments in tests/interop has Ethernet.
func TestFramingOfSessions(t *testing.T) {
	s := newStation(t)
	base := s.text(t)
	for i, tt := range []struct {
		name, mpa string
		initiator iserinitiator.Transport
		want      schema.FramingState
	}{
		{"the initiator asks for CRCs", "", iserinitiator.Transport{}, schema.FramingState{CRC: true, ORD: 32}},
		{"nobody asks", "", iserinitiator.Transport{RDMA: rdma.Options{NoCRC: true}}, schema.FramingState{ORD: 32}},
		{"MPA-4.4-5 the target asks", "mpa: {crc: on}", iserinitiator.Transport{RDMA: rdma.Options{NoCRC: true}}, schema.FramingState{CRC: true, ORD: 32}},
		{"the target does not ask", "mpa: {crc: off}", iserinitiator.Transport{RDMA: rdma.Options{NoCRC: true}}, schema.FramingState{ORD: 32}},
		{"MPA-4.4-5 only the initiator asks", "mpa: {crc: off}", iserinitiator.Transport{}, schema.FramingState{CRC: true, ORD: 32}},
		{"Markers to the target", "mpa: {markers: on}", iserinitiator.Transport{}, schema.FramingState{CRC: true, MarkersIn: true, ORD: 32}},
		{"Markers to the initiator", "", iserinitiator.Transport{RDMA: rdma.Options{Markers: true}}, schema.FramingState{CRC: true, MarkersOut: true, ORD: 32}},
		{"Markers in both directions", "mpa: {markers: on}", iserinitiator.Transport{RDMA: rdma.Options{Markers: true}},
			schema.FramingState{CRC: true, MarkersIn: true, MarkersOut: true, ORD: 32}},
		{"no IRD is stated", "", iserinitiator.Transport{RDMA: rdma.Options{Rev: 1}}, schema.FramingState{CRC: true, ORD: 1}},
		{"no IRD is stated, and the administrator knows more", "mpa: {unstated_ord: 4}", iserinitiator.Transport{RDMA: rdma.Options{Rev: 1}},
			schema.FramingState{CRC: true, ORD: 4}},
		{"the Hello states the IRD", "", iserinitiator.Transport{Hello: true, RDMA: rdma.Options{Rev: 1, IRD: 7}}, schema.FramingState{CRC: true, ORD: 7}},
		{"a small IRD", "mpa: {unstated_ord: 4}", iserinitiator.Transport{RDMA: rdma.Options{IRD: 2}}, schema.FramingState{CRC: true, ORD: 2}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			next := filepath.Join(s.dir, "next.yaml")
			if err := os.WriteFile(next, []byte(base+tt.mpa+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			if i > 0 {
				s.ok(t, "config", "apply", next)
			}
			ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
			defer cancel()
			session, err := initiator.Connect(ctx, s.addr, initiator.Config{Target: storeName, Name: hostName, Transport: tt.initiator})
			if err != nil {
				t.Fatal(err)
			}
			defer session.Close()
			d, err := session.Open(ctx, 0)
			if err == nil {
				err = d.Write(ctx, make([]byte, 256<<10), 0) // more than comes as immediate data
			}
			if err != nil {
				t.Fatal(err)
			}
			list := read[[]schema.SessionState](t, s, "session", "list")
			if len(list) != 1 || list[0].Connections[0].Framing == nil || *list[0].Connections[0].Framing != tt.want {
				t.Errorf("%+v, want %+v", list, tt.want)
			}
			if err := session.Logout(ctx); err != nil {
				t.Error(err)
			}
			testkit.Eventually(t, "the session is gone", func() bool { return len(read[[]schema.SessionState](t, s, "session", "list")) == 0 })
		})
	}
}
