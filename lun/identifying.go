package lun

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// condIdentifierChanged is DEVICE IDENTIFIER CHANGED.
var condIdentifierChanged = Sense{keyUnitAttention, 0x3f, 0x05}

// Names of the settings of identifying information.
const (
	settingIdentifying     = "identifying_information"
	settingIdentifyingText = "identifying_text"
)

// Values of IDENTIFYING INFORMATION TYPE (SPC-4, sections 6.32 and 6.43).
const (
	infoPeripheral = 0x00 // any bytes
	infoText       = 0x02 // UTF-8 that ends with a NUL
	infoSupported  = 0x7f // the list of the others
)

// infoTypes are the types of identifying information that a unit keeps, with the longest one in bytes. The standard allows no
// longer ones.
var infoTypes = []struct {
	code byte
	most int
}{{infoPeripheral, 512}, {infoText, 256}}

// An identifyingEntry is what initiators wrote about the unit for people and programs that manage it. A value does not
// change; a new one takes its place.
type identifyingEntry struct {
	Information []byte `json:"information,omitempty"` // of infoPeripheral
	Text        string `json:"text,omitempty"`        // of infoText, with its NUL
}

// infoLimit returns the length in bytes of the longest information of a type, or 0 if no unit keeps any.
func infoLimit(code byte) int {
	for _, t := range infoTypes {
		if t.code == code {
			return t.most
		}
	}
	return 0
}

// wrongText returns the offset of the first byte that text may not have, or -1. A text is UTF-8, with a NUL only at its end
// (SPC-4, section 4.3.2). One without bytes is none.
func wrongText(text string) int {
	for at := 0; at < len(text); {
		r, n := utf8.DecodeRuneInString(text[at:])
		last := at+n == len(text)
		switch {
		case r == utf8.RuneError && n == 1, (r == 0) != last:
			return at
		}
		at += n
	}
	return -1
}

func (e *identifyingEntry) check() error {
	switch {
	case e == nil:
	case len(e.Information) > infoLimit(infoPeripheral):
		return fmt.Errorf("identifying: information of %d bytes, want at most %d", len(e.Information), infoLimit(infoPeripheral))
	case len(e.Text) > infoLimit(infoText):
		return fmt.Errorf("identifying: text of %d bytes, want at most %d", len(e.Text), infoLimit(infoText))
	case wrongText(e.Text) >= 0:
		return errors.New("identifying: text: want UTF-8 with a NUL only at its end")
	case len(e.Information)+len(e.Text) == 0:
		return errors.New("identifying: neither information nor text")
	}
	return nil
}

// of returns the information of that type. e may be nil: no information.
func (e *identifyingEntry) of(code byte) string {
	switch {
	case e == nil:
		return ""
	case code == infoText:
		return e.Text
	}
	return string(e.Information)
}

// equal reports whether e and o have the same information. Both may be nil.
func (e *identifyingEntry) equal(o *identifyingEntry) bool {
	return e.of(infoPeripheral) == o.of(infoPeripheral) && e.of(infoText) == o.of(infoText)
}

// with returns e with that information of that type, or nil if nothing remains. e may be nil.
func (e *identifyingEntry) with(code byte, information string) *identifyingEntry {
	var next identifyingEntry
	if e != nil {
		next = *e
	}
	switch {
	case code == infoText:
		next.Text = information
	case information == "":
		next.Information = nil
	default:
		next.Information = []byte(information)
	}
	if len(next.Information)+len(next.Text) == 0 {
		return nil
	}
	return &next
}

// identifyingValue returns information as the value of a setting: the text, or how much there is.
func identifyingValue(code byte, information string) string {
	if code == infoText {
		return strings.TrimSuffix(information, "\x00")
	}
	return fmt.Sprintf("%d bytes", len(information))
}

// identifyingSetting returns the name of the setting of a type.
func identifyingSetting(code byte) string {
	if code == infoText {
		return settingIdentifyingText
	}
	return settingIdentifying
}

// identifyingSettings returns the settings of the types of which there is information.
func (u *Unit) identifyingSettings() (list []Setting) {
	e := u.identifying.Load()
	for _, t := range infoTypes {
		if information := e.of(t.code); information != "" {
			value := identifyingValue(t.code, information)
			list = append(list, Setting{Name: identifyingSetting(t.code), Value: value, Default: identifyingValue(t.code, ""), Saved: value})
		}
	}
	return list
}

// reportIdentifying executes REPORT IDENTIFYING INFORMATION (SPC-4, section 6.32).
func reportIdentifying(u *Unit, c *Command) bool {
	b, code := append(c.buf[:0], 0, 0, 0, 0), c.CDB[10]>>1
	switch {
	case code == infoSupported:
		for _, t := range infoTypes {
			b = append(b, t.code<<1, 0)
			b = binary.BigEndian.AppendUint16(b, uint16(t.most))
		}
	case infoLimit(code) > 0:
		b = append(b, u.identifying.Load().of(code)...)
	default:
		return c.failCDB(10, 7)
	}
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)-4))
	return c.report(b, binary.BigEndian.Uint32(c.CDB[6:]))
}

// beginSetIdentifying checks the CDB of SET IDENTIFYING INFORMATION.
func beginSetIdentifying(_ *Unit, c *Command) bool {
	n, most := binary.BigEndian.Uint32(c.CDB[6:]), infoLimit(c.CDB[10]>>1)
	switch {
	case most == 0:
		return c.failCDB(10, 7)
	case n > uint32(most):
		return c.failCDB(6, noField)
	}
	c.DataOut, c.Whole = uint64(n), true
	return true
}

// consumeSetIdentifying takes the list of SET IDENTIFYING INFORMATION.
func consumeSetIdentifying(_ *Unit, c *Command, p []byte, _ uint64) bool {
	if c.CDB[10]>>1 == infoText {
		if wrong := wrongText(string(p)); wrong >= 0 {
			return c.failList(wrong)
		}
	}
	return c.setIdentifying(string(p))
}

// endSetIdentifying executes a SET IDENTIFYING INFORMATION without a list, which removes the information.
func endSetIdentifying(_ *Unit, c *Command) {
	if c.DataOut == 0 {
		c.setIdentifying("")
	}
}

// setIdentifying executes SET IDENTIFYING INFORMATION (SPC-4, section 6.43). With Options.Settings, the information is on stable
// storage before REPORT IDENTIFYING INFORMATION returns it. A reset leaves it as it is. Others are notified only of a change.
func (c *Command) setIdentifying(information string) bool {
	u, code := c.unit, c.CDB[10]>>1
	patience, err := u.settings.take(c, u.opt.Settings)
	if err != nil {
		return c.failStore(err)
	}
	defer u.settings.give()
	shared, changed := u.opt.Settings.Shared(), true
	old := u.identifying.Load()
	if !shared && old.of(code) == information { // of other gateways, one may have changed it a moment ago
		return true
	}
	err = u.keep(patience, func(e settingsEntry) settingsEntry {
		if !shared {
			e.Identifying = old // the same, or without Options.Settings the only one
		}
		e.Identifying = e.Identifying.with(code, information)
		return e
	}, func(e settingsEntry) {
		if shared {
			_, _, changed = u.adopt(e, c.nexus)
		} else {
			u.identifying.Store(e.Identifying)
			u.raise(condIdentifierChanged, c.nexus)
		}
	})
	if err != nil {
		return c.failStore(err)
	}
	if changed {
		c.changed(identifyingSetting(code), identifyingValue(code, information))
	}
	return true
}
