package deploy

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/backend/backendtest"
	"go.yaml.in/yaml/v3"
)

// Each case makes one alert fire: its series, in promtool's notation, with one sample a minute.
var alertCases = map[string][]string{
	"IserTargetDown":         {`up{job="iser-target"} 0x40`},
	"IserTargetReloadFailed": {`iser_target_config_last_reload_successful 0x40`},
	"IserTargetLUNNotReady":  {`iser_target_lun_ready{target="t",lun="0"} 0x40`},
	"IserTargetLUNUnhealthy": {`iser_target_lun_health{target="t",lun="0",health="failed"} 1x40`},
	"IserTargetLUNDegraded":  {`iser_target_lun_health{target="t",lun="0",health="degraded"} 1x40`},
	"IserTargetLUNThreshold": {`iser_target_lun_threshold_reached{target="t",lun="0",threshold="available"} 1x40`},
	"IserTargetLUNSpaceLow": {
		`iser_target_lun_space_available_bytes{target="t",lun="0"} 40x40`,
		`iser_target_lun_size_bytes{target="t",lun="0"} 1000x40`,
		`iser_target_lun_space_used_bytes{target="t",lun="0"} 500x40`,
	},
	"IserTargetLUNCorrupt":       {`iser_target_lun_corrupt_blocks{target="t",lun="0"} 1x40`},
	"IserTargetStoreHangs":       {`iser_target_lun_store_hung{target="t",lun="0"} 1x40`},
	"IserTargetCommandsDetached": {`iser_target_detached_commands 1x40`},
	"IserTargetFencingSlow": {
		`iser_target_fencing_duration_seconds_count{function="lun_reset"} 0x30 1x10`,
		`iser_target_fencing_duration_seconds_bucket{function="lun_reset",le="2.147483648"} 0x40`,
	},
	"IserTargetMediumErrors":    {`iser_target_lun_errors_total{target="t",lun="0",op="read",sense_key="medium_error"} 0x30 1x10`},
	"IserTargetCommandsAborted": {`iser_target_lun_commands_aborted_total{target="t",lun="0"} 0+10x40`},
	"IserTargetStalled": {
		`iser_target_lun_commands_in_flight{target="t",lun="0"} 3x40`,
		`iser_target_lun_commands_total{target="t",lun="0",op="read"} 7x40`,
	},
	"IserTargetSlowBackend": {
		`iser_target_lun_command_duration_seconds_bucket{target="t",lun="0",phase="backend",le="0.268435456"} 0+10x40`,
		`iser_target_lun_command_duration_seconds_bucket{target="t",lun="0",phase="backend",le="1.073741824"} 0+100x40`,
		`iser_target_lun_command_duration_seconds_bucket{target="t",lun="0",phase="backend",le="+Inf"} 0+100x40`,
	},
	"IserTargetSlowNetwork": {
		`iser_target_command_duration_seconds_bucket{transport="tcp",phase="send",le="0.268435456"} 0+10x40`,
		`iser_target_command_duration_seconds_bucket{transport="tcp",phase="send",le="1.073741824"} 0+100x40`,
		`iser_target_command_duration_seconds_bucket{transport="tcp",phase="send",le="+Inf"} 0+100x40`,
	},
	"IserTargetLoginsRefused": {`iser_target_logins_refused_total{status="authentication_failure"} 0+1x40`},
	"IserTargetBuffersFull": {
		`iser_target_session_buffer_bytes{initiator="i",tsih="1"} 99x40`,
		`iser_target_session_buffer_limit_bytes{initiator="i",tsih="1"} 100x40`,
	},
	"IserTargetLimitNear": {
		`iser_target_limit_used{limit="sessions"} 95x40`,
		`iser_target_limit_max{limit="sessions"} 100x40`,
	},
	"IserTargetClusterNotJoined":      {`iser_target_cluster_joined 0x40`},
	"IserTargetClusterConfigOld":      {`iser_target_cluster_config_current 0x40`},
	"IserTargetSharedLUNNotServed":    {`iser_target_shared_lun_here{target="t",lun="1"} 0x40`},
	"IserTargetLimitReached":          {`iser_target_limit_reached_total{limit="sessions"} 0x30 1x10`},
	"IserTargetCertificateExpires":    {`iser_target_certificate_expires_timestamp_seconds{key="control.tls.cert"} 1000000x40`},
	"IserTargetRevocationListExpires": {`iser_target_certificate_expires_timestamp_seconds{key="control.tls.crl"} 80000x40`},
	"IserTargetCRCErrors":             {`iser_target_rdma_crc_errors_total 0x30 1x10`},
	"IserTargetTerminates":            {`iser_target_rdma_terminates_total{direction="sent",reason="x"} 0x30 5x10`},
	"IserTargetSTagFaults":            {`iser_target_rdma_stag_faults_total 0x30 1x10`},
}

// quiet has the same series of a target where all is well.
var quiet = []string{
	`up{job="iser-target"} 1x40`,
	`iser_target_config_last_reload_successful 1x40`,
	`iser_target_lun_ready{target="t",lun="0"} 1x40`,
	`iser_target_lun_health{target="t",lun="0",health="failed"} 0x40`,
	`iser_target_lun_health{target="t",lun="0",health="degraded"} 0x40`,
	`iser_target_lun_threshold_reached{target="t",lun="0",threshold="available"} 0x40`,
	`iser_target_lun_space_available_bytes{target="t",lun="0"} 40x40`, // enough for what the LUN lacks
	`iser_target_lun_size_bytes{target="t",lun="0"} 1000x40`,
	`iser_target_lun_space_used_bytes{target="t",lun="0"} 980x40`,
	`iser_target_lun_corrupt_blocks{target="t",lun="0"} 0x40`,
	`iser_target_lun_store_hung{target="t",lun="0"} 0x40`,
	`iser_target_detached_commands 0x40`,
	`iser_target_fencing_duration_seconds_count{function="lun_reset"} 0x30 1x10`,
	`iser_target_fencing_duration_seconds_bucket{function="lun_reset",le="2.147483648"} 0x30 1x10`,
	`iser_target_lun_errors_total{target="t",lun="0",op="read",sense_key="illegal_request"} 0x30 1x10`,
	`iser_target_lun_commands_aborted_total{target="t",lun="0"} 0x40`,
	`iser_target_lun_commands_in_flight{target="t",lun="0"} 3x40`,
	`iser_target_lun_commands_total{target="t",lun="0",op="read"} 0+100x40`,
	`iser_target_lun_command_duration_seconds_bucket{target="t",lun="0",phase="backend",le="0.001048576"} 0+100x40`,
	`iser_target_lun_command_duration_seconds_bucket{target="t",lun="0",phase="backend",le="+Inf"} 0+100x40`,
	`iser_target_command_duration_seconds_bucket{transport="tcp",phase="send",le="0.001048576"} 0+100x40`,
	`iser_target_command_duration_seconds_bucket{transport="tcp",phase="send",le="+Inf"} 0+100x40`,
	`iser_target_logins_refused_total{status="authentication_failure"} 0x30 1x10`,
	`iser_target_session_buffer_bytes{initiator="i",tsih="1"} 9x40`,
	`iser_target_session_buffer_limit_bytes{initiator="i",tsih="1"} 100x40`,
	`iser_target_cluster_joined 1x40`,
	`iser_target_cluster_config_current 1x40`,
	`iser_target_shared_lun_here{target="t",lun="0"} 1x40`,
	`iser_target_limit_used{limit="sessions"} 5x40`,
	`iser_target_limit_max{limit="sessions"} 100x40`,
	`iser_target_limit_used{limit="off"} 5x40`,
	`iser_target_limit_max{limit="off"} 0x40`,
	`iser_target_limit_reached_total{limit="sessions"} 0x40`,
	`iser_target_certificate_expires_timestamp_seconds{key="control.tls.cert"} 99999999x40`,
	`iser_target_certificate_expires_timestamp_seconds{key="control.tls.crl"} 99999999x40`,
	`iser_target_rdma_crc_errors_total 0x40`,
	`iser_target_rdma_terminates_total{direction="sent",reason="x"} 0x30 1x10`,
	`iser_target_rdma_stag_faults_total 0x40`,
}

type promSeries struct {
	Series string `yaml:"series"`
	Values string `yaml:"values"`
}

// on returns series of an instance.
func on(instance string, list []string) (s []promSeries) {
	for _, l := range list {
		i := strings.Index(l, " ")
		if j := strings.LastIndex(l, "}"); j > 0 {
			i = j + 1
		}
		name, labels, _ := strings.Cut(strings.TrimSuffix(l[:i], "}"), "{")
		s = append(s, promSeries{fmt.Sprintf("%s{instance=%q,%s}", name, instance, labels), l[i+1:]})
	}
	return s
}

// promtool of Prometheus accepts the alert rules. Each fires for a target that is like its case, and none for another one where all
// is well.
func TestAlertsByPromtool(t *testing.T) {
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		backendtest.Unavailable(t, "%v (tests/interop/setup.sh installs it)", err)
	}
	rules, err := filepath.Abs("../../docs/alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(rules)
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile(`(?m)^      - alert: (\S+)$`).FindAllSubmatch(text, -1)
	if len(names) != len(alertCases) {
		t.Errorf("%d alerts, and cases for %d", len(names), len(alertCases))
	}
	type sample struct {
		Labels string  `yaml:"labels"`
		Value  float64 `yaml:"value"`
	}
	type expr struct {
		Expr string   `yaml:"expr"`
		At   string   `yaml:"eval_time"`
		Want []sample `yaml:"exp_samples"`
	}
	type group struct {
		Interval string       `yaml:"interval"`
		Series   []promSeries `yaml:"input_series"`
		Exprs    []expr       `yaml:"promql_expr_test"`
	}
	var groups []group
	for _, m := range names {
		name := string(m[1])
		bad := alertCases[name]
		if bad == nil {
			t.Errorf("no case for %s", name)
			continue
		}
		groups = append(groups, group{
			Interval: "1m", Series: append(on("bad", bad), on("good", quiet)...),
			Exprs: []expr{{
				Expr: `count by (alertname) (ALERTS{alertstate="firing"})`, At: "31m",
				Want: []sample{{Labels: fmt.Sprintf("{alertname=%q}", name), Value: 1}},
			}},
		})
	}
	run := func(groups []group) (string, error) {
		b, err := yaml.Marshal(map[string]any{"rule_files": []string{rules}, "evaluation_interval": "1m", "tests": groups})
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(t.TempDir(), "test.yaml")
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := exec.CommandContext(t.Context(), promtool, "test", "rules", file).CombinedOutput()
		return string(out), err
	}
	for _, args := range [][]string{{"rules", rules}, {"config", "--syntax-only", "../../examples/compose/prometheus.yaml"}} {
		if out, err := exec.CommandContext(t.Context(), promtool, append([]string{"check"}, args...)...).CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	}
	if out, err := run(groups); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	groups[0].Exprs[0].Want[0].Value = 2
	if out, err := run(groups[:1]); err == nil || !strings.Contains(out, "IserTargetDown") {
		t.Errorf("promtool finds no difference where there is one: %v\n%s", err, out)
	}
}
