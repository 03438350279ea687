package migrate

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
)

// A lioConfig is what this package uses of saveconfig.json (rtslib-fb, saveconfig.json(5)).
type lioConfig struct {
	Objects []lioObject `json:"storage_objects"`
	Targets []struct {
		Fabric string     `json:"fabric"`
		WWN    string     `json:"wwn"`
		Groups []lioGroup `json:"tpgs"`
	} `json:"targets"`
}

type lioObject struct {
	Plugin     string                     `json:"plugin"`
	Name       string                     `json:"name"`
	Dev        string                     `json:"dev"`
	Size       int64                      `json:"size"`
	WWN        string                     `json:"wwn"`
	WriteBack  *bool                      `json:"write_back"`
	ReadOnly   bool                       `json:"readonly"`
	Attributes map[string]json.RawMessage `json:"attributes"`
}

type lioGroup struct {
	Tag        int                        `json:"tag"`
	Enable     *bool                      `json:"enable"`
	Attributes map[string]json.RawMessage `json:"attributes"`
	lioAuth
	LUNs []struct {
		Index  int    `json:"index"`
		Object string `json:"storage_object"`
	} `json:"luns"`
	Portals []struct {
		Address string `json:"ip_address"`
		Port    int    `json:"port"`
		ISER    bool   `json:"iser"`
	} `json:"portals"`
	ACLs []struct {
		Initiator string `json:"node_wwn"`
		lioAuth
		Mapped []struct {
			Index        int  `json:"index"`
			LUN          int  `json:"tpg_lun"`
			WriteProtect bool `json:"write_protect"`
		} `json:"mapped_luns"`
	} `json:"node_acls"`
}

type lioAuth struct {
	User           string `json:"chap_userid"`
	Password       string `json:"chap_password"`
	MutualUser     string `json:"chap_mutual_userid"`
	MutualPassword string `json:"chap_mutual_password"`
}

// number returns an attribute, which is a number or text in files of different versions.
func number(attributes map[string]json.RawMessage, key string, missing int) int {
	text := strings.Trim(string(attributes[key]), `"`)
	if n, err := strconv.Atoi(text); err == nil {
		return n
	}
	return missing
}

// lio reads saveconfig.json.
func (r *Result) lio(b []byte) error {
	var c lioConfig
	if err := json.Unmarshal(b, &c); err != nil {
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			return fmt.Errorf("line %d: not the JSON of saveconfig.json: %w", 1+strings.Count(string(b[:min(int(syntax.Offset), len(b))]), "\n"), err)
		}
		return fmt.Errorf("not a saveconfig.json: %w", err)
	}
	for _, t := range c.Targets {
		if t.Fabric != "iscsi" {
			r.note("target %s: its fabric %s has no counterpart", t.WWN, t.Fabric)
			continue
		}
		next := target{Name: t.WWN}
		for i := range t.Groups {
			g := &t.Groups[i]
			if g.Enable != nil && !*g.Enable {
				r.note("target %s: portal group %d is disabled and left out", t.WWN, g.Tag)
				continue
			}
			if next.LUNs != nil {
				r.note("target %s: LUNs and initiators of portal group %d are left out, because those of a target are the same in all groups here", t.WWN, g.Tag)
			} else {
				r.lioGroup(&c, &next, g)
			}
			next.PortalGroups = append(next.PortalGroups, g.Tag)
			for _, p := range g.Portals {
				var transports []string
				if p.ISER {
					r.note("portal %s: it serves iSER over iWARP and iSCSI over TCP here. RoCE and InfiniBand have no counterpart", p.Address)
				} else {
					transports = []string{"tcp"}
				}
				r.portal(net.JoinHostPort(strings.Trim(p.Address, "[]"), strconv.Itoa(p.Port)), g.Tag, transports...)
			}
		}
		if slices.Equal(next.PortalGroups, []int{1}) && len(c.Targets) == 1 {
			next.PortalGroups = nil
		}
		r.doc.Targets = append(r.doc.Targets, next)
	}
	return nil
}

// lioGroup adds LUNs, initiators and users of a portal group to t.
func (r *Result) lioGroup(c *lioConfig, t *target, g *lioGroup) {
	demo := number(g.Attributes, "generate_node_acls", 0) != 0
	t.LUNs = []disk{}
	for _, l := range g.LUNs {
		i := slices.IndexFunc(c.Objects, func(o lioObject) bool { return l.Object == "/backstores/"+o.Plugin+"/"+o.Name })
		if i < 0 {
			r.note("LUN %d of %s: there is no storage object %s", l.Index, t.Name, l.Object)
			continue
		}
		d, ok := r.lioDisk(&c.Objects[i], l.Index, t.Name)
		if !ok {
			continue
		}
		if demo && len(g.ACLs) == 0 && number(g.Attributes, "demo_mode_write_protect", 1) != 0 {
			d.ReadOnly = true
			r.note("LUN %d of %s: read only, because demo_mode_write_protect is set", l.Index, t.Name)
		}
		for _, a := range g.ACLs {
			for _, m := range a.Mapped {
				if m.LUN != l.Index {
					continue
				}
				d.Initiators = append(d.Initiators, a.Initiator)
				if m.WriteProtect {
					d.ReadOnlyFor = append(d.ReadOnlyFor, a.Initiator)
				}
				if m.Index != m.LUN {
					r.note("LUN %d of %s: %s knew it as LUN %d, and finds it as %d", l.Index, t.Name, a.Initiator, m.Index, l.Index)
				}
			}
		}
		switch {
		case len(d.Initiators) == len(g.ACLs):
			d.Initiators = nil // all that may log in
		case len(d.Initiators) == 0 && !demo:
			r.note("LUN %d of %s: left out, because no initiator had it", l.Index, t.Name)
			continue
		}
		t.LUNs = append(t.LUNs, d)
	}
	if demo {
		t.Initiators = []string{"*"}
	}
	chap := number(g.Attributes, "authentication", 0) != 0
	for _, a := range g.ACLs {
		if !demo {
			t.Initiators = append(t.Initiators, a.Initiator)
		}
		if a.User != "" && chap {
			r.user(t, user{Name: a.User, Initiator: a.Initiator}, a.Password, a.MutualUser, a.MutualPassword)
		} else if a.User != "" {
			r.note("CHAP user %s of %s: left out, because the target did not ask for authentication", a.User, t.Name)
		}
	}
	if g.User != "" && chap {
		r.user(t, user{Name: g.User}, g.Password, g.MutualUser, g.MutualPassword)
	}
	if !demo && len(g.ACLs) == 0 {
		t.Initiators = []string{"iqn.2026-11.invalid:nobody"}
		r.note("target %s: nobody may log in, as before. Set initiators", t.Name)
	}
}

// lioDisk returns the LUN of a storage object.
func (r *Result) lioDisk(o *lioObject, id int, target string) (d disk, ok bool) {
	d = disk{ID: id, Path: o.Dev, Serial: o.WWN, Vendor: "LIO-ORG", Product: o.Name, ReadOnly: o.ReadOnly}
	if n := number(o.Attributes, "block_size", 512); n != 512 {
		d.BlockSize = n
	}
	if number(o.Attributes, "emulate_model_alias", 1) == 0 {
		d.Product = map[string]string{"fileio": "FILEIO", "block": "IBLOCK", "ramdisk": "RAMDISK-MCP"}[o.Plugin]
	}
	switch o.Plugin {
	case "fileio":
		d.Backend, d.WriteThrough = "file", o.WriteBack != nil && !*o.WriteBack
		if o.Size > 0 {
			d.Size = strconv.FormatInt(o.Size, 10)
		}
	case "block":
		d.Backend = "block"
	case "ramdisk":
		d.Backend, d.Path, d.Size = "memory", "", strconv.FormatInt(o.Size, 10)
	default:
		r.note("LUN %d of %s: backstore %s has no counterpart", id, target, o.Plugin)
		return d, false
	}
	// The kernel makes the NAA of OUI 001405h and of the hexadecimal digits of the serial number.
	digits := strings.Map(func(c rune) rune {
		if strings.ContainsRune("0123456789abcdef", c) {
			return c
		}
		return -1
	}, strings.ToLower(o.WWN))
	if len(digits) >= 25 {
		d.NAA = "6001405" + digits[:25]
	}
	return d, true
}
