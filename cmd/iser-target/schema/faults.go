package schema

import "time"

// Faults say what goes wrong between the commands of a LUN and its backend. Probabilities are from 0
// to 1, for each call of the backend.
type Faults struct {
	Seed       uint64  `json:"seed"`                  // the same seed hits the same calls
	ReadError  float64 `json:"read_error,omitempty"`  // reads fail
	WriteError float64 `json:"write_error,omitempty"` // writes fail
	SyncError  float64 `json:"sync_error,omitempty"`  // syncs and durable writes fail
	Hang       float64 `json:"hang,omitempty"`        // calls hang until the faults end
	Latency    string  `json:"latency,omitempty"`     // calls take longer, by up to this, like 50ms
	Sense      string  `json:"sense,omitempty"`       // of the errors: sense key, ASC and ASCQ in hexadecimal, like 3/11/00
	For        string  `json:"for,omitempty"`         // when the faults end, like 30s; default 1m
}

// A FaultState describes the faults of a LUN.
type FaultState struct {
	Faults
	Until    time.Time `json:"until"`
	Injected uint64    `json:"injected"` // errors and hangs so far
}
