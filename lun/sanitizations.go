package lun

import (
	"encoding/hex"
	"fmt"

	"github.com/iser-target/iser-target/lun/state"
)

// Sanitizations keeps which logical units are being sanitized, or failed to be, all in one file.
// A sanitize continues when the process starts again, and nobody has access to a medium that is
// half erased. Several goroutines may use it at once.
type Sanitizations = state.Keeper[sanitizeEntry]

var sanitizationsFormat = state.Format[state.Records[sanitizeEntry]]{Name: "sanitizations", Version: 1}

// A sanitizeEntry is the record of a unit that is not idle.
type sanitizeEntry struct {
	NAA          string `json:"naa"`          // Identity.Serial
	Action       byte   `json:"action"`       // service action of SANITIZE
	Unrestricted bool   `json:"unrestricted"` // AUSE
	Failed       bool   `json:"failed"`
	Passes       int    `json:"passes"`  // of OVERWRITE, else 0; so are these
	Invert       bool   `json:"invert"`  // every second pass writes the complement
	Pattern      string `json:"pattern"` // hex digits
}

// OpenSanitizations opens the file at path, as OpenReservations does.
func OpenSanitizations(path string) (*Sanitizations, error) {
	return state.OpenKeeper(sanitizationsFormat, path)
}

func encodeJob(naa string, j *sanitizeJob, failed bool) sanitizeEntry {
	return sanitizeEntry{naa, j.action, j.unrestricted, failed, j.passes, j.invert, hex.EncodeToString(j.pattern)}
}

func (e sanitizeEntry) Unit() string { return e.NAA }

func (e sanitizeEntry) Check() error {
	_, err := e.decode()
	return err
}

// decode reverses encodeJob. It refuses what no SANITIZE could have asked for.
func (e sanitizeEntry) decode() (*sanitizeJob, error) {
	pattern, err := hex.DecodeString(e.Pattern)
	if err != nil || hex.EncodeToString(pattern) != e.Pattern {
		return nil, fmt.Errorf("pattern %.40q: want lower-case hex digits", e.Pattern)
	}
	switch overwrite := e.Action == sanitizeOverwrite; {
	case !overwrite && e.Action != sanitizeBlockErase && e.Action != sanitizeCryptoErase:
		return nil, fmt.Errorf("action %d: want %d, %d or %d", e.Action,
			sanitizeOverwrite, sanitizeBlockErase, sanitizeCryptoErase)
	case !overwrite && (e.Passes != 0 || e.Invert || len(pattern) != 0):
		return nil, fmt.Errorf("action %d has no passes and no pattern", e.Action)
	case overwrite && (e.Passes < 1 || e.Passes > maxOverwrites):
		return nil, fmt.Errorf("%d passes, want 1 to %d", e.Passes, maxOverwrites)
	case overwrite && (len(pattern) < 1 || len(pattern) > maxPattern):
		return nil, fmt.Errorf("a pattern of %d bytes, want 1 to %d", len(pattern), maxPattern)
	}
	return &sanitizeJob{e.Action, e.Unrestricted, e.Passes, e.Invert, pattern}, nil
}
