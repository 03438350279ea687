package pool

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"
)

// limit is the longest time of a program. LVM waits for a lock of its volume group.
var limit = time.Minute

// outputMax bounds what a program may print, in bytes: some thousands of volumes.
const outputMax = 8 << 20

var errOutput = errors.New("its output is too long")

// A bounded is a buffer of at most outputMax bytes. stop ends the program that writes more.
type bounded struct {
	b    bytes.Buffer // not embedded: its ReadFrom has no bound
	stop context.CancelFunc
	over bool
}

func (b *bounded) Write(p []byte) (int, error) {
	if b.b.Len()+len(p) > outputMax {
		b.over = true
		b.stop()
		return 0, errOutput
	}
	return b.b.Write(p)
}

// run runs a program and returns its output. The error has the last line that the program wrote to its standard error, and what
// to do if the program, which is in that package of Debian, is missing or the user may not use it.
func run(ctx context.Context, debian, name string, args ...string) ([]byte, error) {
	short, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cmd := exec.CommandContext(short, name, args...)
	// SIGINT lets LVM release its locks. SIGKILL follows WaitDelay later.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 5 * time.Second
	cmd.Env = append(os.Environ(), "LC_ALL=C", "LVM_SUPPRESS_FD_WARNINGS=1")
	out, bad := &bounded{stop: cancel}, &bounded{stop: cancel}
	cmd.Stdout, cmd.Stderr = out, bad
	err := cmd.Run()
	switch {
	case err == nil:
		return out.b.Bytes(), nil
	case errors.Is(err, exec.ErrNotFound):
		return nil, fmt.Errorf("%s: program not found in PATH: install it (Debian: apt install %s)", name, debian)
	case out.over || bad.over:
		return nil, fmt.Errorf("%s: %w: more than %d bytes", name, errOutput, outputMax)
	case ctx.Err() != nil:
		return nil, fmt.Errorf("%s: interrupted", name)
	case short.Err() != nil:
		return nil, fmt.Errorf("%s: no result within %v: check for a process that holds a lock of the volumes", name, limit)
	}
	lines := strings.Split(strings.TrimSpace(bad.b.String()), "\n")
	if last := strings.TrimSpace(lines[len(lines)-1]); last != "" {
		err = errors.New(strings.TrimSuffix(last, "."))
	}
	if os.Geteuid() != 0 {
		return nil, fmt.Errorf("%s: %w: run the command as root", name, err)
	}
	return nil, fmt.Errorf("%s: %w", name, err)
}
