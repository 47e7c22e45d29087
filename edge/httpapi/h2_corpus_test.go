package httpapi

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"strconv"
	"testing"
	"time"

	"golang.org/x/net/http2/hpack"

	"github.com/iop-fabric/iop/configs"
)

// h2Send writes one request in frames of its own making and tells what became of
// it: the status of an answer, "refused", or "refused" for the whole connection.
func (f *fixture) h2Send(head [][2]string, data string) string {
	f.Helper()
	c, err := tls.Dial("tcp", f.server.Listener.Addr().String(), &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	if err != nil {
		f.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(hang)); err != nil {
		f.Fatal(err)
	}
	var out, block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	for _, h := range head {
		if err := enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]}); err != nil {
			f.Fatal(err)
		}
	}
	out.WriteString("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	h2Frame(&out, h2Settings, 0, 0, nil)
	kind, first := byte(h2Headers), true
	for b := block.Bytes(); first || len(b) > 0; kind, first = h2Continuation, false {
		n := min(len(b), h2MaxFrame)
		flags := byte(0)
		if n == len(b) {
			flags = h2EndHeaders
		}
		h2Frame(&out, kind, flags, 1, b[:n])
		b = b[n:]
	}
	h2Frame(&out, h2Data, h2EndStream, 1, []byte(data))
	go func() { _, _ = c.Write(out.Bytes()) }() // who is refused early need not be read
	dec := hpack.NewDecoder(4096, nil)
	for head := make([]byte, 9); ; {
		if _, err := io.ReadFull(c, head); err != nil {
			return "refused"
		}
		payload := make([]byte, binary.BigEndian.Uint32(head)>>8)
		if _, err := io.ReadFull(c, payload); err != nil {
			return "refused"
		}
		switch head[3] {
		case h2Headers:
			fields, err := dec.DecodeFull(payload)
			if err != nil {
				f.Fatal(err)
			}
			return fields[0].Value
		case h2Reset:
			return "refused"
		case h2GoAway:
			return "refused"
		}
	}
}

const (
	h2Data, h2Headers, h2Reset, h2Settings, h2GoAway, h2Continuation = 0, 1, 3, 4, 7, 9

	h2EndStream, h2EndHeaders = 1, 4
	h2MaxFrame                = 16 << 10
)

// h2Frame writes a frame of HTTP/2.
func h2Frame(w *bytes.Buffer, kind, flags byte, stream uint32, payload []byte) {
	w.Write(binary.BigEndian.AppendUint32(nil, uint32(len(payload)))[1:])
	w.Write([]byte{kind, flags})
	w.Write(binary.BigEndian.AppendUint32(nil, stream))
	w.Write(payload)
}

// What HTTP/1 could be made of a request of HTTP/2 is never asked: a head that
// says otherwise than its frames is none.
// Contract: Z3 E11
func TestHTTP2HeadsThatAreNone(t *testing.T) {
	f := newH2(t, configs.Limits{})
	f.runner.answer = says(200, nil, "{}")
	usual := func(path string) [][2]string {
		return [][2]string{{":method", "POST"}, {":scheme", "https"}, {":authority", "x"}, {":path", path}, {"authorization", "Bearer " + goodKey}}
	}
	chat := func(more ...[2]string) [][2]string { return append(usual("/v1/chat/completions"), more...) }
	length := func(n int) [2]string { return [2]string{"content-length", strconv.Itoa(n)} }
	n := len(plainChat)
	for name, c := range map[string]struct {
		head [][2]string
		want string
	}{
		"as it should be":         {chat(length(n)), "200"},
		"without a length":        {chat(), "200"},
		"shorter than it says":    {chat(length(n + 1)), "400"},
		"longer than it says":     {chat(length(n - 1)), "refused"},
		"two lengths":             {chat(length(n), length(n-1)), "200"}, // the first is right, and goes no further
		"a length that is none":   {chat([2]string{"content-length", "+5"}), "refused"},
		"chunked":                 {chat([2]string{"transfer-encoding", "chunked"}), "400"},
		"connection":              {chat([2]string{"connection", "x-secret"}), "400"},
		"upgrade":                 {chat([2]string{"upgrade", "websocket"}), "400"},
		"te":                      {chat([2]string{"te", "gzip"}), "400"},
		"capitals":                {chat([2]string{"X-A", "b"}), "refused"},
		"a line end in a value":   {chat([2]string{"x-a", "b\r\nc: d"}), "refused"},
		"a line end in a name":    {chat([2]string{"x\r\na", "b"}), "refused"},
		"NUL":                     {chat([2]string{"x-a", "b\x00"}), "refused"},
		"a pseudo header behind":  {chat([2]string{":path", "/v1/models"}), "refused"},
		"an unknown one":          {append([][2]string{{":x", "y"}}, usual("/v1/chat/completions")...), "refused"},
		"no path":                 {usual(""), "refused"},
		"a path that is a URL":    {usual("http://evil/v1/chat/completions"), "421"},
		"a path without a slash":  {usual("v1/chat/completions"), "refused"},
		"a path with a line end":  {usual("/v1/chat/completions\r\nx: y"), "refused"},
		"dots":                    {usual("/v1/x/../chat/completions"), "404"},
		"the answer's id is ours": {chat([2]string{"x-request-id", "a b"}), "200"},
		"a large head":            {chat([2]string{"x-a", string(bytes.Repeat([]byte("a"), 100<<10))}), "refused"},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fixture{T: t, server: f.server}
			if got := f.h2Send(c.head, plainChat); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
	for _, a := range f.runner.all() {
		if want := fmt.Sprint(len(a.body)); a.BodySize != int64(len(a.body)) || len(a.header("X-A")) != 0 {
			t.Errorf("%s bytes, said %d, %v", want, a.BodySize, a.Header)
		}
	}
	if n := len(f.runner.all()); n != 4 {
		t.Errorf("%d attempts", n)
	}
}
