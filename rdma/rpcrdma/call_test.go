package rpcrdma

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/iser-target/iser-target/rdma/rpcrdma/oncrpc"
)

var sizes = []int{0, 1, 3, 4, 5, 100, 900, 3000, 4000, 4096, 5001, 64 << 10, 1 << 20}

func TestCalls(t *testing.T) {
	for _, inline := range []int{1024, 4096, 65536} {
		t.Run(fmt.Sprintf("inline %d", inline), func(t *testing.T) {
			cfg := Config{InlineSend: inline, InlineReceive: inline, Programs: testPrograms(newWaits()), ReverseChunks: true}
			client, service := connPair(t, cfg, cfg)
			doNull(t, client)
			service.EnableReverse()
			for _, dir := range []struct {
				name string
				c    *Conn
			}{{"forward", client}, {"reverse BRPC-5.3-1", service}} {
				for _, long := range []bool{false, true} {
					for _, n := range sizes {
						data := pattern(n)
						name := fmt.Sprintf("%s long %t %d", dir.name, long, n)
						for _, into := range []bool{true, false} {
							call := &Call{Program: testProgram, Version: testVersion, Procedure: procEcho, Long: long}
							if call.MaxReply = 4; into {
								call.Into = [][]byte{make([]byte, n+8)}
							} else {
								call.MaxReply = n + 8
							}
							call.Begin().Item(data)
							do(t, dir.c, call)
							got := call.Results.Item(n)
							if err := call.Results.End(); err != nil || !bytes.Equal(got, data) {
								t.Fatalf("%s, into %t: %d bytes, %v", name, into, len(got), err)
							}
							if into && n > 0 && &got[0] != &call.Into[0][0] {
								t.Fatalf("%s: RPCRDMA-2.3.2-2: the result was not placed when the reply came", name)
							}
						}
						call := &Call{Program: testProgram, Version: testVersion, Procedure: procPlain, Long: long, MaxReply: n + 8}
						call.Begin().Opaque(data)
						do(t, dir.c, call)
						if got := call.Results.Opaque(n); call.Results.End() != nil || !bytes.Equal(got, data) {
							t.Fatalf("%s: opaque: %d bytes", name, len(got))
						}
					}
				}
			}
		})
	}
}

func TestStatus(t *testing.T) {
	cfg := Config{Programs: testPrograms(newWaits())}
	client, _ := connPair(t, cfg, cfg)
	for _, tt := range []struct {
		name                        string
		program, version, procedure uint32
		args                        int
		want                        StatusError
	}{
		{"program", 9, 1, 0, 0, StatusError{Status: oncrpc.ProgUnavail}},
		{"version", testProgram, 2, 0, 0, StatusError{Status: oncrpc.ProgMismatch, Low: testVersion, High: testVersion}},
		{"procedure", testProgram, testVersion, 99, 0, StatusError{Status: oncrpc.ProcUnavail}},
		{"RPCRDMA-4.5.2-2", testProgram, testVersion, procRead, 3, StatusError{Status: oncrpc.GarbageArgs}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			call := &Call{Program: tt.program, Version: tt.version, Procedure: tt.procedure}
			e := call.Begin()
			for range tt.args {
				e.Uint32(1)
			}
			err := client.Do(patient(t), call)
			if got, ok := err.(*StatusError); !ok || *got != tt.want {
				t.Errorf("%v, want %v", err, &tt.want)
			}
		})
	}
}
