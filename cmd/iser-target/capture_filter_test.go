package main

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// twoLUNs gives the target a second LUN.
func twoLUNs(text string) string {
	return strings.Replace(text, "size: 1MiB}", "size: 1MiB}, {id: 1, backend: memory, size: 1MiB}", 1)
}

// marks are the data of the LUNs in tests of filters.
var marks = []string{"data of LUN zero", "data of LUN one."}

// onBoth writes and reads n bytes of both LUNs, over and over.
func onBoth(t *testing.T, s *initiator.Session, rounds, n int) {
	t.Helper()
	for lun := range marks {
		s.Do(&initiator.Command{LUN: byte(lun)}) // takes the unit attention
	}
	for range rounds {
		for lun, mark := range marks {
			b := bytes.Repeat([]byte(mark), n/len(mark))
			w := &initiator.Command{LUN: byte(lun), CDB: cdb.Write16(0, uint32(n/512)), Out: b}
			r := &initiator.Command{LUN: byte(lun), CDB: cdb.Read16(0, uint32(n/512)), In: make([]byte, n)}
			for _, c := range []*initiator.Command{w, r} {
				if err := s.Do(c); err != nil || c.Status != 0 {
					t.Fatal(err, c.Status)
				}
			}
			if !bytes.Equal(r.In, b) {
				t.Fatal("other data is read than was written")
			}
		}
	}
}

// opcodesOf lists the PDUs and messages that a session over iSER has with reads and writes.
var opcodesOf = []string{"iwarp_mpa.rev 2", "iwarp_rdma.opcode 0x00", "iwarp_rdma.opcode 0x01", "iwarp_rdma.opcode 0x02", "iscsi.opcode 0x03", "iscsi.opcode 0x23", "iscsi.opcode 0x01", "iscsi.opcode 0x21"}

// filteredOK fails t unless tshark understands all packets of a filtered capture, except for the data that it leaves out.
func filteredOK(t *testing.T, file string, args ...string) {
	t.Helper()
	bad := "_ws.malformed || tcp.analysis.retransmission || iwarp_rdma.opcode == 7"
	if out := tshark(t, file, append(args, "-Y", bad)...); out != "" {
		t.Errorf("tshark does not understand\n%s", out)
	}
	// Only where the capture of a direction begins.
	if out := tshark(t, file, append(args, "-Y", "tcp.analysis.lost_segment")...); strings.Count(out, "\n") > 2 {
		t.Errorf("gaps:\n%s", out)
	}
}

// contains reports which marks the file has.
func contains(t *testing.T, file string) (found [2]bool) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for i, m := range marks {
		found[i] = bytes.Contains(b, []byte(m))
	}
	return found
}

// A filtered capture of a session over iSER is one that tshark decodes. --headers-only has every command without its data, --lun the
// commands of one LUN with their data and nothing of the other, and --snaplen no packet that is longer.
func TestCaptureFiltersISER(t *testing.T) {
	needTshark(t)
	const n, rounds = 256 << 10, 4
	for _, tc := range []struct {
		args     []string
		has      [2]bool // data of LUNs
		commands int     // SCSI Commands, with the TEST UNIT READY of each LUN
		most     int64   // bytes of the file
	}{
		{[]string{"--headers-only"}, [2]bool{}, 2 + 4*rounds, 96 << 10},
		{[]string{"--lun", "1"}, [2]bool{false, true}, 1 + 2*rounds, 3 * n * rounds},
		{[]string{"--lun", "0", "--headers-only"}, [2]bool{}, 1 + 2*rounds, 64 << 10},
		{[]string{"--snaplen", "256"}, [2]bool{true, true}, 2 + 4*rounds, 256 << 10},
	} {
		t.Run(strings.Join(tc.args, " "), func(t *testing.T) {
			s := newStation(t, twoLUNs)
			i := s.login(t)
			r := s.record(t, i.TSIH, tc.args...)
			onBoth(t, i, rounds, n)
			r.interrupt(t)
			found := seen(t, r.file)
			want := opcodesOf
			if tc.args[0] == "--snaplen" { // tshark decodes no FPDU that is cut off
				want = []string{"iwarp_mpa.rev 2", "iscsi.opcode 0x03", "iscsi.opcode 0x23"}
			}
			wantSeen(t, found, want...)
			if got := found["iscsi.opcode 0x01"]; got != tc.commands || found["iscsi.opcode 0x21"] != tc.commands {
				t.Errorf("%d commands and %d responses, want %d: %v", got, found["iscsi.opcode 0x21"], tc.commands, found)
			}
			filteredOK(t, r.file)
			if has := contains(t, r.file); has != tc.has {
				t.Errorf("it has the data of LUNs %v, want %v", has, tc.has)
			}
			if fi, err := os.Stat(r.file); err != nil || fi.Size() > tc.most {
				t.Errorf("%d bytes, want at most %d", fi.Size(), tc.most)
			}
		})
	}
}

// The same over TCP, with and without digests, for a capture that begins in the middle.
func TestCaptureFiltersTCP(t *testing.T) {
	needTshark(t)
	s := newStation(t, twoLUNs)
	_, port, _ := net.SplitHostPort(s.addr)
	as := []string{"-d", "tcp.port==" + port + ",iscsi"}
	for _, digests := range []bool{false, true} {
		for _, flag := range []string{"--headers-only", "--lun=1", "--snaplen=256"} {
			t.Run(fmt.Sprintf("digests=%t %s", digests, flag), func(t *testing.T) {
				i := loginTCP(t, s.addr, digests)
				defer i.nc.Close()
				for range 3 {
					i.do(true, 64<<10)
					i.do(false, 64<<10)
				}
				r := s.record(t, i.tsih, flag)
				const rounds = 3
				for range rounds {
					for i.lun = range byte(2) {
						i.do(true, 256<<10)
						i.do(false, 256<<10)
						i.do(false, 512)
					}
				}
				r.interrupt(t)
				want := 2*3*rounds + 2 // the beginning of the connection has two commands, both for LUN 0
				if flag == "--lun=1" {
					want = 3 * rounds
				}
				found := seen(t, r.file, as...)
				wantSeen(t, found, "iscsi.opcode 0x03", "iscsi.opcode 0x23", "iscsi.opcode 0x05", "iscsi.opcode 0x25", "iscsi.opcode 0x31")
				if got := found["iscsi.opcode 0x01"]; got != want {
					t.Errorf("%d commands, want %d: %v", got, want, found)
				}
				filteredOK(t, r.file, as...)
				if fi, err := os.Stat(r.file); err != nil || flag != "--lun=1" && fi.Size() > 256<<10 {
					t.Errorf("%d bytes, %v", fi.Size(), err)
				}
			})
		}
	}
}

// A ring has the latest traffic in files of the given size and number. tshark decodes each, with the login.
func TestCaptureIntoARing(t *testing.T) {
	needTshark(t)
	s := newStation(t)
	i := s.login(t)
	do(t, i, 512)
	stop := writeAndRead(t, i)
	begun := time.Now()
	r := s.record(t, i.TSIH, "-C", "1MiB", "-W", "3")
	name := func(n int) string { return strings.TrimSuffix(r.file, ".pcapng") + fmt.Sprintf(".%d.pcapng", n) }
	var first os.FileInfo
	testkit.Eventually(t, "the first file of the ring is replaced", func() bool {
		fi, err := os.Stat(name(0))
		if err != nil {
			return false
		}
		if first == nil {
			f, err := os.Open(name(0)) // kept open: a number of a file that is gone could be the new one's
			if err != nil {
				return false
			}
			t.Cleanup(func() { f.Close() })
			first, err = f.Stat()
			return err != nil
		}
		return !os.SameFile(first, fi)
	})
	r.cmd.Process.Signal(os.Interrupt)
	if err := <-r.ended; err != nil || !strings.Contains(r.said(), "files, of which the last 3 are there") {
		t.Errorf("%v: %s", err, r.said())
	}
	stop()
	took := time.Since(begun)
	s.wait(t, `msg="capture ended".*more=`)
	if n := strings.Count(s.output.all.String(), "event=capture"); n > 2*(2+int(took.Seconds())) {
		t.Errorf("%d lines of log in %v, want two a second", n, took)
	}
	all, err := filepath.Glob(filepath.Dir(r.file) + "/*")
	if err != nil || len(all) != 3 {
		t.Errorf("%v, %v", all, err)
	}
	for n := range 3 {
		fi, err := os.Stat(name(n))
		if err != nil || fi.Size() > 1<<20 || fi.Mode() != 0o600 {
			t.Errorf("%v, %v", fi, err)
			continue
		}
		if out := tshark(t, name(n), "-Y", "_ws.malformed"); out != "" {
			t.Errorf("file %d: %s", n, out)
		}
		wantSeen(t, seen(t, name(n)), "iwarp_mpa.rev 2", "iscsi.opcode 0x03")
	}
	s.says(t, cli.ExitRefused, "f.0.pcapng exists", "capture", "--session", "1", "-w", r.file, "-C", "1MiB", "-W", "3")
	for want, args := range map[string][]string{
		"-C and -W go together":       {"-W", "3"},
		"-W must be 2 to 1000":        {"-C", "1MiB", "-W", "1"},
		"--max-size excludes":         {"-C", "1MiB", "-W", "2", "--max-size", "1MiB"},
		"--snaplen must be 192 to 40": {"--snaplen", "100"},
		"--lun must be up to 16383":   {"--lun", "20000"},
	} {
		s.says(t, cli.ExitUsage, want, append([]string{"capture", "--session", "1", "-w", "x"}, args...)...)
	}
}
