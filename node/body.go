package node

import (
	"context"
	"io"
	"sync"
	"time"

	"github.com/iop-fabric/iop/wire"
)

// bodyBound is how long nothing of a request's body may come while the exchange waits
// for it, or the heartbeat bound, where that is longer. An Edge that still has something
// to send repeats it sooner than that, asks for credit no more seldom than every eight
// seconds, and repeats the request where the body waits for its turn on a narrow link;
// one that gave up has sent a cancel, which may be lost.
const bodyBound = 10 * time.Second

var errBodySilent = wire.Errorf(wire.Protocol, "nothing came of the request's body for too long")

var errBodyCut = wire.Errorf(wire.Cancelled, "the request's body ended before its announced size")

// bodyReader hands the request's body to the exchange as it arrives. It holds no
// more than the window lets the peer send (J7).
type bodyReader struct {
	ctx      context.Context //nolint:containedctx // an io.Reader has no other way to be interrupted
	watch    *watch          // off while a Read waits: it is Edge that owes
	run      runner
	bound    time.Duration
	consumed func(frame int)
	more     chan struct{}

	mu     sync.Mutex
	frames [][]byte
	left   int64  // of the announced size, still to be delivered
	cur    []byte // what is left of the frame being read
	size   int    // of that frame
	err    error  // after the frames: io.EOF, or why there is no more
	closed bool
	waits  bool      // a Read does
	came   time.Time // the last frame, or when waits was set last
}

func newBodyReader(ctx context.Context, w *watch, run runner, bound time.Duration, size int64, consumed func(int)) *bodyReader {
	return &bodyReader{ctx: ctx, watch: w, run: run, bound: bound, left: size, consumed: consumed, more: make(chan struct{}, 1)}
}

// Read implements io.Reader.
func (r *bodyReader) Read(p []byte) (int, error) {
	for {
		r.mu.Lock()
		if len(r.cur) > 0 {
			n := copy(p, r.cur)
			r.cur = r.cur[n:]
			done := len(r.cur) == 0
			r.mu.Unlock()
			if done {
				r.consumed(r.size)
			}
			return n, nil
		}
		if len(r.frames) > 0 {
			r.cur, r.frames[0] = r.frames[0], nil
			r.frames = r.frames[1:]
			r.size = len(r.cur)
			r.mu.Unlock()
			continue
		}
		err := r.err
		r.mu.Unlock()
		if err != nil {
			return 0, err
		}
		if err := r.wait(); err != nil {
			return 0, err
		}
	}
}

// wait waits for more of the body.
func (r *bodyReader) wait() error {
	r.watch.pause()
	defer r.watch.resume()
	r.setWaits(true)
	defer r.setWaits(false)
	if r.run.wait(r.ctx, r.more) {
		return nil
	}
	return context.Cause(r.ctx)
}

func (r *bodyReader) setWaits(on bool) {
	r.mu.Lock()
	r.waits, r.came = on, r.run.now()
	r.mu.Unlock()
}

// frame notes that one came, whatever becomes of it, or that the request did again.
func (r *bodyReader) frame(now time.Time) {
	r.mu.Lock()
	r.came = now
	r.mu.Unlock()
}

// look says when to look again, and whether the body has fallen silent while a Read
// waits for it; zero: never again.
func (r *bodyReader) look(now time.Time) (next time.Time, silent bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch next = r.came.Add(r.bound); {
	case r.closed || r.err != nil:
		return time.Time{}, false
	case !r.waits:
		return now.Add(r.bound), false
	default:
		return next, due(now, next)
	}
}

// deliver appends the next frame. It reports whether the frame was kept, to be
// reported as consumed once it was read, and what is wrong with the body: a Read
// learns that from close only, once the exchange's context has its cause.
func (r *bodyReader) deliver(f bodyFrame) (kept bool, err *wire.Error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.closed:
		return false, nil
	case f.failed != "":
		return false, errBodyCut
	case int64(len(f.data)) > r.left, f.last && int64(len(f.data)) != r.left:
		return false, errBodyTooLarge
	}
	r.left -= int64(len(f.data))
	if len(f.data) > 0 {
		r.frames, kept = append(r.frames, f.data), true
	}
	if f.last {
		r.err = io.EOF
	}
	r.wake()
	return kept, nil
}

// close drops what was not read; what still arrives is dropped too.
func (r *bodyReader) close(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed, r.frames, r.cur = true, nil, nil
	if r.err == nil {
		r.err = err
	}
	r.wake()
}

// Close implements io.Closer: an adapter that is done with the body says so, and a
// Read that waits ends.
func (r *bodyReader) Close() error {
	r.close(io.ErrClosedPipe)
	return nil
}

func (r *bodyReader) wake() {
	select {
	case r.more <- struct{}{}:
	default:
	}
}
