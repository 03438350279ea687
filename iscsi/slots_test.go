package iscsi

import (
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/testkit"
)

// A slot that becomes free while newTask looks for a status to give up goes to newTask.
func TestSlotFreedDuringGiveUp(t *testing.T) {
	n := newTestNode(t)
	c := newConn(n.portal, newFakeMover(), ServeOptions{})
	c.recovery.store.on = true
	c.slots.max = 1
	only := c.newTask()
	got := make(chan *Task, 1)
	c.mu.Lock()
	go func() { got <- c.newTask() }()
	testkit.Eventually(t, "newTask in giveUpStatus", func() bool { return strings.Contains(testkit.Stacks(), "giveUpStatus") })
	c.freeTask(only)
	c.mu.Unlock()
	select {
	case u := <-got:
		c.freeTask(u)
	case <-time.After(testkit.Patience):
		t.Fatal("newTask waits although a slot is free")
	}
}
