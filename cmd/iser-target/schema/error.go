package schema

// An Error answers a request that failed.
type Error struct {
	Message string `json:"error"`
	Hint    string `json:"hint,omitempty"` // what to do next
	Code    Code   `json:"code"`
	// Needs names the missing options of the request: disrupt, allow_shrink.
	Needs []string `json:"needs,omitempty"`
	Plan  *Plan    `json:"plan,omitempty"` // that was refused
}

// Error returns the message without the hint.
func (e *Error) Error() string { return e.Message }

// A Code classifies an Error.
type Code string

// Codes of errors.
const (
	Invalid   Code = "invalid"     // the request, or the configuration that would result, is not valid
	Forbidden Code = "forbidden"   // the role of the caller does not permit the request
	NotFound  Code = "not_found"   // the object of the request does not exist
	Method    Code = "method"      // the path does not support the method
	Exists    Code = "exists"      // the object to add exists already
	Edited    Code = "edited"      // the configuration file was edited, and the edit is not applied
	Refused   Code = "refused"     // the change requires options that the request lacks
	TooLarge  Code = "too_large"   // the body is too large
	Busy      Code = "busy"        // another change, or a limit, blocked the request for too long
	Failed    Code = "failed"      // the target could not do it; nothing was changed
	Unreached Code = "unreachable" // client only: no target answered
)
