package broker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/iop-fabric/iop/internal/identity"
)

// Root is one that this broker trusts.
type Root struct {
	ID      string // see identity.RootOf
	Expires time.Time
	Signs   bool // certificates are signed by it now
}

// Shown is of which root the certificate was that a member came with last.
type Shown struct {
	Edge, Role, Name string
	Root             string // empty: it never came, and did not join
	Issuer           string // that a leaf has pinned; empty: it is none, or has not said so
}

// Keys is what an operator asks who exchanges the CA, or the issuer.
type Keys struct {
	Roots   []Root
	Members []Shown // without those that are revoked
	// Issuer signs session tokens, Pinned is the server's for callouts until it is
	// restarted.
	Issuer, Pinned string
}

// Keys tells which roots there are and who shows a certificate of which.
func (a *authority) Keys(ctx context.Context) (k Keys, err error) {
	if !a.isReady() {
		return k, ErrNotReady
	}
	roots := a.certs.Load().roots
	signer := roots.Signer()
	for _, c := range roots.Roots() {
		k.Roots = append(k.Roots, Root{
			ID: identity.RootOf(c), Expires: c.NotAfter,
			Signs: !roots.Exchanging() || (signer != nil && c.Equal(signer)),
		})
	}
	k.Issuer, k.Pinned = a.issuer.Load().Public(), a.keys.issuer.Public()
	keys, err := listKeys(ctx, a.members.kv, ">")
	if err != nil {
		return k, err
	}
	for _, key := range keys {
		id, ok := parseMemberKey(key)
		if !ok {
			continue
		}
		m, found, err := a.members.Get(ctx, id)
		switch {
		case err != nil:
			return k, err
		case !found || m.Revoked:
			continue
		}
		shown := Shown{Edge: id.Edge, Role: string(id.Role), Name: id.Name, Root: m.Root}
		if id.Role == identity.RoleNode {
			_, a, err := generations{kv: *a.stores.generations}.Newest(ctx, id.Edge, id.Name)
			if err != nil && !errors.Is(err, jetstream.ErrKeyNotFound) {
				return k, fmt.Errorf("broker: %w", err)
			}
			shown.Root = cmp.Or(a.Root, m.Root)
		}
		if pin, ok := a.pins.Load(id); ok {
			shown.Issuer = pin.(string) //nolint:forcetypeassert // leafBeat stores nothing else
		}
		k.Members = append(k.Members, shown)
	}
	return k, nil
}

// reseed applies the configured members as they are now.
func (a *authority) reseed() error {
	if a.again == nil || !a.isReady() {
		return nil
	}
	list, err := a.again()
	if err != nil {
		return fmt.Errorf("broker: members: %w", err)
	}
	seeds, err := seeds(list)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), operationBound)
	defer cancel()
	for _, s := range seeds {
		if err := a.members.Seed(ctx, s); err != nil {
			return fmt.Errorf("broker: members: %w", err)
		}
	}
	return nil
}
