package wire

import (
	"errors"
	"fmt"
	"strings"
)

// MaxName is the longest name that may become a token of a subject.
const MaxName = 63

// CheckName says what is wrong with the name of an edge, a node, a leaf or any
// other workload: [a-z0-9][a-z0-9_-]{0,62}, and none of the words that stand in
// a name's place in subjects (Z1). It is here, not in subjects, because names
// are checked wherever they enter: configuration, certificates, subjects.
func CheckName(s string) error {
	switch {
	case s == "":
		return errors.New("a name is empty")
	case len(s) > MaxName:
		return fmt.Errorf("name %.20q... is longer than %d characters", s, MaxName)
	case s == "ctl", s == "store", s == "callout":
		return fmt.Errorf("name %q is reserved", s)
	}
	for i := 0; i < len(s); i++ {
		c := s[i]
		if (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || (i > 0 && (c == '_' || c == '-')) {
			continue
		}
		return fmt.Errorf("name %q: use a-z, 0-9, '-' and '_', beginning with a letter or digit", s)
	}
	return nil
}

// CheckTrustDomain says what is wrong with the trust domain of a fabric: a host
// name in lower case, as it stands in every workload's SPIFFE name.
func CheckTrustDomain(s string) error {
	if s == "" || len(s) > 253 {
		return errors.New("a trust domain has 1 to 253 characters")
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || label[0] == '-' || label[len(label)-1] == '-' {
			return fmt.Errorf("trust domain %.80q is no host name", s)
		}
		for i := 0; i < len(label); i++ {
			if c := label[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
				return fmt.Errorf("trust domain %.80q: use a-z, 0-9, '-' and dots", s)
			}
		}
	}
	return nil
}
