package lun

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/tests/testkit"
)

// deviceID returns a TransportID with TPID FORMAT 00b.
func deviceID(name string) []byte {
	name = terminated(name)
	return append([]byte{0x05, 0, 0, byte(len(name))}, name...)
}

func TestSpecIPT(t *testing.T) {
	idC := unhex(transportIDC)
	idB := initiatorPort{portB.InitiatorName, portB.ISID}.appendTransportID(nil)
	unknown := initiatorPort{"iqn.2026-11.io.example:later", [6]byte{1}}.appendTransportID(nil)

	t.Run("ports", func(t *testing.T) {
		r := newPRRig(t, setup{})
		r.ok(r.a, prRegister, 0, portList(0, keyA, 0, idC, unknown, idC))
		r.wantKeys(keyA, keyA, keyA)
		if r.generation() != 1 {
			t.Error("PRGENERATION counts registrations, not commands")
		}
		r.ok(r.c, prReserve, 1, prList(keyA, 0, 0))
		r.ok(r.b, prRegister, 0, prList(0, keyB, 0))
		r.wantKeys(keyA, keyA, keyA, keyB)
	})
	t.Run("who is registered", func(t *testing.T) { // SPC-4, table 67, note b
		r := newPRRig(t, setup{})
		r.ok(r.b, prRegister, 0, prList(0, keyB, 0))
		wantListBit(t, r.out(r.a, prRegister, 0, portList(0, keyA, 0, idC, idB)), 28+len(idC), noField)
		r.wantKeys(keyB)
		wantListBit(t, r.out(r.c, prRegister, 0, portList(0, keyC, 0, deviceID(portA.InitiatorName))), 28, noField)
		r.wantKeys(keyB)
	})
	t.Run("device", func(t *testing.T) {
		r := newPRRig(t, setup{})
		r.ok(r.c, prRegister, 0, portList(0, keyC, 0, deviceID(portA.InitiatorName)))
		r.wantKeys(keyC, keyC, keyC)
		r.ok(r.a, prReserve, 1, prList(keyC, 0, 0))
		r = newPRRig(t, setup{})
		wantListBit(t, r.out(r.c, prRegister, 0, portList(0, keyC, 0, deviceID("iqn.2026-11.io.example:absent"))), 28, noField)
		r.wantKeys()
	})
	t.Run("no list", func(t *testing.T) {
		r := newPRRig(t, setup{})
		r.ok(r.a, prRegister, 0, portList(0, keyA, 0))
		r.wantKeys(keyA)
	})
	t.Run("errors", func(t *testing.T) {
		r := newPRRig(t, setup{})
		list := portList(0, keyA, 0, idC, idB)
		for n := prListLen; n < len(list); n++ {
			wantSense(t, r.out(r.a, prRegister, 0, list[:n]), 0x5, 0x1a, 0x00)
		}
		wantSense(t, r.out(r.a, prRegister, 0, append(list, 0, 0, 0, 0)), 0x5, 0x1a, 0x00)
		for octet, value := range map[int]byte{0: 0x44, 3: 0x2d, 4: ' ', 2: 0xff} {
			bad := bytes.Clone(idC)
			bad[octet] = value
			field := map[int]int{0: 0, 2: 2, 3: 2, 4: 4}[octet]
			wantListBit(t, r.out(r.a, prRegister, 0, portList(0, keyA, 0, idB, bad)), 28+len(idB)+field, noField)
		}
		r.wantKeys() // all or nothing
		r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
		wantListBit(t, r.out(r.a, prRegister, 0, portList(keyA, keyB, 0, idC)), 20, 3)
		wantListBit(t, r.out(r.a, prRegister, 0, portList(keyA, 0, 0, idC)), 20, 3)
		r.wantKeys(keyA)
	})
}

func TestParseTransportID(t *testing.T) {
	id, n, wrong := parseTransportID(append(unhex(transportIDC), 0xff))
	if want := (initiatorPort{portC.InitiatorName, portC.ISID}); wrong != noField || n != 48 || id.device || id.port != want {
		t.Errorf("%+v, %d, %d", id, n, wrong)
	}
	wantBytes(t, id.port.appendTransportID(nil), unhex(transportIDC))
	for n := range 48 {
		if _, _, wrong := parseTransportID(unhex(transportIDC)[:n]); wrong == noField {
			t.Errorf("the first %d bytes were accepted", n)
		}
	}
	with := func(format byte, text string) []byte {
		return append(binary.BigEndian.AppendUint16([]byte{format, 0}, uint16(len(text))), text...)
	}
	for name, s := range map[string]struct {
		id    []byte
		wrong int
	}{
		"Fibre Channel":           {make([]byte, 24), 0},
		"TPID FORMAT 10b":         {with(0x85, terminated("iqn.2026-11.io.example:c")), 0},
		"reserved bit":            {with(0x55, terminated("iqn.2026-11.io.example:c,i,0x00023d000001")), 0},
		"ADDITIONAL LENGTH 16":    {with(0x05, "iqn.2026-11.com\x00"), 2},
		"ADDITIONAL LENGTH 22":    {with(0x05, "iqn.2026-11.io.exampl\x00"), 2},
		"no NUL":                  {with(0x05, "iqn.2026-11.io.examp"), 4},
		"NUL inside":              {with(0x05, "iqn.2026-11.io\x00exam\x00"), 4},
		"empty":                   {with(0x05, strings.Repeat("\x00", 20)), 4},
		"ISID in format 00b":      {with(0x05, terminated("iqn.2026-11.io.example:c,i,0x00023d000001")), 4},
		"no ISID in format 01b":   {with(0x45, terminated("iqn.2026-11.io.example:c")), 4},
		"ISID of 11 digits":       {with(0x45, terminated("iqn.2026-11.io.example:c,i,0x00023d00001")), 4},
		"ISID of 13 digits":       {with(0x45, terminated("iqn.2026-11.io.example:c,i,0x00023d0000001")), 4},
		"ISID not hexadecimal":    {with(0x45, terminated("iqn.2026-11.io.example:c,i,0x00023d00000g")), 4},
		"no name before the ISID": {with(0x45, terminated(",i,0x00023d000001")+"\x00\x00\x00\x00"), 4},
		"name of 224 bytes":       {with(0x05, terminated(strings.Repeat("x", 224))), 4},
		"not UTF-8":               {with(0x05, terminated("iqn.2026-11.io.example:\xff")), 4},
		"control character":       {with(0x05, terminated("iqn.2026-11.io.exam\nple")), 4},
	} {
		if _, _, wrong := parseTransportID(s.id); wrong != s.wrong {
			t.Errorf("%s: field at %d is wrong, want %d", name, wrong, s.wrong)
		}
	}
	id, _, wrong = parseTransportID(with(0x45, terminated("IQN.2026-11.io.example:"+strings.Repeat("x", 200)+",i,0x00023D00ABCD")))
	if wrong != noField || id.port.String() != "iqn.2026-11.io.example:"+strings.Repeat("x", 200)+",i,0x00023d00abcd" {
		t.Errorf("longest name, upper case: %+v, %d", id, wrong)
	}
}

// FuzzTransportID decodes TransportIDs: encoding the result returns the same.
func FuzzTransportID(f *testing.F) {
	f.Add(unhex(transportIDC))
	f.Add(deviceID(portA.InitiatorName))
	testkit.FuzzBytes(f, func(t testing.TB, b []byte) {
		id, n, wrong := parseTransportID(b)
		if wrong != noField {
			return
		}
		if n > len(b) || n%4 != 0 {
			t.Fatalf("%d bytes of %d", n, len(b))
		}
		if id.device {
			return
		}
		again := id.port.appendTransportID(nil)
		if id2, n2, wrong := parseTransportID(again); wrong != noField || n2 != len(again) || id2 != id {
			t.Fatalf("%+v came back as %+v (%d)", id, id2, wrong)
		}
	})
}
