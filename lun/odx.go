package lun

import (
	"cmp"
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/backend"
)

// Limits of POPULATE TOKEN and WRITE USING TOKEN, which VPD page 8Fh reports.
const (
	maxTokenRanges      = 64
	maxTokenBytes       = 1 << 30
	optimalTokenBytes   = 64 << 20
	maxTokenTimeout     = 600 // seconds
	defaultTokenTimeout = 60
)

// Parts of the parameter lists, in bytes. The length at their beginning does not count itself.
const (
	populateHeader = 16
	writeHeader    = 536
	rangeLen       = 16 // of a block device range descriptor
	listLenLen     = 2

	tokenImmed  = 0x01 // in byte 2
	tokenDelete = 0x02 // DEL_TKN of WRITE USING TOKEN
	tokenRTV    = 0x02 // ROD TYPE VALID of POPULATE TOKEN
)

// beginTokenList sets the length of a parameter list, which has at least that many bytes, or none.
func beginTokenList(c *Command, least uint64) bool {
	c.DataOut, c.Whole = uint64(binary.BigEndian.Uint32(c.CDB[10:])), true
	if c.DataOut > 0 {
		c.itl.copies.supersede(*c.tokenID())
	}
	switch {
	case c.DataOut > MaxParameterList:
		return c.failCDB(10, noField)
	case 0 < c.DataOut && c.DataOut < least:
		return c.fail(condListLength)
	}
	return true
}

func beginPopulateToken(_ *Unit, c *Command) bool { return beginTokenList(c, populateHeader) }

func beginWriteUsingToken(_ *Unit, c *Command) bool { return beginTokenList(c, writeHeader) }

// tokenID returns the LIST IDENTIFIER.
func (c *Command) tokenID() *uint32 {
	id := binary.BigEndian.Uint32(c.CDB[6:])
	return &id
}

// parseRanges decodes the block device range descriptors (SBC-3, section 5.13.3) behind a header of that length, which ends with
// theirs. Descriptors without blocks are left out.
func (c *Command) parseRanges(u *Unit, p []byte, header int) (ranges []byteRange, total int64, ok bool) {
	be := binary.BigEndian
	length := int(be.Uint16(p[header-listLenLen:]))
	if length < rangeLen {
		return nil, 0, c.failList(header - listLenLen)
	}
	n := min(length, len(p)-header) / rangeLen
	switch {
	case n == 0:
		return nil, 0, c.fail(condListLength)
	case n > maxTokenRanges:
		return nil, 0, c.fail(condTooManySegments)
	}
	type placed struct {
		byteRange
		at int // offset of its descriptor
	}
	var sorted []placed
	for at := header; at < header+n*rangeLen; at += rangeLen {
		lba, blocks := be.Uint64(p[at:]), uint64(be.Uint32(p[at+8:]))
		if !u.within(lba, blocks) {
			return nil, 0, c.failRange(lba)
		}
		r := byteRange{int64(lba << u.shift), int64(blocks << u.shift)}
		if r.n == 0 {
			continue
		}
		if total += r.n; total > maxTokenBytes {
			return nil, 0, c.failList(at + 8)
		}
		ranges = append(ranges, r)
		sorted = append(sorted, placed{r, at})
	}
	slices.SortStableFunc(sorted, func(a, b placed) int { return cmp.Compare(a.pos, b.pos) })
	for i := 1; i < len(sorted); i++ {
		if sorted[i-1].overlaps(sorted[i].byteRange) {
			return nil, 0, c.failList(max(sorted[i-1].at, sorted[i].at)) // the same LBA twice
		}
	}
	return ranges, total, true
}

// consumePopulateToken executes POPULATE TOKEN (SBC-3, section 5.13): a token for what the ranges have now.
//
//	header of 16 │ block device range descriptors of 16
func consumePopulateToken(u *Unit, c *Command, p []byte, _ uint64) bool {
	const (
		leastLength  = 30 // POPULATE TOKEN DATA LENGTH
		timeoutField = 4
		typeField    = 8
	)
	be := binary.BigEndian
	// Reading the list is work as well: see Command.extendedCopy.
	if err := u.enter(c, heavyStep(0)); err != nil {
		return c.readDone(err)
	}
	u.leave(c)
	timeout, rod := be.Uint32(p[timeoutField:]), uint32(rodVulnerable)
	if p[2]&tokenRTV != 0 {
		rod = be.Uint32(p[typeField:])
	}
	switch {
	case be.Uint16(p) < leastLength:
		return c.failList(0)
	case timeout > maxTokenTimeout:
		return c.failList(timeoutField)
	case rod != rodDefault && rod != rodVulnerable && rod != rodAny:
		return c.failList(typeField)
	}
	if rod == rodAny {
		rod = rodVulnerable
	}
	ranges, total, ok := c.parseRanges(u, p, populateHeader)
	if !ok {
		return false
	}
	k := &token{
		unit: u, ranges: ranges, size: total, by: c.nexus.name.initiator.name,
		timeout: time.Duration(cmp.Or(timeout, defaultTokenTimeout)) * time.Second,
	}
	k.sorted = slices.SortedFunc(slices.Values(ranges), func(a, b byteRange) int { return cmp.Compare(a.pos, b.pos) })
	c.fillToken(k, rod)
	s := &copyStatus{sa: saPopulateToken}
	return c.thirdPartyCopy(u, s, c.tokenID(), p[2]&tokenImmed != 0, func() {}, func(c *Command, s *copyStatus) bool {
		return c.populate(u, k, s)
	})
}

// fillToken writes what k says of the unit (SPC-4, section 5.17.6.5.1, and SBC-3, section 4.27.5), before Tokens.add.
func (c *Command) fillToken(k *token, rod uint32) {
	const lengthField, creator, represented, device = 6, 16, 48, 96
	u, be, b := k.unit, binary.BigEndian, k.bytes[:]
	be.PutUint32(b, rod)
	be.PutUint16(b[lengthField:], tokenLen-tokenHeader)
	d := b[creator:][:cscdLen] // an identification descriptor
	naa := u.naa()
	d[0], d[1], d[4], d[5], d[7] = cscdIdentification, typeDisk, setBinary, assocUnit|desNAA, byte(len(naa))
	copy(d[8:28], naa)
	be.PutUint32(d[28:], u.info.BlockSize) // 3 bytes
	be.PutUint64(b[represented+8:], uint64(k.size))
	var capacity [capacity16Len]byte
	u.putCapacity16(capacity[:])
	copy(b[device:], capacity[8:16]) // from the block length on
	if name := terminated(c.nexus.port.TargetName); 4+len(name) <= tokenTargetLen {
		t := b[tokenTarget:]
		t[0], t[1], t[3] = protocolISCSI|setUTF8, piv|assocDevice|desSCSI, byte(len(name))
		copy(t[4:], name)
	}
}

// populate makes k valid. No command changes its data meanwhile.
func (c *Command) populate(u *Unit, k *token, s *copyStatus) bool {
	if err := u.enter(c, heavyStep(0)); err != nil {
		return c.tokenFailed(err, 0)
	}
	defer u.leave(c)
	var all stripeSet
	for _, r := range k.ranges {
		all |= stripesOf(r.pos, r.n)
	}
	defer u.ranges.exclude(all).release()
	if err := c.mayStep(u, opRead16); err != nil {
		return c.tokenFailed(err, 0)
	}
	if k.size > 0 {
		if why := u.opt.Tokens.add(k); why != condNone {
			return c.failTransfer(why, 0)
		}
		if last := k.extent().end() - 1; uint64(last)>>u.shift >= u.blocks.Load() { // the unit became smaller meanwhile
			u.opt.Tokens.end(k, condTokenRevoked)
			return c.failRange(uint64(last) >> u.shift)
		}
	}
	c.itl.copies.made(s, k)
	return true
}

// made notes the token that POPULATE TOKEN made.
func (l *copies) made(s *copyStatus, k *token) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s.octets = uint64(k.size)
	s.steps++
	if k.size > 0 {
		s.token = k
	}
}

// failTransfer fails c, which has transferred that many blocks (SBC-3, section 4.27.2).
func (c *Command) failTransfer(k Sense, blocks uint64) bool {
	return c.failSense(newSense(k).withInfo(blocks))
}

// A tokenWrite is what a WRITE USING TOKEN has to write.
type tokenWrite struct {
	token  *token // nil: zeros
	source *itl   // of the token's data
	runs   []run
	back   bool // from the last byte to the first
	short  bool // the token has less data than the command requested
	delete bool
	done   int64                      // bytes written of the data in its order
	own    *atomic.Pointer[byteRange] // of a token that was taken over, else nil
	alone  bool                       // the stores do not share
}

// A run is n bytes of the token's data that are in one piece at their source and at their destination.
type run struct {
	from int64 // in the source; unset for zeros
	to   int64
	n    int64
	at   int64 // where it is in the data
	zero bool  // zeros
}

// consumeWriteUsingToken executes WRITE USING TOKEN (SBC-3, section 5.50): what the token stands for goes to the ranges.
//
//	header of 16 │ token of 512 │ length of 8 │ block device range descriptors of 16
func consumeWriteUsingToken(u *Unit, c *Command, p []byte, _ uint64) bool {
	const offsetField, tokenField = 8, 16
	be := binary.BigEndian
	if err := u.enter(c, heavyStep(0)); err != nil {
		return c.writeDone(err)
	}
	u.leave(c)
	if be.Uint16(p) < writeHeader-listLenLen+rangeLen || int(be.Uint16(p)) != int(be.Uint16(p[writeHeader-listLenLen:]))+writeHeader-listLenLen {
		return c.failList(0)
	}
	ranges, total, ok := c.parseRanges(u, p, writeHeader)
	if !ok {
		return false
	}
	b := p[tokenField:][:tokenLen]
	w := &tokenWrite{delete: p[2]&tokenDelete != 0}
	release := func() {}
	size := int64(math.MaxInt64)
	switch rod := be.Uint32(b); {
	case be.Uint16(b[6:]) != tokenLen-tokenHeader:
		return c.fail(condTokenLength)
	case rod == rodZero:
	case rod == rodDefault, rod == rodVulnerable:
		k, why := u.opt.Tokens.use(b)
		if why != condNone {
			return c.fail(why)
		}
		var others []*Nexus // with other targets
		release = func() {
			u.opt.Tokens.done(k)
			for _, n := range others {
				n.Close()
			}
		}
		if w.source = c.find(func(o *Unit) bool { return o == k.unit }, &others); w.source == nil {
			// It may know of tokens of others, but not of their logical units.
			release()
			return c.fail(condTokenUnknown)
		}
		if f := k.unit.reservations.fence.Load(); f != nil && f.keepsOut(w.source.nexus, byOpcode[opRead16][0], nil) {
			release()
			return c.conflict()
		}
		w.token, size = k, k.size
	default:
		return c.fail(condTokenType)
	}
	offset, blocks := be.Uint64(p[offsetField:]), uint64(math.MaxInt64)>>u.shift
	if offset > blocks || int64(offset<<u.shift) >= size {
		release()
		return c.failList(offsetField)
	}
	w.plan(u, ranges, int64(offset<<u.shift), total)
	if w.token != nil && w.token.unit == u && !w.orders() {
		release()
		return c.fail(condTokenCause)
	}
	s := &copyStatus{sa: saWriteUsingToken}
	return c.thirdPartyCopy(u, s, c.tokenID(), p[2]&tokenImmed != 0, release, func(c *Command, s *copyStatus) bool {
		return c.writeToken(u, w, s)
	})
}

// plan fills in the runs: the data of the token from offset on goes to the ranges of u, which have total bytes. If the data ends
// within a block, zeros fill the rest of the block.
func (w *tokenWrite) plan(u *Unit, ranges []byteRange, offset, total int64) {
	if w.token == nil {
		at := int64(0)
		for _, r := range ranges {
			w.runs = append(w.runs, run{to: r.pos, n: r.n, at: at, zero: true})
			at += r.n
		}
		return
	}
	left := w.token.size - offset
	fill := -left & int64(u.info.BlockSize-1) // of the last block
	if left+fill < total {
		w.short = true
		total = left + fill
	}
	if left >= total {
		left, fill = total, 0
	} else {
		fill = total - left
	}
	source, skip := w.token.ranges, offset
	for len(source) > 0 && skip >= source[0].n {
		skip -= source[0].n
		source = source[1:]
	}
	at := int64(0)
	for _, r := range ranges {
		for r.n > 0 && at < left {
			from := byteRange{source[0].pos + skip, source[0].n - skip}
			n := min(r.n, from.n, left-at)
			w.runs = append(w.runs, run{from: from.pos, to: r.pos, n: n, at: at})
			r.pos, r.n, at = r.pos+n, r.n-n, at+n
			if skip += n; skip == source[0].n {
				source, skip = source[1:], 0
			}
		}
		if n := min(r.n, left+fill-at); r.n > 0 && n > 0 {
			w.runs = append(w.runs, run{to: r.pos, n: n, at: at, zero: true})
			at += n
		}
	}
}

// orders finds an order in which the runs overwrite no data of the token that is still to be read. It returns false if there is
// none. The token and the runs are of the same unit.
func (w *tokenWrite) orders() bool {
	forward, back := true, true
	for _, d := range w.runs {
		for _, s := range w.runs {
			if s.zero || !(byteRange{d.to, d.n}).overlaps(byteRange{s.from, s.n}) {
				continue
			}
			// How much later in the data a byte is read than another one is written in its place.
			later := s.at - s.from - (d.at - d.to)
			forward, back = forward && later <= 0, back && later >= 0
		}
	}
	w.back = !forward
	return forward || back
}

// errTokenEnded ends a step whose token is not valid any longer.
var errTokenEnded = errors.New("the ROD token is not valid any longer")

// errMayNot ends a step that the initiator may no longer make.
var errMayNot = errors.New("the initiator may not use the logical unit any longer")

// writeToken writes what w says, and keeps s up to date.
func (c *Command) writeToken(u *Unit, w *tokenWrite, s *copyStatus) bool {
	k := w.token
	if k != nil && k.unit == u && slices.ContainsFunc(w.runs, func(r run) bool { return k.covers(byteRange{r.to, r.n}) }) {
		rest, why := u.opt.Tokens.takeOver(k)
		if why != condNone {
			return c.failTransfer(why, 0)
		}
		defer u.opt.Tokens.giveUp(rest)
		w.token, w.own = rest, rest.own
	}
	sp := scratch.Get().(*[]byte)
	defer scratch.Put(sp)
	runs := w.runs
	if w.back {
		runs = slices.Clone(runs)
		slices.Reverse(runs)
	}
	for _, r := range runs {
		for done := int64(0); done < r.n; {
			n, err := c.tokenStep(u, w, r, done, *sp)
			if err != nil {
				return c.tokenStepFailed(u, w, s, err)
			}
			if n == 0 {
				continue
			}
			done += n
			w.done += n
			count := n
			if w.back { // the count is of what is written in order
				count = 0
			}
			c.itl.copies.note(s, count)
		}
	}
	if w.back {
		c.itl.copies.note(s, w.done)
		w.back = false
	}
	if u.writeThrough() {
		if err := u.sync(c); err != nil {
			c.itl.copies.noteLoss(s, 0)
			all := w.extent()
			return c.tokenFailed(placed(c.itl, all.pos, all.n, err), 0)
		}
	}
	if w.delete && k != nil {
		u.opt.Tokens.end(k, condTokenDeleted)
	}
	if w.short {
		c.itl.copies.notePartial(s)
		why := condCopyUnderrun
		if w.done == 0 {
			why.Key = keyIllegalRequest
		}
		return c.failTransfer(why, uint64(w.done)>>u.shift)
	}
	return true
}

// extent returns the smallest range that has all runs.
func (w *tokenWrite) extent() byteRange {
	var all byteRange
	for i, r := range w.runs {
		if to := (byteRange{r.to, r.n}); i == 0 {
			all = to
		} else {
			first := min(all.pos, to.pos)
			all = byteRange{first, max(all.end(), to.end()) - first}
		}
	}
	return all
}

// notePartial notes that the token has less data than the command requested.
func (l *copies) notePartial(s *copyStatus) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s.partial = true
}

// tokenStepFailed fails c because of the error of a step. The initiator continues behind the blocks that it says to have
// transferred, so without a write cache these are durable, or none.
func (c *Command) tokenStepFailed(u *Unit, w *tokenWrite, s *copyStatus, err error) bool {
	blocks := uint64(w.done) >> u.shift
	if w.back {
		blocks = 0
	}
	if blocks > 0 && u.writeThrough() && u.sync(c) != nil {
		c.itl.copies.noteLoss(s, 0)
		blocks = 0
	}
	if errors.Is(err, errTokenEnded) {
		return c.failTransfer(w.token.failure(), blocks)
	}
	return c.tokenFailed(err, blocks)
}

// tokenFailed fails c, which has transferred that many blocks, because of err. INFORMATION has this number, also for errors with
// which other commands have an LBA there: the initiator could not tell one from the other.
func (c *Command) tokenFailed(err error, blocks uint64) bool {
	switch {
	case errors.Is(err, errCopyStopped), errors.Is(err, errAborted) && c.stopped():
		return c.failTransfer(condCopyStopped, blocks)
	case errors.Is(err, errHeldUp):
		return c.busy()
	case errors.Is(err, errMayNot), errors.Is(err, errErased):
		return c.failTransfer(condThirdPartyFailure, blocks)
	}
	var source sourceError
	if errors.As(err, &source) {
		c.reportStoreError(source.err)
		return c.failTransfer(condThirdPartyFailure, blocks)
	}
	return c.failSense(c.writeSense(err).withInfo(blocks))
}

// A sourceError is an error of the source of a copy.
type sourceError struct{ err error }

func (e sourceError) Error() string { return e.err.Error() }

func (e sourceError) Unwrap() error { return e.err }

// tokenStep writes bytes of r from done on, and returns how many: 0 if the stores turn out not to share. buf is memory for data.
// While the step waits for the source it holds nothing of the destination, and the other way round, unless the stores share.
func (c *Command) tokenStep(u *Unit, w *tokenWrite, r run, done int64, buf []byte) (int64, error) {
	n, shares := min(r.n-done, maxDeviceCopyStep), false
	if !r.zero {
		shares = w.shares(u)
	}
	switch {
	case w.own != nil:
		n = min(n, int64(len(buf)))
	case shares && done == 0:
		n = alignShared(r.from, r.to, n)
	}
	off := done
	if w.back {
		off = r.n - done - n
	}
	to := byteRange{r.to + off, n}
	if r.zero {
		return n, c.tokenTo(u, w, to, func() error { return u.makeZeros(to.pos, to.n) })
	}
	mapped, n, err := c.tokenFrom(w, byteRange{r.from + off, n}, buf, shares)
	to.n = n
	switch {
	case err != nil:
	case w.token.failure() != condNone: // asked after the data was read: see Tokens.end
		err = errTokenEnded
	case !mapped:
		err = c.tokenTo(u, w, to, func() error { return u.makeHole(to.pos, to.n) })
	case shares:
		return c.tokenShare(u, w, r.from+off, to)
	default:
		err = c.tokenTo(u, w, to, func() error { return u.storeWrite(buf[:to.n], to.pos) })
	}
	return n, err
}

// tokenFrom reads r of the source into buf as far as it has only data or only a hole, and returns how far. If the stores share, or
// there is a hole, it reads nothing. If the token was taken over, it does all of r, which has room in buf.
func (c *Command) tokenFrom(w *tokenWrite, r byteRange, buf []byte, shares bool) (mapped bool, n int64, err error) {
	from := w.token.unit
	c.other.Who = c.call.Who
	if err := from.enterAs(c, &c.other, heavyStep(min(r.n, int64(len(buf))))); err != nil {
		return false, 0, w.sourceFailed(err)
	}
	defer from.gate.Leave(&c.other)
	switch {
	case c.stopped():
		return false, 0, errCopyStopped
	case w.token.failure() != condNone:
		return false, 0, errTokenEnded
	case from.heldUp():
		return false, 0, errHeldUp
	case !c.mayUse(w.source, opRead16):
		return false, 0, w.sourceFailed(errMayNot)
	}
	mapped, n, err = from.storeExtent(r.pos)
	err = placed(w.source, r.pos, r.n, err)
	if w.own == nil {
		n = min(n, r.n)
	} else {
		mapped, n = mapped || n < r.n, r.n
	}
	if err == nil && mapped && !shares {
		n = min(n, int64(len(buf)))
		err = placed(w.source, r.pos, n, from.storeRead(buf[:n], r.pos))
	}
	return mapped, n, w.sourceFailed(err)
}

// sourceFailed returns err as an error of the source.
func (w *tokenWrite) sourceFailed(err error) error {
	switch {
	case err == nil, errors.Is(err, errAborted):
		return err
	case w.token.failure() != condNone: // the source may be closed, or be overwritten
		return errTokenEnded
	}
	return sourceError{err}
}

// tokenTo calls f, which changes that range of u.
func (c *Command) tokenTo(u *Unit, w *tokenWrite, to byteRange, f func() error) error {
	a, err := u.announce(c, to.pos, to.n, false)
	defer a.end()
	if err != nil {
		return err
	}
	if err := u.enter(c, heavyStep(to.n)); err != nil {
		return err
	}
	defer u.leave(c)
	return c.tokenInto(u, w, to, f)
}

// tokenInto does what tokenTo does for a caller that has entered the gate.
func (c *Command) tokenInto(u *Unit, w *tokenWrite, to byteRange, f func() error) error {
	u.copying.add(c, 1) // before mayUse checks: see endCopies
	defer u.copying.add(c, -1)
	c.copyTo.Store(u) // before the command checks whether it was aborted: see Detach
	defer c.copyTo.Store(nil)
	defer u.ranges.share(stripesOf(to.pos, to.n)).release()
	if err := c.mayStep(u, opWrite16); err != nil {
		return err
	}
	if err := u.barredTo(c); err != nil {
		return err
	}
	if w.own != nil {
		w.own.Store(&to)
	}
	return placed(c.itl, to.pos, to.n, f())
}

// mayStep returns nil, or why c makes no step with that operation at its unit u.
//
// Preconditions: stripes of u are held.
func (c *Command) mayStep(u *Unit, op byte) error {
	switch {
	case c.stopped():
		return errCopyStopped
	case c.aborted():
		return errAborted
	case u.heldUp():
		return errHeldUp
	}
	if err := u.barred(); err != nil { // says more than errMayNot
		return err
	}
	if !c.mayUse(c.itl, op) {
		return errMayNot
	}
	return nil
}

// shares reports whether u may be able to copy from the source without this process.
func (w *tokenWrite) shares(u *Unit) bool {
	_, from := w.token.unit.store.(backend.Copier)
	_, to := u.store.(backend.Copier)
	return from && to && w.own == nil && !w.alone
}

// tokenShare makes u copy as much of that range as it can without this process, and returns how much. If the token ends
// meanwhile, the range has what no token stands for, and the command fails.
func (c *Command) tokenShare(u *Unit, w *tokenWrite, from int64, to byteRange) (n int64, err error) {
	a, err := u.announce(c, to.pos, to.n, false)
	defer a.end()
	if err != nil {
		return 0, err
	}
	leave, err := c.enterBoth(segment{from: w.source, to: c.itl}, to.n)
	if err != nil {
		return 0, err
	}
	defer leave()
	source := w.token.unit
	switch {
	case source.heldUp():
		return 0, errHeldUp
	case !c.mayUse(w.source, opRead16):
		return 0, w.sourceFailed(errMayNot)
	}
	err = c.tokenInto(u, w, to, func() error {
		n, err = u.storeShare(to.pos, source, from, to.n)
		if source, ok := errors.AsType[*backend.SourceError](err); ok {
			return w.sourceFailed(placed(w.source, from, to.n, source.Err))
		}
		return err
	})
	switch {
	case w.token.failure() != condNone:
		return 0, errTokenEnded
	case err == nil && n == 0:
		w.alone = true
	}
	return n, err
}

// makeZeros makes n bytes at pos zeros, and their protection information what nothing checks (SBC-3, section 4.27.4).
//
// Preconditions: the stripes of the range are held.
func (u *Unit) makeZeros(pos, n int64) error {
	if u.protected != nil {
		return u.storeFormat(pos, n)
	}
	return u.makeHole(pos, n)
}

// receiveTokenInformation executes RECEIVE ROD TOKEN INFORMATION (SPC-4, section 6.26, and SBC-3, section 5.22). The status
// of a copy is forgotten once all of it was returned, or when the initiator has no room for any of it.
func receiveTokenInformation(u *Unit, c *Command) bool {
	const lengthLen, idLen = 4, 2 // ROD TOKEN DESCRIPTORS LENGTH, ID FOR CREATING ROD CSCD DESCRIPTOR
	be := binary.BigEndian
	allocation := be.Uint32(c.CDB[10:])
	s, ok := c.itl.copies.takeIf(be.Uint32(c.CDB[2:]), func(s *copyReport) bool {
		n := copyReportLen + len(s.paddedSense()) + lengthLen
		if s.token != nil {
			n += idLen + tokenLen
		}
		return allocation == 0 || uint64(allocation) >= uint64(n)
	})
	if !ok {
		return c.failCDB(2, noField)
	}
	units, count := byte(countBytes), s.octets
	if s.sa == saPopulateToken || s.sa == saWriteUsingToken {
		units, count = countBlocks, s.octets>>u.shift
	}
	b := s.append(c.zeroed(copyReportLen), units, count)
	if s.token == nil {
		b = be.AppendUint32(b, 0)
	} else {
		b = be.AppendUint32(b, idLen+tokenLen)
		b = append(append(b, 0, 0), s.token.bytes[:]...)
	}
	be.PutUint32(b, uint32(len(b)-4))
	return c.report(b, allocation)
}

// appendTokenLimits appends the Block Device ROD Token Limits descriptor of the Third-party Copy page (SBC-3, section 6.6.7.3).
func appendTokenLimits(u *Unit, b []byte) []byte {
	be := binary.BigEndian
	d := [36]byte{3: 32}
	be.PutUint16(d[10:], maxTokenRanges)
	be.PutUint32(d[12:], maxTokenTimeout)
	be.PutUint32(d[16:], defaultTokenTimeout)
	be.PutUint64(d[20:], maxTokenBytes>>u.shift)
	be.PutUint64(d[28:], optimalTokenBytes>>u.shift)
	return append(b, d[:]...)
}

// appendTokenFeatures appends the ROD Token Features and Supported ROD Types descriptors of the Third-party Copy page (SPC-4,
// sections 7.8.17.8 and 7.8.17.9).
func appendTokenFeatures(u *Unit, b []byte) []byte {
	const (
		deviceLen = 48 // of a block ROD device type specific features descriptor
		typeLen   = 64 // of a ROD type descriptor
		in, out   = 0x02, 0x01
	)
	be := binary.BigEndian
	var d [48 + deviceLen]byte
	d[0], d[1], d[3] = 0x01, 0x06, byte(len(d)-4)
	be.PutUint32(d[16:], defaultTokenTimeout) // MINIMUM TOKEN LIFETIME
	be.PutUint32(d[20:], maxTokenTimeout)     // MAXIMUM TOKEN LIFETIME
	be.PutUint32(d[24:], maxTokenTimeout)     // MAXIMUM TOKEN INACTIVITY TIMEOUT
	d[47] = deviceLen
	device := d[48:]
	device[3] = deviceLen - 4
	be.PutUint16(device[6:], uint16(max(u.info.PhysicalBlockSize>>u.shift, 1))) // OPTIMAL BLOCK ROD LENGTH GRANULARITY
	be.PutUint64(device[8:], maxTokenBytes)
	be.PutUint64(device[16:], optimalTokenBytes)
	be.PutUint64(device[24:], math.MaxUint64) // OPTIMAL BYTES TO TOKEN PER SEGMENT: no limit
	be.PutUint64(device[32:], optimalTokenBytes)
	b = append(b, d[:]...)

	types := [...]struct {
		rod   uint32
		flags byte
	}{{rodDefault, in | out}, {rodVulnerable, in | out}, {rodAny, out}, {rodZero, in}}
	var list [8 + len(types)*typeLen]byte
	list[0], list[1] = 0x01, 0x08
	be.PutUint16(list[2:], uint16(len(list)-4))
	be.PutUint16(list[6:], uint16(len(list)-8))
	for i, t := range types {
		be.PutUint32(list[8+i*typeLen:], t.rod)
		list[8+i*typeLen+4] = t.flags
	}
	return append(b, list[:]...)
}
