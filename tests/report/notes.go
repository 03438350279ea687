package main

import "fmt"

// guestNotes say what the figures of the virtual machine mean.
func guestNotes(o *options) []string {
	return []string{
		"QEMU emulates this machine in software, without KVM. Initiator, target and network are in the same guest and share its CPUs. So the figures are no speeds of a real machine: the " +
			"ratios compare how much work of the CPU the protocols take under emulation, where each instruction costs much more than a cache miss or a wait.",
		fmt.Sprintf("The jobs are those of examples/fio, one after the other, with times of %v after %v, as threads of one process. Between two jobs of a target, no other target runs a job: all jobs "+
			"of a round run on one target, and then on the next one. Each round begins with another target.", o.runtime, o.ramp),
		fmt.Sprintf("Each target has one LUN of %d MiB, a file on a tmpfs that was filled with random bytes: that of LIO by fileio with its buffered mode, that of tgt by rdwr. "+
			"TCP is iscsi_tcp of Linux, and iSER is ib_iser over siw. tgt has no column of iSER: tgtd 1.0.85 listens for it on the port of iSCSI/TCP (3260) only, and iWARP requires that port of TCP itself. "+
			"No target uses digests or CRCs. iser-target runs with GOMAXPROCS=1, since it shares two CPUs with the initiator.", guestSize>>20),
	}
}

// hostNotes say what the figures of bench mean.
func hostNotes(o *options) []string {
	notes := []string{
		fmt.Sprintf("Here nothing is emulated. iser-target bench is the initiator, in user space, over the loopback. Each job runs for %v after %v on each target, and then the next job. "+
			"iser-target and tgt have one LUN of %d MiB, a file on a tmpfs that was filled with random bytes.", o.runtime, o.ramp, hostSize>>20),
		"LIO is not in this part, because it would have to be a part of this machine's kernel. bench is made by the same people as iser-target, so compare the targets with each other over TCP, and treat iSER as a " +
			"check of the same code from end to end.",
	}
	if len(o.others) > 0 {
		notes = append(notes, "REPORT_TARGETS named the other targets. bench measures them from this machine, over the network that leads to them, with the stores that they have. They are not in the part of the virtual "+
			"machine: a target outside of it would not pay for the emulation.")
	}
	return notes
}
