package rbd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/iser-target/iser-target/backend/rbd/rbduri"
)

// commandTime bounds a command of Ceph.
const commandTime = 10 * time.Second

// errNoAnswer reports a cluster that has not answered in time.
var errNoAnswer = errors.New("the Ceph cluster has not answered in time")

// run runs rbd as the user of an image, and returns its output.
func run(ctx context.Context, i *rbduri.Image, args ...string) ([]byte, error) {
	return runProgram(ctx, i, clientProgram, args...)
}

func runProgram(ctx context.Context, i *rbduri.Image, program string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, append(args, "--conf="+i.Conf, "--id="+i.User)...)
	cmd.Env = Environment()
	cmd.WaitDelay = time.Second
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return nil, ctx.Err()
	case ctx.Err() != nil:
		return nil, fmt.Errorf("%s %s: %w (%v)", program, args[0], errNoAnswer, commandTime)
	case errors.Is(err, exec.ErrNotFound):
		return nil, fmt.Errorf("%w. apt-get install ceph-common", err)
	case err != nil:
		text := strings.TrimSpace(errOut.String())
		text = text[strings.LastIndexByte(text, '\n')+1:]
		return nil, fmt.Errorf("%s %s: %w: %s", program, args[0], err, strings.TrimPrefix(text, "rbd: "))
	}
	return out, nil
}

// query runs rbd and decodes its output.
func query(ctx context.Context, i *rbduri.Image, out any, args ...string) error {
	b, err := run(ctx, i, append(args, "--format=json")...)
	if err == nil {
		err = json.Unmarshal(b, out)
	}
	return err
}

// A watcher is a client that has an image open.
type watcher struct {
	Client  uint64
	Address string // as the blocklist of Ceph has it
}

func (w watcher) name() string { return fmt.Sprintf("client.%d", w.Client) }

// watching returns the clients that have the image open.
func watching(ctx context.Context, i *rbduri.Image) ([]watcher, error) {
	var status struct{ Watchers []watcher }
	err := query(ctx, i, &status, "status", i.String())
	return status.Watchers, err
}

// breakLock removes the exclusive lock of one of these clients, none of which is alive. Ceph refuses all that they have under way then.
func breakLock(ctx context.Context, i *rbduri.Image, clients []string) error {
	var locks []struct{ ID, Locker string }
	if err := query(ctx, i, &locks, "lock", "ls", i.String()); err != nil {
		return err
	}
	for _, l := range locks {
		if slices.Contains(clients, l.Locker) {
			if _, err := run(ctx, i, "lock", "rm", i.String(), l.ID, l.Locker); err != nil {
				return err
			}
		}
	}
	return nil
}

// sizeOf returns the size of an image in bytes.
func sizeOf(ctx context.Context, i *rbduri.Image) (int64, error) {
	var info struct{ Size int64 }
	err := query(ctx, i, &info, "info", i.String())
	return info.Size, err
}

// list returns the names of the images of the pool or namespace of i.
func list(ctx context.Context, i *rbduri.Image) (names []string, err error) {
	err = query(ctx, i, &names, "ls", strings.TrimSuffix(i.String(), "/"+i.Name))
	return names, err
}

// Create makes an image of a size in bytes. It reports whether it has made one: an image that exists stays as it is.
func Create(uri string, size int64) (created bool, err error) {
	i, err := rbduri.Parse(uri)
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), commandTime)
	defer cancel()
	names, err := list(ctx, i)
	if err != nil {
		return false, explain(i, err)
	}
	if slices.Contains(names, i.Name) {
		return false, nil
	}
	_, err = run(ctx, i, "create", i.String(), fmt.Sprintf("--size=%dB", size))
	return err == nil, explain(i, err)
}

// Remove removes an image, which has just been created.
func Remove(uri string) error {
	i, err := rbduri.Parse(uri)
	if err != nil {
		return err
	}
	_, err = run(context.Background(), i, "rm", "--no-progress", i.String())
	return err
}

// explain returns err with what it means for the image.
func explain(i *rbduri.Image, err error) error {
	if err == nil {
		return nil
	}
	for _, e := range []struct{ part, means string }{
		{"error opening pool", fmt.Sprintf("the cluster has no pool %s", i.Pool)},
		{"error reading header from", fmt.Sprintf("the pool has no image %s. rbd create %s makes one", i.Name, i)},
		{"error reading conf file", "conf cannot be read"},
		{"error connecting: Permission denied", fmt.Sprintf("the cluster refuses client.%s: its key is wrong, or it has none in the keyring", i.User)},
		{"error connecting: No such file", fmt.Sprintf("there is no keyring with a key of client.%s. Name it by keyring in %s", i.User, i.Conf)},
		{"Unknown driver 'rbd'", "qemu-storage-daemon has no driver for RBD. apt-get install qemu-block-extra"},
		{"Invalid parameter 'rbd'", "qemu-storage-daemon has no driver for RBD. apt-get install qemu-block-extra"},
	} {
		if strings.Contains(err.Error(), e.part) {
			return fmt.Errorf("%s: %w", e.means, err)
		}
	}
	return err
}
