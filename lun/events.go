package lun

import (
	"context"
	"log/slog"
	"strings"
	"time"
)

// An Event is something that an operator audits.
type Event interface {
	Kind() string                           // of docs/cli.md
	Log(l *slog.Logger, extra ...slog.Attr) // writes one line that begins with the attributes extra
}

// A ReservationChangedEvent is a command that changed reservations or registrations.
type ReservationChangedEvent struct {
	Target    string
	LUN       uint16
	Command   string // its name
	Initiator string // of PERSISTENT RESERVE OUT the initiator port, of RESERVE and RELEASE the iSCSI name
	// TPGT is the target port of PERSISTENT RESERVE OUT; 0: the command was RESERVE or RELEASE.
	TPGT uint16
}

// A ReservationEndedEvent is the end of a reservation by RESERVE with its nexus, or by a reset.
type ReservationEndedEvent struct {
	Target, Serial, Initiator string
}

// A SettingChangedEvent is a command that changed a Setting, for all initiators.
type SettingChangedEvent struct {
	Target    string
	LUN       uint16
	Initiator string
	Command   string // its name
	Setting   string // Setting.Name
	Value     string
}

// A StoreFailedEvent is a command that the store could not execute.
type StoreFailedEvent struct {
	Target      string
	LUN         uint16
	Initiator   string
	Command     string // its name
	LBA, Blocks uint64
	Err         error
	// Suppressed counts failures since the last event: there is at most one event
	// a second for a unit.
	Suppressed uint64
}

// A StoreHangsEvent is a store that has not answered for limits.store_timeout, or one that answers
// again.
type StoreHangsEvent struct {
	Serial   string
	Since    time.Time // when the oldest call began
	Commands int       // that wait for the store
	Ended    bool      // it answers again
}

// A ThresholdEvent is a threshold of the operator that is reached, or no longer.
type ThresholdEvent struct {
	Serial     string
	Threshold  string // of ThresholdNames
	Limit      int64  // bytes
	Used, Free int64
	Ended      bool // it is no longer reached
}

// A FaultsEndedEvent is the end of faults that were injected: see Unit.SetFaults.
type FaultsEndedEvent struct {
	Serial   string
	Seed     uint64
	Injected uint64 // errors and hangs
}

// A SyncsFailEvent is a unit that inherits a failed sync, from a predecessor or from before a restart: all its syncs fail.
type SyncsFailEvent struct{ Serial string }

// A ReservationUnconfirmedEvent is a PERSISTENT RESERVE OUT that is in force, or may be, although another gateway has not
// acknowledged it in time. Its initiator was told to try again.
type ReservationUnconfirmedEvent struct {
	Serial string
	Err    error
}

// A StateNotStoredEvent is a state file that could not be replaced. The command
// failed, and its initiator knows nothing about files.
type StateNotStoredEvent struct {
	Serial string
	Err    error
}

// A ScrubEndedEvent is the end of a scrub that nobody canceled.
type ScrubEndedEvent struct {
	Serial string
	Scrub  Scrub
}

// A SanitizeStage is what happened to a SANITIZE or a FORMAT UNIT.
type SanitizeStage int

const (
	SanitizeBegun       SanitizeStage = iota // an initiator sent the command
	SanitizeRestarted                        // the end of a process interrupted it
	SanitizeDone                             // the medium is erased
	SanitizeInterrupted                      // the unit was closed
	SanitizeFailed                           // Err has the reason
	SanitizeStuck                            // at its start, the unit found one that failed, or cannot continue one
)

// A SanitizeEvent is a step of a SANITIZE or a FORMAT UNIT of a unit.
type SanitizeEvent struct {
	Stage     SanitizeStage
	Serial    string
	Action    byte   // service action; 20h: the command is FORMAT UNIT
	Initiator string // of SanitizeBegun
	Err       error  // of SanitizeFailed
}

// Kind implements Event.
func (ReservationChangedEvent) Kind() string { return "reservation" }

// Kind implements Event.
func (ReservationUnconfirmedEvent) Kind() string { return "reservation" }

// Kind implements Event.
func (ReservationEndedEvent) Kind() string { return "reservation" }

// Kind implements Event.
func (SettingChangedEvent) Kind() string { return "setting" }

// Kind implements Event.
func (StoreFailedEvent) Kind() string { return "medium" }

// Kind implements Event.
func (StoreHangsEvent) Kind() string { return "lun" }

// Kind implements Event.
func (ThresholdEvent) Kind() string { return "lun" }

// Kind implements Event.
func (FaultsEndedEvent) Kind() string { return "lun" }

// Kind implements Event.
func (SyncsFailEvent) Kind() string { return "medium" }

// Kind implements Event.
func (StateNotStoredEvent) Kind() string { return "medium" }

// Kind implements Event.
func (ScrubEndedEvent) Kind() string { return "medium" }

// Kind implements Event.
func (SanitizeEvent) Kind() string { return "medium" }

// Log implements Event.
func (e ReservationChangedEvent) Log(l *slog.Logger, extra ...slog.Attr) {
	text := "reservation changed"
	attrs := append(extra, slog.String("target", e.Target), slog.Uint64("lun", uint64(e.LUN)),
		slog.String("command", e.Command), slog.String("initiator", e.Initiator))
	if e.TPGT != 0 {
		text = "persistent " + text
		attrs = append(attrs, slog.Uint64("tpgt", uint64(e.TPGT)))
	}
	logLine(l, slog.LevelInfo, text, attrs...)
}

// Log implements Event.
func (e ReservationEndedEvent) Log(l *slog.Logger, extra ...slog.Attr) {
	logLine(l, slog.LevelInfo, "reservation ended", append(extra, slog.String("target", e.Target),
		slog.String("naa", e.Serial), slog.String("initiator", e.Initiator))...)
}

// Log implements Event.
func (e SettingChangedEvent) Log(l *slog.Logger, extra ...slog.Attr) {
	logLine(l, slog.LevelInfo, "setting changed", append(extra, slog.String("target", e.Target),
		slog.Uint64("lun", uint64(e.LUN)), slog.String("setting", e.Setting), slog.String("value", e.Value),
		slog.String("command", e.Command), slog.String("initiator", e.Initiator))...)
}

// Log implements Event.
func (e StoreFailedEvent) Log(l *slog.Logger, extra ...slog.Attr) {
	logLine(l, slog.LevelError, "store has failed", append(extra, slog.String("target", e.Target),
		slog.Uint64("lun", uint64(e.LUN)), slog.String("initiator", e.Initiator),
		slog.String("command", e.Command), slog.Uint64("lba", e.LBA), slog.Uint64("blocks", e.Blocks),
		slog.Any("reason", e.Err), slog.Uint64("not_logged", e.Suppressed))...)
}

// Log implements Event.
func (e StoreHangsEvent) Log(l *slog.Logger, extra ...slog.Attr) {
	attrs := append(extra, slog.String("naa", e.Serial), slog.String("since", e.Since.Format(time.TimeOnly)))
	if e.Ended {
		logLine(l, slog.LevelInfo, "store answers again", append(attrs,
			slog.Duration("after", time.Since(e.Since).Round(time.Millisecond)))...)
		return
	}
	logLine(l, slog.LevelError, "store does not answer: its LUN is BUSY until it does",
		append(attrs, slog.Int("commands", e.Commands))...)
}

// Log implements Event.
func (e ThresholdEvent) Log(l *slog.Logger, extra ...slog.Attr) {
	level, text := slog.LevelWarn, "LUN has reached its threshold of "+e.Threshold+" space"
	if e.Ended {
		level, text = slog.LevelInfo, "LUN is back behind its threshold of "+e.Threshold+" space"
	}
	logLine(l, level, text, append(extra, slog.String("naa", e.Serial), slog.Int64("threshold", e.Limit),
		slog.Int64("used", e.Used), slog.Int64("available", e.Free))...)
}

// Log implements Event.
func (e FaultsEndedEvent) Log(l *slog.Logger, extra ...slog.Attr) {
	logLine(l, slog.LevelWarn, "faults are no longer injected", append(extra, slog.String("naa", e.Serial),
		slog.Uint64("seed", e.Seed), slog.Uint64("injected", e.Injected))...)
}

// Log implements Event.
func (e SyncsFailEvent) Log(l *slog.Logger, extra ...slog.Attr) {
	logLine(l, slog.LevelError, "syncs keep failing: data written before the store was reopened may be lost",
		append(extra, slog.String("naa", e.Serial))...)
}

// Log implements Event.
func (e StateNotStoredEvent) Log(l *slog.Logger, extra ...slog.Attr) {
	logLine(l, slog.LevelError, "state not stored",
		append(extra, slog.String("naa", e.Serial), slog.Any("reason", e.Err))...)
}

// Log implements Event.
func (e ReservationUnconfirmedEvent) Log(l *slog.Logger, extra ...slog.Attr) {
	logLine(l, slog.LevelWarn, "reservation change not confirmed",
		append(extra, slog.String("naa", e.Serial), slog.Any("reason", e.Err))...)
}

// Log implements Event.
func (e ScrubEndedEvent) Log(l *slog.Logger, extra ...slog.Attr) {
	level, attrs := slog.LevelInfo, append(extra, slog.String("naa", e.Serial), slog.Int64("octets", e.Scrub.Done), slog.Uint64("bad_blocks", e.Scrub.Bad))
	if e.Scrub.Bad > 0 {
		level, attrs = slog.LevelError, append(attrs, slog.Uint64("first_near_lba", e.Scrub.First))
	}
	logLine(l, level, "scrub "+e.Scrub.Status.String(), attrs...)
}

// sanitizeLines are the lines of the stages of a SANITIZE.
var sanitizeLines = [...]struct {
	level slog.Level
	text  string
}{
	SanitizeBegun:       {slog.LevelWarn, "sanitize begins"},
	SanitizeRestarted:   {slog.LevelWarn, "sanitize restarts"},
	SanitizeDone:        {slog.LevelInfo, "sanitize done"},
	SanitizeInterrupted: {slog.LevelWarn, "sanitize interrupted"},
	SanitizeFailed:      {slog.LevelError, "sanitize failed"},
	SanitizeStuck:       {slog.LevelError, "sanitize has failed, or cannot continue because the unit is read-only"},
}

// Log implements Event.
func (e SanitizeEvent) Log(l *slog.Logger, extra ...slog.Attr) {
	attrs := append(extra, slog.String("naa", e.Serial))
	if e.Stage == SanitizeBegun || e.Stage == SanitizeRestarted {
		attrs = append(attrs, slog.Uint64("action", uint64(e.Action)))
	}
	if e.Initiator != "" {
		attrs = append(attrs, slog.String("initiator", e.Initiator))
	}
	if e.Err != nil {
		attrs = append(attrs, slog.Any("reason", e.Err))
	}
	text := sanitizeLines[e.Stage].text
	if e.Action == formatUnit {
		text = strings.Replace(text, "sanitize", "format", 1)
	}
	logLine(l, sanitizeLines[e.Stage].level, text, attrs...)
}

func logLine(l *slog.Logger, level slog.Level, text string, attrs ...slog.Attr) {
	l.LogAttrs(context.Background(), level, text, attrs...)
}
