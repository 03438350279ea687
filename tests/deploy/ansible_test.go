package deploy

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/config"
)

const (
	ansibleDir = "../../packaging/ansible"
	roleDir    = ansibleDir + "/roles/iser_target"
)

func readText(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// The role uses the variables that it has, and notifies handlers that exist.
func TestAnsibleRoleFitsTogether(t *testing.T) {
	var defaults map[string]any
	readYAML(t, roleDir+"/defaults/main.yaml", &defaults)
	var tasks, handlers []map[string]any
	readYAML(t, roleDir+"/tasks/main.yaml", &tasks)
	readYAML(t, roleDir+"/handlers/main.yaml", &handlers)
	variable := regexp.MustCompile(`\biser_target_\w+`)
	used := variable.FindAllString(readText(t, roleDir+"/tasks/main.yaml")+readText(t, roleDir+"/handlers/main.yaml"), -1)
	for name := range defaults {
		if !slices.Contains(used, name) {
			t.Errorf("nothing uses %s", name)
		}
	}
	for _, name := range used {
		if _, ok := defaults[name]; !ok {
			t.Errorf("%s has no default", name)
		}
	}
	notified := map[string]bool{}
	for _, task := range tasks {
		if name, ok := task["notify"].(string); ok {
			notified[name] = true
		}
	}
	for _, h := range handlers {
		if name := fmt.Sprint(h["name"]); !notified[name] {
			t.Errorf("nothing notifies %q", name)
		} else {
			delete(notified, name)
		}
	}
	for name := range notified {
		t.Errorf("there is no handler %q", name)
	}
}

// The configuration of the example is one, with the secrets where the role writes them.
func TestAnsibleExampleIsAConfiguration(t *testing.T) {
	var plays []struct {
		Name, Hosts string
		Become      bool
		Roles       []struct {
			Role string
			Vars struct {
				Package string            `yaml:"iser_target_package"`
				Secrets map[string]string `yaml:"iser_target_secrets"`
				Config  map[string]any    `yaml:"iser_target_config"`
			}
		}
	}
	readYAML(t, ansibleDir+"/site.yaml", &plays)
	role := plays[0].Roles[0]
	if filepath.Base(roleDir) != role.Role {
		t.Errorf("role %s", role.Role)
	}
	b, err := yaml.Marshal(role.Vars.Config)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	text, file := strings.ReplaceAll(string(b), "/etc/iser-target", dir), filepath.Join(dir, "config.yaml")
	for name := range role.Vars.Secrets {
		err = errors.Join(err, os.WriteFile(filepath.Join(dir, name+".secret"), []byte("0123456789abcdef0123456789abcdef\n"), 0o600))
	}
	if err := errors.Join(err, os.WriteFile(file, []byte(text), 0o600)); err != nil {
		t.Fatal(err)
	}
	cfg, err := config.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	if files := cfg.SecretFiles(); len(files) != len(role.Vars.Secrets) || len(files) == 0 {
		t.Errorf("secret files %q", files)
	}
}

// Ansible accepts the playbook, the role and each module's name.
func TestAnsibleSyntax(t *testing.T) {
	ansible, err := exec.LookPath("ansible-playbook")
	if err != nil {
		backendtest.Unavailable(t, "%v (tests/interop/setup.sh installs it)", err)
	}
	check := func(dir string) (string, error) {
		cmd := exec.CommandContext(t.Context(), ansible, "-i", "localhost,", "--syntax-check", "site.yaml")
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "ANSIBLE_NOCOLOR=1", "LC_ALL=C.UTF-8", "ANSIBLE_LOCAL_TEMP="+t.TempDir())
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := check(ansibleDir); err != nil || strings.Contains(out, "WARNING") {
		t.Errorf("%v\n%s", err, out)
	}
	// It refuses a module that does not exist.
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(ansibleDir)); err != nil {
		t.Fatal(err)
	}
	tasks := filepath.Join(dir, "roles/iser_target/tasks/main.yaml")
	wrong := strings.Replace(readText(t, tasks), "ansible.builtin.copy", "ansible.builtin.kopy", 1)
	if err := os.WriteFile(tasks, []byte(wrong), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := check(dir); err == nil {
		t.Errorf("a wrong module passes:\n%s", out)
	}
}
