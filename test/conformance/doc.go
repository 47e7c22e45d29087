// Package conformance plays the cases of cases/*.txt, scripts in plain text that
// say what one side of the stream protocol sends and what must come back. A case
// knows nothing of how either side is made, so the same list is played against our
// Node and our Edge, in memory and over the real broker, and against a Node that
// somebody else wrote (cmd).
//
//	parse.go     the language: files to cases, and what is wrong with a line
//	play.go      one case after another step; what is expected and what came
//	run.go       one run as the player sees it: exact, or honest by the engine
//	provider.go  the model server beside a Node under test, scripted
//	edge.go      the player as Edge: session service, registration, readiness
//	memory.go    our Node and our Edge on the bus in memory
//	broker.go    a broker, our Node and our Edge as they really are
//
// The language stands in docs/protocol.md, "Conformance".
package conformance
