package api

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/cmd/iser-target/api/apitest"
	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/tests/testkit"
)

// Each route refuses the roles below its own, before it looks at the request, and openapi.yaml has its role.
func TestEachRouteHasItsRole(t *testing.T) {
	type operation struct {
		Role string `yaml:"x-role"`
	}
	roles := map[string]string{}
	for path, methods := range described(t).Paths {
		for method, node := range methods {
			var o operation
			if method == "parameters" {
				continue
			}
			if err := node.Decode(&o); err != nil {
				t.Fatal(err)
			}
			roles[strings.ToUpper(method)+" "+path] = o.Role
		}
	}
	var access []config.Access
	for i, name := range config.Roles {
		access = append(access, config.Access{User: fmt.Sprint(1001 + i), Role: name})
	}
	c := config.Control{Socket: filepath.Join(t.TempDir(), "s"), SocketGroup: fmt.Sprint(os.Getegid()), Access: access}
	d := serve(t, c, io.Discard)
	<-d.Ready()
	s := NewServer(d, c)
	for _, to := range routes {
		if got := roles[to.pattern]; got != to.role.String() || to.role < roleRead {
			t.Errorf("%s: openapi.yaml has x-role %q, want %v", to.pattern, got, to.role)
		}
		method, path, _ := strings.Cut(to.pattern, " ")
		path = regexp.MustCompile(`\{\w+\}`).ReplaceAllString(path, "1")
		for has := roleNone; has <= roleAdmin; has++ {
			r := httptest.NewRequest(method, path+"?unknown=1", nil)
			r = r.WithContext(context.WithValue(r.Context(), peerKey{}, &process{uid: 1000 + uint32(has), known: true}))
			w := httptest.NewRecorder()
			s.http.Handler.ServeHTTP(w, r)
			var e schema.Error
			if err := json.Unmarshal(w.Body.Bytes(), &e); err != nil {
				t.Fatalf("%s: %s, %v", to.pattern, w.Body, err)
			}
			if has >= to.role {
				if w.Code != http.StatusBadRequest || !strings.Contains(e.Message, "unknown is unknown") {
					t.Errorf("%s with the role %v: %d %s", to.pattern, has, w.Code, w.Body)
				}
				continue
			}
			what, needs, lacks := to.pattern, to.role, fmt.Sprintf("uid %d has the role %v", 1000+has, has)
			if has == roleNone {
				what, needs, lacks = method+" "+path, roleRead, "uid 1000 has no role"
			}
			message := fmt.Sprintf("%s requires the role %v, and %s", what, needs, lacks)
			hint := fmt.Sprintf("nothing was changed; an administrator can give the role with control.access: [{user: \"%d\", role: %v}]", 1000+has, needs)
			if w.Code != http.StatusForbidden || e.Code != schema.Forbidden || e.Message != message || e.Hint != hint {
				t.Errorf("%s with the role %v: %d %s, want %q, %q", to.pattern, has, w.Code, w.Body, message, hint)
			}
		}
	}
}

// dialAs connects to the socket as another user. The kernel knows users by thread.
func dialAs(t *testing.T, socket string, uid, gid int, groups ...int) (net.Conn, error) {
	t.Helper()
	var (
		c    net.Conn
		err  error
		done = make(chan struct{})
	)
	var connect func()
	connect = func() {
		runtime.LockOSThread()              // and never unlock it: the thread ends with the goroutine
		if unix.Gettid() == unix.Getpid() { // the main thread must stay as it is
			go connect()
			<-done
			runtime.UnlockOSThread()
			return
		}
		defer close(done)
		list := []uint32{0}
		for _, g := range groups {
			list = append(list, uint32(g))
		}
		for _, call := range [][4]uintptr{
			{unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(unsafe.Pointer(&list[min(1, len(list)-1)]))},
			{unix.SYS_SETRESGID, uintptr(gid), uintptr(gid), uintptr(gid)},
			{unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)},
		} {
			if _, _, errno := unix.RawSyscall(call[0], call[1], call[2], call[3]); errno != 0 {
				err = errno
				return
			}
		}
		runtime.KeepAlive(list)
		var fd int
		if fd, err = unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return
		}
		f := os.NewFile(uintptr(fd), "socket")
		defer f.Close()
		if err = unix.Connect(fd, &unix.SockaddrUnix{Name: socket}); err == nil {
			c, err = net.FileConn(f)
		}
	}
	go connect()
	<-done
	return c, err
}

// askOn sends a request on c and returns the status and the body of the answer.
func askOn(t *testing.T, c net.Conn, method, path, body string) (int, string) {
	t.Helper()
	fmt.Fprintf(c, "%s %s HTTP/1.1\r\nHost: target\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", method, path, len(body), body)
	rsp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer rsp.Body.Close()
	b, err := io.ReadAll(rsp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return rsp.StatusCode, string(b)
}

// openDir returns a directory that all users can enter.
func openDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "control")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// A group can have the socket. Its members have the roles that the configuration gives to them and to
// their groups, a new configuration counts from the next request, and administrators keep theirs.
func TestRolesOfUsersAndGroups(t *testing.T) {
	if os.Geteuid() != 0 {
		backendtest.Unavailable(t, "root is needed to connect as other users")
	}
	const staff, readers, operators = 4242, 4243, 4244
	c := config.Control{Socket: filepath.Join(openDir(t), "s"), SocketGroup: fmt.Sprint(staff), Access: []config.Access{
		{Group: fmt.Sprint(readers), Role: "read"}, {Group: fmt.Sprint(operators), Role: "operate"}, {User: "1003", Role: "admin"},
	}}
	d := serve(t, c, io.Discard)
	<-d.Ready()
	many := []int{staff, readers}
	for i := range 100 {
		many = append(many, 5000+i)
	}
	lun := `{"backend": "memory", "size": "1MiB"}`
	connect := func(uid, gid int, groups ...int) net.Conn {
		t.Helper()
		conn, err := dialAs(t, c.Socket, uid, gid, groups...)
		if err != nil {
			t.Fatalf("uid %d: %v", uid, err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	for _, tc := range []struct {
		name        string
		uid, gid    int
		groups      []int
		role        string
		create, cfg int // status of the creation of a LUN, and of a plan
	}{
		{"no entry", 1000, staff, nil, "no role", 403, 403},
		{"a reader", 1001, staff, []int{readers}, "the role read", 403, 403},
		{"a reader by the first group", 1001, readers, []int{staff}, "the role read", 403, 403},
		{"a reader with many groups", 1001, 1001, many, "the role read", 403, 403},
		{"an operator", 1002, staff, []int{readers, operators}, "the role operate", 200, 403},
		{"an administrator", 1003, staff, nil, "", 200, 400},
		{"root", 0, 0, nil, "", 200, 400},
	} {
		status, body := askOn(t, connect(tc.uid, tc.gid, tc.groups...), "POST", "/v1/targets/"+store+"/luns", lun)
		if status != tc.create || status == 403 && !strings.Contains(body, fmt.Sprintf("uid %d has %s", tc.uid, tc.role)) {
			t.Errorf("%s: creation of a LUN: %d %s", tc.name, status, body)
		}
		status, body = askOn(t, connect(tc.uid, tc.gid, tc.groups...), "POST", "/v1/config/plan?unknown=1", "")
		if status != tc.cfg || status == 403 && !strings.Contains(body, fmt.Sprintf("uid %d has %s", tc.uid, tc.role)) {
			t.Errorf("%s: plan: %d %s", tc.name, status, body)
		}
	}
	if n := len(d.State().Targets[0].LUNs); n != 4 {
		t.Errorf("%d LUNs, want the first and those of three callers", n)
	}
	if _, err := dialAs(t, c.Socket, 1001, readers); !errors.Is(err, unix.EACCES) {
		t.Errorf("a caller outside of the group of the socket: %v, want EACCES", err)
	}
	if fi, err := os.Stat(c.Socket); err != nil || fi.Mode().Perm() != 0o660 {
		t.Errorf("socket: %v, %v", fi, err)
	}

	open := connect(1002, staff, operators)
	if status, body := askOn(t, open, "PATCH", "/v1/targets/"+store, `{"alias": "a"}`); status != 200 {
		t.Errorf("alias by an operator: %d %s", status, body)
	}
	for _, key := range []string{"auth", "auth.method", "ipsec.mode"} {
		status, body := askOn(t, open, "PATCH", "/v1/targets/"+store, fmt.Sprintf(`{"alias": "b", %q: "none"}`, key))
		if status != 403 || !strings.Contains(body, "setting "+key+" of a target requires the role admin, and uid 1002 has the role operate") {
			t.Errorf("%s by an operator: %d %s", key, status, body)
		}
	}
	if alias := d.State().Targets[0].Alias; alias != "a" {
		t.Errorf("alias %q after refused changes, want a", alias)
	}
	c.Access = c.Access[:1]
	plan, err := d.Apply(t.Context(), document(t, c, d.Effective().StateDir), daemon.ChangeOptions{Disrupt: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range plan.Steps {
		if step.Change.Kind == config.KindControl && (step.Change.Key != "access" || step.Restart || !step.Done) {
			t.Errorf("step %+v, want that access has changed at once", step)
		}
	}
	if status, body := askOn(t, open, "PATCH", "/v1/targets/"+store, `{"alias": "c"}`); status != 403 || !strings.Contains(body, "has no role") {
		t.Errorf("on an open connection, without the role: %d %s", status, body)
	}
	if _, err := client.New(c.Socket).SetTarget(t.Context(), store, schema.Values{"alias": "d"}, schema.Options{}); err != nil {
		t.Errorf("the owner after that: %v", err)
	}
}

// Only a group that exists can have the socket, and a start that fails leaves no socket.
func TestSocketOfAnUnknownGroup(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	_, err := Listen(path, "no-such-group", nil)
	if err == nil || !strings.Contains(err.Error(), "group no-such-group") {
		t.Errorf("error %v", err)
	}
	if _, err := os.Lstat(path); err == nil {
		t.Error("the socket exists")
	}
}

// A user namespace shows all users that it does not know under one number, which is nobody's.
func TestStrangersHaveNoRole(t *testing.T) {
	list := []config.Access{{User: "65534", Role: "admin"}, {Group: "65534", Role: "admin"}, {Group: "7", Role: "read"}}
	for _, tc := range []struct {
		name   string
		rights rights
		p      process
		want   role
	}{
		{"in a namespace", rights{owner: 5, strangers: 65534, shared: true}, process{uid: 65534, gid: 65534, known: true}, roleNone},
		{"in a known group", rights{owner: 5, strangers: 65534, shared: true}, process{uid: 65534, gid: 65534, groups: []uint32{7}, known: true}, roleRead},
		{"root outside of the namespace, only the owner can connect", rights{owner: 5, strangers: 65534}, process{uid: 65534, known: true}, roleAdmin},
		{"another user, only the owner can connect", rights{owner: 5, strangers: 65534}, process{uid: 6, known: true}, roleNone},
		{"owner nobody, only the owner can connect", rights{owner: 65534, strangers: 65534}, process{uid: 65534, known: true}, roleAdmin},
		{"owner nobody, a group can connect", rights{owner: 65534, strangers: 65534, shared: true}, process{uid: 65534, known: true}, roleNone},
		{"without a namespace", rights{owner: 5, shared: true}, process{uid: 65534, known: true}, roleAdmin},
		{"the owner", rights{owner: 5, strangers: 65534, shared: true}, process{uid: 5, known: true}, roleAdmin},
		{"a process that the kernel does not name", rights{owner: 0}, process{}, roleNone},
	} {
		if got := tc.rights.roleOf(&caller{process: &tc.p}, list); got != tc.want {
			t.Errorf("%s: role %v, want %v", tc.name, got, tc.want)
		}
	}
}

// overTLS returns a client of the control API at address with the certificate name.
func overTLS(t *testing.T, a *apitest.Authority, name string) *http.Client {
	t.Helper()
	cert, err := tls.LoadX509KeyPair(a.Path(name+".pem"), a.Path(name+".key"))
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(a.Cert)
	tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{cert}}}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// Names and organizational units of certificates have roles. Only administrators read secrets, and that
// is an event, as is each refusal.
func TestRolesOfCertificates(t *testing.T) {
	a := apitest.New(t)
	a.Server("server")
	a.Client("alice")
	a.Client("bob", "backup", "monitoring")
	a.Client("carol", "storage")
	a.Client("mallory")
	var log testkit.Log
	d := serve(t, config.Control{Listen: "127.0.0.1:0", TLS: config.ControlTLS{
		Cert: a.Path("server.pem"), Key: a.Path("server.key"), ClientCA: a.Path("ca.pem"),
	}, Access: []config.Access{{Certificate: "alice", Role: "admin"}, {OU: "monitoring", Role: "read"}, {OU: "storage", Role: "operate"}}}, &log)
	<-d.Ready()
	url := "https://" + regexp.MustCompile(`address=(127\S+)`).FindStringSubmatch(log.String())[1]
	want := map[string]string{"alice": "200 200", "bob": "200 403", "carol": "200 200", "mallory": "403 403"}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		c := overTLS(t, a, name)
		rsp, err := c.Get(url + "/v1/config")
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(rsp.Body)
		rsp.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		post, err := c.Post(url+"/v1/targets/"+store+"/luns", "application/json", strings.NewReader(`{"backend": "memory", "size": "1MiB"}`))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(post.Body)
		post.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(rsp.StatusCode, post.StatusCode); got != want[name] {
			t.Errorf("%s: status %s, want %s\n%s", name, got, want[name], body)
		}
		if post.StatusCode == 403 && !strings.Contains(string(body), fmt.Sprintf(`control.access: [{certificate: \"%s\", role:`, name)) {
			t.Errorf("%s: %s", name, body)
		}
		switch shows, comment := strings.Contains(string(text), secretText), strings.Contains(string(text), "comment"); {
		case name == "alice" && (!shows || !comment):
			t.Errorf("%s gets\n%s", name, text)
		case name != "alice" && (shows || comment):
			t.Errorf("%s reads the secrets:\n%s", name, text)
		case (name == "bob" || name == "carol") && !strings.Contains(string(text), "secret: '********'"):
			t.Errorf("%s gets\n%s", name, text)
		}
	}
	if n := len(d.State().Targets[0].LUNs); n != 3 {
		t.Errorf("%d LUNs, want the first and those of two callers", n)
	}
	var reads, refusals []string
	for _, e := range d.Events(0) {
		if e.Event != "control" {
			continue
		}
		by := fmt.Sprint(e.Attrs["by"])
		if e.Attrs["outcome"] == "refused" {
			refusals = append(refusals, by)
		} else if strings.Contains(e.Text, "secrets") {
			reads = append(reads, by)
		}
	}
	if len(reads) != 1 || !strings.HasPrefix(reads[0], "CN=alice at 127.0.0.1:") {
		t.Errorf("secrets were read by %q, want one event about alice", reads)
	}
	for _, who := range []string{"CN=bob,OU=", "CN=mallory at"} {
		if !slices.ContainsFunc(refusals, func(by string) bool { return strings.HasPrefix(by, who) }) {
			t.Errorf("refusals by %q, want one by %s", refusals, who)
		}
	}
}
