package nbduri

import (
	"fmt"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for uri, want := range map[string]string{
		"nbd://host/disk":        "{tcp host:10809 disk false  host} ",
		"nbd://host":             "{tcp host:10809  false  host} ",
		"nbd://[::1]:99/a/b%20c": "{tcp [::1]:99 a/b c false  ::1} ",
		"nbds://host:1/?tls-certificates=/etc/c&tls-hostname=x": "{tcp host:1  true /etc/c x} ",
		"nbd+unix:///disk?socket=/run/s":                        "{unix /run/s disk false  } ",
		"nbds+unix:///?socket=/run/s":                           "{unix /run/s  true  localhost} ",
		"":                                                      "not a URI",
		"disk":                                                  "not a URI",
		"http://host/":                                          "not a URI",
		"nbd:///disk":                                           "no host",
		"nbd://host:0/":                                         "port 0",
		"nbd://host:70000/":                                     "port 70000",
		"nbd://user@host/":                                      "no user",
		"nbd://host/#x":                                         "no fragment",
		"nbd://host/?socket=/run/s":                             "requires nbd+unix",
		"nbd://host/?tls-certificates=/x":                       "requires nbds",
		"nbds://host/?tls-certificates=x":                       "absolute path",
		"nbds://host/?tls-psk-file=/x":                          "must be one of",
		"nbd+unix:///disk":                                      "?socket=",
		"nbd+unix:///disk?socket=s":                             "?socket=",
		"nbd+unix://host/disk?socket=/s":                        "///EXPORT",
		"nbd+unix:///?socket=/a&socket=/b":                      "twice",
		"nbd://host/%00":                                        "NUL",
		"nbd://host/" + strings.Repeat("x", 5000):               "4096 bytes",
	} {
		got := ""
		if a, err := Parse(uri); err != nil {
			got = err.Error()
		} else {
			got = fmt.Sprintf("%v ", *a)
		}
		if !strings.Contains(got, want) {
			t.Errorf("%q: %s, want %s", uri, got, want)
		}
	}
}
