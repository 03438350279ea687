package daemon

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/lun/state"
)

// A witness is a process that notices the end of this one, and ends the leases that it then still has: it was killed, or has panicked. So the
// other gateways need not wait until they expire. The kernel closes the pipe between the two only when no thread of this process can do anything.
type witness struct {
	cluster config.Cluster
	command func() (*exec.Cmd, error)
	log     *slog.Logger
	file    string // see record; empty: there is no state directory

	mu      sync.Mutex
	leases  []string
	changed chan struct{} // has room for one
	dirty   chan struct{} // the same, for record
}

// maxLeases is how many leases a witness knows of, the latest ones.
const maxLeases = 8

// testimony is what a witness knows, a line of JSON. The last one counts.
type testimony struct {
	Cluster config.Cluster
	Leases  []string
	File    string `json:",omitempty"` // see record; of no use without the leases
}

// run keeps a witness running until ctx ends. Then it knows which leases are left.
func (w *witness) run(ctx context.Context) {
	for told := false; ; told = true {
		started, err := w.once(ctx)
		if ctx.Err() != nil {
			return
		}
		if !told || started {
			w.log.Warn("no process would notice the death of this one: other gateways would wait until the lease expires", eventKey, "cluster", "reason", err)
		}
		if !sleepFor(ctx, witnessPause) {
			return
		}
	}
}

// witnessPause is the time between the end of a witness and the next one.
const witnessPause = 5 * time.Second

// once runs one process until that or ctx ends.
func (w *witness) once(ctx context.Context) (started bool, err error) {
	cmd, err := w.command()
	if err != nil {
		return false, err
	}
	// It survives what ends this process, as a Ctrl-C.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	pipe, err := cmd.StdinPipe()
	if err != nil {
		return false, err
	}
	if err := cmd.Start(); err != nil {
		return false, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		line, err := json.Marshal(w.knows())
		if err == nil {
			_, err = pipe.Write(append(line, '\n'))
		}
		if err != nil {
			pipe.Close()
			return true, errors.Join(err, <-ended)
		}
		select {
		case <-w.changed:
		case err := <-ended:
			return true, errors.Join(errors.New("it ended"), err)
		case <-ctx.Done():
			pipe.Close()
			return true, nil
		}
	}
}

func (w *witness) knows() testimony {
	w.mu.Lock()
	defer w.mu.Unlock()
	return testimony{w.cluster, slices.Clone(w.leases), w.file}
}

// set adds or removes a lease.
func (w *witness) set(id string, has bool) {
	w.mu.Lock()
	w.leases = slices.DeleteFunc(w.leases, func(l string) bool { return l == id })
	if has {
		w.leases = append(w.leases, id)
		w.leases = w.leases[max(len(w.leases)-maxLeases, 0):]
	}
	w.mu.Unlock()
	for _, c := range []chan struct{}{w.changed, w.dirty} {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}

// A watchedHome tells a witness of its leases.
type watchedHome struct {
	state.Lessor
	w *witness
}

// Lease implements state.Lessor.
func (h watchedHome) Lease(ctx context.Context, ttl time.Duration) (state.Lease, error) {
	l, err := h.Lessor.Lease(ctx, ttl)
	if err != nil {
		return nil, err
	}
	h.w.set(l.ID(), true)
	return watchedLease{l, h.w}, nil
}

type watchedLease struct {
	state.Lease
	w *witness
}

// End implements state.Lease.
func (l watchedLease) End(ctx context.Context) error {
	err := l.Lease.End(ctx)
	if err == nil {
		l.w.set(l.ID(), false)
	}
	return err
}

// Witness ends the leases that the process at the other end of r has when it ends.
func Witness(ctx context.Context, r io.Reader) error {
	lines := bufio.NewReader(r)
	var last testimony
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			break
		}
		var t testimony
		if err := json.Unmarshal(line, &t); err != nil || len(t.Cluster.Etcd) == 0 {
			return fmt.Errorf("%.100q is not what serve tells this command", line)
		}
		last = t
	}
	err := last.end(ctx, openHome)
	if err == nil && len(last.Leases) > 0 && last.File != "" {
		os.Remove(last.File)
	}
	return err
}

// end ends the leases. The process that had them must be at its end.
func (t *testimony) end(ctx context.Context, open func(*config.Cluster) (state.Lessor, error)) error {
	if len(t.Leases) == 0 {
		return nil
	}
	home, err := open(&t.Cluster)
	if err != nil {
		return err
	}
	defer home.Close()
	// After that they have expired anyway.
	ctx, cancel := context.WithTimeout(ctx, t.Cluster.Lease)
	defer cancel()
	var errs []error
	for _, id := range t.Leases {
		errs = append(errs, home.EndLease(ctx, id))
	}
	return errors.Join(errs...)
}
