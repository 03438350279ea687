package limits

import "runtime"

// callLimits sets up the limits of calls of stores.
func (s *Set) callLimits() {
	s.BackendCalls.auto = defaultCalls(machine())
	s.limit(&s.BackendCalls, "backend_calls", PerProcess, Count, 0, "calls of stores under way, each with a thread")
	s.limit(&s.BackendCallsPerLUN, "backend_calls_per_lun", PerLUN, Count, 64, "calls of its store under way at a LUN")
	s.HeavyCommands.auto = max(int64(runtime.GOMAXPROCS(0))/2, 1)
	s.limit(&s.HeavyCommands, "heavy_commands", PerProcess, Count, 0,
		"commands such as WRITE SAME, VERIFY and EXTENDED COPY that use a CPU at a time")
}

// defaultCalls returns the bound of calls under way for m: a quarter of the threads that the process
// may have. Go itself ends a process with more than 10,000.
func defaultCalls(m Machine) int64 {
	threads := int64(10000)
	if m.Threads.N > 0 {
		threads = min(threads, m.Threads.N)
	}
	return max(min(threads/4, 2048), 1)
}
