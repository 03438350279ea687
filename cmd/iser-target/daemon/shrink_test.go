package daemon

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A start after an upgrade finds what the program before it left, and refuses a file
// that no program wrote.
func TestShrinksAreReadInBothForms(t *testing.T) {
	for name, tc := range map[string]struct {
		content string
		want    sizes
		refused string
	}{
		"no file":           {want: sizes{}},
		"present form":      {content: "{\n  \"version\": 1,\n  \"files\": {\n    \"/a\": 512\n  }\n}\n", want: sizes{"/a": 512}},
		"without version":   {content: "{\n  \"/a\": 512,\n  \"/b\": 1024\n}\n", want: sizes{"/a": 512, "/b": 1024}},
		"a later version":   {content: `{"version": 2}`, refused: "has version 2"},
		"no files":          {content: `{"version": 1}`, refused: "the member files"},
		"cut off":           {content: `{"/a": 51`, refused: "damaged"},
		"not a size":        {content: `{"/a": "512"}`, refused: "is damaged: json"},
		"something follows": {content: `{"/a": 512} {}`, refused: "damaged"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, shrinkFile)
			if tc.content != "" {
				if err := os.WriteFile(path, []byte(tc.content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			var s shrinks
			err := s.open(dir)
			defer s.close()
			if tc.refused != "" {
				if err == nil || !strings.Contains(err.Error(), tc.refused) || !strings.Contains(err.Error(), path) {
					t.Errorf("error %v, want one with %q", err, tc.refused)
				}
				return
			}
			if err != nil || !maps.Equal(s.left, tc.want) {
				t.Fatalf("%v, %v, want %v", s.left, err, tc.want)
			}
			if len(tc.want) == 0 {
				return
			}
			if err := s.store(); err != nil {
				t.Fatal(err)
			}
			if b, err := os.ReadFile(path); err != nil || !strings.HasPrefix(string(b), "{\n  \"version\": 1,\n  \"files\": {\n    \"/a\": 512") {
				t.Errorf("stored is %s, %v", b, err)
			}
			s.left = nil
			if err := s.store(); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(path); !os.IsNotExist(err) {
				t.Errorf("with nothing to list, the file exists: %v", err)
			}
		})
	}
}
