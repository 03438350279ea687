// Package bench measures a LUN from the side of the initiator, in the vocabulary of fio. docs/bench.md describes it.
//
// A Run is one combination of block size and queue depth. Its jobs each have a session and a part of the LUN of their own. Per I/O
// a job allocates nothing.
package bench

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/iser-target/iser-target/iscsi/initiator"
)

// Options says what to measure.
type Options struct {
	Address string // HOST:PORT
	LUN     int
	Login   initiator.Config

	RW       string // one of Modes
	MixRead  int    // percent of READs of readwrite and randrw
	Sizes    []int  // bytes of one I/O
	Depths   []int  // I/Os in progress of each job
	Jobs     int
	Runtime  time.Duration
	Ramp     time.Duration // before the measurement
	Rate     int64         // bytes per second of each job, both directions together; 0: no limit
	RateIOPS int64         // I/Os per second of each job; 0: no limit
	Verify   bool
	SkipCopy bool  // see initiator.Command
	Offset   int64 // bytes
	Size     int64 // bytes from Offset on; 0: to the end of the LUN
	Seed     uint64
	// Destructive allows to overwrite data.
	Destructive bool
}

// Modes are the values of RW.
var Modes = []string{"read", "write", "randread", "randwrite", "readwrite", "rw", "randrw"}

// Limits of Options.
const (
	maxJobs    = 64
	maxDepth   = 1024
	maxSize    = 16 << 20
	maxMemory  = 1 << 30 // of the buffers of a run
	maxTime    = 7 * 24 * time.Hour
	maxBlocks  = 64 << 20 // that a job can verify
	maxRuns    = 256
	minRuntime = time.Second
)

// reads reports whether there are READs.
func (o *Options) reads() bool { return o.readPercent() > 0 }

// writes reports whether there are WRITEs.
func (o *Options) writes() bool { return o.readPercent() < 100 }

func (o *Options) readPercent() int {
	switch o.RW {
	case "read", "randread":
		return 100
	case "write", "randwrite":
		return 0
	}
	return o.MixRead
}

func (o *Options) random() bool { return strings.HasPrefix(o.RW, "rand") }

// A FlagError is a value that Options cannot have.
type FlagError struct{ Flag, Problem string }

// Error implements error.
func (e *FlagError) Error() string { return "--" + e.Flag + ": " + e.Problem }

func bad(flag, format string, a ...any) error { return &FlagError{flag, fmt.Sprintf(format, a...)} }

// Check returns a *FlagError about the first value that is wrong whatever the LUN is.
func (o *Options) Check() error {
	switch {
	case !slices.Contains(Modes, o.RW):
		return bad("rw", "%q is not one of %s", o.RW, strings.Join(Modes, ", "))
	case o.MixRead < 0 || o.MixRead > 100:
		return bad("rwmixread", "%d is not a percentage", o.MixRead)
	case o.Jobs < 1 || o.Jobs > maxJobs:
		return bad("numjobs", "%d is not from 1 to %d", o.Jobs, maxJobs)
	case o.Runtime < minRuntime || o.Runtime > maxTime:
		return bad("runtime", "%v is not from %v to %v", o.Runtime, minRuntime, maxTime)
	case o.Ramp < 0 || o.Ramp > maxTime:
		return bad("ramp", "%v is not from 0s to %v", o.Ramp, maxTime)
	case o.Rate < 0:
		return bad("rate", "%d is negative", o.Rate)
	case o.RateIOPS < 0:
		return bad("rate-iops", "%d is negative", o.RateIOPS)
	case o.Rate > 0 && o.RateIOPS > 0:
		return bad("rate", "it excludes --rate-iops")
	case o.Offset < 0:
		return bad("offset", "%d is negative", o.Offset)
	case o.Size < 0:
		return bad("size", "%d is negative", o.Size)
	case o.Verify && !o.writes():
		return bad("verify", "--rw %s writes nothing that could be verified", o.RW)
	case o.SkipCopy && o.Verify:
		return bad("skip-rx-copy", "it excludes --verify, which reads the data")
	case o.SkipCopy && o.Login.DataDigest:
		return bad("skip-rx-copy", "it excludes --data-digest, which reads the data")
	case o.SkipCopy && !o.reads():
		return bad("skip-rx-copy", "--rw %s reads nothing", o.RW)
	case len(o.Sizes) == 0:
		return bad("bs", "no size is given")
	case len(o.Depths) == 0:
		return bad("iodepth", "no depth is given")
	case len(o.Sizes)*len(o.Depths) > maxRuns:
		return bad("bs", "with --iodepth that makes %d runs: at most %d are possible", len(o.Sizes)*len(o.Depths), maxRuns)
	}
	for _, n := range o.Sizes {
		if n < 512 || n > maxSize || n%512 != 0 {
			return bad("bs", "%d is not a multiple of 512 from 512 to %d", n, maxSize)
		}
	}
	for _, n := range o.Depths {
		if n < 1 || n > maxDepth {
			return bad("iodepth", "%d is not from 1 to %d", n, maxDepth)
		}
	}
	if need := int64(slices.Max(o.Sizes)) * int64(slices.Max(o.Depths)) * int64(o.Jobs); need > maxMemory {
		return bad("iodepth", "the buffers of --bs, --iodepth and --numjobs need %d MiB: at most %d MiB are possible", need>>20, maxMemory>>20)
	}
	return nil
}

// checkDisk returns a *FlagError about the first value that does not fit the LUN, and sets Size.
func (o *Options) checkDisk(d *initiator.Disk) error {
	block := int64(d.BlockSize)
	switch {
	case o.writes() && d.ReadOnly:
		return fmt.Errorf("LUN %d is write protected: --rw %s needs to write", o.LUN, o.RW)
	case o.Offset%block != 0:
		return bad("offset", "%d is not a multiple of the block size of the LUN, %d", o.Offset, block)
	case o.Size%block != 0:
		return bad("size", "%d is not a multiple of the block size of the LUN, %d", o.Size, block)
	case o.Offset >= d.Size():
		return bad("offset", "%d is behind the end of the LUN, which has %d bytes", o.Offset, d.Size())
	case o.Size > d.Size()-o.Offset:
		return bad("size", "%d bytes at --offset %d are behind the end of the LUN, which has %d bytes", o.Size, o.Offset, d.Size())
	}
	if o.Size == 0 {
		o.Size = d.Size() - o.Offset
	}
	for _, n := range o.Sizes {
		if int64(n)%block != 0 {
			return bad("bs", "%d is not a multiple of the block size of the LUN, %d", n, block)
		}
		if n > d.MaxTransfer {
			return bad("bs", "%d is above the longest transfer of the LUN, %d", n, d.MaxTransfer)
		}
		places := o.Size / int64(o.Jobs) / int64(n)
		if places < int64(slices.Max(o.Depths)) {
			return bad("bs", "a part of the LUN of %d bytes for each of %d jobs has %d places for I/Os of %d bytes: --iodepth %d needs as many", o.Size/int64(o.Jobs),
				o.Jobs, places, n, slices.Max(o.Depths))
		}
		if o.Verify && places > maxBlocks {
			return bad("verify", "a job would have to remember %d blocks: at most %d are possible. Use a smaller --size or a larger --bs", places, maxBlocks)
		}
	}
	return nil
}

// ParseSize parses a number of bytes as fio does: 4k is 4096. It takes 4KiB, too.
func ParseSize(s string) (int64, error) {
	digits := strings.TrimRight(s, "kKmMgGtTiIbB")
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("%q is not a size like 4k, 1M or 10GiB", s)
	}
	shift, ok := map[string]int{"": 0, "b": 0, "k": 10, "kib": 10, "m": 20, "mib": 20, "g": 30, "gib": 30, "t": 40, "tib": 40}[strings.ToLower(s[len(digits):])]
	if !ok {
		return 0, fmt.Errorf("%q is not a size like 4k, 1M or 10GiB", s)
	}
	if n > 1<<62>>shift {
		return 0, fmt.Errorf("%q is too large", s)
	}
	return n << shift, nil
}

// ParseTime parses a time as fio does: a plain number counts seconds.
func ParseTime(s string) (time.Duration, error) {
	if n, err := strconv.ParseUint(s, 10, 31); err == nil {
		return time.Duration(n) * time.Second, nil
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		return 0, errors.New(strconv.Quote(s) + " is not a time like 30 or 1m30s")
	}
	return d, nil
}

// FormatSize returns n as fio writes block sizes.
func FormatSize(n int64) string {
	for i, unit := range []string{"t", "g", "m", "k"} {
		if shift := 40 - 10*i; n > 0 && n%(1<<shift) == 0 {
			return strconv.FormatInt(n>>shift, 10) + unit
		}
	}
	return strconv.FormatInt(n, 10)
}
