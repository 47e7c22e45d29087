// Package up owns the one-process fabric: a data folder with its keys, a
// configuration made from them, and the order in which broker, Edge and Node
// start and stop. `iop up` is a thin command over it, and the tests use the same
// code, so that nothing is tested that nobody runs.
//
//	I1  The security is the real one: the Node of this process dials the real
//	    mTLS listener; nothing here can switch a check off.
//	I2  Keys are made once, on this machine, mode 0600; a folder whose keys are
//	    damaged is an error that names the file, never silently replaced.
//	I3  One process owns a data folder at a time.
//	I4  Stopping goes Edge, Node, broker: nothing is stopped that something
//	    still running needs.
package up
