package lun

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"
	"sync/atomic"

	"github.com/iser-target/iser-target/backend/protection"
)

// The application tags of a unit with protection information belong to initiators, so ATO is 1. With ATMPE, initiators declare in
// the Application Tag mode page which blocks have which tag (SBC-3, section 6.5.3). The store then checks the tags of those
// blocks, and gives them to what initiators write without protection information.

// The Application Tag mode page: a header, then application tag descriptors.
const (
	tagHeader     = 16
	tagDescriptor = 24
	tagPageLen    = tagHeader + protection.MaxRanges*tagDescriptor

	tagLast    = 0x80 // LAST, in byte 0 of a descriptor
	tagAt      = 6    // LOGICAL BLOCK APPLICATION TAG
	tagFirstAt = 8    // LOGICAL BLOCK ADDRESS
	tagCountAt = 16   // LOGICAL BLOCK COUNT
)

// hasAppTags reports whether the unit has application tags.
func (u *Unit) hasAppTags() bool { return u.protected != nil }

// tagsOf returns the tags that p has; none before the first Store.
func tagsOf(p *atomic.Pointer[protection.AppTags]) (a protection.AppTags) {
	if t := p.Load(); t != nil {
		a = *t
	}
	return a
}

// useTags makes the store know the application tags of now, if they are enabled.
func (u *Unit) useTags() {
	switch {
	case u.protected == nil:
	case u.mode.Load()&modeATMPE != 0:
		u.protected.SetAppTags(u.tags.Load())
	default:
		u.protected.SetAppTags(nil)
	}
}

// putTags writes the descriptors of the page p. LAST is set in that of the last range.
func putTags(p []byte, a protection.AppTags) {
	last := 0
	for i, r := range a {
		d := p[tagHeader+i*tagDescriptor:]
		binary.BigEndian.PutUint16(d[tagAt:], r.Tag)
		binary.BigEndian.PutUint64(d[tagFirstAt:], r.First)
		binary.BigEndian.PutUint64(d[tagCountAt:], r.Count)
		if r.Count > 0 {
			last = i
		}
	}
	p[tagHeader+last*tagDescriptor] = tagLast
}

// maskTags sets those bits of the page that can be changed.
func maskTags(p []byte) {
	for i := range protection.MaxRanges {
		d := p[tagHeader+i*tagDescriptor:]
		d[0] = tagLast
		binary.BigEndian.PutUint16(d[tagAt:], math.MaxUint16)
		binary.BigEndian.PutUint64(d[tagFirstAt:], math.MaxUint64)
		binary.BigEndian.PutUint64(d[tagCountAt:], math.MaxUint64)
	}
}

// readTags returns the ranges of the page p, or the offset of a wrong field in it. The first range begins at LBA 0, each other one
// where the one before ends, and the last one ends at the last block. For that, the standard names RETURNED LOGICAL BLOCK ADDRESS, which is
// the LBA of the last block, so the block may also be left out. A count of 0 is ignored. No block can be declared to have the tag that
// disables checks.
func (u *Unit) readTags(p []byte) (a protection.AppTags, wrong int) {
	n, next, blocks := 0, uint64(0), u.blocks.Load()
	for i := range protection.MaxRanges {
		at := tagHeader + i*tagDescriptor
		d := p[at:]
		r := protection.Range{
			Tag:   binary.BigEndian.Uint16(d[tagAt:]),
			First: binary.BigEndian.Uint64(d[tagFirstAt:]), Count: binary.BigEndian.Uint64(d[tagCountAt:]),
		}
		switch {
		case r.Count == 0:
		case r.Tag == protection.EscapeTag:
			return a, at + tagAt
		case r.First != next:
			return a, at + tagFirstAt
		case r.Count > blocks-next:
			return a, at + tagCountAt
		default:
			next += r.Count
			a[n] = r
			n++
		}
		switch {
		case d[0]&tagLast == 0:
		case n > 0 && next != blocks && next != blocks-1:
			return a, at + tagCountAt
		default:
			return a, noField
		}
	}
	return a, tagHeader // no descriptor is the last one
}

// tagsText returns the ranges as a Setting.
func tagsText(a protection.AppTags) string {
	var list []string
	for _, r := range a {
		if r.Count > 0 {
			list = append(list, fmt.Sprintf("%d-%d:%04x", r.First, r.First+r.Count-1, r.Tag))
		}
	}
	if len(list) == 0 {
		return "none"
	}
	return strings.Join(list, " ")
}

// tagSettings returns the ranges as Settings, if there are any.
func (u *Unit) tagSettings() []Setting {
	now, saved := u.current().tags, u.saved().tags
	if now == (protection.AppTags{}) && saved == now {
		return nil
	}
	return []Setting{{Name: settingAppTagRanges, Value: tagsText(now), Default: tagsText(protection.AppTags{}), Saved: tagsText(saved)}}
}

// An appTagsEntry has what initiators set of application tags.
type appTagsEntry struct {
	Enabled bool            `json:"enabled"` // ATMPE
	Ranges  []tagRangeEntry `json:"ranges"`
}

type tagRangeEntry struct {
	First uint64 `json:"first"` // LBA
	Count uint64 `json:"count"` // blocks
	Tag   uint16 `json:"tag"`
}

// newAppTagsEntry returns what initiators set, or nil if that is nothing.
func newAppTagsEntry(modes uint32, a protection.AppTags) *appTagsEntry {
	e := &appTagsEntry{Enabled: modes&modeATMPE != 0, Ranges: []tagRangeEntry{}}
	for _, r := range a {
		if r.Count > 0 {
			e.Ranges = append(e.Ranges, tagRangeEntry{r.First, r.Count, r.Tag})
		}
	}
	if !e.Enabled && len(e.Ranges) == 0 {
		return nil
	}
	return e
}

// check returns an error for ranges that are not those of readTags.
func (e *appTagsEntry) check() error {
	if e == nil {
		return nil
	}
	if len(e.Ranges) > protection.MaxRanges {
		return fmt.Errorf("application_tags: %d ranges, want at most %d", len(e.Ranges), protection.MaxRanges)
	}
	next := uint64(0)
	for i, r := range e.Ranges {
		if r.First != next || r.Count == 0 || r.Count > math.MaxUint64-next || r.Tag == protection.EscapeTag {
			return fmt.Errorf("application_tags.ranges[%d]: %d blocks from %d on with tag %#04x: want blocks from %d on, and another tag than ffff", i, r.Count, r.First, r.Tag, next)
		}
		next += r.Count
	}
	return nil
}

// values returns the modes and ranges of e.
func (e *appTagsEntry) values() (modes uint32, a protection.AppTags) {
	if e == nil {
		return 0, a
	}
	if e.Enabled {
		modes = modeATMPE
	}
	for i, r := range e.Ranges {
		a[i] = protection.Range{First: r.First, Count: r.Count, Tag: r.Tag}
	}
	return modes, a
}
