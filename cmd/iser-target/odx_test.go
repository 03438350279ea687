package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// tokenCommand returns POPULATE TOKEN (10h) or WRITE USING TOKEN (11h) with that list.
func tokenCommand(lun, sa byte, list []byte) *initiator.Command {
	c := &initiator.Command{LUN: lun, CDB: [16]byte{0x83, sa, 9: 1}, Out: list}
	binary.BigEndian.PutUint32(c.CDB[10:], uint32(len(list)))
	return c
}

// blockRangeAt returns a block device range descriptor.
func blockRangeAt(lba uint64, blocks uint32) []byte {
	b := binary.BigEndian.AppendUint64(nil, lba)
	return append(binary.BigEndian.AppendUint32(b, blocks), 0, 0, 0, 0)
}

// tokenAt returns a token for blocks of a LUN.
func tokenAt(t *testing.T, in *initiator.Session, lun byte, lba uint64, blocks uint32) []byte {
	t.Helper()
	list := append([]byte{0, 30, 14: 0, 15: 16}, blockRangeAt(lba, blocks)...)
	info := &initiator.Command{LUN: lun, CDB: [16]byte{0x84, 0x07, 5: 1, 12: 4}, In: make([]byte, 1024)}
	for _, c := range []*initiator.Command{tokenCommand(lun, 0x10, list), info} {
		if err := in.Do(c); err != nil || c.Status != 0 {
			t.Fatalf("%02x %02x: %v, status %#x, sense % x", c.CDB[0], c.CDB[1], err, c.Status, c.Sense)
		}
	}
	return bytes.Clone(info.In[38:][:512])
}

// useToken writes blocks of a token to a LUN, and returns what the status says: nothing, or ASC and ASCQ.
func useToken(t *testing.T, in *initiator.Session, token []byte, lun byte, lba uint64, blocks uint32) string {
	t.Helper()
	return outcome(t, in, useCommand(token, lun, 0, lba, blocks))
}

// useCommand returns WRITE USING TOKEN with these flags.
func useCommand(token []byte, lun, flags byte, lba uint64, blocks uint32) *initiator.Command {
	list := make([]byte, 536, 552)
	binary.BigEndian.PutUint16(list, 550)
	list[2] = flags
	copy(list[16:], token)
	list[535] = 16
	return tokenCommand(lun, 0x11, append(list, blockRangeAt(lba, blocks)...))
}

// outcome runs a command after the unit attentions that are due, and returns what useToken does.
func outcome(t *testing.T, in *initiator.Session, c *initiator.Command) string {
	t.Helper()
	for {
		switch err := in.Do(c); {
		case err != nil:
			t.Fatal(err)
		case c.Status == 0:
			return ""
		case len(c.Sense) < 14:
			t.Fatalf("command % x: status %#x, sense % x", c.CDB, c.Status, c.Sense)
		case c.Sense[2]&0x0f != 6: // no unit attention
			return fmt.Sprintf("%02x/%02x", c.Sense[12], c.Sense[13])
		}
	}
}

// What the administrator does to a LUN ends its tokens, and those of other LUNs remain. No token is good in another process, so an upgrade ends all.
func TestTokensOfAProcess(t *testing.T) {
	dir := t.TempDir()
	s := &station{dir: dir}
	s.configure(t, withFile(dir))
	s.startProgram(t, executable(t))
	in := s.login(t)
	for _, lun := range []byte{0, 1, 2, 3, 4} {
		in.Do(&initiator.Command{LUN: lun, CDB: cdb.TestUnitReady})
	}
	block := bytes.Repeat([]byte("token..."), 64)
	for _, lun := range []byte{0, 1, 2, 3, 4} { // with checksums, memory, a file, and two with protection information
		if c := (&initiator.Command{LUN: lun, CDB: cdb.Write16(7, 1), Out: block}); in.Do(c) != nil || c.Status != 0 {
			t.Fatalf("WRITE: status %#x, sense % x", c.Status, c.Sense)
		}
		for _, to := range []byte{0, 1, 2, 3, 4} {
			if got := useToken(t, in, tokenAt(t, in, lun, 7, 1), to, 100+uint64(lun), 1); got != "" {
				t.Errorf("LUN %d to LUN %d: %s", lun, to, got)
			}
			r := &initiator.Command{LUN: to, CDB: cdb.Read16(100+uint64(lun), 1), In: make([]byte, 512)}
			if err := in.Do(r); err != nil || !bytes.Equal(r.In, block) {
				t.Errorf("LUN %d to LUN %d: %v, % x", lun, to, err, r.In[:16])
			}
		}
	}

	gone, kept, shrunk := tokenAt(t, in, 1, 7, 1), tokenAt(t, in, 0, 7, 1), tokenAt(t, in, 2, 4096, 1)
	s.ok(t, "lun", "resize", storeName, "2", "1MiB", "--allow-shrink")
	if got := useToken(t, in, shrunk, 0, 200, 1); got != "23/08" {
		t.Errorf("a token for blocks that are gone: %q, want TOKEN CANCELLED", got)
	}
	s.says(t, cli.ExitOK, "", "lun", "delete", storeName, "1", "--now")
	if got := useToken(t, in, gone, 0, 200, 1); got != "23/06" {
		t.Errorf("a token of a LUN that is gone: %q, want TOKEN REVOKED", got)
	}
	if got := useToken(t, in, kept, 2, 200, 1); got != "" {
		t.Errorf("a token of another LUN: %q", got)
	}
	s.ok(t, "upgrade")
	if got := useToken(t, in, kept, 2, 200, 1); got != "23/04" {
		t.Errorf("a token of the process before: %q, want TOKEN UNKNOWN", got)
	}
	if got := useToken(t, in, tokenAt(t, in, 0, 7, 1), 2, 200, 1); got != "" {
		t.Errorf("a token after the upgrade: %q", got)
	}
}

// No token is good after kill -9, and the initiator learns that from the sense data.
func TestTokensAfterKill(t *testing.T) {
	dir := t.TempDir()
	s := &station{dir: dir}
	s.configure(t, withFile(dir))
	s.startProgram(t, executable(t))
	in := s.login(t)
	block := bytes.Repeat([]byte("token..."), 64)
	if got := outcome(t, in, &initiator.Command{CDB: cdb.Write16(7, 1), Out: block}); got != "" {
		t.Fatalf("WRITE: %s", got)
	}
	if got := outcome(t, in, &initiator.Command{CDB: [16]byte{0x35}}); got != "" {
		t.Fatalf("SYNCHRONIZE CACHE: %s", got)
	}
	token := tokenAt(t, in, 0, 7, 1)
	s.killAll(t)
	testkit.Eventually(t, "the end of the process", func() bool { return len(s.processes(t)) == 0 })
	in.Close()

	s.startProgram(t, executable(t))
	in = s.login(t)
	outcome(t, in, &initiator.Command{CDB: cdb.TestUnitReady})
	for range 2 { // it stays so
		if got := useToken(t, in, token, 2, 100, 1); got != "23/04" {
			t.Errorf("a token of the process that was killed: %q, want TOKEN UNKNOWN", got)
		}
	}
	r := &initiator.Command{LUN: 2, CDB: cdb.Read16(100, 1), In: make([]byte, 512)}
	if got := outcome(t, in, r); got != "" || !bytes.Equal(r.In, make([]byte, 512)) {
		t.Errorf("%s, % x; want what was there before", got, r.In[:16])
	}
	if got := useToken(t, in, tokenAt(t, in, 0, 7, 1), 2, 100, 1); got != "" {
		t.Errorf("a token of the new process: %s", got)
	}
	if got := outcome(t, in, r); got != "" || !bytes.Equal(r.In, block) {
		t.Errorf("%s, % x", got, r.In[:16])
	}
}

// An initiator that has all tokens it may have gets no more. Its tokens stay valid, and its neighbour gets and uses others.
func TestTokenLimitsOfInitiators(t *testing.T) {
	s := newStation(t, func(text string) string { return text + "limits: {tokens: 5, tokens_per_initiator: 3}\n" })
	greedy := login(t, s.addr, initiator.Options{Name: hostName + "-greedy"})
	neighbour := login(t, s.addr, initiator.Options{Name: hostName + "-neighbour"})
	again := login(t, s.addr, initiator.Options{Name: hostName + "-greedy", ISID: [6]byte{0x80, 5: 9}}) // the limit is by name
	block := bytes.Repeat([]byte("token..."), 64)
	if got := outcome(t, greedy, &initiator.Command{CDB: cdb.Write16(0, 1), Out: block}); got != "" {
		t.Fatalf("WRITE: %s", got)
	}
	outcome(t, neighbour, &initiator.Command{CDB: cdb.TestUnitReady})
	outcome(t, again, &initiator.Command{CDB: cdb.TestUnitReady})
	populate := func(in *initiator.Session) string {
		return outcome(t, in, tokenCommand(0, 0x10, append([]byte{0, 30, 14: 0, 15: 16}, blockRangeAt(0, 1)...)))
	}
	var tokens [][]byte
	for range 2 {
		tokens = append(tokens, tokenAt(t, greedy, 0, 0, 1))
	}
	tokens = append(tokens, tokenAt(t, again, 0, 0, 1))
	const noTokens = "55/0d"
	for _, in := range []*initiator.Session{greedy, again} {
		for range 10 {
			if got := populate(in); got != noTokens {
				t.Fatalf("POPULATE TOKEN beyond the limit: %q, want INSUFFICIENT RESOURCES TO CREATE ROD TOKEN", got)
			}
		}
	}
	for range 2 {
		if got := useToken(t, neighbour, tokenAt(t, neighbour, 0, 0, 1), 0, 100, 1); got != "" {
			t.Errorf("the neighbour: %s", got)
		}
	}
	if got := populate(neighbour); got != noTokens {
		t.Errorf("POPULATE TOKEN beyond the limit of the process: %q", got)
	}
	for i, token := range tokens {
		if got := useToken(t, greedy, token, 0, 200+uint64(i), 1); got != "" {
			t.Errorf("a token from before the limit: %s", got)
		}
	}
	// A token that ends makes room for another one.
	if got := outcome(t, greedy, useCommand(tokens[0], 0, 2, 300, 1)); got != "" { // DEL_TKN
		t.Errorf("DEL_TKN: %s", got)
	}
	if got := useToken(t, greedy, tokenAt(t, greedy, 0, 0, 1), 0, 301, 1); got != "" {
		t.Errorf("after the end of a token: %s", got)
	}
	r := &initiator.Command{CDB: cdb.Read16(301, 1), In: make([]byte, 512)}
	if got := outcome(t, neighbour, r); got != "" || !bytes.Equal(r.In, block) {
		t.Errorf("%s, % x", got, r.In[:16])
	}
}

// A SANITIZE or FORMAT UNIT during a copy in the background: of the source it cancels the token, of the destination it ends the copy as it
// ends other writes. The initiator learns how much was written, and a neighbour on another LUN notices nothing. No upgrade begins.
func TestTokensAndErasure(t *testing.T) {
	const count = 16 << 11 // blocks of 16 MiB
	dir := t.TempDir()
	s := newStation(t, func(text string) string {
		return strings.Replace(text, "luns: [{id: 0, backend: memory, size: 1MiB}]", fmt.Sprintf(
			"luns: [{id: 0, backend: memory, size: 1MiB}, {id: 1, backend: memory, size: 16MiB, sanitize: true}, {id: 2, backend: file, path: %s/d.img, size: 16MiB, sanitize: true}]", dir), 1)
	})
	in, neighbour := s.login(t), login(t, s.addr, initiator.Options{Name: hostName + "-neighbour"})
	outcome(t, neighbour, &initiator.Command{CDB: cdb.TestUnitReady})
	data := bytes.Repeat([]byte("token..."), 1<<17) // 1 MiB
	fill := func(lun byte) {
		t.Helper()
		for at := uint64(0); at < count; at += 2048 {
			if got := outcome(t, in, &initiator.Command{LUN: lun, CDB: cdb.Write16(at, 2048), Out: data}); got != "" {
				t.Fatalf("WRITE: %s", got)
			}
		}
	}
	for _, tt := range []struct {
		name, want string
		lun        byte
		cdb        [16]byte
		out        []byte
	}{
		{"SANITIZE of the source", "23/08", 1, [16]byte{0x48, 0x82}, nil},
		{"FORMAT UNIT of the source", "23/08", 1, [16]byte{0x04, 0x10}, []byte{0, 2, 0, 0}},
		{"SANITIZE of the destination", "04/1b", 2, [16]byte{0x48, 0x82}, nil},
		{"FORMAT UNIT of the destination", "04/04", 2, [16]byte{0x04, 0x10}, []byte{0, 2, 0, 0}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			fill(1)
			fill(2)
			token := tokenAt(t, in, 1, 0, count)
			s.ok(t, "lun", "fault", storeName, "2", "--latency", "100ms", "--for", "1h") // 64 steps
			if got := outcome(t, in, useCommand(token, 2, 1, 0, count)); got != "" {
				t.Fatalf("WRITE USING TOKEN with IMMED: %s", got)
			}
			info := &initiator.Command{LUN: 2, CDB: [16]byte{0x84, 0x07, 5: 1, 12: 4}, In: make([]byte, 1024)}
			written := func() uint64 {
				if got := outcome(t, in, info); got == "04/1b" || got == "04/04" {
					info.In[5] = 0x12 // the LUN answers after its erasure
				} else if got != "" {
					t.Fatalf("RECEIVE ROD TOKEN INFORMATION: %s", got)
				}
				return binary.BigEndian.Uint64(info.In[16:])
			}
			testkit.Eventually(t, "a step", func() bool { return written() > 0 })
			if tt.lun == 1 {
				s.says(t, cli.ExitRefused, "LUN 2 of "+storeName+": WRITE USING TOKEN is in progress", "upgrade")
			}
			if got := outcome(t, in, &initiator.Command{LUN: tt.lun, CDB: tt.cdb, Out: tt.out}); got != "" {
				t.Fatalf("%s: %s", tt.name, got)
			}
			if got := useToken(t, neighbour, tokenAt(t, neighbour, 0, 0, 1), 0, 100, 1); got != "" {
				t.Errorf("the neighbour: %s", got)
			}
			blocks := uint64(0)
			testkit.Eventually(t, "the end of the copy", func() bool { blocks = written(); return info.In[5] != 0x12 })
			sense := info.In[32:]
			if got := fmt.Sprintf("%02x/%02x", sense[12], sense[13]); info.In[5] != 2 || got != tt.want || blocks == 0 || blocks >= count {
				t.Errorf("COPY OPERATION STATUS %#x, %s, %d of %d blocks; want %s", info.In[5], got, blocks, count, tt.want)
			}
			if got := uint64(binary.BigEndian.Uint32(sense[3:])); sense[0]&0x80 == 0 || got != blocks {
				t.Errorf("INFORMATION has %d blocks, and the transfer count is %d", got, blocks)
			}
			s.ok(t, "lun", "fault", storeName, "2", "--clear")
			testkit.Eventually(t, "the end of "+tt.name, func() bool {
				return outcome(t, in, &initiator.Command{LUN: tt.lun, CDB: cdb.TestUnitReady}) == ""
			})
			if got := useToken(t, in, token, 2, 0, 1); got != map[byte]string{1: "23/08", 2: ""}[tt.lun] {
				t.Errorf("the token afterwards: %q", got)
			}
		})
	}
}
