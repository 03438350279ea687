package config

import (
	"fmt"
	"strings"
	"testing"
)

// manyLUNs returns a configuration with n LUNs.
func manyLUNs(n int) string {
	var b strings.Builder
	b.WriteString(good[:strings.Index(good, "      - {")])
	for i := range n {
		fmt.Fprintf(&b, "      - {id: %d, backend: file, path: /var/lib/iser-target/%d.img, size: 1GiB}\n", i, i)
	}
	return b.String()
}

// BenchmarkAddLUN adds a LUN to 1000 others: the edit, the checks and the difference.
func BenchmarkAddLUN(b *testing.B) {
	d, err := NewDocument("f", []byte(manyLUNs(1000)))
	if err != nil {
		b.Fatal(err)
	}
	old, err := d.Config()
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		c := d.Clone()
		if err := c.AddLUN("iqn.2026-11.io.example:store", LUN{ID: 1000, Backend: "file", Path: "/x.img", Size: 1 << 30}); err != nil {
			b.Fatal(err)
		}
		next, err := c.Config()
		if err != nil {
			b.Fatal(err)
		}
		if n := len(Diff(old, next)); n != 1 {
			b.Fatalf("%d changes", n)
		}
	}
}
