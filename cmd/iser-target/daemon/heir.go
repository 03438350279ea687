package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/lun/state"
)

// LeasesFile is what the name of a file in the state directory begins with, before a dot, that has the leases of a process. A service manager that
// kills a process kills its witness, too. Then the next process, the heir, ends the leases in the file.
//
// The process has the file locked (flock(2)), and never closes it. So the kernel releases the lock only when no thread of the process can do anything.
const LeasesFile = "leases"

// An estate is the content of such a file, a line of JSON.
type estate struct {
	// Boot names the run of the kernel that has the lock. Only that can tell: a file system that machines share forgets the lock of one that it does
	// not hear of, and a copy of the file has no lock.
	Boot string
	testimony
}

// bootID returns what names this run of the kernel, and no other.
func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b)), err
}

// record keeps the leases of this process in a file until ctx ends. Then it removes the file, unless leases are left: the witness ends those, and removes
// it then.
func (w *witness) record(ctx context.Context) {
	fd, boot := -1, ""
	for {
		t := w.knows()
		err := func() (err error) {
			if fd < 0 {
				if boot, err = bootID(); err != nil {
					return err
				}
				if fd, err = createLocked(w.file); err != nil {
					return err
				}
			}
			return writeEstate(fd, estate{boot, t})
		}()
		if err != nil {
			w.log.Warn("the next process could not end the leases of this one if its witness was killed, too", eventKey, "cluster", "reason", err)
		}
		select {
		case <-w.dirty:
		case <-ctx.Done():
			if len(w.knows().Leases) == 0 {
				os.Remove(w.file)
			}
			return
		}
	}
}

// createLocked creates a file and returns its descriptor, which is no os.File: the garbage collector would close that.
func createLocked(name string) (fd int, err error) {
	fd, err = unix.Open(name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return -1, &os.PathError{Op: "create", Path: name, Err: err}
	}
	// An heir may have the lock for a moment. It leaves an empty file as it is.
	for err = unix.EINTR; err == unix.EINTR; {
		err = unix.Flock(fd, unix.LOCK_EX)
	}
	if err != nil {
		unix.Close(fd)
		return -1, &os.PathError{Op: "lock", Path: name, Err: err}
	}
	return fd, nil
}

// writeEstate replaces the line in the file. If it is cut short, the file has a line that is not whole, or one more.
func writeEstate(fd int, e estate) error {
	line, err := json.Marshal(e)
	if err != nil {
		return err
	}
	line = append(line, '\n')
	if _, err := unix.Pwrite(fd, line, 0); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	if err := unix.Ftruncate(fd, int64(len(line))); err != nil {
		return fmt.Errorf("truncate: %w", err)
	}
	return nil
}

// An heir ends the leases that earlier processes have left.
type heir struct {
	dir  string // the state directory
	open func(*config.Cluster) (state.Lessor, error)
	log  *slog.Logger
}

// inherit looks at the files once, and ends the leases in those of processes that are at their end. It returns when they have ended or expired.
func (h *heir) inherit(ctx context.Context) {
	boot, err := bootID()
	if err != nil {
		return
	}
	entries, _ := os.ReadDir(h.dir)
	var all sync.WaitGroup // files of an earlier configuration may name another etcd, which does not answer
	for _, entry := range entries {
		if !strings.HasPrefix(entry.Name(), LeasesFile+".") {
			continue
		}
		all.Go(func() {
			if err := h.inheritFrom(ctx, filepath.Join(h.dir, entry.Name()), boot); err != nil {
				h.log.Warn("a process before this one may have left a lease: until it expires, other gateways wait, and this one may not join them",
					eventKey, "cluster", "reason", err)
			}
		})
	}
	all.Wait()
}

// maxEstate bounds what inheritFrom reads.
const maxEstate = 1 << 16

// inheritFrom ends the leases in a file, and removes it, unless the process that made it may live.
func (h *heir) inheritFrom(ctx context.Context, name, boot string) error {
	fd, err := unix.Open(name, unix.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil // it is gone, or of others
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	for err = unix.EINTR; err == unix.EINTR; {
		err = unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
	}
	if err != nil {
		return nil // the process lives
	}
	b := make([]byte, maxEstate)
	n, _ := f.ReadAt(b, 0)
	if n == 0 {
		return nil // the process has not locked it yet
	}
	line, _, _ := strings.Cut(string(b[:n]), "\n")
	var e estate
	if json.Unmarshal([]byte(line), &e) != nil || e.Boot != boot || len(e.Cluster.Etcd) == 0 {
		return os.Remove(name)
	}
	for begun := time.Now(); ; {
		err = e.end(ctx, h.open)
		if err == nil && len(e.Leases) > 0 {
			h.log.Info("the process before was killed, and its leases have ended now", eventKey, "cluster", "leases", len(e.Leases))
		}
		if err == nil || time.Since(begun) > e.Cluster.Lease {
			return errors.Join(err, os.Remove(name))
		}
		if !sleepFor(ctx, time.Second) {
			return err
		}
	}
}
