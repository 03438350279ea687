package iscsi

import (
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
)

// fencingCounts count how long it takes to end tasks, by task management function. byPreempt stands
// for PREEMPT AND ABORT.
type fencingCounts [pdu.TargetWarmReset + 1]lun.LatencyCount

const byPreempt = 0

// fencing has the names of what fencingCounts count.
var fencing = map[byte]string{
	byPreempt:            "preempt_and_abort",
	pdu.AbortTask:        "abort_task",
	pdu.AbortTaskSet:     "abort_task_set",
	pdu.ClearTaskSet:     "clear_task_set",
	pdu.LogicalUnitReset: "logical_unit_reset",
	pdu.TargetWarmReset:  "target_warm_reset",
}

// countFencing counts a function that began at that time by clock.
func (nd *Node) countFencing(function byte, began time.Duration) {
	if fencing[function] != "" {
		nd.fenced[function].Count(clock() - began)
	}
}

// Fencing returns how long task management functions took that end tasks, and PREEMPT AND ABORT for
// each session that lost its registration, by name.
func (nd *Node) Fencing() map[string]lun.Latency {
	all := make(map[string]lun.Latency, len(fencing))
	for function, name := range fencing {
		all[name] = nd.fenced[function].Latency()
	}
	return all
}
