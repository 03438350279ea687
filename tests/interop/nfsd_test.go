package interop_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/tests/interop/vm"
)

// nfsdUp starts the NFS server of Linux over RDMA in the network namespace nfsd, and mounts its export in the other one, over siw on
// both sides. The clients stay where they are, because siw connects from the namespace of the kernel's worker threads. The index of
// the server's interface is not that of eth0: siw listens on each of its devices by their index. The daemon nfsdcld
// saves the grace period of 10 s, unless the kernel waits for it in vain.
const nfsdUp = `
mkdir -p /run/export /run/rpc_pipefs /var/lib/nfs /mnt
mount -t tmpfs tmpfs /run/export
mount -t tmpfs tmpfs /var/lib/nfs
mkdir -p /var/lib/nfs/nfsdcld
touch /var/lib/nfs/etab /var/lib/nfs/rmtab
echo content | tee /run/export/small >/run/export/small2
head -c 1048576 /dev/urandom >/run/export/random
modprobe -a nfsd rpcrdma nfsv4 veth
ip netns add nfsd
ip -n nfsd link add veth1 index 100 type veth peer name veth0 netns 1
ip addr add 192.0.2.2/24 dev veth0
ip link set veth0 up
ip -n nfsd addr add 192.0.2.1/24 dev veth1
ip -n nfsd link set lo up
ip -n nfsd link set veth1 up
for ((n = 0; n < 100; n++)); do [ "$(</sys/class/net/veth0/carrier)" != 1 ] || break; sleep 0.1; done
rdma link add siwc type siw netdev veth0
in='nsenter --net=/run/netns/nfsd'
$in rdma link add siws type siw netdev veth1
$in mount -t nfsd nfsd /proc/fs/nfsd
$in mount -t rpc_pipefs rpc_pipefs /run/rpc_pipefs
$in nfsdcld -F -p /run/rpc_pipefs -s /var/lib/nfs/nfsdcld </dev/null >/run/nfsdcld.log 2>&1 &
tracking=$!
$in rpc.mountd --no-nfs-version 3 </dev/null >/run/mountd.log 2>&1
exportfs -i -o rw,fsid=0,insecure,no_root_squash,no_subtree_check '*:/run/export'
echo 1048576 >/proc/fs/nfsd/max_block_size
for ((n = 0; n < 100; n++)); do ! ls -l /proc/$tracking/fd | grep -q inotify || break; sleep 0.1; done
$in rpc.nfsd --no-nfs-version 3 --rdma=20049 --grace-time 10 4
grep -q 'rdma 20049' /proc/fs/nfsd/portlist
for ((n = 0; n < 300; n++)); do [ "$(</proc/fs/nfsd/v4_end_grace)" != Y ] || break; sleep 0.1; done
tcpdump -i veth0 -s 0 -B 65536 -w ` + vm.Files + `/nfsd.pcap port 20049 </dev/null >/run/tcpdump.log 2>&1 &
for ((n = 0; n < 100; n++)); do ! grep -q 'listening on' /run/tcpdump.log || break; sleep 0.1; done
mount -t nfs -o vers=4.1,proto=rdma,port=20049 192.0.2.1:/ /mnt
`

// nfsdDown removes what nfsdUp has made, as far as that has got. A namespace that goes before its siw leaves that behind.
const nfsdDown = `
{
pkill -x tcpdump
umount -f /mnt
nsenter --net=/run/netns/nfsd rpc.nfsd 0
exportfs -au
rdma link del siws
rdma link del siwc
ip link del veth0
pkill -x nfsdcld
pkill -x rpc.mountd
ip netns del nfsd
for d in /run/export /run/rpc_pipefs /proc/fs/nfsd /var/lib/nfs; do umount $d; done
} >&2 || true
` + forgive

// probed runs nfsprobe, while another client, the kernel's, writes and verifies. That must not notice the losses of nfsprobe's connection.
const probed = `
touch /run/neighbour
{
	n=0
	while [ -e /run/neighbour ]; do
		head -c 262144 /dev/urandom >/run/block
		dd if=/run/block of=/mnt/neighbour bs=64k conv=fsync status=none
		dd if=/mnt/neighbour bs=64k iflag=direct status=none | cmp - /run/block
		n=$((n + 1))
	done
	echo $n >/run/rounds
} &
neighbour=$!
status=0
` + vm.Files + `/nfsprobe 192.0.2.1:20049 /run/export /mnt || status=$?
rm /run/neighbour
wait $neighbour
echo "neighbour: $(</run/rounds) rounds"
sed -n 's/.*xprt:.rdma/neighbour: rdma/p' /proc/self/mountstats
(cd /run/export && sha256sum big random | sed 's/^/file: /')
umount /mnt
sleep 1 # for the last segments
pkill -x tcpdump
for ((n = 0; n < 100; n++)); do pgrep -x tcpdump >/dev/null || break; sleep 0.1; done
cat /run/tcpdump.log >&2
[ $status = 0 ] || dmesg | tail -n 20 >&2
exit $status
`

// The requester of rdma/rpcrdma is a client of the kernel's NFS server, which makes calls in the reverse direction. In minor version
// 1 it marks the back channel as usable without a CB_NULL; TestNFSClient has that.
func TestNFSServer(t *testing.T) {
	v := boot(t)
	need(t, "rpc.nfsd", "rpc.mountd", "nfsdcld", "exportfs", "mount.nfs", "tshark", "tcpdump")
	build := exec.Command("go", "build", "-o", filepath.Join(v.Files(), "nfsprobe"), "../nfs/nfsprobe")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Cleanup(func() { v.Try(t, nfsdDown, quick) })
	v.Run(t, nfsdUp, long)
	got := v.Run(t, probed, long)
	for _, want := range []string{
		"NULL answered",
		"BRPC-6-4: CREATE_SESSION answered, back channel on the connection",
		"RPCRDMA-3.4.5-1: WRITE and READ of 4 times 1 MiB in chunks agree",
		"BRPC-2.3-1: CB_SEQUENCE and CB_RECALL of small answered",
		"DELEGRETURN of small answered, the other open continues",
		"WRITE of 3 times 1 MiB answered, the connection was lost meanwhile",
		"REMOVE answered once, on the connection after that of the call",
		"BRPC-4.3.1-3: CB_SEQUENCE and CB_RECALL of small2 answered",
		"DELEGRETURN of small2 answered, the other open continues",
		"DESTROY_SESSION answered",
	} {
		line := want[strings.Index(want, ": ")+1:] // without the row
		if !strings.Contains(got, strings.TrimSpace(line)+"\n") {
			t.Errorf("nfsprobe does not print: %s", want)
		}
	}
	for probe, file := range map[string]string{`written: (\w+) +big\n`: `file: (\w+) +big\n`, `read: (\w+) +random\n`: `file: (\w+) +random\n`} {
		a, b := regexp.MustCompile(probe).FindStringSubmatch(got), regexp.MustCompile(file).FindStringSubmatch(got)
		if a == nil || b == nil || a[1] != b[1] {
			t.Errorf("RPCRDMA-3.5.2-2: the checksums of the client and of the file differ: %v, %v", a, b)
		}
	}
	// The neighbour has connected once, and received no reply that it did not wait for.
	if !regexp.MustCompile(`(?m)^neighbour: [1-9]\d* rounds$`).MatchString(got) ||
		!regexp.MustCompile(`(?m)^neighbour: rdma \d+ \d+ 1 \d+ \d+ \d+ \d+ 0 `).MatchString(got) {
		t.Error("the connection of the other client was lost, or it has done nothing")
	}
	pcap := filepath.Join(v.Files(), "nfsd.pcap")
	// BRPC-5.2-1: tshark finds the call of a reply by the XID.
	decoded(t, pcap, "V4 NULL Reply (Call In", "EXCHANGE_ID", "CREATE_SESSION", "CB_COMPOUND Reply (Call In", "CB_SEQUENCE;CB_RECALL",
		"DELEGRETURN", "BIND_CONN_TO_SESSION")
	calls := strings.Fields(decode(t, pcap, "-Y", "rpc.msgtyp == 0 and nfs.main_opcode == 28", "-T", "fields", "-e", "rpc.xid"))
	if len(calls) != 2 || calls[0] != calls[1] {
		t.Errorf("BRPC-5.4-1: the calls of REMOVE have the XIDs %v", calls)
	}
}
