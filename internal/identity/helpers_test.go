package identity

import "github.com/nats-io/nkeys"

func newServerSeed() ([]byte, error) {
	pair, err := nkeys.CreateServer()
	if err != nil {
		return nil, err
	}
	return pair.Seed()
}
