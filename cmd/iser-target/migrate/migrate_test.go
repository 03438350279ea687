package migrate

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/config"
)

// imported returns the configuration of a file in testdata, which the validation accepts.
func imported(t *testing.T, format, name string) (*config.Config, *Result, string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	disks := t.TempDir() // the files of tgt and ctld, whose sizes their configurations leave out
	for _, disk := range []string{"two", "three", "open"} {
		if err := os.WriteFile(filepath.Join(disks, disk+".img"), make([]byte, 1<<20), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if format != "lio" {
		b = []byte(strings.NewReplacer("/srv/iscsi", disks, "/data/two", disks+"/two").Replace(string(b)))
	}
	r, err := Import(format, name, b)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "secrets")
	text, err := r.Write(dir, name)
	if err != nil {
		t.Fatal(err)
	}
	if err := Check(text); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	doc, err := config.NewDocument("import", text)
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := doc.Config()
	if err != nil {
		t.Fatal(err)
	}
	return cfg, r, dir
}

// noted fails the test unless a note has each text.
func noted(t *testing.T, r *Result, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if !slices.ContainsFunc(r.Notes, func(n string) bool { return strings.Contains(n, text) }) {
			t.Errorf("no note has %q:\n%s", text, strings.Join(r.Notes, "\n"))
		}
	}
}

// A LUN of LIO keeps the NAA that the kernel makes, serial number, vendor and product, and the rights of its initiators.
func TestLIO(t *testing.T) {
	cfg, r, dir := imported(t, "lio", "saveconfig.json")
	if len(cfg.Targets) != 1 || len(cfg.Targets[0].LUNs) != 2 || len(cfg.Portals) != 1 || cfg.Portals[0].Listen != "0.0.0.0:3260" || cfg.Portals[0].Serves("iser") {
		t.Fatalf("%+v", cfg)
	}
	tg := cfg.Targets[0]
	one, two := tg.LUNs[0], tg.LUNs[1]
	if one.NAA != "60014058f3c1c625b7a4f0e9f273a1f0" || one.Serial != "8f3c1c62-5b7a-4f0e-9f27-3a1f0c5d2b11" || one.Vendor != "LIO-ORG" || one.Product != "disk1" ||
		one.Backend != "file" || one.Path != "/srv/iscsi/disk1.img" || one.Size != 1<<30 || one.WriteThrough || one.Initiators != nil {
		t.Errorf("LUN 0: %+v", one)
	}
	if two.Backend != "block" || two.Product != "IBLOCK" || !slices.Equal(two.Initiators, []string{"iqn.1993-08.org.debian:01:host1"}) || !slices.Equal(two.ReadOnlyFor, two.Initiators) {
		t.Errorf("LUN 1: %+v", two)
	}
	if !slices.Equal(tg.Initiators, []string{"iqn.1993-08.org.debian:01:host1", "iqn.1993-08.org.debian:01:host2"}) {
		t.Errorf("initiators %q", tg.Initiators)
	}
	users := tg.Auth.Users
	if len(users) != 2 || users[0].Name != "host1" || string(users[0].Secret) != "host1-secret-0123" || users[0].Initiator != tg.Initiators[0] || users[0].Mutual.Name != "target" || string(users[1].Secret) != "host2-secret-0123" {
		t.Errorf("users %+v", users)
	}
	files, _ := filepath.Glob(dir + "/*")
	for _, f := range files {
		if fi, err := os.Stat(f); err != nil || fi.Mode() != 0o600 {
			t.Errorf("%s: %v, %v", f, fi.Mode(), err)
		}
	}
	if fi, err := os.Stat(dir); err != nil || len(files) != 3 || fi.Mode() != fs.ModeDir|0o700 {
		t.Errorf("%q, %v", files, err)
	}
	noted(t, r, "backstore pscsi has no counterpart", "fabric loopback has no counterpart", "knew it as LUN 5")
}

// A LUN of tgt keeps its number, serial number, vendor and product.
func TestTgt(t *testing.T) {
	cfg, r, _ := imported(t, "tgt", "targets.conf")
	if len(cfg.Targets) != 2 {
		t.Fatalf("%+v", cfg)
	}
	tg := cfg.Targets[0]
	var ids []int
	for _, l := range tg.LUNs {
		ids = append(ids, l.ID)
	}
	if !slices.Equal(ids, []int{1, 4, 5}) || tg.LUNs[0].Backend != "block" || tg.LUNs[0].Vendor != "IET" {
		t.Errorf("LUNs %+v", tg.LUNs)
	}
	if two := tg.LUNs[1]; two.Serial != "serial-of-two" || two.Vendor != "ACME" || two.Product != "a product with a" || !two.ReadOnly || !two.WriteThrough || filepath.Base(two.Path) != "two.img" || two.Size != 1<<20 {
		t.Errorf("LUN 4: %+v", two)
	}
	if !slices.Equal(tg.Networks, []string{"192.0.2.0/24"}) || !slices.Equal(tg.Initiators, []string{"iqn.1993-08.org.debian:01:host1"}) || tg.Auth.Users[0].Name != "host1" {
		t.Errorf("%+v", tg)
	}
	if open := cfg.Targets[1]; !slices.Equal(open.Initiators, []string{"*"}) || open.Networks != nil || open.Auth.Method == "chap" {
		t.Errorf("%+v", open)
	}
	noted(t, r, "the file has no secret", "MaxBurstLength of target", "bs-type has no counterpart", "wwid", "cut to 16 characters", "admits all initiators")
}

// What tgt-admin --dump of tgt 1.0.85 prints is imported: it names addresses as initiators, and has neither secrets nor names of LUNs.
func TestTgtDump(t *testing.T) {
	cfg, r, _ := imported(t, "tgt", "dump.conf")
	tg := cfg.Targets[0]
	if !slices.Equal(tg.Networks, []string{"192.0.2.0/24"}) || !slices.Equal(tg.Initiators, []string{"iqn.1993-08.org.debian:01:h"}) || tg.LUNs[0].ID != 1 || tg.Auth.Users[0].Name != "host1" {
		t.Errorf("%+v", tg)
	}
	noted(t, r, "the file has no secret", "naa and serial")
}

// A LUN of ctld keeps its NAA and serial number, whether the target or the file has it.
func TestCtl(t *testing.T) {
	cfg, r, _ := imported(t, "ctl", "ctl.conf")
	if len(cfg.Targets) != 2 || len(cfg.Portals) != 2 || cfg.Portals[0].Listen != "0.0.0.0:3260" || cfg.Portals[1].Listen != "[::]:3261" {
		t.Fatalf("%+v", cfg)
	}
	tg := cfg.Targets[0]
	if l := tg.LUNs[0]; l.NAA != "6589cfc000000c2a3f5d6e7f80910203" || l.Serial != "000c29ab0001" || l.Vendor != "FreeBSD" || l.Product != "CTLDISK" || l.Backend != "block" {
		t.Errorf("LUN 0: %+v", l)
	}
	if l := tg.LUNs[1]; l.Size != 4<<30 || l.BlockSize != 4096 || !l.ReadOnly || l.Backend != "file" {
		t.Errorf("LUN 1: %+v", l)
	}
	if tg.Alias != "Test target" || !slices.Equal(tg.Networks, []string{"192.0.2.0/24"}) || len(tg.Auth.Users) != 2 ||
		string(tg.Auth.Users[0].Secret) != "a secret of 18 char" || tg.Auth.Users[1].Mutual.Name != "target" {
		t.Errorf("%+v", tg)
	}
	noted(t, r, "device-id has no counterpart")

	r, err := Import("ctl", "f", []byte("target iqn.2012-06.com.example:x { auth-group no-authentication\n lun 0 { path /nowhere/x.img }\n }"))
	if err != nil {
		t.Fatal(err)
	}
	noted(t, r, "its size is not known", "listens on port 3260")
	if text, err := r.Write("", "f"); err != nil || Check(text) == nil {
		t.Errorf("a LUN without a size passes: %v\n%s", err, text)
	}
}

// A wrong file ends in an error that names the place, and leaves no files.
func TestWrongFiles(t *testing.T) {
	for _, tc := range [][3]string{
		{"lio", "{\n\"storage_objects\": [}\n", "f: line 2: not the JSON"},
		{"lio", `{"targets": 3}`, "f: not a saveconfig.json"},
		{"lio", `{}`, "f: it has no iSCSI target"},
		{"tgt", "<target a>\n<target b>", "f: line 2: a <target> within another"},
		{"tgt", "<target a>\nbacking-store /x", "f: <target a> does not end"},
		{"tgt", "<target a>\n<backing-store /x>\nlun x\n", `f: line 3: lun "x" is not a number`},
		{"tgt", "</target>", "f: line 1: </target> without its begin"},
		{"tgt", "<rubbish>", "f: line 1: unknown section"},
		{"ctl", "target a {\n lun 0 {\n", "a block does not end"},
		{"ctl", "}", "f: line 1: } without {"},
		{"ctl", "target a { portal-group none\n }", "f: line 1: portal-group none is not in the file"},
		{"ctl", "target a {\n lun 0 none\n }", "f: line 2: lun none is not in the file"},
		{"ctl", "target a {\n alias \"x\n }", "f: line 2: a quote does not end"},
		{"ctl", strings.Repeat("{", 1000), "blocks nest too deeply"},
		{"vmware", "", `"vmware" is not one of`},
	} {
		if _, err := Import(tc[0], "f", []byte(tc[1])); err == nil || !strings.Contains(err.Error(), tc[2]) {
			t.Errorf("%s %q: %v, want %q", tc[0], tc[1], err, tc[2])
		}
	}

	b, err := os.ReadFile("testdata/saveconfig.json")
	if err != nil {
		t.Fatal(err)
	}
	r, err := Import("lio", "f", b)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	there := filepath.Join(dir, r.secrets[2].name+".secret")
	if err := os.WriteFile(there, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Write(dir, "f"); err == nil {
		t.Error("a file was overwritten")
	}
	if files, _ := filepath.Glob(dir + "/*"); !slices.Equal(files, []string{there}) {
		t.Errorf("an import that failed leaves %q", files)
	}
}

// FuzzImport holds that no file ends in a panic or a hang.
func FuzzImport(f *testing.F) {
	for format, name := range map[string]string{"lio": "saveconfig.json", "tgt": "targets.conf", "ctl": "ctl.conf"} {
		b, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(format, b)
	}
	f.Fuzz(func(t *testing.T, format string, b []byte) {
		Import(format, "f", b)
	})
}
