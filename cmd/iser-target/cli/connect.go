package cli

import (
	"context"
	_ "embed"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/template"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

//go:embed connect/connect.tmpl
var connectText string

var connectTemplate = template.Must(template.New("connect").Funcs(template.FuncMap{
	"sh": quoteFor(`'\''`), // POSIX, 2.2.2
	"ps": quoteFor(`''`),   // PowerShell, about_Quoting_Rules
}).Parse(connectText))

var needsNoQuotes = regexp.MustCompile(`^[A-Za-z0-9._:/@-]+$`)

// quoteFor returns a function that makes one word of a text, for a shell that takes a quote mark inside quotes as mark.
func quoteFor(mark string) func(string) string {
	return func(s string) string {
		if needsNoQuotes.MatchString(s) {
			return s
		}
		return "'" + strings.ReplaceAll(s, "'", mark) + "'"
	}
}

// platforms are the values of --for.
var platforms = []string{"linux", "linux-iser", "windows", "esxi", "proxmox", "k8s", "k8s-iser"}

// noAddress stands for an address of the target that the command does not know.
const noAddress = "TARGET_ADDRESS"

// A connection has what the commands for an initiator say.
type connection struct {
	Target, Short string // name, and the end of it
	Host, Port    string
	Address       string // Host with brackets, if it is an IPv6 address, and Port
	ISER          bool
	NameRule      string // about names of initiators
	Notes         []string
	LUNs          []connectLUN

	CHAP         bool
	User, Mutual string
	Algorithms   string // as open-iscsi calls them; empty: all
	SecretFrom   string
}

// A connectLUN is a LUN of a Kubernetes volume.
type connectLUN struct {
	LUN      int
	Size     string // bytes
	ReadOnly bool
}

func (p *program) connect() *cobra.Command {
	var platform, portal string
	cmd := p.command(verb{names: targetOptional, use: "connect [TARGET] [--for PLATFORM] [--portal ADDRESS]", short: "Print the commands that connect an initiator", args: cobra.ExactArgs(1), complete: p.complete(targets),
		long: `Print the commands that connect an initiator to a target: ` + strings.Join(platforms, ", ") + `.
They never contain a secret. Everything else in the output is a comment.`,
		example: `  iser-target connect store
  iser-target connect store --for linux-iser --portal 192.0.2.10 | ssh root@initiator bash -e
  iser-target connect store --for k8s | kubectl apply -f -`,
		run: func(ctx context.Context, c *call) error {
			if !slices.Contains(platforms, platform) {
				return usage(c.cmd, "--for must be one of %s, not %q", strings.Join(platforms, ", "), platform)
			}
			t, err := c.Target(ctx, c.args[0])
			if err != nil {
				return err
			}
			if t.Redirect != "" {
				return &schema.Error{Code: schema.Refused, Message: fmt.Sprintf("target %s redirects initiators to %s", t.Name, t.Redirect), Hint: "use the commands of that target"}
			}
			conn := &connection{Target: t.Name, Short: shortName(t.Name), ISER: strings.HasSuffix(platform, "-iser"), NameRule: "The target admits an initiator with any name."}
			if !slices.Contains(t.Initiators, "*") {
				conn.NameRule = "The name of the initiator must match " + strings.Join(t.Initiators, " or ") + "."
			}
			if err := c.fillAddress(ctx, conn, &t, portal, p.address); err != nil {
				return err
			}
			if err := c.fillAuth(ctx, conn, &t, platform); err != nil {
				return err
			}
			if len(t.Networks) > 0 {
				conn.Notes = append(conn.Notes, "The target admits the addresses "+strings.Join(t.Networks, ", ")+".")
			}
			for _, l := range t.LUNs {
				conn.LUNs = append(conn.LUNs, connectLUN{l.ID, strconv.FormatInt(l.Size, 10), l.ReadOnly})
			}
			name, _, _ := strings.Cut(platform, "-")
			var b strings.Builder
			if err := connectTemplate.ExecuteTemplate(&b, name, conn); err != nil {
				return err
			}
			_, err = fmt.Fprint(c.cmd.OutOrStdout(), shownLines(b.String()))
			return err
		}})
	f := cmd.Flags()
	f.StringVar(&platform, "for", platforms[0], "initiator: "+strings.Join(platforms, ", "))
	f.StringVar(&portal, "portal", "", "address of the target that the initiator can reach, with :PORT unless it is 3260 (default: that of a portal)")
	cmd.RegisterFlagCompletionFunc("for", cobra.FixedCompletions(platforms, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// shownLines returns text, in which a server may have control characters, for a terminal.
func shownLines(text string) string {
	lines := strings.Split(text, "\n")
	for i, l := range lines {
		lines[i] = shown(l)
	}
	return strings.Join(lines, "\n")
}

var notInLabels = regexp.MustCompile(`[^a-z0-9]+`)

// shortName returns the end of the name of a target, as a label of DNS (RFC 1123).
func shortName(name string) string {
	s := strings.Trim(notInLabels.ReplaceAllString(name[strings.LastIndexByte(name, ':')+1:], "-"), "-")
	if s == "" || len(s) > 40 {
		return "iscsi"
	}
	return s
}

// fillAddress sets the address of a portal that serves t over the transport. The configuration may only say that the portal
// listens on all addresses: then it is one of this machine, or, of a target elsewhere, the one of its control API.
func (c *call) fillAddress(ctx context.Context, conn *connection, t *schema.TargetState, portal, control string) error {
	list, err := c.Portals(ctx)
	if err != nil {
		return err
	}
	transport := "tcp"
	if conn.ISER {
		transport = "iser"
	}
	list = slices.DeleteFunc(list, func(p schema.PortalState) bool {
		return !slices.Contains(t.PortalGroups, p.TPGT) || !slices.Contains(p.Transports, transport)
	})
	if len(list) == 0 {
		return &schema.Error{Code: schema.Refused, Message: fmt.Sprintf("no portal serves %s over %s", t.Name, transport), Hint: "see iser-target portal list, and add one"}
	}
	if portal != "" {
		portal = WithPort(portal)
		if _, _, err := net.SplitHostPort(portal); err != nil {
			portal = net.JoinHostPort(portal, strconv.Itoa(iscsiPort))
		}
		conn.Host, conn.Port, err = net.SplitHostPort(portal)
		if port, wrong := strconv.ParseUint(conn.Port, 10, 16); err != nil || wrong != nil || port == 0 || !isHost.MatchString(conn.Host) {
			return usage(c.cmd, "--portal must be an address or a name of DNS, with :PORT unless it is %d, not %q", iscsiPort, portal)
		}
		conn.Address = portal
		return nil
	}
	best := list[0]
	for _, p := range list {
		if host, _, _ := net.SplitHostPort(p.Address); !config.Loopback(host) {
			best = p
			break
		}
	}
	address := best.Address
	if len(best.Advertise) > 0 {
		address = best.Advertise[0]
	}
	if conn.Host, conn.Port, err = net.SplitHostPort(address); err != nil {
		return err
	}
	if ip, err := netip.ParseAddr(conn.Host); err == nil && ip.IsUnspecified() {
		conn.Host = c.reachable(ip, control)
		if conn.Host == noAddress {
			conn.Notes = append(conn.Notes, "Replace "+noAddress+" by an address of the target, or give --portal.")
		}
	}
	if config.Loopback(conn.Host) {
		conn.Notes = append(conn.Notes, "Only this machine reaches "+conn.Host+". Let a portal listen on another address for other machines.")
	}
	if best.IPsec == "required" || t.IPsec == "required" {
		conn.Notes = append(conn.Notes, "The target requires IPsec. Set it up first, as docs/ipsec.md describes.")
	}
	conn.Address = net.JoinHostPort(conn.Host, conn.Port)
	return nil
}

// isHost matches IP addresses and names of DNS.
var isHost = regexp.MustCompile(`^[A-Za-z0-9.:-]+$`)

// reachable returns an address of the machine of the target, whose portal listens on all addresses of a family.
func (c *call) reachable(all netip.Addr, control string) string {
	if c.Remote() {
		if host, _, err := net.SplitHostPort(strings.TrimPrefix(control, "rdma://")); err == nil {
			return host
		}
		return noAddress
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return noAddress
	}
	var six string
	for _, a := range addrs {
		prefix, err := netip.ParsePrefix(a.String())
		switch ip := prefix.Addr(); {
		case err != nil || !ip.IsGlobalUnicast():
		case ip.Is4():
			return ip.String() // a socket for all addresses of IPv6 accepts IPv4
		case six == "" && all.Is6():
			six = ip.String()
		}
	}
	if six != "" {
		return six
	}
	return noAddress
}

// fillAuth sets what CHAP requires.
func (c *call) fillAuth(ctx context.Context, conn *connection, t *schema.TargetState, platform string) error {
	if t.Auth != "chap" {
		return nil
	}
	users, err := c.Users(ctx, t.Name)
	if err != nil {
		return err
	}
	conn.CHAP, conn.User, conn.Mutual = true, "USER", t.Mutual
	conn.SecretFrom = "CHAP: the target has several users. Replace USER by yours."
	if len(users) == 1 {
		conn.User, conn.SecretFrom = users[0].Name, "CHAP: the secret is in the configuration of the target."
		if f := users[0].SecretFile; f != "" {
			conn.SecretFrom = "CHAP: the secret is in " + f + ", on the machine of the target."
		}
	}
	conn.Algorithms = strings.ToUpper(strings.Join(t.Algorithms, ","))
	if len(t.Algorithms) > 0 && !slices.Contains(t.Algorithms, "md5") && !strings.HasPrefix(platform, "linux") && platform != "proxmox" {
		conn.Notes = append(conn.Notes, "The target does not accept MD5 for CHAP ("+strings.Join(t.Algorithms, ", ")+"). Check that the initiator knows one of these.")
	}
	return nil
}
