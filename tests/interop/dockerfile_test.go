package interop_test

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"
)

// An image is what an engine makes of the Dockerfile. Instructions and options that are
// not known here are an error: nobody would see whether they do what they should.
type image struct {
	files       []copied
	user        string
	env         []string // KEY=VALUE
	volumes     []string
	ports       []string
	entrypoint  []string
	cmd         []string
	healthcheck []string
	patience    string // of the health check, as "5s"
}

// A copied file or directory of the image: from is its path in what the first stage has
// made, owner as in chown.
type copied struct{ from, to, owner string }

// builtIn is the directory that the first stage has its results in.
const builtIn = "/out/"

// buildImage follows the Dockerfile, with args as --build-arg. Commands run here, on a copy
// of what .dockerignore leaves, with out in place of [builtIn].
func buildImage(t *testing.T, out string, args map[string]string) *image {
	t.Helper()
	b, err := os.ReadFile("../../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	var (
		m    image
		base string
		src  = t.TempDir()
		env  = os.Environ()
		have = make(map[string]bool) // the arguments that are declared
	)
	text := strings.ReplaceAll(string(b), "\\\n", " ")
	for line := range strings.Lines(text) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		rest = strings.TrimSpace(rest)
		if name == "" || name[0] == '#' {
			continue
		}
		bad := func(reason any) {
			t.Helper()
			t.Fatalf("Dockerfile: %s %s: %v", name, rest, reason)
		}
		fields := strings.Fields(rest)
		if name == "FROM" {
			base = fields[0]
			if base != "scratch" {
				checkGo(t, base)
			}
			continue
		}
		if base != "scratch" {
			switch name {
			case "WORKDIR": // it is src here
			case "ARG":
				key, value, ok := strings.Cut(rest, "=")
				if !ok {
					bad("want a default")
				}
				if v, ok := args[key]; ok {
					value = v
				}
				have[key], env = true, append(env, key+"="+value)
			case "COPY":
				to := fields[len(fields)-1]
				for _, from := range fields[:len(fields)-1] {
					if err := copyContext(src, from, to); err != nil {
						bad(err)
					}
				}
			case "RUN":
				cmd := exec.Command("sh", "-ec", strings.ReplaceAll(rest, builtIn, out+"/"))
				cmd.Dir, cmd.Env = src, env
				if o, err := cmd.CombinedOutput(); err != nil {
					bad(fmt.Sprintf("%v\n%s", err, o))
				}
			default:
				bad("this instruction is not known to the test")
			}
			continue
		}
		exact := func(list *[]string) {
			t.Helper()
			if err := json.Unmarshal([]byte(rest), list); err != nil || len(*list) == 0 {
				bad("want a list in JSON: there is no shell")
			}
		}
		switch name {
		case "COPY":
			if len(fields) < 3 || fields[0] != "--from=build" {
				bad("want --from=build")
			}
			owner, ok := "0:0", false
			if fields = fields[1:]; len(fields) == 3 {
				if owner, ok = strings.CutPrefix(fields[0], "--chown="); !ok {
					bad("this option is not known to the test")
				}
				fields = fields[1:]
			}
			from, ok := strings.CutPrefix(fields[0], builtIn)
			if !ok || len(fields) != 2 {
				bad("want one path in " + builtIn)
			}
			m.files = append(m.files, copied{from, fields[1], owner})
		case "USER":
			m.user = rest
		case "ENV":
			if len(fields) != 1 || !strings.Contains(rest, "=") {
				bad("want KEY=VALUE")
			}
			m.env = append(m.env, rest)
		case "VOLUME":
			m.volumes = append(m.volumes, fields...)
		case "EXPOSE":
			m.ports = append(m.ports, fields...)
		case "ENTRYPOINT":
			exact(&m.entrypoint)
		case "CMD":
			exact(&m.cmd)
		case "HEALTHCHECK":
			options, command, _ := strings.Cut(rest, "CMD ")
			for _, o := range strings.Fields(options) {
				switch key, value, _ := strings.Cut(o, "="); key {
				case "--timeout":
					m.patience = value
				case "--interval", "--start-period": // when an engine checks
				default:
					bad("the option " + o + " is not known to the test")
				}
			}
			rest = command
			exact(&m.healthcheck)
		default:
			bad("this instruction is not known to the test")
		}
	}
	for key := range args {
		if !have[key] {
			t.Errorf("Dockerfile: no ARG %s", key)
		}
	}
	return &m
}

// checkGo fails t unless an image of Go has the version that go.mod wants.
func checkGo(t *testing.T, image string) {
	t.Helper()
	b, err := exec.Command("go", "list", "-m", "-f", "{{.GoVersion}}").Output()
	if err != nil {
		t.Fatal(err)
	}
	want, got := strings.Split(strings.TrimSpace(string(b)), "."), ""
	if _, err := fmt.Sscanf(image, "golang:%s", &got); err != nil || !strings.HasPrefix(got, strings.Join(want[:2], ".")+"-") {
		t.Errorf("Dockerfile: the base is %s, go.mod wants %s", image, b)
	}
}

// copyContext copies what .dockerignore leaves of the repository's file or directory from
// to the directory to in dir.
func copyContext(dir, from, to string) error {
	b, err := os.ReadFile("../../.dockerignore")
	if err != nil {
		return err
	}
	var patterns []string
	for line := range strings.Lines(string(b)) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			patterns = append(patterns, line)
		}
	}
	// The last pattern that matches a path, or a directory that it is in, decides.
	ignored := func(name string) bool {
		is := false
		for _, p := range patterns {
			p, not := strings.CutPrefix(p, "!")
			p, anywhere := strings.CutPrefix(p, "**/")
			for n := name; n != "."; n = path.Dir(n) {
				part := n
				if anywhere {
					part = path.Base(n)
				}
				if ok, _ := path.Match(p, part); ok {
					is = !not
				}
			}
		}
		return is
	}
	root := os.DirFS("../..")
	return fs.WalkDir(root, path.Clean(from), func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case name == ".":
			return nil
		case d.IsDir() && ignored(name):
			return fs.SkipDir
		case d.IsDir() || ignored(name):
			return nil
		}
		b, err := fs.ReadFile(root, name)
		if err != nil {
			return err
		}
		file := filepath.Join(dir, to, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		return os.WriteFile(file, b, 0o644)
	})
}
