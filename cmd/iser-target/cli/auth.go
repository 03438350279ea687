package cli

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// auth returns the commands about CHAP users.
func (p *program) auth() *cobra.Command {
	list := list(p, verb{names: targetOptional, use: "list [TARGET]", short: "List the CHAP users of a target, without secrets", args: cobra.ExactArgs(1), complete: p.complete(targets)},
		func(ctx context.Context, c *call) ([]schema.UserState, error) { return c.Users(ctx, c.args[0]) },
		"USER* INITIATOR SECRET SESSIONS OUTDATED", func(u *schema.UserState) []any {
			where := "configuration"
			if u.SecretFile != "" {
				where = u.SecretFile
			}
			if u.Previous {
				where += ", and a previous one"
			}
			return []any{u.Name, u.Initiator, where, u.Sessions, u.Outdated}
		})
	remove := p.change(verb{names: targetOptional, use: "delete [TARGET] USER", short: "Delete a CHAP user", args: cobra.ExactArgs(2), complete: p.complete(targets, users)},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, error) {
			return c.RemoveUser(ctx, c.args[0], c.args[1], o)
		})
	return group("auth", "Manage authentication", group("user", "Manage the CHAP users of a target", list, p.addUser(), remove, p.rotateUser()))
}

// users completes the names of the CHAP users of a target.
func users(ctx context.Context, c *client.Client, args []string) []string {
	target, _ := findTarget(ctx, c, args[0])
	found, _ := c.Users(ctx, target)
	return texts(found, func(u schema.UserState) string { return u.Name })
}

// newSecret describes what addUser and rotateUser do without --secret-file.
const newSecret = "Without --secret-file, the command makes a random secret and prints it once, on\nstandard error. It is in the configuration of the target then."

// secretOf returns the body of a request for user, with a new secret unless file is set. made is that secret.
func (c *call) secretOf(user, file string) (u schema.User, made string, err error) {
	u.Name = user
	if file != "" {
		if u.SecretFile, err = c.absolute(file); err == nil {
			u.SecretFile = filepath.Clean(u.SecretFile)
		}
		return u, "", err
	}
	b := make([]byte, secretBytes)
	rand.Read(b) // never fails
	u.Secret = hex.EncodeToString(b)
	return u, u.Secret, nil
}

// printSecret prints a secret that was made, unless the change was only planned. It goes to standard error, because the
// plan on standard output may be kept.
func (c *call) printSecret(user, made string, dry bool) error {
	if made == "" || dry {
		return nil
	}
	_, err := fmt.Fprintf(c.cmd.ErrOrStderr(), "secret of %s: %s\n", printable(user), made)
	return err
}

func (p *program) addUser() *cobra.Command {
	var file, initiator string
	cmd := p.changeThen(verb{names: targetOptional, use: "create [TARGET] USER", short: "Create a CHAP user", args: cobra.ExactArgs(2), complete: p.complete(targets),
		long: "Add a CHAP user to a target. " + newSecret + "\nA target that says nothing about authentication requires CHAP from then on."},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, func() error, error) {
			u, made, err := c.secretOf(c.args[1], file)
			if err != nil {
				return nil, nil, err
			}
			u.Initiator = initiator
			plan, err := c.AddUser(ctx, c.args[0], u, o)
			return plan, func() error { return c.printSecret(u.Name, made, o.DryRun) }, err
		})
	f := cmd.Flags()
	f.StringVar(&file, "secret-file", "", "file with the secret, on the machine of the target")
	f.StringVar(&initiator, "initiator", "", "pattern of the initiators that may be this user (default: all)")
	return cmd
}

func (p *program) rotateUser() *cobra.Command {
	var (
		file string
		end  bool
	)
	cmd := p.changeThen(verb{names: targetOptional, use: "rotate [TARGET] USER", short: "Give a CHAP user another secret, next to the present one", args: cobra.ExactArgs(2), complete: p.complete(targets, users),
		long: "Give a CHAP user another secret. The present one stays valid until rotate --end, so that hosts\nchange one after the other. auth user list counts the sessions that have used it.\n" + newSecret},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, func() error, error) {
			if end {
				if file != "" {
					return nil, nil, usage(c.cmd, "--end and --secret-file exclude each other")
				}
				plan, err := c.EndRotation(ctx, c.args[0], c.args[1], o)
				return plan, nil, err
			}
			u, made, err := c.secretOf(c.args[1], file)
			if err != nil {
				return nil, nil, err
			}
			plan, err := c.RotateUser(ctx, c.args[0], u, o)
			return plan, func() error { return c.printSecret(u.Name, made, o.DryRun) }, err
		})
	f := cmd.Flags()
	f.StringVar(&file, "secret-file", "", "file with the new secret, on the machine of the target")
	f.BoolVar(&end, "end", false, "remove the previous secret, and keep the new one")
	return cmd
}
