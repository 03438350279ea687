package testkit

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
)

// Download gets url, which must answer with status 200, and writes the answer to file.
func Download(ctx context.Context, url, file string) error {
	req, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s", url, resp.Status, b)
	}
	return os.WriteFile(file, b, 0o644)
}
