package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/capture"
	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
)

const (
	// summaryTrailer is behind the file of a capture: a capture.Summary as JSON.
	summaryTrailer = "Capture-Summary"

	defaultCapture = 64 << 20 // octets of the file
	maxCapture     = 1 << 40
	// maxCaptureTime is the longest that a capture can be bounded by.
	maxCaptureTime = 30 * 24 * time.Hour
)

var errGone = errors.New("its client has gone")

// capture answers a pcapng file that grows until the capture ends.
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
	w.Header().Set("Trailer", summaryTrailer)
	control := http.NewResponseController(w)
	control.SetReadDeadline(time.Time{}) // the end of readTime would be taken for that of the client
	sum, err := run(ctx, &patient{w, control})
	if err != nil {
		panic(http.ErrAbortHandler) // the client must not take it for the end
	}
	b, err := json.Marshal(sum)
	if err == nil {
		w.Header().Set(summaryTrailer, string(b))
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
			return o, invalid("query: max must be a number of octets from %d to %d, not %q", capture.MinSize, maxCapture, v)
		}
	}
	if v := q.Get("duration"); v != "" {
		if o.Duration, err = time.ParseDuration(v); err != nil || o.Duration <= 0 || o.Duration > maxCaptureTime {
			return o, invalid("query: duration must be a time up to %v, like 10s, not %q", maxCaptureTime, v)
		}
	}
	return o, nil
}

// patient writes to a client that takes what it gets within writeTime.
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
	return done{true}, s.d.StopCapture(id)
}

func capturePath(tsih uint16) string { return fmt.Sprintf("/v1/sessions/%d/capture", tsih) }

// A Capture is a pcapng file that is on its way.
type Capture struct {
	c    *Client
	resp *http.Response
}

// Capture begins to record a session. The file has at most max octets and records for at
// most the duration; 0 is the default of the target.
func (c *Client) Capture(ctx context.Context, tsih uint16, max int64, duration time.Duration) (*Capture, error) {
	q := url.Values{}
	if max != 0 {
		q.Set("max", strconv.FormatInt(max, 10))
	}
	if duration != 0 {
		q.Set("duration", duration.String())
	}
	resp, err := c.roundTrip(ctx, http.MethodGet, capturePath(tsih), q, "", nil)
	if err != nil {
		return nil, err
	}
	return &Capture{c, resp}, nil
}

// StopCapture ends the capture of a session.
func (c *Client) StopCapture(ctx context.Context, tsih uint16) error {
	return c.call(ctx, http.MethodDelete, capturePath(tsih), nil, nil, &done{})
}

// Close lets go of what was not written.
func (k *Capture) Close() error { return k.resp.Body.Close() }

// Copy writes the file to w until the capture ends, and returns what became of it.
// When the target goes away before, or w fails, the octets that are counted are a file, too:
// they are whole blocks.
func (k *Capture) Copy(w io.Writer) (sum capture.Summary, err error) {
	sum.Size, err = capture.CopyBlocks(w, k.resp.Body)
	var write *capture.WriteError
	switch {
	case errors.As(err, &write):
		return sum, write.Err
	case err != nil:
		return sum, k.c.unreached(http.MethodGet, err)
	}
	if err := json.Unmarshal([]byte(k.resp.Trailer.Get(summaryTrailer)), &sum); err != nil {
		return sum, &Error{Code: Failed, Message: fmt.Sprintf("the target at %s does not say how the capture ended: %v", k.c.where, err)}
	}
	return sum, nil
}
