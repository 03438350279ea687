package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// A Version is an earlier text of a configuration file, as FILE.history keeps it.
type Version struct {
	Number int // from 1; a later version has a higher one
	Path   string
	Time   time.Time // when the text was written
	Size   int64     // bytes
}

// History returns the versions of the file at path, the oldest first. A file that was never replaced has none.
func History(path string) ([]Version, error) {
	dir, err := historyOf(path)
	if err != nil {
		return nil, err
	}
	numbers, err := versions(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var list []Version
	for _, n := range numbers {
		v := Version{Number: n, Path: versionPath(dir, n)}
		fi, err := os.Stat(v.Path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // a change has just removed the oldest one
		}
		if err != nil {
			return nil, err
		}
		v.Time, v.Size = fi.ModTime(), fi.Size()
		list = append(list, v)
	}
	return list, err
}

// ReadVersion returns the text of version number of the file at path.
func ReadVersion(path string, number int) ([]byte, error) {
	dir, err := historyOf(path)
	if err != nil {
		return nil, err
	}
	b, err := ReadFile(versionPath(dir, number))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("version %d of %s: not found: see iser-target config history: %w", number, path, fs.ErrNotExist)
	}
	return b, err
}

// historyOf returns the directory of the versions of the file at path, which may be a symbolic link.
func historyOf(path string) (string, error) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", err
	}
	return real + ".history", nil
}
