package initiator_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/initiator"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	iserinitiator "github.com/iser-target/iser-target/iser/initiator"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/loopback"
)

const targetName = loopback.Name

var check, within, transportOf = loopback.Check, loopback.Within, loopback.Transport

// A target serves LUNs 0 and 300 over one transport.
type target struct {
	node  *iscsi.Node
	addr  string
	store *backendtest.Faulty // of LUN 0
}

// startTarget serves until the test ends, and then checks that nothing is left behind.
func startTarget(t testing.TB, transport string, o iscsi.Options, auth *security.CHAP) *target {
	t.Helper()
	o.LogoutWait = 2 * time.Second
	o.DiscoveryAuth = auth
	o.Limits.Digests, o.Limits.MaxConnections = true, 4
	store := &backendtest.Faulty{Store: loopback.Memory(t, 32<<20)}
	tg := loopback.Serve(t, loopback.Config{Transport: transport, Node: o, Auth: auth,
		LUNs: map[uint16]backend.Store{0: store, 300: loopback.Memory(t, 32<<20)}})
	return &target{node: tg.Node, addr: tg.Addr, store: store}
}

// connect logs in to tg, and closes the session when the test ends.
func connect(t testing.TB, tg *target, c initiator.Config) *initiator.Session {
	t.Helper()
	c.Target = targetName
	s, err := initiator.Connect(within(t), tg.addr, c)
	check(t, err)
	t.Cleanup(func() { s.Close() })
	return s
}

// Data is what it was, over both transports, with digests, several connections and many commands at once.
func TestData(t *testing.T) {
	for _, tc := range []struct {
		name, transport string
		cfg             initiator.Config
	}{
		{"TCP", "tcp", initiator.Config{}},
		{"TCP with digests", "tcp", initiator.Config{HeaderDigest: true, DataDigest: true}},
		{"TCP with a data digest, 3 connections", "tcp", initiator.Config{DataDigest: true, Connections: 3}},
		{"TCP, 1 command at a time", "tcp", initiator.Config{QueueDepth: 1}},
		{"iSER", "iser", initiator.Config{}},
		{"iSER, 2 connections", "iser", initiator.Config{Connections: 2}},
		{"iSER with Hello, whole data and high offsets", "iser", initiator.Config{
			Transport: iserinitiator.Transport{Hello: true, WholeData: true, BaseOffset: 0xffff888012345000}, Connections: 2}},
		{"iSER without Send with Invalidate", "iser", initiator.Config{Transport: iserinitiator.Transport{NoInvalidate: true}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tg := startTarget(t, tc.transport, iscsi.Options{}, nil)
			if tc.cfg.Transport == nil {
				tc.cfg.Transport = transportOf(tc.transport)
			}
			s := connect(t, tg, tc.cfg)
			ctx := within(t)
			if got, want := s.Connections(), max(tc.cfg.Connections, 1); got != want {
				t.Errorf("%d connections, want %d", got, want)
			}
			luns, err := s.LUNs(ctx)
			check(t, err)
			if !slices.Equal(luns, []int{0, 300}) {
				t.Errorf("LUNs %v", luns)
			}
			var writers sync.WaitGroup
			for i, id := range []int{0, 300, 0} {
				d, err := s.Open(ctx, id)
				check(t, err)
				if d.Size() != 32<<20 || d.BlockSize != 512 || d.Vendor == "" || d.ReadOnly {
					t.Errorf("%+v", d)
				}
				// Two writers share LUN 0, one half each.
				writers.Go(func() { exercise(t, ctx, d, int64(i/2)*d.Size()/2, d.Size()/2) })
			}
			writers.Wait()
			check(t, s.Ping(ctx))
			response, err := s.TaskManagement(ctx, pdu.LogicalUnitReset, 0)
			if err != nil || response != pdu.FunctionComplete {
				t.Errorf("LOGICAL UNIT RESET: %d, %v", response, err)
			}
			check(t, s.Logout(ctx))
			if err := s.Do(ctx, &initiator.Command{}); !errors.Is(err, net.ErrClosed) {
				t.Errorf("a command after the logout: %v", err)
			}
		})
	}
}

// exercise writes and reads n bytes at off in pieces of many sizes.
func exercise(t *testing.T, ctx context.Context, d *initiator.Disk, off, n int64) {
	want := make([]byte, n)
	random := rand.NewChaCha8([32]byte{byte(off >> 20), byte(d.LUN())})
	random.Read(want)
	sizes := []int64{512, 4096, 8192, 8704, 65536, 300 * 512, 1 << 20, 3 << 20}
	for at, i := int64(0), 0; at < n; i++ {
		k := min(sizes[i%len(sizes)], n-at)
		if err := d.Write(ctx, want[at:at+k], off+at); err != nil {
			t.Error(err)
			return
		}
		at += k
	}
	if err := d.Sync(ctx); err != nil {
		t.Error(err)
	}
	got := make([]byte, n)
	for at, i := int64(0), 3; at < n; i++ {
		k := min(sizes[i%len(sizes)], n-at)
		if err := d.Read(ctx, got[at:at+k], off+at); err != nil {
			t.Error(err)
			return
		}
		at += k
	}
	if !bytes.Equal(got, want) {
		t.Errorf("LUN %d from %d: other data", d.LUN(), off)
	}
}

const (
	secret       = "in the dark of night"
	targetSecret = "answer me, o target"
)

func chap(t *testing.T) *security.CHAP {
	c, err := security.NewCHAP(security.CHAPConfig{
		Algorithms: []security.CHAPAlgorithm{security.CHAPSHA3256, security.CHAPSHA256, security.CHAPMD5},
		Users:      []security.CHAPUser{{CHAPIdentity: security.CHAPIdentity{Name: "anna", Secret: secret}}},
		Target:     security.CHAPIdentity{Name: "store", Secret: targetSecret},
	})
	check(t, err)
	return c
}

func TestCHAP(t *testing.T) {
	for _, transport := range []string{"tcp", "iser"} {
		t.Run(transport, func(t *testing.T) {
			tg := startTarget(t, transport, iscsi.Options{}, chap(t))
			for _, tc := range []struct {
				name   string
				chap   *initiator.CHAP
				mutual bool
				err    string // empty: it logs in
			}{
				{"one way", &initiator.CHAP{Name: "anna", Secret: secret}, false, ""},
				{"both ways", &initiator.CHAP{Name: "anna", Secret: secret, TargetSecret: targetSecret}, true, ""},
				{"both ways, with the name", &initiator.CHAP{Name: "anna", Secret: secret, TargetSecret: targetSecret, TargetName: "store"}, true, ""},
				{"none", nil, false, "refused the login"},
				{"wrong secret", &initiator.CHAP{Name: "anna", Secret: "in the light of day"}, false, "authentication failure (0x0201)"},
				{"wrong target", &initiator.CHAP{Name: "anna", Secret: secret, TargetSecret: "another secret!"}, false, "does not know its secret"},
				{"wrong name of the target", &initiator.CHAP{Name: "anna", Secret: secret, TargetSecret: targetSecret, TargetName: "shop"}, false, `its name is "store", not "shop"`},
				{"short secret", &initiator.CHAP{Name: "anna", Secret: "short"}, false, "secret of the initiator"},
				{"same secret", &initiator.CHAP{Name: "anna", Secret: secret, TargetSecret: secret}, false, "the same secret"},
				{"no name", &initiator.CHAP{Secret: secret}, false, "the name is empty"},
			} {
				t.Run(tc.name, func(t *testing.T) {
					cfg := initiator.Config{Target: targetName, Transport: transportOf(transport), CHAP: tc.chap}
					targets, discoverErr := initiator.Discover(within(t), tg.addr, cfg)
					s, err := initiator.Connect(within(t), tg.addr, cfg)
					if tc.err != "" {
						if err == nil || !strings.Contains(err.Error(), tc.err) {
							t.Errorf("the error is %v, want %q", err, tc.err)
						}
						if discoverErr == nil {
							t.Error("discovery needs no secret")
						}
						if strings.Contains(fmt.Sprint(err), secret) || strings.Contains(fmt.Sprint(err), targetSecret) {
							t.Errorf("the error has the secret: %v", err)
						}
						return
					}
					check(t, err)
					defer s.Close()
					check(t, discoverErr)
					if len(targets) != 1 || targets[0].Name != targetName {
						t.Errorf("discovery: %+v", targets)
					}
					if p := s.Params(); !p.Authenticated || p.TargetAuthenticated != tc.mutual {
						t.Errorf("authenticated: %v, the target: %v, want %v", p.Authenticated, p.TargetAuthenticated, tc.mutual)
					}
				})
			}
		})
	}
}

func TestDiscover(t *testing.T) {
	for _, transport := range []string{"tcp", "iser"} {
		tg := startTarget(t, transport, iscsi.Options{}, nil)
		found, err := initiator.Discover(within(t), tg.addr, initiator.Config{Transport: transportOf(transport)})
		check(t, err)
		want := initiator.Portal{Address: tg.addr, Group: 1}
		if len(found) != 1 || found[0].Name != targetName || !slices.Equal(found[0].Portals, []initiator.Portal{want}) {
			t.Errorf("%s: %+v", transport, found)
		}
	}
}

func TestUnknownTarget(t *testing.T) {
	tg := startTarget(t, "tcp", iscsi.Options{}, nil)
	_, err := initiator.Connect(within(t), tg.addr, initiator.Config{Target: "iqn.2026-11.io.example:other"})
	var refused *initiator.LoginError
	if !errors.As(err, &refused) || refused.Status != pdu.LoginNotFound {
		t.Errorf("%v", err)
	}
}

// A redirected login goes where the target says.
func TestRedirect(t *testing.T) {
	first, second := startTarget(t, "tcp", iscsi.Options{}, nil), startTarget(t, "tcp", iscsi.Options{}, nil)
	all, err := security.Compile([]string{"iqn.*"})
	check(t, err)
	const moved = "iqn.2026-11.io.example:moved"
	luns := lun.NewInventory()
	defer luns.Close()
	for _, tg := range []*target{first, second} {
		to := ""
		if tg == first {
			to = second.addr
		}
		check(t, tg.node.AddTarget(iscsi.TargetConfig{Name: moved, Initiators: all, LUNs: luns, Redirect: iscsi.Redirect{Address: to}}))
	}
	s, err := initiator.Connect(within(t), first.addr, initiator.Config{Target: moved})
	check(t, err)
	defer s.Close()
	if s.Address() != second.addr {
		t.Errorf("the session is at %s, want %s", s.Address(), second.addr)
	}
}

// A command whose context ends comes back soon, although its store hangs. From then on nobody writes to its memory.
func TestCancel(t *testing.T) {
	for _, transport := range []string{"tcp", "iser"} {
		t.Run(transport, func(t *testing.T) {
			tg := startTarget(t, transport, iscsi.Options{}, nil)
			s := connect(t, tg, initiator.Config{Transport: transportOf(transport)})
			d, err := s.Open(within(t), 0)
			check(t, err)
			other, err := s.Open(within(t), 300)
			check(t, err)
			gate := tg.store.Shut(backendtest.ReadAt)
			defer gate.Open()
			ctx, cancel := context.WithCancel(within(t))
			go func() { <-gate.Entered; cancel() }()
			p := bytes.Repeat([]byte{0xaa}, 4096)
			if err := d.Read(ctx, p, 0); !errors.Is(err, context.Canceled) {
				t.Errorf("the error is %v", err)
			}
			gate.Open()
			check(t, other.Read(within(t), make([]byte, 4096), 0)) // the session lives on
			if !bytes.Equal(p, bytes.Repeat([]byte{0xaa}, 4096)) {
				t.Error("the target wrote to the memory of an aborted command")
			}
		})
	}
}

// Everything that waits ends when the session is closed.
func TestClose(t *testing.T) {
	for _, transport := range []string{"tcp", "iser"} {
		t.Run(transport, func(t *testing.T) {
			tg := startTarget(t, transport, iscsi.Options{}, nil)
			s := connect(t, tg, initiator.Config{Transport: transportOf(transport), QueueDepth: 2})
			d, err := s.Open(within(t), 0)
			check(t, err)
			gate := tg.store.Shut(backendtest.WriteAt)
			defer gate.Open()
			const writers = 5 // two are in progress, the others wait for room
			failed := make(chan error, writers)
			for i := range writers {
				go func() { failed <- d.Write(within(t), make([]byte, 256<<10), int64(i)<<20) }()
			}
			<-gate.Entered
			s.Close()
			for range writers {
				if err := <-failed; !errors.Is(err, initiator.ErrClosed) {
					t.Errorf("the error is %v", err)
				}
			}
		})
	}
}

// A Command that is used again allocates nothing, and neither does the target.
func TestNoAllocations(t *testing.T) {
	if testkit.Race {
		t.Skip("the race detector makes sync.Pool forget at random")
	}
	for _, transport := range []string{"tcp", "iser"} {
		for _, size := range []int{4 << 10, 64 << 10, 512 << 10} {
			for _, write := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%d/write=%v", transport, size, write), func(t *testing.T) {
					tg := startTarget(t, transport, iscsi.Options{}, nil)
					s := connect(t, tg, initiator.Config{Transport: transportOf(transport)})
					d, err := s.Open(within(t), 0)
					check(t, err)
					done := make(chan *initiator.Command, 4)
					ctx := context.Background()
					list := make([]*initiator.Command, cap(done))
					for i := range list {
						c := &initiator.Command{Done: done}
						if write {
							c.Out = make([]byte, size)
							d.WriteCDB(c, int64(i*size))
						} else {
							c.In = make([]byte, size)
							d.ReadCDB(c, int64(i*size))
						}
						list[i] = c
					}
					some := func() {
						for _, c := range list {
							check(t, s.Queue(ctx, c))
						}
						s.Flush()
						for range list {
							check(t, (<-done).Check())
						}
					}
					for range 30 {
						some()
					}
					defer debug.SetGCPercent(debug.SetGCPercent(-1))
					if n := testing.AllocsPerRun(200, some); n >= 1 {
						t.Errorf("%v allocations for %d commands", n, len(list))
					}
				})
			}
		}
	}
}

// A portal that serves only iSCSI over TCP, or closes the connection, ends in an error that says so.
func TestOtherProtocol(t *testing.T) {
	closing, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	defer closing.Close()
	go func() {
		for {
			nc, err := closing.Accept()
			if err != nil {
				return
			}
			nc.Read(make([]byte, 100))
			nc.Close()
		}
	}()
	for _, addr := range []string{startTarget(t, "tcp", iscsi.Options{}, nil).addr, closing.Addr().String()} {
		transport := iserinitiator.Transport{RDMA: rdma.Options{StartupTimeout: 200 * time.Millisecond}}
		_, err := initiator.Connect(within(t), addr, initiator.Config{Target: targetName, Transport: transport})
		if err == nil || !strings.Contains(err.Error(), "may not serve iSER") {
			t.Errorf("the error is %v", err)
		}
	}
}

// A program reaches the stream below a Carrier, and learns how many RDMA Reads the target uses. Commands that it starts come back.
func TestCarrier(t *testing.T) {
	tg := startTarget(t, "iser", iscsi.Options{}, nil)
	dialed, err := iserinitiator.Transport{Hello: true, RDMA: rdma.Options{IRD: 5}}.Dial(within(t), tg.addr)
	check(t, err)
	c := dialed.(*iserinitiator.Carrier)
	defer c.Close()
	text := append([]keys.Pair{{Key: "InitiatorName", Value: initiator.DefaultName}, {Key: "TargetName", Value: targetName},
		{Key: "SessionType", Value: "Normal"}}, c.Offer(initiator.Offer{})...)
	login := pdu.LoginRequest{Transit: true, CSG: pdu.LoginOperationalNegotiation, NSG: pdu.FullFeaturePhase, ISID: [6]byte{0x80}, CmdSN: 1}
	h, data := pdu.BHS(login.Append(nil)), keys.AppendPair(nil, text...)
	h.SetDataSegmentLength(len(data))
	check(t, c.Post(h, data))
	c.Flush()
	var p initiator.PDU
	check(t, c.Receive(&p))
	if rsp := pdu.ParseLoginResponse(p.BHS); rsp.Status != 0 || !rsp.Transit || c.ORD() != 0 {
		t.Fatalf("%+v, iSER-ORD %d", rsp, c.ORD())
	}
	cmd := &initiator.Command{In: make([]byte, 36), Done: make(chan *initiator.Command, 1)}
	check(t, c.EnterFullFeature(initiator.Params{MaxSendSegment: 8192}, func(uint32) *initiator.Command { return cmd }))
	if c.ORD() != 5 || c.Stream().IRD() != 5 {
		t.Errorf("iSER-ORD %d, IRD %d, want 5", c.ORD(), c.Stream().IRD())
	}
	for range 8 { // unit attentions do not end INQUIRY, so each has data
		b := cmd.BHS()
		b.Reset(pdu.SCSICommand, pdu.FlagF|pdu.FlagR|pdu.AttrSimple)
		b.SetITT(7)
		b.SetCmdSN(login.CmdSN)
		b.SetEDTL(36)
		b.SetCDB([]byte{0x12, 4: 36, 15: 0})
		login.CmdSN++
		cmd.Hold()
		check(t, c.PostCommand(cmd))
		c.Flush()
		clear(cmd.In)
		check(t, c.Receive(&p))
		if m := c.Message(); p.BHS.Opcode() != pdu.SCSIResponse || p.BHS.Status() != 0 || !m.Invalidates || len(m.Data) != 28+pdu.BHSLen {
			t.Fatalf("%v with status %#x, in %+v", p.BHS.Opcode(), p.BHS.Status(), m)
		}
		c.End(cmd)
		cmd.Release()
		if back := <-cmd.Done; back != cmd || !bytes.Contains(cmd.In, []byte("ISERTGT")) {
			t.Fatalf("%q", cmd.In)
		}
	}
}
