package nbd

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/iser-target/iser-target/backend/nbd/nbduri"
)

// An export is what the handshake tells of one.
type export struct {
	size       int64
	flags      uint16
	structured bool   // answers are structured
	context    uint32 // of base:allocation
	status     bool   // there is one
	// Block sizes in bytes.
	minimum, preferred, maximum uint32
}

// What a server has that does not tell its block sizes.
const (
	defaultPreferred = 4096
	defaultMaximum   = 32 << 20
)

// keepAlive finds a server whose machine is gone within half a minute.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 4}

// dial connects and negotiates the export of a.
func dial(ctx context.Context, a *nbduri.Address) (net.Conn, export, error) {
	d := net.Dialer{KeepAliveConfig: keepAlive}
	nc, err := d.DialContext(ctx, a.Network, a.Host)
	if err != nil {
		return nil, export{}, err
	}
	stop := context.AfterFunc(ctx, func() { nc.SetDeadline(time.Now()) })
	conn, e, err := negotiate(nc, a)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		nc.Close()
		if ctx.Err() != nil {
			err = fmt.Errorf("the server has not answered the handshake in time: %w", err)
		}
		return nil, export{}, err
	}
	return conn, e, nil
}

// A handshake is the negotiation of one connection.
type handshake struct {
	net.Conn
	buf [maxOptionReply]byte
}

// negotiate does the handshake of a new connection, and returns the one to use then.
func negotiate(nc net.Conn, a *nbduri.Address) (net.Conn, export, error) {
	h := &handshake{Conn: nc}
	e, err := h.run(a)
	if err != nil && errors.Is(err, io.EOF) {
		err = fmt.Errorf("the server has closed the connection during the handshake: %w", io.ErrUnexpectedEOF)
	}
	return h.Conn, e, err
}

func (h *handshake) run(a *nbduri.Address) (e export, err error) {
	b := h.buf[:18]
	if _, err := io.ReadFull(h, b); err != nil {
		return e, err
	}
	if be.Uint64(b) != magicInit {
		return e, violation("it does not begin with NBDMAGIC")
	}
	if be.Uint64(b[8:]) != magicOption {
		return e, errors.New("the server only has the old handshake, which knows neither exports nor options. Use another server")
	}
	theirs := be.Uint16(b[16:])
	if theirs&flagFixedNewstyle == 0 {
		return e, errors.New("the server lacks the fixed newstyle handshake. Use another server")
	}
	be.PutUint32(b, uint32(theirs&(flagFixedNewstyle|flagNoZeroes)))
	if _, err := h.Write(b[:4]); err != nil {
		return e, err
	}
	if a.TLS {
		if err := h.startTLS(a); err != nil {
			return e, err
		}
	}
	if err := h.extensions(a, &e); err != nil {
		return e, err
	}
	return e, h.choose(a, &e)
}

// option sends an option and returns what kinds of answers come until the last one, each with its data, to f.
func (h *handshake) option(number uint32, data []byte, f func(kind uint32, data []byte) error) (last uint32, text string, err error) {
	req := make([]byte, 16, 16+len(data))
	be.PutUint64(req, magicOption)
	be.PutUint32(req[8:], number)
	be.PutUint32(req[12:], uint32(len(data)))
	if _, err := h.Write(append(req, data...)); err != nil {
		return 0, "", err
	}
	for range 1000 { // no server has so many
		b := h.buf[:20]
		if _, err := io.ReadFull(h, b); err != nil {
			return 0, "", err
		}
		kind, n := be.Uint32(b[12:]), be.Uint32(b[16:])
		if be.Uint64(b) != magicReply || be.Uint32(b[8:]) != number || n > maxOptionReply {
			return 0, "", violation("the answer to option %d has the magic %#x, option %d and %d bytes", number, be.Uint64(b), be.Uint32(b[8:]), n)
		}
		b = h.buf[:n]
		if _, err := io.ReadFull(h, b); err != nil {
			return 0, "", err
		}
		if kind == repAck || kind&repError != 0 {
			if kind == repAck {
				b = nil
			}
			return kind, string(b[:min(len(b), maxErrorText)]), nil
		}
		if f == nil {
			return 0, "", violation("answer %d to option %d", kind, number)
		}
		if err := f(kind, b); err != nil {
			return 0, "", err
		}
	}
	return 0, "", violation("the answer to option %d has no end", number)
}

// startTLS continues with TLS.
func (h *handshake) startTLS(a *nbduri.Address) error {
	last, text, err := h.option(optSTARTTLS, nil, nil)
	if err != nil {
		return err
	}
	if last != repAck {
		return fmt.Errorf("the server refuses TLS (%s). Use nbd, or configure TLS in the server", refusal(last, text))
	}
	c, err := tlsConfig(a)
	if err != nil {
		return fmt.Errorf("TLS: %w", err)
	}
	t := tls.Client(h.Conn, c)
	h.Conn = t
	if err := t.Handshake(); err != nil {
		return fmt.Errorf("TLS: %w", err)
	}
	return nil
}

// extensions asks for structured replies and for the status of blocks, which a server may lack.
func (h *handshake) extensions(a *nbduri.Address, e *export) error {
	last, text, err := h.option(optStructuredReply, nil, nil)
	if err != nil {
		return err
	}
	if last == repTLSRequired {
		return tlsRequired(text)
	}
	if e.structured = last == repAck; !e.structured {
		return nil
	}
	data := be.AppendUint32(nil, uint32(len(a.Export)))
	data = append(data, a.Export...)
	data = be.AppendUint32(data, 1)
	data = be.AppendUint32(data, uint32(len(contextAllocation)))
	data = append(data, contextAllocation...)
	_, _, err = h.option(optSetMetaContext, data, func(kind uint32, b []byte) error {
		if kind == repMetaContext && len(b) >= 4 && string(b[4:]) == contextAllocation {
			e.context, e.status = be.Uint32(b), true
		}
		return nil
	})
	return err
}

func tlsRequired(text string) error {
	return fmt.Errorf("the server requires TLS%s. Use nbds or nbds+unix", quoted(text))
}

// choose chooses the export, after which the handshake is over.
func (h *handshake) choose(a *nbduri.Address, e *export) error {
	data := be.AppendUint32(nil, uint32(len(a.Export)))
	data = append(data, a.Export...)
	data = be.AppendUint16(data, 1)
	data = be.AppendUint16(data, infoBlockSize)
	e.minimum, e.preferred, e.maximum = 1, defaultPreferred, defaultMaximum
	found := false
	last, text, err := h.option(optGo, data, func(kind uint32, b []byte) error {
		if kind != repInfo || len(b) < 2 {
			return violation("answer %d with %d bytes to NBD_OPT_GO", kind, len(b))
		}
		switch what := be.Uint16(b); {
		case what == infoExport && len(b) == 12:
			size := be.Uint64(b[2:])
			if size > 1<<62 {
				return violation("the export has %d bytes", size)
			}
			e.size, e.flags, found = int64(size), be.Uint16(b[10:]), true
		case what == infoBlockSize && len(b) == 14:
			e.minimum, e.preferred, e.maximum = be.Uint32(b[2:]), be.Uint32(b[6:]), be.Uint32(b[10:])
		case what == infoExport || what == infoBlockSize:
			return violation("information %d of the export has %d bytes", what, len(b))
		}
		return nil
	})
	switch {
	case err != nil:
		return err
	case last == repTLSRequired:
		return tlsRequired(text)
	case last == repUnknown:
		return fmt.Errorf("the server has no export %q%s", a.Export, quoted(text))
	case last != repAck:
		return fmt.Errorf("the server refuses export %q: %s", a.Export, refusal(last, text))
	case !found || e.flags&flagHasFlags == 0:
		return violation("it tells neither size nor flags of the export")
	}
	return e.check()
}

// check returns an error unless a Store can use the export.
func (e *export) check() error {
	pow2 := func(n uint32) bool { return n != 0 && n&(n-1) == 0 }
	switch {
	case !pow2(e.minimum) || e.minimum > 64<<10:
		return violation("the least block has %d bytes", e.minimum)
	case !pow2(e.preferred) || e.preferred < e.minimum:
		return violation("the preferred block has %d bytes, and the least one %d", e.preferred, e.minimum)
	case e.maximum < e.minimum:
		return violation("the longest request has %d bytes, and the least block %d", e.maximum, e.minimum)
	}
	return nil
}

// refusal names the answer to an option.
func refusal(kind uint32, text string) string {
	names := map[uint32]string{repUnsupported: "it does not support the option", repPolicy: "its policy", repUnknown: "it does not know it", repTLSRequired: "it requires TLS"}
	s, ok := names[kind]
	if !ok {
		s = fmt.Sprintf("answer %#x", kind)
	}
	return s + quoted(text)
}

func quoted(text string) string {
	if text == "" {
		return ""
	}
	return fmt.Sprintf(" (%q)", text)
}
