// Package ioptest starts the whole fabric for tests: broker, Edge, Nodes and
// scripted providers in one process, on loopback, with the security of the real
// thing; and breaks it: links cut, stalled or refused through a proxy, Nodes as
// child processes that can be killed.
//
// It runs the code `iop up` runs (internal/up), with ports and keys of its own,
// so tests may run side by side. Start returns a fabric that serves; everything
// it started has ended when the test has.
package ioptest
