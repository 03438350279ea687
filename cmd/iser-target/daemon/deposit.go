package daemon

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/handover"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/lun"
)

// A restart by a service manager that keeps files (FileDescriptorStoreMax=) costs no session: the process that ends leaves the
// sockets of sessions and portals, the data of memory LUNs and a handover.State with the manager, and the next
// one continues. When the service stops instead, the manager closes them, and initiators see the end of the connection.

// depositTime is what a change in progress has to end before.
const depositTime = 2 * time.Second

// deposit leaves the sessions with the service manager, if it keeps files. Otherwise, and after an error, which it logs, they
// are left to the shutdown.
func (d *Daemon) deposit() {
	if d.manager.Room == 0 {
		return
	}
	u := &upgrade{d: d, memory: map[*lun.Unit]memoryFiles{}, result: schema.Upgrade{}}
	err := u.deposit()
	u.closeMemory()
	if err != nil {
		u.undo()
		d.log.Warn("sessions do not continue after a restart", eventKey, "service", "reason", err)
		return
	}
	d.log.Info("sessions wait for the restart", eventKey, "service", "sessions", u.result.Sessions, "cut", u.result.Cut)
}

func (u *upgrade) deposit() error {
	d := u.d
	ctx, cancel := context.WithTimeout(context.Background(), depositTime)
	defer cancel()
	select {
	case d.changes.lock <- struct{}{}:
		u.editor = &editor{d: d}
	case <-ctx.Done():
		return fmt.Errorf("a change did not end within %v", depositTime)
	}
	if err := u.check(); err != nil {
		return err
	}
	if err := u.copyMemory(); err != nil {
		return err
	}
	if err := u.pause(); err != nil {
		return err
	}
	var s handover.Sender
	defer s.Close()
	st, err := u.collect(&s, func(name string) bool {
		listen, ok := strings.CutPrefix(name, portalName)
		p := d.served.portal(strings.TrimSuffix(listen, secondName))
		return ok && p != nil && !p.passed // the manager has those that it passed
	})
	if err != nil {
		return err
	}
	if n := s.Len() + 1; n > d.manager.Room {
		return fmt.Errorf("%d files, and the service manager keeps %d: increase FileDescriptorStoreMax= of the unit", n, d.manager.Room)
	}
	if err := s.Each(st, d.manager.Store); err != nil {
		return err
	}
	if err := d.manager.Stored(); err != nil {
		return err
	}
	u.detached = true
	if err := d.ipsec.detach(); err != nil {
		return err
	}
	ctx, cancel = context.WithTimeout(context.Background(), cutTime)
	defer cancel()
	if err := u.rest.Release(ctx); err != nil {
		return err
	}
	u.editor.release()
	return nil
}
