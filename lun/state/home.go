package state

import (
	"context"
	"errors"
)

// A Home keeps values by key, each with a revision. It is where states are at home: in a Directory, or in what
// several targets share. Its methods are safe for concurrent use.
//
// A call ends at the latest with its context. The error is an ErrUnreachable then, and of Put an ErrUnsure, too, if
// it had begun. After Close they fail with fs.ErrClosed.
type Home interface {
	// Get returns the value of the key. Its Data is nil and its Revision 0 if the key has none.
	Get(ctx context.Context, key string) (Value, error)
	// Put stores data as the value of the key, or with nil removes it, if the revision of the key is base.
	// Otherwise it fails with an ErrConflict. The value is on stable storage when Put returns its revision, which
	// no other value of the key has or had in this home; it is 0 after a removal.
	//
	// After an ErrUnsure the next Get tells which value counts. Until then a Put with the same base may succeed.
	Put(ctx context.Context, key string, data []byte, base Revision) (Revision, error)
	// List returns the values whose keys begin with prefix, ascending by key.
	List(ctx context.Context, prefix string) ([]Value, error)
	// Watch returns what is stored from now on under keys that begin with prefix, removals as values without Data, until ctx
	// or the home ends. If the reader is slow, only the last value of a key is kept for it.
	Watch(ctx context.Context, prefix string) (<-chan Value, error)
	Close() error
}

// A Revision names a value that a key of a Home has had. 0 is that of a key without a value.
type Revision int64

// A Value is what a Home has under a key.
type Value struct {
	Key      string
	Data     []byte // not nil, if the key has a value
	Revision Revision
}

var (
	// ErrConflict is in errors of Put about a key that has changed since the caller knew its revision. Nothing
	// was stored.
	ErrConflict = errors.New("another change came first")
	// ErrUnreachable is in errors about a home that did not answer in time.
	ErrUnreachable = errors.New("the home of the state does not answer")
	// ErrUnsure is in errors of Put about a value that may have been stored all the same.
	ErrUnsure = errors.New("it may have been stored")
)

// An unsureError is an ErrUnsure with the text of its cause.
type unsureError struct{ error }

func (e unsureError) Unwrap() []error { return []error{e.error, ErrUnsure} }
