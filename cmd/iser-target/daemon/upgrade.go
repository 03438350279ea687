package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/cmd/iser-target/handover"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/lun"
)

// The time limits of an upgrade.
const (
	// startTime is what the new process has to start and to check the configuration. Initiators do not wait meanwhile.
	startTime = 30 * time.Second
	// restTime is what sessions have to come to rest. Those that do not are cut.
	restTime = 500 * time.Millisecond
	// cutTime is what these have to end.
	cutTime = 2 * time.Second
	// takeTime is what the new process has to open everything, while initiators wait.
	takeTime = 10 * time.Second
	// endTime is what a process has to end that has closed its link, or was killed. One that was killed and hangs in the
	// kernel does nothing more in any case.
	endTime = 2 * time.Second
)

// ErrUpgraded is what Run returns after an upgrade.
var ErrUpgraded = errors.New("another process continues")

// ErrNoUpgrade refuses an upgrade because of what the target does.
var ErrNoUpgrade = errors.New("nothing was changed: the upgrade is not possible now")

// An upgrade is a hand-over to a new process.
type upgrade struct {
	d           *Daemon
	editor      *editor
	taker       *handover.Process
	link        *handover.Link
	hello       handover.Message // of the new process
	doc         *config.Document // that both have
	left        bool             // the daemon has left its cluster
	detached    bool             // the driver of IPsec has left what it installed
	luns        []watched        // that are ready
	memory      map[*lun.Unit]memoryFiles
	rest        *iscsi.Rest
	supervision *os.File // link to the new process, if this one is to be its supervisor
	result      schema.Upgrade
	stopped     time.Time // when the initiators began to wait
}

// Upgrade gives the sessions, the portals and the LUNs to a new process, which Options.Successor starts. Afterwards
// Run returns. If that fails, the daemon continues as it was. ctx bounds the time until sessions come to rest.
func (d *Daemon) Upgrade(ctx context.Context) (*schema.Upgrade, error) {
	u := &upgrade{d: d, memory: map[*lun.Unit]memoryFiles{}, result: schema.Upgrade{Before: d.version}}
	cancelable, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(d.changes.ended, cancel)()
	err := u.run(cancelable)
	u.closeMemory()
	if err != nil {
		u.undo()
		err = fmt.Errorf("%w. The target continues as it was", err)
		d.log.ErrorContext(ctx, "upgrade failed", eventKey, "service", "reason", err)
		return nil, err
	}
	r := &u.result
	d.log.InfoContext(ctx, "upgraded: another process continues", eventKey, "service", "pid", r.PID, "version", r.Version,
		"sessions", r.Sessions, "cut", r.Cut, "pause", r.Pause)
	d.changes.end() // the editor is never released: nothing changes here any longer
	d.successorLink = u.supervision
	d.ipsec.forget()
	u.leave()
	close(d.upgraded)
	if d.lost != nil {
		return nil, d.lost
	}
	return r, nil
}

// leave makes the new process the main process of the service. If that process ended earlier, the service manager has not noticed. Then this
// process must end with an error.
func (u *upgrade) leave() {
	d := u.d
	if d.lost == nil && u.mainProcess() {
		if err := d.manager.Leave(u.result.PID); err != nil {
			d.log.Warn("service manager", "reason", err)
		}
		if u.taker.HasEnded() {
			u.lose(errors.New("it " + u.taker.End()))
		}
	}
	u.link.Close()
}

// lose notes that the new process served and ended. Now neither process serves.
func (u *upgrade) lose(reason error) {
	u.d.lost = fmt.Errorf("the new process, %s, served and does not continue: %w", u.taker.Path(), reason)
	u.d.log.Error("upgrade lost the sessions", eventKey, "service", "reason", u.d.lost)
}

// run does what Upgrade says. After an error the caller calls undo.
func (u *upgrade) run(ctx context.Context) error {
	d := u.d
	switch {
	case d.successor == nil:
		return fmt.Errorf("%w: this program cannot start another one", ErrNoUpgrade)
	case d.departing.ordered.Load():
		return ErrDraining
	}
	var err error
	if u.editor, err = d.edit(ctx); err != nil {
		return err
	}
	d.lookAtLUNs() // an orphan would be lost
	if err := d.checkEdited(); err != nil {
		return err
	}
	if err := u.check(); err != nil {
		return err
	}
	if err := u.awaitSupervisor(ctx); err != nil {
		return err
	}
	if err := u.start(ctx); err != nil {
		return err
	}
	if u.d.group != nil { // the others serve the shared LUNs until the new process has joined them
		u.d.group.leave(ctx)
		u.left = true
	}
	if err := u.copyMemory(); err != nil { // most of it, while initiators are served
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := u.pause(); err != nil {
		return err
	}
	if err := u.give(); err != nil {
		return err
	}
	if d.changes.ended.Err() != nil {
		return ErrEnding
	}
	return u.commit()
}

// awaitSupervisor waits until the process of an upgrade before has become the supervisor. Else it would take the end
// of this process for that of the target.
func (u *upgrade) awaitSupervisor(ctx context.Context) error {
	sup := u.d.supervisor
	if sup == nil {
		return nil
	}
	select {
	case <-sup.Settled():
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(startTime):
		return fmt.Errorf("%w: the process that started this one has not become its supervisor within %v. Try again", ErrNoUpgrade, startTime)
	}
}

// check fails with an ErrNoUpgrade if something is in progress that does not continue in another process. It
// finds the LUNs.
func (u *upgrade) check() error {
	d := u.d
	d.mu.Lock()
	defer d.mu.Unlock()
	refuse := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrNoUpgrade, fmt.Sprintf(format, args...))
	}
	switch v := &d.served; {
	case len(v.pending) > 0:
		return refuse("%s waits for a restart. Restart the target instead, or undo the change", v.pending[0])
	case len(d.builds) > 0:
		return refuse("a file is being created. Wait for it")
	case len(d.ending.removals)+len(d.ending.sessions) > 0:
		return refuse("what an earlier change removed is still in use. Wait, or end it with --now")
	}
	u.doc, u.luns = d.served.doc, nil
	for _, t := range d.served.targets {
		for _, l := range t.luns {
			_, hangs := l.unit.Hang()
			switch {
			case l.attempt != nil:
				return refuse("LUN %d of %s: %v", l.ID, t.name, l.fault)
			case l.fault != nil || l.closed:
				continue // the new process opens it when it can
			case hangs:
				return refuse("LUN %d of %s hangs: %s", l.ID, t.name, l.unit.Status())
			case l.health.is == lun.Orphaned:
				return refuse("LUN %d of %s is orphaned: %s", l.ID, t.name, l.health.reason)
			case l.unit.Busy() != "":
				return refuse("LUN %d of %s: %s. Wait for it", l.ID, t.name, l.unit.Busy())
			}
			u.luns = append(u.luns, watched{t: t, l: l})
		}
	}
	return nil
}

// start starts the new process and lets it check the configuration.
func (u *upgrade) start(ctx context.Context) (err error) {
	cmd, err := u.d.successor()
	if err != nil {
		return err
	}
	link, other, err := handover.NewLink()
	if err != nil {
		return err
	}
	defer other.Close()
	u.link = link
	cmd.ExtraFiles = []*os.File{other}
	cmd.Env = append(cmd.Environ(), handover.Environment())
	cmd.Env = append(cmd.Env, u.d.manager.Environment()...)
	// systemd does not wait for the end of a main process that is not its child. It ends it with SIGKILL.
	if u.taker, err = handover.Start(cmd, u.mainProcess()); err != nil {
		return err
	}
	other.Close() // else the end of the process would not be seen
	u.result.PID = u.taker.PID()
	defer context.AfterFunc(ctx, u.taker.Kill)()
	by := time.Now().Add(startTime)
	if u.hello, err = u.await(handover.Hello, by); err != nil {
		return err
	}
	u.result.Version = u.hello.Version
	if handover.Format < u.hello.Oldest || handover.Format > u.hello.Newest {
		return fmt.Errorf("%w: %s reads the formats %d to %d of the state, and this program writes %d. Stop the target, and start the new program",
			ErrNoUpgrade, u.hello.Version, u.hello.Oldest, u.hello.Newest, handover.Format)
	}
	if err := u.link.SendJSON(handover.Prepare, handover.Plan{Format: handover.Format, Document: string(u.doc.Bytes())}); err != nil {
		return u.died(err)
	}
	_, err = u.await(handover.Ready, by)
	return err
}

// await returns the next message of the new process, which must be of that kind.
func (u *upgrade) await(kind string, by time.Time) (m handover.Message, err error) {
	m, err = u.link.Await(by)
	switch {
	case err != nil:
		return m, u.died(err)
	case m.Kind == handover.Failed:
		return m, fmt.Errorf("the new process refuses: %s", m.Reason)
	case m.Kind != kind:
		return m, fmt.Errorf("the new process says %q, and not %q", m.Kind, kind)
	}
	return m, nil
}

// died adds to err that the process has ended, if that is why.
func (u *upgrade) died(err error) error {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("the new process, %s, does not answer in time", u.taker.Path())
	case errors.Is(err, io.EOF), errors.Is(err, syscall.EPIPE):
		select {
		case <-u.taker.Ended():
			return fmt.Errorf("the new process, %s, %s. Its messages are in the log of this one", u.taker.Path(), u.taker.End())
		case <-time.After(endTime):
			return fmt.Errorf("the new process, %s, does not answer. It is no version of this program that can upgrade", u.taker.Path())
		}
	}
	return err
}

// copyMemory copies the data of memory LUNs, at a second call what has changed since.
func (u *upgrade) copyMemory() error {
	for _, w := range u.luns {
		files := u.memory[w.l.unit]
		data, side := w.l.unit.Memory()
		for i, m := range [...]*backend.Memory{data, side} {
			if m == nil {
				continue
			}
			if files[i] == nil {
				f, err := handover.NewMemory("LUN")
				if err != nil {
					return err
				}
				files[i] = f
				u.memory[w.l.unit] = files
			}
			if err := m.CopyTo(files[i]); err != nil {
				return fmt.Errorf("copy of memory LUN %d of %s: %w", w.l.ID, w.t.name, err)
			}
		}
	}
	return nil
}

// closeMemory closes the copies of memory LUNs.
func (u *upgrade) closeMemory() {
	for _, files := range u.memory {
		for _, f := range files {
			if f != nil {
				f.Close()
			}
		}
	}
}

// memoryFiles have the data of a memory LUN, and its protection information; nil: it has none.
type memoryFiles [2]*os.File

// pause lets connections wait and sessions come to rest.
func (u *upgrade) pause() error {
	for _, w := range u.luns {
		w.l.unit.InterruptScrub() // its last step may take a moment
	}
	u.stopped = time.Now()
	u.d.listeners.Pause()
	ctx, cancel := context.WithTimeout(context.Background(), restTime)
	u.rest = u.d.node.Pause(ctx)
	cancel()
	for _, w := range u.luns {
		if w.l.unit.AtWork() { // a new login would meet the command's late effect
			return fmt.Errorf("%w: LUN %d of %s: its store has not done all commands within %v. Try again", ErrNoUpgrade, w.l.ID, w.t.name, restTime)
		}
	}
	ctx, cancel = context.WithTimeout(context.Background(), cutTime)
	defer cancel()
	var err error
	if u.result.Cut, err = u.rest.EndOthers(ctx); err != nil {
		return err
	}
	if err := u.check(); err != nil { // a command may have begun it
		return err
	}
	for _, w := range u.luns {
		if err := w.l.unit.Rest(restTime); err != nil {
			return err
		}
		if err := w.l.unit.Settle(cutTime); err != nil {
			return fmt.Errorf("%w: LUN %d of %s: %w", ErrNoUpgrade, w.l.ID, w.t.name, err)
		}
	}
	return u.copyMemory()
}

// give sends the state, and waits until the new process has opened everything.
func (u *upgrade) give() error {
	d := u.d
	var s handover.Sender
	defer s.Close()
	st, err := u.collect(&s, func(string) bool { return true })
	if err != nil {
		return err
	}
	for _, f := range d.state.all() {
		if lock := f.Lock(); lock != nil {
			s.Add(handover.KindLock, lock.Name(), int(lock.Fd()))
		}
	}
	for _, w := range u.luns {
		if fd := w.l.unit.Descriptor(); fd >= 0 {
			s.Add(handover.KindLock, w.l.Path, fd)
		}
		if path, fd := w.l.unit.SideFile(); fd >= 0 {
			s.Add(handover.KindLock, path, fd)
		}
	}
	if err := u.supervise(&s, st); err != nil {
		return err
	}
	u.detached = true
	if err := d.ipsec.detach(); err != nil {
		return err
	}
	if err := s.Send(u.link, st); err != nil {
		return u.died(err)
	}
	_, err = u.await(handover.Prepared, time.Now().Add(takeTime))
	return err
}

// collect returns the state of the target at rest, and adds its files except those that are locked to s, with the
// listeners whose names are wanted.
func (u *upgrade) collect(s *handover.Sender, wanted func(name string) bool) (*handover.State, error) {
	d := u.d
	st := &handover.State{Format: handover.Format, Version: d.version, Started: d.started, Document: string(u.doc.Bytes()), Pid: os.Getpid()}
	if shared := u.doc.Shared(); shared != nil {
		st.Cluster = &handover.Cluster{Text: string(shared.Bytes()), Revision: shared.Revision()}
	}
	if err := d.listeners.Add(s, wanted); err != nil {
		return nil, err
	}
	for _, p := range d.served.portals {
		if p.passed {
			st.Passed = append(st.Passed, p.cur.Load().cfg.Listen)
		}
	}
	if d.served.cfg.StateDir == "" {
		st.Serials = d.state.ids.Serials()
	}
	for _, w := range u.luns {
		unit := w.l.unit
		st.LUNs = append(st.LUNs, handover.LUN{
			Target: w.t.name, ID: w.l.ID, NAA: unit.Identity().Serial, State: unit.State(), Checksums: unit.ChecksumsAtRest(),
		})
		for i, name := range [...]string{handover.MemoryName(w.t.name, w.l.ID), handover.SideName(w.t.name, w.l.ID)} {
			if f := u.memory[unit][i]; f != nil {
				s.Add(handover.KindMemory, name, int(f.Fd()))
			}
		}
	}
	var err error
	if st.Sessions, err = u.rest.Sessions(); err != nil {
		return nil, err
	}
	u.result.Sessions = len(st.Sessions)
	for _, session := range st.Sessions {
		for _, c := range session.Conns {
			if err := s.AddSocket(handover.KindConnection, handover.ConnectionName(session.TSIH, c.CID), c.Socket.(syscall.Conn)); err != nil {
				return nil, err
			}
		}
	}
	return st, nil
}

// mainProcess reports whether the service manager watches this process, and can watch another one instead.
func (u *upgrade) mainProcess() bool {
	return u.d.manager.Present() && u.d.supervisor == nil && os.Getpid() != 1
}

// supervise gives the new process a supervisor: a shell that started this process waits for it, and not for the new one.
func (u *upgrade) supervise(s *handover.Sender, st *handover.State) error {
	switch sup := u.d.supervisor; {
	case sup != nil:
		st.Supervised = sup.Attached()
		s.Add(handover.KindSupervisor, "", sup.Fd())
	case !u.mainProcess():
		own, other, err := handover.NewSupervision()
		if err != nil {
			return err
		}
		u.supervision = own
		s.AddOwn(handover.KindSupervisor, "", other)
	}
	return nil
}

// commit lets the new process serve.
func (u *upgrade) commit() error {
	d := u.d
	if err := u.link.Send(handover.Message{Kind: handover.Go}); err != nil {
		return u.died(err)
	}
	if _, err := u.await(handover.Serving, time.Now().Add(takeTime)); err != nil {
		u.kill()
		if _, late := u.await(handover.Serving, time.Now().Add(time.Second)); late != nil {
			return err // it has not begun
		}
		u.lose(err)
	}
	u.result.Pause = config.FormatDuration(time.Since(u.stopped).Round(time.Millisecond))
	d.listeners.Give()
	ctx, cancel := context.WithTimeout(context.Background(), cutTime)
	defer cancel()
	if err := u.rest.Release(ctx); err != nil {
		d.log.Warn("sessions did not end here", eventKey, "service", "reason", err)
	}
	return nil
}

// kill ends the new process.
func (u *upgrade) kill() {
	if u.taker != nil {
		u.taker.Kill()
		select {
		case <-u.taker.Ended():
		case <-time.After(endTime):
			u.d.log.Error("the new process was killed, and does not end", eventKey, "service", "pid", u.taker.PID())
		}
	}
}

// undo ends the new process, and then continues the sessions.
func (u *upgrade) undo() {
	u.kill()
	if u.detached {
		if err := u.d.ipsec.attach(); err != nil {
			u.d.log.Error("IPsec driver does not continue", eventKey, "ipsec", "reason", err)
		}
	}
	if u.link != nil {
		u.link.Close()
	}
	if !u.stopped.IsZero() {
		for _, w := range u.luns {
			if err := w.l.unit.Resume(); err != nil {
				u.d.log.Error("checksums cannot be kept: their side file cannot be written", eventKey, "lun", "target", w.t.name, "lun", w.l.ID, "reason", err)
			}
		}
		u.rest.Resume()
		u.d.listeners.Resume()
	}
	if u.supervision != nil {
		u.supervision.Close()
	}
	if u.editor != nil {
		u.editor.release()
	}
	if u.left {
		if err := u.d.group.join(); err != nil {
			u.d.log.Error("the target cannot join its cluster", eventKey, "cluster", "reason", err)
		}
	}
}

// Listeners returns what the daemon listens on. The control API adds its listeners, so that they are handed over.
func (d *Daemon) Listeners() *handover.Listeners { return &d.listeners }
