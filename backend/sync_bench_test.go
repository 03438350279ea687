package backend_test

import (
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/iser-target/iser-target/backend"
)

// BenchmarkFileSync measures WriteAt and Sync of 4 KiB by many callers at once.
func BenchmarkFileSync(b *testing.B) {
	benchmarkCallers(b, func(s backend.Store, p []byte, off int64) error {
		if err := s.WriteAt(p, off); err != nil {
			return err
		}
		return s.Sync()
	})
}

// BenchmarkFileWriteDurable measures WriteDurable of 4 KiB by many callers at once.
func BenchmarkFileWriteDurable(b *testing.B) {
	benchmarkCallers(b, func(s backend.Store, p []byte, off int64) error { return s.WriteDurable(p, off) })
}

// benchmarkCallers measures call, made by 1, 8 and 64 goroutines on one file.
func benchmarkCallers(b *testing.B, call func(s backend.Store, p []byte, off int64) error) {
	const size = 64 << 20
	for _, callers := range []int{1, 8, 64} {
		b.Run(fmt.Sprint(callers), func(b *testing.B) {
			s, _, err := backend.OpenFile(backend.FileConfig{Path: filepath.Join(b.TempDir(), "lun.img"), Size: size})
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			b.ReportAllocs()
			var wg sync.WaitGroup
			var done atomic.Int64
			b.ResetTimer()
			for range callers {
				wg.Go(func() {
					p := make([]byte, 4096)
					for n := done.Add(1); n <= int64(b.N); n = done.Add(1) {
						if err := call(s, p, n*int64(len(p))*7%size); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
		})
	}
}
