package node

import (
	"sync"

	"github.com/iop-fabric/iop/wire"
)

// buffers lends the bytes of encoded frames, in classes: an idle stream must not
// hold 64 KiB for an acknowledgement that is on its way.
type buffers struct {
	pools [len(bufferClasses)]sync.Pool
	// heads are what pools hold bytes by, while the bytes are lent: else each put
	// would make one anew.
	heads sync.Pool
}

// bufferClasses fit a token's frame, a small answer, a read, and a whole frame
// with its envelope; a frame with huge headers is allocated.
var bufferClasses = [...]int{512, 4 << 10, 17 << 10, wire.MaxBody + 1<<10}

// get returns n bytes of any content.
func (p *buffers) get(n int) []byte {
	for i, size := range bufferClasses {
		if n <= size {
			if head, ok := p.pools[i].Get().(*[]byte); ok {
				b := (*head)[:n]
				*head = nil
				p.heads.Put(head)
				return b
			}
			return make([]byte, n, size)
		}
	}
	return make([]byte, n)
}

// put takes back what get lent.
func (p *buffers) put(b []byte) {
	for i, size := range bufferClasses {
		if cap(b) == size {
			head, ok := p.heads.Get().(*[]byte)
			if !ok {
				head = new([]byte)
			}
			*head = b[:size]
			p.pools[i].Put(head)
			return
		}
	}
}
