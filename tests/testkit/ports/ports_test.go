package ports

import (
	"net"
	"testing"
)

// Each port is free, differs from those before, and is none that a connection takes for its own end.
func TestFree(t *testing.T) {
	seen := map[int]bool{}
	for range 200 {
		port, err := Free()
		if err != nil {
			t.Fatal(err)
		}
		if seen[port] || port >= 32768 || port < 1024 {
			t.Errorf("port %d", port)
		}
		seen[port] = true
	}
	addr, err := FreeAddress()
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
}
