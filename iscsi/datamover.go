package iscsi

import (
	"errors"
	"net"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// A Datamover carries the PDUs and the data of one connection. RFC 5047 gave the methods their
// names. Package iser implements it over RDMA, package iscsi/tcp over plain TCP.
//
// Only the holder of the connection's receive baton calls Receive and Bind. Any goroutine may call
// any other method at any time, also after Close. PutData, GetData, SendControl and Unbind only
// queue, in order, and never wait for the peer: the core calls them with a lock held. Flush sends.
// The mover may call Task.Sent and Buffer.Release from within any of its methods. They take no lock
// that the core holds while it calls the mover.
type Datamover interface {
	// Transport names the kind of connection in logs: "iser" or "tcp".
	Transport() string
	LocalAddr() net.Addr
	RemoteAddr() net.Addr

	// RDMA reports whether data travels by RDMA: RFC 7145's keys apply, and there are no digests, no
	// Data-In, R2T or solicited Data-Out PDUs.
	RDMA() bool

	// Receive waits for the next event from the peer and describes it in n: a control-type PDU
	// (Control_Notify) or the end of a GetData (Data_Completion_Notify). The caller passes a zero n.
	// Its slices are on loan until the next Receive. io.EOF is the peer's orderly close. Every other
	// error has ended the connection, and where the peer can be told (Terminate) it has been. After
	// an error the core calls Close, then Receive again until it fails once more. By then the mover
	// has notified every GetData that was outstanding.
	Receive(n *Notice) error

	// SetReceiveDeadline bounds Receive. The zero time means no bound. A Receive that exceeds it has
	// ended the connection.
	SetReceiveDeadline(t time.Time) error

	// NewTask returns the mover's own state for one task slot (Task.Mover). A slot is used again and
	// again; its state is made once. Login PDUs travel in such slots too, before EnterFullFeature.
	NewTask() any

	// Bind ties to t what the initiator advertised with the SCSI Command that Receive returned last
	// (Remote Mapping); t.Request is its header. unsolicited is how many bytes of write data come
	// unsolicited. The binding ends with the task's SCSI Response or with Unbind. An inconsistent
	// advertisement (a read without a sink) is an error: t is not bound, and the core answers with
	// CHECK CONDITION.
	Bind(t *Task, unsolicited uint32) error

	// Unbind drops the binding of a task that ends without a SCSI Response
	// (Deallocate_Task_Resources). The mover has notified every GetData of t, and fetches no more
	// data. Data that PutData has queued still leaves.
	Unbind(t *Task)

	// PutData queues the data that starts at Buffer Offset off (Put_Data). The mover uses t only
	// until PutData returns. data is part of b, or lent to it. It does not change until the mover calls b.Release,
	// which it does when the data has left or the connection has ended. If PutData fails, which ends
	// the connection, b stays with the caller. t.Header has the present ExpCmdSN and MaxCmdSN, for a
	// mover that needs them in PDUs of its own.
	PutData(t *Task, off uint32, data []byte, b *Buffer) error

	// GetData fetches len(data) bytes that start at Buffer Offset off into data (Get_Data). The end
	// is a Notice with this Task. There is exactly one, also when the connection ends, unless GetData
	// itself fails, which ends the connection. data belongs to the mover until then. At most one
	// GetData of a task is outstanding. t.Header has the present ExpCmdSN and MaxCmdSN.
	GetData(t *Task, off uint32, data []byte) error

	// SendControl queues the PDU t.Header with the data segment t.Segment; DataSegmentLength is
	// already set. The mover calls t.Sent when both have left, or when the connection has ended, but
	// not if SendControl fails, which ends the connection. A SCSI Response ends the task: the mover
	// may invalidate what the initiator advertised for t, if t is bound at all. t may be another slot that
	// has taken over the Mover of the one that was bound. ExpDataSN of a SCSI
	// Response counts the calls of PutData and GetData for t. A mover that cuts data into several
	// PDUs puts its own count there.
	SendControl(t *Task) error

	// Flush sends what is queued. If another goroutine is sending it returns at once: that goroutine
	// will send this too. Close ends it.
	Flush()

	// MaxSendSegment returns the longest data segment, in bytes, that SendControl takes in the
	// current phase; at least 128.
	MaxSendSegment() int

	// EnterFullFeature tells the mover that login has succeeded, and with which parameters
	// (Enable_Datamover and Notice_Key_Values), before the core queues the final Login Response. That
	// PDU is still as long as login allows. tasks is how many task slots the connection can have. An
	// error refuses the login: out of resources.
	EnterFullFeature(p Params, tasks int) error

	// Close ends the connection at once (Connection_Terminate). Receive then notifies every GetData
	// that was outstanding, with net.ErrClosed, and returns an error. Closing twice does no harm.
	Close() error

	// CloseWrite sends what is queued and then ends the target's direction of the stream. Receive
	// still works.
	CloseWrite() error
}

// A Framed is a Datamover on MPA.
type Framed interface {
	Framing() Framing
}

// A Framing is what MPA startup has agreed on (RFC 5044, section 7.1; RFC 6581, section 9).
type Framing struct {
	CRC                     bool // FPDUs of both directions carry CRCs
	MarkersToUs, MarkersOut bool // the initiator sends Markers, and the target
	ORD                     int  // RDMA Reads of the target that may be unanswered
}

// A Refuser is a Datamover that can tell the initiator why a PDU ends the connection.
type Refuser interface {
	// Refuse ends the connection because of the PDU that Receive returned last. The next Receive returns
	// err, after it has notified every GetData that was outstanding.
	Refuse(err error)
}

// A Resumable is a Datamover whose connection another process can continue. See handover.go.
type Resumable interface {
	// Pause makes Receive return an os.ErrDeadlineExceeded between two PDUs, also one that waits for the
	// initiator. A PDU, or the data of a GetData, that has come in part is received to its end before.
	Pause()

	// Unpause ends what Pause began.
	Unpause()

	// Idle reports whether nothing waits to be sent, and nothing is being sent.
	Idle() bool

	// State returns what another Datamover of the same kind needs to continue the connection, in a form
	// that encoding/json can encode. It is an error if data or PDUs are on their way.
	//
	// Preconditions: Pause was called, and nobody is in Receive.
	State() (any, error)

	// Socket returns the socket of the connection.
	Socket() net.Conn

	// Advertisement returns what the initiator advertised with the request of t, which is bound. It may be
	// nil.
	Advertisement(t *Task) []byte

	// Advertise takes an Advertisement of the other process, of a request with that BHS, as if Receive had
	// returned the request just now.
	Advertise(bhs pdu.BHS, advertisement []byte) error
}

// A Sizer is a Datamover that says how much memory it uses in the full feature phase, besides
// Buffers and task slots.
type Sizer interface {
	Size(p *Params) int // bytes, at most, with what the login has agreed on
}

// An Impatient is a Datamover whose Receive can return instead of waiting.
type Impatient interface {
	// SetImpatient makes Receive return os.ErrDeadlineExceeded when it would wait and what has come so far can stay
	// where it is, or undoes that. Receive may be called again. The goroutine that calls Receive calls SetImpatient. It
	// returns false if the Datamover cannot do that.
	SetImpatient(bool) bool

	// Missing returns how many bytes Receive wanted when it returned for that reason.
	Missing() int
}

// A Borrower is a Datamover that receives long data segments in Buffers.
type Borrower interface {
	// SetLender sets, before Receive is called, what lends a Buffer for n bytes. That returns nil if
	// memory is short. Then a Datamover without memory of its own discards the data and returns a Notice whose
	// Reject is pdu.RejectOutOfResources.
	SetLender(lend func(n int) *Buffer)
}

// A LentMover is a Datamover that sends what logical units lend from where it lies.
type LentMover interface {
	// PutLent does what PutData does, with all the data of b, which a logical unit has lent: see Buffer.Lent.
	PutLent(t *Task, off uint32, b *Buffer) error

	// TakesLent reports whether PutLent is cheaper at present than a copy for PutData.
	TakesLent() bool
}

// A PipeMover is a Datamover that sends what pipes refer to.
type PipeMover interface {
	// TakePipe returns an empty Pipe for n bytes of data, or nil: a copy is cheaper, or no Pipe is left. The connection has that many.
	TakePipe(n, have int) Pipe

	// PutPipe does what PutData does, with n bytes that are in the Pipe of b.
	PutPipe(t *Task, off uint32, n int, b *Buffer) error
}

// A Pipe refers to pages of files on their way to the initiator.
type Pipe interface {
	// In returns the descriptor of a pipe, which is non-blocking, to be filled.
	In() int
	// Release gives back the Pipe, with what is left in it.
	Release()
}

// A Canceler is a Datamover that can call off a GetData. Aborting a task on TCP requires that: Linux
// does not send the data of a task that it aborts.
type Canceler interface {
	// CancelData ends the GetData of t without a Notice; its data belongs to the core again. If that
	// is not possible it returns false, and the Notice will come, with ErrCanceled after the PDU that
	// is being received. Data that comes later is discarded.
	CancelData(t *Task) bool
}

// A Meter is a Datamover that knows how much of what it moves has moved.
type Meter interface {
	// Fetched returns a number that grows with each byte that comes for the GetData of t, and how
	// many bytes are missing, at most. If data comes in the order of the GetDatas, bytes of earlier
	// ones may count. Fetched returns false if no GetData of t is outstanding: its Notice is on its way.
	Fetched(t *Task) (came uint64, missing int, ok bool)

	// Taken returns a number that grows as the peer takes what was queued, and by how much it grows
	// until the peer has taken all that the network has now. owed is 0 if that is nothing.
	Taken() (taken, owed uint64)
}

// A Deferrer is a Datamover that knows whether a Flush can be put off, so that the answers to PDUs
// that have come together leave with one system call.
type Deferrer interface {
	// Pending reports whether a whole message has come that Receive has not returned. Only the holder
	// of the receive baton calls Pending and Defer, or a goroutine that keeps the baton free meanwhile.
	Pending() bool

	// Defer replaces a Flush: what is queued leaves with the next Flush, at the latest when Receive is
	// about to wait for the peer.
	Defer()
}

// A Renegotiator is a Datamover without RDMA, which has to know when the initiator declares another
// MaxRecvDataSegmentLength in the full feature phase.
type Renegotiator interface {
	// SetMaxSendSegment sets the longest data segment that the initiator takes, in bytes.
	SetMaxSendSegment(bytes int)
}

// An Upgrader is a Datamover without RDMA whose connection can change to RDMA mode after the final
// Login Response (RFC 7145, section 5.1.2).
type Upgrader interface {
	// Upgrade returns the connection when that Response has left, and the bytes that the mover has
	// read from it since the last PDU. The core does not use the mover afterwards, with one exception:
	// until EnableDatamover has returned, Close still closes the connection. An error says why the
	// Response has not left.
	Upgrade() (nc net.Conn, prefix []byte, err error)
}

// A StepUp allocates the resources for RDMA mode after a login that has agreed on p
// (Allocate_Connection_Resources). tasks is how many task slots the connection can have. An error
// refuses the login: out of resources.
type StepUp func(p Params, tasks int) (EnableDatamover, error)

// EnableDatamover waits until the initiator has begun RDMA mode on nc, and returns the Datamover for
// the full feature phase. prefix is the beginning of the stream, which has been read already. After
// an error, also that timeout is over, nc is closed.
type EnableDatamover func(nc net.Conn, prefix []byte, timeout time.Duration) (Datamover, error)

// A Repeater is a Datamover with the means for an ErrorRecoveryLevel above 0 (RFC 7143, section
// 11.16). If login agrees on such a level, the mover keeps the data of PutData until Forget or
// Unbind, or until the initiator has acknowledged it. It asks again for data that was lost on the
// way. SendControl may be called again for a task whose PDU has left.
type Repeater interface {
	// Repeat queues again the Data-In PDUs of t from DataSN begin on, or its R2T if that is
	// unanswered: length of them, or all if length is 0. If begin is 0 too, it queues all that are not
	// acknowledged. ExpCmdSN and MaxCmdSN come from by.Header. The mover calls by.Sent when the last
	// PDU has left, unless queued is false, which means that it had nothing to send. next is the
	// DataSN or R2TSN with which t continues. Errors are ErrNeverSent and ErrGivenUp.
	Repeat(t, by *Task, begin, length uint32) (queued bool, next uint32, err error)

	// AskAgain queues a recovery R2T for what has not come of the present R2T of t (section 7.1.4.1).
	// It returns false if that is not possible: nothing was queued.
	AskAgain(t *Task) bool

	// Resegment queues again all Data-In of t that is not acknowledged, in PDUs of the length that
	// the initiator takes now (section 11.16.3); by as with Repeat. The error is ErrGivenUp.
	//
	// Preconditions: no data of t is queued.
	Resegment(t, by *Task) (queued bool, err error)

	// Acknowledge takes a DataACK: a Data-In PDU came with tag and lun, and the initiator has received
	// everything before DataSN next. It returns false if no such PDU was sent.
	Acknowledge(tag uint32, lun [8]byte, next uint32) bool

	// Forget gives back the data that is kept of t.
	Forget(t *Task)
}

// A Reassigner is a Datamover that can continue a task of another connection, as ErrorRecoveryLevel 2
// requires (RFC 7143, section 7.2.2).
type Reassigner interface {
	// Detach is Unbind for a task that may be reassigned, and returns how far it was. The SCSI
	// Response may have been sent. The core may call it after Close.
	Detach(t *Task) Progress

	// Advertised ties to t, until Unbind, what the initiator advertised with the TASK REASSIGN that
	// Receive returned last. Only the holder of the receive baton calls it.
	Advertised(t *Task)

	// Rebind binds t, a task of another connection, with what was advertised with by. An inconsistent
	// advertisement is an error, and t is not bound.
	Rebind(t, by *Task, at Resumption) error
}

// Progress is how far the data of a task was. With RDMA it is all zero: iSCSI does not see data being
// acknowledged.
type Progress struct {
	Next         uint32                 // DataSN of the next Data-In, or R2TSN of the next R2T
	Acknowledged uint32                 // DataSN of the first Data-In that was not acknowledged
	Offset       func(sn uint32) uint32 // Buffer Offset of the Data-In with that DataSN; 0 if it is not known. May be nil: 0
}

// A Resumption is where the data of a task continues.
type Resumption struct {
	SN        uint32 // DataSN of the next Data-In, or R2TSN of the next R2T
	Offset    uint32 // Buffer Offset of the next Data-In
	Immediate uint32 // bytes of immediate data that the command had
	Done      bool   // no data will move, and none was advertised: only the status is sent
}

// The reasons to reject a SNACK (RFC 7143, section 11.16).
var (
	ErrNeverSent = errors.New("never sent, or acknowledged")
	ErrGivenUp   = errors.New("given up for lack of memory")
)

// A Notice is what Datamover.Receive found: a PDU if Task is nil, otherwise the end of that Task's
// GetData.
type Notice struct {
	BHS  []byte // 48 bytes
	AHS  []byte // whole AHS area, a multiple of 4 bytes
	Data []byte // data segment without padding
	// Buffer, if not nil, begins with Data, and the mover writes nothing more to it: the core may Retain it.
	Buffer *Buffer
	// Begun is when the BHS had come, if the rest of the PDU came later. Zero: it did not, or that is
	// not known.
	Begun time.Time

	// Reject, if not zero, is why the mover has discarded the PDU, which has no Data here. The
	// connection continues, and the core sends the Reject.
	Reject pdu.RejectReason

	Task *Task
	// Err is why the GetData failed. Unless it is one of the errors below the connection is ending.
	Err error
}

// The errors of a GetData that fail its command alone (RFC 7143, sections 7.8, 7.9 and 11.8).
var (
	ErrDataLost   = errors.New("data was lost: digest or sequence error")
	ErrDataAmount = errors.New("data differs from the amount requested")
	ErrCanceled   = errors.New("the target has canceled the transfer") // CancelData was called
)
