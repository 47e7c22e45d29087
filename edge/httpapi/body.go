package httpapi

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"

	"github.com/klauspost/compress/zstd"
)

const (
	// firstRead is what a body may occupy before its first byte came, so that a
	// caller who only declares a large one costs nothing.
	firstRead = 16 << 10
	// spoolRead is the size of the reads that go to a file.
	spoolRead = 64 << 10
)

// bodies bounds what all held request bodies take together (T7).
type bodies struct {
	max    int64 // one body
	memory int64 // one body's part in memory
	total  int64 // all of them
	dir    string
	log    *slog.Logger
	held   atomic.Int64
}

// body is one request's body, whole: in memory, or in a file without a name.
type body struct {
	owner *bodies
	mem   []byte
	file  *os.File
	name  string // of a file that could not be removed while open
	size  int64
	taken int64 // of the owner's sum
}

// read reads r to its end, so that net/http watches the connection for the
// caller's leaving from then on. Each piece also goes to see. On failure
// everything is given back.
func (o *bodies) read(ctx context.Context, r io.Reader, declared int64, see func([]byte)) (*body, reason) {
	if declared > o.max {
		return nil, tooLarge
	}
	b := &body{owner: o}
	why := b.fill(ctx, r, declared, see)
	if why != "" {
		b.close()
		return nil, why
	}
	return b, ""
}

func (b *body) fill(ctx context.Context, r io.Reader, declared int64, see func([]byte)) reason {
	limit := min(b.owner.memory, b.owner.max)
	size := int64(firstRead)
	if declared >= 0 {
		size = min(size, declared+1) // and one more, for a reader that ends late
	}
	b.mem = make([]byte, 0, max(min(size, limit+1), 1))
	for {
		if len(b.mem) == cap(b.mem) {
			if int64(len(b.mem)) > limit {
				break
			}
			grown := make([]byte, len(b.mem), min(4*int64(cap(b.mem)), limit+1))
			copy(grown, b.mem)
			b.mem = grown
		}
		n, err := r.Read(b.mem[len(b.mem):cap(b.mem)])
		piece := b.mem[len(b.mem) : len(b.mem)+n]
		b.mem = b.mem[:len(b.mem)+n]
		if why := b.account(piece, see); why != "" {
			return why
		}
		if err != nil {
			return readFailure(ctx, err)
		}
	}
	return b.spool(ctx, r, see)
}

// spool moves the body to a file and reads the rest into it.
func (b *body) spool(ctx context.Context, r io.Reader, see func([]byte)) reason {
	f, err := os.CreateTemp(b.owner.dir, "iop-body-*")
	if err != nil {
		return b.owner.noRoom(ctx, err)
	}
	b.file = f
	if os.Remove(f.Name()) != nil {
		b.name = f.Name() // a system that keeps open files' names: close removes it
	}
	if _, err := f.Write(b.mem); err != nil {
		return b.owner.noRoom(ctx, err)
	}
	b.mem = nil
	buf := make([]byte, spoolRead)
	for {
		n, err := r.Read(buf)
		if why := b.account(buf[:n], see); why != "" {
			return why
		}
		if _, err := f.Write(buf[:n]); err != nil {
			return b.owner.noRoom(ctx, err)
		}
		if err != nil {
			return readFailure(ctx, err)
		}
	}
}

// noRoom tells the operator which folder takes no body; the caller hears only that it is
// to come again.
func (o *bodies) noRoom(ctx context.Context, err error) reason {
	dir := o.dir
	if dir == "" {
		dir = os.TempDir()
	}
	if why := errors.Unwrap(err); why != nil {
		err = why // without the file's own name
	}
	o.log.LogAttrs(ctx, slog.LevelWarn, EventSpoolFailed, slog.String(keyDir, dir), slog.String("error", err.Error()))
	return bodiesFull
}

// account counts a piece against both bounds and shows it.
func (b *body) account(piece []byte, see func([]byte)) reason {
	n := int64(len(piece))
	if b.size += n; b.size > b.owner.max {
		return tooLarge
	}
	if b.owner.held.Add(n) > b.owner.total {
		b.owner.held.Add(-n)
		return bodiesFull
	}
	b.taken += n
	see(piece)
	return ""
}

// readFailure says what the end of reading means.
func readFailure(ctx context.Context, err error) reason {
	switch {
	case err == io.EOF: //nolint:errorlint // a reader's end is io.EOF itself
		return ""
	case errors.Is(err, errRatio), errors.Is(err, errLarge), errors.Is(err, errWindow), errors.Is(err, zstd.ErrWindowSizeExceeded):
		return tooLarge
	case errors.Is(err, errNoRoom):
		return bodiesFull
	case errors.Is(err, os.ErrDeadlineExceeded):
		return slowBody
	case ctx.Err() != nil:
		return cancelled(ctx)
	default:
		return badBody
	}
}

// close gives everything back. A second one does nothing.
func (b *body) close() {
	b.owner.held.Add(-b.taken)
	b.taken, b.mem = 0, nil
	if b.file == nil {
		return
	}
	_ = b.file.Close() // only read since; nothing to lose
	if b.name != "" {
		_ = os.Remove(b.name)
	}
	b.file = nil
}

// section returns a reader of the bytes from start to end.
func (b *body) section(start, end int64) io.Reader {
	if b.file != nil {
		return io.NewSectionReader(b.file, start, end-start)
	}
	return bytes.NewReader(b.mem[start:end])
}

// naming returns the body with the model's name replaced, and its exact size.
// The reader shares the body's bytes; each call starts anew.
func (b *body) naming(n named, target string) (io.Reader, int64) {
	if target == n.model {
		return b.section(0, b.size), b.size
	}
	name := quote(target)
	size := b.size - (n.end - n.start) + int64(len(name))
	if b.file == nil {
		return &spliced{parts: [3][]byte{b.mem[:n.start], []byte(name), b.mem[n.end:]}}, size
	}
	return io.MultiReader(b.section(0, n.start), strings.NewReader(name), b.section(n.end, b.size)), size
}

// spliced reads three pieces in a row, as many bytes at a time as fit.
type spliced struct {
	parts [3][]byte
	at    int
}

func (s *spliced) Read(p []byte) (n int, err error) {
	for s.at < len(s.parts) {
		m := copy(p[n:], s.parts[s.at])
		n += m
		if s.parts[s.at] = s.parts[s.at][m:]; len(s.parts[s.at]) > 0 {
			return n, nil
		}
		s.at++
	}
	if n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	return n, nil
}
