package schema

// An Error answers a request that failed.
type Error struct {
	Message string `json:"error"`
	Hint    string `json:"hint,omitempty"` // what to do next
	Code    Code   `json:"code"`
	// Needs names the missing options of the request: disrupt, allow_shrink.
	Needs []string `json:"needs,omitempty"`
	Plan  *Plan    `json:"plan,omitempty"` // that was refused
	// Problems has those that make a configuration invalid.
	Problems []Problem `json:"problems,omitempty"`

	// Cause is why a client has no answer, like context.Canceled. It is not part of the answer.
	Cause error `json:"-"`
}

// A Problem is what is wrong with one key of a configuration.
type Problem struct {
	Key    string `json:"key"` // like targets[0].luns[1].size; empty: the file
	Reason string `json:"reason"`
}

// Error returns the message without the hint.
func (e *Error) Error() string { return e.Message }

// Is reports whether target is the Code of e, for errors.Is.
func (e *Error) Is(target error) bool {
	code, ok := target.(Code)
	return ok && code == e.Code
}

// Unwrap returns Cause.
func (e *Error) Unwrap() error { return e.Cause }

// A Code classifies an Error. It is an error itself, so that errors.Is(err, NotFound) finds it.
type Code string

// Error returns the code.
func (c Code) Error() string { return string(c) }

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
	Failed    Code = "failed"      // the target could not do it, and nothing was changed; or the client could not, and Cause says why
	Unreached Code = "unreachable" // client only: no target answered
)
