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
	text, err := os.ReadFile("../../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	b := &imageBuilder{t: t, out: out, args: args, src: t.TempDir(), env: os.Environ(), have: make(map[string]bool)}
	for line := range strings.Lines(strings.ReplaceAll(string(text), "\\\n", " ")) {
		b.instruction, b.rest, _ = strings.Cut(strings.TrimSpace(line), " ")
		b.rest = strings.TrimSpace(b.rest)
		switch {
		case b.instruction == "" || b.instruction[0] == '#':
		case b.instruction == "FROM":
			b.base = strings.Fields(b.rest)[0]
			if b.base != "scratch" {
				checkGo(t, b.base)
			}
		case b.base == "scratch":
			b.inImage()
		default:
			b.inBuild()
		}
	}
	for key := range args {
		if !b.have[key] {
			t.Errorf("Dockerfile: no ARG %s", key)
		}
	}
	return &b.image
}

// An imageBuilder carries out a Dockerfile.
type imageBuilder struct {
	t     *testing.T
	image image
	out   string            // takes the place of builtIn
	args  map[string]string // values of arguments
	have  map[string]bool   // the arguments that are declared
	src   string            // the working directory of the stage that builds
	env   []string          // of that stage
	base  string            // image of the stage

	instruction, rest string // of the line
}

// bad fails the test because of the instruction.
func (b *imageBuilder) bad(reason any) {
	b.t.Helper()
	b.t.Fatalf("Dockerfile: %s %s: %v", b.instruction, b.rest, reason)
}

// inBuild carries out an instruction of the stage that builds.
func (b *imageBuilder) inBuild() {
	b.t.Helper()
	switch b.instruction {
	case "WORKDIR": // it is src here
	case "ARG":
		key, value, ok := strings.Cut(b.rest, "=")
		if !ok {
			b.bad("want a default")
		}
		if v, ok := b.args[key]; ok {
			value = v
		}
		b.have[key], b.env = true, append(b.env, key+"="+value)
	case "COPY":
		fields := strings.Fields(b.rest)
		to := fields[len(fields)-1]
		for _, from := range fields[:len(fields)-1] {
			if err := copyContext(b.src, from, to); err != nil {
				b.bad(err)
			}
		}
	case "RUN":
		cmd := exec.Command("sh", "-ec", strings.ReplaceAll(b.rest, builtIn, b.out+"/"))
		cmd.Dir, cmd.Env = b.src, b.env
		if o, err := cmd.CombinedOutput(); err != nil {
			b.bad(fmt.Sprintf("%v\n%s", err, o))
		}
	default:
		b.bad("this instruction is not known to the test")
	}
}

// inImage carries out an instruction of the stage that becomes the image.
func (b *imageBuilder) inImage() {
	b.t.Helper()
	fields := strings.Fields(b.rest)
	switch b.instruction {
	case "COPY":
		if len(fields) < 3 || fields[0] != "--from=build" {
			b.bad("want --from=build")
		}
		owner, ok := "0:0", false
		if fields = fields[1:]; len(fields) == 3 {
			if owner, ok = strings.CutPrefix(fields[0], "--chown="); !ok {
				b.bad("this option is not known to the test")
			}
			fields = fields[1:]
		}
		from, ok := strings.CutPrefix(fields[0], builtIn)
		if !ok || len(fields) != 2 {
			b.bad("want one path in " + builtIn)
		}
		b.image.files = append(b.image.files, copied{from, fields[1], owner})
	case "USER":
		b.image.user = b.rest
	case "ENV":
		if len(fields) != 1 || !strings.Contains(b.rest, "=") {
			b.bad("want KEY=VALUE")
		}
		b.image.env = append(b.image.env, b.rest)
	case "VOLUME":
		b.image.volumes = append(b.image.volumes, fields...)
	case "EXPOSE":
		b.image.ports = append(b.image.ports, fields...)
	case "ENTRYPOINT":
		b.image.entrypoint = b.list(b.rest)
	case "CMD":
		b.image.cmd = b.list(b.rest)
	case "HEALTHCHECK":
		options, command, _ := strings.Cut(b.rest, "CMD ")
		for _, o := range strings.Fields(options) {
			switch key, value, _ := strings.Cut(o, "="); key {
			case "--timeout":
				b.image.patience = value
			case "--interval", "--start-period": // when an engine checks
			default:
				b.bad("the option " + o + " is not known to the test")
			}
		}
		b.image.healthcheck = b.list(command)
	default:
		b.bad("this instruction is not known to the test")
	}
}

// list decodes the JSON list of an instruction.
func (b *imageBuilder) list(text string) (list []string) {
	b.t.Helper()
	if err := json.Unmarshal([]byte(text), &list); err != nil || len(list) == 0 {
		b.bad("want a list in JSON: there is no shell")
	}
	return list
}

// checkGo fails t unless an image of Go has the version that go.mod requires.
func checkGo(t *testing.T, image string) {
	t.Helper()
	b, err := exec.Command("go", "list", "-m", "-f", "{{.GoVersion}}").Output()
	if err != nil {
		t.Fatal(err)
	}
	want, got := strings.Split(strings.TrimSpace(string(b)), "."), ""
	if _, err := fmt.Sscanf(image, "golang:%s", &got); err != nil ||
		!strings.HasPrefix(got, strings.Join(want[:2], ".")+"-") {
		t.Errorf("Dockerfile: the base is %s, go.mod requires %s", image, b)
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
