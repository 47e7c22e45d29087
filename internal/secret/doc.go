// Package secret owns the type of every text that must not be printed.
//
//	I1  Every verb of fmt, every slog handler and every encoder of JSON, YAML or
//	    text writes "[redacted]" for a String, wherever it stands: in a struct's
//	    unexported field too, where fmt calls no methods and shows an address.
//	I2  Reveal is the only way to the text, so a search finds every use of one.
package secret
