// Package history owns the record of what a fabric did, and the judgement of it.
//
// A history is a sequence of events in the order they happened. Simulated and real
// runs write the same one; as a file it is JSON, one event a line. Events are about
//
//	a request   invoke --> dispatch (one for each attempt) --> frame... --> terminal
//	an attempt  sent..., served: what its provider gave, and read of the request
//	a slot      take --> release
//	a session   alloc --> register --> ready --> connected --> fenced
//	a process   up, down; a fault: start, stop
//
// The caller and the provider tell their ends of a stream each: which bytes, in parts
// that both cut alike, with a checksum each. A request's outcome is ok, fail or
// unknown; unknown is what a caller has whose Edge died, and promises nothing.
//
// What is judged, in one pass and in memory bounded by what is open at a time:
//
//	INV1  A request has one terminal, and nothing after it.
//	INV2  What a caller got is a beginning of what one provider gave, in order and
//	      exact; all of it, and all of the request read, where the outcome is ok.
//	CLASS No attempt ends with a class that means a broken rule, or for want of a place
//	      that its slot promised; no session is fenced for rules it did not break.
//	J5    Where all faults are such as streams outlive, such a request is ok beside them.
//	C1    A run whose cancel overtook its request does not reach its provider.
//	INV3  A slot is released once, for the generation it was taken under, and none is
//	      held in the end.
//	INV4  The slots of a provider never exceed its capacity.
//	INV5  Nothing is granted, and nothing changes, for a generation that is not its
//	      node's connected one.
//	INV6  A node is connected once for a generation at most, and generations rise;
//	      no generation is given twice.
//	LIVE1 In the end every node that is up is connected, and was so within a bound
//	      after the last fault.
//	LIVE2 A request ends by its deadline and a grace; without one, in the end.
//	CALM  A request that nothing of its own keeps from being served is ok where no fault
//	      went on while it was open, nor so short before that a node may not be live.
//	LIVE3 In the end a probe was served by every node that is up.
//	VOID  The history shows something: what Floors asks for.
//
// A real run does not tell all of it: its slots are Edge's own, its sessions are known
// from Edge's log (connected, fenced), and of frames that went out again only how many
// (resent with N, of no run). Its dispatch is the moment the provider is called.
//
// It leaves to others: how the events are recorded, and what the faults were.
package history
