package lun

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/iser-target/iser-target/backend"
)

// lbpere is a Read-Write Error Recovery page with LBPERE.
const lbpere = "01 0a c0 00 00 00 00 80 00 00 0000 "

// provisioningPage returns a Logical Block Provisioning page; enabled has the first byte of both descriptors without their
// fixed bits, and counts are threshold sets.
func provisioningPage(situa, available, used byte, availableCount, usedCount uint32) string {
	return fmt.Sprintf("5c 02 001c %02x 00 00000000 00000000 0000 %02x 01 0000 %08x %02x 02 0000 %08x ",
		situa, available, availableCount, used|0x01, usedCount)
}

// wantThreshold checks for THIN PROVISIONING SOFT THRESHOLD REACHED, with the offset of its descriptor.
func wantThreshold(t *testing.T, res result, offset byte) {
	t.Helper()
	if want := unhex(fmt.Sprintf("f0 00 06 000000%02x 0a 00000000 38 07 00 000000", offset)); res.status != StatusCheckCondition || string(res.sense) != string(want) {
		t.Fatalf("status %#x, sense % x; want % x", res.status, res.sense, want)
	}
}

const set64K = 64 << 10

// SBC-3, section 4.7.3.7: a threshold notifies all nexuses once when it is reached, and again only after the space was well on
// its other side. INFORMATION says which one it is.
func TestThresholdsNotify(t *testing.T) {
	r := newRig(t, setup{size: 1 << 30})
	other := r.login()
	next := func(n *Nexus) result { return do(n, &r.c, [8]byte{}, "00", nil, all) }
	quiet := func() {
		t.Helper()
		wantGood(t, "no unit attention", next(r.nexus))
		wantGood(t, "no unit attention for the neighbour", next(other))
	}
	r.unit.noteSpace(1<<30, 0)
	quiet() // no threshold
	wantGood(t, "MODE SELECT", r.modeSelect(false, "00 00 00 00"+lbpere+provisioningPage(0, 0x80, 0x80, 100, 160)))
	wantSense(t, next(other), 0x6, 0x2a, 0x01)
	r.unit.noteSpace(0, 101*set64K)
	quiet()
	r.unit.noteSpace(0, 100*set64K)
	wantThreshold(t, next(r.nexus), 16)
	wantThreshold(t, next(other), 16)
	for _, free := range []int64{99, 101, 100, 106, 100} { // around the threshold
		r.unit.noteSpace(0, free*set64K)
		quiet()
	}
	r.unit.noteSpace(0, 107*set64K) // a sixteenth
	r.unit.noteSpace(0, 100*set64K)
	wantThreshold(t, next(r.nexus), 16)
	wantThreshold(t, next(other), 16)

	r.unit.noteSpace(159*set64K, 100*set64K)
	quiet()
	r.unit.noteSpace(159*set64K+1, 100*set64K) // counts as 160
	wantThreshold(t, next(r.nexus), 24)
	wantThreshold(t, next(other), 24)
	r.unit.noteSpace(151*set64K, 100*set64K)
	r.unit.noteSpace(160*set64K, 100*set64K)
	quiet()

	// Both at once are two unit attentions.
	r.unit.noteSpace(0, 1<<40)
	r.unit.noteSpace(1<<30, 0)
	for _, n := range []*Nexus{r.nexus, other} {
		wantThreshold(t, next(n), 16)
		wantThreshold(t, next(n), 24)
	}
	quiet()

	// Another count is another threshold. With SITUA one initiator is notified, and without LBPERE none.
	r.unit.noteSpace(0, 1<<40)
	wantGood(t, "SITUA", r.modeSelect(false, "00 00 00 00"+provisioningPage(1, 0x80, 0, 50, 0)))
	wantSense(t, next(other), 0x6, 0x2a, 0x01)
	r.unit.noteSpace(0, 50*set64K)
	first, second := next(r.nexus), next(other)
	if (first.status == StatusGood) == (second.status == StatusGood) {
		t.Errorf("SITUA: statuses %#x and %#x", first.status, second.status)
	}
	wantGood(t, "LBPERE 0", r.modeSelect(false, "00 00 00 00 01 0a c0 00 00 00 00 00 00 00 0000"))
	wantSense(t, next(other), 0x6, 0x2a, 0x01)
	r.unit.noteSpace(0, 1<<40)
	r.unit.noteSpace(0, 0)
	quiet()
}

// What an initiator must not change of the page is refused, with its offset, and has no effect.
func TestThresholdPageIsChecked(t *testing.T) {
	r := newRig(t, setup{})
	for list, octet := range map[string]int{
		provisioningPage(2, 0, 0, 1, 1):                                                                   4,
		provisioningPage(0, 0x88, 0, 1, 1):                                                                16, // THRESHOLD TYPE
		provisioningPage(0, 0x81, 0, 1, 1):                                                                16, // THRESHOLD ARMING
		"5c 02 001c 00 00 00000000 00000000 0000 80 02 0000 00000001 01 02 0000 00000000":                 17, // THRESHOLD RESOURCE
		"5c 02 0014 00 00 00000000 00000000 0000 80 01 0000 00000001":                                     2,  // PAGE LENGTH
		"5c 00 001c" + provisioningOff[len(provisioningOff)-40:]:                                          1,  // SUBPAGE CODE
		"5c 03 001c 00 00 00000000 00000000 0000 80 01 0000 00000001 01 02 0000 00000000":                 0,
		"1c 1e 001c 00 00 00000000 00000000 0000 80 01 0000 00000001 01 02 0000 00000000 # without SPF\n": 1,
	} {
		wantListField(t, r.modeSelect(false, "00 00 00 00"+list), 4+octet)
	}
	wantSense(t, r.modeSelect(false, "00 00 00 00 5c 02 00"), 0x5, 0x1a, 0x00)
	wantBytes(t, r.good("1a 08 1c 02 ff 00", nil), unhex("23 00 10 00"+provisioningOff))
}

// The limits of the operator are events, and the defaults of the mode page. Initiators that have others keep theirs, across a
// restart if they were saved. The operator's events do not depend on them.
func TestThresholdsOfTheOperator(t *testing.T) {
	path := filepath.Join(t.TempDir(), "settings.json")
	s := openSettings(t, path)
	var events []string
	opt := Options{Settings: s, ThresholdUsed: 128 << 20, Events: func(e Event) {
		if e, ok := e.(ThresholdEvent); ok {
			events = append(events, fmt.Sprintf("%s %d %v", e.Threshold, e.Limit>>20, e.Ended))
		}
	}}
	r := newRig(t, setup{size: 1 << 30, opt: opt})
	wantBytes(t, r.good("1a 08 81 00 ff 00", nil), unhex("0f 00 10 00 8"+lbpere[1:])) // default: LBPERE
	page := func(used uint32) []byte { return unhex("23 00 10 00 d" + provisioningPage(0, 0, 0x80, 0, used)[1:]) }
	for _, pc := range []string{"1c", "9c", "dc"} { // current, default, saved
		wantBytes(t, r.good("1a 08 "+pc+" 02 ff 00", nil), page(2048))
	}
	if v, ok := r.unit.Space(); !ok || v.Used != 0 || v.Free == 0 {
		t.Errorf("space %+v, %v before the first sample", v, ok)
	}
	r.good("2a 00 00000000 00 0080 00", pattern(64<<10, 1))
	r.unit.SampleSpace()
	if v, ok := r.unit.Space(); !ok || v.Used != 64<<10 || v.Free == 0 || v.Thresholds != [thresholds]Threshold{{}, {128 << 20, false}} {
		t.Errorf("space %+v, %v", v, ok)
	}
	r.unit.noteSpace(128<<20, 1<<30)
	r.unit.noteSpace(129<<20, 1<<30)
	if v, _ := r.unit.Space(); !v.Thresholds[thresholdUsed].Reached {
		t.Error("the threshold is not reached")
	}
	wantThreshold(t, r.run("00", nil), 24)

	// A changed limit changes the defaults, of which the initiators hear.
	r.unit.SetThresholds(0, 256<<20)
	wantSense(t, r.run("00", nil), 0x6, 0x2a, 0x01)
	wantBytes(t, r.good("1a 08 1c 02 ff 00", nil), page(4096))
	r.unit.noteSpace(129<<20, 1<<30)
	if want := []string{"used 128 false", "used 256 true"}; !slices.Equal(events, want) {
		t.Errorf("events %q, want %q", events, want)
	}

	// Of an initiator's own, neither the operator nor a restart takes anything.
	wantGood(t, "MODE SELECT", r.save("00 00 00 00"+provisioningPage(0, 0x80, 0, 7, 0)))
	own := unhex("23 00 10 00 d" + provisioningPage(0, 0x80, 0, 7, 0)[1:])
	r.unit.SetThresholds(1<<20, 512<<20)
	wantGood(t, "TEST UNIT READY", r.run("00", nil))
	wantBytes(t, r.good("1a 08 1c 02 ff 00", nil), own)
	wantBytes(t, r.good("1a 08 9c 02 ff 00", nil), unhex("23 00 10 00 d"+provisioningPage(0, 0x80, 0x80, 16, 8192)[1:]))
	if got := settingsText(r.unit); got != "write_protect off, saved off\ndescriptor_sense off, saved off\nseparate_task_sets off, saved off\n"+
		"threshold_attentions on, saved on\nthreshold_single_initiator off, saved off\ninitiator_threshold_available 458752, saved 458752\n"+
		"initiator_threshold_used off, saved off\nmedium ready, saved ready\n" {
		t.Errorf("settings\n%s", got)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	opt.Settings = openSettings(t, path)
	again := newRig(t, setup{size: 1 << 30, opt: opt})
	wantBytes(t, again.good("1a 08 1c 02 ff 00", nil), own)

	// Another process, and a reopened store, continue with them, and do not notify again.
	again.unit.noteSpace(1<<30, 0)
	wantThreshold(t, again.run("00", nil), 16)
	for name, take := range map[string]func(u *Unit) error{
		"another process": func(u *Unit) error { return u.Restore(throughJSON(t, again.unit.State())) },
		"a reopened store": func(u *Unit) error {
			u.InheritFrom(again.unit)
			return nil
		},
	} {
		events = nil
		r := newRig(t, setup{size: 1 << 30, opt: Options{ThresholdUsed: 128 << 20, Events: opt.Events}})
		if err := take(r.unit); err != nil {
			t.Fatal(err)
		}
		r.unit.noteSpace(1<<30, 0)
		wantGood(t, name, r.run("00", nil))
		if len(events) > 0 {
			t.Errorf("%s: events %q", name, events)
		}
		if got := levels(r.unit.levels.Load()); got != newLevels(7, 0) {
			t.Errorf("%s: counts %#x", name, uint64(got))
		}
	}
	if changed, err := again.unit.ResetSettings(); !changed || err != nil {
		t.Errorf("ResetSettings: %v, %v", changed, err)
	}
	wantSense(t, again.run("00", nil), 0x6, 0x2a, 0x01)
	wantBytes(t, again.good("1a 08 1c 02 ff 00", nil), page(2048))
	opt.Events(ThresholdEvent{})
}

// A unit that is not thin has no thresholds, whatever the configuration says.
func TestNoThresholdsOfThickUnit(t *testing.T) {
	r := newRig(t, setup{info: thick, opt: Options{ThresholdUsed: 1 << 20}})
	r.unit.SampleSpace()
	r.unit.SetThresholds(1, 1)
	wantListField(t, r.modeSelect(false, "00 00 00 00"+lbpere), 4+7)
	wantListField(t, r.modeSelect(false, "00 00 00 00"+provisioningPage(0, 0, 0, 0, 0)), 4)
	// The exponent grows with the capacity, so that 32 bits are enough: 2^50 bytes are 2^32 sets of 2^9 blocks, one too many.
	huge := newRig(t, setup{info: func(i *backend.Info) { i.Size = 1 << 50 }})
	if got := huge.unit.space.exponent; got != 10 {
		t.Errorf("THRESHOLD EXPONENT %d, want 10", got)
	}
}

// A unit without thresholds knows its space if the store does.
func TestSpaceOfThickUnit(t *testing.T) {
	r := newRig(t, setup{info: thick})
	r.good("2a 00 00000000 00 0080 00", pattern(64<<10, 1))
	if v, ok := r.unit.Space(); !ok || v.Used != 0 {
		t.Errorf("space %+v, %v at first", v, ok)
	}
	r.unit.SampleSpace()
	if v, ok := r.unit.Space(); !ok || v.Used != 64<<10 || v.Free == 0 || v.Thresholds != [thresholds]Threshold{} {
		t.Errorf("space %+v, %v after a write", v, ok)
	}
}
