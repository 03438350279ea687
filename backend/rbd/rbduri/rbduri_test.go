package rbduri

import (
	"fmt"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for uri, want := range map[string]string{
		"rbd:rbd/disk":                          "{rbd  disk /etc/ceph/ceph.conf admin} rbd/disk",
		"rbd:My_pool.1/ns/a:b?conf=/c d&id=i.s": "{My_pool.1 ns a:b /c d i.s} My_pool.1/ns/a:b",
		"":                                      "not a URI",
		"rbd:":                                  "not a URI",
		"rbd:disk":                              "not a URI",
		"rbd://rbd/disk":                        "not a URI",
		"rbd:a/b/c/d":                           "not a URI",
		"rbd:a/b#c":                             "not a URI",
		"nbd://host/disk":                       "not a URI",
		"rbd:/disk":                             "not a URI",
		"rbd:rbd/":                              `image ""`,
		"rbd:rbd//disk":                         `namespace ""`,
		"rbd:-p/disk":                           `pool "-p"`,
		"rbd:p/a@snap":                          `image "a@snap"`,
		"rbd:p/" + strings.Repeat("x", 96):      "1 to 95",
		"rbd:p/%41":                             `image "%41"`,
		"rbd:p/a?conf=ceph.conf":                "conf: must be an absolute path",
		"rbd:p/a?conf=/x,y":                     "without commas",
		"rbd:p/a?id=":                           `id ""`,
		"rbd:p/a?id=a&id=b":                     "occurs twice",
		"rbd:p/a?user=a":                        `"user" of the URI: must be conf or id`,
		"rbd:p/a?%zz":                           "parameters",
		"rbd:p/\u00e4":                          "printable ASCII",
	} {
		got := ""
		if i, err := Parse(uri); err != nil {
			got = err.Error()
		} else {
			got = fmt.Sprintf("%v %v", *i, i)
		}
		if !strings.Contains(got, want) || want == "" {
			t.Errorf("%q: %s, want %s", uri, got, want)
		}
	}
}
