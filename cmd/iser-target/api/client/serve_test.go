package client_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/iser-target/iser-target/cmd/iser-target/api"
	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
	"github.com/iser-target/iser-target/config"
)

const store = "iqn.2026-11.io.example:store"

// A served is a target that runs in this process.
type served struct {
	socket, file string
	daemon       *daemon.Daemon
	stop         func() // ends it
}

// serve runs a target with one LUN of memory, whose files are in dir, until stop is called.
func serve(dir string) (*served, error) {
	s := &served{socket: filepath.Join(dir, "control.sock"), file: filepath.Join(dir, "target.yaml")}
	if _, err := os.Stat(s.file); err != nil {
		text := fmt.Sprintf(`state_dir: %s
control: {socket: %s}
portals: [{listen: "127.0.0.1:0"}]
targets:
  - name: %s
    initiators: ["iqn.2026-11.io.example:*"]
    luns: [{id: 0, backend: memory, size: 16MiB}]
`, filepath.Join(dir, "state"), s.socket, store)
		if err := os.WriteFile(s.file, []byte(text), 0o600); err != nil {
			return nil, err
		}
	}
	b, err := os.ReadFile(s.file)
	if err != nil {
		return nil, err
	}
	doc, err := config.NewDocument(s.file, b)
	if err != nil {
		return nil, err
	}
	if s.daemon, err = daemon.New(doc, daemon.Options{LogTo: io.Discard, Path: s.file, Version: "example"}); err != nil {
		return nil, err
	}
	sockets, err := api.Open(s.daemon.Listeners(), config.Control{Socket: s.socket}, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	end, err := sockets.Serve(s.daemon)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.daemon.Run(ctx) }()
	s.stop = func() {
		end()
		cancel()
		if err := <-done; err != nil {
			panic(err)
		}
	}
	<-s.daemon.Ready()
	return s, nil
}

// serveExample runs a target for an example.
func serveExample() (socket string, stop func()) {
	dir, err := os.MkdirTemp("", "client")
	if err != nil {
		panic(err)
	}
	s, err := serve(dir)
	if err != nil {
		panic(err)
	}
	return s.socket, func() {
		s.stop()
		os.RemoveAll(dir)
	}
}
