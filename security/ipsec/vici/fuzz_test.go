package vici

import (
	"bytes"
	"context"
	"net"
	"testing"
	"time"

	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/strongswan/govici/vici"
)

// FuzzAnswer sends bytes as charon's answers. Nothing panics, no packet is taken for more memory than maxPacket, and an SA is
// known only with an identity.
func FuzzAnswer(f *testing.F) {
	confirm, done := packet(eventConfirm, "", nil), packet(cmdResponse, "", nil)
	f.Add(append(append(bytes.Clone(confirm), packet(event, "list-sa", established("host1.example.com", "c49e2f67", "ca216527"))...), done...))
	f.Add(append(bytes.Clone(confirm), packet(event, "list-conn", section("a", values("remote_addrs", "192.0.2.1"),
		section("children", section("b", values("local-ts", "dynamic[tcp/3260-x]"), values("remote-ts", "::/0[6/any]")))))...))
	f.Add(packet(eventUnknown, "", nil))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := vici.NewSession(vici.WithDialContext(func(context.Context, string, string) (net.Conn, error) {
			return &bounded{Conn: answers{Reader: bytes.NewReader(b)}}, nil
		}))
		if err != nil {
			t.Fatal(err)
		}
		answer, err := s.StreamedCommandRequest("list-sas", "list-sa", vici.NewMessage())
		if err != nil {
			return
		}
		for k, r := range records(answer) {
			if k.spi == 0 || !k.destination.IsValid() || r.remoteID == "" || r.lifetime < 0 {
				t.Errorf("SA %+v: %+v", k, r)
			}
		}
		choose(answer, flow)
		for _, m := range answer {
			for _, name := range events {
				for _, c := range changesOf(vici.Event{Name: name, Message: m, Timestamp: time.Time{}}) {
					if c.Kind != ipsec.Added && c.Kind != ipsec.Removed {
						t.Errorf("change %+v", c)
					}
				}
			}
		}
	})
}

// answers is a connection that answers whatever it is asked.
type answers struct {
	net.Conn
	*bytes.Reader
}

func (a answers) Read(p []byte) (int, error) { return a.Reader.Read(p) }

func (answers) Write(p []byte) (int, error) { return len(p), nil }
