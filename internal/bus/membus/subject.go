package membus

import (
	"fmt"
	"strings"
)

// Match reports whether a subject matches a pattern of NATS: "*" stands for one
// token, ">" at the end for one or more.
func Match(pattern, subject string) bool {
	for {
		p, restP, moreP := strings.Cut(pattern, ".")
		s, restS, moreS := strings.Cut(subject, ".")
		switch {
		case p == ">" && !moreP:
			return true
		case p != "*" && p != s:
			return false
		case !moreP || !moreS:
			return moreP == moreS
		}
		pattern, subject = restP, restS
	}
}

// checkSubject refuses what a server would drop or misread.
func checkSubject(subject string, pattern bool) error {
	tokens := strings.Split(subject, ".")
	for i, t := range tokens {
		wild := t == "*" || (t == ">" && i == len(tokens)-1)
		switch {
		case t == "" || strings.ContainsAny(t, " \t\r\n\x00"):
			return fmt.Errorf("membus: %q is no subject", subject)
		case !pattern && (t == "*" || t == ">"):
			return fmt.Errorf("membus: %q cannot be published to", subject)
		case pattern && !wild && (t == ">"):
			return fmt.Errorf("membus: %q is no pattern", subject)
		}
	}
	return nil
}
