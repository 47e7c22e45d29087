package adminapi

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// maxAnswer bounds what a client reads.
const maxAnswer = 64 << 20

// Client asks the admin API of one Edge.
type Client struct {
	// URL is the admin listener's, such as http://127.0.0.1:8401.
	URL   string
	Token string
}

// Snapshot asks for everything.
func (c Client) Snapshot(ctx context.Context) (Snapshot, error) {
	var s Snapshot
	return s, c.get(ctx, "/api/v1/snapshot", &s)
}

func (c Client) get(ctx context.Context, path string, into any) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimRight(c.URL, "/")+path, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+c.Token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("the Edge's admin listener does not answer: %w", err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return fmt.Errorf("%s%s: %w", c.URL, path, err)
	}
	if resp.StatusCode != http.StatusOK {
		var e Error
		if json.Unmarshal(b, &e) == nil && e.Error.Message != "" {
			return fmt.Errorf("%s: %s", c.URL, e.Error.Message)
		}
		return fmt.Errorf("%s%s answers %s: is it an Edge's admin listener?", c.URL, path, resp.Status)
	}
	if err := json.Unmarshal(b, into); err != nil {
		return fmt.Errorf("%s%s: the answer is not what an Edge gives: %w", c.URL, path, err)
	}
	return nil
}
