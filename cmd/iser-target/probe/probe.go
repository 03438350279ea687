// Package probe looks whether the target could open the stores of LUNs.
package probe

import (
	"os"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/nbd"
	"github.com/iser-target/iser-target/backend/rbd"
	"github.com/iser-target/iser-target/config"
)

// LUN returns an error if the store of a LUN, whose configuration is valid, cannot be opened, or cannot be created where
// that is due. It creates and changes nothing.
func LUN(l *config.LUN) error {
	switch l.Backend {
	case "memory":
		return backend.ProbeMemory(backend.MemoryConfig{Size: int64(l.Size), BlockSize: uint32(l.BlockSize)})
	case "block":
		return backend.ProbeBlock(backend.BlockConfig{Path: l.Path, BlockSize: uint32(l.BlockSize), ReadOnly: l.ReadOnly})
	case "nbd":
		return nbd.Probe(nbd.Config{URI: l.Path, BlockSize: uint32(l.BlockSize), ReadOnly: l.ReadOnly})
	case "rbd":
		return rbd.Probe(rbd.Config{URI: l.Path, Size: int64(l.Size), BlockSize: uint32(l.BlockSize), ReadOnly: l.ReadOnly})
	case "file":
		c := backend.FileConfig{Path: l.Path, Size: int64(l.Size), BlockSize: uint32(l.BlockSize), ReadOnly: l.ReadOnly}
		if fi, err := os.Stat(l.Path); err == nil && fi.Mode().IsRegular() && fi.Size() > 0 && fi.Size() < c.Size && !l.ReadOnly {
			if err := backend.ProbeSize(l.Path, c.Size); err != nil { // the target extends it
				return err
			}
			c.Size = 0
		}
		return backend.ProbeFile(c)
	}
	return nil // a plug-in of gotgt
}
