package nfs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/iser-target/iser-target/rdma/rpcrdma"
	"github.com/iser-target/iser-target/rdma/rpcrdma/oncrpc"
)

// Limits of a Server.
const (
	maxData  = 1 << 20  // of a READ or WRITE, in bytes
	maxFile  = 64 << 20 // bytes of a file
	maxName  = 255
	maxOps   = 16
	maxSlots = 16
	maxNodes = 4096
)

// A Server is a file system in memory, served over NFSv4.1. It gives a read delegation for files whose name begins with
// "delegated".
type Server struct {
	mu       sync.Mutex
	nodes    map[uint64]*node
	lastID   uint64
	clients  map[uint64]uint32 // sequence of CREATE_SESSION, by client
	sessions map[[16]byte]*session
	opens    map[[12]byte]*node
	grants   []grant
	// Seen counts the operations by number.
	Seen map[uint32]int
}

type node struct {
	id, change uint64
	parent     *node
	children   map[string]*node // nil: a file
	data       []byte
	mode       uint32
	modified   time.Time
	verifier   [8]byte // of an exclusive create
	delegate   bool
}

// session is a session, and the connection of its back channel.
type session struct {
	id      [16]byte
	client  uint64
	slots   [maxSlots]uint32
	program uint32
	conn    *rpcrdma.Conn
	backSeq uint32
}

// grant is a delegation.
type grant struct {
	stateid [16]byte
	node    *node
	session *session
}

// NewServer returns a Server with an empty root.
func NewServer() *Server {
	s := &Server{nodes: map[uint64]*node{}, clients: map[uint64]uint32{}, sessions: map[[16]byte]*session{},
		opens: map[[12]byte]*node{}, Seen: map[uint32]int{}}
	root := s.add(nil, "", true)
	root.parent = root
	s.lastID = 1000 // ids are cookies, too, and 1 and 2 are reserved
	return s
}

// Programs returns the program to serve.
func (s *Server) Programs() *rpcrdma.Programs {
	p := &rpcrdma.Programs{}
	p.Register(Program, Version, Compound, s.compound)
	return p
}

// add creates a node.
func (s *Server) add(parent *node, name string, dir bool) *node {
	s.lastID++
	n := &node{id: s.lastID, parent: parent, mode: 0o644, modified: time.Now(), delegate: strings.HasPrefix(name, "delegated")}
	if dir {
		n.children, n.mode = map[string]*node{}, 0o755
	}
	if parent != nil {
		parent.children[name] = n
		parent.touch()
	}
	s.nodes[n.id] = n
	return n
}

func (n *node) touch() {
	n.change++
	n.modified = time.Now()
}

// state is that of one COMPOUND.
type state struct {
	s         *Server
	r         *rpcrdma.Request
	d         *oncrpc.Decoder
	e         *oncrpc.Encoder
	session   *session
	fh, saved *node
}

// compound answers COMPOUND (RFC 8881, section 16.2).
func (s *Server) compound(_ context.Context, r *rpcrdma.Request) error {
	c := &state{s: s, r: r, d: &r.Args, e: &r.Results}
	tag := c.d.Opaque(1024)
	minor := c.d.Uint32()
	n := c.d.Count(maxOps, 4)
	if err := c.d.Err(); err != nil {
		return err
	}
	at := len(c.e.Bytes())
	c.e.Uint32(OK)
	c.e.Opaque(tag)
	count := len(c.e.Bytes())
	c.e.Uint32(0)
	status, done := uint32(OK), 0
	if minor != 1 {
		status, n = 10021, 0 // NFS4ERR_MINOR_VERS_MISMATCH
	}
	s.mu.Lock()
	for ; done < n && status == OK; done++ {
		op := c.d.Uint32()
		c.e.Uint32(op)
		place := len(c.e.Bytes())
		c.e.Uint32(OK)
		status = c.op(op)
		binary.BigEndian.PutUint32(c.e.Bytes()[place:], status)
	}
	s.mu.Unlock()
	if err := c.d.Err(); err != nil {
		return err
	}
	binary.BigEndian.PutUint32(c.e.Bytes()[at:], status)
	binary.BigEndian.PutUint32(c.e.Bytes()[count:], uint32(done))
	return nil
}

// needs says which operations require a file handle.
var needsFH = map[uint32]bool{OpAccess: true, OpCommit: true, OpCreate: true, OpGetattr: true, OpGetFH: true, OpLookup: true,
	OpLookupp: true, OpOpen: true, OpRead: true, OpReaddir: true, OpRemove: true, OpRename: true, OpSaveFH: true, OpWrite: true,
	OpSecinfoNoName: true}

// op executes one operation, and encodes what follows its status.
func (c *state) op(op uint32) uint32 {
	c.s.Seen[op]++
	if needsFH[op] && c.fh == nil {
		return ErrNoFH
	}
	switch op {
	case OpExchangeID:
		return c.exchangeID()
	case OpCreateSession:
		return c.createSession()
	case OpSequence:
		return c.sequence()
	case OpBindConn:
		return c.bindConn()
	case OpDestroySession:
		delete(c.s.sessions, [16]byte(c.fixed(16)))
	case OpDestroyClientID:
		delete(c.s.clients, c.d.Uint64())
	case OpReclaimComplete:
		c.d.Bool()
	case OpSecinfoNoName:
		c.d.Uint32()
		c.e.Uint32(1)
		c.e.Uint32(oncrpc.AuthSys)
	case OpPutRootFH:
		c.fh = c.s.nodes[1]
	case OpPutFH:
		fh := c.d.Opaque(128)
		if c.fh = nil; len(fh) == 8 {
			c.fh = c.s.nodes[binary.BigEndian.Uint64(fh)]
		}
		if c.fh == nil {
			return ErrStale
		}
	case OpGetFH:
		c.e.Opaque(binary.BigEndian.AppendUint64(nil, c.fh.id))
	case OpSaveFH:
		c.saved = c.fh
	case OpRestoreFH:
		c.fh = c.saved
	case OpGetattr:
		c.attributes(c.fh, c.bitmap())
	case OpAccess:
		want := c.d.Uint32()
		c.e.Uint32(want)
		c.e.Uint32(want)
	case OpLookup:
		return c.lookup(c.d.String(maxName))
	case OpLookupp:
		c.fh = c.fh.parent
	case OpOpen:
		return c.open()
	case OpClose, OpOpenDowngrade:
		return c.close(op)
	case OpRead:
		return c.read()
	case OpWrite:
		return c.write()
	case OpCommit:
		c.d.Uint64()
		c.d.Uint32()
		c.e.Uint64(1)
	case OpCreate:
		return c.create()
	case OpRemove:
		return c.remove(c.d.String(maxName))
	case OpRename:
		return c.rename(c.d.String(maxName), c.d.String(maxName))
	case OpReaddir:
		return c.readdir()
	case OpSetattr:
		return c.setattr()
	case OpDelegReturn:
		id := c.fixed(16)
		c.s.grants = slices.DeleteFunc(c.s.grants, func(g grant) bool { return bytes.Equal(g.stateid[4:], id[4:]) })
	case OpTestStateid:
		n := c.d.Count(64, 16)
		c.e.Uint32(uint32(n))
		for range n {
			c.fixed(16)
			c.e.Uint32(OK)
		}
	case OpFreeStateid:
		c.fixed(16)
	default:
		return ErrNotSupp
	}
	return OK
}

// fixed decodes n bytes, or returns n zeros after an error.
func (c *state) fixed(n int) []byte {
	if b := c.d.Fixed(n); b != nil {
		return b
	}
	return make([]byte, n)
}

func (c *state) exchangeID() uint32 {
	c.fixed(8)
	c.d.Opaque(1024)
	c.d.Uint32()
	if c.d.Uint32() != 0 { // SP4_NONE
		return ErrNotSupp
	}
	for range c.d.Count(1, 16) {
		c.d.Opaque(1024)
		c.d.Opaque(1024)
		c.d.Uint64()
		c.d.Uint32()
	}
	c.s.lastID++
	c.s.clients[c.s.lastID] = 1
	c.e.Uint64(c.s.lastID)
	c.e.Uint32(1)
	c.e.Uint32(0x10000) // EXCHGID4_FLAG_USE_NON_PNFS
	c.e.Uint32(0)
	c.e.Uint64(0)
	c.e.String("rpcrdma")
	c.e.String("rpcrdma")
	c.e.Uint32(0)
	return OK
}

func (c *state) createSession() uint32 {
	client, seq, flags := c.d.Uint64(), c.d.Uint32(), c.d.Uint32()
	var fore, back Channel
	fore.Parse(c.d)
	back.Parse(c.d)
	program := c.d.Uint32()
	for range c.d.Count(4, 4) {
		switch flavor := c.d.Uint32(); flavor {
		case oncrpc.AuthNone:
		case oncrpc.AuthSys:
			c.d.Uint32()
			c.d.Opaque(255)
			c.d.Uint32()
			c.d.Uint32()
			for range c.d.Count(16, 4) {
				c.d.Uint32()
			}
		default:
			return ErrNotSupp
		}
	}
	if c.s.clients[client] == 0 {
		return 10022 // NFS4ERR_STALE_CLIENTID
	}
	s := &session{client: client, program: program}
	c.s.lastID++
	binary.BigEndian.PutUint64(s.id[:], c.s.lastID)
	c.s.sessions[s.id] = s
	if flags &= BackChannel; flags != 0 {
		s.conn = c.r.Conn()
		s.conn.EnableReverse()
	}
	fore.MaxRequests = min(fore.MaxRequests, maxSlots)
	fore.MaxOps = min(fore.MaxOps, maxOps)
	c.e.Fixed(s.id[:])
	c.e.Uint32(seq)
	c.e.Uint32(flags)
	fore.Append(c.e)
	back.Append(c.e)
	return OK
}

func (c *state) sequence() uint32 {
	id := [16]byte(c.fixed(16))
	seq, slot := c.d.Uint32(), c.d.Uint32()
	c.d.Uint32()
	c.d.Bool()
	c.session = c.s.sessions[id]
	switch {
	case c.session == nil:
		return ErrBadSes
	case slot >= maxSlots:
		return 10053 // NFS4ERR_BADSLOT
	case seq == c.session.slots[slot]:
		return 10068 // NFS4ERR_RETRY_UNCACHED_REP
	case seq != c.session.slots[slot]+1:
		return 10063 // NFS4ERR_SEQ_MISORDERED
	}
	c.session.slots[slot] = seq
	c.e.Fixed(id[:])
	for _, v := range [...]uint32{seq, slot, maxSlots - 1, maxSlots - 1, 0} {
		c.e.Uint32(v)
	}
	return OK
}

func (c *state) bindConn() uint32 {
	id := [16]byte(c.fixed(16))
	dir := c.d.Uint32()
	c.d.Bool()
	s := c.s.sessions[id]
	if s == nil {
		return ErrBadSes
	}
	s.conn = c.r.Conn()
	s.conn.EnableReverse()
	c.e.Fixed(id[:])
	c.e.Uint32(min(dir, 3))
	c.e.Bool(false)
	return OK
}

func (c *state) lookup(name string) uint32 {
	if c.fh.children == nil {
		return ErrNotDir
	}
	n := c.fh.children[name]
	if n == nil {
		return ErrNoEnt
	}
	c.fh = n
	return OK
}

// changeInfo encodes change_info4 for a directory that was changed.
func (c *state) changeInfo(dir *node, before uint64) {
	c.e.Bool(true)
	c.e.Uint64(before)
	c.e.Uint64(dir.change)
}

func (c *state) open() uint32 {
	c.d.Uint32()
	access := c.d.Uint32()
	c.d.Uint32()
	c.d.Uint64()
	c.d.Opaque(1024)
	create, mode := c.d.Uint32() == 1, uint32(0)
	var set attributes
	var verifier [8]byte
	if create {
		switch mode = c.d.Uint32(); mode {
		case 0, 1: // UNCHECKED4, GUARDED4
			set = c.parseAttributes()
		case 3: // EXCLUSIVE4_1
			copy(verifier[:], c.fixed(8))
			set = c.parseAttributes()
		default:
			return ErrNotSupp
		}
	}
	dir, name, before := c.fh, "", c.fh.change
	switch claim := c.d.Uint32(); claim {
	case 0: // CLAIM_NULL
		name = c.d.String(maxName)
		if dir.children == nil {
			return ErrNotDir
		}
		n := dir.children[name]
		switch {
		case c.d.Err() != nil:
			return ErrInval
		case n == nil && !create:
			return ErrNoEnt
		case n == nil && len(c.s.nodes) >= maxNodes:
			return 28 // NFS4ERR_NOSPC
		case n == nil:
			n = c.s.add(dir, name, false)
			n.verifier = verifier
		case create && (mode == 1 || mode == 3 && n.verifier != verifier):
			return ErrExist
		}
		c.fh = n
	case 4: // CLAIM_FH
	default:
		return ErrNotSupp
	}
	if c.fh.children != nil {
		return ErrIsDir
	}
	if create {
		if status := set.apply(c.fh); status != OK {
			return status
		}
	}
	id := c.newStateid()
	c.s.opens[[12]byte(id[4:])] = c.fh
	c.e.Fixed(id[:])
	c.changeInfo(dir, before)
	c.e.Uint32(0)
	set.bitmap(c.e)
	if access&3 != 1 || !c.fh.delegate {
		c.e.Uint32(0)
		return OK
	}
	g := grant{c.newStateid(), c.fh, c.session}
	c.s.grants = append(c.s.grants, g)
	c.e.Uint32(1) // OPEN_DELEGATE_READ
	c.e.Fixed(g.stateid[:])
	c.e.Bool(false)
	c.e.Uint32(0)
	c.e.Uint32(0)
	c.e.Uint32(0)
	c.e.String("")
	return OK
}

func (c *state) newStateid() (id [16]byte) {
	c.s.lastID++
	id[3] = 1
	binary.BigEndian.PutUint64(id[8:], c.s.lastID)
	return id
}

func (c *state) close(op uint32) uint32 {
	var id []byte
	if op == OpClose {
		c.d.Uint32()
		id = c.fixed(16)
		delete(c.s.opens, [12]byte(id[4:]))
	} else {
		id = c.fixed(16)
		c.d.Uint32()
		c.d.Uint32()
		c.d.Uint32()
	}
	c.e.Uint32(binary.BigEndian.Uint32(id) + 1)
	c.e.Fixed(id[4:])
	return OK
}

// known checks the stateid of a READ or WRITE.
func (c *state) known(id []byte) bool {
	special := bytes.Equal(id[4:], make([]byte, 12)) || bytes.Equal(id[4:], bytes.Repeat([]byte{0xff}, 12))
	return special || c.s.opens[[12]byte(id[4:])] == c.fh ||
		slices.ContainsFunc(c.s.grants, func(g grant) bool { return bytes.Equal(g.stateid[4:], id[4:]) && g.node == c.fh })
}

func (c *state) read() uint32 {
	id := c.fixed(16)
	off, n := c.d.Uint64(), c.d.Uint32()
	size := uint64(len(c.fh.data))
	switch {
	case c.d.Err() != nil:
		return ErrInval
	case c.fh.children != nil:
		return ErrIsDir
	case !c.known(id):
		return ErrBadID
	}
	off = min(off, size)
	n = uint32(min(uint64(n), maxData, size-off, uint64(c.r.Room())))
	data, err := c.r.Buffer(int(n))
	if err != nil {
		return 10018 // NFS4ERR_RESOURCE
	}
	copy(data, c.fh.data[off:])
	c.e.Bool(off+uint64(n) == size)
	c.e.Item(data)
	return OK
}

func (c *state) write() uint32 {
	id := c.fixed(16)
	off := c.d.Uint64()
	c.d.Uint32()
	data := c.d.Item(maxData)
	switch {
	case c.d.Err() != nil:
		return ErrInval
	case c.fh.children != nil:
		return ErrIsDir
	case !c.known(id):
		return ErrBadID
	case off > maxFile-uint64(len(data)):
		return 27 // NFS4ERR_FBIG
	}
	if end := int(off) + len(data); end > len(c.fh.data) {
		c.fh.data = append(c.fh.data, make([]byte, end-len(c.fh.data))...)
	}
	copy(c.fh.data[off:], data)
	c.fh.touch()
	c.e.Uint32(uint32(len(data)))
	c.e.Uint32(2) // FILE_SYNC4
	c.e.Uint64(1)
	return OK
}

func (c *state) create() uint32 {
	if c.d.Uint32() != 2 { // NF4DIR
		return ErrNotSupp
	}
	name := c.d.String(maxName)
	set := c.parseAttributes()
	dir, before := c.fh, c.fh.change
	switch {
	case c.d.Err() != nil:
		return ErrInval
	case dir.children == nil:
		return ErrNotDir
	case dir.children[name] != nil:
		return ErrExist
	case len(c.s.nodes) >= maxNodes:
		return 28
	}
	c.fh = c.s.add(dir, name, true)
	if status := set.apply(c.fh); status != OK {
		return status
	}
	c.changeInfo(dir, before)
	set.bitmap(c.e)
	return OK
}

func (c *state) remove(name string) uint32 {
	n, before := c.fh.children[name], c.fh.change
	switch {
	case n == nil:
		return ErrNoEnt
	case len(n.children) > 0:
		return ErrNotEmpty
	}
	delete(c.fh.children, name)
	delete(c.s.nodes, n.id)
	c.fh.touch()
	c.changeInfo(c.fh, before)
	return OK
}

func (c *state) rename(from, to string) uint32 {
	if c.saved == nil || c.saved.children == nil || c.fh.children == nil {
		return ErrNotDir
	}
	n := c.saved.children[from]
	if n == nil {
		return ErrNoEnt
	}
	for up := c.fh; up != up.parent; up = up.parent {
		if up == n {
			return ErrInval
		}
	}
	b1, b2 := c.saved.change, c.fh.change
	if old := c.fh.children[to]; old != nil && old != n {
		if len(old.children) > 0 {
			return ErrNotEmpty
		}
		delete(c.s.nodes, old.id)
	}
	delete(c.saved.children, from)
	c.fh.children[to], n.parent = n, c.fh
	c.saved.touch()
	c.fh.touch()
	c.changeInfo(c.saved, b1)
	c.changeInfo(c.fh, b2)
	return OK
}

func (c *state) readdir() uint32 {
	cookie := c.d.Uint64()
	c.fixed(8)
	c.d.Uint32()
	most := int(c.d.Uint32())
	want := c.bitmap()
	switch {
	case c.d.Err() != nil:
		return ErrInval
	case c.fh.children == nil:
		return ErrNotDir
	}
	c.e.Uint64(1)
	start := c.e.Len()
	// A cookie is the id of the entry, so that changes between two calls lose nothing.
	entries := slices.SortedFunc(maps.Keys(c.fh.children), func(a, b string) int {
		return int(int64(c.fh.children[a].id) - int64(c.fh.children[b].id))
	})
	eof := true
	for _, name := range entries {
		n := c.fh.children[name]
		if n.id <= cookie {
			continue
		}
		if c.e.Len()-start+600 > most {
			eof = false
			break
		}
		c.e.Bool(true)
		c.e.Uint64(n.id)
		c.e.String(name)
		c.attributes(n, want)
	}
	c.e.Bool(false)
	c.e.Bool(eof)
	return OK
}

func (c *state) setattr() uint32 {
	c.fixed(16)
	set := c.parseAttributes()
	status := uint32(ErrNoFH)
	if c.d.Err() == nil && c.fh != nil {
		status = set.apply(c.fh)
	}
	if status != OK {
		set = attributes{}
	}
	set.bitmap(c.e)
	return status
}

// bitmap decodes a bitmap4.
func (c *state) bitmap() (b [3]uint32) {
	n := c.d.Count(8, 4)
	for i := range n {
		if v := c.d.Uint32(); i < len(b) {
			b[i] = v
		}
	}
	return b
}

func has(b [3]uint32, attr uint) bool { return b[attr/32]&(1<<(attr%32)) != 0 }

// An attribute is encoded by its function.
var encoders = map[uint]func(e *oncrpc.Encoder, n *node){
	0: func(e *oncrpc.Encoder, _ *node) {
		e.Uint32(uint32(len(supported)))
		for _, v := range supported {
			e.Uint32(v)
		}
	},
	1: func(e *oncrpc.Encoder, n *node) {
		if n.children != nil {
			e.Uint32(2)
		} else {
			e.Uint32(1)
		}
	},
	2:  func(e *oncrpc.Encoder, _ *node) { e.Uint32(0) },
	3:  func(e *oncrpc.Encoder, n *node) { e.Uint64(n.change) },
	4:  func(e *oncrpc.Encoder, n *node) { e.Uint64(uint64(len(n.data))) },
	5:  func(e *oncrpc.Encoder, _ *node) { e.Bool(false) },
	6:  func(e *oncrpc.Encoder, _ *node) { e.Bool(false) },
	7:  func(e *oncrpc.Encoder, _ *node) { e.Bool(false) },
	8:  func(e *oncrpc.Encoder, _ *node) { e.Uint64(7); e.Uint64(0) },
	9:  func(e *oncrpc.Encoder, _ *node) { e.Bool(true) },
	10: func(e *oncrpc.Encoder, _ *node) { e.Uint32(90) },
	11: func(e *oncrpc.Encoder, _ *node) { e.Uint32(OK) },
	13: func(e *oncrpc.Encoder, _ *node) { e.Uint32(0) },
	19: func(e *oncrpc.Encoder, n *node) { e.Opaque(binary.BigEndian.AppendUint64(nil, n.id)) },
	20: func(e *oncrpc.Encoder, n *node) { e.Uint64(n.id) },
	21: func(e *oncrpc.Encoder, _ *node) { e.Uint64(maxNodes) },
	22: func(e *oncrpc.Encoder, _ *node) { e.Uint64(maxNodes) },
	23: func(e *oncrpc.Encoder, _ *node) { e.Uint64(maxNodes) },
	27: func(e *oncrpc.Encoder, _ *node) { e.Uint64(maxFile) },
	28: func(e *oncrpc.Encoder, _ *node) { e.Uint32(1) },
	29: func(e *oncrpc.Encoder, _ *node) { e.Uint32(maxName) },
	30: func(e *oncrpc.Encoder, _ *node) { e.Uint64(maxData) },
	31: func(e *oncrpc.Encoder, _ *node) { e.Uint64(maxData) },
	33: func(e *oncrpc.Encoder, n *node) { e.Uint32(n.mode) },
	35: func(e *oncrpc.Encoder, n *node) { e.Uint32(1) },
	36: func(e *oncrpc.Encoder, _ *node) { e.String("0") },
	37: func(e *oncrpc.Encoder, _ *node) { e.String("0") },
	41: func(e *oncrpc.Encoder, _ *node) { e.Uint64(0) },
	42: func(e *oncrpc.Encoder, _ *node) { e.Uint64(1 << 30) },
	43: func(e *oncrpc.Encoder, _ *node) { e.Uint64(1 << 30) },
	44: func(e *oncrpc.Encoder, _ *node) { e.Uint64(1 << 30) },
	45: func(e *oncrpc.Encoder, n *node) { e.Uint64(uint64(len(n.data))) },
	47: encodeTime,
	51: func(e *oncrpc.Encoder, _ *node) { e.Uint64(0); e.Uint32(1) },
	52: encodeTime,
	53: encodeTime,
	55: func(e *oncrpc.Encoder, n *node) { e.Uint64(n.id) },
}

func encodeTime(e *oncrpc.Encoder, n *node) {
	e.Uint64(uint64(n.modified.Unix()))
	e.Uint32(uint32(n.modified.Nanosecond()))
}

// supported is the bitmap of all attributes, those that can only be set included.
var supported [3]uint32

func init() {
	for attr := range encoders {
		supported[attr/32] |= 1 << (attr % 32)
	}
	for _, attr := range []uint{48, 54} { // time_access_set, time_modify_set
		supported[attr/32] |= 1 << (attr % 32)
	}
}

// attributes encodes a fattr4 with the attributes of want that the server has.
func (c *state) attributes(n *node, want [3]uint32) {
	var got [3]uint32
	var e oncrpc.Encoder
	for attr := uint(0); attr < 96; attr++ {
		if f := encoders[attr]; f != nil && has(want, attr) {
			got[attr/32] |= 1 << (attr % 32)
			f(&e, n)
		}
	}
	c.e.Uint32(3)
	for _, v := range got {
		c.e.Uint32(v)
	}
	c.e.Opaque(e.Bytes())
}

// attributes are those of a node that a client sets.
type attributes struct {
	set    [3]uint32
	size   uint64
	mode   uint32
	status uint32
}

func (c *state) parseAttributes() (a attributes) {
	a.set = c.bitmap()
	var d oncrpc.Decoder
	d.Reset(c.d.Opaque(4096), nil)
	for attr := uint(0); attr < 96; attr++ {
		if !has(a.set, attr) {
			continue
		}
		switch attr {
		case 4:
			a.size = d.Uint64()
		case 33:
			a.mode = d.Uint32()
		case 36, 37:
			d.Opaque(1024)
		case 48, 54:
			if d.Uint32() == 1 {
				d.Uint64()
				d.Uint32()
			}
		default:
			a.status = 10032 // NFS4ERR_ATTRNOTSUPP
			return a
		}
	}
	if d.End() != nil {
		a.status = 10036 // NFS4ERR_BADXDR
	}
	return a
}

// apply sets the attributes of n, and returns the status.
func (a *attributes) apply(n *node) uint32 {
	switch {
	case a.status != OK:
		return a.status
	case has(a.set, 4) && (n.children != nil || a.size > maxFile):
		return ErrInval
	}
	if has(a.set, 4) {
		if a.size <= uint64(len(n.data)) {
			n.data = n.data[:a.size]
		} else {
			n.data = append(n.data, make([]byte, int(a.size)-len(n.data))...)
		}
	}
	if has(a.set, 33) {
		n.mode = a.mode & 0o7777
	}
	n.touch()
	return OK
}

// bitmap encodes which attributes were set.
func (a *attributes) bitmap(e *oncrpc.Encoder) {
	e.Uint32(3)
	for _, v := range a.set {
		e.Uint32(v)
	}
}

// File returns the data of a file in the root.
func (s *Server) File(name string) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := s.nodes[1].children[name]; n != nil {
		return bytes.Clone(n.data)
	}
	return nil
}

// Grants returns how many delegations clients have.
func (s *Server) Grants() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.grants)
}

// Operations returns how often clients have sent an operation.
func (s *Server) Operations(op uint32) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.Seen[op]
}

var errNoBackChannel = errors.New("no session has a back channel")

// CallBack makes the calls CB_NULL, and CB_COMPOUND with CB_SEQUENCE, in the reverse direction. If a client has a
// delegation, the CB_COMPOUND recalls it.
func (s *Server) CallBack(ctx context.Context) error {
	s.mu.Lock()
	var back *session
	var recall *grant
	for _, g := range s.grants {
		recall, back = &g, g.session
	}
	for _, one := range s.sessions {
		if back == nil && one.conn != nil && one.conn.Err() == nil {
			back = one
		}
	}
	if back == nil || back.conn == nil {
		s.mu.Unlock()
		return errNoBackChannel
	}
	back.backSeq++
	seq, conn := back.backSeq, back.conn
	s.mu.Unlock()
	call := &rpcrdma.Call{Program: back.program, Version: CallbackVersion}
	call.Begin()
	if err := conn.Do(ctx, call); err != nil {
		return fmt.Errorf("CB_NULL: %w", err)
	}
	call.Procedure, call.MaxReply = Compound, 500
	call.Credential = (&oncrpc.Sys{Machine: "server"}).Auth()
	e := call.Begin()
	e.String("")
	e.Uint32(1)
	e.Uint32(0)
	if recall != nil {
		e.Uint32(2)
	} else {
		e.Uint32(1)
	}
	e.Uint32(OpCBSequence)
	e.Fixed(back.id[:])
	e.Uint32(seq)
	e.Uint32(0)
	e.Uint32(0)
	e.Bool(false)
	e.Uint32(0)
	if recall != nil {
		e.Uint32(OpCBRecall)
		e.Fixed(recall.stateid[:])
		e.Bool(false)
		e.Opaque(binary.BigEndian.AppendUint64(nil, recall.node.id))
	}
	if err := conn.Do(ctx, call); err != nil {
		return fmt.Errorf("CB_COMPOUND: %w", err)
	}
	d := &call.Results
	d.Uint32()
	d.Opaque(1024)
	d.Count(2, 8)
	if err := Op(d, OpCBSequence); err != nil {
		return err
	}
	d.Fixed(16)
	for range 4 {
		d.Uint32()
	}
	if recall != nil {
		if err := Op(d, OpCBRecall); err != nil {
			return err
		}
	}
	return d.End()
}
