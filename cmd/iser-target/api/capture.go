package api

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/capture"
	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

const (
	defaultCapture = 64 << 20 // bytes of the file
	maxCapture     = 1 << 40
	// maxCaptureTime bounds the parameter duration.
	maxCaptureTime = 30 * 24 * time.Hour
)

var errGone = errors.New("the client is gone")

// capture answers with a pcapng file that grows until the capture ends.
func (s *Server) capture(w http.ResponseWriter, r *http.Request) {
	o, err := captureOptions(r)
	var id uint16
	if err == nil {
		id, err = tsih(r)
	}
	if err != nil {
		writeError(w, err)
		return
	}
	run, err := s.d.Capture(r.Context(), id, o)
	if err != nil {
		writeError(w, err)
		return
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	go func() {
		select {
		case <-s.ending:
			cancel(errEnding)
		case <-r.Context().Done():
			cancel(errGone)
		case <-ctx.Done():
		}
	}()
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Trailer", schema.SummaryTrailer)
	control := http.NewResponseController(w)
	control.SetReadDeadline(time.Time{}) // else the read deadline would look like the end of the client
	sum, err := run(ctx, &patient{w, control})
	if err != nil {
		panic(http.ErrAbortHandler) // so that the client knows that the file is incomplete
	}
	b, err := json.Marshal(sum)
	if err == nil {
		w.Header().Set(schema.SummaryTrailer, string(b))
	}
}

func captureOptions(r *http.Request) (o daemon.CaptureOptions, err error) {
	o.Application, o.Max = "iser-target", defaultCapture
	q, err := query(r, "max", "duration")
	if err != nil {
		return o, err
	}
	if v := q.Get("max"); v != "" {
		if o.Max, err = strconv.ParseInt(v, 10, 64); err != nil || o.Max < capture.MinSize || o.Max > maxCapture {
			return o, invalid("query: max must be a number of bytes from %d to %d, not %q", capture.MinSize, maxCapture, v)
		}
	}
	if v := q.Get("duration"); v != "" {
		if o.Duration, err = time.ParseDuration(v); err != nil || o.Duration <= 0 || o.Duration > maxCaptureTime {
			return o, invalid("query: duration must be a time up to %v, like 10s, not %q", maxCaptureTime, v)
		}
	}
	return o, nil
}

// A patient is a Writer to a client that must read each write within writeTime.
type patient struct {
	w       io.Writer
	control *http.ResponseController
}

func (p *patient) Write(b []byte) (int, error) {
	p.control.SetWriteDeadline(time.Now().Add(writeTime))
	n, err := p.w.Write(b)
	if err == nil {
		err = p.control.Flush()
	}
	return n, err
}

func (s *Server) stopCapture(r *http.Request) (any, error) {
	id, err := tsih(r)
	if err != nil {
		return nil, err
	}
	if _, err := query(r); err != nil {
		return nil, err
	}
	return schema.Done{Done: true}, s.d.StopCapture(id)
}
