package schema

import (
	"fmt"
	"regexp"
	"time"
)

// A Snapshot is the content of a LUN at one moment, in a file next to that of the LUN.
type Snapshot struct {
	Target  string    `json:"target"`
	LUN     int       `json:"lun"`
	Name    string    `json:"name,omitempty"`
	Path    string    `json:"path,omitempty"`
	Size    int64     `json:"size"`    // bytes
	Used    int64     `json:"used"`    // bytes that its file takes; most are also those of the LUN
	Created time.Time `json:"created"` // zero: not known
	// Waited is for how long writes to the LUN waited, in seconds, in the answer to the request that made the snapshot.
	Waited float64 `json:"waited,omitempty"`
	// Reason is why the snapshots of a LUN cannot be listed. Name is empty then.
	Reason string `json:"reason,omitempty"`
}

// A SnapshotRequest is the body of a request that makes a snapshot.
type SnapshotRequest struct {
	Name string `json:"name"`
}

// A CloneSource says what a new LUN begins as.
type CloneSource struct {
	Target   string `json:"target,omitempty"` // empty: that of the new LUN
	LUN      int    `json:"lun"`
	Snapshot string `json:"snapshot,omitempty"` // name; empty: the LUN as it is
	// Copy lets the target copy all data of the snapshot if the file systems cannot share blocks.
	Copy bool `json:"copy,omitempty"`
}

// MaxSnapshotName is the length of the longest name of a snapshot.
const MaxSnapshotName = 64

var snapshotName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]*$`)

// CheckSnapshotName returns an error unless name can be that of a snapshot.
func CheckSnapshotName(name string) error {
	if len(name) > MaxSnapshotName || !snapshotName.MatchString(name) {
		return fmt.Errorf("the name of a snapshot must have 1 to %d letters, digits, dots, hyphens and underscores, and begin with a letter or digit, not %q", MaxSnapshotName, name)
	}
	return nil
}
