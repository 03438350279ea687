package cli

import (
	"strings"

	"github.com/spf13/cobra"
)

// examples has the examples of commands that are not with the command, by its path without the program. The program
// is before each line.
var examples = map[string][]string{
	"": {"serve --path /var/lib/iser-target/zero.img --size 10G --allow 'iqn.1993-08.org.debian:*'",
		"status", "lun create store --path /srv/one.img --size 10G", "connect store --for linux"},
	"auth user create": {"auth user create store host1", "auth user create store host1 --initiator iqn.1993-08.org.debian:01:host1 --secret-file /etc/iser-target/host1.secret"},
	"auth user delete": {"auth user delete store host1 --drain 30s"},
	"auth user list":   {"auth user list store"},
	"auth user rotate": {"auth user rotate store host1", "auth user rotate store host1 --end"},

	"completion bash":       {"completion bash >/etc/bash_completion.d/iser-target"},
	"completion fish":       {"completion fish >/etc/fish/completions/iser-target.fish"},
	"completion powershell": {"completion powershell >iser-target.ps1"},
	"completion zsh":        {"completion zsh >/usr/share/zsh/site-functions/_iser-target"},

	"config apply":    {"config apply --dry-run", "config apply new.yaml --drain 30s"},
	"config export":   {"config export >running.yaml"},
	"config plan":     {"config plan", "config plan new.yaml -o json"},
	"config validate": {"config validate --check-paths /etc/iser-target/config.yaml"},
	"context create": {"context create lab --address 192.0.2.10:3262 --tls-cert me.crt --tls-key me.key --tls-ca ca.crt",
		"context create here --socket /run/iser-target/control.sock"},
	"context delete": {"context delete lab"},
	"context list":   {"context list"},
	"context use":    {"context use lab"},
	"docs":           {"docs bin"},
	"doctor":         {"doctor", "doctor -o jsonpath='$[?(@.severity==\"problem\")]'"},
	"exit-codes":     {"exit-codes"},
	"help":           {"help lun create"},

	"initiator allow": {"initiator allow store iqn.1993-08.org.debian:01:host1", "initiator allow store 'iqn.1991-05.com.microsoft:*' --dry-run"},
	"initiator deny":  {"initiator deny store iqn.1993-08.org.debian:01:host1 --drain 30s"},
	"initiator list":  {"initiator list", "initiator list store --no-headers"},
	"ipsec status":    {"ipsec status"},

	"limits":             {"limits --near"},
	"lun delete":         {"lun delete store 1", "lun delete store 1 --drain 1m"},
	"lun list":           {"lun list", "lun list store -o wide", "lun list --sort-by -counters.reads --watch"},
	"lun recover":        {"lun recover store 0"},
	"lun reset-settings": {"lun reset-settings store 0"},
	"lun snapshot list":  {"lun snapshot list", "lun snapshot list store -o wide"},
	"lun show":           {"lun show store 0", "lun show store 0 -o jsonpath='$.space'"},

	"portal create":     {"portal create 192.0.2.10", "portal create '[2001:db8::10]:3260' --dry-run"},
	"portal delete":     {"portal delete 192.0.2.10:3260 --drain 30s"},
	"portal list":       {"portal list"},
	"portal show":       {"portal show 192.0.2.10:3260"},
	"reservation clear": {"reservation clear store 0 --disrupt"},
	"reservation list":  {"reservation list"},
	"secret generate":   {"secret generate", "secret generate --file /etc/iser-target/host1.secret"},
	"session kill":      {"session kill 3 --reason 'host1 is replaced'"},
	"session list":      {"session list", "session list -o wide --watch"},
	"session show":      {"session show 3"},

	"state check":  {"state check", "state check /var/lib/iser-target"},
	"state repair": {"state repair /var/lib/iser-target", "state repair --discard reservations.json"},

	"target create": {"target create iqn.2026-11.io.example:store --initiator 'iqn.1993-08.org.debian:*'",
		"target create iqn.2026-11.io.example:lab --alias lab --initiator '*' --network 10.0.0.0/24"},
	"target delete": {"target delete iqn.2026-11.io.example:store --dry-run", "target delete iqn.2026-11.io.example:store --drain 30s"},
	"target list":   {"target list", "target list -o name"},
	"target show":   {"target show store"},
	"top":           {"top", "top --interval 5s --sort p99", "top --count 1 -o json"},
	"version":       {"version"},
}

// AddExamples gives root, and each command below it, its examples. Commands of cobra are there only at the first execution, unless the caller
// creates them before.
func AddExamples(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	addExamples(root, root.Name())
}

func addExamples(c *cobra.Command, program string) {
	if lines := examples[strings.TrimSpace(strings.TrimPrefix(c.CommandPath(), program))]; lines != nil && c.Example == "" {
		c.Example = "  " + program + " " + strings.Join(lines, "\n  "+program+" ")
	}
	for _, sub := range c.Commands() {
		addExamples(sub, program)
	}
}
