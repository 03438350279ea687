package hometest

import (
	"testing"
	"time"

	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A Memory is a state.Lessor, on the fake clock.
func TestMemory(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		RunLessor(t, func(t *testing.T) func() state.Home {
			m := NewMemory(1)
			return func() state.Home { return m.Link(20 * time.Millisecond) }
		})
	})
}
