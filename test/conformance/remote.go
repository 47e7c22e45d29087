package conformance

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"time"

	"github.com/iop-fabric/iop/internal/bus/natsbus"
	"github.com/iop-fabric/iop/internal/identity"
	"github.com/iop-fabric/iop/subjects"
	"github.com/iop-fabric/iop/wire"
)

// Remote says how the player, as an Edge, reaches the broker that the Node under test
// dials, and where the provider listens that this Node is to call.
type Remote struct {
	Broker   string // tls://host:port
	Edge     string // the edge's name
	Cert     *identity.Certificate
	NKey     *identity.NKey
	CA       string // file
	Provider string // address to listen on: "127.0.0.1:0"
	// ProviderURL is what the Node is told, where it is another than that of Provider.
	ProviderURL string
}

// RemoteNode is a Node on a real broker.
type RemoteNode struct {
	*edgeSide
	server *http.Server
	close  func()
}

// Settle implements World: what is on its way comes when it comes.
func (*RemoteNode) Settle() {}

// Virtual implements World.
func (*RemoteNode) Virtual() bool { return false }

// Connect connects as the Edge and listens as the provider. Wait waits for the Node.
func Connect(ctx context.Context, r Remote) (*RemoteNode, error) {
	pool, err := identity.LoadPool(r.CA)
	if err != nil {
		return nil, err
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", r.Provider)
	if err != nil {
		return nil, fmt.Errorf("listen as the provider: %w", err)
	}
	url := r.ProviderURL
	if url == "" {
		url = "http://" + listener.Addr().String()
	}
	conn, err := natsbus.Dial(ctx, natsbus.Options{
		URLs: []string{r.Broker}, Name: wire.NewToken() + wire.NewToken(), Inbox: subjects.EdgeInbox(r.Edge), Reconnect: true,
		TLS:        &tls.Config{Certificates: []tls.Certificate{r.Cert.TLS()}, RootCAs: pool, MinVersion: tls.VersionTLS13},
		NKeyPublic: r.NKey.Public(), Sign: r.NKey.Sign,
	})
	if err != nil {
		listener.Close()
		return nil, fmt.Errorf("connect as the edge: %w", err)
	}
	providers := newProviders(func() {})
	n := &RemoteNode{edgeSide: newEdgeSide(conn, r.Edge, r.Cert, configuration(url), providers)}
	n.server = &http.Server{Handler: providers, ReadHeaderTimeout: Hang, ErrorLog: log.New(io.Discard, "", 0)}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = n.server.Serve(listener) // its end is Close's doing
	}()
	n.close = func() {
		conn.Close()
		n.server.Close()
		<-served
		providers.close()
	}
	if err := n.subscribe(); err != nil {
		n.close()
		return nil, err
	}
	return n, nil
}

// Wait waits until the Node is ready.
func (n *RemoteNode) Wait() error { return n.wait() }

// Close ends both.
func (n *RemoteNode) Close() { n.close() }

// Short reports whether a case can be played where time is real: it needs nothing
// that only memory has, and takes no longer than a few seconds.
func (c *Case) Short() bool {
	if c.Virtual {
		return false
	}
	var total time.Duration
	for _, s := range c.Steps {
		total += s.duration("for") + s.duration("after")
	}
	return total <= 4*time.Second
}
