package vici

import (
	"encoding/binary"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

// The types of packets and message elements, from strongSwan's description of the protocol (src/libcharon/plugins/vici/README.md).
const (
	cmdRequest, cmdResponse, cmdUnknown      = 0, 1, 2
	eventRegister, eventUnregister           = 3, 4
	eventConfirm, eventUnknown, event        = 5, 6, 7
	sectionStart, sectionEnd, keyValue       = 1, 2, 3
	listStart, listItem, listEnd        byte = 4, 5, 6
)

// section, value and values return the elements of a message.
func section(name string, inside ...[]byte) []byte {
	b := append([]byte{sectionStart, byte(len(name))}, name...)
	return append(append(b, slices.Concat(inside...)...), sectionEnd)
}

func value(name, v string) []byte {
	b := append([]byte{keyValue, byte(len(name))}, name...)
	return append(binary.BigEndian.AppendUint16(b, uint16(len(v))), v...)
}

func values(name string, items ...string) []byte {
	b := append([]byte{listStart, byte(len(name))}, name...)
	for _, item := range items {
		b = append(binary.BigEndian.AppendUint16(append(b, listItem), uint16(len(item))), item...)
	}
	return append(b, listEnd)
}

// packet returns a packet with its length.
func packet(kind byte, name string, message []byte) []byte {
	b := []byte{kind}
	if kind == cmdRequest || kind == eventRegister || kind == eventUnregister || kind == event {
		b = append(append(b, byte(len(name))), name...)
	}
	b = append(b, message...)
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...)
}

// A charon answers on a socket as strongSwan's daemon does.
type charon struct {
	t      *testing.T
	socket string
	ln     net.Listener

	mu       sync.Mutex
	sas      [][]byte // messages of list-sa
	conns    [][]byte // messages of list-conn
	silent   bool     // requests are not answered
	raw      []byte   // sent instead of each answer
	asked    map[string]int
	requests []string            // of initiate: the message
	open     map[net.Conn]string // and the events that it has registered
	refuse   string              // errmsg of initiate
}

func newCharon(t *testing.T) *charon {
	c := &charon{t: t, socket: filepath.Join(t.TempDir(), "charon.vici"), asked: map[string]int{}, open: map[net.Conn]string{}}
	c.start()
	t.Cleanup(c.stop)
	return c
}

func (c *charon) start() {
	ln, err := net.Listen("unix", c.socket)
	if err != nil {
		c.t.Fatal(err)
	}
	c.ln = ln
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			c.mu.Lock()
			c.open[conn] = ""
			c.mu.Unlock()
			go c.serve(conn)
		}
	}()
}

// stop ends the daemon and all connections.
func (c *charon) stop() {
	c.ln.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	for conn := range c.open {
		conn.Close()
	}
	clear(c.open)
}

func (c *charon) serve(conn net.Conn) {
	for {
		var header [4]byte
		if _, err := io.ReadFull(conn, header[:]); err != nil {
			return
		}
		b := make([]byte, binary.BigEndian.Uint32(header[:]))
		if _, err := io.ReadFull(conn, b); err != nil {
			return
		}
		kind, name, message := b[0], string(b[2:2+b[1]]), b[2+b[1]:]
		c.answer(conn, kind, name, message)
	}
}

func (c *charon) answer(conn net.Conn, kind byte, name string, message []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asked[name]++
	send := func(kind byte, name string, m []byte) { conn.Write(packet(kind, name, m)) }
	switch {
	case c.silent:
	case c.raw != nil:
		conn.Write(c.raw)
	case kind == eventRegister:
		c.open[conn] += name + " "
		send(eventConfirm, "", nil)
	case kind == eventUnregister:
		send(eventConfirm, "", nil)
	case name == "list-sas":
		for _, m := range c.sas {
			send(event, "list-sa", m)
		}
		send(cmdResponse, "", nil)
	case name == "list-conns":
		for _, m := range c.conns {
			send(event, "list-conn", m)
		}
		send(cmdResponse, "", nil)
	case name == "initiate":
		c.requests = append(c.requests, string(message))
		if c.refuse != "" {
			send(cmdResponse, "", append(value("success", "no"), value("errmsg", c.refuse)...))
		} else {
			send(cmdResponse, "", value("success", "yes"))
		}
	default:
		send(cmdUnknown, "", nil)
	}
}

// set changes what the daemon answers.
func (c *charon) set(f func(c *charon)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f(c)
}

// count returns how often the daemon was asked.
func (c *charon) count(name string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.asked[name]
}

// raise sends an event to each connection that has registered it, and returns their number.
func (c *charon) raise(name string, message []byte) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for conn, events := range c.open {
		for e := range strings.FieldsSeq(events) {
			if e == name {
				conn.Write(packet(event, name, message))
				n++
			}
		}
	}
	return n
}

// established returns the message list-sa of charon 5.9.8 (swanctl --list-sas --raw), with the SPIs of one child.
func established(id, spiIn, spiOut string) []byte {
	return section("iser-target",
		value("uniqueid", "1"), value("version", "2"), value("state", "ESTABLISHED"),
		value("local-host", "192.0.2.2"), value("local-port", "4500"), value("local-id", "target.example.com"),
		value("remote-host", "192.0.2.1"), value("remote-port", "4500"), value("remote-id", id),
		value("initiator-spi", "b2d343a9464bf7ed"), value("responder-spi", "cad00179c5f31faa"),
		value("encr-alg", "AES_GCM_16"), value("encr-keysize", "128"), value("prf-alg", "PRF_HMAC_SHA2_256"),
		value("dh-group", "ECP_256"), value("established", "13"), value("rekey-time", "14135"),
		section("child-sas", section("iscsi-1",
			value("name", "iscsi"), value("uniqueid", "1"), value("reqid", "1"), value("state", "INSTALLED"),
			value("mode", "TUNNEL"), value("protocol", "ESP"), value("spi-in", spiIn), value("spi-out", spiOut),
			value("encr-alg", "AES_GCM_16"), value("encr-keysize", "128"), value("esn", "1"),
			value("rekey-time", "3264"), value("life-time", "4188"), value("install-time", "12"),
			values("local-ts", "192.0.2.2/32[tcp/iscsi-target]"), values("remote-ts", "192.0.2.1/32[tcp]"))))
}
