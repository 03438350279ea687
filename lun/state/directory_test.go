package state_test

import (
	"path/filepath"
	"testing"

	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/lun/state/hometest"
)

func TestDirectoryIsHome(t *testing.T) {
	hometest.Run(t, func(t *testing.T) func() state.Home {
		dir := filepath.Join(t.TempDir(), "new", "home")
		return func() state.Home { return state.OpenDirectory(dir, nil) }
	})
}
