package backend

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
)

// A copy past the caches has the same result as any other, whatever its length and the alignment of both sides, and touches nothing else.
func TestStream(t *testing.T) {
	random := rand.NewChaCha8([32]byte{1})
	src, dst := make([]byte, memoryPage+64), make([]byte, memoryPage+128)
	random.Read(src)
	for _, n := range []int{0, 1, streamAtLeast - 1, streamAtLeast, streamAtLeast + 1, streamAtLeast + streamUnit - 1, 3*streamAtLeast + 512, memoryPage} {
		for _, from := range []int{0, 1, 8, 16, 63} {
			for _, to := range []int{0, 1, 8, 16, 32, 64} {
				for i := range dst {
					dst[i] = 0xa5
				}
				stream(dst[to:to+n], src[from:from+n])
				if !bytes.Equal(dst[to:to+n], src[from:from+n]) {
					t.Fatalf("%d bytes from %d to %d differ", n, from, to)
				}
				if rest := bytes.Trim(append(dst[:to:to], dst[to+n:]...), "\xa5"); len(rest) > 0 {
					t.Fatalf("%d bytes from %d to %d: others have changed", n, from, to)
				}
			}
		}
	}
}

// A copy to pages of a store that no cache has room for, and of one for which most do.
func BenchmarkStream(b *testing.B) {
	for _, size := range []int{4 << 10, 16 << 10, 64 << 10} {
		for _, span := range []int64{1 << 30, 32 << 20} {
			for name, write := range map[string]func(dst, src []byte){"copy": func(dst, src []byte) { copy(dst, src) }, "stream": stream} {
				b.Run(fmt.Sprintf("%dKiB/%dMiB/%s", size>>10, span>>20, name), func(b *testing.B) {
					if name == "stream" && !streams {
						b.Skip("such a copy is as any other")
					}
					s, err := OpenMemory(MemoryConfig{Size: span})
					if err != nil {
						b.Fatal(err)
					}
					defer s.Close()
					data := bytes.Repeat([]byte{1}, 1<<20)
					for off := int64(0); off < span; off += int64(len(data)) {
						if err := s.WriteAt(data, off); err != nil {
							b.Fatal(err)
						}
					}
					m := s.(*Memory)
					b.SetBytes(int64(size))
					for i := 0; b.Loop(); i++ {
						off := rand.Int64N(span/int64(size)) * int64(size)
						src := data[i*size%len(data):][:size]
						for j := 0; j < size; j += streamUnit {
							src[j]++ // as if it had just been received
						}
						write(m.slot(off).page[off%memoryPage:][:size], src)
					}
				})
			}
		}
	}
}
