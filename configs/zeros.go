package configs

import (
	"reflect"
	"time"
)

// zero is a number or a duration that was written out as 0, where it stands.
type zero struct {
	path  string
	value reflect.Value
}

// noteZero keeps v if it is one.
func noteZero(list []zero, path string, v reflect.Value) []zero {
	if v.CanInt() && v.IsZero() {
		list = append(list, zero{path, v})
	}
	return list
}

// withDefaults applies the defaults. A 0 in whose place one would come is a fault: who
// wrote it means none, or no bound, and would get neither.
func (f *File) withDefaults(zeros []zero) (faults Faults) {
	var open []zero
	seen := map[string]bool{}
	for _, z := range zeros {
		if z.value.IsZero() && !seen[z.path] { // or a variable set it
			seen[z.path] = true
			open = append(open, z)
		}
	}
	f.applyDefaults()
	for _, z := range open {
		if z.value.IsZero() {
			continue
		}
		want := "is 0, must be at least 1"
		if z.value.Type() == reflect.TypeFor[time.Duration]() {
			want = "must be positive, such as 5s"
		}
		faults = append(faults, Fault{Path: z.path, Message: want + "; leave the key out for the default"})
	}
	return faults
}
