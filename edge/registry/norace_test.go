//go:build !race

package registry

const underRace = false
