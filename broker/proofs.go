package broker

import (
	"hash/maphash"
	"slices"
	"sync"
)

// proofsKept is how many of a member's newest proofs are remembered. To have one
// forgotten, a leaf must make the member sign as many others.
const proofsKept = 1024

// proofs are the nonces that members have signed for leaves. A server of ours makes
// each nonce itself, for one connection; a leaf says which it was, and could say so
// again (Z6). What is remembered ends with the process.
type proofs struct {
	mu   sync.Mutex
	seed maphash.Seed
	of   map[string][]uint64 // by nkey, newest last; only of registered ones, so bounded
}

func newProofs() *proofs { return &proofs{seed: maphash.MakeSeed(), of: map[string][]uint64{}} }

// fresh notes a proof and reports whether it is new.
func (p *proofs) fresh(nkey, nonce string) bool {
	sum := maphash.String(p.seed, nonce)
	p.mu.Lock()
	defer p.mu.Unlock()
	seen := p.of[nkey]
	if slices.Contains(seen, sum) {
		return false
	}
	if len(seen) >= proofsKept {
		seen = append(seen[:0], seen[1:]...)
	}
	p.of[nkey] = append(seen, sum)
	return true
}
