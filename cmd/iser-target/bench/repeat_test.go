package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi/initiator"
	"github.com/iser-target/iser-target/iscsi/pdu"
)

// refusing is a Transport whose target does not do the READs and WRITEs for which refuse returns a status other than GOOD.
type refusing struct {
	initiator.Transport
	refuse func(n, flying int) (status byte, sense []byte)
	mu     sync.Mutex
	flying map[uint32]verdict // by tag
	n      int                // READs and WRITEs so far
}

type verdict struct {
	status byte
	sense  []byte
}

func (r *refusing) Dial(ctx context.Context, addr string) (initiator.Carrier, error) {
	c, err := r.Transport.Dial(ctx, addr)
	return &refusingCarrier{Carrier: c, r: r}, err
}

type refusingCarrier struct {
	initiator.Carrier
	r *refusing
}

// PostCommand makes a TEST UNIT READY of what is refused.
func (c *refusingCarrier) PostCommand(cmd *initiator.Command) error {
	if op := cmd.CDB[0]; op == 0x88 || op == 0x8a {
		c.r.mu.Lock()
		var v verdict
		c.r.n++
		v.status, v.sense = c.r.refuse(c.r.n, len(c.r.flying)+1)
		c.r.flying[cmd.ITT()] = v
		c.r.mu.Unlock()
		if v.status != 0 {
			cmd.BHS().SetCDB(make([]byte, pdu.CDBLen))
		}
	}
	return c.Carrier.PostCommand(cmd)
}

func (c *refusingCarrier) Receive(p *initiator.PDU) error {
	err := c.Carrier.Receive(p)
	if err != nil {
		return err
	}
	h := p.BHS
	if op := h.Opcode(); op != pdu.SCSIResponse && op != pdu.DataIn {
		return nil
	}
	c.r.mu.Lock()
	v := c.r.flying[h.ITT()]
	delete(c.r.flying, h.ITT())
	c.r.mu.Unlock()
	if v.status == 0 {
		return nil
	}
	b := make(pdu.BHS, pdu.BHSLen)
	b.Reset(pdu.SCSIResponse, pdu.FlagF)
	b.SetITT(h.ITT())
	b.SetStatus(v.status)
	b.SetStatSN(h.StatSN())
	b.SetExpCmdSN(h.ExpCmdSN())
	b.SetMaxCmdSN(h.MaxCmdSN())
	*p = initiator.PDU{BHS: b}
	if v.sense != nil {
		p.Data = append([]byte{0, byte(len(v.sense))}, v.sense...)
		b.SetDataSegmentLength(len(p.Data))
	}
	return nil
}

// refuse makes a run meet a target that refuses.
func refuse(o *Options, f func(n, flying int) (status byte, sense []byte)) {
	o.Login.Transport = &refusing{Transport: o.Login.Transport, refuse: f, flying: map[uint32]verdict{}}
}

// sense returns sense data in fixed format.
func sense(key, asc, ascq byte) []byte {
	return []byte{0: 0x70, 2: key, 7: 10, 12: asc, 13: ascq, 17: 0}
}

// A run continues after unit attentions, BUSY and TASK SET FULL, counts them, and every I/O is done: what was refused last is not
// taken for written.
func TestRepeats(t *testing.T) {
	for _, transport := range []string{"tcp", "iser"} {
		o := serve(t, transport, openMemory(t))
		o.RW, o.Verify, o.Destructive, o.Depths = "randrw", true, true, []int{16}
		refuse(&o, func(n, _ int) (byte, []byte) {
			switch {
			case n%31 == 0:
				return initiator.CheckCondition, sense(initiator.UnitAttention, 0x29, 0x00)
			case n%29 == 0:
				return initiator.CheckCondition, sense(initiator.UnitAttention, 0x2a, 0x09)
			case n%23 == 0:
				return initiator.Busy, nil
			}
			return 0, nil
		})
		results, err := Run(within(t), o, Hooks{})
		check(t, err)
		r := results[0]
		all := r.repeats()
		if all.Busy == 0 || all.TaskSetFull != 0 || len(all.Attentions) != 2 || all.Attentions[initiator.Sense{Key: 6, ASC: 0x29}] == 0 || r.Verified == 0 {
			t.Errorf("%s: %+v, %d verified", transport, all, r.Verified)
		}
		var table, file bytes.Buffer
		check(t, WriteTable(&table, &o, results, nil))
		for _, want := range []string{"REPEATED", "after unit attention: capacity data has changed (6/2a/09), ", " after BUSY"} {
			if !strings.Contains(table.String(), want) {
				t.Errorf("%s: the table has no %q:\n%s", transport, want, &table)
			}
		}
		check(t, WriteJSON(&file, &o, "", results, false))
		var got struct {
			Jobs []struct {
				Own struct {
					Repeated struct {
						Read, Write struct {
							Busy       int
							Attentions map[string]int `json:"unit_attention"`
						}
						Lowest int `json:"lowest_iodepth"`
					}
				} `json:"iser_target"`
			}
		}
		check(t, json.Unmarshal(file.Bytes(), &got))
		rep := got.Jobs[0].Own.Repeated
		if sum := rep.Read.Attentions["29/00"] + rep.Write.Attentions["29/00"]; uint64(sum) != all.Attentions[initiator.Sense{Key: 6, ASC: 0x29}] || rep.Lowest != r.LowestDepth {
			t.Errorf("%s: the JSON has %+v, want %+v", transport, rep, all)
		}
	}
}

// A target that takes eight I/Os of a deeper job gets about eight, and few refusals. The latency of a refused I/O counts from its first
// submission.
func TestDepthAfterTaskSetFull(t *testing.T) {
	o := serve(t, "tcp", openMemory(t))
	o.Depths = []int{32}
	refuse(&o, func(_, flying int) (byte, []byte) {
		if flying > 8 {
			return initiator.TaskSetFull, nil
		}
		return 0, nil
	})
	results, err := Run(within(t), o, Hooks{})
	check(t, err)
	r := results[0]
	n := r.Directions[read].Repeats.TaskSetFull
	if n < 24 || n > r.Directions[read].IOs/10 || r.LowestDepth > 8 {
		t.Errorf("%d times TASK SET FULL, %d READs, lowest depth %d", n, r.Directions[read].IOs, r.LowestDepth)
	}
	if x := r.Directions[read].Max; time.Duration(x) < pauseTime {
		t.Errorf("the longest latency is %v, less than the pause", time.Duration(x))
	}
}

// While a target refuses everything, it is asked rarely. Then the job continues. If it never ends, the run ends in time.
func TestAllRefused(t *testing.T) {
	o := serve(t, "tcp", openMemory(t))
	o.Runtime = 3 * time.Second // of which 600 ms are refused
	var from time.Time
	tries := 0
	refuse(&o, func(n, _ int) (byte, []byte) {
		if n == 20 {
			from = time.Now()
		}
		if n >= 20 && time.Since(from) < 600*time.Millisecond {
			tries++
			return initiator.Busy, nil
		}
		return 0, nil
	})
	results, err := Run(within(t), o, Hooks{})
	check(t, err)
	if n := results[0].Directions[read]; n.Repeats.Busy != uint64(tries) || tries < 4 || tries > 60 || n.IOs < 40 || time.Duration(n.Max) < 500*time.Millisecond {
		t.Errorf("%d refusals, %d counted, %d READs, longest latency %v", tries, n.Repeats.Busy, n.IOs, time.Duration(n.Max))
	}

	// The WRITEs that are refused at the end of the run are not taken for written.
	o = serve(t, "tcp", openMemory(t))
	o.RW, o.Destructive, o.Verify, o.Size = "randwrite", true, true, 64<<10
	var began time.Time
	refuse(&o, func(n, _ int) (byte, []byte) {
		if n == 1 {
			began = time.Now()
		}
		if time.Since(began) > o.Runtime/2 && time.Since(began) < o.Runtime+time.Second {
			return initiator.Busy, nil
		}
		return 0, nil
	})
	results, err = Run(within(t), o, Hooks{})
	check(t, err)
	if results[0].Verified == 0 || results[0].Directions[write].Repeats.Busy == 0 {
		t.Errorf("%d verified, %d refused", results[0].Verified, results[0].Directions[write].Repeats.Busy)
	}
}

// Other statuses end the run with a line that names the I/O and the reason, and what was measured before is there.
func TestStatusEndsRun(t *testing.T) {
	for _, tc := range []struct {
		status byte
		sense  []byte
		want   string
	}{
		{initiator.ReservationConflict, nil, ": READ: reservation conflict: another initiator has reserved the LUN"},
		{initiator.TaskAborted, nil, ": READ: the command was aborted by another initiator"},
		{initiator.CheckCondition, sense(initiator.MediumError, 0x11, 0x00), ": READ: medium error: unrecovered read error (3/11/00)"},
		{initiator.CheckCondition, sense(initiator.NotReady, 0x04, 0x02), "(2/04/02)"},
		{initiator.CheckCondition, nil, "(0/00/00)"},
	} {
		t.Run(tc.want, func(t *testing.T) {
			t.Parallel() // each waits for the first second of the measurement
			o := serve(t, "tcp", openMemory(t))
			o.Runtime = time.Minute
			var measured atomic.Bool
			refuse(&o, func(int, int) (byte, []byte) {
				if measured.Load() {
					return tc.status, tc.sense
				}
				return 0, nil
			})
			results, err := Run(within(t), o, Hooks{Progress: func(p Progress) { measured.Store(p.IOPS[read] > 0) }})
			if err == nil || !strings.HasPrefix(err.Error(), "read of 4096 bytes at offset ") || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("the error is %v, want %q", err, tc.want)
			}
			if len(results) != 1 || results[0].Directions[read].IOs == 0 || !errors.Is(results[0].Err, err) {
				t.Errorf("%d results", len(results))
			}
		})
	}
}

// refusals keep the order of what waits, lower the depth to what the target has, and raise it in time.
func TestRefusals(t *testing.T) {
	var r refusals
	r.init(4)
	a, b, ms := &slot{}, &slot{}, time.Millisecond
	r.add(a, 10*ms, 2)
	r.add(b, 11*ms, 1)
	if r.limit != 1 || r.room(12*ms, 1) || !func() bool { x, w := r.next(12*ms, 0); return x == nil && w == ms }() {
		t.Errorf("after two refusals: %+v", r)
	}
	if x, _ := r.next(13*ms, 1); x != nil {
		t.Error("the limit does not hold for repeats")
	}
	if x, _ := r.next(20*ms, 0); x != a {
		t.Error("the first one is not the first")
	}
	r.add(a, 20*ms, 0)
	r.add(a, 30*ms, 0)
	if a.due != 36*ms || r.room(35*ms, 0) {
		t.Errorf("the pause has not doubled: %v", a.due)
	}
	r.ended()
	r.waiting = r.waiting[:0]
	if !r.room(200*ms, 1) || r.limit != 2 || r.room(201*ms, 2) || !r.room(300*ms, 2) || r.limit != 3 || r.lowest != 1 {
		t.Errorf("the depth: %+v", r)
	}
}

// An I/O that the target does not answer is found while others continue.
func TestWatch(t *testing.T) {
	j := &job{o: &Options{}, size: 4096, first: 8192, ios: make([]slot, 3)}
	j.ios[1].sent.Store(int64(time.Second))
	j.ios[1].where.Store(5*directions + write)
	if err := j.watch(time.Second + ioTime); err != nil {
		t.Error(err)
	}
	if err := j.watch(time.Second + ioTime + 1); err == nil || err.Error() != "write of 4096 bytes at offset 28672: the target has not answered for 30s" {
		t.Errorf("the error is %v", err)
	}
}
