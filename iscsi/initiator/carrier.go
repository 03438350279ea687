package initiator

import (
	"context"

	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
)

// A Transport opens connections to targets.
type Transport interface {
	// Name returns the transport for messages, such as "tcp".
	Name() string
	// Dial connects to addr. The Carrier is ready for the Login Request. If ctx ends, Dial returns its error.
	Dial(ctx context.Context, addr string) (Carrier, error)
}

// A Carrier carries the PDUs and the data of one connection: it is the initiator's Datamover (RFC 5047). One goroutine at a
// time calls Receive. All other methods may be called at any time.
//
// A Session drives its Carriers. A program can also drive one itself, to send PDUs of its own for example: it exchanges Login
// Requests by Post, Flush and Receive, calls EnterFullFeature, and fills the BHS of each Command before PostCommand. Such a
// command needs a Hold of its own. After the answer, the program calls End and Release, and the command comes back through its Done when
// the Carrier has released it, too.
type Carrier interface {
	// Offer returns the operational keys that the Carrier requires, besides those of the session. joins says that
	// the connection joins a session, so only keys of connections are valid.
	Offer(o Offer) []keys.Pair
	// EnterFullFeature is called once, after the final Login Response. find returns the command of a tag, or nil. An
	// error ends the login.
	EnterFullFeature(p Params, find func(itt uint32) *Command) error

	// Post queues a PDU with its data, both of which it copies. It never waits.
	Post(bhs pdu.BHS, data []byte) error
	// PostCommand queues the SCSI Command of c, whose BHS is complete except for immediate data. It calls c.Hold for each use
	// of the memory of c, and c.Release when that has ended. It never waits. After an error nothing is queued or held.
	PostCommand(c *Command) error
	// Flush sends what is queued. It may wait until the target takes it.
	Flush()

	// Receive waits for a PDU that the Carrier does not handle itself. A Data-In is returned only if it has the status.
	// Every error ends the connection.
	Receive(p *PDU) error
	// End takes the access to the memory of c back from the target, when the command has ended. What c still holds is
	// released soon.
	End(c *Command)
	// Check returns an error if the data of c, which has ended well, is not complete.
	Check(c *Command) error

	// Close ends the connection at once. Receive returns, and all that commands hold is released.
	Close() error
}

// An Offer says for which login a Carrier offers keys.
type Offer struct {
	Discovery, Joins         bool
	HeaderDigest, DataDigest bool
}

// A PDU is one that the target sent. Both parts are valid until the next Receive.
type PDU struct {
	BHS  pdu.BHS
	Data []byte // without padding
}

// Params is what a login has agreed on. Lengths are bytes.
type Params struct {
	TSIH uint16
	// Answers has each key with the target's answer or declaration.
	Answers map[string]string

	InitialR2T, ImmediateData          bool
	FirstBurstLength, MaxBurstLength   int
	MaxConnections                     int
	MaxUnexpected                      int // requests other than commands that the target takes without a place in its window (RFC 7145, section 6.7); 0: no limit
	HeaderDigest, DataDigest           bool
	MaxSendSegment                     int  // longest data segment that the target takes on this connection
	Authenticated, TargetAuthenticated bool // by CHAP
}
