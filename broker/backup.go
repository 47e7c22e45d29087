package broker

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	"github.com/iop-fabric/iop/broker/enrol"
	"github.com/iop-fabric/iop/internal/identity"
)

// A backup is lines of JSON: a header, one line for each record, and an end with
// the SHA-256 of all lines before it and the issuer's signature of that.
const (
	backupFormat  = 1
	maxBackup     = 512 << 20
	backupBound   = 5 * time.Minute
	signedContext = "iop backup 1\n" // what the issuer signs begins with this
)

// Header says whose backup it is, and what it holds.
type Header struct {
	Format      int       `json:"iop_backup"`
	Created     time.Time `json:"created"`
	TrustDomain string    `json:"trust_domain"`
	Issuer      string    `json:"issuer"` // the public key that sessions' tokens are signed with
	Edges       []string  `json:"edges"`
	// Generation: none above it was given when the backup was made.
	Generation  uint64 `json:"generation"`
	Members     int    `json:"members"`
	Invitations int    `json:"invitations"`
	StoreKeys   int    `json:"store_keys"`
}

type kind string

// The kinds of records.
const (
	kindMember     kind = "member"
	kindInvitation kind = "invitation"
	kindStore      kind = "store"
)

// record is one key of a bucket. Value is the member or the invitation as it is
// kept; of an Edge's store the bytes.
type record struct {
	Kind  kind            `json:"kind"`
	Key   string          `json:"key"`
	Value json.RawMessage `json:"value"`
}

type backupEnd struct {
	End       int    `json:"end"` // how many records there are
	SHA256    []byte `json:"sha256"`
	Signature []byte `json:"signature"`
}

// Backup is what a file holds.
type Backup struct {
	Header
	records []record
}

func (b *Backup) has(k kind) bool {
	return b != nil && slices.ContainsFunc(b.records, func(r record) bool { return r.Kind == k })
}

// Names of the members, as edge, role and name.
func (b *Backup) Names() []BackupMember {
	out := []BackupMember{}
	for _, r := range b.records {
		if r.Kind != kindMember {
			continue
		}
		var m member
		if err := json.Unmarshal(r.Value, &m); err != nil {
			panic("BUG: broker: a record that was found valid is no member: " + err.Error())
		}
		out = append(out, BackupMember{Name: r.Key, Revoked: m.Revoked})
	}
	return out
}

// BackupMember is one in a backup: EDGE.ROLE.NAME.
type BackupMember struct {
	Name    string `json:"name"`
	Revoked bool   `json:"revoked"`
}

// A backup that cannot be used.
var (
	ErrBackupBroken = errors.New("the backup is not whole: it was cut short or altered")
	ErrBackupOther  = errors.New("the backup is another fabric's")
	errBackupIssuer = fmt.Errorf("%w, or from before iop rotate issuer", ErrBackupOther)
)

// ReadBackup reads one and checks that it is as it was written.
func ReadBackup(r io.Reader) (*Backup, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxBackup+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("broker: backup: %w", err)
	case len(data) > maxBackup:
		return nil, fmt.Errorf("broker: backup: it is larger than %d MiB", maxBackup>>20)
	}
	if first, _, _ := bytes.Cut(data, []byte("\n")); !bytes.HasPrefix(first, []byte(`{"iop_backup":`)) {
		return nil, errors.New("broker: this is no backup of iop")
	}
	body, ok := bytes.CutSuffix(data, []byte("\n"))
	cut := bytes.LastIndexByte(body, '\n') + 1
	var end backupEnd
	if !ok || cut == 0 || strict(body[cut:], &end) != nil {
		return nil, fmt.Errorf("broker: %w (its end is missing)", ErrBackupBroken)
	}
	// Base64 has bits that say nothing: they, too, are as they were written.
	if again, err := json.Marshal(end); err != nil || !bytes.Equal(again, body[cut:]) {
		return nil, fmt.Errorf("broker: %w (its end is altered)", ErrBackupBroken)
	}
	body = body[:cut]
	if sum := sha256.Sum256(body); !bytes.Equal(sum[:], end.SHA256) {
		return nil, fmt.Errorf("broker: %w (its checksum differs)", ErrBackupBroken)
	}
	lines := bytes.Split(bytes.TrimSuffix(body, []byte("\n")), []byte("\n"))
	var b Backup
	if err := json.Unmarshal(lines[0], &b.Header); err != nil {
		return nil, fmt.Errorf("broker: %w (its header cannot be read)", ErrBackupBroken)
	}
	if b.Format != backupFormat {
		return nil, fmt.Errorf("broker: the backup is of format %d, this iop knows format %d", b.Format, backupFormat)
	}
	key, err := nkeys.FromPublicKey(b.Issuer)
	if err != nil || key.Verify(signed(end.SHA256), end.Signature) != nil {
		return nil, fmt.Errorf("broker: %w (its issuer did not sign it)", ErrBackupBroken)
	}
	for _, line := range lines[1:] {
		var r record
		if err := strict(line, &r); err != nil || !r.valid() {
			return nil, fmt.Errorf("broker: the backup holds a record that this iop does not know: %.40q", line)
		}
		b.records = append(b.records, r)
	}
	if len(b.records) != end.End {
		return nil, fmt.Errorf("broker: %w (%d records of %d)", ErrBackupBroken, len(b.records), end.End)
	}
	return &b, nil
}

func signed(sum []byte) []byte { return append([]byte(signedContext), sum...) }

func strict(line []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	return d.Decode(into)
}

// valid: the key is one of its bucket, and the value of its kind.
func (r record) valid() bool {
	switch r.Kind {
	case kindMember, kindInvitation:
		id, ok := parseMemberKey(r.Key)
		if !ok || checkMemberID(id) != nil {
			return false
		}
		if r.Kind == kindMember {
			return json.Unmarshal(r.Value, new(member)) == nil
		}
		return json.Unmarshal(r.Value, new(enrol.Invitation)) == nil
	case kindStore:
		edge, key, ok := strings.Cut(r.Key, ".")
		var value []byte
		return ok && checkMemberID(memberID{Edge: edge, Role: identity.RoleEdge, Name: edge}) == nil && validStoreKey(key) &&
			json.Unmarshal(r.Value, &value) == nil
	}
	return false
}

// stores are what a backup is made of; a nil one is not there.
type stores struct{ members, invitations, store, generations *bucket }

// backup collects what the stores hold, for the issuer to sign.
func (a *authority) backup(ctx context.Context, from stores, issuer *identity.NKey) (*Backup, error) {
	b := &Backup{Header: Header{
		Format: backupFormat, Created: a.now().UTC(), TrustDomain: a.cfg.TrustDomain, Issuer: issuer.Public(),
	}}
	edges := map[string]bool{}
	for _, c := range []struct {
		kind kind
		from *bucket
		n    *int
	}{{kindMember, from.members, &b.Members}, {kindInvitation, from.invitations, &b.Invitations}, {kindStore, from.store, &b.StoreKeys}} {
		if c.from == nil {
			continue
		}
		keys, err := listKeys(ctx, *c.from, ">")
		if err != nil {
			return nil, err
		}
		for _, key := range keys {
			e, err := patiently(ctx, c.from.led, func(ctx context.Context) (jetstream.KeyValueEntry, error) { return c.from.Get(ctx, key) })
			if errors.Is(err, jetstream.ErrKeyNotFound) {
				continue
			}
			if err != nil {
				return nil, fmt.Errorf("read %s %s: %w", c.kind, key, err)
			}
			r := record{Kind: c.kind, Key: key, Value: e.Value()}
			if c.kind == kindMember && from.generations != nil {
				if r.Value, err = withRoot(ctx, *from.generations, key, e.Value()); err != nil {
					return nil, err
				}
			}
			if c.kind == kindStore {
				if r.Value, err = json.Marshal(e.Value()); err != nil {
					return nil, err
				}
			}
			if !r.valid() {
				continue // the mark; or what is of no use to anybody
			}
			edge, _, _ := strings.Cut(key, ".")
			edges[edge] = true
			b.records = append(b.records, r)
			*c.n++
		}
	}
	b.Edges = slices.Sorted(maps.Keys(edges))
	// Last, so that no session that the rest may tell of is above it.
	if from.members != nil {
		m := marks{kv: *from.members}
		is, err := m.read(ctx)
		if err != nil {
			return nil, err
		}
		b.Generation = is.Generation
	}
	if from.generations != nil {
		info, err := patiently(ctx, from.generations.led, func(ctx context.Context) (*jetstream.StreamInfo, error) { return from.generations.info(ctx) })
		if err != nil {
			return nil, fmt.Errorf("read generations: %w", err)
		}
		b.Generation = max(b.Generation, info.State.LastSeq)
	}
	return b, nil
}

// withRoot is a Node's record with the root of the certificate that it came with last,
// which otherwise stands with its generation: a restored broker must know who still has
// one of the old CA.
func withRoot(ctx context.Context, kv bucket, key string, value []byte) ([]byte, error) {
	id, ok := parseMemberKey(key)
	if !ok || id.Role != identity.RoleNode {
		return value, nil
	}
	_, a, err := generations{kv: kv}.Newest(ctx, id.Edge, id.Name)
	if errors.Is(err, jetstream.ErrKeyNotFound) || (err == nil && a.Root == "") {
		return value, nil
	}
	if err != nil {
		return nil, err
	}
	var m member
	if err := json.Unmarshal(value, &m); err != nil {
		return nil, fmt.Errorf("member %s: %w", key, err)
	}
	m.Root = a.Root
	return json.Marshal(m)
}

// write writes it, signed.
func (b *Backup) write(w io.Writer, issuer *identity.NKey) error {
	var body bytes.Buffer
	lines := json.NewEncoder(&body)
	err := lines.Encode(b.Header)
	for _, r := range b.records {
		err = errors.Join(err, lines.Encode(r))
	}
	if err != nil {
		return fmt.Errorf("broker: backup: %w", err)
	}
	sum := sha256.Sum256(body.Bytes())
	end := backupEnd{End: len(b.records), SHA256: sum[:]}
	if end.Signature, err = issuer.Sign(signed(sum[:])); err != nil {
		return fmt.Errorf("broker: backup: %w", err)
	}
	if err := lines.Encode(end); err != nil {
		return fmt.Errorf("broker: backup: %w", err)
	}
	if body.Len() > maxBackup {
		return fmt.Errorf("broker: backup: it would be larger than %d MiB", maxBackup>>20)
	}
	if _, err := body.WriteTo(w); err != nil {
		return fmt.Errorf("broker: backup: %w", err)
	}
	return nil
}

// Backup writes what the authority knows while it runs.
func (a *authority) Backup(ctx context.Context, w io.Writer) error {
	if !a.isReady() {
		return ErrNotReady
	}
	ctx, cancel := context.WithTimeout(ctx, backupBound)
	defer cancel()
	issuer := a.issuer.Load() // the one that a broker which restores it will have
	out, err := a.backup(ctx, a.stores, issuer)
	if err != nil {
		return err
	}
	return out.write(w, issuer)
}

// ErrInCluster: one of a cluster holds nothing that can be read without the others.
var ErrInCluster = errors.New("broker: this broker is one of a cluster, so its store cannot be read while it is stopped: start two of them and ask one")

// BackupStopped writes what the store of a broker that does not run holds. It
// opens no listener, and counts as the broker's one run.
func (b *Broker) BackupStopped(ctx context.Context, w io.Writer) error {
	if b.ran.Swap(true) {
		return errRan
	}
	if _, err := os.Stat(b.cfg.StoreDir); err != nil {
		return fmt.Errorf("broker: store_dir %s: %w", b.cfg.StoreDir, reason(err))
	}
	unlock, err := lockStore(b.cfg.StoreDir)
	if err != nil {
		return err
	}
	defer unlock()
	if !b.alone {
		return ErrInCluster
	}
	opts, err := newOptions(b.text, b.tlsConfig)
	if err != nil {
		return err
	}
	opts.DontListen, opts.LeafNode = true, server.LeafNodeOpts{}
	srv, err := server.NewServer(opts)
	if err != nil {
		return fmt.Errorf("broker: %w", err)
	}
	defer func() { srv.Shutdown(); srv.WaitForShutdown() }()
	srv.Start()
	if !srv.ReadyForConnections(startBound) {
		return fmt.Errorf("broker: the store was not open within %v", startBound)
	}
	nc, err := b.connect(srv, b.keys.callout, "iop-backup")
	if err != nil {
		return fmt.Errorf("broker: %w", err)
	}
	defer nc.Close()
	return b.backupOver(ctx, nc, "store_dir "+b.cfg.StoreDir, w)
}

// backupOver writes what the stores hold that a connection of the session service
// leads to. where is what an operator calls them.
func (a *authority) backupOver(ctx context.Context, nc *nats.Conn, where string, w io.Writer) error {
	js, err := jetstream.New(nc)
	if err != nil {
		return fmt.Errorf("broker: jetstream: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, backupBound)
	defer cancel()
	led := newElections(&a.storeOpen)
	defer led.end()
	var from stores
	for name, to := range map[string]**bucket{
		bucketMembers: &from.members, bucketInvitations: &from.invitations, bucketStore: &from.store, bucketGenerations: &from.generations,
	} {
		is, err := bindBucket(ctx, js, led, name)
		if errors.Is(err, jetstream.ErrBucketNotFound) {
			continue
		}
		if err != nil {
			return fmt.Errorf("broker: bucket %s: %w", name, err)
		}
		*to = &is
	}
	if from.members == nil || from.generations == nil {
		return fmt.Errorf("broker: %s holds nothing to back up", where)
	}
	out, err := a.backup(ctx, from, a.keys.issuer)
	if err != nil {
		return err
	}
	return out.write(w, a.keys.issuer)
}
