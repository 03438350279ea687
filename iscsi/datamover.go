package iscsi

import (
	"errors"
	"net"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// A Datamover carries the PDUs and the data of one connection (RFC 5047,
// which also gave the methods their names). Package iser implements it over
// RDMA, package iscsi/tcp over plain TCP.
//
// Receive and Bind belong to the holder of the connection's receive lock. All
// other methods may be called by any goroutine at any time, also after Close.
// PutData, GetData, SendControl and Unbind only queue, in order, and never wait
// for the peer: the core calls them with a lock held. Flush sends. The mover may
// call Task.Sent and Buffer.Release from within any of its methods; they take
// no lock that the core holds while it calls the mover.
type Datamover interface {
	// Transport names the kind of connection in logs: "iser" or "tcp".
	Transport() string
	LocalAddr() net.Addr
	RemoteAddr() net.Addr

	// RDMA tells whether data travels by RDMA: RFC 7145's keys apply, there
	// are no digests, no Data-In, R2T or solicited Data-Out PDUs.
	RDMA() bool

	// Receive waits for what the peer does next and describes it in n: a
	// control-type PDU (Control_Notify) or the end of a GetData
	// (Data_Completion_Notify). n is all zero before; its slices are on loan
	// until the next Receive. io.EOF is the peer's orderly close; every other
	// error has ended the connection, and where the peer can be told
	// (Terminate) it has been. After an error the core calls Close, then
	// Receive again until that fails once more, and by then every GetData
	// that was outstanding has been notified.
	Receive(n *Notice) error

	// SetReceiveDeadline bounds Receive; the zero time means no bound. A
	// Receive that it ends has ended the connection.
	SetReceiveDeadline(t time.Time) error

	// NewTask makes the mover's own state for one task slot (Task.Mover). A
	// slot is used again and again; its state is made once. Login PDUs travel
	// in such slots, too, before EnterFullFeature.
	NewTask() any

	// Bind ties to t what the initiator advertised with the SCSI Command that
	// Receive returned last (Remote Mapping); t.Request is its header.
	// unsolicited is how many octets of write data come without being asked
	// for. The binding ends with the task's SCSI Response or with Unbind. An
	// inconsistent advertisement (a read without a sink) is an error: t is not
	// bound, and the core answers with CHECK CONDITION.
	Bind(t *Task, unsolicited uint32) error

	// Unbind drops the binding of a task that ends without a SCSI Response
	// (Deallocate_Task_Resources). No data comes any more: every GetData has
	// been notified. What PutData has queued still leaves.
	Unbind(t *Task)

	// PutData queues the data that starts at Buffer Offset off (Put_Data). t
	// is used only until PutData returns. data is part of b and is not changed
	// until the mover calls b.Release, which it does when the data has left or
	// the connection has ended. If PutData fails, which ends the connection, b
	// stays with the caller. ExpCmdSN and MaxCmdSN in t.Header are those of now,
	// for a mover that needs them in PDUs of its own.
	PutData(t *Task, off uint32, data []byte, b *Buffer) error

	// GetData fetches len(data) octets that start at Buffer Offset off into
	// data (Get_Data). The end is a Notice with this Task; unless GetData
	// itself fails, which ends the connection, there is exactly one, also when
	// the connection ends. data is the mover's until then. At most one GetData
	// of a task is outstanding. ExpCmdSN and MaxCmdSN in t.Header are those of
	// now.
	GetData(t *Task, off uint32, data []byte) error

	// SendControl queues the PDU t.Header with the data segment t.Segment;
	// DataSegmentLength is already set. The mover calls t.Sent when both have
	// left, or when the connection has ended; if SendControl fails, which ends
	// the connection, it does not. A SCSI Response is an end: the mover may
	// invalidate what the initiator advertised for t, if t is bound at all.
	// Its ExpDataSN counts the calls of PutData and GetData for t; a mover that
	// cuts data into several PDUs puts its own count there.
	SendControl(t *Task) error

	// Flush sends what is queued. If another goroutine is sending it returns
	// at once: that goroutine will send this, too. Close ends it.
	Flush()

	// MaxSendSegment is the longest data segment, in octets, that SendControl
	// takes in the current phase; at least 128.
	MaxSendSegment() int

	// EnterFullFeature tells the mover, before the final Login Response is
	// queued, that login has succeeded, and with what (Enable_Datamover and
	// Notice_Key_Values). tasks is how many task slots there can be. The final
	// Login Response, which follows, is still as long as login allows. An
	// error refuses the login: out of resources.
	EnterFullFeature(p Params, tasks int) error

	// Close ends the connection at once (Connection_Terminate). Receive
	// returns an error after it has notified every GetData that was
	// outstanding, with net.ErrClosed. Closing twice does no harm.
	Close() error

	// CloseWrite sends what is queued and then the end of our direction of
	// the stream; the peer can still be heard.
	CloseWrite() error
}

// A Canceler is a Datamover that can call off a GetData. That is what it takes
// to abort a task on TCP: Linux does not send the data of a task that it wants
// aborted.
type Canceler interface {
	// CancelData ends the GetData of t without a Notice; its data is the core's
	// again. If it returns false that is not possible, and there will be a Notice
	// as ever.
	CancelData(t *Task) bool
}

// A Deferrer is a Datamover that knows whether a Flush can be put off, so that what has
// come together is answered with one system call.
type Deferrer interface {
	// Pending tells whether a whole message has come that Receive has not looked at.
	// Like Receive it belongs to the holder of the receive lock, or to who keeps that free
	// meanwhile, and so does Defer.
	Pending() bool

	// Defer is instead of Flush: what is queued leaves with the next Flush, at the
	// latest when Receive is about to wait for the peer.
	Defer()
}

// A Renegotiator is a Datamover without RDMA, which has to be told when the
// initiator declares another MaxRecvDataSegmentLength in the full feature phase.
type Renegotiator interface {
	SetMaxSendSegment(octets int)
}

// An Upgrader is a Datamover without RDMA whose connection can go on in RDMA mode
// after the final Login Response (RFC 7145, section 5.1.2).
type Upgrader interface {
	// Upgrade hands over the connection when that Response has left, and what
	// has been read from it since the last PDU. Nobody uses the mover then or
	// later, except that until EnableDatamover has returned Close still closes
	// the connection. An error is why the Response has not left.
	Upgrade() (nc net.Conn, prefix []byte, err error)
}

// A StepUp allocates what it takes to go on in RDMA mode after a login that has
// agreed on p (Allocate_Connection_Resources). tasks is how many task slots there
// can be. An error refuses the login: out of resources.
type StepUp func(p Params, tasks int) (EnableDatamover, error)

// EnableDatamover waits until the initiator has begun RDMA mode on nc, and returns
// the Datamover for the full feature phase. The stream goes on with prefix, which
// has been read already. After an error, also that timeout is over, nc is closed.
type EnableDatamover func(nc net.Conn, prefix []byte, timeout time.Duration) (Datamover, error)

// A Repeater is a Datamover that can do what an ErrorRecoveryLevel above 0 takes
// (RFC 7143, section 11.16). If login agrees on such a level it keeps what PutData
// sends until Forget or Unbind, or until it has been acknowledged; it asks for
// data again that was lost on the way; and SendControl may be called again for a
// task whose PDU has left.
type Repeater interface {
	// Repeat queues once more the Data-In PDUs of t from DataSN begin on, or its
	// R2T if that is unanswered: length of them, or all if length is 0. If begin is
	// 0, too, these are all that are not acknowledged. ExpCmdSN and MaxCmdSN come
	// from by.Header, and by.Sent is called when the last PDU has left, unless
	// queued is false: then there was nothing to send. next is the DataSN or R2TSN
	// that t goes on with. Errors are ErrNeverSent and ErrGivenUp.
	Repeat(t, by *Task, begin, length uint32) (queued bool, next uint32, err error)

	// Resegment queues once more all Data-In of t that is not acknowledged, in PDUs
	// of the length that the initiator takes now (section 11.16.3); by as with
	// Repeat. The error is ErrGivenUp.
	//
	// Preconditions: no data of t is queued.
	Resegment(t, by *Task) (queued bool, err error)

	// Acknowledge takes a DataACK: tag and lun are what a Data-In PDU came with,
	// everything before DataSN next has been received. It returns false if no
	// such PDU was sent.
	Acknowledge(tag uint32, lun [8]byte, next uint32) bool

	// Forget gives back the data that is kept of t.
	Forget(t *Task)
}

// A Reassigner is a Datamover that can go on with a task of another connection,
// which is what ErrorRecoveryLevel 2 takes (RFC 7143, section 7.2.2).
type Reassigner interface {
	// Detach is Unbind for a task that may be reassigned, and tells how far it was.
	// The SCSI Response may have been sent. It may be called after Close.
	Detach(t *Task) Progress

	// Advertised ties to t what the initiator advertised with the TASK REASSIGN that
	// Receive returned last, until Unbind. It belongs to the holder of the receive
	// lock.
	Advertised(t *Task)

	// Rebind binds t, a task of another connection, with what was advertised with by.
	// An inconsistent advertisement is an error, and t is not bound.
	Rebind(t, by *Task, at Resumption) error
}

// Progress is how far the data of a task was. With RDMA it is all zero: iSCSI does
// not see data being acknowledged.
type Progress struct {
	Next         uint32                 // DataSN of the next Data-In, or R2TSN of the next R2T
	Acknowledged uint32                 // DataSN of the first Data-In that was not acknowledged
	Offset       func(sn uint32) uint32 // Buffer Offset of the Data-In with that DataSN; 0 if it is not known. May be nil: 0
}

// A Resumption is where the data of a task goes on.
type Resumption struct {
	SN        uint32 // DataSN of the next Data-In, or R2TSN of the next R2T
	Offset    uint32 // Buffer Offset of the next Data-In
	Immediate uint32 // octets of immediate data that the command had
	Done      bool   // nothing is going to move, and nothing has been advertised: only the status is sent
}

// Why a SNACK is rejected (RFC 7143, section 11.16).
var (
	ErrNeverSent = errors.New("never sent, or acknowledged")
	ErrGivenUp   = errors.New("given up for lack of memory")
)

// A Notice is what Datamover.Receive found: a PDU if Task is nil, otherwise
// the end of that Task's GetData.
type Notice struct {
	BHS  []byte // 48 octets
	AHS  []byte // whole AHS area, a multiple of 4 octets
	Data []byte // data segment without padding
	// Begun is when the BHS had come, if the rest of the PDU came later; zero: it did
	// not, or that is not known.
	Begun time.Time

	// Reject, if not zero, is why the mover has discarded the PDU, which has no
	// Data here. The connection goes on, and the core sends the Reject.
	Reject pdu.RejectReason

	Task *Task
	// Err is why the GetData failed. Unless it is one of the errors below the
	// connection is ending.
	Err error
}

// Why a GetData fails that takes nothing but its command with it (RFC 7143,
// sections 7.8, 7.9 and 11.8).
var (
	ErrDataLost   = errors.New("data was lost: digest or sequence error")
	ErrDataAmount = errors.New("data is not what was asked for")
)

// A mover is a Datamover with its optional interfaces, found once. Those that it does not have are
// nil.
type mover struct {
	Datamover
	canceler     Canceler
	deferrer     Deferrer
	reassigner   Reassigner
	renegotiator Renegotiator
	repeater     Repeater
	upgrader     Upgrader
}

func newMover(dm Datamover) mover {
	m := mover{Datamover: dm}
	m.canceler, _ = dm.(Canceler)
	m.deferrer, _ = dm.(Deferrer)
	m.reassigner, _ = dm.(Reassigner)
	m.renegotiator, _ = dm.(Renegotiator)
	m.repeater, _ = dm.(Repeater)
	m.upgrader, _ = dm.(Upgrader)
	return m
}
