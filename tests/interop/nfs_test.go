package interop_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/rpcrdma"
	"github.com/iser-target/iser-target/tests/interop/vm"
	"github.com/iser-target/iser-target/tests/nfs"
	"github.com/iser-target/iser-target/tests/testkit"
)

// The kernel's NFS client mounts a file system that rdma/rpcrdma serves, and takes calls in the reverse direction.
func TestNFSClient(t *testing.T) {
	v := boot(t)
	need(t, "mount.nfs", "tshark", "tcpdump")
	files := nfs.NewServer()
	ended := make(chan error, 100)
	server := &rpcrdma.Server{Config: rpcrdma.Config{Programs: files.Programs(), RDMA: rdma.Options{NoCRC: true}},
		OnError: func(_ net.Addr, err error) { ended <- err }}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go server.Serve(l)
	t.Cleanup(func() { server.Close() })
	_, port, _ := net.SplitHostPort(l.Addr().String())
	t.Cleanup(func() { v.Try(t, "umount -f /mnt 2>/dev/null || true", quick) })
	v.Run(t, `
modprobe -a rpcrdma nfsv4
tcpdump -i eth0 -s 0 -B 65536 -w `+vm.Files+`/nfsclient.pcap port `+port+` </dev/null >/run/tcpdump.log 2>&1 &
for ((n = 0; n < 100; n++)); do grep -q 'listening on' /run/tcpdump.log && break; sleep 0.1; done
mkdir -p /mnt
mount -v -t nfs -o vers=4.1,proto=rdma,port=`+port+` `+vm.HostAddr+`:/ /mnt >&2 || { dmesg | tail -n 30 >&2; exit 1; }
grep ' /mnt ' /proc/mounts >&2
head -c 4194304 /dev/urandom >/run/data
dd if=/run/data of=/mnt/file bs=1M conv=fsync status=none
echo 3 >/proc/sys/vm/drop_caches
dd if=/mnt/file bs=1M iflag=direct status=none | cmp - /run/data
mkdir /mnt/dir
for ((n = 0; n < 60; n++)); do echo $n >/mnt/dir/a-name-of-some-length-$n; done
[ "$(ls /mnt/dir | wc -l)" = 60 ]
mv /mnt/dir/a-name-of-some-length-7 /mnt/seven
[ "$(</mnt/seven)" = 7 ]
rm -r /mnt/dir
truncate -s 5 /mnt/seven
chmod 600 /mnt/seven
[ "$(stat -c '%s %a' /mnt/seven)" = '5 600' ]
echo content >/mnt/delegated
echo 3 >/proc/sys/vm/drop_caches
cat /mnt/delegated
cp /run/data `+vm.Files+`/nfsdata
`, long)
	data, err := os.ReadFile(filepath.Join(v.Files(), "nfsdata"))
	if err != nil {
		t.Fatal(err)
	}
	if got := files.File("file"); len(data) != 4<<20 || !bytes.Equal(got, data) {
		t.Errorf("the server has %d bytes that differ from the client's %d", len(got), len(data))
	}
	if n := files.Grants(); n != 1 {
		t.Errorf("%d delegations", n)
	}
	ctx, cancel := context.WithTimeout(t.Context(), quick)
	defer cancel()
	// With the delegation CB_RECALL, which the client returns, then CB_SEQUENCE alone.
	for range 2 {
		if err := files.CallBack(ctx); err != nil {
			t.Errorf("BRPC-6-4: a call in the reverse direction: %v", err)
		}
		testkit.Eventually(t, "the delegation is returned", func() bool { return files.Grants() == 0 })
	}
	v.Run(t, `
umount /mnt
sleep 1
pkill -x tcpdump
for ((n = 0; n < 100; n++)); do pgrep -x tcpdump >/dev/null || break; sleep 0.1; done
cat /run/tcpdump.log >&2
`, quick)
	select {
	case err := <-ended:
		t.Errorf("a connection ended: %v", err)
	default:
	}
	if files.Operations(nfs.OpWrite) == 0 || files.Operations(nfs.OpRead) == 0 || files.Operations(nfs.OpDelegReturn) != 1 {
		t.Error("the client has not read, written or returned the delegation")
	}
	decoded(t, filepath.Join(v.Files(), "nfsclient.pcap"), "EXCHANGE_ID", "CREATE_SESSION", "CB_NULL", "CB_RECALL")
}

// decoded checks that tshark, with a second pass that reassembles results, decodes a capture without a malformed frame, and that its output has each of want.
func decoded(t *testing.T, pcap string, want ...string) {
	t.Helper()
	defer func() {
		if !t.Failed() {
			return
		}
		// The directory of the machine goes with it.
		b, err := os.ReadFile(pcap)
		f, ferr := os.CreateTemp("", "nfs-*.pcap")
		if err = errors.Join(err, ferr); err == nil {
			_, err = f.Write(b)
			t.Logf("the capture is in %s", f.Name())
			err = errors.Join(err, f.Close())
		}
		if err != nil {
			t.Error(err)
		}
	}()
	if bad := decode(t, pcap, "-Y", "_ws.malformed or rpcordma.errcode or _ws.expert.severity == error"); bad != "" {
		t.Errorf("tshark finds faults:\n%.4000s", bad)
	}
	all := decode(t, pcap)
	for _, want := range want {
		if !strings.Contains(all, want) {
			t.Errorf("tshark does not print %q:\n%.6000s", want, all)
		}
	}
}

// decode runs tshark, which decodes a capture in two passes. Segments that TCP has retransmitted are put in order.
func decode(t *testing.T, pcap string, args ...string) string {
	t.Helper()
	cmd := exec.Command("tshark", append([]string{"-2", "-o", "tcp.reassemble_out_of_order:TRUE", "-r", pcap}, args...)...)
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, exit.Stderr)
		}
		t.Fatalf("tshark: %v", err)
	}
	return string(out)
}
