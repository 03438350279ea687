package crash

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	fusefs "github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/tests/interop/proc"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A fileSystem is one on which the target loses power.
type fileSystem struct {
	name string
	mkfs []string
	size int64 // of the medium, bytes
}

var fileSystems = []fileSystem{
	{"ext4", []string{"mkfs.ext4", "-q", "-b", "4096", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"}, 64 << 20},
	{"xfs", []string{"mkfs.xfs", "-q", "-f", "-K", "-s", "size=4096"}, 320 << 20},
}

// Variables of the process in which a test of power cuts runs.
const (
	powerFS   = "CRASH_POWER"      // the file system
	powerLies = "CRASH_POWER_LIES" // the medium drops flushes
	powerRaw  = "CRASH_POWER_RAW"  // only the contents of the files are compared, and a fault is what the test expects
)

// inNamespace runs a test of this package in a process with mounts of its own, which end with it. It returns
// what the process has written.
func inNamespace(t *testing.T, test string, env ...string) (string, error) {
	t.Helper()
	if os.Geteuid() != 0 {
		backendtest.Unavailable(t, "only root can mount file systems")
	}
	for _, fs := range fileSystems {
		if _, err := exec.LookPath(fs.mkfs[0]); err != nil {
			backendtest.Unavailable(t, "%s is not installed: make setup does that", fs.mkfs[0])
		}
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		backendtest.Unavailable(t, "the kernel has no FUSE: %v", err)
	}
	var out bytes.Buffer
	cmd := exec.Command(os.Args[0], "-test.run=^"+test+"$", "-test.v", "-test.timeout=20m")
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	if err := proc.Start(cmd); err != nil {
		t.Fatal(err)
	}
	err := cmd.Wait()
	return out.String(), err
}

// TestPowerCuts ends the power of a disk with ext4 and one with XFS at random moments: what was flushed is there, and
// of the rest any part. The program keeps LUNs, reservations and its configuration there, and afterwards has all that was
// durable when it was acknowledged. CRASH_ROUNDS and CRASH_SEED choose how often, and when.
func TestPowerCuts(t *testing.T) {
	for _, fs := range fileSystems {
		t.Run(fs.name, func(t *testing.T) {
			out, err := inNamespace(t, "TestPowerIsCut", powerFS+"="+fs.name)
			if t.Log(out); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestPowerCutsFindLies shows that the test sees data that is lost: on a disk that drops flushes, and with a program that
// leaves out a sync.
func TestPowerCutsFindLies(t *testing.T) {
	find := func(t *testing.T, env ...string) {
		t.Helper()
		out, err := inNamespace(t, "TestPowerIsCut", append(env, powerFS+"=ext4", powerRaw+"=1")...)
		if t.Log(out); err != nil {
			t.Error(err)
		}
	}
	t.Run("a disk that drops flushes", func(t *testing.T) { find(t, powerLies+"=1") })
	if variable(t, "CRASH_ROUNDS", 0) == 0 {
		return // each of the others needs a program of its own
	}
	for name, m := range map[string]struct{ file, text, instead string }{
		"no fdatasync of a LUN":           {"backend/disk.go", "return retry(func() error { return unix.Fdatasync(int(f)) })", "return nil"},
		"no RWF_DSYNC":                    {"backend/disk.go", "return unix.Pwritev2(int(f), [][]byte{p}, off, flags)", "return unix.Pwrite(int(f), p, off)"},
		"no sync after WRITE USING TOKEN": {"lun/odx.go", "	if u.writeThrough() {", "	if false {"},
		"no sync after EXTENDED COPY":     {"lun/copy.go", "if to := s.to.unit; to.writeThrough() {", "if to := s.to.unit; false {"},
	} {
		t.Run(name, func(t *testing.T) { find(t, "ISER_TARGET_BINARY="+mutant(t, m.file, m.text, m.instead)) })
	}
}

// mutant builds a program with another text in one of its files, and returns its path.
func mutant(t *testing.T, file, text, instead string) string {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(root, file)
	source, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(source), text); n != 1 {
		t.Fatalf("%s has %q %d times: change the mutant", file, text, n)
	}
	dir := t.TempDir()
	next, overlay, program := filepath.Join(dir, "next.go"), filepath.Join(dir, "overlay.json"), filepath.Join(dir, "iser-target")
	err = errors.Join(os.WriteFile(next, []byte(strings.Replace(string(source), text, instead, 1)), 0o600),
		os.WriteFile(overlay, fmt.Appendf(nil, `{"Replace": {%q: %q}}`, file, next), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", "build", "-overlay", overlay, "-o", program, "./cmd/iser-target")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, out)
	}
	return program
}

// TestPowerIsCut is what TestPowerCuts runs in a process of its own.
func TestPowerIsCut(t *testing.T) {
	i := slices.IndexFunc(fileSystems, func(fs fileSystem) bool { return fs.name == os.Getenv(powerFS) })
	if i < 0 {
		return // TestPowerCuts
	}
	rounds, seed := variable(t, "CRASH_ROUNDS", 6), variable(t, "CRASH_SEED", uint64(time.Now().UnixNano()))
	t.Logf("CRASH_SEED=%d", seed)
	begun := time.Now()
	c := newCutWorld(t, fileSystems[i], seed)
	c.load(t, seed, 1500*time.Millisecond)
	lies, raw := os.Getenv(powerLies) != "", os.Getenv(powerRaw) != ""
	rng := rand.New(rand.NewPCG(seed, 0))
	blocks, lost := 0, 0
	for round := range rounds {
		at := 1 + rng.IntN(c.m.position())
		faults := c.after(t, at, rng, lies, raw)
		blocks += c.fixed
		if raw && len(faults) > 0 {
			t.Logf("found after %d cuts: %s", round+1, faults[0])
			return
		}
		for _, f := range faults[:min(len(faults), 10)] {
			t.Errorf("round %d, cut at %d of %d: %s", round, at, c.m.position(), f)
		}
		if t.Failed() {
			t.Fatalf("round %d: %d faults; CRASH_SEED=%d", round, len(faults), seed)
		}
		lost += c.unflushed
	}
	if raw {
		t.Fatalf("%d cuts have found nothing", rounds)
	}
	n := c.counts()
	if n.writes == 0 || n.syncs == 0 || n.copies == 0 || n.tokens == 0 || n.racing == 0 || len(c.res) < 2 || len(c.chg) < 2 {
		t.Error("a part of the load did nothing")
	}
	t.Logf("%s: cuts: %d; acknowledged before: %d writes (%d durable), %d EXTENDED COPY (%d durable, %d of blocks that were written at that time; %d shared extents at the end), %d WRITE USING TOKEN (%d durable), %d syncs, %d PERSISTENT RESERVE OUT, %d changes; blocks of LUNs with one content that is right: %d; "+
		"writes of the disk that were not flushed: %d; in all %v", fileSystems[i].name, rounds, n.writes, n.durable, n.copies, n.durableCopies, n.racing, c.shared, n.tokens, n.durableTokens, n.syncs, len(c.res)-1, len(c.chg)-1, blocks, lost,
		time.Since(begun).Round(time.Second))
}

// A cutWorld is a world on a medium whose power is cut, and what happened when.
type cutWorld struct {
	*world
	fs    fileSystem
	m     *medium
	mount string
	data  [][]diskCommand // of each disk of the world, in order
	res   []moment[registrations]
	chg   []moment[configured]

	naa    map[byte][]byte // of LUNs
	ticks  atomic.Int64    // numbers of the begins and ends of commands
	copied atomic.Int64    // EXTENDED COPY commands that were acknowledged
	shared int             // extents of copies that share blocks with others, at the end of the load

	fixed     int // blocks that could have one content only, in the last cut
	unflushed int // writes since the last flush before it
}

// A diskCommand is a WRITE, an EXTENDED COPY, a WRITE USING TOKEN or a SYNCHRONIZE CACHE of a disk. One disk has one at a time.
type diskCommand struct {
	sent, acked  int   // positions; acked is 0 without an answer
	begun, ended int64 // ticks; ended is the last one without an answer
	lba          int
	// next has what each block may hold after it: of a copy of a block that was written at the same time, any of several
	// versions. nil: SYNCHRONIZE CACHE.
	next    [][]version
	from    *source // of EXTENDED COPY or WRITE USING TOKEN
	token   bool    // WRITE USING TOKEN
	durable bool    // FUA, or the LUN is write-through
}

// A source says what a copy reads.
type source struct{ disk, lba, count int }

// A moment is a state, and when the load requested it and got the answer.
type moment[T any] struct {
	sent, acked int
	state       T
}

// newCutWorld makes a file system on a medium, and starts a target on it.
func newCutWorld(t *testing.T, fs fileSystem, seed uint64) *cutWorld {
	t.Helper()
	c := &cutWorld{fs: fs, m: newMedium(fs.size), mount: filepath.Join(t.TempDir(), "mount")}
	dir := t.TempDir()
	server, err := fusefs.Mount(dir, &mediumDir{m: c.m}, &fusefs.Options{MountOptions: fuse.MountOptions{DirectMountStrict: true, DisableXAttrs: true}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Unmount() })
	if err := os.Mkdir(c.mount, 0o700); err != nil {
		t.Fatal(err)
	}
	device, detach := attach(t, filepath.Join(dir, mediumName))
	args := append(slices.Clone(fs.mkfs), device)
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
	if err := unix.Mount(device, c.mount, fs.name, unix.MS_NOATIME, ""); err != nil {
		t.Fatalf("mount: %v", err)
	}
	t.Cleanup(func() {
		unix.Unmount(c.mount, unix.MNT_DETACH)
		detach()
	})
	site := filepath.Join(c.mount, "site")
	if err := os.Mkdir(site, 0o700); err != nil {
		t.Fatal(err)
	}
	c.world = newWorldIn(t, site)
	for _, d := range c.disks {
		d.seed = seed
	}
	unix.Sync()
	c.m.begin()
	c.res = []moment[registrations]{{state: c.world.res.acked}}
	c.chg = []moment[configured]{{state: c.world.chg.acked}}
	return c
}

// attach makes a block device of a file, with blocks of 4096 bytes.
func attach(t *testing.T, path string) (device string, detach func()) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	return backendtest.AttachLoop(t, f, pageLen, false)
}

// load puts load on the target for a time, and then ends it with kill -9 and unmounts the file system.
func (c *cutWorld) load(t *testing.T, seed uint64, d time.Duration) {
	t.Helper()
	ports := c.login(t)
	var ended atomic.Bool
	var wg sync.WaitGroup
	each := func(stream uint64, f func(*rand.Rand) (lost bool, err error)) {
		rng := rand.New(rand.NewPCG(seed, stream))
		wg.Go(func() {
			for {
				if lost, err := f(rng); err != nil {
					if !lost || !ended.Load() {
						t.Errorf("during the load: %v", err)
					}
					return
				}
			}
		})
	}
	st, err := c.api.State(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c.naa = map[byte][]byte{}
	for _, target := range st.Targets {
		for _, l := range target.LUNs {
			if target.Name == store {
				c.naa[byte(l.ID)] = testkit.Unhex(l.NAA)
			}
		}
	}
	c.data = make([][]diskCommand, len(c.disks))
	for i, d := range c.disks {
		each(uint64(i+1), func(rng *rand.Rand) (bool, error) { return c.step(ports[i%len(ports)], i, d, rng) })
	}
	each(1000, func(rng *rand.Rand) (bool, error) {
		r := &c.world.res
		sent := c.m.position()
		lost, err := r.step(rng)
		return remember(c.m, &c.res, sent, &r.acked, r.flight, lost, err)
	})
	each(1001, func(rng *rand.Rand) (bool, error) {
		r := &c.world.chg
		sent := c.m.position()
		lost, err := r.step(t.Context(), c.api, rng)
		return remember(c.m, &c.chg, sent, &r.acked, r.flight, lost, err)
	})
	time.Sleep(d) // of the load
	// One in 10 copies reads blocks that are written at that time.
	testkit.Eventually(t, "150 copies", func() bool { return c.copied.Load() >= 150 || t.Failed() })
	ended.Store(true)
	c.Kill(t)
	wg.Wait()
	for _, p := range ports {
		p.Close()
	}
	c.resolve()
	c.shared = sharedExtents(t, filepath.Join(c.dir, fmt.Sprintf("%d.img", copiedLUN)))
	if c.fs.name == "xfs" && c.shared == 0 {
		t.Error("no copy shares blocks")
	}
	if err := unix.Unmount(c.mount, 0); err != nil {
		t.Fatal(err)
	}
}

// resolve finds out what copies may have copied. What a disk copies of itself does not change meanwhile. The other source, disk 0, has
// no copies, and a block of it has what was written last before the copy began, or what was written until it ended.
func (c *cutWorld) resolve() {
	for disk, list := range c.data {
		now := make([][]version, len(c.disks[disk].blocks)) // what its blocks hold for its initiator
		for i := range list {
			one := &list[i]
			if from := one.from; from != nil {
				for b := range from.count {
					next := now[from.lba+b]
					if from.disk != disk {
						next = c.during(from.disk, from.lba+b, one)
					}
					one.next = append(one.next, next)
				}
			}
			for b, next := range one.next {
				if len(next) == 0 {
					one.next[b] = []version{0}
				}
				now[one.lba+b] = one.next[b]
			}
		}
	}
}

// during returns what a block of a disk without copies may have held from the begin of a command to its end.
func (c *cutWorld) during(disk, lba int, one *diskCommand) []version {
	held := []version{0}
	for i := range c.data[disk] {
		w := &c.data[disk][i]
		switch {
		case w.next == nil || lba < w.lba || lba >= w.lba+len(w.next) || w.begun > one.ended:
		case w.ended < one.begun:
			held = slices.Clone(w.next[lba-w.lba])
		default:
			held = append(held, w.next[lba-w.lba]...)
		}
	}
	return held
}

// sharedExtents returns how many extents of a file share blocks with others (Documentation/filesystems/fiemap.rst).
func sharedExtents(t *testing.T, path string) (n int) {
	t.Helper()
	const fsIocFiemap, last, shared, most = 0xc020660b, 1, 0x2000, 256
	type extent struct {
		logical, physical, length uint64
		_                         [2]uint64
		flags                     uint32
		_                         [3]uint32
	}
	var m struct {
		start, length         uint64
		flags, mapped, extent uint32
		_                     uint32
		list                  [most]extent
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for {
		m.length, m.mapped, m.extent = 1<<62, 0, most
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), fsIocFiemap, uintptr(unsafe.Pointer(&m))); errno != 0 {
			t.Fatalf("FIEMAP of %s: %v", path, errno)
		}
		for _, e := range m.list[:m.mapped] {
			if e.flags&shared != 0 {
				n++
			}
			if e.flags&last != 0 {
				return n
			}
			m.start = e.logical + e.length
		}
		if m.mapped == 0 {
			return n
		}
	}
}

// remember appends the state after one step to list.
func remember[T any](m *medium, list *[]moment[T], sent int, acked, flight *T, lost bool, err error) (bool, error) {
	switch {
	case err == nil:
		*list = append(*list, moment[T]{sent, m.position(), *acked})
	case flight != nil:
		*list = append(*list, moment[T]{sent: sent, state: *flight})
	}
	return lost, err
}

// step executes one random command of a disk.
func (c *cutWorld) step(p port, i int, d *disk, rng *rand.Rand) (lost bool, err error) {
	through := d.lun == writeThroughLUN
	r, one := &request{lun: d.lun}, diskCommand{durable: through, ended: math.MaxInt64}
	n := 1 + rng.IntN(max(32<<10/d.size, 1))
	one.lba = rng.IntN(len(d.blocks) - n + 1)
	kinds := 10
	if i > 0 && d.size == c.disks[0].size {
		kinds = 13
	}
	switch k := rng.IntN(kinds); k {
	case 10, 11, 12: // EXTENDED COPY, or WRITE USING TOKEN, from what nobody changes meanwhile
		one.from, one.lba = copyRange(i, len(d.blocks), rng)
		if one.token = one.from.disk == i && rng.IntN(2) == 0; !one.token {
			r.cdb, r.out = c.copyOf(one.from, d, one.lba)
			break
		}
		token, lost, err := tokenOf(p, d.lun, one.from)
		if err != nil {
			return lost, err
		}
		r.cdb, r.out = useToken(token, one.lba, one.from.count)
	case 0, 1: // SYNCHRONIZE CACHE
		r.cdb[0] = 0x91
	case 2: // UNMAP
		one.next = make([][]version, n)
		r.cdb, r.out = [16]byte{0: 0x42, 8: 24}, make([]byte, 24)
		binary.BigEndian.PutUint16(r.out, 22)
		binary.BigEndian.PutUint16(r.out[2:], 16)
		binary.BigEndian.PutUint64(r.out[8:], uint64(one.lba))
		binary.BigEndian.PutUint32(r.out[16:], uint32(n))
	default:
		for i := range n {
			v := d.version(one.lba + i)
			one.next = append(one.next, []version{v})
			r.out = append(r.out, d.content(v, d.size)...)
		}
		r.cdb = cdb.Write16(uint64(one.lba), uint32(n))
		if k < 6 {
			r.cdb[1], one.durable = fua, true
		}
	}
	one.sent, one.begun = c.m.position(), c.ticks.Add(1)
	if lost, err = good(p, r); err == nil {
		one.acked, one.ended = c.m.position(), c.ticks.Add(1)
		if one.from != nil && !one.token {
			c.copied.Add(1)
		}
	}
	c.data[i] = append(c.data[i], one)
	return lost, err
}

// copyRange returns what a disk copies, of disk 0 or of itself, and to where. File systems can share the blocks of most of these
// ranges.
func copyRange(disk, blocks int, rng *rand.Rand) (from *source, to int) {
	for {
		from = &source{disk: disk * rng.IntN(2), lba: rng.IntN(blocks), count: 1 + rng.IntN(256)}
		if to = rng.IntN(blocks); rng.IntN(4) > 0 {
			from.lba, from.count, to = from.lba&^7, (from.count+7)&^7, to&^7
		}
		apart := from.disk != disk || from.lba+from.count <= to || to+from.count <= from.lba
		if apart && from.lba+from.count <= blocks && to+from.count <= blocks {
			return from, to
		}
	}
}

// copyOf returns EXTENDED COPY(LID1), without a list identifier, and its parameter list.
func (c *cutWorld) copyOf(from *source, d *disk, to int) (cdb [16]byte, list []byte) {
	const header, cscd, segment = 16, 32, 28
	be := binary.BigEndian
	list = make([]byte, header+2*cscd+segment)
	list[1] = 3 << 3 // LIST ID USAGE
	be.PutUint16(list[2:], 2*cscd)
	be.PutUint32(list[8:], segment)
	for i, naa := range [][]byte{c.naa[c.disks[from.disk].lun], c.naa[d.lun]} {
		p := list[header+i*cscd:]
		copy(p, []byte{0: 0xe4, 4: 0x01, 5: 0x03, 7: byte(len(naa))}) // identification descriptor: binary NAA
		copy(p[8:], naa)
		be.PutUint32(p[28:], uint32(d.size))
	}
	p := list[header+2*cscd:]
	p[0], p[3], p[7] = 0x02, segment-4, 1 // block to block, from the first to the second
	be.PutUint16(p[10:], uint16(from.count))
	be.PutUint64(p[12:], uint64(from.lba))
	be.PutUint64(p[20:], uint64(to))
	cdb[0] = 0x83
	be.PutUint32(cdb[10:], uint32(len(list)))
	return cdb, list
}

// tokenOf returns a token for blocks of a LUN.
func tokenOf(p port, lun byte, from *source) (token []byte, lost bool, err error) {
	const id, header, tokenLen, before = 1, 16, 512, 38
	list := make([]byte, header, header+16)
	list[1], list[15] = header-2+16, 16
	cdb := [16]byte{0: 0x83, 1: 0x10, 9: id, 13: byte(cap(list))}
	if lost, err = good(p, &request{lun: lun, cdb: cdb, out: appendRange(list, from.lba, from.count)}); err != nil {
		return nil, lost, err
	}
	info := &request{lun: lun, cdb: [16]byte{0: 0x84, 1: 0x07, 5: id, 12: 4}, in: make([]byte, before+tokenLen)}
	lost, err = good(p, info)
	return info.in[before:][:tokenLen], lost, err
}

// useToken returns WRITE USING TOKEN and its parameter list.
func useToken(token []byte, to, count int) (cdb [16]byte, list []byte) {
	const header = 536
	be := binary.BigEndian
	list = make([]byte, header, header+16)
	be.PutUint16(list, header-2+16)
	copy(list[16:], token)
	list[header-1] = 16
	cdb = [16]byte{0: 0x83, 1: 0x11, 9: 2}
	be.PutUint32(cdb[10:], header+16)
	return cdb, appendRange(list, to, count)
}

// appendRange appends a block device range descriptor.
func appendRange(list []byte, lba, count int) []byte {
	be := binary.BigEndian
	return append(be.AppendUint32(be.AppendUint64(list, uint64(lba)), uint32(count)), 0, 0, 0, 0)
}

// after cuts the power at a position, starts the target on what the disk has, and returns what is wrong. raw: it
// reads the files of LUNs without a target instead.
func (c *cutWorld) after(t *testing.T, at int, rng *rand.Rand, lies, raw bool) (faults []string) {
	t.Helper()
	c.fixed, c.unflushed = 0, 0
	for i, d := range c.disks {
		c.expect(d, c.data[i], at)
	}
	c.world.res.acked, c.world.res.flight = expected(c.res, at)
	c.world.chg.acked, c.world.chg.flight = expected(c.chg, at)
	for i := at; i > 0 && c.m.log[i-1].page != nil; i-- {
		c.unflushed++
	}

	image := filepath.Join(t.TempDir(), "image")
	if err := c.write(image, c.m.cut(at, rng, lies)); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(image)
	device, detach := attach(t, image)
	defer detach()
	flags := uintptr(unix.MS_NOATIME)
	if raw {
		flags |= unix.MS_RDONLY
	}
	if err := unix.Mount(device, c.mount, c.fs.name, flags, ""); err != nil {
		return []string{fmt.Sprintf("mount: %v", err)}
	}
	defer func() {
		if err := unix.Unmount(c.mount, 0); err != nil {
			t.Fatalf("unmount: %v", err)
		}
	}()
	if raw {
		return c.files()
	}
	c.again(t)
	defer c.Kill(t)
	return c.check(t)
}

// write writes a medium to a file.
func (c *cutWorld) write(path string, p pages) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	err = f.Truncate(c.fs.size)
	for at, page := range p {
		if page != zeroPage && err == nil {
			_, err = f.WriteAt(page[:], at)
		}
	}
	return errors.Join(err, f.Close())
}

// expect notes what the blocks of d may hold after a cut.
func (c *cutWorld) expect(d *disk, commands []diskCommand, at int) {
	durable, later := make([][]version, len(d.blocks)), make([][][]version, len(d.blocks))
	for _, one := range commands {
		if one.sent > at {
			break
		}
		acked := one.acked > 0 && one.acked <= at
		for i, next := range one.next {
			b := one.lba + i
			if later[b] = append(later[b], next); one.durable && acked {
				durable[b], later[b] = next, nil
			}
		}
		if one.next != nil || !acked {
			continue
		}
		for b := range later {
			if n := len(later[b]); n > 0 {
				durable[b], later[b] = later[b][n-1], nil
			}
		}
	}
	for i := range d.blocks {
		b := &d.blocks[i]
		if *b = (block{}); durable[i] != nil {
			b.acked, b.flight = durable[i][0], slices.Concat(durable[i][1:], slices.Concat(later[i]...))
		} else {
			b.flight = slices.Concat(later[i]...)
		}
		if len(b.flight) == 0 {
			c.fixed++
		}
	}
}

// expected returns the last state that was acknowledged before a cut, and the one that the load had requested.
func expected[T any](list []moment[T], at int) (acked T, flight *T) {
	for i := range list {
		switch m := &list[i]; {
		case i == 0, m.acked > 0 && m.acked <= at:
			acked = m.state
		case m.sent <= at:
			flight = &m.state
		}
	}
	return acked, flight
}

// files compares the files of LUNs without checksums.
func (c *cutWorld) files() (faults []string) {
	for _, d := range c.disks {
		data, err := os.ReadFile(filepath.Join(c.dir, fmt.Sprintf("%d.img", d.lun)))
		switch {
		case d.lun == checkedLUN:
		case err != nil:
			faults = append(faults, err.Error())
		case len(data) != diskSize:
			faults = append(faults, fmt.Sprintf("LUN %d has %d bytes", d.lun, len(data)))
		default:
			faults = append(faults, d.check(0, data)...)
		}
	}
	return faults
}

// counts returns how much was acknowledged.
func (c *cutWorld) counts() (n struct{ writes, durable, syncs, copies, tokens, durableTokens, durableCopies, racing int }) {
	for _, list := range c.data {
		for _, one := range list {
			switch {
			case one.acked == 0:
			case one.next == nil:
				n.syncs++
			case one.token:
				if n.tokens++; one.durable {
					n.durableTokens++
				}
			case one.from != nil:
				if n.copies++; one.durable {
					n.durableCopies++
				}
				if slices.ContainsFunc(one.next, func(v []version) bool { return len(v) > 1 }) {
					n.racing++
				}
			default:
				n.writes++
				if one.durable {
					n.durable++
				}
			}
		}
	}
	return n
}
