package daemon

import (
	"slices"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// Limits apply to new connections, the log level and the debug server change at once, and
// other keys stay pending until a restart.
func TestSectionsApplyAtOnceOrStayPending(t *testing.T) {
	l := newLab(t)
	load(t, l.login("stays", store))
	l.more = "limits: {queue_depth: 4}\nlog: {level: warn}\ndebug: {listen: \"127.0.0.1:0\"}\nmpa: {crc: true}"
	if p := l.ok(ChangeOptions{}); len(p.Steps) != 4 || p.Note != "" {
		t.Errorf("plan %+v", p)
	}
	if l.log.Enabled(t.Context(), -4) || l.side[config.KindDebug].end == nil {
		t.Error("the log level or the debug server did not change")
	}
	s := l.login("a", store)
	if got := attentions(t, s, 0); got != "29/00" {
		t.Errorf("LUN 0: %s", got)
	}
	l.more = "log: {format: json}\ncontrol: {socket: /nowhere/s}\ndrain: 1s"
	for range 2 {
		p := l.ok(ChangeOptions{})
		if i := slices.IndexFunc(p.Steps, func(s schema.Step) bool { return s.Restart }); i < 0 || p.Steps[i].Done || p.Steps[i].Change.Key != "format" ||
			p.Note != "2 changes take effect at the next start of the target" { // the steps name them
			t.Errorf("plan %+v", p)
		}
		if got := l.State().Pending; len(got) != 2 || !strings.Contains(got[0]+got[1], "format") || !strings.Contains(got[0]+got[1], "control") {
			t.Errorf("pending %q", got)
		}
	}
}
