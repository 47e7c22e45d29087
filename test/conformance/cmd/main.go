// Command cmd plays the conformance cases against a Node that anybody wrote: it is
// the Edge of that Node's broker, and the provider beside it.
//
//	go run ./test/conformance/cmd -broker tls://127.0.0.1:4222 -edge conf \
//	    -cert edge.pem -key edge.key -nkey edge.nk -ca ca.pem
//
// docs/protocol.md, "Conformance", says how a broker is prepared for it.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/test/conformance"
)

func main() {
	failed, err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(2)
	}
	if failed > 0 {
		os.Exit(1)
	}
}

func run() (failed int, err error) {
	var (
		r        conformance.Remote
		certFile = flag.String("cert", "", "the edge's certificate chain, `file`")
		keyFile  = flag.String("key", "", "its private key, `file`")
		nkeyFile = flag.String("nkey", "", "its nkey, `file`")
		only     = flag.String("run", "", "play only the cases whose id matches this `regexp`")
		list     = flag.Bool("list", false, "list the cases and play none")
	)
	flag.StringVar(&r.Broker, "broker", "", "the broker, tls://host:port")
	flag.StringVar(&r.Edge, "edge", "", "the `name` of the edge")
	flag.StringVar(&r.CA, "ca", "", "the fabric's CA certificate, `file`")
	flag.StringVar(&r.Provider, "provider", "127.0.0.1:0", "`address` to listen on as the Node's provider")
	flag.StringVar(&r.ProviderURL, "provider-url", "", "what the Node is to call, if it is not that address")
	flag.Parse()
	which, err := regexp.Compile(*only)
	if err != nil {
		return 0, fmt.Errorf("-run: %w", err)
	}
	cases, err := conformance.Load()
	if err != nil {
		return 0, err
	}
	if *list {
		for _, c := range cases {
			fmt.Printf("%s\t%s\t%s\t%s\t%s\n", c.ID, c.Role, how(&c), strings.Join(c.Rules, " "), c.Intent)
		}
		return 0, nil
	}
	for _, name := range []string{"broker", "edge", "cert", "key", "nkey", "ca"} {
		if flag.Lookup(name).Value.String() == "" {
			return 0, fmt.Errorf("-%s is needed (-help lists all flags)", name)
		}
	}
	if r.Cert, err = identity.LoadCertificate(*certFile, *keyFile); err != nil {
		return 0, err
	}
	if r.NKey, err = identity.LoadNKey(*nkeyFile); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), conformance.Hang)
	defer cancel()
	n, err := conformance.Connect(ctx, r)
	if err != nil {
		return 0, err
	}
	defer n.Close()
	fmt.Println("waiting for the Node to become ready")
	if err := n.Wait(); err != nil {
		return 0, err
	}
	played := 0
	for i := range cases {
		c := &cases[i]
		if c.Role != conformance.Node || !c.Short() || !which.MatchString(c.ID) {
			continue
		}
		played++
		began := time.Now()
		if err := conformance.Play(c, n); err != nil {
			failed++
			fmt.Printf("FAIL %s\n     %v\n", c.ID, err)
			continue
		}
		fmt.Printf("ok   %s %v\n", c.ID, time.Since(began).Round(time.Millisecond))
	}
	fmt.Printf("conformance: %d of %d\n", played-failed, played)
	return failed, nil
}

// how says where a case is played.
func how(c *conformance.Case) string {
	switch {
	case !c.Short():
		return "memory"
	case c.Exact():
		return "memory, broker"
	default:
		return "memory, broker, lossy"
	}
}
