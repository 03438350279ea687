package interop_test

import (
	"crypto/x509"
	"debug/elf"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
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
	labels      map[string]string
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
	b := &imageBuilder{t: t, out: out, args: args, src: t.TempDir(), env: os.Environ(), have: make(map[string]bool), values: make(map[string]string)}
	b.image.labels = make(map[string]string)
	for line := range strings.Lines(strings.ReplaceAll(string(text), "\\\n", " ")) {
		b.instruction, b.rest, _ = strings.Cut(strings.TrimSpace(line), " ")
		b.rest = strings.TrimSpace(b.rest)
		switch {
		case b.instruction == "" || b.instruction[0] == '#':
		case b.instruction == "FROM":
			fields := strings.Fields(b.rest)
			if fields[0] == "--platform=$BUILDPLATFORM" {
				fields = fields[1:]
			}
			b.base = os.Expand(fields[0], b.global)
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
	// values has the arguments of the stage that becomes the image.
	values map[string]string

	instruction, rest string // of the line
}

// bad fails the test because of the instruction.
func (b *imageBuilder) bad(reason any) {
	b.t.Helper()
	b.t.Fatalf("Dockerfile: %s %s: %v", b.instruction, b.rest, reason)
}

// global returns the value of an argument before the first stage.
func (b *imageBuilder) global(name string) string {
	b.t.Helper()
	for _, kv := range b.env {
		if value, ok := strings.CutPrefix(kv, name+"="); ok && b.have[name] {
			return value
		}
	}
	b.bad("no ARG " + name)
	return ""
}

// arg returns the argument that an instruction declares, as KEY=VALUE. Engines set those of the platform.
func (b *imageBuilder) arg() string {
	b.t.Helper()
	key, value, ok := strings.Cut(b.rest, "=")
	platform := map[string]string{"TARGETOS": runtime.GOOS, "TARGETARCH": runtime.GOARCH}[key]
	if ok == (platform != "") {
		b.bad("want a default, except for the platform")
	}
	if platform != "" {
		value = platform
	}
	if v, ok := b.args[key]; ok {
		value = v
	}
	b.have[key] = true
	return key + "=" + value
}

// inBuild carries out an instruction of the stage that builds.
func (b *imageBuilder) inBuild() {
	b.t.Helper()
	switch b.instruction {
	case "WORKDIR": // it is src here
	case "ARG":
		b.env = append(b.env, b.arg())
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
	case "ARG":
		key, value, _ := strings.Cut(b.arg(), "=")
		b.values[key] = value
	case "LABEL":
		key, value, ok := strings.Cut(b.rest, "=")
		text, err := strconv.Unquote(value)
		if !ok || err != nil {
			b.bad("want KEY=\"VALUE\"")
		}
		b.image.labels[key] = os.Expand(text, func(name string) string {
			v, ok := b.values[name]
			if !ok {
				b.bad("the image has no ARG " + name)
			}
			return v
		})
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

// imageForAnotherPlatform makes the image for another platform than the one that builds, with its version in the label. It is a part of TestPackages, which
// has compiled for that platform anyway.
func imageForAnotherPlatform(t *testing.T) {
	out := t.TempDir()
	m := buildImage(t, out, map[string]string{"VERSION": "1.2.3", "REVISION": "0123abc", "TARGETARCH": "arm64"})
	f, err := elf.Open(filepath.Join(out, strings.TrimPrefix(m.entrypoint[0], "/")))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if f.Machine != elf.EM_AARCH64 || f.Section(".interp") != nil {
		t.Errorf("the program is for %v, with the sections %v", f.Machine, f.Sections)
	}
	if m.labels["org.opencontainers.image.version"] != "1.2.3" || m.labels["org.opencontainers.image.revision"] != "0123abc" {
		t.Errorf("labels %q", m.labels)
	}
	for _, label := range []string{"title", "description", "source", "documentation", "licenses"} {
		if m.labels["org.opencontainers.image."+label] == "" {
			t.Errorf("no label %s among %q", label, m.labels)
		}
	}
	// crypto/x509 looks for the CA certificates there.
	i := slices.IndexFunc(m.files, func(f copied) bool { return f.to == "/etc/ssl/certs/ca-certificates.crt" })
	if i < 0 {
		t.Fatalf("no CA certificates among %+v", m.files)
	}
	if b, err := os.ReadFile(filepath.Join(out, m.files[i].from)); err != nil || !x509.NewCertPool().AppendCertsFromPEM(b) {
		t.Errorf("the CA certificates of the image: %d bytes, %v", len(b), err)
	}
}
