package daemon

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/iser-target/iser-target/config"
)

// write creates a file that is removed after the test.
func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// serve writes a configuration to a file and serves it until the test ends.
func serve(t *testing.T, yaml string, logTo ...io.Writer) *Daemon {
	t.Helper()
	return serveFile(t, write(t, "c.yaml", yaml), logTo...)
}

// serveFile serves the configuration at path until the test ends.
func serveFile(t *testing.T, path string, logTo ...io.Writer) *Daemon {
	t.Helper()
	d, end := run(t, path, Options{LogTo: io.MultiWriter(append(logTo, t.Output())...)})
	t.Cleanup(func() {
		if err := end(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// run serves the configuration at path until end is called, which returns the error of Run.
func run(t *testing.T, path string, o Options) (d *Daemon, end func() error) {
	t.Helper()
	doc, err := config.OpenDocument(path)
	if err != nil {
		t.Fatal(err)
	}
	if o.Path = path; o.LogTo == nil {
		o.LogTo = t.Output()
	}
	if d, err = New(doc, o); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- d.Run(ctx) }()
	<-d.Ready()
	return d, func() error {
		cancel()
		return <-done
	}
}
