// Package natsbus carries the bus over NATS: it dials, refuses to reconnect
// unless told to, and says in words why a broker did not let it in.
//
//	N1  Dial ends with its context; a connection that comes up too late is closed.
//	N2  TLS is spoken from the first byte: no server banner crosses in clear.
//	N3  A connection that may not reconnect is over at its first loss (S2).
//	N4  No error text holds a seed or a signature.
//	N5  A server that is silent delays by a second, no more, while another answers.
//	N6  While the connection is away, nothing waits for the dial that brings it back.
//
// Publish may block while the socket does: up to the write deadline. So nothing
// that must notice a cancel or a deadline may publish from its own goroutine.
package natsbus
