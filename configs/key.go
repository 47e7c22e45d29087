package configs

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
)

// maxKey bounds a caller's key.
const maxKey = 4 << 10

var errKeySource = errors.New("want exactly one of sha256, file and env")

func (k APIKey) checkSource() error {
	n := 0
	for _, s := range []string{k.SHA256, k.File, k.Env} {
		if s != "" {
			n++
		}
	}
	if n != 1 {
		return errKeySource
	}
	return nil
}

// Digest returns the key's SHA-256. The file or variable is read now, not when
// the configuration is loaded: a key can change and be read again. Its errors
// name the source and tell nothing of the key.
func (k APIKey) Digest() ([sha256.Size]byte, error) {
	digest, err := k.digest()
	if err != nil {
		return digest, fmt.Errorf("key %.128q: %w", k.Name, err)
	}
	return digest, nil
}

func (k APIKey) digest() (digest [sha256.Size]byte, err error) {
	if err := k.checkSource(); err != nil {
		return digest, err
	}
	if k.SHA256 != "" {
		b, err := hex.DecodeString(k.SHA256)
		if err != nil || len(b) != len(digest) {
			return digest, errors.New("sha256: want 64 hex digits")
		}
		return [sha256.Size]byte(b), nil
	}
	key, err := k.read()
	if err != nil {
		return digest, err
	}
	defer clear(key)
	return sha256.Sum256(key), nil
}

// read returns the key of a file or a variable.
func (k APIKey) read() (key []byte, err error) {
	key, source := []byte(os.Getenv(k.Env)), "variable "+k.Env
	if k.File != "" {
		source = "file " + k.File
		if key, err = readKey(k.File); err != nil {
			return nil, err
		}
	}
	key = bytes.TrimRight(key, "\r\n")
	switch {
	case len(key) == 0:
		return nil, fmt.Errorf("%s is empty or not there", source)
	case len(key) > maxKey:
		clear(key)
		return nil, fmt.Errorf("%s is longer than %d bytes", source, maxKey)
	}
	return key, nil
}

// key is the token as any other key, for what reads one.
func (t AdminToken) key() APIKey {
	return APIKey{Name: "admin_token", SHA256: t.SHA256, File: t.File, Env: t.Env}
}

// Set reports whether there is one.
func (t AdminToken) Set() bool { return t != AdminToken{} }

// Digest returns the token's SHA-256, as APIKey.Digest does.
func (t AdminToken) Digest() ([sha256.Size]byte, error) { return t.key().Digest() }

// Read returns the token itself: it must be that of a file or a variable.
func (t AdminToken) Read() (string, error) {
	key, err := t.key().read()
	if err != nil {
		return "", fmt.Errorf("admin_token: %w", err)
	}
	return string(key), nil
}

func readKey(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() // only read
	return io.ReadAll(io.LimitReader(f, maxKey+3))
}

// Value returns the key itself where it is at hand: that of a file or a variable.
func (k APIKey) Value() (string, bool) {
	key, err := k.read()
	return string(key), err == nil
}
