package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/iser-target/iser-target/tests/testkit"
)

// children returns the processes of that name that another one has started, the oldest first.
func children(parent int, name string) (list []int) {
	type child struct{ pid, start int }
	var all []child
	for _, pid := range testkit.Children(parent) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue // it ended
		}
		fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		argv0, _, _ := strings.Cut(string(line), "\x00")
		if err != nil || filepath.Base(argv0) != name {
			continue
		}
		start, _ := strconv.Atoi(fields[19])
		all = append(all, child{pid, start})
	}
	slices.SortFunc(all, func(a, b child) int { return a.start - b.start })
	for _, c := range all {
		list = append(list, c.pid)
	}
	return list
}
