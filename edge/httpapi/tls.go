package httpapi

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/iop-fabric/iop/configs"
)

// recheck is how often the files of a certificate are looked at, at most.
const recheck = time.Second

// certificate is that of the callers' listener. Its files are read again when they
// have changed (E11); what cannot be read changes nothing.
type certificate struct {
	files configs.KeyPair
	log   *slog.Logger
	now   func() time.Time

	mu      sync.Mutex
	served  *tls.Certificate
	read    [2]stamp // of the files, when they were last read
	checked time.Time
}

// stamp tells one content of a file from another.
type stamp struct {
	size     int64
	modified time.Time
}

// openCertificate reads a certificate and its key.
func openCertificate(files configs.KeyPair) (*certificate, error) {
	c := &certificate{files: files, log: slog.New(slog.DiscardHandler), now: time.Now}
	if err := c.load(c.stamps()); err != nil {
		return nil, fmt.Errorf("edge.tls: %w", err)
	}
	return c, nil
}

func (c *certificate) stamps() (s [2]stamp) {
	for i, name := range []string{c.files.Certificate, c.files.Key} {
		if info, err := os.Stat(name); err == nil {
			s[i] = stamp{info.Size(), info.ModTime()}
		}
	}
	return s
}

func (c *certificate) load(as [2]stamp) error {
	c.read = as // of a pair that is no good, too: it is told once
	pair, err := tls.LoadX509KeyPair(c.files.Certificate, c.files.Key)
	if err != nil {
		return err
	}
	c.served = &pair
	return nil
}

// get returns what to serve. It runs in each handshake.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	if now.Sub(c.checked) < recheck {
		return c.served, nil
	}
	c.checked = now
	s := c.stamps()
	if s == c.read {
		return c.served, nil
	}
	if err := c.load(s); err != nil {
		c.log.LogAttrs(context.Background(), slog.LevelWarn, EventCertificateFailed, slog.String("error", err.Error()))
	} else {
		c.log.LogAttrs(context.Background(), slog.LevelInfo, EventCertificate, slog.Time("expires", c.served.Leaf.NotAfter))
	}
	return c.served, nil
}

// tlsConfig is nil where callers come in clear text.
func (a *API) tlsConfig() *tls.Config {
	if a.cfg.certificate == nil {
		return nil
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: a.cfg.certificate.get}
}
