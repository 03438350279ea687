package testkit

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"
)

// envBlind is the environment variable with the number of blind executions of FuzzBytes.
const envBlind = "ISER_TARGET_BLIND"

// maxInput bounds the inputs of blind executions, in bytes.
const maxInput = 4 << 10

// FuzzBytes fuzzes body with byte strings, beginning with those of f.Add, like f.Fuzz. If make fuzz-blind asks for that, it
// mutates the strings instead that guided runs have found, without a look at coverage: a hundred times as many in the
// same time.
func FuzzBytes(f *testing.F, body func(t testing.TB, b []byte)) {
	f.Helper()
	if v := os.Getenv(envBlind); v != "" {
		n, err := strconv.ParseUint(v, 10, 63)
		if err != nil {
			f.Fatalf("%s: %v", envBlind, err)
		}
		blind(f, n, body)
	}
	f.Fuzz(func(t *testing.T, b []byte) { body(t, b) })
}

// blind calls body n times.
func blind(f *testing.F, n uint64, body func(t testing.TB, b []byte)) {
	corpus, err := corpusOf(f.Name())
	if err != nil {
		f.Fatal(err)
	}
	seed := uint64(time.Now().UnixNano())
	m := mutator{rng: rand.New(rand.NewPCG(seed, 0)), corpus: corpus}
	begun, done := time.Now(), false
	defer func() {
		if !done {
			f.Logf("input %q, seed %d", m.buf, seed)
		}
	}()
	for range n {
		body(f, m.next())
	}
	done = true
	took := time.Since(begun)
	fmt.Printf("blind: elapsed: %v, execs: %d (%.0f/sec), corpus: %d, seed: %d\n", took.Round(time.Second), n, float64(n)/took.Seconds(), len(corpus), seed)
}

// corpusOf returns the inputs of a fuzz target of the package in the working directory: those of testdata, and those in Go's
// cache.
func corpusOf(name string) (corpus [][]byte, err error) {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return nil, errors.New("the test has no build information")
	}
	cache := os.Getenv("GOCACHE")
	if cache == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			return nil, err
		}
		cache = filepath.Join(dir, "go-build")
	}
	pkg := strings.TrimSuffix(info.Path, ".test")
	corpus = [][]byte{{}}
	for _, dir := range []string{filepath.Join("testdata", "fuzz", name), filepath.Join(cache, "fuzz", pkg, name)} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			_, line, _ := strings.Cut(strings.TrimSpace(string(text)), "\n")
			literal, ok := strings.CutPrefix(line, "[]byte(")
			s, err := strconv.Unquote(strings.TrimSuffix(literal, ")"))
			if !ok || err != nil {
				return fmt.Errorf("%s is not a byte string: %q, %v", path, line, err)
			}
			corpus = append(corpus, []byte(s))
			return nil
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	return corpus, nil
}

// A mutator makes inputs of a corpus.
type mutator struct {
	rng    *rand.Rand
	corpus [][]byte
	buf    []byte // the last input
}

// odd are bytes at which programs have bounds.
var odd = [...]byte{0, 1, 2, 4, 0x0f, 0x10, 0x20, 0x7f, 0x80, 0xfe, 0xff}

// next returns an input, which is valid until the next call.
func (m *mutator) next() []byte {
	r := m.rng
	m.buf = append(m.buf[:0], m.corpus[r.IntN(len(m.corpus))]...)
	for range 1 + r.IntN(4) {
		b := m.buf
		if len(b) == 0 {
			m.buf = append(b, byte(r.Uint32()))
			continue
		}
		x := r.Uint64()
		at := int(uint32(x)) % len(b)
		switch x >> 32 % 8 {
		case 0:
			b[at] ^= 1 << (x >> 36 % 8)
		case 1:
			b[at] = byte(x >> 40)
		case 2, 3:
			b[at] = odd[x>>40%uint64(len(odd))]
		case 4: // shorter
			m.buf = b[:at]
		case 5: // longer
			for range 1 + x>>40%16 {
				m.buf = append(m.buf, byte(x>>48))
			}
		case 6: // a part is gone
			m.buf = append(b[:at], b[min(len(b), at+1+int(x>>40%8)):]...)
		case 7: // the end of another input
			other := m.corpus[int(x>>40)%len(m.corpus)]
			m.buf = append(b[:at], other[min(at, len(other)):]...)
		}
		if len(m.buf) > maxInput {
			m.buf = m.buf[:maxInput]
		}
	}
	return m.buf
}
