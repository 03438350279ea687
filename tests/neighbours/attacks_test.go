package neighbours

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

const (
	iqn     = "iqn.2026-11.io.example:shared"
	locked  = "iqn.2026-11.io.example:locked" // with CHAP
	naughty = "iqn.2026-11.io.example:naughty"
	honest  = "iqn.2026-11.io.example:honest"
)

// An attack is what one initiator, or a stranger, does until ctx ends. It returns an error only if
// it could not begin.
type attack struct {
	name string
	run  func(ctx context.Context, s site) error
}

var attacks = []attack{
	{"nothing", func(context.Context, site) error { return nil }},

	// What makes the target work.
	{"32 WRITE SAME of 32 MiB", flood(32, &command{cdb: writeSame(65536), out: make([]byte, 512)})},
	{"32 VERIFY of 32 MiB", flood(32, &command{cdb: cdb.RW16(0x8f, 0, 65536)})},
	{"32 UNMAP of 256 MiB", flood(32, &command{cdb: [16]byte{0: 0x42, 8: 24}, out: unmapList(524288)})},
	{"32 EXTENDED COPY of holes", copies(32, noListID)},
	{"32 EXTENDED COPY with one list identifier", copies(32, 0)}, // all but one fail
	{"32 COMPARE AND WRITE of 32 KiB", flood(32, &command{cdb: compareAndWrite(64), out: make([]byte, 64<<10)})},
	{"128 commands with a bad CDB", flood(128, &command{cdb: [16]byte{0: badCDB}})},
	{"20,000 pings/s", pings(20000)},

	// What makes it wait.
	{"an ORDERED WRITE without its data", ordered},
	{"45 sessions with 120 WRITEs without data", silentWrites(45, 120)},
	{"8 sessions that take no answers to pings of 256 KiB", deafPings(8)},
	{"8 sessions that take no data", deafReads(8)},

	// What takes places.
	{"1,100 sessions of one name", sessions(1100)},
	{"1,000 silent connections", held(1000)},
	{"1,000 connections/s with garbage", strangers(1000, make([]byte, 48))},
	{"300 refused logins/s", refused(300)},
	{"200 discoveries/s", discoveries(200)},
}

const (
	badCDB   = 0xff
	noListID = 3 // LIST ID USAGE
)

func writeSame(blocks uint32) [16]byte { return cdb.RW16(0x93, 0, blocks) }

func compareAndWrite(blocks byte) [16]byte { return [16]byte{0: 0x89, 13: blocks} }

// unmapList returns the parameter list of UNMAP for the first blocks.
func unmapList(blocks uint32) []byte {
	b := make([]byte, 24)
	binary.BigEndian.PutUint16(b, 22)
	binary.BigEndian.PutUint16(b[2:], 16)
	binary.BigEndian.PutUint32(b[16:], blocks)
	return b
}

// flood keeps depth copies of a command in flight, in one session.
func flood(depth int, c *command) func(context.Context, site) error {
	return func(ctx context.Context, s site) error {
		p, err := s.login(ctx, naughty, iqn, 1)
		if err == nil && !s.bare && c.cdb[0] != badCDB {
			_, err = p.do(c) // an attack that fails is another one
		}
		if err != nil {
			return err
		}
		go p.keep(ctx, s, c, depth)
		return nil
	}
}

// copies keeps EXTENDED COPYs (SPC-4, section 6.4) of 32 MiB within LUN 1 in flight, which is empty.
func copies(depth int, listID byte) func(context.Context, site) error {
	return func(ctx context.Context, s site) error {
		p, err := s.login(ctx, naughty, iqn, 1)
		if err != nil {
			return err
		}
		list := make([]byte, 16+32+28)
		if !s.bare {
			id, err := p.do(&command{cdb: [16]byte{0: 0x12, 1: 1, 2: 0x83, 4: 255}, read: true, edtl: 255, id: 1})
			if err != nil {
				return err
			}
			for d := id[4:]; len(d) >= 4; d = d[4+int(d[3]):] {
				if d[1]&0x3f == 3 { // NAA of the logical unit
					copy(list[16+4:16+32], d[:4+int(d[3])])
				}
			}
		}
		be := binary.BigEndian
		list[1] = listID << 3
		be.PutUint16(list[2:], 32)
		be.PutUint32(list[8:], 28)
		list[16] = 0xe4
		list[16+30] = 2 // DISK BLOCK LENGTH 512
		seg := list[16+32:]
		seg[0] = 2
		be.PutUint16(seg[2:], 24)
		be.PutUint16(seg[10:], 65535)
		be.PutUint64(seg[20:], 65536)
		var c [16]byte
		c[0] = 0x83
		be.PutUint32(c[10:], uint32(len(list)))
		copies := &command{cdb: c, out: list, id: 1}
		if !s.bare {
			if _, err := p.do(copies); err != nil {
				return err
			}
		}
		go p.keep(ctx, s, copies, depth)
		return nil
	}
}

func pings(perSecond int) func(context.Context, site) error {
	return func(ctx context.Context, s site) error {
		p, err := s.login(ctx, naughty, iqn, 1)
		if err != nil {
			return err
		}
		go p.drain()
		go atRate(ctx, perSecond, func(int) { p.send(p.Request(pdu.NOPOut, pdu.FlagF, true), nil) })
		return nil
	}
}

func ordered(ctx context.Context, s site) error {
	p, err := s.login(ctx, naughty, iqn, 1)
	if err != nil {
		return err
	}
	go p.drain()
	return p.start(&command{attr: pdu.AttrOrdered, cdb: cdb.Write16(0, 128), edtl: 64 << 10})
}

// each logs in n sessions and calls f for each of them.
func each(ctx context.Context, s site, n int, f func(p *peer) error) error {
	var wg sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		wg.Go(func() {
			p, err := s.login(ctx, naughty, iqn, i+1)
			if err == nil {
				err = f(p)
			}
			errs[i] = err
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err == nil {
			return nil // one is enough: the target may refuse others
		}
	}
	return errs[0]
}

func silentWrites(n, depth int) func(context.Context, site) error {
	return func(ctx context.Context, s site) error {
		return each(ctx, s, n, func(p *peer) error {
			go p.drain()
			for range depth {
				if err := p.start(&command{cdb: cdb.Write16(0, 1024), edtl: 512 << 10}); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

func deafPings(n int) func(context.Context, site) error {
	return func(ctx context.Context, s site) error {
		return each(ctx, s, n, func(p *peer) error {
			go func() {
				data := make([]byte, 256<<10)
				for p.send(p.Request(pdu.NOPOut, pdu.FlagF, true), data) == nil {
				}
			}()
			return nil
		})
	}
}

func deafReads(n int) func(context.Context, site) error {
	return func(ctx context.Context, s site) error {
		return each(ctx, s, n, func(p *peer) error {
			for range 32 {
				if err := p.start(&command{cdb: cdb.Read16(0, 16384), edtl: 8 << 20, read: true}); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

func sessions(n int) func(context.Context, site) error {
	return func(ctx context.Context, s site) error {
		return each(ctx, s, n, func(p *peer) error {
			go p.drain()
			return nil
		})
	}
}

func held(n int) func(context.Context, site) error {
	return func(ctx context.Context, s site) error {
		for range n {
			if _, err := s.connect(ctx); err != nil {
				return err
			}
		}
		return nil
	}
}

func strangers(perSecond int, say []byte) func(context.Context, site) error {
	return func(ctx context.Context, s site) error {
		go atRate(ctx, perSecond, func(int) {
			if nc, err := s.connect(ctx); err == nil {
				nc.Write(say)
				nc.Close()
			}
		})
		return nil
	}
}

// refused logs in to a target that asks for CHAP, without it.
func refused(perSecond int) func(context.Context, site) error {
	return func(ctx context.Context, s site) error {
		go atRate(ctx, perSecond, func(i int) {
			if p, err := s.login(ctx, fmt.Sprint(naughty, i%10), locked, i); err == nil {
				p.Close()
			}
		})
		return nil
	}
}

func discoveries(perSecond int) func(context.Context, site) error {
	return func(ctx context.Context, s site) error {
		go atRate(ctx, perSecond, func(i int) {
			p, err := s.login(ctx, naughty, "", i)
			if err != nil {
				return
			}
			h := p.Request(pdu.TextReq, pdu.FlagF, false)
			h.SetTTT(pdu.ReservedTag)
			if p.send(h, []byte("SendTargets=All\x00")) == nil && !s.bare {
				p.receive(nil)
			}
			p.Close()
		})
		return nil
	}
}
