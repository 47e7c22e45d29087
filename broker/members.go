package broker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
)

// maxNKeys is how many nkeys serve one name at once: the old and the new one of
// a rotation (B8).
const maxNKeys = 2

// member is what the authority knows of one name (B9).
type member struct {
	NKeys   []string `json:"nkeys"` // newest first
	Revoked bool     `json:"revoked,omitempty"`
	// RevokedAt: no invitation from before it is good for the name (B11).
	RevokedAt time.Time `json:"revoked_at,omitzero"`
	// Next is one of NKeys: once it is shown, the others go (B8).
	Next string `json:"next,omitempty"`
	// Root is whose key signed the certificate that was shown last, of an Edge or a
	// leaf; a Node's stands with its generation, and here is that of the one it got when
	// it joined, or that a backup was made with.
	Root string `json:"root,omitempty"`
	// The seed as it was last applied: a restart with the same file changes
	// nothing that was learnt since.
	Seed        []string `json:"seed,omitempty"`
	SeedRevoked bool     `json:"seed_revoked,omitempty"`
	// Forgotten: of the record that was lost only the revocation is known. The next
	// seed is taken for the one there was.
	Forgotten bool `json:"forgotten,omitempty"`
}

func (id memberID) key() string { return id.Edge + "." + string(id.Role) + "." + id.Name }

func parseMemberKey(key string) (memberID, bool) {
	p := strings.Split(key, ".")
	if len(p) != 3 {
		return memberID{}, false
	}
	return memberID{Edge: p[0], Role: identity.Role(p[1]), Name: p[2]}, true
}

func checkMemberID(id memberID) error {
	if err := subjects.CheckName(id.Edge); err != nil {
		return fmt.Errorf("edge: %w", err)
	}
	if err := subjects.CheckName(id.Name); err != nil {
		return err
	}
	switch id.Role {
	case identity.RoleNode, identity.RoleEdge, identity.RoleLeaf:
		return nil
	default:
		return fmt.Errorf("role %q: want node, edge or leaf", id.Role)
	}
}

func checkMember(m configs.Member) (memberID, error) {
	id := memberID{Edge: m.Edge, Role: identity.Role(m.Role), Name: m.Name}
	if err := checkMemberID(id); err != nil {
		return id, fmt.Errorf("broker: member %s: %w", id.key(), err)
	}
	if !nkeys.IsValidPublicUserKey(m.NKey) {
		return id, fmt.Errorf("broker: member %s: nkey is not a public user key (U...)", id.key())
	}
	return id, nil
}

// members is the authority's memory.
type members struct {
	kv        bucket
	witnesses bucket // the generations', see witness
}

func (ms members) read(ctx context.Context, id memberID) (jetstream.KeyValueEntry, error) {
	return patiently(ctx, ms.kv.led, func(ctx context.Context) (jetstream.KeyValueEntry, error) { return ms.kv.Get(ctx, id.key()) })
}

// Get returns what is known of a name.
func (ms members) Get(ctx context.Context, id memberID) (m member, found bool, err error) {
	m, rev, err := ms.GetRevision(ctx, id)
	return m, rev != 0, err
}

// GetRevision is Get with the revision; 0: nothing is known.
func (ms members) GetRevision(ctx context.Context, id memberID) (m member, rev uint64, err error) {
	e, err := ms.read(ctx, id)
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return m, 0, nil
	}
	if err != nil {
		return m, 0, fmt.Errorf("read member: %w", err)
	}
	return m, e.Revision(), json.Unmarshal(e.Value(), &m)
}

// Elsewhere reports whether the same role, name and nkey are registered under
// another edge.
func (ms members) Elsewhere(ctx context.Context, id memberID, nkey string) (bool, error) {
	keys, err := listKeys(ctx, ms.kv, "*."+string(id.Role)+"."+id.Name)
	if err != nil {
		return false, err
	}
	for _, key := range keys {
		other, ok := parseMemberKey(key)
		if !ok || other == id {
			continue
		}
		m, found, err := ms.Get(ctx, other)
		if err != nil {
			return false, err
		}
		if found && slices.Contains(m.NKeys, nkey) {
			return true, nil
		}
	}
	return false, nil
}

// ErrConflict: somebody else wrote the same key, many times over.
var ErrConflict = errors.New("changed by others at the same time; try again")

// change reads a member, lets fn change it and writes it back where nobody else
// did meanwhile. fn returns false for no change.
func (ms members) change(ctx context.Context, id memberID, fn func(m *member, found bool) (bool, error)) error {
	changed := false
	err := change(ctx, ms.kv, id.key(), "member", func(m *member, found bool) (_ bool, err error) {
		changed, err = fn(m, found)
		return changed, err
	})
	if err != nil || !changed {
		return err
	}
	return ms.attest(ctx, id)
}

// change is that for a record of any kind, which what names.
func change[T any](ctx context.Context, kv bucket, key, what string, fn func(v *T, found bool) (bool, error)) error {
	_, err := replace(ctx, kv, key, what, func(was []byte, found bool) (is []byte, changed bool, err error) {
		var v T
		if found {
			if err := json.Unmarshal(was, &v); err != nil {
				return nil, false, fmt.Errorf("%s %s: %w", what, key, err)
			}
		}
		if changed, err = fn(&v, found); err != nil || !changed {
			return nil, false, err
		}
		is, err = json.Marshal(v)
		return is, true, err
	})
	return err
}

// replace reads a key and writes what fn makes of it, again where another was faster. It
// returns the revision written; 0: fn changed nothing.
func replace(ctx context.Context, kv bucket, key, what string, fn func(was []byte, found bool) (is []byte, changed bool, err error)) (uint64, error) {
	for pause := racePause; pause <= racePause<<maxRaces; pause *= 2 {
		e, err := patiently(ctx, kv.led, func(ctx context.Context) (jetstream.KeyValueEntry, error) { return kv.Get(ctx, key) })
		found, was := err == nil, []byte(nil)
		switch {
		case found:
			was = e.Value()
		case !errors.Is(err, jetstream.ErrKeyNotFound):
			return 0, fmt.Errorf("read %s %s: %w", what, key, err)
		}
		value, changed, err := fn(was, found)
		if err != nil || !changed {
			return 0, err
		}
		rev, err := patiently(ctx, kv.led, func(ctx context.Context) (uint64, error) {
			if found {
				return kv.Update(ctx, key, value, e.Revision())
			}
			return kv.Create(ctx, key, value)
		})
		if err == nil {
			return rev, nil
		}
		if !isConflict(err) {
			return 0, fmt.Errorf("write %s %s: %w", what, key, err)
		}
		time.Sleep(pause) // the other's write may not be carried out yet
	}
	return 0, fmt.Errorf("%s %s: %w", what, key, ErrConflict)
}

// Register adds an nkey to a name. The one before it stays good beside it, so
// that a rotation loses nothing; a revoked name begins anew with this nkey alone.
func (ms members) Register(ctx context.Context, in configs.Member) error {
	id, err := checkMember(in)
	if err != nil {
		return err
	}
	return ms.change(ctx, id, func(m *member, _ bool) (bool, error) {
		before := slices.Clone(m.NKeys)
		if m.Revoked {
			m.NKeys = nil
		}
		if !slices.Contains(m.NKeys, in.NKey) {
			m.NKeys = append([]string{in.NKey}, m.NKeys...)
			m.NKeys = m.NKeys[:min(len(m.NKeys), maxNKeys)]
		}
		changed := m.Revoked != in.Revoked || !slices.Equal(before, m.NKeys)
		m.Revoked = in.Revoked
		return changed, nil
	})
}

// Replace registers the nkey that a member wants in the place of the one it has: both
// are good until it shows the new one.
func (ms members) Replace(ctx context.Context, id memberID, old, next string) error {
	return ms.change(ctx, id, func(m *member, found bool) (bool, error) {
		if !found || m.Revoked || !slices.Contains(m.NKeys, old) {
			return false, fmt.Errorf("%s: %w", id.key(), ErrUnknownMember)
		}
		if m.Next == next || len(m.NKeys) == 1 && m.NKeys[0] == next {
			return false, nil
		}
		m.NKeys, m.Next = []string{next, old}, next
		return true, nil
	})
}

// Took is the member's word that it has the new one: the old one is good for nothing
// any more.
func (ms members) Took(ctx context.Context, id memberID, next string) error {
	return ms.change(ctx, id, func(m *member, _ bool) (bool, error) {
		if m.Next != next {
			return false, nil
		}
		m.NKeys, m.Next = []string{next}, ""
		return true, nil
	})
}

// Shown notes of which root the certificate was that an Edge or a leaf came with.
func (ms members) Shown(ctx context.Context, id memberID, root string) error {
	return ms.change(ctx, id, func(m *member, found bool) (bool, error) {
		changed := found && m.Root != root
		m.Root = root
		return changed, nil
	})
}

// ErrUnknownMember: no such name is registered.
var ErrUnknownMember = errors.New("no such member is registered")

// Revoke refuses a name from now on (B8). One that is not there yet, but may be
// in the next moment (expected), is refused then.
func (ms members) Revoke(ctx context.Context, id memberID, now time.Time, expected bool) error {
	return ms.change(ctx, id, func(m *member, found bool) (bool, error) {
		if !found && !expected {
			return false, fmt.Errorf("%s: %w", id.key(), ErrUnknownMember)
		}
		m.Revoked, m.RevokedAt = true, now
		return true, nil
	})
}

// Whoever was invited cannot be let in.
var (
	errTaken   = errors.New("the name is another machine's")
	errRevoked = errors.New("the name was revoked after it was invited")
)

// Enrol makes an nkey the one of a name that was invited at a time. The name is
// new, or was revoked before that.
// root is whose key signs its certificate.
func (ms members) Enrol(ctx context.Context, id memberID, nkey, root string, invited time.Time) error {
	return ms.change(ctx, id, func(m *member, _ bool) (bool, error) {
		if err := m.enrols(nkey, invited); err != nil {
			return false, err
		}
		if !m.Revoked && slices.Contains(m.NKeys, nkey) {
			changed := m.Root != root
			m.Root = root
			return changed, nil
		}
		m.NKeys, m.Next, m.Root, m.Revoked, m.RevokedAt = []string{nkey}, "", root, false, time.Time{}
		return true, nil
	})
}

// enrols says why the nkey cannot have the name; nil: it can.
func (m member) enrols(nkey string, invited time.Time) error {
	switch {
	case m.Revoked && !m.RevokedAt.Before(invited):
		return errRevoked
	case !m.Revoked && len(m.NKeys) > 0 && !slices.Contains(m.NKeys, nkey):
		return errTaken
	}
	return nil
}

// List returns all, one entry for each nkey.
func (ms members) List(ctx context.Context) ([]configs.Member, error) {
	keys, err := listKeys(ctx, ms.kv, ">")
	if err != nil {
		return nil, err
	}
	var out []configs.Member
	for _, key := range keys {
		id, ok := parseMemberKey(key)
		if !ok {
			continue
		}
		m, found, err := ms.Get(ctx, id)
		if err != nil {
			return nil, err
		}
		if !found {
			continue
		}
		for _, nkey := range m.NKeys {
			out = append(out, configs.Member{Edge: id.Edge, Role: string(id.Role), Name: id.Name, NKey: nkey, Revoked: m.Revoked})
		}
	}
	return out, nil
}

// seed is one name of the configuration, with all its nkeys.
type seed struct {
	id      memberID
	nkeys   []string
	revoked bool
}

// seeds groups the configured members by name.
func seeds(list []configs.Member) ([]seed, error) {
	var out []seed
	for _, m := range list {
		id, err := checkMember(m)
		if err != nil {
			return nil, err
		}
		i := slices.IndexFunc(out, func(s seed) bool { return s.id == id })
		if i < 0 {
			out, i = append(out, seed{id: id}), len(out)
		}
		if !slices.Contains(out[i].nkeys, m.NKey) {
			out[i].nkeys = append(out[i].nkeys, m.NKey)
		}
		if len(out[i].nkeys) > maxNKeys {
			return nil, fmt.Errorf("broker: member %s has more than %d nkeys", id.key(), maxNKeys)
		}
		out[i].revoked = out[i].revoked || m.Revoked
	}
	return out, nil
}

// Seed applies a configured name: it adds what is not there, and where the
// configuration itself has changed since it was last applied, it wins.
func (ms members) Seed(ctx context.Context, s seed) error {
	return ms.change(ctx, s.id, func(m *member, found bool) (bool, error) {
		if found && slices.Equal(m.Seed, s.nkeys) && m.SeedRevoked == s.revoked {
			return false, nil
		}
		if !found || !slices.Equal(m.Seed, s.nkeys) {
			m.NKeys, m.Seed = s.nkeys, s.nkeys
		}
		m.Revoked, m.SeedRevoked = s.revoked || (m.Revoked && m.Forgotten), s.revoked
		m.Forgotten = false
		return true, nil
	})
}

// listKeys returns the keys that match, sorted. The stream's leader lists them;
// the library's own way is a consumer, which may be at a server that is gone.
func listKeys(ctx context.Context, kv bucket, filter string) ([]string, error) {
	prefix := "$KV." + kv.Bucket() + "."
	info, err := patiently(ctx, kv.led, func(ctx context.Context) (*jetstream.StreamInfo, error) {
		return kv.info(ctx, jetstream.WithSubjectFilter(prefix+filter))
	})
	if err != nil {
		return nil, fmt.Errorf("list keys: %w", err)
	}
	keys := make([]string, 0, len(info.State.Subjects))
	for subject := range info.State.Subjects {
		keys = append(keys, strings.TrimPrefix(subject, prefix))
	}
	slices.Sort(keys)
	return keys, nil
}

// isConflict reports a compare-and-set that lost; replicated streams answer
// with another code than single ones.
func isConflict(err error) bool {
	var api *jetstream.APIError
	if errors.As(err, &api) {
		return api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence ||
			api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequenceConstant
	}
	return errors.Is(err, jetstream.ErrKeyExists)
}
