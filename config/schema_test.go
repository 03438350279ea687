package config

import (
	"bytes"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"

	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/security/ipsec"
)

var updateSchema = flag.Bool("update", false, "write schema.json")

// TestSchema compares schema.json with the keys of Config and with docs/config.md, which has their meaning.
func TestSchema(t *testing.T) {
	b, err := os.ReadFile("../docs/config.md")
	if err != nil {
		t.Fatal(err)
	}
	g := schemaMaker{rows: referenceRows(string(b)), used: map[string]bool{}}
	root := g.object("", reflect.TypeFor[Config](), reflect.ValueOf(base()))
	root["$schema"] = "http://json-schema.org/draft-07/schema#"
	root["title"] = "Configuration of iser-target"
	root["required"] = []string{"portals", "targets"}
	for path := range constraints {
		if !g.used[path] {
			t.Errorf("constraints has %s, which is no key", path)
		}
	}
	if len(g.missing) > 0 {
		t.Errorf("docs/config.md has no meaning for %q", g.missing)
	}
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(root); err != nil {
		t.Fatal(err)
	}
	if *updateSchema {
		if err := os.WriteFile("schema.json", out.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		return // Schema has the text from before
	}
	if !bytes.Equal(out.Bytes(), Schema()) {
		t.Error("config/schema.json is not that of Config and docs/config.md. Run make schema")
	}
}

type object = map[string]any

// constraints says what the type of a key does not say about its value. A key of a list item has [] in its path. The
// keys of discovery_auth and of rates of LUNs are those of targets[].auth and of LUNs.
var constraints = map[string]object{
	"portals":              {"minItems": 1},
	"portals[].listen":     {"pattern": portPattern},
	"portals[].advertise":  {"items": object{"type": "string", "pattern": portPattern}, "uniqueItems": true},
	"portals[].transports": {"items": object{"enum": transports}, "uniqueItems": true},
	"portals[].tpgt":       between(1, maxTPGT),
	"portals[].ipsec":      {"enum": demands},

	"targets[].name":                      {"pattern": `^([iI][qQ][nN]\.[0-9]{4}-[0-9]{2}\..+|[eE][uU][iI]\.[0-9A-Fa-f]{16}|[nN][aA][aA]\.[0-9A-Fa-f]{16}([0-9A-Fa-f]{16})?)$`},
	"targets[].alias":                     {"maxLength": maxAlias},
	"targets[].initiators":                {"minItems": 1},
	"targets[].networks":                  {"minItems": 1, "uniqueItems": true},
	"targets[].portal_groups":             {"items": typed("integer", between(1, maxTPGT)), "minItems": 1, "uniqueItems": true},
	"targets[].max_outstanding_r2t":       between(1, 65535),
	"targets[].ipsec":                     {"enum": demands},
	"targets[].redirect.to":               {"pattern": offOrPortPattern},
	"targets[].auth.method":               {"enum": []string{"chap", "none", ""}},
	"targets[].auth.algorithms":           {"items": object{"enum": chapAlgorithms()}, "uniqueItems": true},
	"targets[].auth.users[].name":         {"maxLength": security.MaxCHAPName},
	"targets[].luns[].id":                 between(0, maxLUN),
	"targets[].luns[].backend":            {"enum": slices.Sorted(maps.Keys(backends))},
	"targets[].luns[].block_size":         {"enum": []int{512, 4096, 0}},
	"targets[].luns[].protection":         {"enum": []int{0, 1, 3}},
	"targets[].luns[].identity":           {"enum": []string{IdentityFile, IdentityNew, ""}},
	"targets[].luns[].naa":                {"pattern": `^$|^([nN][aA][aA]\.)?(6[0-9A-Fa-f]{31}|[235][0-9A-Fa-f]{15})$`},
	"targets[].luns[].serial":             {"maxLength": 64, "pattern": namePattern},
	"targets[].luns[].vendor":             {"maxLength": 8, "pattern": namePattern},
	"targets[].luns[].product":            {"maxLength": 16, "pattern": namePattern},
	"targets[].luns[].iops":               between(0, maxIOPS),
	"targets[].luns[].min_iops":           between(0, maxIOPS),
	"targets[].luns[].rates[].initiators": {"minItems": 1},
	"targets[].luns[].rates[].iops":       between(0, maxIOPS),
	"targets[].luns[].rates[].min_iops":   between(0, maxIOPS),
	"limits.queue_depth":                  between(1, 1024),
	"limits.max_fpdu":                     between(512, 64768),
	"limits.lost_sessions":                between(1, 1024),
	"limits.lost_sessions_per_initiator":  between(1, 1024),
	"limits.tokens":                       between(1, 16384),
	"limits.tokens_per_initiator":         between(1, 16384),
	"limits.max_connections":              between(1, 65536),
	"limits.reserved_connections":         between(0, 65535),
	"limits.connections_per_address":      between(0, 65536),
	"limits.connections_per_portal":       between(0, 65536),
	"limits.sessions_per_initiator":       between(1, 65536),
	"limits.sessions_per_user":            between(0, 65536),
	"limits.discovery_per_address":        between(1, 65536),
	"limits.log_lines_per_address":        between(1, 10000),
	"limits.connections_per_session":      between(1, 64),
	"limits.error_recovery_level":         between(0, 2),
	"limits.registrations_per_initiator":  between(1, 512),
	"limits.backend_calls":                between(0, 4096),
	"limits.backend_calls_per_lun":        between(1, 1024),
	"limits.heavy_commands":               between(0, 1024),
	"limits.descriptors":                  {"anyOf": []object{{"const": 0}, between(128, 1<<30)}},
	"mpa.unstated_ord":                    between(1, MaxORD),
	"debug.listen":                        {"pattern": offOrPortPattern},
	"log.level":                           {"enum": slices.SortedFunc(maps.Keys(levels), func(a, b string) int { return cmp.Compare(levels[a], levels[b]) })},
	"log.format":                          {"enum": []string{"text", "json"}},
	"metrics.listen":                      {"pattern": offOrPortPattern},
	"dashboard.listen":                    {"pattern": offOrPortPattern},
	"drain_to":                            {"pattern": offOrPortPattern},
	"control.listen":                      {"pattern": offOrPortPattern},
	"control.socket":                      {"maxLength": maxSocket},
	"control.access[].role":               {"enum": Roles},
	"control.paths":                       {"items": object{"type": "string", "pattern": "^/"}},
	"process.paths":                       {"items": object{"type": "string", "pattern": "^/"}},
	"process.capabilities":                {"items": object{"type": "string", "pattern": "^CAP_"}},
	"process.user":                        {"not": object{"enum": []string{"root", "0"}}},
	"ipsec.driver":                        {"enum": ipsecDrivers},
	"ipsec.profiles[].mode":               {"enum": append(slices.Clone(ipsecModes), "")},
	"ipsec.profiles[].suites":             {"items": object{"enum": ipsec.Suites()}, "uniqueItems": true},
	"ipsec.profiles[].min_key_bits":       {"enum": []int{128, 192, 256, 0}},
	"ipsec.profiles[].min_replay_window":  {"anyOf": []object{{"const": 0}, between(32, maxReplayWindow)}},
	"ipsec.vici.socket":                   {"maxLength": maxSocket, "pattern": "^/"},
	"ipsec.static.sas[].spi":              between(minSPI, maxSPI),
	"ipsec.static.sas[].reqid":            between(1, 0x7fff),
	"ipsec.static.sas[].mode":             {"enum": ipsecModes},
	"ipsec.static.sas[].suite":            {"enum": ipsec.Suites()},
	"ipsec.static.sas[].key_file":         {"pattern": "^/"},
	"ipsec.static.sas[].replay_window":    between(0, maxReplayWindow),
	"ipsec.static.policies[].direction":   {"enum": []string{"in", "out"}},
	"ipsec.static.policies[].port":        between(0, 65535),
	"ipsec.static.policies[].mode":        {"enum": ipsecModes},
	"ipsec.static.policies[].reqid":       between(1, 0x7fff),
}

const (
	portPattern      = `:[0-9]+$`
	offOrPortPattern = `^$|:[0-9]+$`
	namePattern      = `^$|^[!-~]([ -~]*[!-~])?$`
	sizePattern      = `^[0-9]+(\.[0-9]+)?( ?([KkMmGgTtPp]?[Bb]|[KkMmGgTtPp]([Ii][Bb])?))?$`
	zeroSizePattern  = `^0+(\.0+)?( ?([KkMmGgTtPp]?[Bb]|[KkMmGgTtPp]([Ii][Bb])?))?$`
	durationPattern  = `^[-+]?(0|(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+)$`
)

var demands = []string{string(ipsec.Off), string(ipsec.Audit), string(ipsec.Required), ""}

func between(least, most int) object { return object{"minimum": least, "maximum": most} }

func typed(name string, o object) object {
	o = maps.Clone(o)
	o["type"] = name
	return o
}

// chapAlgorithms returns the names of all algorithms, from the error about another one.
func chapAlgorithms() []string {
	_, err := security.ParseCHAPAlgorithms([]string{""})
	_, list, _ := strings.Cut(err.Error(), " is not one of ")
	return strings.Split(list, ", ")
}

// A schemaMaker makes the schema of a type.
type schemaMaker struct {
	rows    map[string]row
	used    map[string]bool // of constraints
	missing []string        // keys without a row
}

// value returns the schema of the values of a key. def is the default, if it is valid.
func (g *schemaMaker) value(path string, t reflect.Type, def reflect.Value) object {
	var o object
	switch t {
	case reflect.TypeFor[Size]():
		o = object{"anyOf": []object{{"type": "string", "pattern": sizePattern}, {"type": "integer", "minimum": 0}}}
	case reflect.TypeFor[time.Duration]():
		o = object{"anyOf": []object{{"type": "string", "pattern": durationPattern}, {"const": 0}}}
	case reflect.TypeFor[Switch]():
		o = object{"anyOf": []object{{"enum": []string{"on", "off"}}, booleans}}
	case reflect.TypeFor[CRCPolicy]():
		o = object{"anyOf": []object{{"enum": []string{"auto", "on", "off"}}, booleans}}
	case reflect.TypeFor[ESNPolicy]():
		o = object{"anyOf": []object{{"enum": []string{"auto"}}, booleans}}
	case reflect.TypeFor[security.Secret]():
		o = object{"type": "string"}
	default:
		switch t.Kind() {
		case reflect.Struct:
			o = g.object(path, t, def)
		case reflect.Slice:
			var item reflect.Value
			switch t.Elem() {
			case reflect.TypeFor[Target]():
				item = reflect.ValueOf(NewTarget())
			case reflect.TypeFor[Portal]():
				item = reflect.ValueOf(Portal{TPGT: defaultTPGT})
			}
			o = object{"type": "array", "items": g.value(path+"[]", t.Elem(), item)}
		case reflect.String:
			o = object{"type": "string"}
		case reflect.Int:
			o = object{"type": "integer"}
		case reflect.Bool:
			o = object{"type": "boolean"}
		default:
			panic(t.String())
		}
	}
	more := constraints[path]
	if rest, ok := strings.CutPrefix(path, "discovery_auth."); ok {
		more = constraints["targets[].auth."+rest]
	}
	if more != nil {
		g.used[path] = true
	}
	maps.Copy(o, more)
	return o
}

// booleans are true and false, which may be in quotes where a string is possible, too.
var booleans = object{"anyOf": []object{{"type": "boolean"}, {"type": "string", "pattern": "^(true|false)$"}}}

func (g *schemaMaker) object(path string, t reflect.Type, def reflect.Value) object {
	properties := object{}
	var required []string
	for i, key := range keysOf(t) {
		full := under(path, key)
		var v reflect.Value
		if def.IsValid() {
			v = def.Field(i)
		}
		o := g.value(full, t.Field(i).Type, v)
		row, ok := g.rows[rowPath(full)]
		if !ok && !(path == "" && o["type"] != "string") && full != "control.access" && full != "control.tls" && full != "cluster.tls" && path != "ipsec.static" {
			g.missing = append(g.missing, full)
		}
		if row.meaning != "" {
			o["description"] = row.meaning
		}
		// The environment may have the keys of maps.
		if strings.HasSuffix(path, "[]") && row.preset == "required" {
			required = append(required, key)
		}
		if text := preset(v); text != nil && full != "control.socket" { // which depends on the user
			o["default"] = text
		}
		properties[key] = o
	}
	o := object{"type": "object", "properties": properties, "additionalProperties": false}
	if t == reflect.TypeFor[LUN]() {
		o["allOf"] = backendRules()
	}
	if t == reflect.TypeFor[User]() {
		o["anyOf"] = []object{{"required": []string{"secret"}}, {"required": []string{"secret_file"}}}
	}
	if len(required) > 0 {
		o["required"] = required
	}
	return o
}

// preset returns a default for JSON, or nil for none.
func preset(v reflect.Value) any {
	if !v.IsValid() {
		return nil
	}
	switch v := v.Interface().(type) {
	case Size:
		return v.String()
	case time.Duration:
		return FormatDuration(v)
	case fmt.Stringer:
		return v.String()
	case string:
		if v != "" {
			return v
		}
	case int, bool:
		return v
	}
	return nil
}

// backendRules returns which keys each backend requires and accepts.
func backendRules() (rules []object) {
	empty := map[string]object{
		"path": {"const": ""}, "plugin": {"const": ""}, "options": {"const": ""}, "block_size": {"const": 0},
		"size": {"anyOf": []object{{"const": 0}, {"type": "string", "pattern": zeroSizePattern}}},
	}
	for _, name := range slices.Sorted(maps.Keys(backends)) {
		b, properties := backends[name], object{}
		for key, o := range empty {
			if !slices.Contains(b.needs, key) && !slices.Contains(b.takes, key) {
				properties[key] = o
			}
		}
		rules = append(rules, object{
			"if":   object{"properties": object{"backend": object{"const": name}}, "required": []string{"backend"}},
			"then": object{"required": b.needs, "properties": properties},
		})
	}
	return rules
}

// A row is a row of a table of keys in docs/config.md.
type row struct{ preset, meaning string }

var (
	heading   = regexp.MustCompile(`^##+ ([a-z][a-z_.\[\]]*)( \(.*\))?$`)
	seeBelow  = regexp.MustCompile(`[,:]? [Ss]ee (\[below\]\([^)]*\)|below)`)
	reference = regexp.MustCompile(`\[([^\]]+)\]\([^)]*\)`)
)

// referenceRows returns the rows by the path of their keys, as rowPath has it.
func referenceRows(doc string) map[string]row {
	rows := map[string]row{}
	section := ""
	var columns []string
	for line := range strings.Lines(doc) {
		line = strings.TrimSuffix(line, "\n")
		if strings.HasPrefix(line, "#") {
			if m := heading.FindStringSubmatch(line); m != nil {
				section = m[1]
			}
			columns = nil
			continue
		}
		if !strings.HasPrefix(line, "|") {
			columns = nil
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		if columns == nil {
			columns = cells
			continue
		}
		if columns[0] != "key" || len(cells) != len(columns) || cells[0] == "---" {
			continue
		}
		key, r := strings.Trim(cells[0], "`"), row{}
		for i, name := range columns {
			switch name {
			case "default":
				r.preset = cells[i]
			case "meaning":
				r.meaning = strings.ReplaceAll(reference.ReplaceAllString(seeBelow.ReplaceAllString(cells[i], ""), "$1"), "..", ".")
			}
		}
		if r.meaning == "" {
			continue
		}
		if key == section || section == "drain" || section == "watch" {
			rows[key] = r
		} else {
			rows[section+"."+key] = r
		}
	}
	return rows
}

// rowPath returns the path of a key in referenceRows.
func rowPath(path string) string {
	path = strings.Replace(path, "discovery_auth", "targets[].auth", 1)
	path = strings.Replace(path, "auth.users[].mutual.", "auth.mutual.", 1)
	i := strings.LastIndexByte(path, '.')
	if i < 0 {
		return path
	}
	return strings.TrimSuffix(path[:i], "[]") + path[i:]
}

// compiled is the schema as a kept library understands it.
var compiled = sync.OnceValues(func() (*jsonschema.Schema, error) {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(Schema()))
	if err != nil {
		return nil, err
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("schema.json", doc); err != nil {
		return nil, err
	}
	return c.Compile("schema.json")
})

// bySchema returns what the schema says about a document. Editors see JSON's types.
func bySchema(text []byte) error {
	s, err := compiled()
	if err != nil {
		return err
	}
	var doc any
	if err := yaml.Unmarshal(text, &doc); err != nil {
		return err
	}
	return s.Validate(doc)
}

// The configurations of the repository are valid by the schema. TestLoad and the other tests of load check theirs.
func TestSchemaAcceptsExamples(t *testing.T) {
	files, err := filepath.Glob("../examples/*.yaml")
	if err != nil || len(files) < 8 {
		t.Fatalf("%q, %v", files, err)
	}
	for _, f := range append(files, "default.yaml", "../packaging/config.yaml") {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if err := bySchema(b); err != nil {
			t.Errorf("%s: %v", f, err)
		}
	}
}

// The schema refuses documents that the target refuses, at the same key.
func TestSchemaRefusesMistakes(t *testing.T) {
	for _, tc := range []struct{ name, old, new, at string }{
		{"unknown section", "", "limit: {}", ""},
		{"unknown key in a section", "", "limits: {quue_depth: 1}", "/limits"},
		{"unknown key of a LUN", lun, "{id: 0, backend: memory, size: 1GiB, colour: x}", "/targets/0/luns/0"},
		{"section is empty", "", "log:", "/log"},
		{"section is a list", "", "log: []", "/log"},
		{"list is a string", `["*"]`, `"*"`, "/targets/0/initiators"},
		{"string is a number", `["*"]`, "[1]", "/targets/0/initiators/0"},
		{"number is a string", "", `limits: {queue_depth: "12"}`, "/limits/queue_depth"},
		{"number is a float", "", "limits: {queue_depth: 1.5}", "/limits/queue_depth"},
		{"bool is a string", lun, `{id: 0, backend: memory, size: 1GiB, read_only: "yes"}`, "/targets/0/luns/0/read_only"},
		{"duration without unit", "", "limits: {nop_timeout: 15}", "/limits/nop_timeout"},
		{"size", lun, "{id: 0, backend: memory, size: 1Gig}", "/targets/0/luns/0/size"},
		{"negative size", lun, "{id: 0, backend: memory, size: -1}", "/targets/0/luns/0/size"},
		{"switch", "", "mpa: {markers: maybe}", "/mpa/markers"},
		{"policy", "", "mpa: {crc: maybe}", "/mpa/crc"},
		{"no portal", "portals:\n  - listen: 127.0.0.1:3260", "portals: []", "/portals"},
		{"no portals", "portals:\n  - listen: 127.0.0.1:3260", "", ""},
		{"no port", "127.0.0.1:3260", "127.0.0.1", "/portals/0/listen"},
		{"transport", "127.0.0.1:3260", "127.0.0.1:3260\n    transports: [udp]", "/portals/0/transports/0"},
		{"transport twice", "127.0.0.1:3260", "127.0.0.1:3260\n    transports: [tcp, tcp]", "/portals/0/transports"},
		{"no name", "name: iqn.2026-11.io.example:store", "alias: a", "/targets/0"},
		{"bad name", "iqn.2026-11.io.example:store", "store", "/targets/0/name"},
		{"no initiators", `["*"]`, "[]", "/targets/0/initiators"},
		{"no backend", lun, "{id: 0, size: 1GiB}", "/targets/0/luns/0"},
		{"backend", lun, "{id: 0, backend: disk, size: 1GiB}", "/targets/0/luns/0/backend"},
		{"memory with a path", lun, "{id: 0, backend: memory, size: 1GiB, path: /x}", "/targets/0/luns/0/path"},
		{"file without size", lun, "{id: 0, backend: file, path: /x}", "/targets/0/luns/0"},
		{"block with size", lun, "{id: 0, backend: block, path: /dev/x, size: 1G}", "/targets/0/luns/0/size"},
		{"gotgt without plugin", lun, "{id: 0, backend: gotgt, path: /x}", "/targets/0/luns/0"},
		{"block size", lun, "{id: 0, backend: memory, size: 1GiB, block_size: 1024}", "/targets/0/luns/0/block_size"},
		{"user without secret", "initiators:", "auth: {method: chap, users: [{name: a}]}\n    initiators:", "/targets/0/auth/users/0"},
		{"method", "initiators:", "auth: {method: CHAP}\n    initiators:", "/targets/0/auth/method"},
		{"role", "", "control: {access: [{ou: b, role: root}]}", "/control/access/0/role"},
		{"driver", "", "ipsec: {driver: libreswan}", "/ipsec/driver"},
	} {
		in := good + tc.new
		if tc.old != "" {
			if in = strings.Replace(good, tc.old, tc.new, 1); in == good {
				t.Fatalf("%s: %q is not in the configuration", tc.name, tc.old)
			}
		}
		if _, err := load("f", []byte(in)); err == nil {
			t.Errorf("%s: the target accepts it", tc.name)
		}
		err := bySchema([]byte(in))
		if err == nil {
			t.Errorf("%s: the schema accepts it", tc.name)
			continue
		}
		var at []string
		var walk func(*jsonschema.ValidationError)
		walk = func(e *jsonschema.ValidationError) {
			at = append(at, strings.Join(append([]string{""}, e.InstanceLocation...), "/"))
			for _, c := range e.Causes {
				walk(c)
			}
		}
		walk(err.(*jsonschema.ValidationError))
		if !slices.Contains(at, tc.at) {
			t.Errorf("%s: %v\nis not about %q but %q", tc.name, err, tc.at, at)
		}
	}
}

// The numbers and words of constraints are those that the target accepts, and no others.
func TestSchemaBoundsAreThoseOfTheTarget(t *testing.T) {
	all := strings.Replace(good, lun, `{id: 0, backend: memory, size: 1GiB, rates: [{initiators: ["*"], min_bandwidth: 1}]}
    auth: {method: chap, users: [{name: a, secret: aaaaaaaaaaaa}]}
control: {access: [{ou: a, role: read}]}
ipsec: {driver: static, profiles: [{name: p}], static: {sas: [{esn: true}], policies: [{}]}}
`, 1)
	// complaint returns what the target says about the value of a key in itself, whatever the other keys are.
	complaint := func(path string, value any) string {
		var doc any
		if err := yaml.Unmarshal([]byte(all), &doc); err != nil {
			t.Fatal(err)
		}
		at, parts := doc.(object), strings.Split(path, ".")
		for _, part := range parts[:len(parts)-1] {
			name, list := strings.CutSuffix(part, "[]")
			switch {
			case list:
				at = at[name].([]any)[0].(object)
			case at[name] == nil:
				at[name] = object{}
				fallthrough
			default:
				at = at[name].(object)
			}
		}
		name, list := strings.CutSuffix(parts[len(parts)-1], "[]")
		if at[name] = value; list {
			at[name] = []any{value}
		}
		text, err := yaml.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		if _, err = load("f", text); err == nil {
			return ""
		}
		for line := range strings.Lines(unplaced(err)) {
			key, reason, _ := strings.Cut(strings.TrimPrefix(line, "f: "), ": ")
			if full := strings.ReplaceAll(path, "[]", "[0]"); key != full && key != strings.TrimSuffix(full, "[0]") {
				continue
			}
			if !slices.ContainsFunc([]string{"cannot be set for", "requires ", "no SA has", "is required: chap or none", "must be less than"}, func(s string) bool { return strings.HasPrefix(reason, s) }) &&
				!strings.Contains(reason, "does not encrypt") && !strings.Contains(reason, "set by hand") {
				return reason
			}
		}
		return ""
	}
	tried := 0
	for path, c := range constraints {
		if items, ok := c["items"].(object); ok && path != "targets[].portal_groups" { // whose items must exist
			path, c = path+"[]", items
		}
		if words := reflect.ValueOf(c["enum"]); words.IsValid() {
			for i := range words.Len() {
				if why := complaint(path, words.Index(i).Interface()); why != "" {
					t.Errorf("%s: %v is in the schema, but: %s", path, words.Index(i), why)
				}
			}
			other := any("another")
			if words.Type().Elem().Kind() == reflect.Int {
				other = 77
			}
			if complaint(path, other) == "" {
				t.Errorf("%s: %v is not in the schema, but the target accepts it", path, other)
			}
			tried++
		}
		if choice, ok := c["anyOf"].([]object); ok { // 0 or a range
			if why := complaint(path, 0); why != "" {
				t.Errorf("%s: 0 is in the schema, but: %s", path, why)
			}
			c = choice[1]
		}
		if least, ok := c["minimum"].(int); ok {
			most := c["maximum"].(int)
			for v, want := range map[int]bool{least - 1: false, least: true, most: true, most + 1: false} {
				if why := complaint(path, v); (why == "") != want {
					t.Errorf("%s: %d: in the schema: %v; the target: %s", path, v, want, cmp.Or(why, "accepted"))
				}
			}
			tried++
		}
		if most, ok := c["maxLength"].(int); ok {
			begin := ""
			if strings.HasPrefix(fmt.Sprint(c["pattern"]), "^/") {
				begin = "/"
			}
			for n, want := range map[int]bool{most: true, most + 1: false} {
				if why := complaint(path, begin+strings.Repeat("a", n-len(begin))); (why == "") != want {
					t.Errorf("%s: %s characters: in the schema: %v; the target: %s", path, strconv.Itoa(n), want, cmp.Or(why, "accepted"))
				}
			}
			tried++
		}
	}
	if tried < 60 {
		t.Errorf("%d constraints were tried", tried)
	}
}
