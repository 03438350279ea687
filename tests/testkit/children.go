package testkit

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Children returns the numbers of the processes that a process has started or adopted, also of those that have ended and that it has not waited for.
func Children(pid int) (list []int) {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, f := range threads {
		text, _ := os.ReadFile(f) // the thread may have ended
		for _, s := range strings.Fields(string(text)) {
			if child, err := strconv.Atoi(s); err == nil {
				list = append(list, child)
			}
		}
	}
	return list
}
