package httpapi

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/iop-fabric/iop/configs"
)

func gzipOf(t testing.TB, doc string) string {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, err := io.WriteString(w, doc)
	if cerr := w.Close(); err != nil || cerr != nil {
		t.Fatal(err, cerr)
	}
	return b.String()
}

func zstdOf(t testing.TB, doc string, o ...zstd.EOption) string {
	t.Helper()
	w, err := zstd.NewWriter(nil, append([]zstd.EOption{zstd.WithEncoderConcurrency(1)}, o...)...)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	return string(w.EncodeAll([]byte(doc), nil))
}

// zstdStream is what an encoder writes that does not know the size ahead.
func zstdStream(t testing.TB, doc string, o ...zstd.EOption) string {
	t.Helper()
	var b bytes.Buffer
	w, err := zstd.NewWriter(&b, append([]zstd.EOption{zstd.WithEncoderConcurrency(1)}, o...)...)
	if err != nil {
		t.Fatal(err)
	}
	for len(doc) > 0 {
		n := min(len(doc), 100_000)
		if _, err := io.WriteString(w, doc[:n]); err != nil {
			t.Fatal(err)
		}
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
		doc = doc[n:]
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// bigChat is a request of about n bytes of text that hardly repeats.
func bigChat(n int) string {
	r := rand.New(rand.NewPCG(1, 2))
	var b strings.Builder
	b.WriteString(`{"model":"tiny","messages":[{"role":"user","content":"`)
	for b.Len() < n {
		b.WriteByte("abcdefghijklmnopqrstuvwxyz 0123456789"[r.IntN(37)])
	}
	b.WriteString(`"}]}`)
	return b.String()
}

// An encoded body is decoded once, and goes on as if it had come so.
//
// Contract: E9 T7
func TestA32EncodedBodiesAreDecoded(t *testing.T) {
	big := bigChat(3 << 19) // to a file
	for name, c := range map[string]struct{ coding, doc, body string }{
		"gzip":                     {"gzip", plainChat, gzipOf(t, plainChat)},
		"gzip by its old name":     {"x-gzip", plainChat, gzipOf(t, plainChat)},
		"in capitals":              {"GZip", plainChat, gzipOf(t, plainChat)},
		"gzip in two members":      {"gzip", plainChat, gzipOf(t, plainChat[:20]) + gzipOf(t, plainChat[20:])},
		"gzip, large":              {"gzip", big, gzipOf(t, big)},
		"zstd":                     {"zstd", plainChat, zstdOf(t, plainChat)},
		"zstd in two frames":       {"zstd", plainChat, zstdOf(t, plainChat[:20]) + zstdOf(t, plainChat[20:])},
		"zstd of unknown size":     {"zstd", plainChat, zstdStream(t, plainChat)},
		"zstd, large":              {"zstd", big, zstdOf(t, big)},
		"zstd, large, streamed":    {"zstd", big, zstdStream(t, big)},
		"zstd with a window of 8M": {"zstd", big, zstdStream(t, big, zstd.WithWindowSize(8<<20))},
		"zstd behind a skippable":  {"zstd", plainChat, "\x50\x2a\x4d\x18\x04\x00\x00\x00skip" + zstdOf(t, plainChat)},
		"identity in capitals":     {"Identity", plainChat, plainChat},
		"identity shouted":         {"IDENTITY", plainChat, plainChat},
		"identity beside it":       {"identity, zstd", plainChat, zstdOf(t, plainChat)},
		"text that repeats":        {"gzip", bigRepeat, gzipOf(t, bigRepeat)},
		"a blank picture":          {"zstd", blank, zstdOf(t, blank)},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			resp, body := f.do("POST", "/v1/responses", c.body, "Content-Encoding", c.coding, "Content-Md5", "x")
			if resp.StatusCode != 200 {
				t.Fatalf("%d %s", resp.StatusCode, body)
			}
			a := f.runner.all()[0]
			want := strings.Replace(c.doc, `"tiny"`, `"tiny:latest"`, 1)
			if a.body != want || a.BodySize != int64(len(want)) {
				t.Errorf("%d bytes, said %d, want %d", len(a.body), a.BodySize, len(want))
			}
			for _, h := range []string{"Content-Encoding", "Content-Length", "Content-Md5"} {
				if v := a.header(h); len(v) != 0 {
					t.Errorf("%s: %q", h, v)
				}
			}
			if l := f.logged(1); l["bytes_in"] != float64(len(c.body)) {
				t.Errorf("logged %v, sent %d", l["bytes_in"], len(c.body))
			}
			if n := f.held(); n != 0 {
				t.Errorf("%v bytes are still held", n)
			}
		})
	}
}

// bigRepeat is as repetitive as real text gets: a file quoted again and again.
var bigRepeat = `{"model":"tiny","messages":"` + strings.Repeat(bigChat(8000)[60:8000], 200) + `"}`

// blank is short enough to be nothing but itself again and again.
var blank = `{"model":"tiny","image":"` + strings.Repeat("A", 4<<20) + `"}`

// A body that grows is given up at once, however little of it came.
//
// Contract: E7 E9 Z3
func TestBombs(t *testing.T) {
	zeros, large := strings.Repeat("0", 9<<20), bigChat(3<<19)
	start := `{"model":"tiny","x":"`
	for name, c := range map[string]struct{ coding, body string }{
		"gzip ratio, far below":  {"gzip", gzipOf(t, start+zeros)},
		"zstd ratio, far below":  {"zstd", zstdStream(t, start+zeros)},
		"gzip over the bound":    {"gzip", gzipOf(t, large)},
		"zstd over the bound":    {"zstd", zstdStream(t, large)},
		"zstd that says so":      {"zstd", zstdOf(t, large)[:40]},
		"zstd window":            {"zstd", zstdStream(t, start+zeros[:100], zstd.WithWindowSize(16<<20))},
		"zstd window, 2nd frame": {"zstd", zstdStream(t, start) + zstdStream(t, zeros[:100], zstd.WithWindowSize(16<<20))},
		"empty gzip members":     {"gzip", strings.Repeat(gzipOf(t, ""), 3<<19/20)},
		"skippable frames":       {"zstd", zstdOf(t, start) + strings.Repeat("\x50\x2a\x4d\x18\xf8\x00\x00\x00"+strings.Repeat("s", 248), 3<<19/256)},
	} {
		t.Run(name, func(t *testing.T) {
			most := int64(1 << 20)
			if strings.HasSuffix(name, "far below") { // so that only its growth tells
				most = 64 << 20
			}
			f := newFixture(t, limits(configs.Limits{Body: most}))
			// Of no announced length, so that what comes is what tells.
			req, err := http.NewRequestWithContext(t.Context(), "POST", f.server.URL+"/v1/chat/completions", io.MultiReader(strings.NewReader(c.body)))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Authorization", "Bearer "+goodKey)
			req.Header.Set("Content-Encoding", c.coding)
			resp, err := f.client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil {
				t.Fatal(err)
			}
			body := string(b)
			f.wantError(resp, body, 413, "request_too_large")
			if n := len(f.runner.all()); n != 0 {
				t.Errorf("%d attempts", n)
			}
			f.logged(1)
			if n := f.held(); n != 0 {
				t.Errorf("%v bytes are still held", n)
			}
		})
	}
}

// A bomb is answered while most of it has not been sent.
//
// Contract: Z3
func TestABombIsNotWaitedFor(t *testing.T) {
	for coding, bomb := range map[string]string{
		"gzip": gzipOf(t, `{"model":"tiny","x":"`+strings.Repeat("0", 10<<20)),
		"zstd": zstdStream(t, `{"model":"tiny","x":"`+strings.Repeat("0", 10<<20)),
	} {
		f := newFixture(t)
		c, r := f.raw()
		io.WriteString(c, "POST /v1/messages HTTP/1.1\r\nHost: x\r\nX-Api-Key: "+goodKey+"\r\nContent-Encoding: "+coding+
			"\r\nContent-Length: 60000000\r\n\r\n"+bomb)
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		if err != nil || !resp.Close {
			t.Errorf("%s: %v, close %v", coding, err, resp.Close)
		}
		resp.Body.Close()
		f.wantAnthropic(resp, string(b), 413, "request_too_large")
	}
}

// Contract: E7 E9
func TestBodiesThatAreNotWhatTheySay(t *testing.T) {
	f := newFixture(t)
	z, g := zstdOf(t, plainChat), gzipOf(t, plainChat)
	for name, c := range map[string]struct{ coding, body string }{
		"plain as gzip":   {"gzip", plainChat},
		"plain as zstd":   {"zstd", plainChat},
		"zstd as gzip":    {"gzip", z},
		"gzip as zstd":    {"zstd", g},
		"nothing as gzip": {"gzip", ""},
		"nothing as zstd": {"zstd", ""},
		"gzip cut":        {"gzip", g[:len(g)-9]},
		"zstd cut":        {"zstd", z[:len(z)-3]},
		"zstd magic":      {"zstd", z[:4]},
		"more behind":     {"gzip", g + "more"},
		"more behind it":  {"zstd", z + "more of it"},
		"a wrong sum":     {"gzip", g[:len(g)-8] + "\x00\x00\x00\x00" + g[len(g)-4:]},
	} {
		resp, body := f.postAs(c.coding, c.body)
		if e := f.wantError(resp, body, 400, "invalid_body"); !strings.Contains(e.Message, "Content-Encoding") {
			t.Errorf("%s: %s", name, e.Message)
		}
	}
	resp, body := f.postAs("gzip", gzipOf(t, `{"model":`))
	f.wantError(resp, body, 400, "invalid_json")
	for _, coding := range []string{"br", "deflate", "gzip, zstd", "gzip,gzip", "compress", "x", "gzip;q=1"} {
		resp, body := f.postAs(coding, g)
		f.wantError(resp, body, 415, "unsupported_content_encoding")
		if v := resp.Header.Get("Accept-Encoding"); v != "gzip, zstd" {
			t.Errorf("%s: Accept-Encoding %q", coding, v)
		}
	}
	if n := len(f.runner.all()); n != 0 {
		t.Errorf("%d attempts", n)
	}
	if n := f.held(); n != 0 {
		t.Errorf("%v bytes are still held", n)
	}
}

// What a decoder holds counts against the sum of all bodies.
//
// Contract: Z3 T7
func TestAZstdWindowCountsAsHeld(t *testing.T) {
	f := newFixture(t, limits(configs.Limits{BodiesTotal: 6 << 20, Body: 5 << 20}))
	doc := bigChat(1 << 20)
	resp, body := f.postAs("zstd", zstdStream(t, doc, zstd.WithWindowSize(8<<20)))
	f.wantError(resp, body, 503, "server_busy")
	if resp, body := f.postAs("zstd", zstdStream(t, doc, zstd.WithWindowSize(4<<20))); resp.StatusCode != 200 {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
}

// Whatever comes ends in bounded memory and time, and without a panic.
func FuzzDecode(f *testing.F) {
	f.Add(true, []byte(gzipOf(f, plainChat)))
	f.Add(false, []byte(zstdOf(f, plainChat)))
	f.Add(false, []byte(zstdStream(f, plainChat)))
	f.Add(false, append([]byte{0x28, 0xb5, 0x2f, 0xfd, 0xe0}, binary.LittleEndian.AppendUint64(nil, 1<<62)...))
	f.Fuzz(func(t *testing.T, gz bool, b []byte) {
		o := &bodies{max: 1 << 20, memory: 1 << 16, total: 16 << 20, dir: t.TempDir(), log: slog.New(slog.DiscardHandler)}
		c := zstandard
		if gz {
			c = gzipped
		}
		d, err := o.decode(c, bytes.NewReader(b))
		if err == nil {
			n, _ := io.Copy(io.Discard, io.LimitReader(d, 16<<20))
			if n > ratioFloor && n/maxRatio > int64(len(b)) {
				t.Errorf("%d bytes became %d", len(b), n)
			}
		}
		d.close()
		if n := o.held.Load(); n != 0 {
			t.Errorf("%d bytes are still held", n)
		}
	})
}

func (f *fixture) postAs(coding, body string) (*http.Response, string) {
	f.Helper()
	return f.do("POST", "/v1/chat/completions", body, "Content-Encoding", coding)
}

// held is what the bodies' sum says is held.
func (f *fixture) held() float64 { return testutil.ToFloat64(f.gauge()) }

func BenchmarkEncodedBody(b *testing.B) {
	doc := bigChat(76 << 10)
	for name, c := range map[string]struct{ coding, body string }{
		"gzip": {"gzip", gzipOf(b, doc)}, "zstd": {"zstd", zstdOf(b, doc)},
	} {
		b.Run(name, func(b *testing.B) { benchmarkAs(b, "/v1/messages", c.body, 1, "Content-Encoding", c.coding) })
	}
}
