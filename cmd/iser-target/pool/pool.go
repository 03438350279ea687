// Package pool makes and removes volumes for LUNs, by the programs of LVM and ZFS: thin logical volumes (lvmthin(7)) and sparse
// ZFS volumes (zfs-create(8)). A directory is a pool, too, in which the target itself creates the files. The package runs in the
// command, as the user who calls it: the target has no right to make volumes.
package pool

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Kinds are the forms of the name of a pool.
const Kinds = "dir:/DIRECTORY, lvm:GROUP/THINPOOL or zfs:POOL/DATASET"

// A Pool makes volumes. Its errors are of one line.
type Pool interface {
	// Backend returns the backend of a LUN on a volume, and Path the path of the volume with that name.
	Backend() string
	Path(volume string) string

	// CheckName returns an error unless a volume can have that name.
	CheckName(volume string) error

	// State returns the state of the pool, and finds the volume with that name, nil if none has it.
	State(ctx context.Context, volume string) (State, *Volume, error)

	// Create makes a volume of size bytes or slightly more with a mark, or tries whether it could if dry. The volume is empty, and
	// takes space as data is written.
	Create(ctx context.Context, volume string, size int64, mark Mark, dry bool) error

	// Remove removes a volume with its data. It fails if the volume is in use.
	Remove(ctx context.Context, volume string) error

	// Removal returns the command line that does what Remove does.
	Removal(volume string) string
}

// A State is that of a pool.
type State struct {
	Full float64 // used space in percent
}

// A Volume is one that exists.
type Volume struct {
	Mark *Mark // nil: it was not made by this package
}

// A Mark says for which LUN a volume was made. It is stored with the volume before the target knows of it, so an interrupted
// command leaves no volume without one.
type Mark struct {
	Target string
	LUN    int
	Run    string // differs for each command that makes a volume
}

// NewMark returns the mark of a new volume.
func NewMark(target string, lun int) Mark {
	b := make([]byte, 8)
	rand.Read(b) // never fails
	return Mark{target, lun, hex.EncodeToString(b)}
}

// markPrefix begins a mark among the tags of a logical volume.
const markPrefix = "iser-target:"

// String returns the mark in characters that a tag of LVM can have (lvm(8)): others are =XX, a byte in hexadecimal.
func (m Mark) String() string {
	var b strings.Builder
	for _, c := range []byte(m.Target) {
		if 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '.' || c == ':' || c == '-' {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "=%02X", c)
		}
	}
	return fmt.Sprintf("%s%s/%d/%s", markPrefix, b.String(), m.LUN, m.Run)
}

var escape = regexp.MustCompile(`=[0-9A-F]{2}`)

// parseMark returns the mark whose String is text, or nil.
func parseMark(text string) *Mark {
	fields := strings.Split(strings.TrimPrefix(text, markPrefix), "/")
	if !strings.HasPrefix(text, markPrefix) || len(fields) != 3 {
		return nil
	}
	m := &Mark{Run: fields[2]}
	m.Target = escape.ReplaceAllStringFunc(fields[0], func(s string) string {
		n, _ := strconv.ParseUint(s[1:], 16, 8)
		return string([]byte{byte(n)})
	})
	var err error
	if m.LUN, err = strconv.Atoi(fields[1]); err != nil || m.String() != text {
		return nil
	}
	return m
}

// Parse returns the pool with a name of one of the Kinds.
func Parse(name string) (Pool, error) {
	kind, at, _ := strings.Cut(name, ":")
	switch kind {
	case "dir":
		if !filepath.IsAbs(at) {
			return nil, fmt.Errorf("%q is not an absolute path of a directory, like dir:/srv/luns", at)
		}
		return dir(filepath.Clean(at)), nil
	case "lvm":
		group, thin, ok := strings.Cut(at, "/")
		if !ok {
			return nil, fmt.Errorf("%q is not a volume group and a thin pool, like lvm:vg0/thin", at)
		}
		if err := checkLVM("volume group", group); err != nil {
			return nil, err
		}
		return &lvm{group, thin}, checkLVM("thin pool", thin)
	case "zfs":
		return zfs(at), checkDataset(at)
	}
	return nil, fmt.Errorf("%q is not the name of a pool: give %s", name, Kinds)
}

// Of returns the pool and the name of the volume at path, by the form of the path. The pool of a logical volume has no name of
// its thin pool. It returns nil if path is not one of a volume.
func Of(path string) (p Pool, volume string) {
	rest, isDevice := strings.CutPrefix(path, "/dev/")
	if !isDevice || filepath.Clean(path) != path {
		return nil, ""
	}
	parent, volume := filepath.Split(rest)
	parent = strings.TrimSuffix(parent, "/")
	if at, ok := strings.CutPrefix(parent, "zvol/"); ok {
		p = zfs(at)
		if checkDataset(at) != nil {
			return nil, ""
		}
	} else {
		p = &lvm{group: parent}
		if parent == "zvol" || checkLVM("volume group", parent) != nil {
			return nil, ""
		}
	}
	if p.CheckName(volume) != nil {
		return nil, ""
	}
	return p, volume
}

// Appear waits until the device of a volume exists, which udev makes, for at most limit.
func Appear(ctx context.Context, path string, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		_, err := os.Stat(path)
		if !errors.Is(err, os.ErrNotExist) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: the device did not appear within %v: check udev (udevadm settle)", path, limit)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// dir is a directory. The target creates the files in it, so they have no marks.
type dir string

func (d dir) Backend() string              { return "file" }
func (d dir) Path(volume string) string    { return filepath.Join(string(d), volume) }
func (d dir) Removal(volume string) string { return "rm " + d.Path(volume) }

func (d dir) CheckName(volume string) error {
	if len(volume) > unix.NAME_MAX || volume == "" || strings.HasPrefix(volume, "-") || strings.HasPrefix(volume, ".") || strings.ContainsAny(volume, "/\x00\n") {
		return fmt.Errorf("%q is not the name of a file, which begins with neither - nor . and has no /", volume)
	}
	return nil
}

func (d dir) State(_ context.Context, volume string) (s State, v *Volume, err error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(string(d), &fs); err != nil {
		return s, nil, fmt.Errorf("%s: %w", string(d), err)
	}
	if used := fs.Blocks - fs.Bfree; used+fs.Bavail > 0 {
		s.Full = 100 * float64(used) / float64(used+fs.Bavail)
	}
	switch _, err := os.Lstat(d.Path(volume)); {
	case err == nil:
		v = &Volume{}
	case !errors.Is(err, os.ErrNotExist):
		return s, nil, err
	}
	return s, v, nil
}

func (d dir) Create(context.Context, string, int64, Mark, bool) error { return nil }

func (d dir) Remove(_ context.Context, volume string) error { return os.Remove(d.Path(volume)) }
