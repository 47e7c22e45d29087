package identity

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
)

// maxFile bounds what is read of a key or certificate file; a CA pool of some
// hundred certificates fits.
const maxFile = 1 << 20

const (
	blockCertificate = "CERTIFICATE"
	blockKey         = "PRIVATE KEY"
	blockKeyEC       = "EC PRIVATE KEY"
)

// writeFile replaces path by a file that holds data, or leaves it as it was: a
// crash in between leaves no half key behind (I4).
func writeFile(path string, data []byte, mode os.FileMode) (err error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, ".iop-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.Close()           // the first error is the one to tell
			os.Remove(f.Name()) // it may not exist any more
		}
	}()
	// CreateTemp made it 0600: widening only comes after, never before, the write.
	if _, err = f.Write(data); err != nil {
		return err
	}
	if err = f.Chmod(mode); err != nil && runtime.GOOS != "windows" {
		return err
	}
	if err = f.Sync(); err != nil {
		return err
	}
	if err = f.Close(); err != nil {
		return err
	}
	if err = os.Rename(f.Name(), path); err != nil {
		return err
	}
	return syncDir(dir)
}

// syncDir makes a rename last through a power cut, where folders can be synced.
func syncDir(dir string) error {
	if runtime.GOOS == "windows" {
		return nil
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	return errors.Join(err, d.Close())
}

// readFile reads path whole and refuses an empty or absurdly large file.
func readFile(path string) ([]byte, error) {
	switch info, err := os.Stat(path); {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular(): // a pipe would be waited for
		return nil, errors.New("it is no regular file")
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() // only read
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	switch {
	case err != nil:
		return nil, err
	case len(data) > maxFile:
		return nil, fmt.Errorf("larger than %d bytes: this is no key or certificate", maxFile)
	case len(bytes.TrimSpace(data)) == 0:
		return nil, errors.New("the file is empty")
	}
	return data, nil
}

// readSecret is readFile for a file that nobody else may read.
func readSecret(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	// Windows keeps access lists, not modes; the mode bits there say nothing.
	if perm := info.Mode().Perm(); runtime.GOOS != "windows" && perm&0o077 != 0 {
		return nil, fmt.Errorf("its mode %#o lets others at it: chmod 600 %s", perm, path)
	}
	return readFile(path)
}

// decodeCertificates reads every certificate of a PEM file, and nothing else.
func decodeCertificates(data []byte) ([]*x509.Certificate, error) {
	var certs []*x509.Certificate
	for len(bytes.TrimSpace(data)) > 0 {
		block, rest := pem.Decode(data)
		switch {
		case block == nil && len(certs) == 0:
			return nil, fmt.Errorf("want a PEM file with a %s block; it is not PEM, or cut short", blockCertificate)
		case block == nil:
			return nil, fmt.Errorf("what follows certificate %d is not PEM, or cut short", len(certs))
		case block.Type != blockCertificate:
			return nil, fmt.Errorf("want a PEM block %s, found %.40q", blockCertificate, block.Type)
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("certificate %d: %w", len(certs)+1, err)
		}
		certs, data = append(certs, cert), rest
	}
	return certs, nil
}

// decodeKey reads an ECDSA P-256 key from a PEM file. Its errors tell nothing of
// the key.
func decodeKey(data []byte) (*ecdsa.PrivateKey, error) {
	block, rest := pem.Decode(data)
	switch {
	case block == nil:
		return nil, fmt.Errorf("want a PEM file with a %s block; it is not PEM, or cut short", blockKey)
	case len(bytes.TrimSpace(rest)) > 0:
		return nil, errors.New("something follows the key; want one PEM block alone")
	}
	var key any
	var err error
	switch block.Type {
	case blockKey:
		key, err = x509.ParsePKCS8PrivateKey(block.Bytes)
	case blockKeyEC:
		key, err = x509.ParseECPrivateKey(block.Bytes)
	default:
		return nil, fmt.Errorf("want a PEM block %s, found %.40q", blockKey, block.Type)
	}
	if err != nil {
		return nil, errors.New("the key does not parse; want an ECDSA P-256 key in PKCS #8")
	}
	ec, ok := key.(*ecdsa.PrivateKey)
	if !ok || ec.Curve != elliptic.P256() {
		return nil, errors.New("the key is of another kind; want ECDSA P-256")
	}
	return ec, nil
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: blockKey, Bytes: der}), nil
}

func encodeCertificates(chain [][]byte) []byte {
	var out []byte
	for _, der := range chain {
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: blockCertificate, Bytes: der})...)
	}
	return out
}

// fileError names the file and what was to be read from it.
func fileError(what, path string, err error) error {
	// os errors name the path themselves; saying it twice helps nobody.
	var pe *os.PathError
	if errors.As(err, &pe) {
		err = pe.Err
	}
	return fmt.Errorf("%s %s: %w", what, path, err)
}

// WriteKeyFile writes a secret of another kind (an API key) with the care of a
// key file: whole, mode 0600, or not at all (I4).
func WriteKeyFile(path string, data []byte) error { return writeFile(path, data, 0o600) }

// ReadKeyFile reads one, and refuses what others may read.
func ReadKeyFile(path string) ([]byte, error) {
	b, err := readSecret(path)
	if err != nil {
		return nil, fileError("key file", path, err)
	}
	return b, nil
}
