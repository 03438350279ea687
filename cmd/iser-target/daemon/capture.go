package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/capture"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/rdma"
)

// stepUp is the iscsi.StepUp of portals.
func (d *Daemon) stepUp(params iscsi.Params, tasks int) (iscsi.EnableDatamover, error) {
	enable, err := iser.Allocate(iser.Options{RDMA: *d.rdma.Load()}, params, tasks)
	if err != nil {
		return nil, err
	}
	return func(nc net.Conn, prefix []byte, timeout time.Duration) (iscsi.Datamover, error) {
		tap := nc.(*capture.Conn)
		tap.Unread(nil) // until there is a stream nobody knows
		dm, err := enable(nc, prefix, timeout)
		if c, ok := dm.(interface{ Stream() *rdma.Conn }); ok {
			tap.Unread(c.Stream().Unread)
		}
		return dm, err
	}, nil
}

// joined tells the captures that nc belongs to a session. Such a connection is no newcomer any
// longer, except in discovery.
func (d *Daemon) joined(nc *capture.Conn, tsih uint16, discovery bool) {
	d.captures.Join(nc, tsih)
	if !discovery {
		d.newcomers.remove(nc)
	}
}

// CaptureOptions say what a capture has to keep to.
type CaptureOptions struct {
	Max         int64         // octets of the file
	Duration    time.Duration // 0: as long as the session
	Application string        // that is named in the file
}

// Why captures end.
var (
	errSessionEnded = errors.New("the session has ended")
	errStopped      = errors.New("it was stopped")
)

// Capture begins to record a session; by says who wants that. What it returns writes the
// file until the capture ends: with the session, at a limit, by StopCapture, or with ctx,
// whose cause is the reason. It has to be called.
func (d *Daemon) Capture(by context.Context, tsih uint16, o CaptureOptions) (func(ctx context.Context, w io.Writer) (schema.Summary, error), error) {
	info, err := d.node.Session(tsih)
	if err != nil {
		return nil, fmt.Errorf("session %d: %w", tsih, ErrNotFound)
	}
	k, err := d.captures.Start(tsih)
	if err != nil {
		return nil, err
	}
	log := d.log.With(eventKey, "capture", "tsih", tsih, "initiator", info.Initiator, "target", info.Target)
	log.InfoContext(by, "session is captured")
	return func(ctx context.Context, w io.Writer) (schema.Summary, error) {
		if end, err := d.node.SessionEnd(tsih); err != nil {
			k.Stop(errSessionEnded)
		} else {
			var cancel context.CancelFunc
			ctx, cancel = context.WithCancel(ctx)
			defer cancel()
			go func() {
				select {
				case <-end:
					k.Stop(errSessionEnded)
				case <-ctx.Done():
				}
			}()
		}
		if o.Duration > 0 {
			t := time.AfterFunc(o.Duration, func() { k.Stop(fmt.Errorf("%v are over", o.Duration)) })
			defer t.Stop()
		}
		sum, err := k.Run(ctx, w, o.Max, o.Application, fmt.Sprintf("session %d", tsih),
			fmt.Sprintf("octets of TCP connections of %s to %s; headers of IP and TCP are made up", info.Initiator, info.Target))
		log.InfoContext(by, "capture has ended", "packets", sum.Packets, "octets", sum.Octets, "lost", sum.Lost, "reason", sum.Reason)
		return sum, err
	}, nil
}

// StopCapture ends the capture of a session.
func (d *Daemon) StopCapture(tsih uint16) error {
	k := d.captures.Find(tsih)
	if k == nil {
		return fmt.Errorf("capture of session %d: %w", tsih, ErrNotFound)
	}
	k.Stop(errStopped)
	return nil
}
