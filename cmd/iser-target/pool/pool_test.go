package pool

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const report = `{"report": [{"lv": [
 {"lv_name":"thin","lv_attr":"twi-aotz--","lv_tags":"","data_percent":"12.50","metadata_percent":"81.25"},
 {"lv_name":"linear","lv_attr":"-wi-a-----","lv_tags":"","data_percent":"","metadata_percent":""},
 {"lv_name":"ours","lv_attr":"Vwi-a-tz--","lv_tags":"other,iser-target:iqn.2026-11.io.example:store/3/0011223344556677","data_percent":"0.00","metadata_percent":""},
 {"lv_name":"foreign","lv_attr":"Vwi-a-tz--","lv_tags":"backup","data_percent":"0.00","metadata_percent":""}]}]}`

// fake puts programs with these scripts of sh first in PATH. Each appends its command line to the file whose content called returns.
func fake(t *testing.T, scripts map[string]string) (called func() string) {
	t.Helper()
	dir := t.TempDir()
	calls := filepath.Join(dir, "calls")
	for name, script := range scripts {
		text := "#!/bin/sh\nprintf '%s\\n' \"" + name + " $*\" >>" + calls + "\n" + script + "\n"
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+":/usr/bin:/bin")
	return func() string {
		b, _ := os.ReadFile(calls)
		return string(b)
	}
}

func parse(t *testing.T, name string) Pool {
	t.Helper()
	p, err := Parse(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func wantError(t *testing.T, err error, want string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
		t.Errorf("error %v, want one line with %q", err, want)
	}
}

func TestParse(t *testing.T) {
	for _, bad := range []string{
		"", "fast", "dir:", "dir:srv", "lvm:", "lvm:vg0", "lvm:-vg/thin", "lvm:vg/-thin", "lvm:../thin", "lvm:vg0/a b", "lvm:vg0/a/b", "lvm:vg0/$(x)",
		"zfs:", "zfs:-tank", "zfs:/tank", "zfs:tank/", "zfs:tank//a", "zfs:tank/-a", "zfs:tank/a@b", "zfs:tank/..", "zfs:tank a", "zfs:" + strings.Repeat("a", 256),
	} {
		if p, err := Parse(bad); err == nil {
			t.Errorf("Parse(%q) is %v, want an error", bad, p)
		}
	}
	for name, want := range map[string]string{"dir:/srv//luns/": "file /srv/luns/v", "lvm:vg-0/thin": "block /dev/vg-0/v", "zfs:tank/a/b": "block /dev/zvol/tank/a/b/v"} {
		p := parse(t, name)
		if got := p.Backend() + " " + p.Path("v"); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
		for _, bad := range []string{"", "-v", "..", "a/b", "a\nb", "a\x00b", strings.Repeat("a", 256)} {
			if p.CheckName(bad) == nil {
				t.Errorf("%s: %q is a name", name, bad)
			}
		}
		if err := p.CheckName("store-lun0"); err != nil {
			t.Error(err)
		}
	}
	for _, reserved := range []string{"snapshot1", "pvmove0", "a_tdata", "a_rimage_0"} {
		wantError(t, parse(t, "lvm:vg0/thin").CheckName(reserved), "reserves")
	}
}

func TestOf(t *testing.T) {
	for path, want := range map[string]string{"/dev/vg0/a": "lvremove vg0/a", "/dev/zvol/tank/x/a": "zfs destroy tank/x/a"} {
		p, volume := Of(path)
		if p == nil || p.Removal(volume) != want || p.Path(volume) != path {
			t.Errorf("Of(%s): %v %s", path, p, volume)
		}
	}
	for _, path := range []string{"/dev/sdb", "/srv/vg0/a", "/dev/disk/by-id/a", "/dev/../vg0/a", "/dev/vg0/-a", "/dev/vg0/", "/dev/zvol/a", "nbd://h/a"} {
		if p, volume := Of(path); p != nil {
			t.Errorf("Of(%s): %v %s", path, p, volume)
		}
	}
}

// A mark survives the characters that a tag of LVM can have, and no other text is one.
func TestMark(t *testing.T) {
	for _, target := range []string{"iqn.2026-11.io.example:store", "iqn.2026-11.io.example:läger", "a=/b c"} {
		m := NewMark(target, 12)
		if got := parseMark(m.String()); got == nil || *got != m || strings.ContainsAny(m.String(), " ,äé") {
			t.Errorf("%q: %+v, want %+v", m.String(), got, m)
		}
	}
	if a, b := NewMark("a", 0), NewMark("a", 0); a == b {
		t.Error("two runs have the same mark")
	}
	for _, text := range []string{"", "-", "iser-target:", "iser-target:a/b/c", "iser-target:a/01/c", "a/1/c", "iser-target:a/1/c/d", "iser-target:a=zz/1/c"} {
		if m := parseMark(text); m != nil {
			t.Errorf("%q is %+v", text, m)
		}
	}
}

func TestLVM(t *testing.T) {
	called := fake(t, map[string]string{
		"lvs":      "cat <<'.'\n" + report + "\n.\n",
		"lvcreate": `case "$*" in *" full "*) echo "  WARNING: something" >&2; echo '  Insufficient free space.' >&2; exit 5;; esac`,
		"lvremove": `case "$*" in *held) echo '  Logical volume vg0/held in use.' >&2; exit 5;; esac`,
	})
	p := parse(t, "lvm:vg0/thin")
	state, v, err := p.State(t.Context(), "ours")
	if err != nil || state.Full != 81.25 || v == nil || v.Mark == nil || *v.Mark != (Mark{"iqn.2026-11.io.example:store", 3, "0011223344556677"}) {
		t.Errorf("%+v %+v %v", state, v, err)
	}
	if _, v, err := p.State(t.Context(), "foreign"); err != nil || v == nil || v.Mark != nil {
		t.Errorf("foreign: %+v %v", v, err)
	}
	if _, v, err := p.State(t.Context(), "new"); err != nil || v != nil {
		t.Errorf("new: %+v %v", v, err)
	}
	_, _, err = parse(t, "lvm:vg0/linear").State(t.Context(), "new")
	wantError(t, err, "vg0/linear is not a thin pool")
	_, _, err = parse(t, "lvm:vg0/none").State(t.Context(), "new")
	wantError(t, err, "has no thin pool none: make it with lvcreate --type thin-pool")

	before := called()
	mark := Mark{"iqn.a", 1, "77"}
	if err := p.Create(t.Context(), "new", 1<<30, mark, true); err != nil {
		t.Error(err)
	}
	if err := p.Create(t.Context(), "new", 1<<30, mark, false); err != nil {
		t.Error(err)
	}
	wantError(t, p.Create(t.Context(), "full", 1<<30, mark, false), "lvcreate: Insufficient free space")
	if err := p.Remove(t.Context(), "new"); err != nil {
		t.Error(err)
	}
	wantError(t, p.Remove(t.Context(), "held"), "lvremove: Logical volume vg0/held in use")
	args := "--yes --type thin --virtualsize 1073741824b --thinpool thin --name %s --addtag iser-target:iqn.a/1/77 vg0\n"
	want := "lvcreate --test " + strings.Replace(args, "%s", "new", 1) + "lvcreate " + strings.Replace(args, "%s", "new", 1) +
		"lvcreate " + strings.Replace(args, "%s", "full", 1) + "lvremove --yes vg0/new\nlvremove --yes vg0/held\n"
	if got := strings.TrimPrefix(called(), before); got != want {
		t.Errorf("calls\n%swant\n%s", got, want)
	}
}

func TestZFS(t *testing.T) {
	called := fake(t, map[string]string{"zfs": `case "$1 $*" in
list*none) echo "cannot open 'none': dataset does not exist" >&2; exit 1;;
list*) printf 'tank/luns\t300\t100\t-\ntank/luns/ours\t1\t100\tiser-target:iqn.a/1/77\ntank/luns/foreign\t1\t100\t-\n';;
destroy*) echo "cannot destroy '$2': dataset is busy" >&2; exit 1;;
esac`})
	p := parse(t, "zfs:tank/luns")
	mark := Mark{"iqn.a", 1, "77"}
	state, v, err := p.State(t.Context(), "ours")
	if err != nil || state.Full != 75 || v == nil || v.Mark == nil || *v.Mark != mark {
		t.Errorf("%+v %+v %v", state, v, err)
	}
	if _, v, err := p.State(t.Context(), "foreign"); err != nil || v == nil || v.Mark != nil {
		t.Errorf("foreign: %+v %v", v, err)
	}
	if _, v, err := p.State(t.Context(), "new"); err != nil || v != nil {
		t.Errorf("new: %+v %v", v, err)
	}
	_, _, err = parse(t, "zfs:none").State(t.Context(), "new")
	wantError(t, err, "zfs: cannot open 'none': dataset does not exist")
	before := called()
	for _, dry := range []bool{true, false} {
		if err := p.Create(t.Context(), "new", 1<<30, mark, dry); err != nil {
			t.Error(err)
		}
	}
	wantError(t, p.Remove(t.Context(), "ours"), "dataset is busy")
	want := "zfs create -n -s -V 1073741824 -o iser-target:lun=iser-target:iqn.a/1/77 tank/luns/new\n" +
		"zfs create -s -V 1073741824 -o iser-target:lun=iser-target:iqn.a/1/77 tank/luns/new\nzfs destroy tank/luns/ours\n"
	if got := strings.TrimPrefix(called(), before); got != want {
		t.Errorf("calls\n%swant\n%s", got, want)
	}
}

// A missing program, one that hangs, one that answers nonsense or without end, and an interrupt are one line each.
func TestPrograms(t *testing.T) {
	fake(t, nil)
	p := parse(t, "lvm:vg0/thin")
	t.Setenv("PATH", t.TempDir())
	_, _, err := p.State(t.Context(), "a")
	wantError(t, err, "lvs: program not found in PATH: install it (Debian: apt install lvm2)")
	_, _, err = parse(t, "zfs:tank").State(t.Context(), "a")
	wantError(t, err, "zfs: program not found in PATH: install it (Debian: apt install zfsutils-linux)")

	fake(t, map[string]string{"lvs": "echo '{}'", "zfs": "echo tank"})
	_, _, err = p.State(t.Context(), "a")
	wantError(t, err, "is not the JSON of lvmreport(7)")
	_, _, err = parse(t, "zfs:tank").State(t.Context(), "a")
	wantError(t, err, "does not have 4 columns")

	fake(t, map[string]string{"lvs": "exec cat /dev/zero"})
	_, _, err = p.State(t.Context(), "a")
	wantError(t, err, "lvs: its output is too long")

	defer func(l time.Duration) { limit = l }(limit)
	limit = 200 * time.Millisecond
	fake(t, map[string]string{"lvs": "exec sleep 60"})
	_, _, err = p.State(t.Context(), "a")
	wantError(t, err, "no result within 200ms")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, err = p.State(ctx, "a")
	wantError(t, err, "lvs: interrupted")
}

func TestDirectory(t *testing.T) {
	at := t.TempDir()
	p := parse(t, "dir:"+at)
	state, v, err := p.State(t.Context(), "a.img")
	if err != nil || v != nil || state.Full < 0 || state.Full > 100 {
		t.Errorf("%+v %+v %v", state, v, err)
	}
	if err := os.Symlink("nowhere", filepath.Join(at, "a.img")); err != nil {
		t.Fatal(err)
	}
	if _, v, err := p.State(t.Context(), "a.img"); err != nil || v == nil || v.Mark != nil {
		t.Errorf("with a file: %+v %v", v, err)
	}
	_, _, err = parse(t, "dir:"+at+"/none").State(t.Context(), "a.img")
	wantError(t, err, "no such file or directory")
}

func TestAppear(t *testing.T) {
	path := filepath.Join(t.TempDir(), "device")
	wantError(t, Appear(t.Context(), path, 100*time.Millisecond), "did not appear within 100ms")
	time.AfterFunc(100*time.Millisecond, func() { os.WriteFile(path, nil, 0o600) })
	if err := Appear(t.Context(), path, 10*time.Second); err != nil {
		t.Error(err)
	}
}

// Snapshots of LVM are thin snapshots with a tag. Those of others are not listed.
func TestSnapshotsLVM(t *testing.T) {
	called := fake(t, map[string]string{"lvcreate": "", "lvremove": "", "lvs": `echo '{"report": [{"lv": [
 {"lv_name":"v","origin":"","lv_tags":"","lv_size":"1048576","data_percent":"50.00","lv_time":"2026-11-27 18:00:00 +0100"},
 {"lv_name":"v-snap-b","origin":"v","lv_tags":"x,iser-target-snapshot:b","lv_size":"1048576","data_percent":"50.00","lv_time":"2026-11-27 18:00:00 +0100"},
 {"lv_name":"v-snap-a","origin":"v","lv_tags":"iser-target-snapshot:a","lv_size":"2097152","data_percent":"","lv_time":""},
 {"lv_name":"w-snap-a","origin":"w","lv_tags":"iser-target-snapshot:a","lv_size":"2097152","data_percent":"","lv_time":""},
 {"lv_name":"renamed","origin":"v","lv_tags":"iser-target-snapshot:c","lv_size":"1","data_percent":"","lv_time":""},
 {"lv_name":"other","origin":"v","lv_tags":"","lv_size":"1","data_percent":"","lv_time":""}]}]}'`})
	p := parse(t, "lvm:vg0/thin").(Snapshotter)
	list, err := p.Snapshots(t.Context(), "v")
	if err != nil || len(list) != 2 || list[0].Name != "a" || list[0].Size != 2<<20 || list[0].Used != 0 || !list[0].Created.IsZero() ||
		list[1].Path != "vg0/v-snap-b" || list[1].Used != 1<<19 || list[1].Created.Unix() != 1795798800 {
		t.Fatalf("%+v, %v", list, err)
	}
	mark := Mark{"iqn.2026-11.io.example:store", 3, "0011223344556677"}
	for _, err := range []error{
		p.MakeSnapshot(t.Context(), "v", "s", true), p.MakeSnapshot(t.Context(), "v", "s", false), p.RemoveSnapshot(t.Context(), "v", "s"),
		p.Clone(t.Context(), "v", "s", "c", mark, false), p.Clone(t.Context(), "v", "", "c", mark, true),
	} {
		if err != nil {
			t.Error(err)
		}
	}
	made := "--yes --snapshot --permission r --setactivationskip y --addtag iser-target-snapshot:s --name v-snap-s vg0/v\n"
	clone := "--yes --snapshot --permission rw --setactivationskip n --addtag " + mark.String() + " --name c vg0/v"
	want := "lvcreate --test " + made + "lvcreate " + made + "lvremove --yes vg0/v-snap-s\nlvcreate " + clone + "-snap-s\nlvcreate --test " + clone + "\n"
	if _, got, _ := strings.Cut(called(), "\n"); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	wantError(t, p.MakeSnapshot(t.Context(), strings.Repeat("v", 100), strings.Repeat("s", 64), false), "at most 127")
}

// Snapshots of ZFS have a property. A clone of a volume in use has a snapshot that goes with it.
func TestSnapshotsZFS(t *testing.T) {
	called := fake(t, map[string]string{"zfs": `case "$*" in
*creation*) printf 'tank/v@b\t1048576\t4096\t1795798800\tb\ntank/v@a\t1048576\t0\t-\ta\ntank/v@auto\t1048576\t0\t1\t-\n';;
*volume,snapshot*) printf 'tank/v\ntank/v@b\n';;
esac`})
	p := parse(t, "zfs:tank").(Snapshotter)
	list, err := p.Snapshots(t.Context(), "v")
	if err != nil || len(list) != 2 || list[0].Name != "a" || list[1].Path != "tank/v@b" || list[1].Used != 4096 || list[1].Created.Unix() != 1795798800 {
		t.Fatalf("%+v, %v", list, err)
	}
	mark := Mark{"iqn.2026-11.io.example:store", 3, "0011223344556677"}
	wantError(t, p.MakeSnapshot(t.Context(), "v", "b", true), "tank/v@b exists")
	for _, err := range []error{
		p.MakeSnapshot(t.Context(), "v", "s", true), p.MakeSnapshot(t.Context(), "v", "s", false), p.RemoveSnapshot(t.Context(), "v", "s"),
		p.Clone(t.Context(), "v", "s", "c", mark, true), p.Clone(t.Context(), "v", "s", "c", mark, false), p.Clone(t.Context(), "v", "", "c", mark, false),
	} {
		if err != nil {
			t.Error(err)
		}
	}
	names := "zfs list -H -d 1 -t volume,snapshot -o name tank/v\n"
	clone := "zfs clone -o iser-target:lun=" + mark.String() + " tank/v@"
	want := names + names + "zfs snapshot -o iser-target:snapshot=s tank/v@s\nzfs destroy tank/v@s\n" + clone + "s tank/c\n" +
		"zfs snapshot -o iser-target:snapshot=- tank/v@clone-0011223344556677\n" + clone + "clone-0011223344556677 tank/c\nzfs destroy -d tank/v@clone-0011223344556677\n"
	if _, got, _ := strings.Cut(called(), "\n"); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
}

// Flush reaches a file, and says what it cannot open.
func TestFlush(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	wantError(t, Flush(t.Context(), path), "no such file")
	if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Flush(t.Context(), path); err != nil {
		t.Error(err)
	}
}
