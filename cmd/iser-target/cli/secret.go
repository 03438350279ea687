package cli

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
)

// Sizes of secrets, in random bytes. Each is two characters of a secret. Fewer than 96 bits require IPsec
// (RFC 7143, section 9.2.1).
const (
	secretBytes    = 16
	minSecretBytes = 12
	maxSecretBytes = 64
)

// secret returns the commands about secrets. They need no target.
func secret() *cobra.Command {
	var (
		file string
		n    int
	)
	generate := &cobra.Command{
		Use: "generate [--file FILE]", Short: "Make a random CHAP secret", Args: cobra.NoArgs,
		Long: "Make a random CHAP secret: 32 hexadecimal digits, worth 128 bits, which every initiator\n" +
			"takes as text. With --file, write it to a new file of mode 0600 for secret_file.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if n < minSecretBytes || n > maxSecretBytes {
				return usage(cmd, "--bytes must be %d to %d, not %d", minSecretBytes, maxSecretBytes, n)
			}
			return makeSecret(cmd.OutOrStdout(), file, n)
		},
	}
	f := generate.Flags()
	f.StringVar(&file, "file", "", "new file to write the secret to; it is not printed then")
	f.IntVar(&n, "bytes", secretBytes, "random bytes, each of two digits")
	generate.MarkFlagFilename("file")
	return group("secret", "Make CHAP secrets", generate)
}

// makeSecret writes a secret of n random bytes to a new file, or to w if path is empty.
func makeSecret(w io.Writer, path string, n int) error {
	b := make([]byte, n)
	rand.Read(b) // never fails
	line := hex.EncodeToString(b) + "\n"
	if path == "" {
		_, err := io.WriteString(w, line)
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("%w. No secret was written", err)
	}
	_, err = f.WriteString(line)
	if err == nil {
		err = f.Sync()
	}
	if err2 := f.Close(); err == nil {
		err = err2
	}
	if err != nil {
		os.Remove(path) // a part of a secret
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}
