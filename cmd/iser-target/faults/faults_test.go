package faults

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/testkit"
)

// echo listens and returns what comes, after an MPA Reply.
func echo(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer nc.Close()
				if _, err := io.ReadFull(nc, make([]byte, len(mpaRequest))); err != nil {
					return
				}
				nc.Write(mpaReply)
				io.Copy(nc, nc)
			}()
		}
	}()
	return l.Addr().String()
}

// exchange starts a proxy, sends MPA startup and 200 Sends over a connection, and returns what came
// back and what the proxy said.
func exchange(t *testing.T, o Options) (back []byte, log []string) {
	t.Helper()
	var mu sync.Mutex
	o.To = echo(t)
	o.Log = func(line string) {
		mu.Lock()
		defer mu.Unlock()
		log = append(log, line)
	}
	p, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error)
	go func() { served <- p.Serve(ctx, l) }()
	nc, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	nc.SetDeadline(time.Now().Add(testkit.Patience))
	go func() {
		nc.Write(mpaRequest)
		for range 200 {
			nc.Write(send)
		}
		nc.(*net.TCPConn).CloseWrite()
	}()
	back, err = io.ReadAll(nc)
	if errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	nc.Close()
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
	return back, log
}

func TestProxyPasses(t *testing.T) {
	back, log := exchange(t, Options{})
	if want := slices.Concat(mpaReply, slices.Repeat(send, 200)); !slices.Equal(back, want) || log != nil {
		t.Errorf("%d bytes of %d came back; %q", len(back), len(want), log)
	}
}

// Each fault happens, is named, and is the same for the same seed.
func TestFaults(t *testing.T) {
	const whole = 24 + 200*28
	for _, tt := range []struct {
		name string
		o    Options
		says string
		ok   func(n int, changed bool) bool
	}{
		{"drop", Options{Drop: 0.1}, ": dropped", func(n int, changed bool) bool { return n < whole && n%28 == 24 && !changed }},
		{"corrupt", Options{Corrupt: 0.1}, " changed", func(n int, changed bool) bool { return n > 24 && changed }},
		{"cut", Options{Cut: 0.05}, ": cut after ", func(n int, changed bool) bool { return n < whole && !changed }},
		{"delay", Options{Delayed: 0.2, Delay: time.Millisecond}, ": delayed by ", func(n int, changed bool) bool { return n == whole && !changed }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.o.Seed = 1
			back, log := exchange(t, tt.o)
			want := slices.Concat(mpaReply, slices.Repeat(send, 200))
			if len(log) == 0 || !strings.Contains(log[0], tt.says) || !tt.ok(len(back), !slices.Equal(back, want[:len(back)])) {
				t.Errorf("%d bytes came back, %q", len(back), log)
			}
			// The answers depend on what the first direction lets through. That one sees the same units.
			first := func(log []string) (lines []string) {
				for _, line := range log {
					if strings.Contains(line, "to the target") {
						lines = append(lines, line)
					}
				}
				return lines[:min(len(lines), 1)]
			}
			if _, again := exchange(t, tt.o); tt.name != "cut" && !slices.Equal(first(log), first(again)) {
				t.Errorf("%q, the second time %q", first(log), first(again))
			}
		})
	}
}

func TestDecisionsDependOnTheSeedOnly(t *testing.T) {
	draw := func(seed, n uint64, direction int) (list []decision) {
		o := Options{Drop: 0.1, Corrupt: 0.2, Cut: 0.3, Withhold: 0.4, Delayed: 0.5}
		rng := decisions(seed, n, direction)
		for range 100 {
			list = append(list, o.decide(rng))
		}
		return list
	}
	if !slices.Equal(draw(1, 2, 0), draw(1, 2, 0)) {
		t.Error("the same seed decides otherwise")
	}
	for _, other := range [][]decision{draw(2, 2, 0), draw(1, 3, 0), draw(1, 2, 1)} {
		if slices.Equal(draw(1, 2, 0), other) {
			t.Error("another seed, connection or direction has the same decisions")
		}
	}
}

// A Read Response is withheld, and an RDMA Write is never dropped.
func TestKindsOfFPDUs(t *testing.T) {
	p, err := New(Options{Drop: 1, Withhold: 1})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		u      Unit
		d      decision
		passes bool
	}{
		{Unit{ReadResponse, readResponse, 16}, decision{withhold: true}, false},
		{Unit{RDMAWrite, rdmaWrite, 16}, decision{withhold: true, drop: true}, true},
		{Unit{FPDU, send, 20}, decision{withhold: true}, true},
		{Unit{FPDU, send, 20}, decision{drop: true}, false},
		{Unit{Startup, mpaRequest, 20}, decision{drop: true, cut: true}, true},
		{Unit{Login, header(loginRequest, transit, ""), 48}, decision{drop: true, cut: true}, true},
	} {
		a, b := net.Pipe()
		got := make(chan int)
		go func() {
			all, _ := io.ReadAll(b)
			got <- len(all)
		}()
		if err := p.send(t.Context(), tt.u, tt.d, a, ""); err != nil {
			t.Error(err)
		}
		a.Close()
		if n := <-got; (n == len(tt.u.Bytes)) != tt.passes {
			t.Errorf("%s with %+v: %d bytes passed", tt.u.Kind, tt.d, n)
		}
	}
}

func TestOptionsAreChecked(t *testing.T) {
	for want, o := range map[string]Options{"--cut": {Cut: 1.5}, "--drop": {Drop: -1}, "--delay": {Delay: -1}} {
		if _, err := New(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", o, err, want)
		}
	}
}
