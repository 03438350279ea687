package cli

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/config"
)

// schemaPaths returns the paths of all keys below n.
func schemaPaths(n map[string]any, path string) (paths []string) {
	properties, _ := n["properties"].(map[string]any)
	for name, v := range properties {
		at := strings.TrimPrefix(path+"."+name, ".")
		paths = append(append(paths, at), schemaPaths(v.(map[string]any), at)...)
		if items, ok := v.(map[string]any)["items"].(map[string]any); ok {
			paths = append(paths, schemaPaths(items, at+"[]")...)
		}
	}
	return paths
}

// The page about the file has each key of the schema exactly once, and facts of it. The same date gives the same pages.
func TestManuals(t *testing.T) {
	t.Setenv("SOURCE_DATE_EPOCH", "1700000000")
	root := &cobra.Command{Use: "iser-target", Short: "A target"}
	root.AddCommand(&cobra.Command{Use: "serve", Short: "Serve", Long: "Serve the configured targets.", Run: func(*cobra.Command, []string) {}})
	AddTo(root)
	dir := t.TempDir()
	if err := writeDocs(root, dir); err != nil {
		t.Fatal(err)
	}
	page := func(name string) string {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(dir, "man", name))
		if err != nil {
			t.Fatal(err)
		}
		return strings.NewReplacer(`\&`, "", `\-`, "-", `\fB`, "", `\fP`, "", `\fR`, "").Replace(string(b))
	}
	keys := page("iser-target.yaml.5")
	var schema map[string]any
	if err := json.Unmarshal(config.Schema(), &schema); err != nil {
		t.Fatal(err)
	}
	want := schemaPaths(schema, "")
	var got []string
	for _, m := range regexp.MustCompile(`(?m)^\.TP\n(\S+)\n`).FindAllStringSubmatch(keys, -1) {
		got = append(got, m[1])
	}
	slices.Sort(want)
	slices.Sort(got)
	if len(want) < 100 || !slices.Equal(got, want) {
		t.Errorf("the page has the keys\n%q\nwant\n%q", got, want)
	}
	for _, text := range []string{
		`.TH "ISER-TARGET.YAML" "5" "Nov 2023"`, "portals[].listen\n(string; required) Where to listen.", "limits.queue_depth\n(number; 1 to 1024; default 128) ",
		"drain\n(duration; default 0s) ", "targets[].luns[].size\n(size) ", "log.level\n(string; one of debug, info, warn, error; default info) ",
	} {
		if !strings.Contains(keys, text) {
			t.Errorf("no %q in the page", text)
		}
	}
	service := page("iser-target.8")
	for _, text := range []string{`.TH "ISER-TARGET" "8" "Nov 2023"`, "Serve the configured targets.", "SIGUSR2", envAddress, "\n5  unreachable: ", ".TP\ndoctor\n"} {
		if !strings.Contains(service, text) {
			t.Errorf("no %q in\n%s", text, service)
		}
	}
	for _, hidden := range root.Commands() {
		if hidden.Hidden && strings.Contains(service, ".TP\n"+hidden.Name()+"\n") {
			t.Errorf("the page has the hidden command %s", hidden.Name())
		}
	}

	again := t.TempDir()
	if err := writeDocs(root, again); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"iser-target.yaml.5", "iser-target.8"} {
		a, _ := os.ReadFile(filepath.Join(dir, "man", file))
		b, _ := os.ReadFile(filepath.Join(again, "man", file))
		if !bytes.Equal(a, b) {
			t.Errorf("%s differs", file)
		}
	}
	t.Setenv("SOURCE_DATE_EPOCH", "now")
	if err := writeDocs(root, t.TempDir()); err == nil {
		t.Error("a wrong SOURCE_DATE_EPOCH passes")
	}
}
