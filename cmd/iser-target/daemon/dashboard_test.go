package daemon

import (
	"strings"
	"testing"

	"github.com/iser-target/iser-target/config"
)

// A program without a dashboard refuses a configuration that has one.
func TestDashboardIsRefusedWithoutOne(t *testing.T) {
	l := newLab(t)
	l.more = "dashboard: {listen: \"127.0.0.1:0\"}"
	if _, err := l.apply(ChangeOptions{}); err == nil || !strings.Contains(err.Error(), "this program does not have it") {
		t.Errorf("change: %v", err)
	}
	if got := l.Effective().Dashboard.Listen; got != "" {
		t.Errorf("dashboard.listen is %q", got)
	}
	doc, err := config.NewDocument("f", []byte(strings.Replace(l.text(), l.dir, t.TempDir(), 1)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := New(doc, Options{LogTo: t.Output()}); err == nil || !strings.Contains(err.Error(), "this program does not have it") {
		t.Errorf("start: %v", err)
	}
}
