package daemon

import (
	"fmt"
	"strings"
	"testing"
)

// A process that was killed while it told its witness something leaves a line that is not whole. It does not count.
func TestWitnessIsTold(t *testing.T) {
	for text, want := range map[string]string{
		"":                                  "",
		"x\n":                               `"x\n" is not what serve tells`,
		"{}\n":                              `"{}\n" is not what serve tells`,
		`{"Cluster":{"Etcd":["http://[`:     "",
		`{"Cluster":{"Etcd":["x"]}}` + "\n": "",
		`{"Cluster":{"Etcd":["x"]}}` + "\n" + `{"Cluster":{"Etcd":["x"]},"Leases":["1"`: "",
		`{"Cluster":{"Etcd":["x"],"Lease":1000000000},"Leases":["1"]}` + "\n":           `endpoint "x"`,
	} {
		err := Witness(t.Context(), strings.NewReader(text))
		if got := fmt.Sprint(err); (err == nil) != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%q: %s, want %q", text, got, want)
		}
	}
}
