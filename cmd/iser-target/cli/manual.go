package cli

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cpuguy83/go-md2man/v2/md2man"
	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/config"
)

// A schemaNode is a key of the JSON Schema of the configuration, or the elements of one.
type schemaNode struct {
	Type        string                 `json:"type"`
	Description string                 `json:"description"`
	Default     any                    `json:"default"`
	Enum        []any                  `json:"enum"`
	Minimum     *json.Number           `json:"minimum"`
	Maximum     *json.Number           `json:"maximum"`
	Pattern     string                 `json:"pattern"`
	AnyOf       []schemaNode           `json:"anyOf"`
	Required    []string               `json:"required"`
	Properties  map[string]*schemaNode `json:"properties"`
	Items       *schemaNode            `json:"items"`
}

// kind returns the type of a value, in the words of docs/config.md.
func (n *schemaNode) kind() string {
	switch n.Type {
	case "array":
		if n.Items != nil && n.Items.Properties != nil {
			return "list of mappings"
		}
		return "list"
	case "object":
		return "mapping"
	case "integer":
		return "number"
	case "":
		for i := range n.AnyOf {
			switch p := n.AnyOf[i].Pattern; {
			case strings.Contains(p, "ns|us"):
				return "duration"
			case strings.Contains(p, "KkMmGgTtPp"):
				return "size"
			}
		}
		return "value"
	}
	return n.Type
}

// facts returns type, range, default and values of a key.
func (n *schemaNode) facts(required bool) string {
	list := []string{n.kind()}
	if required {
		list = append(list, "required")
	}
	of := n
	if n.Items != nil && n.Items.Properties == nil {
		of = n.Items
	}
	switch {
	case of.Minimum != nil && of.Maximum != nil:
		list = append(list, fmt.Sprintf("%s to %s", *of.Minimum, *of.Maximum))
	case of.Minimum != nil:
		list = append(list, fmt.Sprintf("at least %s", *of.Minimum))
	}
	var values []string
	for _, v := range of.Enum {
		if v != "" { // as if the key were not there
			values = append(values, fmt.Sprintf("`%v`", v))
		}
	}
	if len(values) > 0 {
		list = append(list, "one of "+strings.Join(values, ", "))
	}
	if n.Default != nil && n.Default != "" {
		list = append(list, fmt.Sprintf("default `%v`", n.Default))
	}
	return strings.Join(list, "; ")
}

// describe writes the keys below n, whose path is path, as a list of definitions.
func (n *schemaNode) describe(b *strings.Builder, path string) {
	for _, name := range slices.Sorted(maps.Keys(n.Properties)) {
		key := n.Properties[name]
		at := name
		if path != "" {
			at = path + "." + name
		}
		fmt.Fprintf(b, "**%s**\n: (%s) %s\n\n", strings.NewReplacer("[", `\[`, "]", `\]`, "_", `\_`).Replace(at), key.facts(slices.Contains(n.Required, name)), key.Description)
		key.describe(b, at)
		if key.Items != nil {
			key.Items.describe(b, at+"[]")
		}
	}
}

// manualTitle begins a page. Packages build the same page from the same source.
func manualTitle(name, section string, date time.Time) string {
	return fmt.Sprintf("%% %q %q %q \"iser-target\" \"iser-target\"\n\n", strings.ToUpper(name), section, date.UTC().Format("Jan 2006"))
}

// configManual returns iser-target.yaml(5) as Markdown, with each key of the schema.
func configManual(date time.Time) (string, error) {
	var schema schemaNode
	d := json.NewDecoder(strings.NewReader(string(config.Schema())))
	d.UseNumber()
	if err := d.Decode(&schema); err != nil {
		return "", fmt.Errorf("schema of the configuration: %w", err)
	}
	var b strings.Builder
	b.WriteString(manualTitle("iser-target.yaml", "5", date))
	b.WriteString("# NAME\n\niser-target.yaml - the configuration file of iser-target(8)\n\n# DESCRIPTION\n\n" +
		"The file that `iser-target serve --config` reads is YAML. A key that the list below does not have is an error. `[]` in the name of a key stands for each element of a list. " +
		"Sizes have units, like `512MiB` or `10G` (1024). Durations have units, like `500ms`, `30s` or `2h`.\n\n" +
		"`iser-target config validate FILE` checks a file, `config plan` shows what applying it changes, and `config apply` applies it. The target writes changes by other commands back to " +
		"the file, and keeps its comments.\n\n# EXAMPLE\n\n" +
		"    portals:\n      - listen: 192.0.2.10:3260\n    targets:\n      - name: iqn.2026-11.io.example:store\n        initiators: [\"iqn.1993-08.org.debian:*\"]\n        luns:\n" +
		"          - {id: 0, backend: file, path: /var/lib/iser-target/zero.img, size: 10GiB}\n\n# KEYS\n\n")
	schema.describe(&b, "")
	b.WriteString("# ENVIRONMENT\n\nA variable overrides a key that is not in a list: `ISER_TARGET_` and the name of the key in capitals, with `_` for each point, like `ISER_TARGET_LOG_LEVEL` for `log.level`. " +
		"Secrets and lists are in the file only. A variable without a key is an error.\n\n# SEE ALSO\n\niser-target(1), iser-target(8), iser-target-config-validate(1), iser-target-init(1)\n")
	return b.String(), nil
}

// serviceManual returns iser-target(8) as Markdown: the target as a service.
func serviceManual(root *cobra.Command, date time.Time) string {
	var b strings.Builder
	b.WriteString(manualTitle("iser-target", "8", date))
	fmt.Fprintf(&b, "# NAME\n\niser-target - %s\n\n# SYNOPSIS\n\n", strings.ToLower(root.Short[:1])+root.Short[1:])
	serve, _, err := root.Find([]string{"serve"})
	if err == nil && serve != root {
		fmt.Fprintf(&b, "`%s`\n\n# DESCRIPTION\n\n%s\n\n", serve.UseLine(), serve.Long)
	}
	b.WriteString("# COMMANDS\n\nEach command has a page of its own, like iser-target-lun-create(1).\n\n")
	for _, c := range root.Commands() {
		if c.IsAvailableCommand() {
			fmt.Fprintf(&b, "**%s**\n: %s.\n\n", c.Name(), c.Short)
		}
	}
	b.WriteString("# SIGNALS\n\n**SIGTERM**, **SIGINT**\n: End. The second one ends the process at once.\n\n**SIGHUP**\n: Read the configuration file again, and apply the differences.\n\n" +
		"**SIGUSR2**\n: Continue in a new process of the program: see iser-target-upgrade(1).\n\n# EXIT STATUS\n\n")
	for _, line := range strings.Split(exitCodes, "\n")[1:] {
		if line != "" {
			b.WriteString("  " + line + "\n") // a block of text
		}
	}
	b.WriteString("\n# FILES\n\n")
	for _, f := range [][2]string{
		{"/etc/iser-target/config.yaml", "The configuration of the service: see iser-target.yaml(5)."},
		{"/var/lib/iser-target", "The default of `state_dir`: identities, reservations and settings of LUNs."},
		{config.ServiceSocket, "The control socket of the service."},
		{"FILE.history", "Earlier versions of the configuration file FILE: see iser-target-config-history(1)."},
	} {
		fmt.Fprintf(&b, "**%s**\n: %s\n\n", f[0], f[1])
	}
	b.WriteString("# ENVIRONMENT\n\n")
	variables := [][2]string{{envSocket, "Socket of commands, as --socket."}, {envAddress, "Address of commands, as --address."}, {envContext, "Context of commands, as --context."}}
	for _, f := range (&program{}).files() {
		variables = append(variables, [2]string{f.env, "PEM file with " + f.what + ", as --" + f.flag + "."})
	}
	for _, v := range append(variables, [2]string{"NO_COLOR", "If set, commands print no colours."}, [2]string{"SOURCE_DATE_EPOCH", "Date of pages that the command docs writes, in seconds since 1970."}) {
		fmt.Fprintf(&b, "**%s**\n: %s\n\n", strings.ReplaceAll(v[0], "_", `\_`), v[1])
	}
	b.WriteString("iser-target.yaml(5) has the variables that override keys of the configuration.\n\n# SEE ALSO\n\niser-target(1), iser-target.yaml(5), iser-target-serve(1), iser-target-status(1), iser-target-doctor(1)\n")
	return b.String()
}

// writeManuals writes the pages of sections 5 and 8 to dir.
func writeManuals(root *cobra.Command, dir string, date time.Time) error {
	keys, err := configManual(date)
	if err != nil {
		return err
	}
	for file, text := range map[string]string{"iser-target.yaml.5": keys, "iser-target.8": serviceManual(root, date)} {
		if err := os.WriteFile(filepath.Join(dir, file), md2man.Render([]byte(text)), 0o644); err != nil {
			return err
		}
	}
	return nil
}
