package daemon

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A dialog is a login by hand: one request at a time.
type dialog struct {
	*initiator.Dialog
	t *testing.T
}

// dial logs in as the initiator with that name after prefix. The dialog does not show unit attentions.
func (l *lab) dial(name string) *dialog {
	l.t.Helper()
	ctx, cancel := context.WithTimeout(l.t.Context(), 20*time.Second) // of the whole dialog
	l.t.Cleanup(cancel)
	d, err := initiator.Dial(ctx, "tcp", l.addr(), initiator.Options{Name: prefix + name, Target: store})
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { d.Close() })
	if err := d.LogIn(nil); err != nil {
		l.t.Fatal(err)
	}
	return &dialog{d, l.t}
}

// do runs a command for LUN 0 and returns its status, or its sense data.
func (d *dialog) do(cdb string, out []byte) string {
	d.t.Helper()
	status, sense, _, err := d.Do([8]byte{}, []byte(cdb), out, 0)
	if err != nil {
		d.t.Fatalf("CDB % x: %v", cdb, err)
	}
	if status == 0x02 && len(sense) >= 14 {
		return fmt.Sprintf("%x/%02x/%02x", sense[2]&0x0f, sense[12], sense[13])
	}
	return fmt.Sprintf("%#02x", status)
}

// want checks the outcome of a command.
func (d *dialog) want(what, outcome, cdb string, out []byte) {
	d.t.Helper()
	if got := d.do(cdb, out); got != outcome {
		d.t.Errorf("%s: %s, want %s", what, got, outcome)
	}
}

// reset sends a task management function for LUN 0, and checks its response.
func (d *dialog) reset(function, response byte) {
	d.t.Helper()
	if got, err := d.TMF(function, [8]byte{}); err != nil || got != response {
		d.t.Errorf("function %d: response %d, %v; want %d", function, got, err, response)
	}
}

const (
	stopUnit = "\x1b\x00\x00\x00\x00\x00"
)

// protectForGood is the parameter list of MODE SELECT(6) with SWP.
var protectForGood = []byte("\x00\x00\x00\x00\x0a\x0a\x02\x10\x08\x40\x00\x00\xff\xff\x00\x00")

const modeSelectSaved = "\x15\x11\x00\x00\x10\x00"

// Whatever an initiator of read_only_for tries in turn, its neighbour continues to write, with its
// reservation, without an error or a unit attention. resets_for gives the right
// to reset others, to sessions that exist.
func TestReaderLeavesWriterAlone(t *testing.T) {
	l := newLab(t, func(l *lab) { l.luns = `{id: 0, backend: memory, size: 4MiB, read_only_for: ["*:reader"]}` })
	reader, writer := l.dial("reader"), l.login("writer", store)
	write := func() string {
		return do(t, writer, &initiator.Command{CDB: cdb.Write10(0, 1), Out: make([]byte, 512)})
	}
	for write() != "" { // the unit attention of the login
	}
	undisturbed := func(by string) {
		t.Helper()
		if got := write(); got != "" {
			t.Errorf("WRITE(10) of the writer after %s: %s", by, got)
		}
	}
	if got := do(t, writer, &initiator.Command{CDB: [16]byte{0x16}}); got != "" {
		t.Errorf("RESERVE(6): %s", got)
	}
	for name, function := range map[string]byte{"LOGICAL UNIT RESET": pdu.LogicalUnitReset,
		"CLEAR TASK SET": pdu.ClearTaskSet, "TARGET WARM RESET": pdu.TargetWarmReset} {
		reader.reset(function, pdu.FunctionComplete)
		undisturbed(name)
		reader.want("READ(10), still reserved", "0x18", "\x28\x00\x00\x00\x00\x00\x00\x00\x01\x00", nil)
	}
	reader.reset(pdu.TargetColdReset, pdu.FunctionNotAuthorized)
	undisturbed("TARGET COLD RESET")
	if got := do(t, writer, &initiator.Command{CDB: [16]byte{0x17}}); got != "" {
		t.Errorf("RELEASE(6): %s", got)
	}
	for _, c := range []struct {
		name, cdb string
		out       []byte
	}{
		{"MODE SELECT(6)", modeSelectSaved, protectForGood},
		{"START STOP UNIT", stopUnit, nil},
		{"RESERVE(10)", "\x56\x00\x00\x00\x00\x00\x00\x00\x00\x00", nil},
		{"SET TARGET PORT GROUPS", "\xa4\x0a\x00\x00\x00\x00\x00\x00\x00\x08\x00\x00", []byte("\x00\x00\x00\x00\x03\x00\x00\x01")},
		{"PERSISTENT RESERVE OUT, CLEAR", "\x5f\x03\x00\x00\x00\x00\x00\x00\x18\x00", make([]byte, 24)},
	} {
		reader.want(c.name, "7/27/00", c.cdb, c.out)
		undisturbed(c.name)
	}
	rights := func(value string) {
		t.Helper()
		edit := func(d *config.Document) error { return d.SetTarget(store, "resets_for", value) }
		if _, err := l.Change(t.Context(), edit, ChangeOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	rights(`["*:READER"]`)
	reader.reset(pdu.LogicalUnitReset, pdu.FunctionComplete)
	if got := write(); got != "6/29/03" {
		t.Errorf("WRITE(10) of the writer after a reset with the right: %s", got)
	}
	rights("")
	reader.reset(pdu.TargetColdReset, pdu.FunctionNotAuthorized)
	undisturbed("the right was taken away")
}
