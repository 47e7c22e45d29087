package history

import "hash/crc32"

// PartSize is how both ends of a real stream cut it: HTTP keeps no frames, so what is
// compared are parts of this size, and the last.
const PartSize = 1 << 10

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Sum is the checksum of a part.
func Sum(p []byte) uint32 { return crc32.Checksum(p, castagnoli) }

// Parts cuts a stream into parts and reports each.
type Parts struct {
	Report func(seq uint64, n int64, sum uint32)
	buf    []byte
	seq    uint64
	total  int64
}

// Write implements io.Writer; it never fails.
func (p *Parts) Write(b []byte) (int, error) {
	n := len(b)
	p.total += int64(n)
	for len(b) > 0 {
		k := min(PartSize-len(p.buf), len(b))
		p.buf, b = append(p.buf, b[:k]...), b[k:]
		if len(p.buf) == PartSize {
			p.Close()
		}
	}
	return n, nil
}

// Close reports what is left, and says how much there was.
func (p *Parts) Close() (seq uint64, total int64) {
	if len(p.buf) > 0 {
		p.seq++
		p.Report(p.seq, int64(len(p.buf)), Sum(p.buf))
		p.buf = p.buf[:0]
	}
	return p.seq, p.total
}
