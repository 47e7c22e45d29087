//go:build !unix

package install

// Own finds who the node is to run as; here it is the service manager's to say.
func (s *Spec) Own() (root bool, err error) { return false, nil }
