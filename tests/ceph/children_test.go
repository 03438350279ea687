package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// children returns the processes of that name that another one has started, the oldest first.
func children(t testing.TB, parent int, name string) (list []int) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	type child struct{ pid, start int }
	var all []child
	for _, f := range files {
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(f)))
		b, err := os.ReadFile(f)
		if err != nil {
			continue // it ended
		}
		fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
		if fields[0] == "Z" || fields[1] != fmt.Sprint(parent) {
			continue
		}
		line, err := os.ReadFile(filepath.Join(filepath.Dir(f), "cmdline"))
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
