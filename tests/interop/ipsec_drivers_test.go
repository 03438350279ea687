package interop_test

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/interop/vm"
)

// TestIPsecDrivers runs the tests of the drivers in a kernel with ESP. On the machine that builds the target they can skip what needs it.
func TestIPsecDrivers(t *testing.T) {
	v := boot(t)
	for _, c := range []struct {
		pkg   string
		tests []string
	}{
		{"xfrm", []string{"TestCheck", "TestDriverWithKeys", "TestDriverLooksInTheKernel", "TestSocketPolicyDropsClearText", "TestSocketPolicyGoesWithTheSocket", "TestPinPolicy", "TestSocketPolicyWithESP"}},
		{"static", []string{"TestPoliciesInTheKernel", "TestPoliciesAreHandedOver", "TestStatesInTheKernel"}},
	} {
		t.Run(c.pkg, func(t *testing.T) {
			name := "ipsec-" + c.pkg + ".test"
			build := exec.Command("go", "test", "-c", "-o", filepath.Join(v.Files(), name), "./security/ipsec/"+c.pkg)
			build.Dir = "../.."
			build.Env = append(build.Environ(), "CGO_ENABLED=0")
			if out, err := build.CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			r := v.Try(t, vm.Files+"/"+name+" -test.v -test.run '^("+strings.Join(c.tests, "|")+")$' 2>&1", 5*time.Minute)
			if r.Status != 0 {
				t.Fatalf("status %d\n%s", r.Status, r.Stdout)
			}
			for _, test := range c.tests {
				if !strings.Contains(r.Stdout, "\n--- PASS: "+test+" ") {
					t.Errorf("%s did not pass:\n%s", test, r.Stdout)
				}
			}
			if strings.Contains(r.Stdout, "missing: [cannot") {
				t.Errorf("Check finds ESP missing:\n%s", r.Stdout)
			}
		})
	}
}
