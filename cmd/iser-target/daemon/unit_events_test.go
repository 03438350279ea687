package daemon

import (
	"encoding/json"
	"errors"
	"log/slog"
	"testing"

	"github.com/iser-target/iser-target/lun"
)

// What units report has the kinds and the attributes that docs/cli.md promises.
func TestUnitEventsKeepTheirForm(t *testing.T) {
	var ev events
	d := &Daemon{log: slog.New(&eventHandler{next: slog.DiscardHandler, events: &ev})}
	failed := errors.New("input/output error")
	for _, tc := range []struct {
		event lun.Event
		kind  string
		level string
		text  string
		attrs string
	}{
		{lun.ReservationChangedEvent{Target: "t", LUN: 3, Command: "RESERVE(6)", Initiator: "i"},
			"reservation", "INFO", "reservation changed",
			`{"command":"RESERVE(6)","initiator":"i","lun":3,"target":"t"}`},
		{lun.ReservationChangedEvent{Target: "t", Command: "CLEAR", Initiator: "i", TPGT: 2},
			"reservation", "INFO", "persistent reservation changed",
			`{"command":"CLEAR","initiator":"i","lun":0,"target":"t","tpgt":2}`},
		{lun.ReservationEndedEvent{Target: "t", Serial: "3", Initiator: "i"},
			"reservation", "INFO", "reservation ended",
			`{"initiator":"i","naa":"3","target":"t"}`},
		{lun.ReservationUnconfirmedEvent{Serial: "3", Err: failed},
			"reservation", "WARN", "reservation change not confirmed", `{"naa":"3","reason":"input/output error"}`},
		{lun.StoreFailedEvent{Target: "t", Initiator: "i", Command: "c", LBA: 8, Blocks: 1, Err: failed, Suppressed: 5},
			"medium", "ERROR", "store has failed",
			`{"blocks":1,"command":"c","initiator":"i","lba":8,"lun":0,"not_logged":5,"reason":"input/output error","target":"t"}`},
		{lun.FaultsEndedEvent{Serial: "3", Seed: 7, Injected: 2},
			"lun", "WARN", "faults are no longer injected", `{"injected":2,"naa":"3","seed":7}`},
		{lun.SyncsFailEvent{Serial: "3"},
			"medium", "ERROR", "syncs keep failing: data written before the store was reopened may be lost", `{"naa":"3"}`},
		{lun.StateNotStoredEvent{Serial: "3", Err: failed},
			"medium", "ERROR", "state not stored", `{"naa":"3","reason":"input/output error"}`},
		{lun.SanitizeEvent{Stage: lun.SanitizeBegun, Serial: "3", Action: 2, Initiator: "i"},
			"medium", "WARN", "sanitize begins", `{"action":2,"initiator":"i","naa":"3"}`},
		{lun.SanitizeEvent{Stage: lun.SanitizeRestarted, Serial: "3", Action: 2},
			"medium", "WARN", "sanitize restarts", `{"action":2,"naa":"3"}`},
		{lun.SanitizeEvent{Stage: lun.SanitizeDone, Serial: "3"},
			"medium", "INFO", "sanitize done", `{"naa":"3"}`},
		{lun.SanitizeEvent{Stage: lun.SanitizeFailed, Serial: "3", Err: failed},
			"medium", "ERROR", "sanitize failed", `{"naa":"3","reason":"input/output error"}`},
	} {
		before := ev.last
		d.report(tc.event)
		got := ev.since(before)
		if len(got) != 1 {
			t.Fatalf("%s: %d events", tc.text, len(got))
		}
		e := got[0]
		if attrs, err := json.Marshal(e.Attrs); err != nil || string(attrs) != tc.attrs {
			t.Errorf("%s: attributes %s, %v, want %s", tc.text, attrs, err, tc.attrs)
		}
		if e.Event != tc.kind || e.Level != tc.level || e.Text != tc.text {
			t.Errorf("event %q, level %s, text %q, want %q, %s, %q", e.Event, e.Level, e.Text, tc.kind, tc.level, tc.text)
		}
	}
}
