// Package membus is the bus in memory: NATS subjects, queues and notices
// without a socket, and the faults that core NATS was seen to have. It runs in
// a testing/synctest bubble, where delays cost no time.
//
//	M1  Without faults it keeps B1 to B4, and bustest holds it to them.
//	M2  A fault is silent: Publish answers nil and the message is gone, comes
//	    twice, late or out of order.
//	M3  A random fault is drawn from the bus's seed. The draws are repeatable as
//	    far as the order of publishing is.
//
// What it does not have: permissions, headers, a server that can be killed.
package membus
