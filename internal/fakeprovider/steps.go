package fakeprovider

import (
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
)

// Exchange is a request while its script runs.
type Exchange struct {
	Request  *Request
	link     *link
	watched  chan error // what ended the quiet after the request; nil: the body was not read yet
	bodyRead bool
}

// Step is one thing a script does. An error ends script and connection.
type Step func(*Exchange) error

// Raw writes exactly s, in one write.
func Raw(s string) Step {
	return func(x *Exchange) error {
		if _, err := x.link.c.Write([]byte(s)); err != nil {
			return fmt.Errorf("write: %w", err)
		}
		return nil
	}
}

// Split writes exactly s, size bytes per write.
func Split(size int, s string) Step {
	return func(x *Exchange) error {
		for len(s) > 0 {
			n := min(size, len(s))
			if err := Raw(s[:n])(x); err != nil {
				return err
			}
			s = s[n:]
		}
		return nil
	}
}

// Head writes a status line and header lines ("Name: value"), raw.
func Head(status int, lines ...string) Step {
	var b strings.Builder
	fmt.Fprintf(&b, "HTTP/1.1 %d %s\r\n", status, http.StatusText(status))
	for _, l := range lines {
		b.WriteString(l + "\r\n")
	}
	b.WriteString("\r\n")
	return Raw(b.String())
}

// Chunk writes one chunk of a chunked body.
func Chunk(s string) Step { return Raw(chunk(s)) }

// LastChunk ends a chunked body, with trailer lines if given.
func LastChunk(trailers ...string) Step { return Raw(lastChunk(trailers...)) }

func chunk(s string) string { return strconv.FormatInt(int64(len(s)), 16) + "\r\n" + s + "\r\n" }

func lastChunk(trailers ...string) string {
	s := "0\r\n"
	for _, l := range trailers {
		s += l + "\r\n"
	}
	return s + "\r\n"
}

// Wait goes on when ch is closed or yields. The peer's leaving, or the
// provider's end, ends the script.
func Wait(ch <-chan struct{}) Step {
	return func(x *Exchange) error {
		select {
		case <-ch:
			return nil
		case <-x.link.gone:
			return errOver
		case <-x.link.p.done:
			return errOver
		}
	}
}

// Tell closes ch: the script has come this far. It can be used once.
func Tell(ch chan<- struct{}) Step {
	return func(*Exchange) error {
		close(ch)
		return nil
	}
}

// Hang writes nothing more until the peer leaves or the provider ends.
func Hang() Step { return Wait(nil) }

// Close closes the connection in order (FIN).
func Close() Step { return func(*Exchange) error { return errOver } }

// Reset breaks the connection (RST).
func Reset() Step {
	return func(x *Exchange) error {
		if tcp, ok := x.link.c.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0) // then the close in order must do
		}
		return errOver
	}
}

// ReadBody reads the body where the script began early.
func ReadBody() Step {
	return func(x *Exchange) error {
		if err := x.readBody(); err != nil {
			return err
		}
		x.watch()
		return nil
	}
}

// JSON answers status and body with an exact Content-Length; lines are further
// header lines, such as "Retry-After: 7".
func JSON(status int, body string, lines ...string) []Step {
	lines = append([]string{"Content-Type: application/json", "Content-Length: " + strconv.Itoa(len(body))}, lines...)
	return []Step{Head(status, lines...), Raw(body)}
}

// SSE answers 200 with a chunked event stream, one chunk for each of events,
// as they are ("data: {}\n\n").
func SSE(events ...string) []Step {
	steps := []Step{SSEHead()}
	for _, e := range events {
		steps = append(steps, Chunk(e))
	}
	return append(steps, LastChunk())
}

// SSEHead begins a chunked event stream.
func SSEHead(lines ...string) Step {
	return Head(200, append([]string{"Content-Type: text/event-stream", "Transfer-Encoding: chunked"}, lines...)...)
}
