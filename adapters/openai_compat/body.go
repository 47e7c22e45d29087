package openai_compat

import (
	"errors"
	"io"
	"sync"
	"sync/atomic"
)

var (
	errBodyEnded  = errors.New("the request body ended before its announced size")
	errBodyClosed = errors.New("the exchange is over")
)

// maxKept bounds what is kept of a body that may have to be sent again. The
// transport reads a few KiB before it writes.
const maxKept = 64 << 10

// body is a request's body over all attempts. It gives exactly its size, and
// can start anew as long as nothing was written.
type body struct {
	closed atomic.Bool
	fault  atomic.Pointer[error] // what was wrong with src

	mu   sync.Mutex // held while src is read
	src  io.Reader
	left int64       // of src
	kept []byte      // what was read before anything was written
	lost bool        // kept is not all that was read
	sent func() bool // whether the present attempt wrote anything
}

// reader is the body as one attempt's transport reads it.
type reader struct {
	b   *body
	pos int // in b.kept
}

func (b *body) reader(sent func() bool) *reader {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sent = sent
	return &reader{b: b}
}

// rewindable reports whether a further attempt can have the whole body. The
// attempt before has ended.
func (b *body) rewindable() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.lost && b.fault.Load() == nil
}

func (r *reader) Read(p []byte) (int, error) {
	b := r.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		return 0, errBodyClosed
	}
	if r.pos < len(b.kept) {
		n := copy(p, b.kept[r.pos:])
		r.pos += n
		return n, nil
	}
	if f := b.fault.Load(); f != nil {
		return 0, *f
	}
	if b.left == 0 {
		return 0, io.EOF
	}
	n, err := b.src.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	b.keep(p[:n])
	r.pos = len(b.kept)
	if b.left == 0 {
		return n, nil // whatever err is: the body is whole
	}
	if err == io.EOF {
		err = errBodyEnded
	}
	if err != nil {
		b.fault.Store(&err)
	}
	return n, err
}

func (b *body) keep(p []byte) {
	switch {
	case b.lost || len(p) == 0:
	case b.sent() || len(b.kept)+len(p) > maxKept:
		b.lost, b.kept = true, nil
	default:
		b.kept = append(b.kept, p...)
	}
}

// Close is the transport's at the end of an attempt; the exchange ends the body.
func (r *reader) Close() error { return nil }

// interrupt ends a Read of the source that waits, where the source can be closed.
func (b *body) interrupt() {
	if c, ok := b.src.(io.Closer); ok {
		_ = c.Close() // nothing more is read of it, so its error has no bearing
	}
}

// end lets no further Read of the source begin. One under way has ended too
// when end returns, if the source can be closed; another might wait for ever.
func (b *body) end() {
	b.closed.Store(true)
	if _, ok := b.src.(io.Closer); ok {
		b.interrupt()
		b.mu.Lock()
		b.mu.Unlock() //nolint:staticcheck // the Read that held it has returned
	}
}
