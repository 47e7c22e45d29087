package identity

import (
	"bytes"
	"encoding/binary"
)

// magic opens every transcript. NKey.Sign refuses to sign what begins so, hence
// no nonce a hostile server chooses can come out as a signed transcript (I3).
const magic = "iop signed transcript v1\x00"

// transcript is the one encoding of what is signed: magic, then label, then the
// number of parts, then each part; text and parts under their lengths, so that
// nothing can be moved from one to another (I3).
func transcript(label string, parts [][]byte) []byte {
	size := len(magic) + 8 + len(label) + 8
	for _, p := range parts {
		size += 8 + len(p)
	}
	b := append(make([]byte, 0, size), magic...)
	b = append(binary.BigEndian.AppendUint64(b, uint64(len(label))), label...)
	b = binary.BigEndian.AppendUint64(b, uint64(len(parts)))
	for _, p := range parts {
		b = append(binary.BigEndian.AppendUint64(b, uint64(len(p))), p...)
	}
	return b
}

func isTranscript(b []byte) bool { return bytes.HasPrefix(b, []byte(magic)) }
