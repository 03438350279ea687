// Package etcdserver runs Debian's etcd for tests.
package etcdserver

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A Member is one process of a cluster. Its methods fail the test that started it.
type Member struct {
	t      testing.TB
	name   string
	dir    string
	host   string
	args   []string
	scheme string
	cmd    *exec.Cmd
	ended  chan struct{}
	log    testkit.Log
}

// TLS names files in PEM: the CA that signs clients, and the certificate and key of the members.
type TLS struct{ CA, Cert, Key string }

// Start starts a cluster of so many members on loopback addresses of its own, and waits until it is healthy. It ends
// with the test. The test is skipped without etcd, or fails if the environment requires all tests.
func Start(t testing.TB, members int) []*Member {
	t.Helper()
	var hosts []string
	for range members {
		hosts = append(hosts, Host())
	}
	return StartAt(t, nil, hosts...)
}

// Host returns a loopback address for a member. All of 127.0.0.0/8 is on lo, and nobody else has the ports of such an
// address.
func Host() string {
	return fmt.Sprintf("127.%d.%d.%d", 1+rand.IntN(254), rand.IntN(256), 1+rand.IntN(254))
}

// StartAt does what Start does with a member at each of the hosts. With tls, clients need certificates.
func StartAt(t testing.TB, tls *TLS, hosts ...string) []*Member {
	t.Helper()
	if _, err := exec.LookPath("etcd"); err != nil {
		backendtest.Unavailable(t, "%v (tests/interop/setup.sh installs etcd-server)", err)
	}
	scheme := "http"
	if tls != nil {
		scheme = "https"
	}
	var list []*Member
	var peers []string
	for i, host := range hosts {
		m := &Member{t: t, name: fmt.Sprint("m", i), dir: t.TempDir(), scheme: scheme, host: host}
		peers = append(peers, fmt.Sprintf("%s=http://%s:2380", m.name, m.host))
		list = append(list, m)
	}
	for _, m := range list {
		m.args = []string{"--name", m.name, "--data-dir", filepath.Join(m.dir, "data"), "--log-level", "warn", "--logger", "zap",
			"--listen-client-urls", m.Endpoint(), "--advertise-client-urls", m.Endpoint(), "--listen-metrics-urls", "http://" + m.host + ":2381",
			"--listen-peer-urls", "http://" + m.host + ":2380", "--initial-advertise-peer-urls", "http://" + m.host + ":2380",
			"--initial-cluster", strings.Join(peers, ","), "--initial-cluster-state", "new"}
		if tls != nil {
			m.args = append(m.args, "--cert-file", tls.Cert, "--key-file", tls.Key, "--trusted-ca-file", tls.CA, "--client-cert-auth")
		}
		m.Start()
		t.Cleanup(m.Kill)
	}
	for _, m := range list {
		m.WaitHealthy()
	}
	return list
}

// Endpoints returns the URLs for clients.
func Endpoints(members []*Member) (urls []string) {
	for _, m := range members {
		urls = append(urls, m.Endpoint())
	}
	return urls
}

// Endpoint returns the URL for clients.
func (m *Member) Endpoint() string { return m.scheme + "://" + m.host + ":2379" }

// PID returns the ID of the process.
func (m *Member) PID() int { return m.cmd.Process.Pid }

// Start starts a member that was killed, with its data.
func (m *Member) Start() {
	m.t.Helper()
	m.cmd = exec.Command("etcd", m.args...)
	m.cmd.Env = []string{"PATH=/usr/bin:/bin"}
	m.cmd.Stdout, m.cmd.Stderr = &m.log, &m.log
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := m.cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	ended, cmd := make(chan struct{}), m.cmd
	m.ended = ended
	go func() {
		cmd.Wait()
		close(ended)
	}()
}

// WaitHealthy waits until the member has a leader and answers.
func (m *Member) WaitHealthy() {
	m.t.Helper()
	m.eventually("etcd is healthy", func() bool {
		body, err := m.get("/health")
		return err == nil && bytes.Contains(body, []byte(`"health":"true"`))
	})
}

// IsLeader reports whether the member leads the cluster.
func (m *Member) IsLeader() bool {
	body, err := m.get("/metrics")
	return err == nil && bytes.Contains(body, []byte("\netcd_server_is_leader 1\n"))
}

func (m *Member) get(path string) ([]byte, error) {
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get("http://" + m.host + ":2381" + path)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

// Leases returns the IDs of all leases that have not ended.
func (m *Member) Leases() (ids []string) {
	m.t.Helper()
	var answer struct{ Leases []struct{ ID string } }
	m.post("/v3/lease/leases", struct{}{}, &answer)
	for _, l := range answer.Leases {
		ids = append(ids, l.ID)
	}
	return ids
}

// LeaseOf returns the ID of the lease of a key, or "" if the key does not exist or has none.
func (m *Member) LeaseOf(key string) string {
	m.t.Helper()
	var answer struct{ Kvs []struct{ Lease string } }
	m.post("/v3/kv/range", map[string][]byte{"key": []byte(key)}, &answer)
	if len(answer.Kvs) == 0 {
		return ""
	}
	return answer.Kvs[0].Lease
}

// post calls the JSON gateway of etcd, without TLS.
func (m *Member) post(path string, question, answer any) {
	m.t.Helper()
	body, err := json.Marshal(question)
	if err != nil {
		m.t.Fatal(err)
	}
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Post(m.Endpoint()+path, "application/json", bytes.NewReader(body))
	if err != nil {
		m.t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		m.t.Fatalf("etcd %s: %s: %s", m.name, path, resp.Status)
	}
	if err := json.NewDecoder(resp.Body).Decode(answer); err != nil {
		m.t.Fatalf("etcd %s: %s: %v", m.name, path, err)
	}
}

// eventually waits as long as the process runs.
func (m *Member) eventually(what string, f func() bool) {
	m.t.Helper()
	testkit.Eventually(m.t, what, func() bool {
		select {
		case <-m.ended:
			m.t.Fatalf("etcd %s has ended:\n%s", m.name, m.log.String())
		default:
		}
		return f()
	})
}

// Freeze stops the process as it is. It returns when all its threads have stopped.
func (m *Member) Freeze() {
	m.t.Helper()
	m.signal(syscall.SIGSTOP)
	m.eventually("all threads have stopped", func() bool {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", m.cmd.Process.Pid))
		if err != nil || len(threads) == 0 {
			return false
		}
		for _, path := range threads {
			b, err := os.ReadFile(path)
			// The state follows the name, which is in parentheses (proc_pid_stat(5)).
			if i := bytes.LastIndexByte(b, ')'); err != nil || !bytes.HasPrefix(b[i+1:], []byte(" T ")) {
				return false
			}
		}
		return true
	})
}

// Thaw lets a frozen process continue.
func (m *Member) Thaw() { m.signal(syscall.SIGCONT) }

func (m *Member) signal(s syscall.Signal) {
	m.t.Helper()
	if err := m.cmd.Process.Signal(s); err != nil {
		m.t.Fatalf("signal %v to etcd %s: %v\n%s", s, m.name, err, m.log.String())
	}
}

// Kill ends the process by SIGKILL, if it runs, and waits for its end.
func (m *Member) Kill() {
	m.cmd.Process.Kill()
	<-m.ended
}
