// Package handover has what two processes need of which one continues the work of the other: the messages between
// them, which carry open files, the state in a versioned format (docs/upgrade.md), and listeners that pause.
//
// The giver starts the taker. On a Link between them, the taker says hello, the giver sends the configuration, and
// the taker says that it is ready. The giver comes to rest and sends its state, with all open files. The
// taker opens the same LUNs and portals from these files, and says that it is prepared. Up to here the giver can end
// the taker and continue. Then the giver says go: the taker serves, and the giver ends.
//
// If the taker ends before go, the giver continues. If the giver ends before go, the taker serves: with the state of
// the giver if it has that, or else like any program that starts.
package handover

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// envLink is the environment variable with the descriptor of the taker's end of a Link.
const envLink = "ISER_TARGET_HANDOVER"

// The kinds of messages, in the order of a hand-over.
const (
	Hello    = "hello"    // taker: its program and formats
	Prepare  = "prepare"  // giver: a Plan, in a file
	Ready    = "ready"    // taker: the configuration is valid
	Files    = "files"    // giver: some of the files of State.Files
	Whole    = "state"    // giver: a State, in a file
	Prepared = "prepared" // taker: all is open
	Go       = "go"       // giver: it is at rest for ever
	Serving  = "serving"  // taker
	Failed   = "failed"   // taker, instead of Ready or Prepared: the reason
)

// A Message is one message on a Link.
type Message struct {
	Kind    string `json:"kind"`
	Version string `json:"version,omitempty"` // of the program
	Oldest  int    `json:"oldest,omitempty"`  // format that the taker reads
	Newest  int    `json:"newest,omitempty"`
	Reason  string `json:"reason,omitempty"`
}

const (
	maxMessage = 32 << 10 // bytes
	maxFiles   = 128      // of one message; the kernel takes up to 253
)

// A Link is one end of the connection between the giver and the taker. Messages do not mix, and keep their order.
type Link struct {
	conn  *net.UnixConn
	giver int // process ID of the giver; 0 at its own end
	pidfd int // of the giver, or negative
}

// NewLink returns the end of the giver, and that of the taker as a file.
func NewLink() (*Link, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socketpair: %w", err)
	}
	other := os.NewFile(uintptr(fds[1]), "hand-over")
	l, err := linkOf(os.NewFile(uintptr(fds[0]), "hand-over"))
	if err != nil {
		other.Close()
		return nil, nil, err
	}
	return l, other, nil
}

// linkOf returns the Link of f, which it closes.
func linkOf(f *os.File) (*Link, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, fmt.Errorf("%s is %s, not a Unix socket", f.Name(), c.LocalAddr().Network())
	}
	return &Link{conn: u, pidfd: -1}, nil
}

// Environment returns the assignment by which a process whose descriptor 3 is the taker's end finds it.
func Environment() string { return envLink + "=3" }

// Expected reports whether FromEnvironment would find the taker's end.
func Expected() bool { return os.Getenv(envLink) != "" }

// FromEnvironment returns the taker's end, or nil if the process is not a taker. It removes the variable.
func FromEnvironment() (*Link, error) {
	v := os.Getenv(envLink)
	if v == "" {
		return nil, nil
	}
	os.Unsetenv(envLink)
	fd, err := strconv.Atoi(v)
	if err != nil || fd < 3 {
		return nil, fmt.Errorf("%s is %q: want a descriptor that iser-target upgrade has passed", envLink, v)
	}
	unix.CloseOnExec(fd)
	l, err := linkOf(os.NewFile(uintptr(fd), "hand-over"))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", envLink, err)
	}
	if err := l.findGiver(); err != nil {
		l.Close()
		return nil, fmt.Errorf("%s: %w", envLink, err)
	}
	return l, nil
}

// findGiver finds the process that made the socket pair, which need not be the parent.
func (l *Link) findGiver() error {
	raw, err := l.conn.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	err2 := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err2, err); err != nil {
		return err
	}
	l.giver = int(cred.Pid)
	if l.pidfd, err = unix.PidfdOpen(l.giver, 0); err != nil { // the giver ended, or the kernel has no pidfds and the giver is the parent
		l.pidfd = -1
	}
	return nil
}

// giverTime bounds the wait for the end of a giver that has closed its end of the link. That happens a moment
// before.
const giverTime = 30 * time.Second

// awaitGiver waits until the giver, which is ending, has released its files.
func (l *Link) awaitGiver() {
	if l.pidfd >= 0 {
		awaitEnd(l.pidfd, giverTime)
		return
	}
	for by := time.Now().Add(giverTime); os.Getppid() == l.giver && time.Now().Before(by); {
		time.Sleep(time.Millisecond)
	}
}

// Observe is called before each message that leaves ("send go") and after each that has come ("received go"). Tests
// end the process there.
var Observe = func(what string) {}

// Send sends m with copies of the files.
func (l *Link) Send(m Message, fds ...int) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if len(b) > maxMessage || len(fds) > maxFiles {
		return fmt.Errorf("message %s of %d bytes with %d files: want at most %d and %d", m.Kind, len(b), len(fds), maxMessage, maxFiles)
	}
	Observe("send " + m.Kind)
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	if _, _, err = l.conn.WriteMsgUnix(b, rights, nil); err != nil {
		return fmt.Errorf("send %s: %w", m.Kind, err)
	}
	return nil
}

// Fail sends the giver the reason why the taker ends. It returns err.
func (l *Link) Fail(err error) error {
	return errors.Join(err, l.Send(Message{Kind: Failed, Reason: err.Error()}))
}

// Receive returns the next message and its files, which belong to the caller. At the end of the other process the error is io.EOF.
func (l *Link) Receive(deadline time.Time) (m Message, fds []int, err error) {
	if err := l.conn.SetReadDeadline(deadline); err != nil {
		return m, nil, err
	}
	b, oob := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(4*maxFiles))
	n, oobn, flags, _, err := l.conn.ReadMsgUnix(b, oob)
	if errors.Is(err, unix.ECONNRESET) || err == nil && n == 0 {
		err = io.EOF
	}
	if err != nil {
		return m, nil, err
	}
	fds, err = parseFiles(oob[:oobn])
	if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = errors.New("a message of the hand-over was cut off: the process is out of file descriptors, or the message is too long")
	}
	if err == nil {
		err = json.Unmarshal(b[:n], &m)
	}
	if err != nil {
		closeAll(fds)
		return m, nil, err
	}
	Observe("received " + m.Kind)
	return m, fds, nil
}

func parseFiles(oob []byte) (fds []int, err error) {
	if len(oob) == 0 {
		return nil, nil
	}
	list, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for _, c := range list {
		some, err := unix.ParseUnixRights(&c)
		if err != nil {
			closeAll(fds)
			return nil, err
		}
		fds = append(fds, some...) // ReadMsgUnix has set close-on-exec
	}
	return fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// Await returns the next message, which must not have files.
func (l *Link) Await(deadline time.Time) (Message, error) {
	m, fds, err := l.Receive(deadline)
	closeAll(fds)
	if err == nil && len(fds) > 0 {
		err = fmt.Errorf("message %s has files", m.Kind)
	}
	return m, err
}

// AwaitClose waits for a limited time until the giver closes its end or ends. The giver sends nothing after Go.
func (l *Link) AwaitClose() error {
	m, err := l.Await(time.Now().Add(giverTime))
	switch {
	case errors.Is(err, io.EOF):
		return nil
	case err == nil:
		return fmt.Errorf("message %s after %s", m.Kind, Go)
	}
	return err
}

// Close closes the Link. Only the first call has an effect.
func (l *Link) Close() error {
	err := l.conn.Close()
	if l.pidfd >= 0 && err == nil {
		unix.Close(l.pidfd)
	}
	return err
}
