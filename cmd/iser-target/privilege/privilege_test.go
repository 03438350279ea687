package privilege

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// The names are those of the kernel's numbers.
func TestNamesOfCapabilities(t *testing.T) {
	for number, name := range map[int]string{
		unix.CAP_CHOWN: "CAP_CHOWN", unix.CAP_SETUID: "CAP_SETUID", unix.CAP_NET_BIND_SERVICE: "CAP_NET_BIND_SERVICE",
		unix.CAP_NET_ADMIN: "CAP_NET_ADMIN", unix.CAP_SYS_ADMIN: "CAP_SYS_ADMIN", unix.CAP_MKNOD: "CAP_MKNOD",
		unix.CAP_SETFCAP: "CAP_SETFCAP", unix.CAP_SYSLOG: "CAP_SYSLOG", unix.CAP_CHECKPOINT_RESTORE: "CAP_CHECKPOINT_RESTORE",
	} {
		if names[number] != name {
			t.Errorf("capability %d is %s, want %s", number, names[number], name)
		}
	}
	if len(names) != unix.CAP_LAST_CAP+1 {
		t.Errorf("%d names, the kernel's headers have %d", len(names), unix.CAP_LAST_CAP+1)
	}
	if s := setOf(ofUser, []string{"CAP_SYS_NICE"}).String(); s != "CAP_NET_BIND_SERVICE, CAP_SYS_NICE" {
		t.Error(s)
	}
	for _, never := range []string{"CAP_SYS_ADMIN", "CAP_SYS_MODULE", "CAP_SYS_PTRACE", "CAP_SETUID", "CAP_MKNOD", "CAP_SYS_RAWIO"} {
		if setOf(ofRoot)&setOf([]string{never}) != 0 {
			t.Errorf("root keeps %s", never)
		}
	}
}

// A capability that the process has not got is an error that names it, before anything is given up.
func TestMissingCapabilityIsNamed(t *testing.T) {
	have, err := permitted()
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range names {
		if have&(1<<i) != 0 {
			continue
		}
		err := (&Wish{Keep: []string{name}}).Apply()
		if err == nil || !strings.Contains(err.Error(), "process.capabilities: the process has not got "+name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
