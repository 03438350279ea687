package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/capture"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// CaptureOptions limit a capture.
type CaptureOptions struct {
	Max         int64         // bytes of the file
	Duration    time.Duration // 0: until the session ends
	Application string        // named in the file
	Filter      capture.Filter
}

// Reasons for the end of a capture.
var (
	errSessionEnded = errors.New("the session ended")
	errStopped      = errors.New("it was stopped")
)

// Capture begins to record a session. by names the user for the log. The caller has to
// call the returned function, which writes the file until the capture ends: with the
// session, at a limit, by StopCapture, or with ctx, whose cause is the reason.
func (d *Daemon) Capture(by context.Context, tsih uint16, o CaptureOptions) (func(ctx context.Context, w io.Writer) (schema.Summary, error), error) {
	info, err := d.node.Session(tsih)
	if err != nil {
		return nil, fmt.Errorf("session %d: %w", tsih, ErrNotFound)
	}
	k, err := d.net.captures.Start(tsih)
	if err != nil {
		return nil, err
	}
	k.Select(o.Filter)
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
			t := time.AfterFunc(o.Duration, func() { k.Stop(fmt.Errorf("%v have passed", o.Duration)) })
			defer t.Stop()
		}
		sum, err := k.Run(ctx, w, o.Max, o.Application, fmt.Sprintf("session %d", tsih),
			fmt.Sprintf("TCP connections of %s to %s; the headers of IP and TCP are made up", info.Initiator, info.Target))
		log.InfoContext(by, "capture ended", "packets", sum.Packets, "octets", sum.Octets, "lost", sum.Lost, "reason", sum.Reason)
		return sum, err
	}, nil
}

// StopCapture ends the capture of a session.
func (d *Daemon) StopCapture(tsih uint16) error {
	k := d.net.captures.Find(tsih)
	if k == nil {
		return fmt.Errorf("capture of session %d: %w", tsih, ErrNotFound)
	}
	k.Stop(errStopped)
	return nil
}
