package cli

import (
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// doctor reports a disk that does not answer, and does not wait for it.
func TestDoctorReportsAStuckDisk(t *testing.T) {
	gate, was := make(chan struct{}), useOf
	back := make(chan struct{})
	useOf = func(path string) (fileUse, error) {
		if path == "/dead" {
			defer close(back)
			<-gate
		}
		return was(path)
	}
	defer func() {
		close(gate)
		<-back
		useOf = was
	}()
	list := checkSpace(&schema.State{Targets: []schema.TargetState{{LUNs: []schema.LUNState{
		{Backend: "memory"}, {Backend: "file", Path: "/none"}, {Backend: "file", Path: "/dead"}, {Backend: "file", Path: "/behind"},
	}}}}, 50*time.Millisecond)
	if len(list) != 1 || list[0].Severity != problem || list[0].About != "disk of /dead" || !strings.Contains(list[0].Text, "does not answer within 50ms") {
		t.Errorf("findings %+v", list)
	}
}
