package deploy

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
	"go.yaml.in/yaml/v3"

	"github.com/iser-target/iser-target/tests/testkit/ports"
)

const composeDir = "../../examples/compose"

// readYAML decodes a file with these keys and no others.
func readYAML(t *testing.T, path string, into any) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	d := yaml.NewDecoder(f)
	d.KnownFields(true)
	if err := d.Decode(into); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

// project returns the services of compose.yaml, as Docker Compose reads them.
func project(t *testing.T) *types.Project {
	t.Helper()
	o, err := cli.NewProjectOptions([]string{filepath.Join(composeDir, "compose.yaml")})
	if err != nil {
		t.Fatal(err)
	}
	p, err := o.LoadProject(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// mounts returns the files of the repository that a service mounts, by their paths in the container.
func mounts(t *testing.T, s types.ServiceConfig) map[string]string {
	t.Helper()
	files := map[string]string{}
	for _, v := range s.Volumes {
		if v.Type != types.VolumeTypeBind {
			continue
		}
		files[v.Target] = v.Source
		if fi, err := os.Stat(v.Source); err != nil || !fi.Mode().IsRegular() {
			t.Errorf("%s mounts %s: %v", s.Name, v.Source, err)
		}
		if !v.ReadOnly {
			t.Errorf("%s can write to %s", s.Name, v.Source)
		}
	}
	return files
}

// flagOf returns the value of a flag of the form --name=value.
func flagOf(t *testing.T, s types.ServiceConfig, name string) string {
	t.Helper()
	for _, a := range s.Command {
		if v, ok := strings.CutPrefix(a, name+"="); ok {
			return v
		}
	}
	t.Errorf("%s has no %s", s.Name, name)
	return ""
}

// Prometheus scrapes the target and has its alerts, and Grafana has Prometheus and the dashboard.
func TestComposeFilesFitTogether(t *testing.T) {
	p := project(t)
	target, prometheus, grafana := p.Services["target"], p.Services["prometheus"], p.Services["grafana"]
	if len(p.Services) != 3 {
		t.Fatalf("services %v", p.ServiceNames())
	}
	for _, s := range p.Services {
		if s.NetworkMode != "host" {
			t.Errorf("%s: network %s", s.Name, s.NetworkMode)
		}
		if s.Image == "" || s.Build == nil && !regexp.MustCompile(`:v?\d+\.\d+\.\d+$`).MatchString(s.Image) {
			t.Errorf("%s: image %q has no version", s.Name, s.Image)
		}
	}
	if _, err := os.Stat(filepath.Join(target.Build.Context, target.Build.Dockerfile)); err != nil {
		t.Error(err)
	}
	// docs/service.md: synchronizing takes up to 10 s, sessions 12 s, and backends 25 s.
	if d := target.StopGracePeriod; d == nil || time.Duration(*d) < 47*time.Second {
		t.Errorf("stop_grace_period %v", d)
	}

	scraped := *target.Environment["ISER_TARGET_METRICS_LISTEN"]
	files := mounts(t, prometheus)
	var scrape struct {
		Global    map[string]string `yaml:"global"`
		RuleFiles []string          `yaml:"rule_files"`
		Jobs      []struct {
			Name   string                       `yaml:"job_name"`
			Static []struct{ Targets []string } `yaml:"static_configs"`
		} `yaml:"scrape_configs"`
	}
	readYAML(t, files[flagOf(t, prometheus, "--config.file")], &scrape)
	if len(scrape.Jobs) != 1 || len(scrape.Jobs[0].Static) != 1 || !slices.Equal(scrape.Jobs[0].Static[0].Targets, []string{scraped}) {
		t.Fatalf("Prometheus scrapes %+v, and the target listens on %s", scrape.Jobs, scraped)
	}
	if len(scrape.RuleFiles) != 1 || filepath.Base(files[scrape.RuleFiles[0]]) != "alerts.yaml" {
		t.Fatalf("rules %q, and mounts %q", scrape.RuleFiles, files)
	}
	rules, err := os.ReadFile(files[scrape.RuleFiles[0]])
	if err != nil {
		t.Fatal(err)
	}
	jobs := regexp.MustCompile(`job="([^"]*)"`).FindAllStringSubmatch(string(rules), -1)
	for _, m := range jobs {
		if m[1] != scrape.Jobs[0].Name {
			t.Errorf("the alerts use the job %s, which is %s", m[1], scrape.Jobs[0].Name)
		}
	}
	if len(jobs) == 0 {
		t.Error("no alert uses a job")
	}

	files = mounts(t, grafana)
	var sources struct {
		Version int `yaml:"apiVersion"`
		Sources []struct {
			Name, Type, Access, URL string
			Default                 bool `yaml:"isDefault"`
			Editable                bool
		} `yaml:"datasources"`
	}
	var dashboards struct {
		Version   int `yaml:"apiVersion"`
		Providers []struct {
			Name, Type string
			Options    struct{ Path string }
		}
	}
	const provisioning = "/etc/grafana/provisioning/" // Grafana reads it without any setting
	readYAML(t, files[provisioning+"datasources/iser-target.yaml"], &sources)
	readYAML(t, files[provisioning+"dashboards/iser-target.yaml"], &dashboards)
	if u, err := url.Parse(sources.Sources[0].URL); err != nil || u.Host != flagOf(t, prometheus, "--web.listen-address") || sources.Sources[0].Type != "prometheus" || !sources.Sources[0].Default {
		t.Errorf("data source %+v, %v", sources.Sources[0], err)
	}
	home := *grafana.Environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
	if dir := dashboards.Providers[0].Options.Path; filepath.Dir(home) != dir || files[home] == "" {
		t.Errorf("dashboards are in %s, the home is %s, and the mounts are %q", dir, home, files)
	}
	b, err := os.ReadFile(files[home])
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		UID        string
		Templating struct {
			List []struct{ Name, Type, Query any }
		}
	}
	if err := json.Unmarshal(b, &dashboard); err != nil || dashboard.UID == "" {
		t.Errorf("dashboard %+v, %v", dashboard, err)
	}
	if v := dashboard.Templating.List[0]; v.Type != "datasource" || v.Query != sources.Sources[0].Type {
		t.Errorf("the dashboard looks for %+v", v)
	}
	for key, want := range map[string]string{"GF_SERVER_HTTP_ADDR": "127.0.0.1", "GF_SERVER_HTTP_PORT": "3000"} {
		if v := grafana.Environment[key]; v == nil || *v != want {
			t.Errorf("%s is not %s", key, want)
		}
	}
}

// The program takes the command and the environment of compose.yaml, and serves the metrics that Prometheus scrapes.
func TestComposeCommandServes(t *testing.T) {
	dir := t.TempDir()
	target := project(t).Services["target"]
	const state = "/var/lib/iser-target"
	var args []string
	for _, a := range target.Command {
		if a == ":3260" {
			a = freeAddress(t)
		}
		args = append(args, strings.Replace(a, state, dir, 1))
	}
	exe := program(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, exe, args...)
	cmd.Env = append(os.Environ(), "ISER_TARGET_STATE_DIR="+dir, "ISER_TARGET_CONTROL_SOCKET="+filepath.Join(dir, "s"))
	var metrics, page string
	for key, value := range target.Environment {
		at := freeAddress(t)
		switch key {
		case "ISER_TARGET_METRICS_LISTEN":
			metrics = at
		case "ISER_TARGET_DASHBOARD_LISTEN":
			page = at
		default:
			t.Fatalf("unknown variable %s=%s", key, *value)
		}
		cmd.Env = append(cmd.Env, key+"="+at)
	}
	var log strings.Builder
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for path, want := range map[string]string{metrics + "/metrics": "iser_target_lun_ready{", page + "/readyz": "serving: sessions 0, targets 1, LUNs 1\n"} {
		for {
			if body := get("http://" + path); strings.Contains(body, want) {
				break
			}
			select {
			case err := <-ended:
				t.Fatalf("the target has ended: %v\n%s", err, log.String())
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
	cmd.Process.Signal(syscall.SIGTERM)
	if err := <-ended; err != nil {
		t.Errorf("%v\n%s", err, log.String())
	}
	if fi, err := os.Stat(filepath.Join(dir, "disk.img")); err != nil || fi.Size() != 10<<30 {
		t.Errorf("disk: %v", err)
	}
}

// get returns what a server answers, or nothing.
func get(at string) string {
	resp, err := http.Get(at)
	if err != nil {
		return ""
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return ""
	}
	return string(b)
}

// freeAddress returns an address on the loopback that nobody listens on.
func freeAddress(t *testing.T) string {
	t.Helper()
	addr, err := ports.FreeAddress()
	if err != nil {
		t.Fatal(err)
	}
	return addr
}
