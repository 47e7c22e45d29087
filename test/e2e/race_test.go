//go:build race

package e2e

// raced: the race detector makes moving bytes ten times as dear.
const raced = true
