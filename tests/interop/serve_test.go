package interop_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/interop/vm"
)

// What "iser-target serve" prints for a newcomer to type works as it is printed,
// with target and initiator on one machine, the guest. Over RDMA the lines
// become what it says of them: with -I iser and a portal on a real interface.
func TestInvitation(t *testing.T) {
	v := boot(t)
	need(t, "iscsi-ls")
	harness.Copy(t, filepath.Join(v.Files(), "iser-target"))
	v.Run(t, "mv "+vm.Files+"/iser-target /run/", quick) // the guest keeps no page of what it has from there
	const config = `
portals:
  - listen: ` + vm.GuestAddr + `:3260
targets:
  - name: iqn.2026-11.io.example:invited
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 64MiB}
state_dir: ""
`
	if err := os.WriteFile(filepath.Join(v.Files(), "invited.yaml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	defer v.Try(t, "set +e\niscsiadm -m node --logout; rm /run/iser-target\n"+serveEnds+forgive, quick)
	serve := func(args string) string {
		t.Helper()
		return v.Run(t, `
/run/iser-target serve `+args+` </dev/null >/run/serve.out 2>/run/serve.log &
for ((n = 0; n < 300; n++)); do
	if grep -q msg=serving /run/serve.log; then break; fi
	sleep 0.1
done
cat /run/serve.log >&2
cat /run/serve.out`, quick)
	}

	var discovery, login, ls string
	name := ""
	for _, line := range strings.Split(serve(""), "\n") {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "Serving "):
			name = strings.Fields(line)[1]
		case strings.HasPrefix(line, "iscsiadm -m discovery "):
			discovery = line
		case strings.HasPrefix(line, "iscsiadm -m node "):
			login = line
		case strings.HasPrefix(line, "iscsi-ls "):
			ls = line
		}
	}
	if name == "" || discovery == "" || login == "" || ls == "" {
		t.Fatalf("the invitation has name %q, discovery %q, login %q, iscsi-ls %q", name, discovery, login, ls)
	}
	use := func(transport, name, lines string) {
		t.Helper()
		got := v.Run(t, lines+`
. /run/lib.sh
d=$(disk `+name+` 0)
head -c 64K /dev/urandom >/run/data
dd if=/run/data of=$d bs=64k oflag=direct status=none
dd if=$d bs=64k count=1 iflag=direct status=none | cmp - /run/data
iscsiadm -m session
iscsiadm -m node --logout >&2
iscsiadm -m node -o delete
`+serveEnds, quick)
		for _, want := range []string{",1 " + name + "\n", transport + ": ["} {
			if !strings.Contains(got, want) {
				t.Errorf("no %q", want)
			}
		}
	}
	got := v.Run(t, ls, quick)
	if !strings.Contains(got, name) || !strings.Contains(got, "Lun:0") {
		t.Errorf("%s prints %q", ls, got)
	}
	use("tcp", name, discovery+"\n"+login)

	serve("--config " + vm.Files + "/invited.yaml")
	over := strings.NewReplacer("127.0.0.1:3260", vm.GuestAddr+":3260", name, "iqn.2026-11.io.example:invited")
	use("iser", "iqn.2026-11.io.example:invited",
		over.Replace(". /run/lib.sh\nheard "+discovery+" -I iser\n"+login+" -I iser"))
}

// serveEnds stops the target in the guest. It has to end in peace.
const serveEnds = `
if pgrep -x iser-target >/dev/null; then
	pkill -TERM -x iser-target
	while pgrep -x iser-target >/dev/null; do sleep 0.1; done
	tail -n 1 /run/serve.log | grep msg=stopped
fi
`
