package pool

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// zfs is a dataset of ZFS.
type zfs string

// property is the user property with the mark of a volume (zfsprops(7)).
const property = "iser-target:lun"

var (
	component = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.:-]*$`)
	dataset   = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_.:-]*(/[a-zA-Z0-9][a-zA-Z0-9_.:-]*)*$`)
)

// datasetMax bounds the name of a dataset, in bytes (ZFS_MAX_DATASET_NAME_LEN without the last byte).
const datasetMax = 255

func checkDataset(name string) error {
	if !dataset.MatchString(name) || len(name) > datasetMax {
		return fmt.Errorf("%q is not a pool or dataset of ZFS, like tank/luns: letters, digits and _ . : - , at most 255", name)
	}
	return nil
}

func (z zfs) name(volume string) string    { return string(z) + "/" + volume }
func (z zfs) Backend() string              { return "block" }
func (z zfs) Path(volume string) string    { return "/dev/zvol/" + z.name(volume) }
func (z zfs) Removal(volume string) string { return "zfs destroy " + z.name(volume) }

func (z zfs) CheckName(volume string) error {
	if !component.MatchString(volume) {
		return fmt.Errorf("%q is not a name of a volume: ZFS takes letters, digits and _ . : -", volume)
	}
	return checkDataset(z.name(volume))
}

func (z zfs) State(ctx context.Context, volume string) (s State, v *Volume, err error) {
	out, err := run(ctx, "zfsutils-linux", "zfs", "list", "-H", "-p", "-d", "1", "-t", "filesystem,volume", "-o", "name,used,available,"+property, string(z))
	if err != nil {
		return s, nil, err
	}
	for line := range strings.Lines(string(out)) {
		fields := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(fields) != 4 {
			return s, nil, fmt.Errorf("zfs list: %q does not have 4 columns: check the version of ZFS", line)
		}
		switch fields[0] {
		case string(z):
			used, err1 := strconv.ParseFloat(fields[1], 64)
			free, err2 := strconv.ParseFloat(fields[2], 64)
			if err1 == nil && err2 == nil && used+free > 0 {
				s.Full = 100 * used / (used + free)
			}
		case z.name(volume):
			v = &Volume{parseMark(fields[3])}
		}
	}
	return s, v, nil
}

func (z zfs) Create(ctx context.Context, volume string, size int64, mark Mark, dry bool) error {
	args := []string{"create", "-s", "-V", strconv.FormatInt(size, 10), "-o", property + "=" + mark.String(), z.name(volume)}
	if dry {
		args = append([]string{"create", "-n"}, args[1:]...)
	}
	_, err := run(ctx, "zfsutils-linux", "zfs", args...)
	return err
}

func (z zfs) Remove(ctx context.Context, volume string) error {
	_, err := run(ctx, "zfsutils-linux", "zfs", "destroy", z.name(volume)) // without -r, so snapshots of others remain
	return err
}
