package adminapi

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
)

const (
	// maxAnswer bounds what a client reads, and maxBackup a backup.
	maxAnswer = 64 << 20
	maxBackup = 512 << 20

	answerBound = 10 * time.Second
	backupBound = 6 * time.Minute
)

// Client asks the admin API of one Edge.
type Client struct {
	// URL is the admin listener's, such as http://127.0.0.1:8401.
	URL   string
	Token string
}

// Snapshot asks for everything.
func (c Client) Snapshot(ctx context.Context) (Snapshot, error) {
	const path = "/api/v1/snapshot"
	var s Snapshot
	err := c.get(ctx, path, &s)
	if err == nil && (s.Edge == "" || s.Time.IsZero()) { // any JSON object would do as one
		err = fmt.Errorf("%s%s: the answer is not what iop gives: it names no edge, or no time", c.URL, path)
	}
	return s, err
}

// Invite lets a machine join under a name.
func (c Client) Invite(ctx context.Context, in Invite) (Invited, error) {
	var out Invited
	return out, c.do(ctx, http.MethodPost, "/api/v1/invitations", in, &out)
}

// Invitations lists those there are.
func (c Client) Invitations(ctx context.Context) ([]Invitation, error) {
	var out struct {
		Invitations []Invitation `json:"invitations"`
	}
	return out.Invitations, c.do(ctx, http.MethodGet, "/api/v1/invitations", nil, &out)
}

// CancelInvitation withdraws one.
func (c Client) CancelInvitation(ctx context.Context, name string) error {
	return c.do(ctx, http.MethodDelete, "/api/v1/invitations/"+url.PathEscape(name), nil, nil)
}

// Revoke refuses a member from now on, and closes what it has open.
func (c Client) Revoke(ctx context.Context, role, name string) error {
	return c.do(ctx, http.MethodPost, "/api/v1/members/"+url.PathEscape(role)+"/"+url.PathEscape(name)+"/revoke", struct{}{}, nil)
}

// Keys asks who shows a certificate of which CA.
func (c Client) Keys(ctx context.Context) (Keys, error) {
	var out Keys
	return out, c.get(ctx, "/api/v1/keys", &out)
}

// Exchange takes a step of an exchange of an iop up's own keys.
func (c Client) Exchange(ctx context.Context, what, step string, in Step) (Stepped, error) {
	var out Stepped
	return out, c.do(ctx, http.MethodPost, "/api/v1/keys/"+url.PathEscape(what)+"/"+url.PathEscape(step), in, &out)
}

// Backup asks for what the authority knows, as the file it is kept in.
func (c Client) Backup(ctx context.Context) ([]byte, error) {
	return c.ask(ctx, http.MethodGet, "/api/v1/backup", nil, backupBound, maxBackup)
}

func (c Client) get(ctx context.Context, path string, into any) error {
	return c.do(ctx, http.MethodGet, path, nil, into)
}

// do asks; what is nil is not sent, or not read.
func (c Client) do(ctx context.Context, method, path string, send, into any) error {
	b, err := c.ask(ctx, method, path, send, answerBound, maxAnswer)
	if err != nil || into == nil {
		return err
	}
	if err := json.Unmarshal(b, into); err != nil {
		return fmt.Errorf("%s%s: the answer is not what iop gives: %w", c.URL, path, err)
	}
	return nil
}

func (c Client) ask(ctx context.Context, method, path string, send any, bound time.Duration, most int64) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	var body io.Reader
	if send != nil {
		b, err := json.Marshal(send)
		if err != nil {
			return nil, err
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimRight(c.URL, "/")+path, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+c.Token)
	if send != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("the admin listener does not answer: %w", err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, most))
	if err != nil {
		return nil, fmt.Errorf("%s%s: %w", c.URL, path, err)
	}
	if resp.StatusCode/100 != 2 {
		var e Error
		if json.Unmarshal(b, &e) == nil && e.Error.Message != "" {
			return nil, fmt.Errorf("%s: %s", c.URL, e.Error.Message)
		}
		return nil, fmt.Errorf("%s%s answers %s: is it an admin listener of iop?", c.URL, path, resp.Status)
	}
	return b, nil
}
