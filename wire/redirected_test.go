package wire_test

import (
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/iop-fabric/iop/wire"
	"github.com/iop-fabric/iop/wire/iopv1"
)

// What Redirected takes for the broker's is the beginning of no message of ours.
//
// Contract: Z5 V1
func TestRedirectedIsNoMessageOfOurs(t *testing.T) {
	for _, answer := range []string{`{"server":{}}`, "eyJ0eXAiOiJKV1QifQ.e30.x"} {
		if !wire.Redirected([]byte(answer)) {
			t.Errorf("%s is taken for a peer's", answer)
		}
	}
	if wire.Redirected(nil) {
		t.Error("nothing is taken for the broker's")
	}
	all := iopv1.File_iop_v1_runtime_proto.Messages()
	if all.Len() < 20 {
		t.Fatalf("%d messages", all.Len())
	}
	types := map[protoreflect.Kind]protowire.Type{
		protoreflect.BoolKind: protowire.VarintType, protoreflect.EnumKind: protowire.VarintType,
		protoreflect.Int32Kind: protowire.VarintType, protoreflect.Uint32Kind: protowire.VarintType,
		protoreflect.Int64Kind: protowire.VarintType, protoreflect.Uint64Kind: protowire.VarintType,
		protoreflect.Sint32Kind: protowire.VarintType, protoreflect.Sint64Kind: protowire.VarintType,
		protoreflect.Fixed32Kind: protowire.Fixed32Type, protoreflect.Sfixed32Kind: protowire.Fixed32Type, protoreflect.FloatKind: protowire.Fixed32Type,
		protoreflect.Fixed64Kind: protowire.Fixed64Type, protoreflect.Sfixed64Kind: protowire.Fixed64Type, protoreflect.DoubleKind: protowire.Fixed64Type,
		protoreflect.StringKind: protowire.BytesType, protoreflect.BytesKind: protowire.BytesType, protoreflect.MessageKind: protowire.BytesType,
		protoreflect.GroupKind: protowire.StartGroupType,
	}
	for i := range all.Len() {
		fields := all.Get(i).Fields()
		for j := range fields.Len() {
			f := fields.Get(j)
			typ := types[f.Kind()]
			if f.IsPacked() {
				typ = protowire.BytesType
			}
			if wire.Redirected(protowire.AppendTag(nil, f.Number(), typ)) {
				t.Errorf("%s begins as an answer of the broker's", f.FullName())
			}
		}
	}
}
