// delayproxy is a TCP link with a round trip: what comes in on one side leaves on
// the other half a round trip later, in order and at any rate.
//
//	delayproxy -listen 127.0.0.1:18600 -to 127.0.0.1:18333 -rtt 50ms
package main

import (
	"flag"
	"log"
	"net"
	"time"
)

// inFlight bounds what a direction holds: more than any window beside it.
const inFlight = 4096

type piece struct {
	due  time.Time
	data []byte
}

func main() {
	listen := flag.String("listen", "127.0.0.1:18600", "address to listen on")
	to := flag.String("to", "", "address to connect to")
	rtt := flag.Duration("rtt", 0, "round trip to add")
	flag.Parse()
	ln, err := net.Listen("tcp", *listen)
	if err != nil {
		log.Fatal(err)
	}
	for {
		a, err := ln.Accept()
		if err != nil {
			log.Fatal(err)
		}
		b, err := net.Dial("tcp", *to)
		if err != nil {
			log.Print(err)
			a.Close()
			continue
		}
		go carry(a, b, *rtt/2)
		go carry(b, a, *rtt/2)
	}
}

// carry ends both connections with the first error of one.
func carry(from, to net.Conn, delay time.Duration) {
	ch := make(chan piece, inFlight)
	go func() {
		defer close(ch)
		for {
			buf := make([]byte, 64<<10)
			n, err := from.Read(buf)
			if n > 0 {
				ch <- piece{time.Now().Add(delay), buf[:n]}
			}
			if err != nil {
				return
			}
		}
	}()
	for p := range ch {
		time.Sleep(time.Until(p.due))
		if _, err := to.Write(p.data); err != nil {
			break
		}
	}
	from.Close()
	to.Close()
	for range ch { // until the reader has ended
	}
}
