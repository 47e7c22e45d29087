package openai_compat

import (
	"bytes"
	"errors"
	"io"
	"sync"
	"sync/atomic"
)

var (
	errBodyEnded  = errors.New("the request body ended before its announced size")
	errBodyClosed = errors.New("the exchange is over")
)

// maxLoaded is how large a body is read before anything is sent: it then leaves
// in one write with its headers, and can be sent again.
const maxLoaded = 64 << 10

// body is a request's body over all attempts. It gives exactly its size.
type body struct {
	size   int64
	loaded []byte // all of it, if it is small

	touched atomic.Bool // src was read, so no further attempt can have all of it
	closed  atomic.Bool
	fault   atomic.Pointer[error] // what was wrong with src

	mu   sync.Mutex // held while src is read
	src  io.Reader
	left int64 // of src
}

func newBody(src io.Reader, size int64) *body { return &body{src: src, size: size, left: size} }

// load reads a small body whole.
func (b *body) load() error {
	if b.size > maxLoaded {
		return nil
	}
	p := make([]byte, b.size)
	if _, err := io.ReadFull(b, p); err != nil {
		return err
	}
	b.loaded = p
	return nil
}

// reader is the body for one attempt. net/http writes the headers of a body it
// does not know ahead of it, so a connection that died idle is met before the
// source is read.
func (b *body) reader() io.ReadCloser {
	if b.loaded != nil {
		return io.NopCloser(bytes.NewReader(b.loaded))
	}
	return io.NopCloser(b)
}

// again reports whether a further attempt can have the whole body.
func (b *body) again() bool { return b.loaded != nil || !b.touched.Load() }

func (b *body) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		return 0, errBodyClosed
	}
	if b.left == 0 {
		return 0, io.EOF
	}
	b.touched.Store(true)
	n, err := b.src.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
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
