package tunnel

import "github.com/iop-fabric/iop/wire"

// Failures a stream can end with. Each is made when it is needed and names no
// value of the peer's but numbers, so that the text may travel (W3).

func errUnanswered(acked uint64) *wire.Error {
	if acked == 0 {
		return wire.Errorf(wire.Unreachable, "the peer acknowledged nothing of the stream")
	}
	return wire.Errorf(wire.Protocol, "the peer stopped acknowledging after sequence %d", acked)
}

func errReset(acked uint64) *wire.Error {
	if acked == 0 {
		return wire.Errorf(wire.Unreachable, "the peer does not know the stream")
	}
	return wire.Errorf(wire.Protocol, "the peer forgot the stream after sequence %d", acked)
}

func errAckBeyond(acked, sent uint64) *wire.Error {
	return wire.Errorf(wire.Protocol, "sequence %d was acknowledged but only %d were sent", acked, sent)
}

func errCreditBeyond(credit, offered uint64) *wire.Error {
	return wire.Errorf(wire.Protocol, "credit up to %d was granted with %d used: more than any window", credit, offered)
}

func errSeqZero() *wire.Error {
	return wire.Errorf(wire.Protocol, "a frame has no sequence")
}

func errBodySize(seq uint64, body int) *wire.Error {
	return wire.Errorf(wire.Protocol, "frame %d has a body of %d bytes: the bound is %d", seq, body, wire.MaxBody)
}

func errOverCredit(seq, offset, credit uint64) *wire.Error {
	return wire.Errorf(wire.Protocol, "frame %d goes up to %d and the credit only to %d", seq, offset, credit)
}

func errBeyondCredit(seq, next, credit uint64) *wire.Error {
	return wire.Errorf(wire.Protocol, "frame %d came where %d is next, and no credit up to %d holds those between", seq, next, credit)
}

func errAfterTerminal(seq, last uint64) *wire.Error {
	return wire.Errorf(wire.Protocol, "frame %d follows the terminal %d", seq, last)
}

func errForged(seq uint64) *wire.Error {
	return wire.Errorf(wire.Protocol, "sequence %d came twice with different content", seq)
}
