// Package install makes a Node one that the operating system starts: a unit of
// systemd, a job of launchd, a service of Windows. What is written is a Plan, plain
// text made of a Spec; Host carries it out.
//
//	I1  What stands there and is not ours is neither replaced nor taken away.
//	I2  Keys and configuration are left where they are, also when the unit goes.
//	I3  Recovery does not depend on it (S4): it starts the Node with the machine,
//	    and again should the process have died.
//
// Why no library does it: what there is renders no unit that is confined as this one
// is, has no dry run, and cannot be tried on a folder that stands for the machine.
package install
