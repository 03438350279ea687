package nbd

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A server is one whose disk has a volatile cache: what is not flushed when it is killed is lost.
type server struct {
	t    *testing.T
	path string // of its socket

	// Of the next connections.
	flags      uint16
	simple     bool // no structured answers
	noStatus   bool
	minimum    uint32
	size       int64
	readsInTwo bool // the answer to a read has two chunks

	mu      sync.Mutex
	l       net.Listener
	conns   map[net.Conn]bool
	cache   []byte // what reads see
	disk    []byte // what is flushed
	flushes int
	fua     int
	answers func(command uint16, off int64, n uint32) (errno uint32, silent bool) // of requests; nil: none fails
	hold    chan struct{}                                                         // requests wait for that; nil: they don't
	early   bool                                                                  // the connection ends after a change, before its answer
	ends    int                                                                   // the connection ends after so many requests; 0: it does not
}

const allFlags = flagHasFlags | flagSendFlush | flagSendFUA | flagSendWriteZeroes | flagSendDF

func newServer(t *testing.T, size int64) *server {
	s := &server{t: t, path: filepath.Join(t.TempDir(), "s"), flags: allFlags, minimum: 1, size: size, conns: map[net.Conn]bool{},
		cache: make([]byte, size), disk: make([]byte, size)}
	s.start()
	t.Cleanup(s.kill)
	return s
}

func (s *server) uri() string { return "nbd+unix:///disk?socket=" + s.path }

func (s *server) start() {
	l, err := net.Listen("unix", s.path)
	if err != nil {
		s.t.Fatal(err)
	}
	s.mu.Lock()
	s.l = l
	s.mu.Unlock()
	go func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.conns[nc] = true
			s.mu.Unlock()
			go s.serve(nc)
		}
	}()
}

// kill ends the server, which loses what is not flushed.
func (s *server) kill() {
	s.l.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	copy(s.cache, s.disk)
	s.drop()
}

// drop ends the connections. Preconditions: s.mu is held.
func (s *server) drop() {
	for nc := range s.conns {
		nc.Close()
		delete(s.conns, nc)
	}
}

func (s *server) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *server) serve(nc net.Conn) {
	defer nc.Close()
	if !s.greet(nc) {
		return
	}
	r := bufio.NewReader(nc)
	var all sync.Mutex // of answers
	for n := 1; ; n++ {
		b := make([]byte, requestLen)
		if _, err := io.ReadFull(r, b); err != nil {
			return
		}
		flags, command := be.Uint16(b[4:]), be.Uint16(b[6:])
		off, length := int64(be.Uint64(b[16:])), be.Uint32(b[24:])
		if be.Uint32(b) != magicRequest {
			s.t.Errorf("request begins with %#x", be.Uint32(b))
			return
		}
		var data []byte
		if command == cmdWrite {
			data = make([]byte, length)
			if _, err := io.ReadFull(r, data); err != nil {
				return
			}
		}
		if command == cmdDisconnect {
			return
		}
		s.mu.Lock()
		hold, ends := s.hold, s.ends
		s.mu.Unlock()
		if ends == n {
			return
		}
		go func() {
			if hold != nil {
				<-hold
			}
			if a := s.execute(nc, flags, command, be.Uint64(b[8:]), off, length, data); a != nil {
				all.Lock()
				defer all.Unlock()
				nc.Write(a)
			}
		}()
	}
}

// execute returns the answer; nil: none.
func (s *server) execute(nc net.Conn, flags, command uint16, cookie uint64, off int64, n uint32, data []byte) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.conns[nc] { // it is killed
		return nil
	}
	structured := !s.simple && (command == cmdRead || command == cmdBlockStatus)
	if structured && flags&cmdDF == 0 && command == cmdRead && s.flags&flagSendDF != 0 {
		s.t.Error("a read without DF")
	}
	if f := s.answers; f != nil {
		if errno, silent := f(command, off, n); silent {
			return nil
		} else if errno != 0 {
			return answer(structured, cookie, errno, nil)
		}
	}
	if (off|int64(n))&int64(s.minimum-1) != 0 || off+int64(n) > s.size {
		s.t.Errorf("command %d for %d bytes at %d of %d", command, n, off, s.size)
		return answer(structured, cookie, uint32(unix.EINVAL), nil)
	}
	switch command {
	case cmdRead:
		if structured && s.readsInTwo && n > 512 {
			a := chunk(0, chunkData, cookie, append(be.AppendUint64(nil, uint64(off)), s.cache[off:off+512]...))
			return append(a, chunk(chunkDone, chunkData, cookie, append(be.AppendUint64(nil, uint64(off+512)), s.cache[off+512:off+int64(n)]...))...)
		}
		return answer(structured, cookie, 0, append(be.AppendUint64(nil, uint64(off)), s.cache[off:off+int64(n)]...))
	case cmdBlockStatus:
		b := be.AppendUint32(nil, 7)
		for at, end := off, off+int64(n); at < end; {
			zero := s.cache[at] == 0
			m := int64(1)
			for at+m < end && (s.cache[at+m] == 0) == zero {
				m++
			}
			b = be.AppendUint32(b, uint32(m))
			state := uint32(0)
			if zero {
				state = stateHole | stateZero
			}
			b, at = be.AppendUint32(b, state), at+m
			if len(b) > 100 {
				break
			}
		}
		return chunk(chunkDone, chunkBlockStatus, cookie, b)
	case cmdWrite:
		copy(s.cache[off:], data)
	case cmdWriteZeroes:
		clear(s.cache[off : off+int64(n)])
	case cmdFlush:
		s.flushes++
		copy(s.disk, s.cache)
	default:
		return answer(structured, cookie, uint32(unix.EINVAL), nil)
	}
	if flags&cmdFUA != 0 {
		s.fua++
		copy(s.disk[off:off+int64(n)], s.cache[off:])
	}
	if s.early && command != cmdFlush {
		s.early = false
		s.drop()
		return nil
	}
	return answer(structured, cookie, 0, nil)
}

func answer(structured bool, cookie uint64, errno uint32, data []byte) []byte {
	if !structured {
		b := be.AppendUint32(nil, magicSimple)
		b = be.AppendUint64(be.AppendUint32(b, errno), cookie)
		if len(data) > 8 {
			b = append(b, data[8:]...)
		}
		return b
	}
	if errno != 0 {
		b := be.AppendUint16(be.AppendUint32(nil, errno), 3)
		return chunk(chunkDone, chunkErrorBit+1, cookie, append(b, "why"...))
	}
	return chunk(chunkDone, chunkData, cookie, data)
}

func chunk(flags, kind uint16, cookie uint64, data []byte) []byte {
	b := be.AppendUint16(be.AppendUint16(be.AppendUint32(nil, magicStructured), flags), kind)
	b = be.AppendUint32(be.AppendUint64(b, cookie), uint32(len(data)))
	return append(b, data...)
}

// greet does the handshake.
func (s *server) greet(nc net.Conn) bool {
	b := be.AppendUint64(be.AppendUint64(nil, magicInit), magicOption)
	nc.Write(be.AppendUint16(b, flagFixedNewstyle|flagNoZeroes))
	if _, err := io.ReadFull(nc, b[:4]); err != nil {
		return false
	}
	for {
		b := make([]byte, 16)
		if _, err := io.ReadFull(nc, b); err != nil {
			return false
		}
		option, data := be.Uint32(b[8:]), make([]byte, be.Uint32(b[12:]))
		if _, err := io.ReadFull(nc, data); err != nil {
			return false
		}
		reply := func(kind uint32, data []byte) {
			b := be.AppendUint32(be.AppendUint64(nil, magicReply), option)
			b = be.AppendUint32(be.AppendUint32(b, kind), uint32(len(data)))
			nc.Write(append(b, data...))
		}
		s.mu.Lock()
		simple, status, size, flags, minimum := s.simple, !s.noStatus, s.size, s.flags, s.minimum
		s.mu.Unlock()
		switch {
		case option == optStructuredReply && !simple:
			reply(repAck, nil)
		case option == optSetMetaContext && status:
			reply(repMetaContext, append(be.AppendUint32(nil, 7), contextAllocation...))
			reply(repAck, nil)
		case option == optGo:
			if name := string(data[4 : 4+be.Uint32(data)]); name != "disk" {
				reply(repUnknown, fmt.Appendf(nil, "no %s", name))
				continue
			}
			i := be.AppendUint64(be.AppendUint16(nil, infoExport), uint64(size))
			reply(repInfo, be.AppendUint16(i, flags))
			i = be.AppendUint32(be.AppendUint16(nil, infoBlockSize), minimum)
			reply(repInfo, be.AppendUint32(be.AppendUint32(i, max(4096, minimum)), 32<<20))
			reply(repAck, nil)
			return true
		default:
			reply(repUnsupported, nil)
		}
	}
}

// within fails the test unless f ends in time.
func within(t *testing.T, limit time.Duration, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(limit):
		t.Fatalf("%s: not within %v", what, limit)
	}
}
