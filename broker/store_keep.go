package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

const (
	// storeCheck is how often it is tried whether a store that could not be written
	// can be written again, and storeRoom how much room it must have by then.
	storeCheck = time.Second
	storeRoom  = 1 << 20
)

// keepStore waits for the server to say that its store takes nothing any more,
// which a full disk makes it say. Sessions go on without. A broker alone admits
// nobody new; the server would not look again, so once there is room the store is
// opened anew. One of a cluster leaves its stores to the others, or what it leads
// would stand still for all; while they ask it things it cannot be opened again,
// so it comes back with its next start.
func (b *Broker) keepStore(ctx context.Context, srv *server.Server, opts *server.Options, broken chan string) {
	for {
		var line string
		select {
		case line = <-broken:
		case <-ctx.Done():
			return
		}
		err := fmt.Errorf("the store cannot be written, its disk is full or broken: %s", line)
		if b.alone {
			b.health.setStore(err)
		} else {
			err = fmt.Errorf("%w; restart this broker once there is room", err)
		}
		b.log.Error(eventStoreFull, slog.String("store_dir", b.cfg.StoreDir), slog.String("error", err.Error()))
		if !b.alone {
			if err := srv.ShutdownJetStream(); err != nil {
				b.log.Warn(eventFault, slog.String("operation", "store"), slog.String("error", err.Error()))
			}
			return
		}
		if !b.reopenStore(ctx, srv, opts) {
			return
		}
		select {
		case <-broken: // of the store as it was
		default:
		}
		b.health.setStore(nil)
		b.log.Info(eventResumed)
	}
}

// reopenStore returns once the store is open again; false: ctx ended first.
func (b *Broker) reopenStore(ctx context.Context, srv *server.Server, opts *server.Options) bool {
	tick := time.NewTicker(storeCheck)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return false
		}
		if checkRoom(b.cfg.StoreDir) != nil {
			continue
		}
		b.storeOpen.Lock()
		err := srv.ShutdownJetStream()
		if err == nil {
			err = srv.EnableJetStream(&server.JetStreamConfig{
				StoreDir: opts.StoreDir, SyncInterval: opts.SyncInterval, SyncAlways: opts.SyncAlways,
				MaxMemory: opts.JetStreamMaxMemory, MaxStore: opts.JetStreamMaxStore, CompressOK: true, Strict: !opts.NoJetStreamStrict,
			})
		}
		b.storeOpen.Unlock()
		if err == nil {
			return true
		}
		b.log.Warn(eventFault, slog.String("operation", "store"), slog.String("error", err.Error()))
	}
}

// checkRoom writes and syncs a file in the store's folder, and takes it away.
func checkRoom(dir string) error {
	name := filepath.Join(dir, ".room")
	f, err := os.OpenFile(filepath.Clean(name), os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(make([]byte, storeRoom))
	return errors.Join(err, f.Sync(), f.Close(), os.Remove(name))
}
