package identity

import (
	"bytes"
	"crypto/rand"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/iop-fabric/iop/wire/iopv1"
)

// NonceSize is the length of a register request's nonce.
const NonceSize = 32

// Labels of the two transcripts. They are versions too: what is signed changes
// only under a new one.
const (
	labelRegister = "iop register v1"
	labelConfig   = "iop config v1"
)

// NewNonce returns the fresh nonce of one registration.
func NewNonce() []byte {
	b := make([]byte, NonceSize)
	rand.Read(b) // never fails
	return b
}

// registerParts is what both signatures of a registration cover. Features come
// last: the transcript counts its parts, so none can be added or merged.
func registerParts(r *iopv1.RegisterRequest) [][]byte {
	parts := [][]byte{
		[]byte(r.GetNodeId()),
		r.GetSessionToken(),
		r.GetNonce(),
		[]byte(r.GetRecipientKey()),
		[]byte(r.GetInstanceId()),
		binary.BigEndian.AppendUint32(nil, r.GetProtocolMin()),
		binary.BigEndian.AppendUint32(nil, r.GetProtocolMax()),
		[]byte(r.GetSoftware()),
	}
	for _, f := range r.GetFeatures() {
		parts = append(parts, []byte(f))
	}
	return parts
}

// SignRegister fills in the certificate chain and both signatures. Everything
// else must stand in r already and may not change after.
func SignRegister(cert *Certificate, nkey *NKey, r *iopv1.RegisterRequest) error {
	if err := nkey.want(kindUser); err != nil {
		return fmt.Errorf("sign register: %w", err)
	}
	if len(r.GetNonce()) != NonceSize {
		return fmt.Errorf("sign register: nonce of %d bytes, want %d", len(r.GetNonce()), NonceSize)
	}
	if err := CheckPublicCurveKey(r.GetRecipientKey()); err != nil {
		return fmt.Errorf("sign register: recipient key: %w", err)
	}
	parts := registerParts(r)
	byCert, err := cert.Sign(labelRegister, parts...)
	if err != nil {
		return fmt.Errorf("sign register: %w", err)
	}
	byNKey, err := nkey.SignLabelled(labelRegister, parts...)
	if err != nil {
		return fmt.Errorf("sign register: %w", err)
	}
	r.CertificateChain, r.CertificateSignature, r.NkeySignature = cert.Chain, byCert, byNKey
	return nil
}

// VerifyRegister checks, offline, that r was made by the workload node of edge,
// for the session of generation gen, all three known from the transport (F8).
// issuerPublic is a pinned issuer. An error says which proof failed and holds
// nothing secret: it may be told to the peer.
func VerifyRegister(pool *x509.CertPool, issuerPublic string, edge, node string, gen uint64, r *iopv1.RegisterRequest) error {
	if r.GetNodeId() != node {
		return errors.New("register: node id is not the session's")
	}
	if n := len(r.GetNonce()); n != NonceSize {
		return fmt.Errorf("register: nonce of %d bytes, want %d", n, NonceSize)
	}
	if err := CheckPublicCurveKey(r.GetRecipientKey()); err != nil {
		return fmt.Errorf("register: recipient key: %w", err)
	}
	claims, err := VerifyToken(issuerPublic, r.GetSessionToken())
	if err != nil {
		return fmt.Errorf("register: %w", err)
	}
	switch {
	case claims.Edge != edge:
		return errors.New("register: session token of another edge")
	case claims.Node != node:
		return errors.New("register: session token of another node")
	case claims.Gen != gen:
		return errors.New("register: session token of another generation")
	}
	id, leaf, err := VerifyChain(pool, r.GetCertificateChain(), RoleNode, false)
	switch {
	case err != nil:
		return fmt.Errorf("register: %w", err)
	case id.Edge != edge:
		return errors.New("register: certificate of another edge")
	case id.Name != node:
		return errors.New("register: certificate of another node")
	}
	parts := registerParts(r)
	if err := VerifySignature(leaf, r.GetCertificateSignature(), labelRegister, parts...); err != nil {
		return fmt.Errorf("register: %w", err)
	}
	if err := VerifyNKey(claims.NKey, r.GetNkeySignature(), labelRegister, parts...); err != nil {
		return fmt.Errorf("register: %w", err)
	}
	return nil
}

// SignConfig signs a serialized NodeConfigPayload for the session that began
// with nonce. revision rises strictly within a session.
func SignConfig(cert *Certificate, payload, nonce []byte, revision uint64) (*iopv1.SignedConfig, error) {
	if len(nonce) != NonceSize {
		return nil, fmt.Errorf("sign config: nonce of %d bytes, want %d", len(nonce), NonceSize)
	}
	sig, err := cert.Sign(labelConfig, configParts(payload, nonce, revision)...)
	if err != nil {
		return nil, fmt.Errorf("sign config: %w", err)
	}
	return &iopv1.SignedConfig{Payload: payload, Nonce: nonce, Revision: revision, CertificateChain: cert.Chain, Signature: sig}, nil
}

func configParts(payload, nonce []byte, revision uint64) [][]byte {
	return [][]byte{payload, nonce, binary.BigEndian.AppendUint64(nil, revision)}
}

// VerifyConfig checks that c is a configuration by the Edge named edge for the
// session that began with nonce, and newer than revision after (L8).
func VerifyConfig(pool *x509.CertPool, edge string, nonce []byte, after uint64, c *iopv1.SignedConfig) error {
	if len(nonce) != NonceSize || !bytes.Equal(c.GetNonce(), nonce) {
		return errors.New("config: its nonce is not this session's")
	}
	if c.GetRevision() <= after {
		return fmt.Errorf("config: revision %d is not above %d", c.GetRevision(), after)
	}
	id, leaf, err := VerifyChain(pool, c.GetCertificateChain(), RoleEdge, false)
	switch {
	case err != nil:
		return fmt.Errorf("config: %w", err)
	case id.Edge != edge:
		return errors.New("config: certificate of another edge")
	}
	parts := configParts(c.GetPayload(), c.GetNonce(), c.GetRevision())
	if err := VerifySignature(leaf, c.GetSignature(), labelConfig, parts...); err != nil {
		return fmt.Errorf("config: %w", err)
	}
	return nil
}
