package pool

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// lvm is a thin pool in a volume group.
type lvm struct{ group, thin string }

var lvmName = regexp.MustCompile(`^[a-zA-Z0-9+_.][a-zA-Z0-9+_.-]*$`)

// lvmReserved matches the names that LVM keeps for itself (lvm(8), VALID NAMES).
var lvmReserved = regexp.MustCompile(`^(snapshot|pvmove)|_(cdata|cmeta|corig|cpool|cvol|wcorig|mimage|mlog|rimage|rmeta|tdata|tmeta|vdata|vorigin|imeta|iorig|pmspare)`)

// checkLVM returns an error unless name is one that LVM takes, of what.
func checkLVM(what, name string) error {
	if !lvmName.MatchString(name) || name == "." || name == ".." || len(name) > 127 {
		return fmt.Errorf("%q is not a name of a %s: LVM takes letters, digits and + _ . -, not - at the beginning, at most 127", name, what)
	}
	return nil
}

func (l *lvm) Backend() string              { return "block" }
func (l *lvm) Path(volume string) string    { return "/dev/" + l.group + "/" + volume }
func (l *lvm) Removal(volume string) string { return "lvremove " + l.group + "/" + volume }

func (l *lvm) CheckName(volume string) error {
	if lvmReserved.MatchString(volume) {
		return fmt.Errorf("%q is a name that LVM reserves (lvm(8), VALID NAMES)", volume)
	}
	return checkLVM("logical volume", volume)
}

// A logical is what lvs reports of a logical volume.
type logical struct {
	Name     string `json:"lv_name"`
	Attr     string `json:"lv_attr"`
	Tags     string `json:"lv_tags"`
	Data     string `json:"data_percent"`
	Metadata string `json:"metadata_percent"`
}

func (l *lvm) State(ctx context.Context, volume string) (s State, v *Volume, err error) {
	out, err := run(ctx, "lvm2", "lvs", "--reportformat", "json", "--options", "lv_name,lv_attr,lv_tags,data_percent,metadata_percent", l.group)
	if err != nil {
		return s, nil, err
	}
	var report struct {
		Report []struct {
			LV []logical `json:"lv"`
		} `json:"report"`
	}
	if err := json.Unmarshal(out, &report); err != nil || len(report.Report) == 0 {
		return s, nil, fmt.Errorf("lvs: the report of volume group %s is not the JSON of lvmreport(7): check the version of LVM", l.group)
	}
	found := l.thin == ""
	for _, lv := range report.Report[0].LV {
		switch lv.Name {
		case l.thin:
			found = true
			if !strings.HasPrefix(lv.Attr, "t") { // lvs(8), lv_attr
				return s, nil, fmt.Errorf("%s/%s is not a thin pool: make one with lvcreate --type thin-pool", l.group, l.thin)
			}
			for _, text := range []string{lv.Data, lv.Metadata} {
				percent, _ := strconv.ParseFloat(text, 64) // empty of a pool that is not active
				s.Full = max(s.Full, percent)
			}
		case volume:
			v = &Volume{}
			for tag := range strings.SplitSeq(lv.Tags, ",") {
				if m := parseMark(tag); m != nil {
					v.Mark = m
				}
			}
		}
	}
	if !found {
		return s, nil, fmt.Errorf("volume group %s has no thin pool %s: make it with lvcreate --type thin-pool --size SIZE --name %[2]s %[1]s", l.group, l.thin)
	}
	return s, v, nil
}

func (l *lvm) Create(ctx context.Context, volume string, size int64, mark Mark, dry bool) error {
	args := []string{"--yes", "--type", "thin", "--virtualsize", strconv.FormatInt(size, 10) + "b", "--thinpool", l.thin,
		"--name", volume, "--addtag", mark.String(), l.group}
	if dry {
		args = append([]string{"--test"}, args...)
	}
	_, err := run(ctx, "lvm2", "lvcreate", args...)
	return err
}

func (l *lvm) Remove(ctx context.Context, volume string) error {
	_, err := run(ctx, "lvm2", "lvremove", "--yes", l.group+"/"+volume)
	return err
}
