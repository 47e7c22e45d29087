// Package pool owns the model groups, the providers and their places, and the
// queue of requests that wait for one. It decides who gets which place and when.
//
// It is a pure core, stepped by the Edge's one loop:
//
//	out = p.Step(now, pool.Enqueue(req), out[:0])
//
//	           Enqueue                 Granted                  ReturnSlot
//	request ------------> waiting --------------------> held -----------------> returned
//	    |                    |                            |                        ^
//	    | Refused            | Refused, CancelWaiter      +---- Fence, EndAttempt -+
//	    v                    v
//	   gone                 gone
//
//	provider: offline --Activate--> live --Fence--> offline   (with its node)
//	          live <--> overlaid, draining, held back, disabled: no new slot
//
// Invariants:
//
//	I1  The slots of a provider never exceed its capacity, nor those of all
//	    providers behind one adapter the adapter's, unless a later configuration
//	    or a smaller capacity found them in use; then nothing is granted there.
//	I2  A slot is returned exactly once; an id that is unknown or was returned
//	    yields nothing (P8).
//	I3  After a step nobody waits while a candidate that could serve it has a
//	    free place: no lost wake-up, no polling (Q4).
//	I4  The requests of one principal for one model are granted in the order they
//	    came, but one that is blocked never blocks one behind it that could be
//	    served; principals, and models behind one adapter, take turns (Q3).
//	I5  Nothing is granted under a generation that is not its node's active one;
//	    Fence ends all slots of a generation in one step (F3).
//	I6  An event of a generation below the highest the node had, or that ended,
//	    changes nothing (F5).
//	I7  A request that waits leaves by exactly one of Granted, Refused and
//	    CancelWaiter.
//	I8  A long request takes both kinds of place in one step, or none (Q2).
//	I9  A request for a model that nobody offers waits only while a connected node
//	    has an adapter whose first list is outstanding, and no longer than that.
//
// It leaves to others: who owns a node (registry), what a slot is used for
// (dispatch), what an overlay is based on.
package pool
