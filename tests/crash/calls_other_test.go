//go:build !amd64

package crash

import "testing"

func TestEachSystemCall(t *testing.T) {
	t.Skip("the test reads the registers of amd64")
}
