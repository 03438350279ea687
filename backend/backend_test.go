package backend_test

import (
	"strings"
	"testing"

	"github.com/iser-target/iser-target/backend"
)

// Validate refuses Infos whose fields contradict each other.
func TestInfoValidate(t *testing.T) {
	good := backend.Info{Size: 1 << 20, BlockSize: 512, PhysicalBlockSize: 4096, DiscardGranularity: 65536, DiscardAlignment: 32256, AtomicWrite: 4096}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*backend.Info){
		"block size 1024":            func(i *backend.Info) { i.BlockSize = 1024 },
		"size 0":                     func(i *backend.Info) { i.Size = 0 },
		"size 1000":                  func(i *backend.Info) { i.Size = 1000 },
		"physical block size 256":    func(i *backend.Info) { i.PhysicalBlockSize = 256 },
		"physical block size 1536":   func(i *backend.Info) { i.PhysicalBlockSize = 1536 },
		"discard granularity 1000":   func(i *backend.Info) { i.DiscardGranularity = 1000 },
		"discard alignment 100":      func(i *backend.Info) { i.DiscardAlignment = 100 },
		"discard alignment 65536":    func(i *backend.Info) { i.DiscardAlignment = 65536 },
		"discard alignment -512":     func(i *backend.Info) { i.DiscardAlignment = -512 },
		"discard alignment 512":      func(i *backend.Info) { i.DiscardGranularity, i.DiscardAlignment = 0, 512 },
		"atomic write of 1000 bytes": func(i *backend.Info) { i.AtomicWrite = 1000 },
	} {
		bad := good
		change(&bad)
		if err := bad.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q in it", err, want)
		}
	}
	for _, change := range []func(*backend.Info){
		func(i *backend.Info) { i.DiscardAlignment = backend.DiscardUnaligned },
		func(i *backend.Info) { i.DiscardGranularity, i.DiscardAlignment = 0, 0 },
	} {
		info := good
		change(&info)
		if err := info.Validate(); err != nil {
			t.Error(err)
		}
	}
}
