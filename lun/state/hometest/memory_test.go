package hometest

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/lun/state"
)

// A Memory is a state.Lessor, on the fake clock.
func TestMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		RunLessor(t, func(t *testing.T) func() state.Home {
			m := NewMemory(1)
			return func() state.Home { return m.Link(20 * time.Millisecond) }
		})
	})
}
