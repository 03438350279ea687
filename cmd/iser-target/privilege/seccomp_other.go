//go:build !amd64 && !arm64

package privilege

// deniedHere are system calls like denied that not all architectures have.
var deniedHere []uint32
