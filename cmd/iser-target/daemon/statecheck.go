package daemon

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
)

// The files of the state directory.
const (
	identitiesFile   = "identities.json"
	reservationsFile = "reservations.json"
	settingsFile     = "settings.json"
	sanitizeFile     = "sanitize.json"
	failuresFile     = "failures.json"
	// shrinkFile is in shrink.go, checksumsFile in checksums.go.
)

// A StateFile is a file of the state directory, and what a target does without it.
type StateFile struct {
	File    string
	Without string
	examine func(path string) state.Condition
}

// StateFiles are all files of the state directory.
var StateFiles = []StateFile{
	{identitiesFile, "LUNs on files are not ready until you set their key identity, and others look like new disks", state.ExamineIdentities},
	{reservationsFile, "persistent reservations with APTPL are gone: nodes of a cluster that they kept out may write", lun.ExamineReservations},
	{settingsFile, "settings that initiators saved are gone, like a write protection", lun.ExamineSettings},
	{sanitizeFile, "LUNs whose sanitize was interrupted are served, with what is left of their data", lun.ExamineSanitizations},
	{failuresFile, "LUNs whose syncs failed come up as ok, although data may be lost", lun.ExamineSyncFailures},
	{checksumsFile, "a side file of checksums that is missing is made from the data as it is", checksumsFormat.Examine},
	{shrinkFile, "a file whose shrinking was interrupted keeps its larger size", shrinkFormat.Examine},
}

// CheckState examines the files of a state directory. It changes nothing.
func CheckState(dir string) []state.Condition {
	var list []state.Condition
	for _, f := range StateFiles {
		list = append(list, f.examine(filepath.Join(dir, f.File)))
	}
	return list
}

// RepairState restores the files of a state directory from their spare copies. Those named in discard, which
// must be damaged, it sets aside, and the target begins without them. It fails if a target uses the directory.
func RepairState(dir string, discard []string) (restored []error, err error) {
	damaged := map[string]bool{}
	for _, c := range CheckState(dir) {
		damaged[filepath.Base(c.Path)] = c.Verdict == state.Damaged
	}
	for _, name := range discard {
		switch is, known := damaged[name]; {
		case !known:
			return nil, fmt.Errorf("%q is not a file of a state directory", name)
		case !is:
			return nil, fmt.Errorf("%s is not damaged, or its spare copy is not: it will not be discarded", name)
		}
	}
	for _, name := range discard {
		if err := state.Discard(filepath.Join(dir, name)); err != nil {
			return nil, err
		}
	}
	var s stateFiles
	err = s.open(dir)
	restored = s.restored()
	return restored, errors.Join(err, s.close())
}
