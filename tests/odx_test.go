package tests

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi/initiator"
	"github.com/iser-target/iser-target/iscsi/pdu"
	iserinitiator "github.com/iser-target/iser-target/iser/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A copyHost is an initiator that copies with tokens on LUN 0.
type copyHost struct {
	*initiator.Session
	t testing.TB
}

// run executes a command after the unit attentions that are due.
func (h copyHost) run(c *initiator.Command) {
	h.t.Helper()
	for {
		err := h.Do(testContext(h.t), c)
		var status *initiator.StatusError
		if err != nil && !errors.As(err, &status) {
			h.t.Fatal(err)
		}
		if status == nil || len(c.Sense) < 3 || c.Sense[2]&0x0f != 6 {
			return
		}
	}
}

// good executes a command that has to succeed.
func (h copyHost) good(c *initiator.Command) {
	h.t.Helper()
	if h.run(c); c.Status != 0 {
		h.t.Fatalf("command % x: status %#x, sense % x", c.CDB, c.Status, c.Sense)
	}
}

// token returns a token for the first blocks of the LUN.
func (h copyHost) token(blocks uint32) []byte {
	h.t.Helper()
	h.good(tokenCommand(0x10, 1, append([]byte{0, 30, 14: 0, 15: 16}, tokenRange(0, blocks)...)))
	return bytes.Clone(h.information(1)[38:][:512])
}

// information returns what RECEIVE ROD TOKEN INFORMATION says of that list identifier.
func (h copyHost) information(id uint32) []byte {
	h.t.Helper()
	c := &initiator.Command{CDB: [16]byte{0x84, 0x07, 12: 4}, In: make([]byte, 1024)}
	binary.BigEndian.PutUint32(c.CDB[2:], id)
	h.good(c)
	return c.In
}

// tokenCommand returns POPULATE TOKEN (10h) or WRITE USING TOKEN (11h).
func tokenCommand(sa byte, id uint32, list []byte) *initiator.Command {
	c := &initiator.Command{CDB: [16]byte{0x83, sa}, Out: list}
	binary.BigEndian.PutUint32(c.CDB[6:], id)
	binary.BigEndian.PutUint32(c.CDB[10:], uint32(len(list)))
	return c
}

// tokenRange returns a block device range descriptor.
func tokenRange(lba uint64, blocks uint32) []byte {
	b := binary.BigEndian.AppendUint64(nil, lba)
	return append(binary.BigEndian.AppendUint32(b, blocks), 0, 0, 0, 0)
}

// useToken returns WRITE USING TOKEN.
func useToken(id uint32, flags byte, token []byte, lba uint64, blocks uint32) *initiator.Command {
	list := make([]byte, 536, 552)
	binary.BigEndian.PutUint16(list, 550)
	list[2] = flags
	copy(list[16:], token)
	list[535] = 16
	return tokenCommand(0x11, id, append(list, tokenRange(lba, blocks)...))
}

// ABORT TASK and LOGICAL UNIT RESET end a WRITE USING TOKEN in time, also one that hangs in its store. After the answer no step
// begins, the step that hangs lands before everything that is acknowledged later, and the initiator learns how much was written.
func TestTokensAndTaskManagement(t *testing.T) {
	const (
		to, count = 65536, 2048 // four steps of 512 blocks
		step      = 512
	)
	for _, tr := range []struct {
		name      string
		stream    stream
		transport initiator.Transport
	}{{"TCP", noRDMA, nil}, {"iSER", rdmaFirst, iserinitiator.Transport{}}} {
		for _, tt := range []struct {
			name       string
			immed, lur bool
			hangs      bool
		}{
			{"ABORT TASK", false, false, false},
			{"ABORT TASK while the store hangs", false, false, true},
			{"LOGICAL UNIT RESET", false, true, false},
			{"LOGICAL UNIT RESET while the store hangs", false, true, true},
			{"LOGICAL UNIT RESET in the background", true, true, false},
			{"LOGICAL UNIT RESET in the background while the store hangs", true, true, true},
		} {
			t.Run(tr.name+"/"+tt.name, func(t *testing.T) {
				tg := startTarget(t, targetOptions{stream: tr.stream, quiet: true})
				login := func(name string) copyHost {
					s, err := initiator.Connect(testContext(t), tg.addr, initiator.Config{Name: initiator.DefaultName + name, Target: targetName, Transport: tr.transport})
					if err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { s.Logout(testContext(t)) })
					return copyHost{s, t}
				}
				host, neighbour := login("-host"), login("-neighbour")
				data := random(count * 512)
				host.good(&initiator.Command{CDB: cdb.Write16(0, count), Out: data})
				token, other := host.token(count), neighbour.token(8)

				gate := tg.store.ShutFrom((to+step)*512, backendtest.WriteAt) // the second step
				defer gate.Open()
				flags := byte(0)
				if tt.immed {
					flags = 1
				}
				c := useToken(9, flags, token, to, count)
				ctx, abort := context.WithCancel(testContext(t))
				defer abort()
				ended := make(chan error, 1)
				go func() { ended <- host.Do(ctx, c) }()
				<-gate.Entered
				if tt.immed {
					if err := <-ended; err != nil {
						t.Fatal(err)
					}
				}

				// The neighbour keeps its work, and its token.
				neighbour.good(&initiator.Command{CDB: cdb.Read16(0, 8), In: make([]byte, 4096)})
				neighbour.good(useToken(9, 0, other, 4096, 8))

				opened := make(chan struct{})
				before := tg.node.Stats().TasksInFlight
				go func() {
					defer close(opened)
					if tt.hangs {
						return
					}
					// The store continues while the function waits for it, but not long enough for being given up.
					for end := time.Now().Add(testkit.Patience); tg.node.Stats().TasksInFlight == before && time.Now().Before(end); {
						time.Sleep(time.Millisecond)
					}
					time.Sleep(50 * time.Millisecond)
					gate.Open()
				}()
				if tt.lur {
					if response, err := neighbour.TaskManagement(testContext(t), pdu.LogicalUnitReset, 0); err != nil || response != pdu.FunctionComplete {
						t.Fatalf("LOGICAL UNIT RESET: response %d, %v", response, err)
					}
				} else {
					abort()
				}
				if !tt.immed {
					err := <-ended
					var status *initiator.StatusError
					switch {
					case !tt.hangs && err == nil:
						t.Fatal("the copy ended before the function came")
					case !tt.lur && !errors.Is(err, context.Canceled):
						t.Fatalf("after ABORT TASK: %v", err)
					case tt.lur && (!errors.As(err, &status) || status.Status != 0x40): // TAS
						t.Fatalf("after LOGICAL UNIT RESET of another initiator: %v, want TASK ABORTED", err)
					}
				}
				<-opened
				writes := tg.store.Calls(backendtest.WriteAt)
				if tt.hangs {
					w := &initiator.Command{CDB: cdb.Write16(to+step, 1), Out: make([]byte, 512)}
					if neighbour.run(w); w.Status != 0x08 {
						t.Errorf("a WRITE where a step hangs: status %#x, want BUSY", w.Status)
					}
					gate.Open()
					testkit.Eventually(t, "the return of the step", func() bool { neighbour.run(w); return w.Status == 0 })
					writes++
				}
				testkit.Eventually(t, "the end of the copy", func() bool { return host.inProgress(9) == 0 })
				if got := tg.store.Calls(backendtest.WriteAt); got != writes {
					t.Errorf("%d writes after the answer", got-writes)
				}
				stored := tg.stored(t, to, count*512)
				want := append(bytes.Clone(data[:2*step*512]), make([]byte, (count-2*step)*512)...)
				if tt.hangs {
					clear(want[step*512:][:512]) // by the neighbour
				}
				if !bytes.Equal(stored, want) {
					t.Error("the blocks are not those of two steps")
				}
				b := host.information(9)
				if got := binary.BigEndian.Uint64(b[16:]); b[5] != 0x60 || b[12] != 0x40 || got != 2*step {
					t.Errorf("COPY OPERATION STATUS %#x, status %#x, %d blocks; want terminated, TASK ABORTED, %d", b[5], b[12], got, 2*step)
				}

				// Everything works again, with the same tokens.
				host.good(useToken(9, 0, token, to, count))
				if !bytes.Equal(tg.stored(t, to, count*512), data) {
					t.Error("the copy differs")
				}
				neighbour.good(useToken(9, 0, other, 4096, 8))
			})
		}
	}
}

// inProgress returns COPY OPERATION STATUS of RECEIVE COPY STATUS(LID4) while the copy is in progress, else 0. It forgets nothing: the
// allocation length of RECEIVE ROD TOKEN INFORMATION is too small.
func (h copyHost) inProgress(id uint32) byte {
	h.t.Helper()
	c := &initiator.Command{CDB: [16]byte{0x84, 0x07, 13: 8}, In: make([]byte, 8)}
	binary.BigEndian.PutUint32(c.CDB[2:], id)
	if h.good(c); c.In[5] == 0x11 || c.In[5] == 0x12 {
		return c.In[5]
	}
	return 0
}
