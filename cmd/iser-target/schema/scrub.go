package schema

import "time"

// A ChecksumState describes the checksums of a LUN.
type ChecksumState struct {
	Path       string `json:"path"`       // of the side file
	Verified   uint64 `json:"verified"`   // blocks that were compared with their checksums
	Mismatches uint64 `json:"mismatches"` // of these, blocks that differed
	Bad        int    `json:"bad"`        // blocks that are known to be corrupt, up to 4096
	Pending    int64  `json:"pending"`    // bytes whose checksums are still computed from the data
	Scrub      *Scrub `json:"scrub,omitempty"`
}

// Values of Scrub.State.
const (
	ScrubRunning     = "running"
	ScrubDone        = "done"
	ScrubCanceled    = "canceled"
	ScrubInterrupted = "interrupted" // the LUN was closed or reopened
)

// A ScrubRequest asks for a scrub.
type ScrubRequest struct {
	Rate string `json:"rate,omitempty"` // bytes per second, like 100MiB; empty: as fast as the commands of initiators leave
}

// A Scrub is the last scrub of a LUN.
type Scrub struct {
	State string     `json:"state"`
	Done  int64      `json:"done"`            // bytes
	Total int64      `json:"total"`           // bytes
	Bad   uint64     `json:"bad"`             // blocks that differ from their checksums, or cannot be read
	First *uint64    `json:"first,omitempty"` // LBA near the first of them: the first block of its 1 MiB
	Rate  int64      `json:"rate,omitempty"`  // bytes per second; 0: no limit
	Begun time.Time  `json:"begun"`
	Ended *time.Time `json:"ended,omitempty"`
}
