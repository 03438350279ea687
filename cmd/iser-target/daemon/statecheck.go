package daemon

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

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
	examine func(path string, known []string) state.Condition
}

// StateFiles are all files of the state directory.
var StateFiles = []StateFile{
	{identitiesFile, "LUNs on files are not ready until you set their key identity, and others look like new disks", whole(state.ExamineIdentities)},
	{reservationsFile, "persistent reservations with APTPL are gone: nodes of a cluster that they kept out may write", lun.ExamineReservations},
	{settingsFile, "settings that initiators saved are gone, like a write protection", lun.ExamineSettings},
	{sanitizeFile, "LUNs whose sanitize was interrupted are served, with what is left of their data", lun.ExamineSanitizations},
	{failuresFile, "LUNs whose syncs failed come up as ok, although data may be lost", lun.ExamineSyncFailures},
	{checksumsFile, "a side file of checksums that is missing is made from the data as it is", whole(checksumsFormat.Examine)},
	{shrinkFile, "a file whose shrinking was interrupted keeps its larger size", whole(shrinkFormat.Examine)},
}

// whole examines a file that has no records of units.
func whole(examine func(string) state.Condition) func(string, []string) state.Condition {
	return func(path string, _ []string) state.Condition { return examine(path) }
}

// CheckState examines the files of a state directory. It changes nothing.
func CheckState(dir string) []state.Condition {
	var list []state.Condition
	known := slices.Collect(maps.Values(state.KnownSerials(filepath.Join(dir, identitiesFile))))
	for _, f := range StateFiles {
		list = append(list, f.examine(filepath.Join(dir, f.File), known))
	}
	return list
}

// LUNOf returns the key of the LUN with that NAA in a state directory: target, number, backend and path.
func LUNOf(dir, naa string) string {
	for key, serial := range state.KnownSerials(filepath.Join(dir, identitiesFile)) {
		if serial == naa {
			return key
		}
	}
	return "a LUN of before"
}

// A Repair is what RepairState has done.
type Repair struct {
	Restored []error // why files were restored from their spare copies
	Salvaged []error // why only the good records of files are left
}

// RepairState restores the files of a state directory from their spare copies, and keeps the good records of those whose
// spare copies are damaged, too. It accepts the losses in discard: a file, which must be damaged and which it sets
// aside, or FILE:NAA, a record that is damaged. It fails if a target uses the directory.
func RepairState(dir string, discard []string) (done Repair, err error) {
	damaged := map[string]bool{}
	for _, c := range CheckState(dir) {
		damaged[filepath.Base(c.Path)] = c.Verdict == state.Damaged
	}
	for _, name := range discard {
		file, _, record := strings.Cut(name, ":")
		switch is, known := damaged[file]; {
		case !known:
			return done, fmt.Errorf("%q is not a file of a state directory", file)
		case !is && !record:
			return done, fmt.Errorf("%s is not damaged, or its spare copy is not: it will not be discarded", name)
		}
	}
	for _, name := range discard {
		if strings.Contains(name, ":") {
			continue
		}
		if err := state.Discard(filepath.Join(dir, name)); err != nil {
			return done, err
		}
	}
	var s stateFiles
	err = s.open(dir)
	done = Repair{s.restored(), s.salvaged}
	for _, name := range discard {
		if file, naa, record := strings.Cut(name, ":"); record && err == nil {
			err = s.accept(file, naa)
		}
	}
	return done, errors.Join(err, s.close())
}

// accept forgets that a record of a file is damaged.
func (s *stateFiles) accept(file, naa string) error {
	keepers := map[string]interface{ Accept(string) error }{
		reservationsFile: s.reservations, settingsFile: s.settings, sanitizeFile: s.sanitizations, failuresFile: s.failures,
	}
	if file == identitiesFile {
		return s.ids.AcceptLost(naa)
	}
	k := keepers[file]
	if k == nil {
		return fmt.Errorf("%s has no records of NAAs", file)
	}
	return k.Accept(naa)
}

// lost returns the records of each file that are damaged.
func (s *stateFiles) lost() map[string][]state.Loss {
	return map[string][]state.Loss{
		reservationsFile: s.reservations.Lost(), settingsFile: s.settings.Lost(), sanitizeFile: s.sanitizations.Lost(), failuresFile: s.failures.Lost(),
	}
}

// openRecords opens a file of records. If the file and its spare copy are damaged, it keeps the good records.
func openRecords[K any](s *stateFiles, path string, open func(string) (*K, error), examine func(string, []string) state.Condition,
	salvage func(string, []string) ([]state.Loss, error)) (*K, error) {
	k, err := open(path)
	if err == nil {
		return k, nil
	}
	known := slices.Collect(maps.Values(s.ids.Serials()))
	if examine(path, known).Verdict != state.Partial {
		return nil, err
	}
	if _, salvaged := salvage(path, known); salvaged != nil {
		return nil, errors.Join(err, salvaged)
	}
	s.salvaged = append(s.salvaged, err)
	return open(path)
}
