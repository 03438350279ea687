// Package lun implements the SCSI device server: logical units over the stores of
// package backend, driven by one table of commands.
//
// A Unit is a logical unit over one store. An Inventory has the units of one SCSI target. A Nexus
// is one initiator port's view of an Inventory, with the unit attentions that it has to hear.
//
// A Command goes through Nexus.Begin, then Consume for its data-out or Produce
// for its data-in, as often as the transport likes, then End. Commands run on
// any number of goroutines at the same time. They wait for nothing but the store.
//
// The files by subject:
//
//   - command.go runs a command, commands.go has the table of all of them, and
//     sense.go the errors that they end with;
//   - rw.go, atomic.go and copy.go move data, ranges.go keeps commands on the
//     same range apart;
//   - inquiry.go, mode.go, capacity.go, logpages.go, and opcodes.go
//     report;
//   - reserve.go, prstate.go, persistent_in.go and persistent_out.go reserve, and
//     alua.go has the states of target port groups;
//   - sanitize.go erases a medium in the background, also after a restart;
//   - settings.go and reservations.go keep state in files, in the format of package state.
package lun
