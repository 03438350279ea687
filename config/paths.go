package config

import (
	"cmp"
	"reflect"
)

// A NamedPath is a path that a configuration names.
type NamedPath struct {
	Kind string // what the path is for: PathFile and others
	Path string
}

// The kinds of NamedPaths.
const (
	PathFile   = "file"   // data of a LUN, or its checksums
	PathBlock  = "block"  // device of a LUN
	PathPlugin = "plugin" // opened by a gotgt plug-in, with its options
	PathServer = "server" // URI of a server that has the data of a LUN
	PathSecret = "secret" // a secret_file
	PathOwn    = "own"    // what the target itself needs: state_dir, sockets, certificates
)

// NamedPaths returns the paths that d names. It reads none of them, and ignores what is wrong in d.
func (d *Document) NamedPaths() (list []NamedPath) {
	c := d.settingsOnly()
	for _, p := range []string{
		c.StateDir, c.Cluster.TLS.CA, c.Cluster.TLS.Cert, c.Cluster.TLS.Key, c.Cluster.FenceProgram, c.Control.Socket, c.Control.TLS.Cert, c.Control.TLS.Key, c.Control.TLS.ClientCA, c.Control.TLS.CRL,
	} {
		list = append(list, NamedPath{PathOwn, p})
	}
	for _, s := range c.secrets() {
		list = append(list, NamedPath{PathSecret, s.file})
	}
	for _, t := range c.Targets {
		for _, l := range t.LUNs {
			switch l.Backend {
			case "block":
				list = append(list, NamedPath{PathBlock, l.Path})
			case "nbd", "rbd":
				list = append(list, NamedPath{PathServer, l.Path})
			case "gotgt":
				list = append(list, NamedPath{PathPlugin, cmp.Or(l.Path, l.Options) + " " + l.Plugin + " " + l.Options})
			default:
				list = append(list, NamedPath{PathFile, l.Path})
			}
			list = append(list, NamedPath{PathFile, l.SumsPath()}, NamedPath{PathFile, l.ChecksumsPath})
		}
	}
	named := list[:0]
	for _, p := range list {
		if p.Path != "" {
			named = append(named, p)
		}
	}
	return named
}

// Control returns the section control of d, without checks.
func (d *Document) Control() Control { return d.settingsOnly().Control }

// Process returns the section process of d, without checks.
func (d *Document) Process() Process { return d.settingsOnly().Process }

// settingsOnly returns what d says, without checks, secrets of files and the environment.
func (d *Document) settingsOnly() *Config {
	c := base()
	var from decoder
	settings, _ := d.merged()
	from.decode("", settings, reflect.ValueOf(&c).Elem())
	c.complete()
	return &c
}
