package httpapi

import (
	"bufio"
	"compress/gzip"
	"errors"
	"io"
	"net/http"
	"strings"

	"github.com/klauspost/compress/zstd"
)

// coding is how a request's body is encoded (E9).
type coding uint8

const (
	identity coding = iota
	gzipped
	zstandard
)

// acceptedCodings is what an answer to any other coding names (RFC 9110, 15.5.16).
const acceptedCodings = "gzip, zstd"

const (
	// maxRatio is how many bytes one encoded byte may become, once a body is
	// longer than ratioFloor. Text reaches a tenth of it; a short body that only
	// repeats itself is left alone.
	maxRatio   = 200
	ratioFloor = 8 << 20
	// maxWindow is how far back zstd may refer (RFC 9659). The window is held in
	// memory, so it counts as a part of the body while it is decoded.
	maxWindow = 8 << 20
	minWindow = 1 << 20
)

var (
	errRatio  = errors.New("the body grows too much when it is decoded")
	errWindow = errors.New("the body's zstd window is larger than 8 MiB")
	errLarge  = errors.New("the body is too large")
	errNoRoom = errors.New("too many bodies are being held")
)

// codingOf reads Content-Encoding. More than one coding is none of ours.
func codingOf(h http.Header) (c coding, ok bool) {
	for _, v := range h["Content-Encoding"] {
		for name := range strings.SplitSeq(v, ",") {
			var this coding
			switch strings.ToLower(strings.TrimSpace(name)) {
			case "", "identity":
				continue
			case "gzip", "x-gzip":
				this = gzipped
			case "zstd":
				this = zstandard
			default:
				return identity, false
			}
			if c != identity {
				return identity, false
			}
			c = this
		}
	}
	return c, true
}

// decoded reads a body that came encoded, and gives up at once on one that is
// larger than it may be, however little of it was sent.
type decoded struct {
	owner  *bodies
	source counted
	reader io.Reader
	zstd   *zstd.Decoder
	out    int64
	window int64 // taken of the owner's sum
}

// counted counts what was read and bounds it: encoded bytes need not decode to
// anything.
type counted struct {
	r    io.Reader
	n    int64
	most int64
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	if c.n += int64(n); c.n > c.most {
		return n, errLarge
	}
	return n, err
}

// decode begins to decode r. close must follow, also after an error.
func (o *bodies) decode(c coding, r io.Reader) (*decoded, error) {
	d := &decoded{owner: o, source: counted{r: r, most: o.max}}
	var err error
	if c == gzipped {
		var z *gzip.Reader
		if z, err = gzip.NewReader(&d.source); err == nil {
			d.reader = z
		}
	} else {
		err = d.openZstd()
	}
	return d, noEnd(err)
}

// openZstd looks at the first frame's head for what it will take. Later frames
// may not take more.
func (d *decoded) openZstd() error {
	br := bufio.NewReader(&d.source)
	head, err := br.Peek(zstd.HeaderMaxSize)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	var h zstd.Header
	if err := h.Decode(head); err != nil {
		return err
	}
	window := h.WindowSize
	switch {
	case h.Skippable:
		window = maxWindow
	case h.SingleSegment:
		window = h.FrameContentSize
	}
	switch {
	case h.HasFCS && h.FrameContentSize > uint64(d.owner.max): //nolint:gosec // a bound is positive
		return errLarge
	case window > maxWindow:
		return errWindow
	}
	window = max(window, minWindow)
	if d.owner.held.Add(int64(window)) > d.owner.total { //nolint:gosec // at most maxWindow
		d.owner.held.Add(-int64(window)) //nolint:gosec // at most maxWindow
		return errNoRoom
	}
	d.window = int64(window) //nolint:gosec // at most maxWindow
	d.zstd, err = zstd.NewReader(br, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(window))
	d.reader = d.zstd
	return err
}

// Read implements io.Reader.
func (d *decoded) Read(p []byte) (int, error) {
	n, err := d.reader.Read(p)
	d.out += int64(n)
	switch {
	case d.source.n > d.source.most:
		return 0, errLarge // whatever the decoder made of it
	case d.out > ratioFloor && d.out/maxRatio > d.source.n:
		return 0, errRatio
	default:
		return n, err
	}
}

func (d *decoded) close() {
	if d.zstd != nil {
		d.zstd.Close()
	}
	d.owner.held.Add(-d.window)
	d.window = 0
}

// noEnd turns the end of a body where a head should be into a broken one.
func noEnd(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
