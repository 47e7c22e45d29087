package httpapi

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

// requestWays says, once more, what becomes of a caller's header: a row that is
// lost or added in the code alone fails here. Names are canonical.
var requestWays = map[policy][]string{
	pass: {
		"Accept", "Accept-Encoding", "Accept-Language", "Content-Type", "User-Agent", "Cache-Control", "If-None-Match", "Range", "Traceparent", "Tracestate",
		"Anthropic-Version", "Anthropic-Beta", "Openai-Organization", "Openai-Project", "Openai-Beta", "Idempotency-Key", "X-Stainless-Lang",
		"Session-Id", "X-Session-Id", "X-Session-Affinity", "X-Claude-Code-Session-Id", "X-Client-Request-Id", "X-Anything", "X_Underscore",
	},
	hop: {
		"Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer", "Transfer-Encoding",
		"Upgrade", "Http2-Settings", "Expect",
	},
	credential: {"Authorization", "Cookie", "X-Api-Key", "Api-Key", "X-Goog-Api-Key", "X-Auth-Token"},
	callerOnly: {
		"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Port", "X-Forwarded-Proto", "X-Real-Ip", "Via", "Origin", "Referer",
		"Access-Control-Request-Method", "Access-Control-Request-Headers",
	},
	recomputed: {"Host", "Content-Length", "Content-Encoding", "Content-Md5", "Content-Digest", "Repr-Digest", "Digest"},
	ours:       {"X-Request-Id", "X-Iop-Node", "X-Iop-Provider", "X-Iop-Attempts", "X-Iop-Queue-Ms", "X-Iop-Estimate"},
}

var answerWays = map[policy][]string{
	pass: {
		"Content-Type", "Content-Encoding", "Content-Language", "Cache-Control", "Date", "Etag", "Last-Modified", "Location", "Retry-After", "Server", "Set-Cookie",
		"Vary", "Www-Authenticate", "Age", "Warning", "Link", "Openai-Processing-Ms", "Openai-Version", "Openai-Organization", "Request-Id", "Anthropic-Organization-Id",
		"X-Ratelimit-Limit-Requests", "X-Ratelimit-Remaining-Tokens", "X-Ratelimit-Reset-Requests", "Anthropic-Ratelimit-Tokens-Reset", "Retry-After-Ms", "X-Should-Retry",
		"Access-Control-Allow-Origin", "X-Accel-Buffering", "X-Anything",
	},
	hop:  {"Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer", "Transfer-Encoding", "Upgrade"},
	ours: {"X-Request-Id", "X-Iop-Node", "X-Iop-Provider", "X-Iop-Attempts", "X-Iop-Queue-Ms", "X-Iop-Estimate"},
}

// wanted is how a header has to come where only some values are taken at all.
var wanted = map[string]string{
	"Connection": "X-Other", "Transfer-Encoding": "chunked", "Upgrade": "h2c", "Expect": "100-continue", "Content-Encoding": "identity",
	"Authorization": "Bearer " + goodKey, "X-Request-Id": "canary", "Host": "canary", "Trailer": "X-T",
}

func valueOf(name string) string {
	if v, ok := wanted[name]; ok {
		return v
	}
	return "canary"
}

// Contract: E2 E7 Z3
func TestEveryHeaderOfACallerHasItsWay(t *testing.T) {
	rows := 0
	for way, names := range requestWays {
		for _, name := range names {
			if requestPolicy[name] != way {
				t.Errorf("%s is %d in the code, want %d", name, requestPolicy[name], way)
			}
			if way != pass {
				rows++
			}
			for _, path := range []string{"/v1/chat/completions", "/v1/messages"} {
				f := newFixture(t)
				value := valueOf(name)
				head := fmt.Sprintf("POST %s HTTP/1.1\r\n%s: %s\r\n", path, name, value)
				for _, other := range []string{"Host", "Authorization"} {
					if name != other {
						head += other + ": " + valueOf(other) + "\r\n"
					}
				}
				body := plainChat
				switch name {
				case "Transfer-Encoding":
					body = fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(plainChat), plainChat)
				case "Content-Length":
					head = strings.Replace(head, "canary\r\n", fmt.Sprint(len(plainChat), "\r\n"), 1)
				default:
					head += fmt.Sprintf("Content-Length: %d\r\n", len(plainChat))
				}
				c, r := f.raw()
				if _, err := io.WriteString(c, head+"\r\n"+body); err != nil {
					t.Fatal(err)
				}
				resp, err := http.ReadResponse(r, nil)
				for err == nil && resp.StatusCode == 100 {
					resp, err = http.ReadResponse(r, nil)
				}
				if err != nil {
					t.Fatal(err)
				}
				io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
				if resp.StatusCode != 200 {
					t.Fatalf("%s: %d", name, resp.StatusCode)
				}
				got := f.runner.all()[0].header(name)
				if (way == pass) != (len(got) == 1 && got[0] == value) || (way != pass && len(got) != 0) {
					t.Errorf("%s %s: the provider gets %q", path, name, got)
				}
			}
		}
	}
	if rows != len(requestPolicy) {
		t.Errorf("%d rows here, %d in the code", rows, len(requestPolicy))
	}
}

// Contract: E2 E7 T4
func TestEveryHeaderOfAProviderHasItsWay(t *testing.T) {
	rows := 1 // Content-Length
	for way, names := range answerWays {
		for _, name := range names {
			if answerPolicy[name] != way {
				t.Errorf("%s is %d in the code, want %d", name, answerPolicy[name], way)
			}
			if way != pass {
				rows++
			}
			for _, path := range []string{"/v1/chat/completions", "/v1/messages"} {
				f := newFixture(t)
				f.runner.answer = says(200, fields(strings.ToLower(name), "canary", name, "canary2"), "{}")
				resp, _ := f.do("POST", path, plainChat)
				got := strings.Join(resp.Header[name], "|")
				if (way == pass) != (got == "canary|canary2") || strings.Contains(got, "canary") != (way == pass) {
					t.Errorf("%s %s: the caller gets %q", path, name, got)
				}
			}
		}
	}
	if rows != len(answerPolicy) {
		t.Errorf("%d rows here, %d in the code", rows, len(answerPolicy))
	}
}

// Contract: E2 T4
func TestAnswersThatHaveNoBody(t *testing.T) {
	f := newFixture(t)
	for _, status := range []int{204, 304} {
		f.runner.answer = says(status, fields("Etag", "x"))
		if resp, body := f.chat(plainChat); resp.StatusCode != status || body != "" || resp.Header.Get("Etag") != "x" {
			t.Errorf("%d %q", resp.StatusCode, body)
		}
		// A body that may not be there could be read as the next answer.
		f.runner.answer = says(status, nil, "HTTP/1.1 200 OK\r\n\r\n")
		c, r := f.raw()
		f.post(c, plainChat)
		resp, err := http.ReadResponse(r, nil)
		if err != nil || resp.StatusCode != status {
			t.Fatal(err)
		}
		if rest, _ := io.ReadAll(r); len(rest) != 0 {
			t.Errorf("%d is followed by %q", status, rest)
		}
	}
}
