package nbd

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/tests/testkit"
	"golang.org/x/sys/unix"
)

// A program is a server of others, on a socket.
type program struct {
	t      *testing.T
	socket string
	args   []string
	cmd    *exec.Cmd
	out    bytes.Buffer
}

// startProgram starts a server. SOCKET in its arguments becomes the socket, and DIR a directory of the test.
func startProgram(t *testing.T, args ...string) *program {
	t.Helper()
	if _, err := exec.LookPath(args[0]); err != nil {
		backendtest.Unavailable(t, "%v. apt-get install nbdkit qemu-utils qemu-system-x86", err)
	}
	dir := t.TempDir()
	p := &program{t: t, socket: filepath.Join(dir, "socket")}
	for _, a := range args {
		p.args = append(p.args, strings.NewReplacer("SOCKET", p.socket, "DIR", dir).Replace(a))
	}
	p.start()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("%s: %s", args[0], &p.out)
		}
	})
	return p
}

func (p *program) start() {
	p.t.Helper()
	os.Remove(p.socket)
	p.cmd = exec.Command(p.args[0], p.args[1:]...)
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.out
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	testkit.Eventually(p.t, p.args[0]+" listens", func() bool {
		nc, err := net.Dial("unix", p.socket)
		if err == nil {
			nc.Close()
		}
		return err == nil
	})
}

func (p *program) kill() {
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

func (p *program) uri() string { return "nbd+unix:///disk?socket=" + p.socket }

// image makes an image of qemu with that format and size, and returns its path.
func image(t *testing.T, format string, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image")
	out, err := exec.Command("qemu-img", "create", "-q", "-f", format, path, fmt.Sprint(size)).CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		backendtest.Unavailable(t, "%v. apt-get install qemu-utils", err)
	}
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return path
}

func qemuNBD(t *testing.T, format string, size int64) *program {
	return startProgram(t, "qemu-nbd", "--socket", "SOCKET", "--persistent", "--shared", "0", "--export-name", "disk", "--discard", "unmap", "--format", format, image(t, format, size))
}

func storageDaemon(t *testing.T, size int64) *program {
	return startProgram(t, "qemu-storage-daemon", "--blockdev", "driver=file,node-name=f,discard=unmap,filename="+image(t, "raw", size),
		"--blockdev", "driver=raw,node-name=disk,discard=unmap,file=f", "--nbd-server", "addr.type=unix,addr.path=SOCKET",
		"--export", "type=nbd,id=e,node-name=disk,name=disk,writable=on")
}

// The servers that operators have pass the contract.
func TestPrograms(t *testing.T) {
	for name, start := range map[string]func(*testing.T) *program{
		"qemu-nbd, qcow2":     func(t *testing.T) *program { return qemuNBD(t, "qcow2", size) },
		"qemu-storage-daemon": func(t *testing.T) *program { return storageDaemon(t, size) },
		"nbdkit": func(t *testing.T) *program {
			return startProgram(t, "nbdkit", "--foreground", "--unix", "SOCKET", "--exportname", "disk", "memory", fmt.Sprint(size))
		},
		"nbdkit, blocks of 512": func(t *testing.T) *program {
			return startProgram(t, "nbdkit", "--foreground", "--unix", "SOCKET", "--exportname", "disk", "--filter", "blocksize-policy", "memory", fmt.Sprint(size),
				"blocksize-minimum=512", "blocksize-preferred=4096", "blocksize-maximum=1M", "blocksize-error-policy=error")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			backendtest.Run(t, func(t *testing.T) backend.Store { return mustOpen(t, Config{URI: start(t).uri()}) })
		})
	}
}

// A real server that is killed during writes, again and again, comes back with all that was written, and a second Store on another server
// is not disturbed.
func TestProgramIsKilled(t *testing.T) {
	p := qemuNBD(t, "qcow2", 8<<20)
	store := mustOpen(t, Config{URI: p.uri()})
	neighbour := mustOpen(t, Config{URI: storageDaemon(t, 8<<20).uri()})
	var stop atomic.Bool
	var slowest atomic.Int64
	aside := make(chan error, 1)
	go func() {
		b := fill(4096, 9)
		for !stop.Load() {
			begun := time.Now()
			if err := errors.Join(neighbour.WriteAt(b, 0), neighbour.ReadAt(b, 0)); err != nil {
				aside <- err
				return
			}
			slowest.Store(max(slowest.Load(), int64(time.Since(begun))))
		}
		aside <- nil
	}()
	const block = 64 << 10
	content := make([]byte, 8<<20)
	n := 0
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); {
		killed := make(chan struct{})
		go func() {
			defer close(killed)
			time.Sleep(100 * time.Millisecond)
			p.kill()
			p.start()
		}()
		for done := false; !done; n++ {
			select {
			case <-killed:
				done = true
			default:
			}
			off := int64(n*7%128) * block
			b := content[off : off+block]
			copy(b, fill(block, byte(1+n%255)))
			must(t, "WriteAt", store.WriteAt(b, off))
			if n%50 == 0 {
				must(t, "Sync", store.Sync())
			}
		}
	}
	want(t, store, 0, content)
	must(t, "Close", store.Close())
	p.kill()
	p.start()
	want(t, mustOpen(t, Config{URI: p.uri()}), 0, content)
	stop.Store(true)
	must(t, "the neighbour", <-aside)
	if d := time.Duration(slowest.Load()); d > 10*time.Second {
		t.Errorf("a pair of the neighbour's calls took %v", d)
	}
}

// What the filters of nbdkit do to requests reaches the callers as the errors that they are.
func TestProgramFails(t *testing.T) {
	trigger := filepath.Join(t.TempDir(), "trigger")
	p := startProgram(t, "nbdkit", "--foreground", "--unix", "SOCKET", "--exportname", "disk", "--filter", "error", "memory", fmt.Sprint(size),
		"error-pwrite=ENOSPC", "error-pread=EIO", "error-rate=100%", "error-file="+trigger)
	store := mustOpen(t, Config{URI: p.uri()})
	must(t, "WriteAt", store.WriteAt(fill(512, 1), 0))
	if err := os.WriteFile(trigger, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := store.WriteAt(fill(512, 2), 0); !errors.Is(err, backend.ErrNoSpace) {
		t.Errorf("WriteAt: %v", err)
	}
	if err := store.ReadAt(make([]byte, 512), 0); !errors.Is(err, unix.EIO) {
		t.Errorf("ReadAt: %v", err)
	}
	os.Remove(trigger)
	want(t, store, 0, fill(512, 1))
}

// A Store with TLS connects to a server that requires it, and to no other one.
func TestTLS(t *testing.T) {
	dir := t.TempDir()
	certificates(t, dir)
	p := startProgram(t, "nbdkit", "--foreground", "--unix", "SOCKET", "--exportname", "disk", "--tls", "require", "--tls-verify-peer",
		"--tls-certificates", dir, "memory", fmt.Sprint(size))
	secure := strings.Replace(p.uri(), "nbd+", "nbds+", 1)
	store := mustOpen(t, Config{URI: secure + "&tls-certificates=" + dir})
	must(t, "WriteAt", store.WriteAt(fill(100<<10, 1), 0))
	p.kill()
	p.start()
	want(t, store, 0, fill(100<<10, 1)) // of the journal: the memory of nbdkit is empty
	for uri, reason := range map[string]string{
		p.uri(): "requires TLS",
		secure:  "unknown authority",
		secure + "&tls-hostname=other&tls-certificates=" + dir: "not other",
		secure + "&tls-certificates=" + t.TempDir():            "ca-cert.pem",
	} {
		if _, err := Open(Config{URI: uri}); err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("%s: %v, want %q", uri, err, reason)
		}
	}
}

// certificates makes an authority, and certificates of it for localhost and a client, with the names that GnuTLS's programs use.
func certificates(t *testing.T, dir string) {
	t.Helper()
	write := func(name, kind string, b []byte, err error) {
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b}), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	pair := func(name string, c, parent *x509.Certificate, signer *ecdsa.PrivateKey) *ecdsa.PrivateKey {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		if signer == nil {
			signer = key
		}
		c.SerialNumber, c.NotBefore, c.NotAfter = big.NewInt(time.Now().UnixNano()), time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
		b, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
		write(name+"-cert.pem", "CERTIFICATE", b, err)
		b, err = x509.MarshalPKCS8PrivateKey(key)
		write(name+"-key.pem", "PRIVATE KEY", b, err)
		return key
	}
	ca := &x509.Certificate{Subject: pkix.Name{CommonName: "authority"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	key := pair("ca", ca, ca, nil)
	pair("server", &x509.Certificate{Subject: pkix.Name{CommonName: "server"}, DNSNames: []string{"localhost"}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}, ca, key)
	pair("client", &x509.Certificate{Subject: pkix.Name{CommonName: "client"}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}, ca, key)
}
