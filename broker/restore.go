package broker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/iop-fabric/iop/broker/enrol"
)

// restoreFile is where a broker finds, at its start, what is to be restored. It
// is taken away once all of it is in the stores; until then it is done again.
const restoreFile = "restore"

// ErrNotEmpty: what is there must not be mixed with a backup.
var ErrNotEmpty = errors.New("holds stores already: a backup is restored where there are none (move the folder away first; --generation-above N alone needs no empty one)")

// Restore leaves a backup for the next start of this broker, which must not run.
// from may be nil. Generations go on above that of the backup and above the number.
func (b *Broker) Restore(from *Backup, above uint64) error {
	if b.ran.Swap(true) {
		return errRan
	}
	from, err := b.restores(from, above)
	if err != nil {
		return err
	}
	if err := checkStore(b.cfg.StoreDir); err != nil {
		return err
	}
	unlock, err := lockStore(b.cfg.StoreDir)
	if err != nil {
		return err
	}
	defer unlock()
	if len(from.records) > 0 {
		there, err := filepath.Glob(filepath.Join(b.cfg.StoreDir, "jetstream", "*", "streams", "KV_*"))
		switch {
		case err != nil:
			return fmt.Errorf("broker: store_dir: %w", err)
		case len(there) > 0:
			return fmt.Errorf("broker: store_dir %s %w", b.cfg.StoreDir, ErrNotEmpty)
		}
	}
	if b.alone {
		// A server that finds the index takes its word for what the blocks hold, and cannot
		// write over a record that it cannot read. Without, it reads them, and leaves it out.
		index := filepath.Join(b.cfg.StoreDir, "jetstream", accountAuth, "streams", "KV_"+bucketMembers, "msgs", "index.db")
		if err := os.Remove(index); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("broker: restore: %w", err)
		}
	}
	return from.save(filepath.Join(b.cfg.StoreDir, restoreFile), &b.authority)
}

// restores is what there is to restore of a backup, which may be nil, so that
// generations go on above that number.
func (a *authority) restores(from *Backup, above uint64) (*Backup, error) {
	if from == nil {
		from = &Backup{Header: Header{Format: backupFormat, Created: a.now().UTC(), TrustDomain: a.cfg.TrustDomain, Issuer: a.keys.issuer.Public()}}
	}
	if err := a.mine(from); err != nil {
		return nil, err
	}
	if limit := firstGeneration(a.now()) << 8; above >= limit {
		return nil, fmt.Errorf("broker: generation %d is beyond all that can have been given", above)
	}
	out := &Backup{Header: from.Header, records: from.records}
	out.Issuer = a.keys.issuer.Public() // which signs what is left for the start
	out.Generation = max(out.Generation, above)
	return out, nil
}

// mine refuses what is not of this fabric.
func (a *authority) mine(from *Backup) error {
	switch {
	case from.TrustDomain != a.cfg.TrustDomain:
		return fmt.Errorf("broker: %w: it is of trust domain %q, this one of %q", ErrBackupOther, from.TrustDomain, a.cfg.TrustDomain)
	case from.Issuer != a.keys.issuer.Public() && !a.isOldIssuer(from.Issuer):
		return fmt.Errorf("broker: %w: its issuer is %s, this one's %s", errBackupIssuer, from.Issuer, a.keys.issuer.Public())
	}
	var ours []string
	for edge := range a.cfg.EdgeKeys {
		ours = append(ours, edge)
	}
	for _, m := range a.cfg.Members {
		ours = append(ours, m.Edge)
	}
	if a.cfg.Enrolment != nil {
		ours = append(ours, a.cfg.Enrolment.Edge)
	}
	if len(ours) > 0 && len(from.Edges) > 0 && !slices.ContainsFunc(from.Edges, func(edge string) bool { return slices.Contains(ours, edge) }) {
		slices.Sort(ours)
		return fmt.Errorf("broker: %w: it is of edge %s, this one of %s", ErrBackupOther,
			strings.Join(from.Edges, ", "), strings.Join(slices.Compact(ours), ", "))
	}
	return nil
}

// isOldIssuer reports whether it is the one that is being exchanged.
func (a *authority) isOldIssuer(public string) bool {
	old := a.oldIssuer.Load()
	return old != nil && old.Public() == public
}

// save writes the file whole, or not at all.
func (b *Backup) save(name string, a *authority) (err error) {
	f, err := os.OpenFile(filepath.Clean(name+".new"), os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("broker: restore: %w", err)
	}
	err = errors.Join(b.write(f, a.keys.issuer), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		return fmt.Errorf("broker: restore: %w", err)
	}
	return nil
}

// loadRestore reads what is to be restored, if anything is.
func (b *Broker) loadRestore() error {
	f, err := os.Open(filepath.Join(b.cfg.StoreDir, restoreFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("broker: restore: %w", err)
	}
	defer f.Close() // only read
	from, err := ReadBackup(f)
	if err == nil {
		err = b.mine(from)
	}
	if err != nil {
		return fmt.Errorf("broker: %s, which is to be restored: %w (run iop restore again, or take the file away)", f.Name(), err)
	}
	b.restore = from
	return nil
}

// applyRestore writes the records of a backup into the stores. Others of a cluster
// may do the same, or may have begun without: what somebody has changed meanwhile
// stays, a member that is only as the configuration says becomes the backup's.
func (s *service) applyRestore(ctx context.Context) error {
	from := s.b.restore
	if from == nil {
		return nil
	}
	for _, r := range from.records {
		var err error
		switch r.Kind {
		case kindMember:
			id, _ := parseMemberKey(r.Key) // it was checked when it was read
			err = s.members.change(ctx, id, func(v *member, found bool) (bool, error) {
				if found && (v.Revoked || !slices.Equal(v.NKeys, v.Seed)) {
					return false, nil
				}
				*v = member{}
				return true, json.Unmarshal(r.Value, v)
			})
		case kindInvitation:
			err = change(ctx, s.invitations, r.Key, "invitation", func(v *enrol.Invitation, found bool) (bool, error) {
				return !found, json.Unmarshal(r.Value, v)
			})
		case kindStore:
			var value []byte
			if err = json.Unmarshal(r.Value, &value); err == nil {
				_, err = patiently(ctx, s.store.kv.led, func(ctx context.Context) (uint64, error) { return s.store.kv.Create(ctx, r.Key, value) })
			}
			if isConflict(err) || errors.Is(err, jetstream.ErrKeyExists) {
				err = nil
			}
		}
		if err != nil {
			return fmt.Errorf("broker: restore: %w", err)
		}
	}
	if s.b.embedded {
		name := filepath.Join(s.b.cfg.StoreDir, restoreFile)
		if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("broker: restore: %w", err)
		}
	}
	s.b.log.Info(eventRestored, slog.Int("members", from.Members), slog.Int("invitations", from.Invitations),
		slog.Int("store_keys", from.StoreKeys), slog.Uint64("above", from.Generation))
	s.b.restore = nil
	return nil
}
