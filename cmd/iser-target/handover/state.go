package handover

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend/checked"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/lun"
)

// The formats of State that this program reads and writes. A program that adds a member that others may ignore
// keeps the number. docs/upgrade.md describes the formats.
const (
	OldestFormat = 1
	Format       = 1 // that it writes
)

// The kinds of files of a hand-over.
const (
	KindListener   = "listener"
	KindLock       = "lock"       // a file or device that the giver has locked
	KindMemory     = "memory"     // the data of a memory LUN
	KindConnection = "connection" // the socket of a session
	KindSupervisor = "supervisor" // the link to the supervisor
)

// A Plan is what the taker checks before the giver comes to rest.
type Plan struct {
	Format   int    `json:"format"`
	Document string `json:"document"` // the configuration, YAML
}

// A State is the state of a target at rest.
type State struct {
	Format   int                  `json:"format"`
	Version  string               `json:"version"` // of the program of the giver
	Started  time.Time            `json:"started"` // when the target began to serve; upgrades do not change it
	Document string               `json:"document"`
	Pid      int                  `json:"pid"` // of the giver
	LUNs     []LUN                `json:"luns"`
	Sessions []iscsi.SessionState `json:"sessions"`
	Serials  map[string]string    `json:"serials,omitempty"` // of LUNs, by key of identity; with a state directory they are there
	Passed   []string             `json:"passed,omitempty"`  // portals whose sockets the service manager has
	Cluster  *Cluster             `json:"cluster,omitempty"` // nil: the targets of the cluster are not known, or the version did not send them
	// Supervised says that the supervisor has been heard of.
	Supervised bool   `json:"supervised,omitempty"`
	Files      []File `json:"files"` // in the order in which they are sent
}

// A Cluster has the targets that the cluster of the target has.
type Cluster struct {
	Text     string `json:"text"` // YAML
	Revision int64  `json:"revision"`
}

// A LUN is a logical unit that is ready.
type LUN struct {
	Target string        `json:"target"`
	ID     int           `json:"lun"`
	NAA    string        `json:"naa"`
	State  lun.UnitState `json:"state"`
	// Checksums is nil for a LUN without checksums, and from a version that did not send it.
	Checksums *checked.Rested `json:"checksums,omitempty"`
}

// A File is an open file of a hand-over.
type File struct {
	Kind string `json:"kind"`
	Name string `json:"name"`
}

// ConnectionName returns the name of the file of a connection.
func ConnectionName(tsih, cid uint16) string { return fmt.Sprintf("%d/%d", tsih, cid) }

// SideName returns the name of the file with the protection information of a memory LUN.
func SideName(target string, id int) string { return MemoryName(target, id) + "/protection" }

// MemoryName returns the name of the file of a memory LUN.
func MemoryName(target string, id int) string { return fmt.Sprintf("%s/%d", target, id) }

// A Sender collects the files of a State.
type Sender struct {
	files []File
	fds   []int
	own   []int // those of fds that Close closes
}

// Add adds a file, which belongs to the caller and stays open until the files are sent.
func (s *Sender) Add(kind, name string, fd int) {
	s.files = append(s.files, File{kind, name})
	s.fds = append(s.fds, fd)
}

// AddOwn adds a file that Close closes.
func (s *Sender) AddOwn(kind, name string, fd int) {
	s.Add(kind, name, fd)
	s.own = append(s.own, fd)
}

// AddSocket adds a copy of a socket.
func (s *Sender) AddSocket(kind, name string, c syscall.Conn) error {
	fd, err := duplicate(c)
	if err != nil {
		return fmt.Errorf("%s %s: %w", kind, name, err)
	}
	s.AddOwn(kind, name, fd)
	return nil
}

// Close closes the copies.
func (s *Sender) Close() {
	for _, fd := range s.own {
		unix.Close(fd)
	}
	s.own = nil
}

// Send sends the files, and st, which lists them.
func (s *Sender) Send(l *Link, st *State) error {
	st.Files = s.files
	for fds := s.fds; len(fds) > 0; {
		n := min(len(fds), maxFiles)
		if err := l.Send(Message{Kind: Files}, fds[:n]...); err != nil {
			return err
		}
		fds = fds[n:]
	}
	return l.SendJSON(Whole, st)
}

// SendJSON sends a message whose file has v as JSON.
func (l *Link) SendJSON(kind string, v any) error {
	f, err := NewMemory(kind)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := json.NewEncoder(f).Encode(v); err != nil {
		return err
	}
	return l.Send(Message{Kind: kind}, int(f.Fd()))
}

// NewMemory returns a file without a place in a file system.
func NewMemory(name string) (*os.File, error) {
	fd, err := unix.MemfdCreate("iser-target "+name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// maxState bounds what the taker reads of a State, in bytes.
const maxState = 1 << 30

// decode decodes the file of a message.
func decode(m Message, fds []int, v any) error {
	if len(fds) != 1 {
		closeAll(fds)
		return fmt.Errorf("message %s with %d files, want 1", m.Kind, len(fds))
	}
	f := os.NewFile(uintptr(fds[0]), m.Kind)
	defer f.Close()
	err := json.NewDecoder(io.NewSectionReader(f, 0, maxState)).Decode(v)
	if err != nil {
		return fmt.Errorf("message %s: %w", m.Kind, err)
	}
	return nil
}

// Each calls f with the name of each file that a service manager keeps, and its descriptor: those of the files of st by their
// number, and st itself.
func (s *Sender) Each(st *State, f func(name string, fd int) error) error {
	st.Files = s.files
	text, err := NewMemory(Whole)
	if err != nil {
		return err
	}
	defer text.Close()
	if err := json.NewEncoder(text).Encode(st); err != nil {
		return err
	}
	for i, fd := range s.fds {
		if err := f(strconv.Itoa(i), fd); err != nil {
			return err
		}
	}
	return f(Whole, int(text.Fd())) // last: without it the others are of no use
}

// Len returns the number of files.
func (s *Sender) Len() int { return len(s.fds) }

// FromKept returns what Each has named, or nil if that is nothing. The files belong to it.
func FromKept(kept map[string]*os.File) (*Received, error) {
	if len(kept) == 0 {
		return nil, nil
	}
	fds := []int{}
	take := func(name string) error {
		f := kept[name]
		if f == nil {
			return fmt.Errorf("file %q of the process before is missing", name)
		}
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		fds = append(fds, fd)
		return errors.Join(err, f.Close())
	}
	err := take(Whole)
	if err == nil {
		defer func() {
			for _, f := range kept {
				f.Close() // most are closed
			}
		}()
		r := &Received{Kept: true}
		if err = decode(Message{Kind: Whole}, fds, &r.State); err == nil {
			err = CheckFormat(r.Format)
		}
		fds = nil
		for i := range r.Files {
			if err == nil {
				err = take(strconv.Itoa(i))
			}
		}
		if err == nil {
			err = r.name(fds)
		}
		if err == nil {
			return r, nil
		}
	}
	closeAll(fds)
	return nil, err
}

// Received is what the taker got.
type Received struct {
	State
	// Kept says that the service manager had it: what cannot continue is dropped. Otherwise the hand-over
	// fails, and the giver continues.
	Kept  bool `json:"-"`
	mu    sync.Mutex
	files map[File]*os.File // guarded by mu
}

// Take returns a file, which belongs to the caller, or nil.
func (r *Received) Take(kind, name string) *os.File {
	r.mu.Lock()
	defer r.mu.Unlock()
	k := File{kind, name}
	f := r.files[k]
	delete(r.files, k)
	return f
}

// TakeAll calls take for each file of that kind, which belongs to take.
func (r *Received) TakeAll(kind string, take func(name string, f *os.File) error) error {
	for _, k := range r.Files {
		if k.Kind != kind {
			continue
		}
		if f := r.Take(k.Kind, k.Name); f != nil {
			if err := take(k.Name, f); err != nil {
				return err
			}
		}
	}
	return nil
}

// Close closes the files that nobody took.
func (r *Received) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, f := range r.files {
		f.Close()
	}
	r.files = nil
}

// CheckFormat returns an error if this program does not read the format.
func CheckFormat(format int) error {
	if format < OldestFormat || format > Format {
		return fmt.Errorf("the state has format %d, and this program reads %d to %d", format, OldestFormat, Format)
	}
	return nil
}

// Offer sends hello with the version of the program, lets check examine the configuration of the giver, and receives
// its state. It returns nil without an error if the giver ended before: then the program starts like any other.
func (l *Link) Offer(version string, check func(document string) error) (*Received, error) {
	r, err := l.offer(version, check)
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, unix.EPIPE):
		l.awaitGiver()
		return nil, nil
	case err != nil:
		return nil, l.Fail(err)
	}
	return r, nil
}

func (l *Link) offer(version string, check func(string) error) (*Received, error) {
	if err := l.Send(Message{Kind: Hello, Version: version, Oldest: OldestFormat, Newest: Format}); err != nil {
		return nil, err
	}
	m, fds, err := l.Receive(time.Time{})
	if err != nil {
		return nil, err
	}
	var plan Plan
	if err := decode(m, fds, &plan); err != nil {
		return nil, err
	}
	if err := CheckFormat(plan.Format); err != nil {
		return nil, err
	}
	if err := check(plan.Document); err != nil {
		return nil, err
	}
	if err := l.Send(Message{Kind: Ready}); err != nil {
		return nil, err
	}
	return l.receive()
}

// receive receives the files and the State.
func (l *Link) receive() (r *Received, err error) {
	var all []int
	defer func() {
		if err != nil {
			closeAll(all)
		}
	}()
	for {
		m, fds, err := l.Receive(time.Time{})
		if err != nil {
			return nil, err
		}
		if m.Kind == Files {
			all = append(all, fds...)
			continue
		}
		r := &Received{}
		if err := decode(m, fds, &r.State); err != nil {
			return nil, err
		}
		if err := CheckFormat(r.Format); err != nil {
			return nil, err
		}
		if err := r.name(all); err != nil {
			return nil, err
		}
		return r, nil
	}
}

// name gives the files their names.
func (r *Received) name(fds []int) error {
	if len(fds) != len(r.Files) {
		return fmt.Errorf("%d files came, and the state lists %d", len(fds), len(r.Files))
	}
	r.files = map[File]*os.File{}
	listed := map[File]bool{}
	for _, k := range r.Files {
		if listed[k] {
			return fmt.Errorf("file %s %s is listed twice", k.Kind, k.Name)
		}
		listed[k] = true
	}
	for i, k := range r.Files {
		r.files[k] = os.NewFile(uintptr(fds[i]), k.Name)
	}
	return nil
}

// AwaitGo sends that all is open, and waits until the giver has ended, or will not serve again.
func (l *Link) AwaitGo() error {
	if err := l.Send(Message{Kind: Prepared}); err != nil && !errors.Is(err, unix.EPIPE) {
		return err
	}
	m, err := l.Await(time.Time{})
	switch {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		return err
	case m.Kind != Go:
		return fmt.Errorf("message %s instead of %s", m.Kind, Go)
	}
	return nil
}
