package lun

import (
	"encoding/hex"
	"fmt"

	"github.com/iser-target/iser-target/lun/state"
)

// Sanitizations keeps which logical units are being sanitized, or have failed
// to be, all in one file: what has begun goes on when the process starts again,
// and nobody gets to a medium that is half erased. It may be used by several
// goroutines at once.
type Sanitizations struct{ *state.Keeper[sanitizeEntry] }

var sanitizationsKind = state.Kind[sanitizeEntry]{Name: "sanitizations", Version: 1}

// sanitizeEntry is kept of a unit that is not idle.
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
	k, err := state.OpenKeeper(sanitizationsKind, path)
	if err != nil {
		return nil, err
	}
	return &Sanitizations{k}, nil
}

// load returns what was kept of the unit with that NAA, or nil.
func (k *Sanitizations) load(naa string) (job *sanitizeJob, failed bool, err error) {
	e, ok, err := k.Get(naa)
	if ok {
		job, err = e.decode()
	}
	return job, e.Failed, err
}

// save keeps a job for the unit with that NAA, or with nil forgets the one it
// has. It returns what put does.
func (k *Sanitizations) save(naa string, job *sanitizeJob, failed bool) (unsure bool, err error) {
	if job == nil {
		return k.Remove(naa)
	}
	return k.Put(encodeJob(naa, job, failed))
}

func encodeJob(naa string, j *sanitizeJob, failed bool) sanitizeEntry {
	return sanitizeEntry{naa, j.action, j.unrestricted, failed, j.passes, j.invert, hex.EncodeToString(j.pattern)}
}

func (e sanitizeEntry) Unit() string { return e.NAA }

func (e sanitizeEntry) Check() error {
	_, err := e.decode()
	return err
}

// decode is the reverse of encodeJob. What no SANITIZE could have asked for is
// an error.
func (e sanitizeEntry) decode() (*sanitizeJob, error) {
	pattern, err := hex.DecodeString(e.Pattern)
	if err != nil || hex.EncodeToString(pattern) != e.Pattern {
		return nil, fmt.Errorf("pattern %.40q: want lower-case hex digits", e.Pattern)
	}
	switch overwrite := e.Action == sanitizeOverwrite; {
	case !overwrite && e.Action != sanitizeBlockErase && e.Action != sanitizeCryptoErase:
		return nil, fmt.Errorf("action %d: want %d, %d or %d", e.Action, sanitizeOverwrite, sanitizeBlockErase, sanitizeCryptoErase)
	case !overwrite && (e.Passes != 0 || e.Invert || len(pattern) != 0):
		return nil, fmt.Errorf("action %d has no passes and no pattern", e.Action)
	case overwrite && (e.Passes < 1 || e.Passes > maxOverwrites):
		return nil, fmt.Errorf("%d passes, want 1 to %d", e.Passes, maxOverwrites)
	case overwrite && (len(pattern) < 1 || len(pattern) > maxPattern):
		return nil, fmt.Errorf("a pattern of %d octets, want 1 to %d", len(pattern), maxPattern)
	}
	return &sanitizeJob{e.Action, e.Unrestricted, e.Passes, e.Invert, pattern}, nil
}
