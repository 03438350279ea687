package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// docs returns the hidden command that writes the files which packages install besides the program.
func docs() *cobra.Command {
	return &cobra.Command{
		Use: "docs DIR", Short: "Write man pages and shell completions below a directory", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return writeDocs(cmd.Root(), args[0]) },
	}
}

// writeDocs writes man pages to dir/man, dated by SOURCE_DATE_EPOCH if that is set, and
// completions to dir/completions, under the names that the shells expect.
func writeDocs(root *cobra.Command, dir string) error {
	man, completions := filepath.Join(dir, "man"), filepath.Join(dir, "completions")
	for _, d := range []string{man, completions} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	root.DisableAutoGenTag = true
	header := &doc.GenManHeader{Section: "1", Source: "iser-target", Manual: "iser-target"}
	if err := doc.GenManTree(root, header, man); err != nil {
		return err
	}
	date := time.Now()
	if s := os.Getenv("SOURCE_DATE_EPOCH"); s != "" { // as GenManTree does
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			return fmt.Errorf("SOURCE_DATE_EPOCH: %q is not a number of seconds", s)
		}
		date = time.Unix(n, 0)
	}
	if err := writeManuals(root, man, date); err != nil {
		return err
	}
	for name, write := range map[string]func(path string) error{
		"iser-target.bash": func(path string) error { return root.GenBashCompletionFileV2(path, true) },
		"_iser-target":     root.GenZshCompletionFile,
		"iser-target.fish": func(path string) error { return root.GenFishCompletionFile(path, true) },
	} {
		if err := write(filepath.Join(completions, name)); err != nil {
			return err
		}
	}
	return nil
}
