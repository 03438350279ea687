package daemon

import (
	"errors"
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/lun/state"
)

// The identity of a LUN is in the state directory. Its file has a mark that names the identity, too, as an
// extended attribute. So the target notices that the state directory was lost, and that a file has come from
// another target or is a copy. File systems without extended attributes have no marks.

// markName is the name of the attribute.
const markName = "user.iser-target"

// A mark is what a file says about itself: "1 NAA INODE".
type mark struct {
	naa   string // of the LUN that the file was last served as
	inode uint64 // of the file then: a copy has another
}

// errForeign is the reason of a LUN whose file is marked with an identity that state_dir does not know.
type errForeign struct{ naa string }

func (e *errForeign) Error() string {
	return fmt.Sprintf("the file was served with NAA %s, which state_dir does not know: state_dir was lost or is not mounted, or another target served the file. "+
		"Bring back state_dir; or set identity of the LUN: \"file\" keeps that NAA, \"new\" makes it another disk. Reservations and settings of the LUN are gone either way", e.naa)
}

// readMark returns the mark of the file at path, and its inode number. ok is false without a mark that this
// version can read.
func readMark(path string) (m mark, inode uint64, ok bool) {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return mark{}, 0, false
	}
	b := make([]byte, 64)
	n, err := unix.Getxattr(path, markName, b)
	if err != nil {
		return mark{}, st.Ino, false
	}
	var version int
	if _, err := fmt.Sscanf(string(b[:n]), "%d %s %d", &version, &m.naa, &m.inode); err != nil || version != 1 {
		return mark{}, st.Ino, false
	}
	return m, st.Ino, true
}

// write marks the file at path. It returns nil on a file system that does not support that.
func (m mark) write(path string) error {
	err := unix.Setxattr(path, markName, fmt.Appendf(nil, "1 %s %d", m.naa, m.inode), 0)
	for _, ignored := range []error{unix.ENOTSUP, syscall.EPERM, syscall.EACCES, syscall.EROFS} {
		if errors.Is(err, ignored) {
			return nil
		}
	}
	return err
}

// warnOfFreshState warns if the state directory has no identities, and LUNs have no files that could be marked: nobody
// else would notice that the directory was lost or is not mounted.
func (d *Daemon) warnOfFreshState(cfg *config.Config) {
	if cfg.StateDir == "" || !d.state.ids.Fresh() {
		return
	}
	for i := range cfg.Targets {
		for _, l := range cfg.Targets[i].LUNs {
			if l.Backend == "block" || l.Backend == "nbd" || l.Backend == "rbd" || l.Backend == "gotgt" {
				d.log.Warn("state_dir has no identities: LUNs on devices and servers get new ones, and no reservation is known", eventKey, "service",
					"state_dir", cfg.StateDir, "hint", "if the target has served them before, stop it and bring back the directory")
				return
			}
		}
	}
}

// findLost brings back the identity of a LUN whose entry in the state directory is damaged, from the mark of its file. It
// fails if that is not possible, unless the configuration says what the LUN becomes.
func (d *Daemon) findLost(target string, l *config.LUN) (found bool, err error) {
	key := identityKey(target, l)
	lost := d.state.ids.Lost(key)
	switch {
	case lost == nil, l.Identity == config.IdentityFile:
		return false, nil
	case l.Identity == config.IdentityNew:
		return false, d.state.ids.AcceptLost(key)
	}
	if m, inode, marked := readMark(l.Path); l.Backend == "file" && marked && m.inode == inode && d.state.ids.LostAs(key, m.naa) {
		if _, err := d.state.ids.Adopt(key, m.naa); err != nil {
			return false, err
		}
		d.log.Warn("identity of a LUN was damaged, and is that of its file again", eventKey, "lun", "target", target, "lun", l.ID, "naa", m.naa)
		return true, nil
	}
	if l.Backend == "file" {
		return false, fmt.Errorf("%w. Set identity of the LUN: \"file\" keeps the NAA that the file is marked with, \"new\" makes it another disk", lost)
	}
	return false, fmt.Errorf("%w. iser-target state repair --discard %s:%s, while the target is stopped, makes it another disk", lost, identitiesFile, key)
}

// promise returns an identity for a LUN whose store is not open. One whose identity is damaged gets one for the moment.
func (d *Daemon) promise(target string, l *config.LUN) (state.Identity, error) {
	if l.Shared {
		return sharedIdentity(l), nil
	}
	key := identityKey(target, l)
	if d.state.ids.Lost(key) != nil {
		return state.Ephemeral().Promise(key)
	}
	return d.state.ids.Promise(key)
}

// identify returns the identity of the LUN, whose store is open, and marks its file with it. It may wait for
// the file system of the file, and for state_dir.
func (d *Daemon) identify(target string, l *config.LUN) (state.Identity, error) {
	key := identityKey(target, l)
	if l.Backend != "file" {
		return d.state.ids.Get(key)
	}
	found, inode, marked := readMark(l.Path)
	id, err := d.identityOf(key, target, l, found, inode, marked)
	if err != nil {
		return id, err
	}
	if want := (mark{id.Serial, inode}); inode != 0 && found != want {
		if err := want.write(l.Path); err != nil {
			d.log.Warn("file of a LUN cannot be marked", eventKey, "lun", "target", target, "lun", l.ID, "reason", err)
		}
	}
	return id, nil
}

// identityOf returns the identity for identify. Its parameters are what readMark has found.
func (d *Daemon) identityOf(key, target string, l *config.LUN, found mark, inode uint64, marked bool) (state.Identity, error) {
	ids := d.state.ids
	warn := func(text string) {
		d.log.Warn(text, eventKey, "lun", "target", target, "lun", l.ID, "path", l.Path, "naa", found.naa)
	}
	switch known := ids.Known(key); {
	case !marked:
	case known:
		if id, err := ids.Get(key); err != nil || id.Serial == found.naa {
			return id, err
		}
		warn("file of a LUN was served as another LUN before")
	case l.Identity == config.IdentityFile:
		return ids.Adopt(key, found.naa)
	case ids.Has(found.naa): // it was another LUN of this target
	case l.Identity == config.IdentityNew:
	case found.inode != inode:
		warn("file of a LUN is a copy of one with another identity; identity: file would keep that")
	default:
		return state.Identity{}, &errForeign{found.naa}
	}
	return ids.Get(key)
}
