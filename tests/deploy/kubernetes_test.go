package deploy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/iser-target/iser-target/config"

	yamlnodes "go.yaml.in/yaml/v3"
)

const kubernetesDir = "../../packaging/kubernetes"

// manifests decodes the documents of a file, with the keys of the API and no others, into objects by their kinds.
func manifests(t *testing.T, name string, objects map[string]any) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(kubernetesDir, name))
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	for d := yamlnodes.NewDecoder(bytes.NewReader(b)); ; {
		var doc map[string]any
		if err := d.Decode(&doc); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		kind := fmt.Sprint(doc["kind"])
		into, ok := objects[kind]
		if !ok || found[kind] {
			t.Fatalf("%s: a %s that the test does not expect", name, kind)
		}
		found[kind] = true
		text, err := yamlnodes.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		if err := yaml.UnmarshalStrict(text, into); err != nil {
			t.Errorf("%s: %s: %v", name, kind, err)
		}
	}
	if len(found) != len(objects) {
		t.Errorf("%s has %v", name, found)
	}
}

// The objects refer to each other, and the probes to the metrics.
func TestKubernetesManifestFitsTogether(t *testing.T) {
	var ns core.Namespace
	var cm core.ConfigMap
	var set apps.StatefulSet
	manifests(t, "iser-target.yaml", map[string]any{"Namespace": &ns, "ConfigMap": &cm, "StatefulSet": &set})
	if cm.Namespace != ns.Name || set.Namespace != ns.Name {
		t.Errorf("namespaces %q and %q", cm.Namespace, set.Namespace)
	}
	pod := set.Spec.Template
	for key, value := range set.Spec.Selector.MatchLabels {
		if pod.Labels[key] != value {
			t.Errorf("the pod has no label %s=%s", key, value)
		}
	}
	if *set.Spec.Replicas != 1 || !pod.Spec.HostNetwork {
		t.Errorf("replicas %d, host network %v", *set.Spec.Replicas, pod.Spec.HostNetwork)
	}
	if g := *pod.Spec.TerminationGracePeriodSeconds; g < 47 { // see docs/service.md
		t.Errorf("the end of the target takes longer than %d s", g)
	}
	volumes := map[string]bool{}
	for _, v := range pod.Spec.Volumes {
		volumes[v.Name] = true
		if v.ConfigMap != nil && v.ConfigMap.Name != cm.Name {
			t.Errorf("the ConfigMap is %s", v.ConfigMap.Name)
		}
	}
	for _, v := range set.Spec.VolumeClaimTemplates {
		volumes[v.Name] = true
	}
	mounted := map[string]string{}
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		for _, m := range c.VolumeMounts {
			if !volumes[m.Name] {
				t.Errorf("%s mounts %s, which the pod does not have", c.Name, m.Name)
			}
			if c.Name == set.Name {
				mounted[m.MountPath] = m.Name
			}
		}
		if c.SecurityContext == nil || !*c.SecurityContext.ReadOnlyRootFilesystem || !slices.Equal(c.SecurityContext.Capabilities.Drop, []core.Capability{"ALL"}) {
			t.Errorf("%s: %+v", c.Name, c.SecurityContext)
		}
	}
	c := pod.Spec.Containers[0]
	dockerfile, err := os.ReadFile("../../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	user := fmt.Sprintf("USER %d:%d\n", *c.SecurityContext.RunAsUser, *c.SecurityContext.RunAsGroup)
	if !strings.Contains(string(dockerfile), user) || !strings.Contains(strings.Join(pod.Spec.InitContainers[0].Command, " "), strings.Fields(user)[1]+" /var/lib/iser-target") {
		t.Errorf("the image has another user than %s", user)
	}
	file := c.Args[len(c.Args)-1]
	if mounted[filepath.Dir(file)] != "config" || cm.Data[filepath.Base(file)] == "" {
		t.Errorf("%s is not that of the ConfigMap", file)
	}
	cfg := loaded(t, cm.Data[filepath.Base(file)], t.TempDir())
	for _, l := range cfg.Targets[0].LUNs {
		if mounted[filepath.Dir(l.Path)] != "state" {
			t.Errorf("%s is not in the volume", l.Path)
		}
	}
	for _, p := range []*core.Probe{c.ReadinessProbe, c.LivenessProbe} {
		if at := fmt.Sprintf("%s:%d", p.HTTPGet.Host, p.HTTPGet.Port.IntValue()); at != cfg.Metrics.Listen {
			t.Errorf("the probe is at %s, and the metrics at %s", at, cfg.Metrics.Listen)
		}
	}
	if !strings.HasSuffix(cfg.Portals[0].Listen, fmt.Sprintf(":%d", c.Ports[0].ContainerPort)) {
		t.Errorf("port %d, portal %s", c.Ports[0].ContainerPort, cfg.Portals[0].Listen)
	}
}

// loaded returns the configuration of the ConfigMap, with its secrets in dir.
func loaded(t *testing.T, text, dir string) *config.Config {
	t.Helper()
	secret, file := filepath.Join(dir, "nodes"), filepath.Join(dir, "config.yaml")
	if !strings.Contains(text, "/run/chap/nodes") {
		t.Fatal("the secret is elsewhere")
	}
	text = strings.ReplaceAll(text, "/run/chap/nodes", secret)
	if err := errors.Join(os.WriteFile(secret, []byte("0123456789abcdef0123456789abcdef\n"), 0o600), os.WriteFile(file, []byte(text), 0o600)); err != nil {
		t.Fatal(err)
	}
	cfg, err := config.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// The kubelet replaces a directory behind a symbolic link. The target applies what is new there.
func TestConfigMapAppliesWithoutRestart(t *testing.T) {
	var cm core.ConfigMap
	manifests(t, "iser-target.yaml", map[string]any{"Namespace": &core.Namespace{}, "ConfigMap": &cm, "StatefulSet": &apps.StatefulSet{}})
	dir := t.TempDir()
	socket, metrics, portal := filepath.Join(dir, "s"), freeAddress(t), freeAddress(t)
	text := strings.NewReplacer("/run/chap/nodes", filepath.Join(dir, "nodes"), "/var/lib/iser-target", dir, "127.0.0.1:9860", metrics, "0.0.0.0:3260", portal).Replace(cm.Data["config.yaml"])
	if err := os.WriteFile(filepath.Join(dir, "nodes"), []byte("0123456789abcdef0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	mount := filepath.Join(dir, "etc")
	// version makes a version of the volume the present one, in the way of the kubelet.
	version := func(name, text string) {
		t.Helper()
		tmp := filepath.Join(mount, "..data_tmp")
		if err := errors.Join(os.MkdirAll(filepath.Join(mount, name), 0o755), os.WriteFile(filepath.Join(mount, name, "config.yaml"), []byte(text), 0o644),
			os.Symlink(name, tmp), os.Rename(tmp, filepath.Join(mount, "..data"))); err != nil {
			t.Fatal(err)
		}
	}
	version("..2026_1", text)
	if err := os.Symlink("..data/config.yaml", filepath.Join(mount, "config.yaml")); err != nil {
		t.Fatal(err)
	}
	exe := program(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, exe, "serve", "--config", filepath.Join(mount, "config.yaml"))
	cmd.Env = append(os.Environ(), "ISER_TARGET_STATE_DIR="+dir, "ISER_TARGET_CONTROL_SOCKET="+socket)
	var log strings.Builder
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	await := func(want string) {
		t.Helper()
		for get("http://"+metrics+"/readyz") != want {
			select {
			case err := <-ended:
				t.Fatalf("the target has ended before %q: %v\n%s", want, err, log.String())
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
	await("serving: sessions 0, targets 1, LUNs 1\n")
	version("..2026_2", strings.Replace(text, "    luns:\n", "    luns:\n      - {id: 1, backend: memory, size: 1MiB}\n", 1))
	if err := os.RemoveAll(filepath.Join(mount, "..2026_1")); err != nil {
		t.Fatal(err)
	}
	await("serving: sessions 0, targets 1, LUNs 2\n")
	cmd.Process.Signal(syscall.SIGTERM)
	if err := <-ended; err != nil {
		t.Errorf("%v\n%s", err, log.String())
	}
}

// The volume of csi-driver-iscsi has the attributes that the driver reads, and the claim and the pod belong to it.
func TestCSIVolumeFitsTogether(t *testing.T) {
	var pv core.PersistentVolume
	var claim core.PersistentVolumeClaim
	var pod core.Pod
	manifests(t, "csi-volume.yaml", map[string]any{"PersistentVolume": &pv, "PersistentVolumeClaim": &claim, "Pod": &pod})
	a := pv.Spec.CSI.VolumeAttributes
	// What getISCSIInfo of the driver reads, without the CHAP secrets.
	known := []string{"targetPortal", "portals", "iqn", "lun", "iscsiInterface", "initiatorName", "discovery", "discoveryCHAPAuth", "sessionCHAPAuth"}
	for key := range a {
		if !slices.Contains(known, key) {
			t.Errorf("the driver does not read %s", key)
		}
	}
	var portals []string
	if err := yaml.UnmarshalStrict([]byte(a["portals"]), &portals); err != nil || a["targetPortal"] == "" || a["iqn"]+"/"+a["lun"] != pv.Spec.CSI.VolumeHandle {
		t.Errorf("%q, %v", a, err)
	}
	if claim.Spec.VolumeName != pv.Name || pv.Spec.ClaimRef.Name != claim.Name || pv.Spec.ClaimRef.Namespace != claim.Namespace || *claim.Spec.StorageClassName != pv.Spec.StorageClassName {
		t.Errorf("the claim %s is for %s", claim.Name, claim.Spec.VolumeName)
	}
	if got := pod.Spec.Volumes[0].PersistentVolumeClaim.ClaimName; got != claim.Name || pod.Namespace != claim.Namespace {
		t.Errorf("the pod uses %s", got)
	}
}
