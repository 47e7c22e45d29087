package wire

// Redirected reports whether data is no message of ours but an answer of the
// broker's: a server says who somebody is (JSON), and the authority answers a leaf's
// callout (a JWT). Both go to the reply subject of whoever asked, which no permission
// is compared with: a Node can have such an answer sent to any subject, as if another
// had spoken there. So whoever reads what a peer says drops these first, and holds
// nothing against the peer.
//
// No message of ours begins so: a message begins with a field's tag, and neither '{'
// (a group, which proto3 has not) nor 'e' (field 12 in four bytes) is one of ours.
func Redirected(data []byte) bool {
	return len(data) > 0 && (data[0] == '{' || data[0] == 'e')
}
