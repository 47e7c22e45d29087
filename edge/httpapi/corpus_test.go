package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/iop-fabric/iop/configs"
	"github.com/iop-fabric/iop/edge/dispatch"
	"github.com/iop-fabric/iop/wire"
)

// errorKind reads an answer of ours in either dialect: OpenAI's code, or
// Anthropic's type with a colon before it.
func errorKind(body []byte) string {
	var e struct {
		Type  string `json:"type"`
		Error struct {
			Code string `json:"code"`
			Type string `json:"type"`
		} `json:"error"`
	}
	switch {
	case json.Unmarshal(body, &e) != nil:
		return ""
	case e.Type == "error":
		return ":" + e.Error.Type
	default:
		return e.Error.Code
	}
}

// send writes bytes on a connection of its own and reads one answer. rest is what
// comes after it until the connection ends; closed without an end it is "open".
func (f *fixture) send(request string) (status int, kind, rest string) {
	f.Helper()
	c, r := f.raw()
	if _, err := io.WriteString(c, request); err != nil {
		f.Fatal(err)
	}
	resp, err := http.ReadResponse(r, nil)
	for err == nil && resp.StatusCode == 100 {
		resp, err = http.ReadResponse(r, nil)
	}
	if err != nil {
		f.Fatalf("%.80q: %v", request, err)
	}
	b, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil {
		f.Fatal(err)
	}
	if !resp.Close {
		return resp.StatusCode, errorKind(b), "open"
	}
	after, _ := io.ReadAll(r)
	return resp.StatusCode, errorKind(b), string(after)
}

// The route is matched on the path as it was spelt: what another reader could
// take for a route is none.
// Contract: Z2 Z3 E7
func TestPathsThatAreNoRoutes(t *testing.T) {
	f := newFixture(t)
	for path, kind := range map[string]string{
		"/v1/./chat/completions":                     "unknown_path",
		"/v1/x/../chat/completions":                  "unknown_path",
		"/v1/%2e%2e/v1/chat/completions":             "unknown_path",
		"/v1/%2E%2E/chat/completions":                "unknown_path",
		"/v1/%252e%252e/chat/completions":            "unknown_path",
		"/v1/chat%2Fcompletions":                     "unknown_path",
		"/v1%2fchat%2fcompletions":                   "unknown_path",
		`/v1\chat\completions`:                       "unknown_path",
		`/v1/chat\..\completions`:                    "unknown_path",
		"/v1/chat//completions":                      "unknown_path",
		"//v1/chat/completions":                      "unknown_path",
		"///v1/chat/completions":                     "unknown_path",
		"/v1/chat/completions/":                      "unknown_path",
		"/v1/chat/completions;a=b":                   "unknown_path",
		"/v1/chat/completions%00":                    "unknown_path",
		"/v1/chat/completions%0d%0aX:1":              "unknown_path",
		"/v1/chat/completions%20":                    "unknown_path",
		"/v1/Chat/Completions":                       "unknown_path",
		"/v1/ch%61t/completions":                     "unknown_path",
		"/v1/chat/completions%3fa":                   "unknown_path",
		"/" + strings.Repeat("a", 4<<10):             "unknown_path",
		"/v1/messages/../chat/completions":           ":not_found_error",
		"/v1/messages/%2e%2e/models":                 ":not_found_error",
		"/v1/messages/":                              ":not_found_error",
		"/v1/messages/count_tokens/":                 ":not_found_error",
		"/v1/messagesx":                              "unknown_path",
		"/v1/models/../chat/completions":             "method_not_allowed",
		"/v1/models/" + strings.Repeat("%2e%2e/", 9): "method_not_allowed",
	} {
		want := 404
		if kind == "method_not_allowed" {
			want = 405 // an id of a model, whatever stands in it, is only looked up
		}
		status, got, _ := f.send("POST " + path + " HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + goodKey + "\r\nContent-Length: 2\r\n\r\n{}")
		if status != want || got != kind {
			t.Errorf("%.60s: %d %q, want %d %q", path, status, got, want, kind)
		}
	}
	for _, id := range []string{"../chat/completions", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "%00", "a%0d%0ab"} {
		if status, got, _ := f.send("GET /v1/models/" + id + " HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + goodKey + "\r\n\r\n"); status != 404 || got != "model_not_found" {
			t.Errorf("%s: %d %q", id, status, got)
		}
	}
	// What is no path at all net/http refuses itself.
	for _, path := range []string{"v1/models", "/v1/mod els", "/v1/\x00", "/v1/%zz", "/v1/%", "*"} {
		c, r := f.raw()
		fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n", path, goodKey)
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != 400 && resp.StatusCode != 404 {
			t.Errorf("%q: %d", path, resp.StatusCode)
		}
	}
	if n := len(f.runner.all()); n != 0 {
		t.Errorf("%d attempts", n)
	}
}

// Where a request's end could be read in two ways, or its body was left, nothing
// that follows on the connection is read as another one.
// Contract: Z3
func TestNothingIsReadBehindWhatIsAmbiguous(t *testing.T) {
	f := newFixture(t)
	const next = "GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + goodKey + "\r\n\r\n"
	head := "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + goodKey + "\r\n"
	wrong := "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer nope\r\n"
	length := "Content-Length: " + strconv.Itoa(len(plainChat)) + "\r\n"
	chunks := fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(plainChat), plainChat)
	for name, c := range map[string]struct {
		request string
		status  int
		kind    string
	}{
		"a body behind a wrong key":     {wrong + length + "\r\n" + plainChat, 401, "invalid_api_key"},
		"chunks behind a wrong key":     {wrong + "Transfer-Encoding: chunked\r\n\r\n" + chunks, 401, "invalid_api_key"},
		"a body at no path":             {strings.Replace(head, "completions", "x", 1) + length + "\r\n" + plainChat, 404, "unknown_path"},
		"a body of a wrong method":      {strings.Replace(head, "POST", "PUT", 1) + length + "\r\n" + plainChat, 405, "method_not_allowed"},
		"a length beside chunks":        {head + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks, 200, ""},
		"chunks in other letters":       {head + "tRANSFER-eNCODING: ChUnKeD\r\n\r\n" + chunks, 200, ""},
		"chunked behind a tab":          {head + "Transfer-Encoding:\tchunked\r\n\r\n" + chunks, 200, ""},
		"chunked behind a feed":         {head + "Transfer-Encoding: \x0bchunked\r\n\r\n" + chunks, 400, ""},
		"chunked in quotes":             {head + "Transfer-Encoding: \"chunked\"\r\n\r\n" + chunks, 501, ""},
		"gzip, chunked":                 {head + "Transfer-Encoding: gzip, chunked\r\n\r\n" + chunks, 501, ""},
		"chunked twice":                 {head + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks, 501, ""},
		"chunked in HTTP/1.0":           {strings.Replace(head, "HTTP/1.1", "HTTP/1.0", 1) + "Transfer-Encoding: chunked\r\n\r\n" + chunks, 400, "invalid_json"},
		"a length with a space":         {head + "Content-Length : 3\r\n\r\n" + plainChat, 400, ""},
		"a length in hex":               {head + "Content-Length: 0x3\r\n\r\n" + plainChat, 400, ""},
		"no length":                     {head + "Content-Length: \r\n\r\n" + plainChat, 400, ""},
		"a huge length":                 {head + "Content-Length: 99999999999999999999\r\n\r\n" + plainChat, 400, ""},
		"a length beyond the bound":     {head + "Content-Length: 9999999999\r\n\r\n" + plainChat, 413, "request_too_large"},
		"a signed chunk":                {head + "Transfer-Encoding: chunked\r\n\r\n+3\r\n{ }\r\n0\r\n\r\n", 400, "invalid_body"},
		"a chunk in 0x":                 {head + "Transfer-Encoding: chunked\r\n\r\n0x3\r\n{ }\r\n0\r\n\r\n", 400, "invalid_body"},
		"a chunk longer than it says":   {head + "Transfer-Encoding: chunked\r\n\r\n2\r\n{ }\r\n0\r\n\r\n", 400, "invalid_body"},
		"a chunk's long extension":      {head + "Transfer-Encoding: chunked\r\n\r\n3;" + strings.Repeat("x", 8<<10) + "\r\n{ }\r\n0\r\n\r\n", 400, "invalid_body"},
		"many chunks with extensions":   {head + "Transfer-Encoding: chunked\r\n\r\n" + strings.Repeat("1;"+strings.Repeat("x", 1000)+"\r\n \r\n", 64) + "0\r\n\r\n", 400, "invalid_body"},
		"a chunk without CRLF":          {head + "Transfer-Encoding: chunked\r\n\r\n3\r\n{ }0\r\n\r\n", 400, "invalid_body"},
		"a folded header":               {head + "X-A: a\r\n b\r\n" + length + "\r\n" + plainChat, 200, ""},
		"a name in parentheses":         {head + "X(A): a\r\n" + length + "\r\n" + plainChat, 400, ""},
		"a colon at once":               {head + ":a\r\n" + length + "\r\n" + plainChat, 400, ""},
		"a line without a colon":        {head + "X-A\r\n" + length + "\r\n" + plainChat, 400, ""},
		"a bell in a value":             {head + "X-A: \x07\r\n" + length + "\r\n" + plainChat, 400, ""},
		"a delete in a value":           {head + "X-A: \x7f\r\n" + length + "\r\n" + plainChat, 400, ""},
		"another protocol":              {"POST /v1/chat/completions HTTP/3.0\r\nHost: x\r\n\r\n", 505, ""},
		"a preface of HTTP/2":           {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 404, "unknown_path"},
		"a host with a path":            {"GET /v1/models HTTP/1.1\r\nHost: x/y\r\n\r\n", 400, ""},
		"another expectation":           {head + "Expect: 200-ok\r\n" + length + "\r\n" + plainChat, 417, ""},
		"an expectation, wrong key":     {wrong + "Expect: 100-continue\r\n" + length + "\r\n", 401, "invalid_api_key"},
		"an expectation, too large":     {head + "Expect: 100-continue\r\nContent-Length: 9999999999\r\n\r\n", 413, "request_too_large"},
		"another encoding":              {head + "Content-Encoding: br\r\n" + length + "\r\n" + plainChat, 415, "unsupported_content_encoding"},
		"h2c in earnest":                {head + "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c, websocket\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n" + length + "\r\n" + plainChat, 400, "upgrade_refused"},
		"Anthropic, a wrong key":        {strings.Replace(wrong, "chat/completions", "messages", 1) + length + "\r\n" + plainChat, 401, ":authentication_error"},
		"Anthropic, beyond the bound":   {strings.Replace(head, "chat/completions", "messages", 1) + "Content-Length: 9999999999\r\n\r\n", 413, ":request_too_large"},
		"Anthropic, a bad chunk":        {strings.Replace(head, "chat/completions", "messages", 1) + "Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, ":invalid_request_error"},
		"Anthropic, to another server":  {strings.Replace(head, "/v1/chat/completions", "http://evil/v1/messages", 1) + length + "\r\n" + plainChat, 421, ":invalid_request_error"},
		"an authority with a user":      {strings.Replace(head, "/v1/chat", "http://u@x/v1/chat", 1) + length + "\r\n" + plainChat, 421, "misdirected_request"},
		"another scheme":                {strings.Replace(head, "/v1/chat", "ftp://x/v1/chat", 1) + length + "\r\n" + plainChat, 421, "misdirected_request"},
		"authority form":                {"GET evil:80 HTTP/1.1\r\nHost: evil:80\r\n\r\n", 421, "misdirected_request"},
		"a trailer that speaks of size": {head + "Transfer-Encoding: chunked\r\nTrailer: Content-Length\r\n\r\n" + chunks, 400, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fixture{T: t, server: f.server}
			status, kind, rest := f.send(c.request + next)
			if status != c.status || kind != c.kind {
				t.Errorf("%d %q, want %d %q", status, kind, c.status, c.kind)
			}
			whole := map[string]bool{"a folded header": true, "authority form": true} // read in one way
			if (rest == "open") != whole[name] || strings.Contains(rest, "HTTP/1.1 2") {
				t.Errorf("afterwards %q", rest)
			}
		})
	}
	for _, a := range f.runner.all() {
		if a.body != strings.Replace(plainChat, "tiny", "tiny:latest", 1) {
			t.Errorf("a provider got %q", a.body)
		}
	}
}

// Bodies of methods that have none are read to their end, so that what follows
// is the next request.
// Contract: Z3
func TestABodyWhereNoneIsNeeded(t *testing.T) {
	f := newFixture(t)
	for _, method := range []string{"GET", "HEAD", "OPTIONS"} {
		c, r := f.raw()
		fmt.Fprintf(c, "%s /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: 18\r\n\r\nGET / HTTP/1.1\r\n\r\n", method, goodKey)
		resp, err := http.ReadResponse(r, &http.Request{Method: method})
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if resp.StatusCode/100 != 2 || !resp.Close {
			t.Errorf("%s: %d, close %v", method, resp.StatusCode, resp.Close)
		}
		if rest, _ := io.ReadAll(r); len(rest) != 0 {
			t.Errorf("%s is followed by %q", method, rest)
		}
	}
}

// Contract: E2 E7
func TestBodiesOfAllKinds(t *testing.T) {
	const bom = "\xef\xbb\xbf"
	deep := func(n int) string {
		return `{"model":"tiny","x":` + strings.Repeat("[", n) + strings.Repeat("]", n) + "}"
	}
	for name, c := range map[string]struct {
		body   string
		header []string
		status int
		code   string
	}{
		"empty":                      {"", nil, 400, "invalid_json"},
		"blank":                      {" \n", nil, 400, "invalid_json"},
		"truncated":                  {plainChat[:len(plainChat)-1], nil, 400, "invalid_json"},
		"truncated in a string":      {plainChat[:len(plainChat)-8], nil, 400, "invalid_json"},
		"more behind":                {plainChat + plainChat, nil, 400, "invalid_json"},
		"a byte order mark":          {bom + plainChat, nil, 400, "invalid_json"},
		"UTF-16":                     {"\xff\xfe{\x00}\x00", nil, 400, "invalid_json"},
		"a form":                     {"model=tiny&stream=true", []string{"Content-Type", "application/x-www-form-urlencoded"}, 400, "invalid_json"},
		"multipart":                  {"--x\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\ntiny\r\n--x--", []string{"Content-Type", "multipart/form-data; boundary=x"}, 400, "invalid_json"},
		"a list":                     {"[" + plainChat + "]", nil, 400, "invalid_json"},
		"null":                       {"null", nil, 400, "invalid_json"},
		"text":                       {`"tiny"`, nil, 400, "invalid_json"},
		"single quotes":              {"{'model':'tiny'}", nil, 400, "invalid_json"},
		"a comma at the end":         {`{"model":"tiny",}`, nil, 400, "invalid_json"},
		"a comment":                  {`{"model":"tiny"/**/}`, nil, 400, "invalid_json"},
		"NaN":                        {`{"model":"tiny","x":NaN}`, nil, 400, "invalid_json"},
		"a control in a string":      {"{\"model\":\"ti\x00ny\"}", nil, 400, "invalid_json"},
		"too deep":                   {deep(maxDepth), nil, 400, "invalid_json"},
		"no model":                   {`{"messages":[]}`, nil, 400, "invalid_model"},
		"an empty model":             {`{"model":""}`, nil, 400, "invalid_model"},
		"a null model":               {`{"model":null}`, nil, 400, "invalid_model"},
		"a list of models":           {`{"model":["tiny"]}`, nil, 400, "invalid_model"},
		"a model inside":             {`{"x":{"model":"tiny"}}`, nil, 400, "invalid_model"},
		"two models":                 {`{"model":"tiny","model":"tiny"}`, nil, 400, "invalid_model"},
		"two, one escaped":           {`{"model":"tiny","mod\u0065l":"big"}`, nil, 400, "invalid_model"},
		"a model in capitals":        {`{"Model":"big","model":"tiny"}`, nil, 400, "invalid_model"},
		"a model without an end":     {`{"model":"` + strings.Repeat("m", maxModel+1) + `"}`, nil, 400, "invalid_model"},
		"deep":                       {deep(maxDepth - 1), nil, 200, ""},
		"keys twice":                 {`{"model":"tiny","a":1,"a":2}`, nil, 200, ""},
		"not UTF-8":                  {"{\"model\":\"tiny\",\"x\":\"\xff\"}", nil, 200, ""},
		"half a surrogate":           {`{"model":"tiny","x":"\ud800"}`, nil, 200, ""},
		"a huge number":              {`{"model":"tiny","x":1e999999}`, nil, 200, ""},
		"another content type":       {plainChat, []string{"Content-Type", "text/plain"}, 200, ""},
		"no content type":            {plainChat, []string{"Content-Type", ""}, 200, ""},
		"a charset":                  {plainChat, []string{"Content-Type", "application/json; charset=latin1"}, 200, ""},
		"stream as text":             {`{"model":"tiny","stream":"true"}`, nil, 200, ""},
		"stream as a number":         {`{"model":"tiny","stream":1}`, nil, 200, ""},
		"stream null":                {`{"model":"tiny","stream":null}`, nil, 200, ""},
		"space around and all kinds": {" \t\r\n" + plainChat + " \t\r\n", nil, 200, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			resp, body := f.do("POST", "/v1/chat/completions", c.body, c.header...)
			if c.status == 200 {
				if resp.StatusCode != 200 {
					t.Fatalf("%d %s", resp.StatusCode, body)
				}
				if a := f.runner.all()[0]; a.body != strings.Replace(c.body, `"tiny"`, `"tiny:latest"`, 1) || a.Stream {
					t.Errorf("the provider gets %.100q, stream %v", a.body, a.Stream)
				}
				return
			}
			f.wantError(resp, body, c.status, c.code)
			resp, body = f.do("POST", "/v1/messages", c.body, c.header...)
			f.wantAnthropic(resp, body, c.status, "invalid_request_error")
			if n := len(f.runner.all()); n != 0 {
				t.Errorf("%d attempts", n)
			}
		})
	}
}

// blanks is a long body of blanks.
type blanks struct{ left int64 }

func (b *blanks) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, io.EOF
	}
	n := int(min(b.left, int64(len(p))))
	for i := range n {
		p[i] = ' '
	}
	b.left -= int64(n)
	return n, nil
}

// Contract: T7 Z3 E7
func TestAHundredMegabytesAreRefusedAtTheBound(t *testing.T) {
	const bound, size = 8 << 20, 100 << 20
	for name, announced := range map[string]bool{"announced": true, "of unknown size": false} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, limits(configs.Limits{Body: bound}))
			source := &blanks{left: size}
			c, r := f.raw()
			head := "POST /v1/messages HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + goodKey + "\r\n"
			sent := make(chan struct{})
			go func() {
				defer close(sent)
				if announced {
					fmt.Fprintf(c, "%sContent-Length: %d\r\n\r\n", head, size)
					_, _ = io.Copy(c, source) // ends when the connection does
					return
				}
				io.WriteString(c, head+"Transfer-Encoding: chunked\r\n\r\n")
				buf := make([]byte, 64<<10)
				for {
					n, err := source.Read(buf)
					if err != nil {
						return
					}
					if _, err := fmt.Fprintf(c, "%x\r\n%s\r\n", n, buf[:n]); err != nil {
						return
					}
				}
			}()
			resp, err := http.ReadResponse(r, nil)
			if err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || resp.StatusCode != 413 || errorKind(b) != ":request_too_large" || !resp.Close {
				t.Errorf("%d %s %v", resp.StatusCode, b, err)
			}
			c.Close()
			await(t, sent, "the sender")
			f.logged(1)
			if f.held() != 0 {
				t.Errorf("%v bytes are held", f.held())
			}
		})
	}
}

// Contract: E5
func TestA20CallersWhoLeaveInEveryState(t *testing.T) {
	t.Run("HTTP/2, in the queue", func(t *testing.T) {
		f := newH2(t, configs.Limits{})
		began, left := make(chan struct{}), make(chan error, 1)
		f.pool.acquire = func(ctx context.Context, _ Want) (Grant, error) {
			close(began)
			<-ctx.Done()
			left <- context.Cause(ctx)
			return Grant{}, context.Cause(ctx)
		}
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, "POST", f.server.URL+"/v1/messages", strings.NewReader(plainChat))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-Api-Key", goodKey)
		failed := make(chan error, 1)
		go func() {
			resp, err := f.client.Do(req)
			if err == nil {
				resp.Body.Close()
			}
			failed <- err
		}()
		await(t, began, "the queue")
		cancel()
		if err := await(t, left, "the queue's end"); !errors.Is(err, context.Canceled) {
			t.Errorf("cause %v", err)
		}
		await(t, failed, "the caller")
	})
	t.Run("while the body is sent", func(t *testing.T) {
		f := newFixture(t)
		c, _ := f.raw()
		fmt.Fprintf(c, "POST /v1/messages HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: 1000\r\n\r\n{\"model\"", goodKey)
		c.Close()
		if l := f.logged(1); l["attempts"] != nil || (l["class"] != "bad_body" && l["class"] != "cancelled") {
			t.Errorf("logged %v", l)
		}
	})
	t.Run("after the end", func(t *testing.T) {
		f := newFixture(t)
		f.runner.answer = func(_ context.Context, _ dispatch.Attempt, w dispatch.Writer) dispatch.Result {
			_ = w.Start(200, fields("Content-Type", "text/event-stream"))
			_ = w.Body([]byte(done))
			return dispatch.Result{Started: true, Err: nil}
		}
		c, r := f.raw()
		f.post(c, streamChat)
		for {
			line, err := r.ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasPrefix(line, "data: [DONE]") {
				break
			}
		}
		c.Close()
		if l := f.logged(1); l["class"] != "ok" {
			t.Errorf("logged %v", l)
		}
	})
	t.Run("in the middle of a chunk", func(t *testing.T) {
		f := newFixture(t)
		failed := make(chan error, 1)
		f.runner.answer = func(ctx context.Context, _ dispatch.Attempt, w dispatch.Writer) dispatch.Result {
			err := w.Start(200, fields("Content-Type", "text/event-stream"))
			for p := make([]byte, 256<<10); err == nil; err = w.Body(p) { // until nobody takes it
			}
			failed <- err
			return dispatch.Result{Started: true, Err: wire.AsError(ctx.Err())}
		}
		c, r := f.raw()
		f.post(c, streamChat)
		if _, err := io.ReadFull(r, make([]byte, 300<<10)); err != nil {
			t.Fatal(err)
		}
		c.Close()
		await(t, failed, "the write's failure")
		if l := f.logged(1); l["class"] != "cancelled" || l["status"] != 200.0 {
			t.Errorf("logged %v", l)
		}
	})
}
