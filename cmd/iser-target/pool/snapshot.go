package pool

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A Snapshotter is a Pool whose volumes can have snapshots: LVM and ZFS.
type Snapshotter interface {
	Pool

	// Snapshots returns the snapshots of a volume that this package has made, ascending by name.
	Snapshots(ctx context.Context, volume string) ([]Snapshot, error)

	// SnapshotPath returns what the program of the pool calls a snapshot, for users.
	SnapshotPath(volume, name string) string

	// MakeSnapshot makes a snapshot, or tries whether it could if dry. It has what was flushed to the volume (see Flush), and
	// maybe a part of what was written since.
	MakeSnapshot(ctx context.Context, volume, name string, dry bool) error

	// RemoveSnapshot removes a snapshot with its data. It fails if the snapshot is in use.
	RemoveSnapshot(ctx context.Context, volume, name string) error

	// Clone makes a volume that begins with the content of a snapshot, or with "" of the volume as MakeSnapshot has it.
	Clone(ctx context.Context, volume, snapshot, clone string, mark Mark, dry bool) error
}

// A Snapshot is one of a volume.
type Snapshot struct {
	Name       string
	Path       string    // as SnapshotPath returns it
	Size, Used int64     // bytes; Used are those of its own, or shared, as the program counts
	Created    time.Time // zero: not known
}

// Flush writes what the kernel has for a device, and what the target wrote to it, to the device.
func Flush(ctx context.Context, path string) error {
	done := make(chan error, 1)
	go func() {
		f, err := os.Open(path)
		if err == nil {
			err = errors.Join(f.Sync(), f.Close())
		}
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%s: interrupted while it was flushed", path)
	case <-time.After(limit):
		return fmt.Errorf("%s: not flushed within %v: check the device", path, limit)
	}
}

// snapshotTag begins the tag of a logical volume that is a snapshot. Its name follows.
const snapshotTag = "iser-target-snapshot:"

// snapshotVolume returns the name of the logical volume that is a snapshot.
func snapshotVolume(volume, name string) string { return volume + "-snap-" + name }

func (l *lvm) SnapshotPath(volume, name string) string {
	return l.group + "/" + snapshotVolume(volume, name)
}

func (l *lvm) Snapshots(ctx context.Context, volume string) ([]Snapshot, error) {
	out, err := run(ctx, "lvm2", "lvs", "--reportformat", "json", "--units", "b", "--nosuffix",
		"--options", "lv_name,origin,lv_tags,lv_size,data_percent,lv_time", l.group)
	if err != nil {
		return nil, err
	}
	var report struct {
		Report []struct {
			LV []struct {
				Name   string `json:"lv_name"`
				Origin string `json:"origin"`
				Tags   string `json:"lv_tags"`
				Size   string `json:"lv_size"`
				Data   string `json:"data_percent"`
				Time   string `json:"lv_time"`
			} `json:"lv"`
		} `json:"report"`
	}
	if err := json.Unmarshal(out, &report); err != nil || len(report.Report) == 0 {
		return nil, fmt.Errorf("lvs: the report of volume group %s is not the JSON of lvmreport(7): check the version of LVM", l.group)
	}
	var list []Snapshot
	for _, lv := range report.Report[0].LV {
		for tag := range strings.SplitSeq(lv.Tags, ",") {
			name, ok := strings.CutPrefix(tag, snapshotTag)
			if !ok || lv.Origin != volume || lv.Name != snapshotVolume(volume, name) {
				continue
			}
			s := Snapshot{Name: name, Path: l.SnapshotPath(volume, name)}
			s.Size, _ = strconv.ParseInt(lv.Size, 10, 64)
			percent, _ := strconv.ParseFloat(lv.Data, 64) // empty of one that is not active
			s.Used = int64(percent / 100 * float64(s.Size))
			s.Created, _ = time.Parse("2006-01-02 15:04:05 -0700", lv.Time)
			list = append(list, s)
		}
	}
	slices.SortFunc(list, func(a, b Snapshot) int { return strings.Compare(a.Name, b.Name) })
	return list, nil
}

// MakeSnapshot makes a thin snapshot that cannot be written to, and is not active: nothing opens it by mistake.
func (l *lvm) MakeSnapshot(ctx context.Context, volume, name string, dry bool) error {
	lv := snapshotVolume(volume, name)
	if err := l.CheckName(lv); err != nil {
		return err
	}
	return l.snapshot(ctx, dry, "--permission", "r", "--setactivationskip", "y", "--addtag", snapshotTag+name, "--name", lv, l.group+"/"+volume)
}

func (l *lvm) RemoveSnapshot(ctx context.Context, volume, name string) error {
	return l.Remove(ctx, snapshotVolume(volume, name))
}

func (l *lvm) Clone(ctx context.Context, volume, snapshot, clone string, mark Mark, dry bool) error {
	if snapshot != "" {
		volume = snapshotVolume(volume, snapshot)
	}
	return l.snapshot(ctx, dry, "--permission", "rw", "--setactivationskip", "n", "--addtag", mark.String(), "--name", clone, l.group+"/"+volume)
}

// snapshot runs lvcreate. Without a size, it makes thin snapshots only (lvcreate(8)).
func (l *lvm) snapshot(ctx context.Context, dry bool, args ...string) error {
	args = append([]string{"--yes", "--snapshot"}, args...)
	if dry {
		args = append([]string{"--test"}, args...)
	}
	_, err := run(ctx, "lvm2", "lvcreate", args...)
	return err
}

// snapshotProperty is the user property of snapshots that this package has made. Its value is the name.
const snapshotProperty = "iser-target:snapshot"

func (z zfs) SnapshotPath(volume, name string) string { return z.name(volume) + "@" + name }

func (z zfs) Snapshots(ctx context.Context, volume string) ([]Snapshot, error) {
	out, err := run(ctx, "zfsutils-linux", "zfs", "list", "-H", "-p", "-d", "1", "-t", "snapshot", "-o", "name,volsize,used,creation,"+snapshotProperty, z.name(volume))
	if err != nil {
		return nil, err
	}
	var list []Snapshot
	for line := range strings.Lines(string(out)) {
		fields := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(fields) != 5 {
			return nil, fmt.Errorf("zfs list: %q does not have 5 columns: check the version of ZFS", line)
		}
		name := fields[4]
		if fields[0] != z.SnapshotPath(volume, name) {
			continue
		}
		s := Snapshot{Name: name, Path: fields[0]}
		s.Size, _ = strconv.ParseInt(fields[1], 10, 64)
		s.Used, _ = strconv.ParseInt(fields[2], 10, 64)
		if at, err := strconv.ParseInt(fields[3], 10, 64); err == nil {
			s.Created = time.Unix(at, 0)
		}
		list = append(list, s)
	}
	slices.SortFunc(list, func(a, b Snapshot) int { return strings.Compare(a.Name, b.Name) })
	return list, nil
}

func (z zfs) MakeSnapshot(ctx context.Context, volume, name string, dry bool) error {
	return z.snapshot(ctx, volume, name, snapshotProperty+"="+name, dry)
}

// snapshot makes a snapshot with a property. zfs snapshot has no dry run, so that only looks for the volume and the name.
func (z zfs) snapshot(ctx context.Context, volume, name, property string, dry bool) error {
	if !dry {
		_, err := run(ctx, "zfsutils-linux", "zfs", "snapshot", "-o", property, z.SnapshotPath(volume, name))
		return err
	}
	out, err := run(ctx, "zfsutils-linux", "zfs", "list", "-H", "-d", "1", "-t", "volume,snapshot", "-o", "name", z.name(volume))
	if err == nil && slices.Contains(strings.Split(string(out), "\n"), z.SnapshotPath(volume, name)) {
		err = fmt.Errorf("%s exists", z.SnapshotPath(volume, name))
	}
	return err
}

func (z zfs) RemoveSnapshot(ctx context.Context, volume, name string) error {
	_, err := run(ctx, "zfsutils-linux", "zfs", "destroy", z.SnapshotPath(volume, name)) // without -R, so clones remain
	return err
}

// Clone makes a snapshot first, if it has to, which is removed with the clone at the earliest (zfs-destroy(8), -d).
func (z zfs) Clone(ctx context.Context, volume, snapshot, clone string, mark Mark, dry bool) error {
	own := snapshot == ""
	if own {
		snapshot = "clone-" + mark.Run
		if err := z.snapshot(ctx, volume, snapshot, snapshotProperty+"=-", dry); err != nil {
			return err
		}
	}
	if dry {
		return nil
	}
	from := z.SnapshotPath(volume, snapshot)
	_, err := run(ctx, "zfsutils-linux", "zfs", "clone", "-o", property+"="+mark.String(), from, z.name(clone))
	if own { // with a clone, it is marked for removal after that
		_, bad := run(context.WithoutCancel(ctx), "zfsutils-linux", "zfs", "destroy", "-d", from)
		err = errors.Join(err, bad)
	}
	return err
}
