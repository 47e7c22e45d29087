//go:build race

package registry

// The cores have no goroutine, so the race detector finds nothing in them that
// a small world does not show.
const underRace = true
