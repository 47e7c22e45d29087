package admin

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"time"
)

// maxBody is more than any body of the admin API, and bodyWait longer than one takes.
const (
	maxBody  = 64 << 10
	bodyWait = 10 * time.Second
)

// WholeBodies serves h when a request's body is whole. So nobody, let in or not, holds
// a connection by a body that never comes.
func WholeBodies(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Body == nil || r.Body == http.NoBody {
			h.ServeHTTP(w, r)
			return
		}
		c := http.NewResponseController(w)
		_ = c.SetReadDeadline(time.Now().Add(bodyWait)) // where there is no connection, there is nothing to hold
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
		if err != nil {
			w.Header().Set("Connection", "close")
			if large := new(http.MaxBytesError); errors.As(err, &large) {
				refuse(w, http.StatusRequestEntityTooLarge, "too_large", "the body is larger than 64 KiB")
				return
			}
			refuse(w, http.StatusRequestTimeout, "body_missing", "the body did not come whole within 10 s")
			return
		}
		_ = c.SetReadDeadline(time.Time{})
		r.Body = io.NopCloser(bytes.NewReader(body))
		h.ServeHTTP(w, r)
	})
}
