package api

import (
	"encoding/json"
	"net/http"
	"net/url"
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

// capture answers with a pcapng file that grows until the capture ends.
func (s *Server) capture(w http.ResponseWriter, r *http.Request) error {
	o, err := captureOptions(r.URL.Query())
	if err != nil {
		return err
	}
	id, err := tsih(r)
	if err != nil {
		return err
	}
	run, err := s.d.Capture(r.Context(), id, o)
	if err != nil {
		return err
	}
	ctx, end := s.stream(w, r)
	defer end(nil)
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Trailer", schema.SummaryTrailer)
	sum, err := run(ctx, patient{w})
	if err != nil {
		panic(http.ErrAbortHandler) // so that the client knows that the file is incomplete
	}
	b, err := json.Marshal(sum)
	if err == nil {
		w.Header().Set(schema.SummaryTrailer, string(b))
	}
	return nil
}

func captureOptions(q url.Values) (o daemon.CaptureOptions, err error) {
	o.Application, o.Max = "iser-target", defaultCapture
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
	if v := q.Get("snaplen"); v != "" {
		if o.Filter.Snap, err = strconv.Atoi(v); err != nil || o.Filter.Snap < capture.MinSnap || o.Filter.Snap > capture.MaxSnap {
			return o, invalid("query: snaplen must be a number of bytes from %d to %d, not %q", capture.MinSnap, capture.MaxSnap, v)
		}
	}
	if v := q.Get("lun"); v != "" {
		n, err := strconv.ParseUint(v, 10, 14) // flat addressing (SAM-5)
		if err != nil {
			return o, invalid("query: lun must be a number up to 16383, not %q", v)
		}
		lun := uint16(n)
		o.Filter.LUN = &lun
	}
	return o, flag(q, "headers_only", &o.Filter.Headers)
}

func (s *Server) stopCapture(r *http.Request) (any, error) {
	id, err := tsih(r)
	if err != nil {
		return nil, err
	}
	return schema.Done{Done: true}, s.d.StopCapture(id)
}
