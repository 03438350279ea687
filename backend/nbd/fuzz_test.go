package nbd

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend/nbd/nbduri"
	"github.com/iser-target/iser-target/tests/testkit"
)

// script is a connection on which the peer says one thing.
type script struct {
	net.Conn
	r io.Reader
}

func (s script) Read(b []byte) (int, error)       { return s.r.Read(b) }
func (s script) Write(b []byte) (int, error)      { return len(b), nil }
func (s script) Close() error                     { return nil }
func (s script) SetDeadline(time.Time) error      { return nil }
func (s script) SetReadDeadline(time.Time) error  { return nil }
func (s script) SetWriteDeadline(time.Time) error { return nil }

func reply(option, kind uint32, data []byte) []byte {
	b := be.AppendUint32(be.AppendUint64(nil, magicReply), option)
	b = be.AppendUint32(be.AppendUint32(b, kind), uint32(len(data)))
	return append(b, data...)
}

// Whatever a server says in the handshake ends in an export that a Store can use, or in an error.
func FuzzHandshake(f *testing.F) {
	hello := be.AppendUint16(be.AppendUint64(be.AppendUint64(nil, magicInit), magicOption), flagFixedNewstyle|flagNoZeroes)
	info := be.AppendUint16(be.AppendUint64(be.AppendUint16(nil, infoExport), 1<<30), allFlags)
	blocks := be.AppendUint32(be.AppendUint32(be.AppendUint32(be.AppendUint16(nil, infoBlockSize), 1), 4096), 1<<25)
	f.Add(bytes.Join([][]byte{hello, reply(optStructuredReply, repAck, nil),
		reply(optSetMetaContext, repMetaContext, append(be.AppendUint32(nil, 7), contextAllocation...)), reply(optSetMetaContext, repAck, nil),
		reply(optGo, repInfo, info), reply(optGo, repInfo, blocks), reply(optGo, repAck, nil)}, nil))
	f.Add(bytes.Join([][]byte{hello, reply(optStructuredReply, repUnsupported, nil), reply(optGo, repUnknown, []byte("no"))}, nil))
	f.Add(hello)
	a := &nbduri.Address{Network: "unix", Export: "disk"}
	testkit.FuzzBytes(f, func(t testing.TB, b []byte) {
		_, e, err := negotiate(script{r: bytes.NewReader(b)}, a)
		if err == nil && (e.check() != nil || e.size < 0) {
			t.Errorf("%+v", e)
		}
		if err == nil {
			if i, err := (&Config{}).describe(&e); err == nil && i.Validate() != nil {
				t.Errorf("%+v", i)
			}
		}
	})
}

// Whatever a server answers ends requests with what it says, or the connection. It reaches no memory but that of the requests.
func FuzzAnswers(f *testing.F) {
	simple := answer(false, 4, 0, nil)
	f.Add(append(chunk(chunkDone, chunkData, 1, append(be.AppendUint64(nil, 512), make([]byte, 1024)...)), simple...))
	f.Add(append(chunk(0, chunkHole, 1, be.AppendUint32(be.AppendUint64(nil, 512), 512)), chunk(chunkDone, chunkData, 1, append(be.AppendUint64(nil, 1024), make([]byte, 512)...))...))
	f.Add(chunk(chunkDone, chunkBlockStatus, 2, be.AppendUint32(be.AppendUint32(be.AppendUint32(nil, 7), 4096), 3)))
	f.Add(answer(true, 1, 5, nil))
	f.Add(append(answer(false, 3, 0, nil), answer(false, 4, 28, nil)...))
	testkit.FuzzBytes(f, func(t testing.TB, b []byte) {
		s := &Store{pending: map[uint64]*request{}}
		s.room = sync.NewCond(&s.mu)
		c := newConn(s, script{r: bytes.NewReader(b)}, export{structured: true, flags: allFlags, context: 7, status: true})
		c.r = bufio.NewReader(bytes.NewReader(b))
		memory := bytes.Repeat([]byte{0xa5}, 3*1024)
		data := memory[1024:2048:2048]
		list := []*request{
			{command: cmdRead, off: 512, n: 1024, p: data}, {command: cmdBlockStatus, off: 0, n: 1 << 20},
			{command: cmdWrite, off: 0, n: 512, p: make([]byte, 512)}, {command: cmdFlush},
		}
		for _, r := range list {
			r.done = make(chan struct{}, 1)
			s.enlist(r)
		}
		if err := c.receive(); err == nil {
			t.Error("the connection ended without a reason")
		}
		for _, outside := range [][]byte{memory[:1024], memory[2048:]} {
			if len(bytes.Trim(outside, "\xa5")) > 0 {
				t.Error("memory of others was written to")
			}
		}
		for _, r := range list {
			if r.err == nil && r.cookie == 0 && (r.command == cmdRead && r.got != r.n || r.command == cmdBlockStatus && r.run == 0) {
				t.Errorf("command %d is complete without an answer", r.command)
			}
		}
	})
}
