// Command vulncheck looks for known vulnerabilities in the modules that the program uses, with govulncheck. Where the
// database or the tool cannot be had, it says so, and succeeds: a machine without a network must be able to check the rest.
// GOVULNDB names another database, like file:///srv/vulndb.
package main

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// tool is the version of govulncheck that runs.
const tool = "golang.org/x/vuln/cmd/govulncheck@v1.1.4"

// reachTime bounds the question whether the database is there.
const reachTime = 10 * time.Second

func main() {
	db := cmp.Or(os.Getenv("GOVULNDB"), "https://vuln.go.dev")
	if err := reach(db, reachTime); err != nil {
		skip("the database %s cannot be reached: %v", db, err)
	}
	if out, err := exec.Command("go", "run", tool, "-version").CombinedOutput(); err != nil {
		skip("%s cannot be run: %v\n%s", tool, err, out)
	}
	cmd := exec.Command("go", "run", tool, "-db", db, "./...")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "vulnerabilities:", err)
		os.Exit(1)
	}
}

// skip prints why nothing was checked, and ends the program.
func skip(format string, a ...any) {
	fmt.Println("vulnerabilities: NOT CHECKED:", fmt.Sprintf(format, a...))
	os.Exit(0)
}

// reach returns an error unless db has an index of vulnerabilities.
func reach(db string, timeout time.Duration) error {
	u, err := url.Parse(db)
	switch {
	case err != nil:
		return err
	case u.Scheme == "file":
		_, err := os.Stat(filepath.Join(u.Path, "index", "db.json"))
		return err
	case u.Scheme != "https" && u.Scheme != "http":
		return errors.New("it is neither a file nor a web address")
	}
	c := http.Client{Timeout: timeout}
	rsp, err := c.Get(u.JoinPath("index", "db.json").String())
	if err != nil {
		return err
	}
	rsp.Body.Close()
	if rsp.StatusCode != http.StatusOK {
		return errors.New(rsp.Status)
	}
	return nil
}
