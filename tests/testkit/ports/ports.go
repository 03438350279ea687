// Package ports chooses TCP ports for programs that are started again and need the port that they had.
package ports

import (
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
)

// Ports from first to last are below those that Linux gives to connections for their own end
// (net.ipv4.ip_local_port_range), which could take one before the program listens on it.
const first, last = 10000, 31999

var (
	mu   sync.Mutex
	used = map[int]bool{}
)

// Free returns a TCP port of 127.0.0.1 that nobody listens on. It returns none twice in a process.
func Free() (int, error) {
	mu.Lock()
	defer mu.Unlock()
	for range 1000 {
		port := first + rand.IntN(last-first+1)
		if used[port] {
			continue
		}
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		l.Close()
		used[port] = true
		return port, nil
	}
	return 0, fmt.Errorf("no port between %d and %d is free", first, last)
}

// FreeAddress returns 127.0.0.1:PORT, as Free does.
func FreeAddress() (string, error) {
	port, err := Free()
	return fmt.Sprintf("127.0.0.1:%d", port), err
}
