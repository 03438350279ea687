package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
	"github.com/iser-target/iser-target/tests/testkit/header"
)

// iserLua is the tshark dissector of iSER over iWARP. The path is absolute because tests
// change the directory.
var iserLua, _ = filepath.Abs("../../docs/iser.lua")

// needTshark skips t without tshark, or fails it if ISER_TARGET_REQUIRE_INTEROP is 1.
func needTshark(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("tshark"); err != nil {
		backendtest.Unavailable(t, "%v (tests/interop/setup.sh installs it)", err)
	}
}

// A recording is a running capture command.
type recording struct {
	file   string
	cmd    *exec.Cmd
	mu     sync.Mutex
	stderr bytes.Buffer
	begun  chan struct{}
	ended  chan error
}

// Write collects standard error, and closes begun when the capture has begun.
func (r *recording) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	had := strings.Contains(r.stderr.String(), "capturing")
	r.stderr.Write(b)
	if !had && strings.Contains(r.stderr.String(), "capturing") {
		close(r.begun)
	}
	return len(b), nil
}

// said returns standard error.
func (r *recording) said() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stderr.String()
}

// record starts to capture a session.
func (s *station) record(t *testing.T, tsih uint16, args ...string) *recording {
	t.Helper()
	r := &recording{file: filepath.Join(t.TempDir(), "f.pcapng"), begun: make(chan struct{}), ended: make(chan error, 1)}
	r.cmd = s.command(t, append([]string{"capture", fmt.Sprint(tsih), "-w", r.file}, args...)...)
	r.cmd.Stderr = r
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { r.ended <- r.cmd.Wait() }()
	t.Cleanup(func() { r.cmd.Process.Kill() })
	select {
	case <-r.begun:
	case err := <-r.ended:
		t.Fatalf("the capture does not begin: %v\n%s", err, r.said())
	case <-time.After(20 * time.Second):
		t.Fatal("the capture does not begin")
	}
	return r
}

// wait waits for the end of r, and fails t if it has another reason.
func (r *recording) wait(t *testing.T, reason string) {
	t.Helper()
	select {
	case err := <-r.ended:
		if !regexp.MustCompile(`\d+ packets with \d+ bytes, 0 bytes lost; the file has \d+ bytes; ended: ` + reason + `\n`).MatchString(r.said()) {
			t.Errorf("%v, and it says\n%s", err, r.said())
		}
		if err != nil {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatalf("the capture does not end\n%s", r.said())
	}
	if fi, err := os.Stat(r.file); err != nil || fi.Mode() != 0o600 {
		t.Errorf("the file: %v, %v", fi.Mode(), err)
	}
}

// has waits until the file of r has n bytes.
func (r *recording) has(t *testing.T, n int64) {
	t.Helper()
	testkit.Eventually(t, fmt.Sprint(n, " bytes in the file"), func() bool {
		fi, err := os.Stat(r.file)
		return err == nil && fi.Size() > n
	})
}

// interrupt ends r with SIGINT.
func (r *recording) interrupt(t *testing.T) {
	t.Helper()
	r.cmd.Process.Signal(os.Interrupt)
	r.wait(t, "it was stopped")
}

// tshark returns the output of tshark for a file.
func tshark(t *testing.T, file string, args ...string) string {
	t.Helper()
	// -2, because a first pass does not know that a packet is part of an FPDU that ends in
	// a later one. Heuristics would take iSER for RPC over RDMA.
	cmd := exec.Command("tshark", append([]string{"-2", "-r", file, "-X", "lua_script:" + iserLua, "--disable-protocol", "rpcordma",
		"-o", contentFirst}, args...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, stderr.String())
	}
	return string(out)
}

// seen counts the values of fields in a file, as in "iscsi.opcode 0x01".
func seen(t *testing.T, file string, args ...string) map[string]int {
	t.Helper()
	fields := []string{"tcp.stream", "iwarp_mpa.rev", "iwarp_rdma.opcode", "iser_iwarp.opcode", "iscsi.opcode", "frame.comment"}
	args = append(args, "-T", "fields", "-E", "aggregator=|")
	for _, f := range fields {
		args = append(args, "-e", f)
	}
	found := map[string]int{}
	for _, line := range strings.Split(tshark(t, file, args...), "\n") {
		for i, values := range strings.Split(line, "\t") {
			for _, v := range strings.Split(values, "|") {
				if v != "" {
					found[fields[i]+" "+v]++
				}
			}
		}
	}
	return found
}

func wantSeen(t *testing.T, found map[string]int, want ...string) {
	t.Helper()
	for _, w := range want {
		if found[w] == 0 {
			t.Errorf("no packet with %s in %v", w, found)
		}
	}
}

// misunderstood lists filters for packets that tshark does not understand.
var misunderstood = []string{
	"_ws.malformed",
	"tcp.len > 0 && !iwarp_mpa && !tcp.reassembled_in",
	"iwarp_mpa.fpdu && !iwarp_ddp_rdmap",
	"iwarp_rdma.opcode >= 3 && iwarp_rdma.opcode <= 6 && !iser_iwarp && !iwarp_rdma.send.reassembled_in",
	"iser_iwarp.opcode == 1 && !iscsi",
	"iwarp_rdma.opcode == 7",
	"tcp.checksum.status == 0",
	"ip.checksum.status == 0",
}

var checksums = []string{"-o", "tcp.check_checksum:TRUE", "-o", "ip.check_checksum:TRUE"}

// understood fails t unless tshark understands all packets of a capture of iSER, with right
// CRCs.
func understood(t *testing.T, file string) {
	t.Helper()
	filter := "(" + strings.Join(misunderstood, ") || (") + ")"
	if out := tshark(t, file, append(checksums, "-Y", filter)...); out != "" {
		t.Errorf("tshark does not understand\n%s", out)
	}
	text := tshark(t, file, "-V", "-O", "iwarp_mpa")
	if good, bad := strings.Count(text, "(Good CRC32)"), strings.Count(text, "Bad CRC32"); good < 10 || bad > 0 {
		t.Errorf("CRCs: %d are good, %d are bad", good, bad)
	}
}

// do writes and reads each of the sizes, in bytes.
func do(t *testing.T, s *initiator.Session, sizes ...int) {
	t.Helper()
	s.Do(&initiator.Command{}) // takes the unit attention
	for _, n := range sizes {
		b := bytes.Repeat([]byte{byte(n >> 9), 2, 3}, n)[:n]
		w := &initiator.Command{CDB: cdb.Write16(0, uint32(n/512)), Out: b}
		r := &initiator.Command{CDB: cdb.Read16(0, uint32(n/512)), In: make([]byte, n)}
		for _, c := range []*initiator.Command{w, r} {
			if err := s.Do(c); err != nil {
				t.Fatal(err)
			}
		}
		if w.Status != 0 || r.Status != 0 || !bytes.Equal(r.In, b) {
			t.Fatal("other data is read than was written")
		}
	}
}

// manyConnections allows several connections in a session.
func manyConnections(text string) string { return "limits: {connections_per_session: 4}\n" + text }

// The capture of a session from its first command is decoded by tshark as MPA, DDP, RDMAP
// and iSCSI. A connection that joins the session is in it with its login.
func TestCaptureFromTheFirstCommand(t *testing.T) {
	needTshark(t)
	s := newStation(t, manyConnections)
	i := s.loginWith(t, initiator.Options{Connections: 2})
	r := s.record(t, i.TSIH)
	do(t, i, 512, 4096, 65536, 512<<10)
	second := s.loginWith(t, initiator.Options{Join: i, CID: 1})
	do(t, second, 512, 65536)
	do(t, i, 512)
	r.interrupt(t)
	understood(t, r.file)
	found := seen(t, r.file)
	wantSeen(t, found,
		"tcp.stream 0", "tcp.stream 1", "iwarp_mpa.rev 2", "iser_iwarp.opcode 1",
		"iwarp_rdma.opcode 0x00", // RDMA Write
		"iwarp_rdma.opcode 0x01", // RDMA Read Request
		"iwarp_rdma.opcode 0x02", // RDMA Read Response
		"iwarp_rdma.opcode 0x03", // Send
		"iwarp_rdma.opcode 0x04", // Send with Invalidate
		"iscsi.opcode 0x01",      // SCSI Command
		"iscsi.opcode 0x21",      // SCSI Response
	)
	for what, n := range map[string]int{"iwarp_mpa.rev 2": 4, "iscsi.opcode 0x03": 2, "iscsi.opcode 0x23": 2} { // startup, Login Request, Login Response
		if found[what] != n {
			t.Errorf("%d packets with %s, want %d", found[what], what, n)
		}
	}
	for c := range found {
		if strings.HasPrefix(c, "frame.comment") {
			t.Error(c)
		}
	}
}

// writeAndRead writes and reads through i until stop is called.
func writeAndRead(t *testing.T, i *initiator.Session) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			w := &initiator.Command{CDB: cdb.Write16(0, 512), Out: make([]byte, 256<<10)}
			r := &initiator.Command{CDB: cdb.Read16(0, 64), In: make([]byte, 32<<10)}
			for ctx.Err() == nil {
				for _, c := range []*initiator.Command{w, r} {
					if err := i.Do(c); err != nil {
						t.Error(err)
						return
					}
				}
				time.Sleep(10 * time.Millisecond) // a moderate rate
			}
		})
	}
	return func() {
		cancel()
		wg.Wait()
	}
}

// tshark decodes a capture that begins in the middle of a busy session, with its login.
func TestCaptureUnderLoad(t *testing.T) {
	needTshark(t)
	s := newStation(t)
	i := s.login(t)
	do(t, i, 512, 64<<10)
	stop := writeAndRead(t, i)
	r := s.record(t, i.TSIH)
	r.has(t, 1<<20)
	stop()
	if err := i.Logout(t.Context()); err != nil {
		t.Error(err)
	}
	r.wait(t, "the session ended")
	understood(t, r.file)
	found := seen(t, r.file)
	wantSeen(t, found, "iwarp_mpa.rev 2", "iscsi.opcode 0x03", "iwarp_rdma.opcode 0x00", "iwarp_rdma.opcode 0x02", "iscsi.opcode 0x01", "iscsi.opcode 0x21",
		"iscsi.opcode 0x06", "iscsi.opcode 0x26") // Logout
	if out := tshark(t, r.file, "-Y", "tcp.flags.fin == 1", "-T", "fields", "-e", "tcp.flags"); strings.Count(out, "\n") != 2 {
		t.Errorf("ends of the connection: %q", out)
	}
}

// The capture of a session that stepped up from TCP to iSER has both.
func TestCaptureOfAStepUp(t *testing.T) {
	needTshark(t)
	s := newStation(t)
	i := s.loginWith(t, initiator.Options{Stream: true})
	r := s.record(t, i.TSIH, "--duration", "1s")
	do(t, i, 512, 64<<10)
	r.wait(t, "1s have passed")
	wantSeen(t, seen(t, r.file), "iwarp_mpa.rev 2", "iwarp_rdma.opcode 0x00", "iwarp_rdma.opcode 0x02", "iscsi.opcode 0x01", "iscsi.opcode 0x21")
	// tshark must be told that the login before MPA is iSCSI.
	_, port, _ := net.SplitHostPort(s.addr)
	wantSeen(t, seen(t, r.file, "-d", "tcp.port=="+port+",iscsi"), "iscsi.opcode 0x03", "iscsi.opcode 0x23")
}

// A capture ends at its limit, with a valid file.
func TestCaptureEndsAtItsLimit(t *testing.T) {
	needTshark(t)
	s := newStation(t)
	i := s.login(t)
	r := s.record(t, i.TSIH, "--max-size", "1MiB")
	do(t, i, 512<<10, 512<<10, 512<<10)
	r.wait(t, "the file has reached its limit of 1048576 bytes")
	if fi, err := os.Stat(r.file); err != nil || fi.Size() > 1<<20 || fi.Size() < 900<<10 {
		t.Errorf("%v bytes, %v", fi.Size(), err)
	}
	understood(t, r.file)
}

// contentFirst makes tshark look at the content before the port: a port that the system has chosen may be that
// of another protocol.
const contentFirst = "tcp.try_heuristic_first:TRUE"

// A capture can be piped into tshark.
func TestCaptureToAPipe(t *testing.T) {
	needTshark(t)
	s := newStation(t)
	i := s.login(t)
	cmd := s.command(t, "capture", "--session", fmt.Sprint(i.TSIH), "-w", "-", "--duration", "1s")
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	reader := exec.Command("tshark", "-r", "-", "-o", contentFirst)
	reader.Stdin = pipe
	var out bytes.Buffer
	reader.Stdout = &out
	if err := errors.Join(cmd.Start(), reader.Start()); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- errors.Join(reader.Wait(), cmd.Wait()) }()
	for ended := false; !ended; {
		do(t, i, 512)
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
			ended = true
		case <-time.After(10 * time.Millisecond):
		}
	}
	for _, want := range []string{"MPA Request Frame", "MPA Reply Frame", "DDP/RDMA"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}

// Wrong capture commands are refused and touch no file, and the end of the target ends a
// capture.
func TestCaptureErrors(t *testing.T) {
	s := newStation(t)
	i := s.login(t)
	id := fmt.Sprint(i.TSIH)
	file := filepath.Join(t.TempDir(), "there")
	s.says(t, cli.ExitUsage, "name the session", "capture", "-w", file)
	s.says(t, cli.ExitUsage, "exclude each other", "capture", id, "--session", id, "-w", file)
	s.says(t, cli.ExitUsage, "is not a number", "capture", "one", "-w", file)
	s.says(t, cli.ExitUsage, "-w is required", "capture", id)
	s.says(t, cli.ExitUsage, "-w is required", "capture", "--session", id)
	s.says(t, cli.ExitUsage, "--max-size", "capture", "--session", id, "-w", file, "--max-size", "1KiB")
	s.says(t, cli.ExitUsage, "--duration", "capture", "--session", id, "-w", file, "--duration", "-1s")
	s.says(t, cli.ExitNotFound, "session 999", "capture", "--session", "999", "-w", file)
	s.says(t, cli.ExitUnreachable, "no target answers", "capture", "--session", id, "-w", file, "--socket", filepath.Join(s.dir, "none"))
	if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file is left: %v", err)
	}
	if err := os.WriteFile(file, []byte("mine"), 0o644); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitRefused, "Use --force", "capture", "--session", id, "-w", file)
	fifo := file + ".fifo"
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitError, "not a regular file", "capture", "--session", id, "-w", fifo, "--force")
	if fi, err := os.Lstat(fifo); err != nil || fi.Mode()&fs.ModeNamedPipe == 0 {
		t.Errorf("the named pipe was replaced: %v, %v", fi, err)
	}
	r := s.record(t, i.TSIH)
	s.says(t, cli.ExitError, "a capture of the session is already running", "capture", "--session", id, "-w", file, "--force")
	if b, err := os.ReadFile(file); err != nil || string(b) != "mine" {
		t.Errorf("the file has %q, %v", b, err)
	}
	do(t, i, 4096)
	r.interrupt(t)
	s.says(t, cli.ExitOK, "ended: 100ms have passed", "capture", "--session", id, "-w", file, "--force", "--duration", "100ms")
	if fi, err := os.Stat(file); err != nil || fi.Mode() != 0o600 {
		t.Errorf("the file: %v, %v", fi.Mode(), err)
	}
	s.says(t, cli.ExitOK, "capture: session is captured by=", "events")
	s.says(t, cli.ExitOK, "capture: capture ended by=", "events")

	r = s.record(t, i.TSIH)
	do(t, i, 4096)
	s.cmd.Process.Signal(syscall.SIGTERM)
	r.wait(t, "the target ends")
}

// The file of a capture is valid after kill -9 of the target.
func TestCaptureOfKilledTarget(t *testing.T) {
	needTshark(t)
	s := newStation(t)
	i := s.login(t)
	r := s.record(t, i.TSIH)
	do(t, i, 512<<10)
	r.has(t, 512<<10)
	s.cmd.Process.Kill()
	err := <-r.ended
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != cli.ExitUnreachable || !strings.Contains(r.said(), "bytes are valid") {
		t.Errorf("%v, and it says\n%s", err, r.said())
	}
	understood(t, r.file)
}

// The file of a capture is valid if the file system is full.
func TestCaptureIntoAFullFile(t *testing.T) {
	needTshark(t)
	s := newStation(t)
	i := s.login(t)
	r := s.record(t, i.TSIH)
	const room = 300_001
	if err := unix.Prlimit(r.cmd.Process.Pid, unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: room, Max: room}, nil); err != nil {
		t.Fatal(err)
	}
	do(t, i, 512<<10)
	err := <-r.ended
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != cli.ExitError || !strings.Contains(r.said(), "bytes are valid") || !strings.Contains(r.said(), "file too large") {
		t.Errorf("%v, and it says\n%s", err, r.said())
	}
	if fi, err := os.Stat(r.file); err != nil || fi.Size() > room || !strings.Contains(r.said(), fmt.Sprintf("its %d bytes are valid", fi.Size())) {
		t.Errorf("the file: %v, %v", fi.Size(), err)
	}
	understood(t, r.file)
}

// A tcpSession is an iSCSI session over TCP, with or without digests.
type tcpSession struct {
	lun     byte
	t       *testing.T
	nc      net.Conn
	digests bool
	tsih    uint16
	header.Numbers
}

func loginTCP(t *testing.T, addr string, digests bool) *tcpSession {
	t.Helper()
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	nc.SetDeadline(time.Now().Add(time.Minute))
	s := &tcpSession{t: t, nc: nc, Numbers: header.Numbers{CmdSN: 1}}
	text := "InitiatorName=" + hostName + "\x00TargetName=" + storeName + "\x00SessionType=Normal\x00InitialR2T=Yes\x00ImmediateData=Yes\x00MaxRecvDataSegmentLength=65536\x00"
	if digests {
		text += "HeaderDigest=CRC32C\x00DataDigest=CRC32C\x00"
	}
	h := pdu.BHS(pdu.LoginRequest{Transit: true, CSG: pdu.LoginOperationalNegotiation, NSG: pdu.FullFeaturePhase, ISID: [6]byte{0x80, 1, 2}, CmdSN: 1}.Append(nil))
	s.send(h, []byte(text))
	rsp, _ := s.receive()
	if rsp.Opcode() != pdu.LoginResp || rsp[36] != 0 {
		t.Fatalf("login: %x", []byte(rsp))
	}
	s.digests, s.tsih = digests, binary.BigEndian.Uint16(rsp[14:])
	return s
}

func crc(b []byte) []byte {
	return binary.LittleEndian.AppendUint32(nil, crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
}

func (s *tcpSession) send(h pdu.BHS, data []byte) {
	s.t.Helper()
	h.SetDataSegmentLength(len(data))
	b := append([]byte{}, h...)
	if s.digests {
		b = append(b, crc(h)...)
	}
	if len(data) > 0 {
		data = append(data[:len(data):len(data)], make([]byte, pdu.Padded(len(data))-len(data))...)
		b = append(b, data...)
		if s.digests {
			b = append(b, crc(data)...)
		}
	}
	if _, err := s.nc.Write(b); err != nil {
		s.t.Fatal(err)
	}
}

func (s *tcpSession) receive() (h pdu.BHS, data []byte) {
	s.t.Helper()
	read := func(n int) []byte {
		b := make([]byte, n)
		if _, err := io.ReadFull(s.nc, b); err != nil {
			s.t.Fatal(err)
		}
		return b
	}
	h = read(pdu.BHSLen)
	if s.digests {
		read(4)
	}
	if n := h.DataSegmentLength(); n > 0 {
		data = read(pdu.Padded(n))[:n]
		if s.digests {
			read(4)
		}
	}
	if h.Opcode() != pdu.R2T {
		s.ExpStatSN = h.StatSN() + 1
	}
	return h, data
}

// do writes or reads n bytes with R2T, Data-Out and Data-In.
func (s *tcpSession) do(write bool, n int) {
	s.t.Helper()
	block, flag := cdb.Read16(0, uint32(n/512)), byte(pdu.FlagR)
	if write {
		block, flag = cdb.Write16(0, uint32(n/512)), pdu.FlagW
	}
	h := s.Request(pdu.SCSICommand, pdu.FlagF|flag|pdu.AttrSimple, false)
	h[9] = s.lun
	h.SetEDTL(uint32(n))
	h.SetCDB(block[:])
	s.send(h, nil)
	for {
		rsp, _ := s.receive()
		switch rsp.Opcode() {
		case pdu.R2T:
			const segment = 16 << 10
			for sn, off := uint32(0), uint32(0); off < rsp.DesiredDataTransferLength(); sn++ {
				part := min(segment, rsp.DesiredDataTransferLength()-off)
				out := make(pdu.BHS, pdu.BHSLen)
				flags := byte(0)
				if off+part == rsp.DesiredDataTransferLength() {
					flags = pdu.FlagF
				}
				out.Reset(pdu.DataOut, flags)
				out[9] = s.lun
				out.SetITT(s.ITT)
				out.SetTTT(rsp.TTT())
				out.SetExpStatSN(s.ExpStatSN)
				out.SetDataSN(sn)
				out.SetBufferOffset(rsp.BufferOffset() + off)
				s.send(out, make([]byte, part))
				off += part
			}
		case pdu.SCSIResponse:
			return
		case pdu.DataIn:
			if rsp.Flags()&pdu.FlagS != 0 {
				return
			}
		default:
			s.t.Fatalf("%x", []byte(rsp))
		}
	}
}

// tshark decodes a capture of a session over TCP as iSCSI, with and without digests, though
// it begins in the middle.
func TestCaptureOverTCP(t *testing.T) {
	needTshark(t)
	s := newStation(t)
	_, port, _ := net.SplitHostPort(s.addr)
	for _, digests := range []bool{false, true} {
		t.Run(fmt.Sprintf("digests=%t", digests), func(t *testing.T) {
			i := loginTCP(t, s.addr, digests)
			for range 3 {
				i.do(true, 64<<10)
				i.do(false, 64<<10)
			}
			r := s.record(t, i.tsih)
			for range 3 {
				i.do(true, 256<<10)
				i.do(false, 256<<10)
				i.do(false, 512)
			}
			r.interrupt(t)
			as := []string{"-d", "tcp.port==" + port + ",iscsi"}
			found := seen(t, r.file, as...)
			wantSeen(t, found,
				"iscsi.opcode 0x03", "iscsi.opcode 0x23", // Login
				"iscsi.opcode 0x01", "iscsi.opcode 0x21", // SCSI Command and Response
				"iscsi.opcode 0x05", "iscsi.opcode 0x25", // Data-Out and Data-In
				"iscsi.opcode 0x31", // R2T
			)
			if n := found["iscsi.opcode 0x05"]; n < 3*256/16 {
				t.Errorf("%d Data-Out PDUs", n)
			}
			bad := "_ws.malformed || (tcp.len > 0 && !iscsi && !tcp.reassembled_in) || tcp.checksum.status == 0"
			if out := tshark(t, r.file, append(append(as, checksums...), "-Y", bad)...); out != "" {
				t.Errorf("tshark does not understand\n%s", out)
			}
			text := tshark(t, r.file, append(as, "-V", "-O", "iscsi")...)
			good, wrong := strings.Count(text, "Good CRC32"), strings.Count(text, "Bad CRC32")
			if wrong > 0 || digests != (good > 100) {
				t.Errorf("digests: %d are good, %d are bad", good, wrong)
			}
		})
	}
}
