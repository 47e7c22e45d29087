package broker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/iop-fabric/iop/broker/enrol"
	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire/iopv1"
)

const sameInstance = "0123456789abcdef"

// admissions has a node dial n times, and returns its last generation.
func (f *fixture) admissions(name string, key *identity.NKey, n int) (last uint64) {
	f.t.Helper()
	for began := time.Now(); n > 0; {
		nc, err := f.instance(sameInstance, "edge1", "node", name, key).dial()
		if errors.Is(err, nats.ErrAuthorization) && time.Since(began) < guard {
			continue // a disk that took more than a second for a generation refuses it
		}
		if err != nil {
			f.t.Fatalf("dial: %v", err)
		}
		s, err := subjects.ParseSession(f.whoami(nc))
		nc.Close()
		if err != nil {
			f.t.Fatal(err)
		}
		last = s.Gen
		n--
	}
	return last
}

// runFails runs a broker that must not begin to serve.
func (f *fixture) runFails() error {
	f.t.Helper()
	f.launch()
	select {
	case <-f.b.Ready():
		f.t.Fatal("it serves")
		return nil
	case err := <-f.done:
		f.cancel = nil
		return err
	case <-time.After(guard):
		f.t.Fatal("it neither serves nor ends")
		return nil
	}
}

func copyDir(t *testing.T, to, from string) {
	t.Helper()
	if err := os.RemoveAll(to); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
}

// A store of generations that is gone, or shorter than it was, is noticed: nobody
// is admitted, what mends it is told, and then generations go on above all that
// were given. One that lost its last moments alone goes on by itself.
//
// Contract: G1 B9
func TestGenerationsStoreLost(t *testing.T) {
	t.Parallel()
	above := regexp.MustCompile(`iop restore --generation-above (\d+)`)
	for _, c := range []struct {
		name  string
		lost  bool // it is to be noticed
		spoil func(t *testing.T, stream, early, late string)
	}{
		{"the folder is gone", true, func(t *testing.T, stream, _, _ string) {
			if err := os.RemoveAll(stream); err != nil {
				t.Fatal(err)
			}
		}},
		{"its messages are gone", true, func(t *testing.T, stream, _, _ string) {
			if err := os.RemoveAll(filepath.Join(stream, "msgs")); err != nil {
				t.Fatal(err)
			}
		}},
		{"an early copy was put back", true, func(t *testing.T, stream, early, _ string) { copyDir(t, stream, early) }},
		{"its blocks are cut", true, func(t *testing.T, stream, _, _ string) {
			blocks := must(filepath.Glob(filepath.Join(stream, "msgs", "*.blk")))
			if len(blocks) == 0 {
				t.Fatal("no blocks")
			}
			if err := os.Remove(filepath.Join(stream, "msgs", "index.db")); err != nil {
				t.Fatal(err)
			}
			for _, b := range blocks {
				if err := os.Truncate(b, must(os.Stat(b)).Size()/3); err != nil {
					t.Fatal(err)
				}
			}
		}},
		{"its last moments are gone", false, func(t *testing.T, stream, _, late string) { copyDir(t, stream, late) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFixture(t)
			key := f.member("edge1", "node", "n1")
			stream := filepath.Join(f.cfg.StoreDir, "jetstream", accountAuth, "streams", "KV_"+bucketGenerations)
			early, late := filepath.Join(f.dir, "early"), filepath.Join(f.dir, "late")
			f.start()
			f.admissions("n1", key, 1)
			f.stop()
			copyDir(t, early, stream)
			f.start()
			f.admissions("n1", key, 2*markAhead)
			f.stop()
			f.start()
			f.admissions("n1", key, 1)
			copyDir(t, late, stream) // in full: each write is on the disk before it counts
			last := f.admissions("n1", key, 5)
			f.stop()

			c.spoil(t, stream, early, late)
			if c.lost {
				_ = f.runFails() // and not by trying again
				err := f.runFails()
				if !errors.Is(err, ErrGenerationsLost) {
					t.Fatalf("error: %v", err)
				}
				f.logs.wait(t, 0, map[string]string{"msg": eventGenerations})
				m := above.FindStringSubmatch(err.Error())
				if m == nil {
					t.Fatalf("no remedy in %v", err)
				}
				n := must(strconv.ParseUint(m[1], 10, 64))
				if n < last {
					t.Errorf("it would go on above %d, %d was given", n, last)
				}
				if err := must(New(f.cfg, Deps{})).Restore(nil, n); err != nil {
					t.Fatal(err)
				}
				f.start()
				f.logs.wait(t, 0, map[string]string{"msg": eventRestored})
				if next := f.admissions("n1", key, 1); next <= n {
					t.Errorf("generation %d, not above %d", next, n)
				}
				f.stop()
			}
			f.start()
			if next := f.admissions("n1", key, 1); next <= last {
				t.Errorf("generation %d after %d", next, last)
			}
			if made := f.logs.seen(eventRestored); len(made) > 0 {
				t.Errorf("restored twice: %v", made)
			}
		})
	}
}

// Records of members that are gone from the store, or older than they were, are
// noticed, though the server drops what is broken and goes on: nobody is admitted, it is
// told whose they are and what mends it, and then who was revoked is so again.
//
// Contract: B8 B9
func TestMembersStoreLost(t *testing.T) {
	t.Parallel()
	above := regexp.MustCompile(`iop restore --generation-above (\d+)`)
	blocks := func(t *testing.T, stream string) []string {
		t.Helper()
		names := must(filepath.Glob(filepath.Join(stream, "msgs", "*.blk")))
		if len(names) == 0 {
			t.Fatal("no blocks")
		}
		return names
	}
	for _, c := range []struct {
		name  string
		index bool // the index is there still, as after kill -9 it need not be
		spoil func(t *testing.T, stream, early string)
	}{
		{"a byte of the revocation is another", false, func(t *testing.T, stream, _ string) {
			found := false
			for _, name := range blocks(t, stream) {
				data := must(os.ReadFile(name))
				at := bytes.LastIndex(data, []byte(`"revoked":true`))
				if at < 0 {
					continue
				}
				found = true
				data[at+3] ^= 1
				if err := os.WriteFile(name, data, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if !found {
				t.Fatal("no revocation in the blocks")
			}
		}},
		{"its blocks are cut", false, func(t *testing.T, stream, _ string) {
			for _, name := range blocks(t, stream) {
				if err := os.Truncate(name, 20); err != nil {
					t.Fatal(err)
				}
			}
		}},
		{"its messages are gone", true, func(t *testing.T, stream, _ string) {
			if err := os.RemoveAll(filepath.Join(stream, "msgs")); err != nil {
				t.Fatal(err)
			}
		}},
		{"the folder is gone", true, func(t *testing.T, stream, _ string) {
			if err := os.RemoveAll(stream); err != nil {
				t.Fatal(err)
			}
		}},
		{"an early copy was put back", true, func(t *testing.T, stream, early string) { copyDir(t, stream, early) }},
		{"its blocks are cut, and the index is there", true, func(t *testing.T, stream, _ string) {
			for _, name := range blocks(t, stream) {
				if err := os.Truncate(name, 20); err != nil {
					t.Fatal(err)
				}
			}
		}},
		{"a byte of each is another, and the index is there", true, func(t *testing.T, stream, _ string) {
			for _, name := range blocks(t, stream) {
				data := bytes.ReplaceAll(must(os.ReadFile(name)), []byte(`"nkeys"`), []byte(`"nkeyz"`))
				if err := os.WriteFile(name, data, 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFixture(t)
			keys := map[string]*identity.NKey{"n1": f.member("edge1", "node", "n1"), "n2": f.member("edge1", "node", "n2")}
			stream := filepath.Join(f.cfg.StoreDir, "jetstream", accountAuth, "streams", "KV_"+bucketMembers)
			early := filepath.Join(f.dir, "early")
			denied := func() {
				t.Helper()
				conn, user := f.connect(f.dialer("edge1", "node", "n1", keys["n1"]))
				conn.Close()
				if !strings.HasPrefix(user, "!denied.revoked") {
					t.Errorf("n1, which was revoked, is %s", user)
				}
			}
			f.start()
			f.admissions("n1", keys["n1"], 1)
			f.stop()
			copyDir(t, early, stream)
			f.start()
			if err := f.b.Revoke(t.Context(), "edge1", "node", "n1"); err != nil {
				t.Fatal(err)
			}
			last := f.admissions("n2", keys["n2"], 2)
			f.stop()
			f.start() // in order
			denied()
			f.stop()

			if !c.index {
				if err := os.Remove(filepath.Join(stream, "msgs", "index.db")); err != nil {
					t.Fatal(err)
				}
			}
			c.spoil(t, stream, early)
			_ = f.runFails() // and not by trying again
			err := f.runFails()
			if !errors.Is(err, ErrMembersLost) || !strings.Contains(err.Error(), "node n1 (revoked)") {
				t.Fatalf("error: %v", err)
			}
			f.logs.wait(t, 0, map[string]string{"msg": eventMembers})
			n := must(strconv.ParseUint(append(above.FindStringSubmatch(err.Error()), "", "")[1], 10, 64))
			if n < last {
				t.Errorf("it would go on above %d, %d was given", n, last)
			}
			if err := must(New(f.cfg, Deps{})).Restore(nil, n); err != nil {
				t.Fatal(err)
			}
			for range 2 { // and it stays so
				f.start()
				denied()
				if next := f.admissions("n2", keys["n2"], 1); next <= last {
					t.Errorf("generation %d after %d", next, last)
				}
				f.stop()
			}
		})
	}
}

// A record without its witness, as an older broker or a crash leaves it, is attested at
// the next start; one that is newer than its witness is in order.
//
// Contract: B9
func TestWitnessBehind(t *testing.T) {
	f := newFixture(t)
	key := f.member("edge1", "node", "n1")
	f.start()
	ctx, id := t.Context(), memberID{Edge: "edge1", Role: identity.RoleNode, Name: "n1"}
	if err := f.generations().Purge(ctx, witnessPrefix+id.key()); err != nil {
		t.Fatal(err)
	}
	f.stop()
	f.start()
	if e := must(f.generations().Get(ctx, witnessPrefix+id.key())); !strings.Contains(string(e.Value()), `"revision":`) {
		t.Errorf("witness: %s", e.Value())
	}
	// Written, and cut off before the witness.
	err := change(ctx, f.b.members.kv, id.key(), "member", func(m *member, _ bool) (bool, error) { m.Revoked = true; return true, nil })
	if err != nil {
		t.Fatal(err)
	}
	f.stop()
	f.start()
	if e := must(f.generations().Get(ctx, witnessPrefix+id.key())); !strings.Contains(string(e.Value()), `"revoked":true`) {
		t.Errorf("witness: %s", e.Value())
	}
	conn, user := f.connect(f.dialer("edge1", "node", "n1", key))
	conn.Close()
	if !strings.HasPrefix(user, "!denied.revoked") {
		t.Errorf("n1, which was revoked, is %s", user)
	}
}

// It is noticed while the broker runs, too: what a store that fell back gives is
// given to nobody.
//
// Contract: G1
func TestGenerationsFallBack(t *testing.T) {
	f := newFixture(t)
	f.member("edge1", "node", "n1")
	f.start()
	g := f.gives()
	ctx := context.Background()
	s := must(g.Next(ctx, "edge1", "n1", admission{}, 0))
	is := g.marks.known.Load()
	if is < s.Gen || is > s.Gen+markAhead {
		t.Errorf("the mark is at %d after generation %d", is, s.Gen)
	}
	// Another is as far ahead as it can be; then this one's store is an older one.
	g.marks.known.Store(s.Gen + 1 + markAhead)
	if s, err := g.Next(ctx, "edge1", "n1", admission{}, s.Gen); err != nil {
		t.Errorf("generation %d, which is in order: %v", s.Gen, err)
	}
	g.marks.known.Store(s.Gen + 3 + markAhead)
	if s, err := g.Next(ctx, "edge1", "n1", admission{}, s.Gen+1); !errors.Is(err, ErrGenerationsLost) {
		t.Errorf("generation %d, which fell back: %v", s.Gen, err)
	}
}

// full is a broker with something of everything, and its backup.
func full(t *testing.T) (f *fixture, file []byte, keys map[string]*identity.NKey, last uint64) {
	f = newFixture(t)
	keys = map[string]*identity.NKey{"seeded": f.member("edge1", "node", "seeded")}
	f.enrols()
	f.start()
	for _, name := range []string{"n1", "gone"} {
		keys[name] = must(identity.NewUserKey())
		if err := f.b.Register(t.Context(), configs.Member{Edge: "edge1", Role: "node", Name: name, NKey: keys[name].Public()}); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"gone", "seeded"} {
		if err := f.b.Revoke(t.Context(), "edge1", "node", name); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := f.b.Invite(t.Context(), "guest", time.Hour); err != nil {
		t.Fatal(err)
	}
	nc := f.edge("edge1")
	for i := range 3 {
		if resp := f.ask(nc, "edge1", subjects.Put, &iopv1.StoreRequest{Key: fmt.Sprintf("k/%d", i), Value: []byte{0, byte(i), 0xff}}); resp.ErrorClass != "" {
			t.Fatal(resp)
		}
	}
	nc.Close()
	last = f.admissions("n1", keys["n1"], 3)
	var out bytes.Buffer
	if err := f.b.Backup(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	return f, out.Bytes(), keys, last
}

// What a backup holds is there again in an empty store: who may come in, who may
// not, who is invited, what the Edges keep; and generations go on above all that
// were given. From a broker that is stopped it is the same.
//
// Contract: B9 G1 B10 B11
func TestBackupRestore(t *testing.T) {
	f, file, keys, last := full(t)
	defer func() { f.stop() }()
	b := must(ReadBackup(bytes.NewReader(file)))
	if b.Members != 3 || b.Invitations != 1 || b.StoreKeys != 3 || b.Generation < last || !reflect.DeepEqual(b.Edges, []string{"edge1"}) {
		t.Errorf("%+v", b.Header)
	}
	if err := must(New(f.cfg, Deps{})).Restore(b, 0); !errors.Is(err, ErrLocked) {
		t.Errorf("while it runs: %v", err)
	}
	f.stop()
	var stopped bytes.Buffer
	if err := must(New(f.cfg, Deps{})).BackupStopped(t.Context(), &stopped); err != nil {
		t.Fatal(err)
	}
	if s := must(ReadBackup(&stopped)); !reflect.DeepEqual(s.records, b.records) || s.Generation < b.Generation {
		t.Errorf("of a stopped one: %+v, not %+v", s.Header, b.Header)
	}
	if err := must(New(f.cfg, Deps{})).Restore(b, 0); !errors.Is(err, ErrNotEmpty) {
		t.Errorf("into a store with something in it: %v", err)
	}

	if err := os.RemoveAll(f.cfg.StoreDir); err != nil {
		t.Fatal(err)
	}
	// A clock that is a year behind, and a number that is above the clock's.
	f.offset.Store(int64(-365 * 24 * time.Hour))
	above := last + 1_000_000
	if err := must(New(f.cfg, Deps{})).Restore(b, above); err != nil {
		t.Fatal(err)
	}
	f.start()
	f.offset.Store(0)
	f.logs.wait(t, 0, map[string]string{"msg": eventRestored, "members": "3", "invitations": "1", "store_keys": "3"})
	if gen := f.admissions("n1", keys["n1"], 1); gen <= above {
		t.Errorf("generation %d, not above %d", gen, above)
	}
	for _, name := range []string{"gone", "seeded"} {
		nc, user := f.connect(f.dialer("edge1", "node", name, keys[name]))
		nc.Close()
		if !strings.HasPrefix(user, "!denied.revoked") {
			t.Errorf("%s, which was revoked, is %s", name, user)
		}
	}
	if all := must(f.b.Invitations(t.Context())); len(all) != 1 || all[0].Name != "guest" {
		t.Errorf("invitations: %v", all)
	}
	nc := f.edge("edge1")
	for i := range 3 {
		resp := f.ask(nc, "edge1", subjects.Get, &iopv1.StoreRequest{Key: fmt.Sprintf("k/%d", i)})
		if len(resp.Entries) != 1 || !bytes.Equal(resp.Entries[0].Value, []byte{0, byte(i), 0xff}) {
			t.Errorf("k/%d: %v", i, resp)
		}
	}
	if _, err := os.Stat(filepath.Join(f.cfg.StoreDir, restoreFile)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file is still there: %v", err)
	}
}

// A broker that was killed before it had taken the file away restores again, and
// undoes nothing of what came after.
//
// Contract: B9 G1
func TestRestoreAgain(t *testing.T) {
	f, file, keys, last := full(t)
	f.stop()
	if err := os.RemoveAll(f.cfg.StoreDir); err != nil {
		t.Fatal(err)
	}
	if err := must(New(f.cfg, Deps{})).Restore(must(ReadBackup(bytes.NewReader(file))), 0); err != nil {
		t.Fatal(err)
	}
	left := must(os.ReadFile(filepath.Join(f.cfg.StoreDir, restoreFile)))
	f.start()
	if err := f.b.Register(t.Context(), configs.Member{Edge: "edge1", Role: "node", Name: "gone", NKey: keys["gone"].Public()}); err != nil {
		t.Fatal(err)
	}
	if err := f.b.Revoke(t.Context(), "edge1", "node", "n1"); err != nil {
		t.Fatal(err)
	}
	if err := f.b.CancelInvitation(t.Context(), "guest"); err != nil {
		t.Fatal(err)
	}
	nc := f.edge("edge1")
	rev := f.ask(nc, "edge1", subjects.Get, &iopv1.StoreRequest{Key: "k/0"}).Revision
	f.ask(nc, "edge1", subjects.Put, &iopv1.StoreRequest{Key: "k/0", Value: []byte("new"), ExpectedRevision: rev})
	nc.Close()
	last = max(last, f.admissions("gone", keys["gone"], 1))
	f.stop()

	if err := os.WriteFile(filepath.Join(f.cfg.StoreDir, restoreFile), left, 0o600); err != nil {
		t.Fatal(err)
	}
	f.start()
	f.logs.wait(t, 0, map[string]string{"msg": eventRestored})
	if gen := f.admissions("gone", keys["gone"], 1); gen <= last {
		t.Errorf("generation %d after %d", gen, last)
	}
	c, user := f.connect(f.dialer("edge1", "node", "n1", keys["n1"]))
	c.Close()
	if !strings.HasPrefix(user, "!denied.revoked") {
		t.Errorf("n1, which was revoked since, is %s", user)
	}
	if all := must(f.b.Invitations(t.Context())); len(all) != 1 || all[0].State != enrol.Cancelled {
		t.Errorf("invitations: %v", all)
	}
	if resp := f.ask(f.edge("edge1"), "edge1", subjects.Get, &iopv1.StoreRequest{Key: "k/0"}); string(resp.Entries[0].Value) != "new" {
		t.Errorf("k/0: %v", resp)
	}
}

// A backup that is cut or altered anywhere, or another fabric's, is refused, and
// nothing is left behind.
//
// Contract: B9
func TestBackupRefused(t *testing.T) {
	f, file, _, _ := full(t)
	f.stop()
	step := max(1, len(file)/97)
	for n := 0; n < len(file); n += step {
		if _, err := ReadBackup(bytes.NewReader(file[:n])); err == nil {
			t.Errorf("cut after %d of %d bytes: taken", n, len(file))
		}
		altered := bytes.Clone(file)
		altered[n] ^= 1
		if _, err := ReadBackup(bytes.NewReader(altered)); err == nil {
			t.Errorf("byte %d altered: taken", n)
		}
	}
	b := must(ReadBackup(bytes.NewReader(file)))

	// The same altered, with a checksum that fits: the issuer did not sign that.
	forged := *b
	forged.Generation = 1
	var out bytes.Buffer
	if err := forged.write(&out, must(identity.NewAccountKey())); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadBackup(&out); !errors.Is(err, ErrBackupBroken) {
		t.Errorf("signed by another: %v", err)
	}

	if err := os.RemoveAll(f.cfg.StoreDir); err != nil {
		t.Fatal(err)
	}
	refused := func(what string, cfg configs.Broker, b *Backup) {
		t.Helper()
		if err := must(New(cfg, Deps{})).Restore(b, 0); !errors.Is(err, ErrBackupOther) {
			t.Errorf("%s: %v", what, err)
		}
	}
	other := *b
	other.TrustDomain = "elsewhere"
	refused("another trust domain's", f.cfg, &other)
	other = *b
	other.Issuer = must(identity.NewAccountKey()).Public()
	refused("another issuer's", f.cfg, &other)
	cfg := f.cfg
	cfg.EdgeKeys, cfg.Members, cfg.Enrolment = map[string]string{"edge9": f.edges["edge2"].Public()}, nil, nil
	refused("another edge's", cfg, b)
	if _, err := os.Stat(filepath.Join(f.cfg.StoreDir, restoreFile)); err == nil {
		t.Error("something is left to be restored")
	}
	// What is left for the next start and spoilt meanwhile stops that.
	if err := must(New(f.cfg, Deps{})).Restore(b, 0); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(f.cfg.StoreDir, restoreFile), 200); err != nil {
		t.Fatal(err)
	}
	if err := f.runFails(); !errors.Is(err, ErrBackupBroken) {
		t.Errorf("spoilt before the start: %v", err)
	}
}

// All three stores of a cluster are lost: the backup, left for each, is there again.
// A cluster that lost its generations alone waits, and says what mends it.
//
// Contract: B9 G1 Y2
func TestClusterRestore(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	nodes := c.nodes(2)
	c.start()
	c.connectAll(nodes[:1], func(int) int { return 0 })
	if err := c.members[1].b.Revoke(t.Context(), "edge1", "node", "n1"); err != nil {
		t.Fatal(err)
	}
	last := nodes[0].session.Gen
	var out bytes.Buffer
	if err := c.members[2].b.Backup(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	b := must(ReadBackup(&out))
	stop := func() {
		for _, m := range c.members {
			m.stop()
		}
	}
	stop()
	if err := must(New(c.members[0].cfg, Deps{})).BackupStopped(t.Context(), &out); !errors.Is(err, ErrInCluster) {
		t.Errorf("the store of one: %v", err)
	}
	const more = 1 << 30
	for _, m := range c.members {
		if err := os.RemoveAll(m.cfg.StoreDir); err != nil {
			t.Fatal(err)
		}
		if err := must(New(m.cfg, Deps{})).Restore(b, last+more); err != nil {
			t.Fatal(err)
		}
	}
	c.start()
	if err := nodes[0].dial(1); err != nil || nodes[0].session.Gen <= last+more {
		t.Fatalf("generation %d, not above %d: %v", nodes[0].session.Gen, last+more, err)
	}
	nodes[0].nc.Close()
	if m, _, err := c.members[2].b.members.Get(t.Context(), memberID{Edge: "edge1", Role: "node", Name: "n1"}); err != nil || !m.Revoked {
		t.Errorf("%+v, %v", m, err)
	}

	last = nodes[0].session.Gen
	g := c.members[0]
	js := g.streams()
	if err := js.DeleteStream(t.Context(), "KV_"+bucketGenerations); err != nil {
		t.Fatal(err)
	}
	stop()
	for _, m := range c.members {
		m.cfg.Members = c.cfg.Members
		m.launch()
	}
	g.logs.wait(t, 0, map[string]string{"msg": eventGenerations})
	if err := g.b.Healthy(); !errors.Is(err, ErrGenerationsLost) {
		t.Errorf("healthy: %v", err)
	}
	g.stop()
	if err := must(New(g.cfg, Deps{})).Restore(nil, last+more); err != nil {
		t.Fatal(err)
	}
	g.start()
	for _, m := range c.members[1:] {
		m.served()
	}
	if err := nodes[0].dial(1); err != nil || nodes[0].session.Gen <= last+more {
		t.Fatalf("generation %d, not above %d: %v", nodes[0].session.Gen, last+more, err)
	}
	nodes[0].nc.Close()

	// The same of the members: who was revoked is so again.
	last = nodes[0].session.Gen
	if err := g.streams().DeleteStream(t.Context(), "KV_"+bucketMembers); err != nil {
		t.Fatal(err)
	}
	stop()
	for _, m := range c.members {
		m.launch()
	}
	g.logs.wait(t, 0, map[string]string{"msg": eventMembers})
	if err := g.b.Healthy(); !errors.Is(err, ErrMembersLost) || !strings.Contains(err.Error(), "node n1 (revoked)") {
		t.Errorf("healthy: %v", err)
	}
	g.stop()
	if err := must(New(g.cfg, Deps{})).Restore(nil, last); err != nil {
		t.Fatal(err)
	}
	g.start()
	for _, m := range c.members[1:] {
		m.served()
	}
	if err := nodes[0].dial(1); err != nil || nodes[0].session.Gen <= last {
		t.Fatalf("generation %d, not above %d: %v", nodes[0].session.Gen, last, err)
	}
	nodes[0].nc.Close()
	if m, _, err := g.b.members.Get(t.Context(), memberID{Edge: "edge1", Role: "node", Name: "n1"}); err != nil || !m.Revoked {
		t.Errorf("%+v, %v", m, err)
	}
}

// What an admission costs the stores.
func BenchmarkNextGeneration(b *testing.B) {
	f := newFixture(b)
	f.member("edge1", "node", "n1")
	f.start()
	g := f.gives()
	var last uint64
	for b.Loop() {
		s, err := g.Next(context.Background(), "edge1", "n1", admission{Instance: sameInstance}, last)
		if isConflict(err) { // its own write, which the disk took long for
			s, _, err = g.Newest(context.Background(), "edge1", "n1")
		}
		if err != nil {
			b.Fatal(err)
		}
		last = s.Gen
	}
}
