package registry

import "github.com/iop-fabric/iop/wire"

// Event is one thing that happened. Node and Gen are always the transport's
// (F8): the subject's, or the session service's notice.
type Event interface{ event() }

type (
	// Admitted: the broker let a session in (ctl.admitted); older ones are over (B6).
	Admitted struct {
		Node     string
		Gen      uint64
		Instance string
	}
	// Closed: the broker saw the session end (ctl.closed).
	Closed struct {
		Node   string
		Gen    uint64
		Reason string
	}
	// RegisterReceived: a RegisterRequest, its proof already checked.
	RegisterReceived struct {
		Node        string
		Gen         uint64
		PayloadNode string // compared only (R1)
		// Verified is the verdict of the proof; an error refuses with its class, or
		// credential if it has none, and changes nothing.
		Verified                 error
		ProtocolMin, ProtocolMax uint32
		Features                 []string
		Instance                 string
		Software                 string
	}
	// ReadyReceived: a NodeReadyRequest.
	ReadyReceived struct {
		Node        string
		Gen         uint64
		PayloadNode string
	}
	// ReadyAckSent: the ready answer of a SendReadyAnswer{Ready: true} was handed
	// to the bus.
	ReadyAckSent struct {
		Node string
		Gen  uint64
	}
	// ReadyAckFailed: it could not be.
	ReadyAckFailed struct {
		Node string
		Gen  uint64
	}
	// HeartbeatReceived: the session lives, and drains or not.
	HeartbeatReceived struct {
		Node     string
		Gen      uint64
		Draining bool
	}
	// MessageReceived: any message but session, register, ready and heartbeat. A
	// demux reports those of sessions that are not Live, and of one that is at least
	// the first in each heartbeat interval: it lives, though its heartbeats stand
	// behind what fills a slow link.
	MessageReceived struct {
		Node string
		Gen  uint64
	}
	// Misbehaved: the session goes on breaking the rules of streams, or floods (J8). Who
	// says so does it once for each session, or more and more seldom.
	Misbehaved struct {
		Node string
		Gen  uint64
	}
	// DeadlinePassed: the time Deadline named has come.
	DeadlinePassed struct{}
	// ConfigChanged: these are the configured nodes now, all of them.
	ConfigChanged struct{ Nodes []string }
	// Stopping: take no new session; those that are live go on.
	Stopping struct{}
	// Stopped: end all sessions, so that nodes need not wait for a heartbeat bound.
	Stopped struct{}
)

func (Admitted) event()          {}
func (Closed) event()            {}
func (RegisterReceived) event()  {}
func (ReadyReceived) event()     {}
func (ReadyAckSent) event()      {}
func (ReadyAckFailed) event()    {}
func (HeartbeatReceived) event() {}
func (MessageReceived) event()   {}
func (Misbehaved) event()        {}
func (DeadlinePassed) event()    {}
func (ConfigChanged) event()     {}
func (Stopping) event()          {}
func (Stopped) event()           {}

// Effect is one order to the loop.
type Effect interface{ effect() }

type (
	// SendRegisterAnswer answers a RegisterRequest. If Accepted the loop adds the
	// node's signed configuration. Repeat: this session was accepted before and
	// gets the same answer again.
	SendRegisterAnswer struct {
		Node     string
		Gen      uint64
		Accepted bool
		Repeat   bool
		Protocol uint32
		Reason   Reason
		Class    wire.Class
	}
	// SendReadyAnswer answers a NodeReadyRequest. If Ready, the loop reports
	// ReadyAckSent or ReadyAckFailed before its next event.
	SendReadyAnswer struct {
		Node   string
		Gen    uint64
		Ready  bool
		Reason Reason
		Class  wire.Class
	}
	// SendFence tells a session that it is not, or no more, the owner. By the class
	// protocol the broker closes it at once, and keeps its node out for a while.
	SendFence struct {
		Node   string
		Gen    uint64
		Reason Reason
		Class  wire.Class
	}
	// CloseSession: have the broker close the session, where Edge can ask for it; a
	// SendFence has told it.
	CloseSession struct {
		Node   string
		Gen    uint64
		Reason Reason
	}
	// Activate: step pool.Activate(Node, Gen).
	Activate struct {
		Node string
		Gen  uint64
	}
	// FenceGeneration: step pool.Fence(Node, Gen, string(Cause)) (F3).
	FenceGeneration struct {
		Node  string
		Gen   uint64
		Cause Reason
	}
	// Draining: step pool.SetDraining(Node, Gen, On). It may come right before the
	// generation's Activate.
	Draining struct {
		Node string
		Gen  uint64
		On   bool
	}
	// NodeConnected: emit node.connected; if the configuration changed while the
	// session was pending, push the refresh now (R11).
	NodeConnected struct {
		Node string
		Gen  uint64
	}
	// NodeDisconnected: emit node.disconnected.
	NodeDisconnected struct {
		Node  string
		Gen   uint64
		Cause Reason
	}
)

func (SendRegisterAnswer) effect() {}
func (SendReadyAnswer) effect()    {}
func (SendFence) effect()          {}
func (CloseSession) effect()       {}
func (Activate) effect()           {}
func (FenceGeneration) effect()    {}
func (Draining) effect()           {}
func (NodeConnected) effect()      {}
func (NodeDisconnected) effect()   {}
