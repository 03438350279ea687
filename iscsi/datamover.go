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

// A Renegotiator is a Datamover without RDMA, which has to be told when the
// initiator declares another MaxRecvDataSegmentLength in the full feature phase.
type Renegotiator interface {
	SetMaxSendSegment(octets int)
}

// A Notice is what Datamover.Receive found: a PDU if Task is nil, otherwise
// the end of that Task's GetData.
type Notice struct {
	BHS  []byte // 48 octets
	AHS  []byte // whole AHS area, a multiple of 4 octets
	Data []byte // data segment without padding

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
