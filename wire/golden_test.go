package wire_test

import (
	"bytes"
	"encoding/hex"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/iop-fabric/iop/wire/iopv1"
)

var update = flag.Bool("update", false, "write golden files that are not there yet")

// fill sets every field of m, deterministically, so that a golden file shows
// each field's number and type.
func fill(m protoreflect.Message, depth int) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		n := int64(f.Number())
		one := func() protoreflect.Value {
			switch f.Kind() {
			case protoreflect.StringKind:
				return protoreflect.ValueOfString(string(f.Name()))
			case protoreflect.BytesKind:
				return protoreflect.ValueOfBytes([]byte{0xff, byte(n), 0xe9}) // no UTF-8 on purpose
			case protoreflect.BoolKind:
				return protoreflect.ValueOfBool(true)
			case protoreflect.EnumKind:
				return protoreflect.ValueOfEnum(1)
			case protoreflect.Int32Kind:
				return protoreflect.ValueOfInt32(int32(n))
			case protoreflect.Uint32Kind:
				return protoreflect.ValueOfUint32(uint32(n))
			case protoreflect.Int64Kind:
				return protoreflect.ValueOfInt64(math.MaxInt64 - n)
			case protoreflect.Uint64Kind:
				return protoreflect.ValueOfUint64(math.MaxUint64 - uint64(n))
			default:
				panic("field kind without a golden value: " + f.Kind().String())
			}
		}
		switch {
		case f.IsMap():
			m.Mutable(f).Map().Set(protoreflect.ValueOfString("key").MapKey(), protoreflect.ValueOfString("value"))
		case f.IsList() && f.Kind() == protoreflect.MessageKind:
			for range 2 { // order and duplicates survive
				fill(m.Mutable(f).List().AppendMutable().Message(), depth+1)
			}
		case f.IsList():
			m.Mutable(f).List().Append(one())
		case f.Kind() == protoreflect.MessageKind:
			if depth < 4 {
				fill(m.Mutable(f).Message(), depth+1)
			}
		default:
			m.Set(f, one())
		}
	}
}

func messages() []protoreflect.MessageType {
	var out []protoreflect.MessageType
	all := iopv1.File_iop_v1_runtime_proto.Messages()
	for i := range all.Len() {
		mt, err := protoregistry.GlobalTypes.FindMessageByName(all.Get(i).FullName())
		if err != nil {
			panic(err)
		}
		out = append(out, mt)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Descriptor().Name() < out[j].Descriptor().Name() })
	return out
}

// The bytes of V1: a message written by any version since still decodes to the
// same value, and encodes to the same bytes. Files are added, never edited.
//
// Contract: M1 M2 M4 V1
func TestGoldenBytes(t *testing.T) {
	for _, mt := range messages() {
		name := string(mt.Descriptor().Name())
		t.Run(name, func(t *testing.T) {
			m := mt.New()
			fill(m, 0)
			encoded, err := proto.MarshalOptions{Deterministic: true}.Marshal(m.Interface())
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join("testdata", "v1", name+".hex")
			want, err := os.ReadFile(file)
			if os.IsNotExist(err) && *update {
				if err := os.WriteFile(file, []byte(hex.EncodeToString(encoded)+"\n"), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if err != nil {
				t.Fatalf("%v (a new message: run with -update)", err)
			}
			golden, err := hex.DecodeString(strings.TrimSpace(string(want)))
			if err != nil {
				t.Fatal(err)
			}
			back := mt.New().Interface()
			if err := proto.Unmarshal(golden, back); err != nil {
				t.Fatalf("V1 bytes no longer decode: %v", err)
			}
			if len(back.ProtoReflect().GetUnknown()) > 0 {
				t.Fatal("V1 bytes hold a field this build does not know")
			}
			// Fields added since are absent in the golden bytes; what is there
			// must equal today's value of the same field.
			trimmed := m.Interface()
			m.Range(func(f protoreflect.FieldDescriptor, _ protoreflect.Value) bool {
				if !back.ProtoReflect().Has(f) {
					m.Clear(f)
				}
				return true
			})
			if !proto.Equal(trimmed, back) {
				t.Fatalf("V1 bytes decode to something else:\n%s", prototext.Format(back))
			}
			// The generated fast codec agrees with the standard one.
			fast := mt.New().Interface()
			if err := fast.(interface{ UnmarshalVTUnsafe([]byte) error }).UnmarshalVTUnsafe(golden); err != nil {
				t.Fatal(err)
			}
			if !proto.Equal(fast, back) {
				t.Fatal("UnmarshalVTUnsafe and proto.Unmarshal differ")
			}
		})
	}
}

// Contract: M1
func TestPinnedNumbers(t *testing.T) {
	for _, c := range []struct {
		m    proto.Message
		name protoreflect.Name
		num  protoreflect.FieldNumber
		kind protoreflect.FullName
	}{
		{&iopv1.ProviderTunnelRequest{}, "operation", 13, ""},
		{&iopv1.RunEvent{}, "failure", 13, "iop.v1.ExecutionFailure"},
		{&iopv1.ProviderTunnelFrame{}, "failure", 15, "iop.v1.ExecutionFailure"},
	} {
		f := c.m.ProtoReflect().Descriptor().Fields().ByName(c.name)
		if f == nil || f.Number() != c.num || (c.kind != "" && f.Message().FullName() != c.kind) {
			t.Errorf("%T.%s is not field %d of %s", c.m, c.name, c.num, c.kind)
		}
	}
}

// Contract: V1 N2 R8
func TestReservedAndAbsentNames(t *testing.T) {
	run := (&iopv1.RunRequest{}).ProtoReflect().Descriptor()
	for _, name := range []protoreflect.Name{"workspace", "working_dir", "session_mode", "background", "policy"} {
		if !run.ReservedNames().Has(name) {
			t.Errorf("RunRequest does not reserve %s", name)
		}
	}
	if !(&iopv1.CancelRequest{}).ProtoReflect().Descriptor().ReservedNames().Has("action") {
		t.Error("CancelRequest does not reserve action")
	}
	for _, m := range []proto.Message{
		&iopv1.RegisterRequest{}, &iopv1.RegisterResponse{}, &iopv1.NodeReadyRequest{},
		&iopv1.NodeReadyResponse{}, &iopv1.NodeConfigPayload{}, &iopv1.SignedConfig{},
	} {
		fields := m.ProtoReflect().Descriptor().Fields()
		for i := range fields.Len() {
			if name := string(fields.Get(i).Name()); strings.Contains(name, "generation") {
				t.Errorf("%T has a field %s: the generation is the token's and the subject's", m, name)
			}
		}
	}
}

// A hot frame is decoded without copying its body: the body aliases the message.
//
// Contract: J9
func TestHotFrameAliasesItsMessage(t *testing.T) {
	body := bytes.Repeat([]byte("x"), 64<<10)
	data, err := (&iopv1.ProviderTunnelFrame{Sequence: 7, Kind: iopv1.ProviderTunnelFrame_BODY, Body: body}).MarshalVT()
	if err != nil {
		t.Fatal(err)
	}
	var f iopv1.ProviderTunnelFrame
	if err := f.UnmarshalVTUnsafe(data); err != nil {
		t.Fatal(err)
	}
	i := bytes.Index(data, body)
	data[i] = 'y'
	if f.Body[0] != 'y' {
		t.Fatal("the body was copied")
	}
	allocs := testing.AllocsPerRun(100, func() {
		f = iopv1.ProviderTunnelFrame{}
		if err := f.UnmarshalVTUnsafe(data); err != nil {
			t.Fatal(err)
		}
	})
	if allocs > 0 {
		t.Fatalf("decoding a body frame allocates %v times", allocs)
	}
}

// A later version's fields and enum values are carried, not fatal.
//
// Contract: V1
func TestUnknownFieldsAndEnumValues(t *testing.T) {
	data, err := (&iopv1.ProviderTunnelFrame{RunId: "r", Kind: 99}).MarshalVT()
	if err != nil {
		t.Fatal(err)
	}
	data = protowire.AppendTag(data, 4000, protowire.BytesType)
	data = protowire.AppendBytes(data, []byte("later"))
	var f iopv1.ProviderTunnelFrame
	if err := f.UnmarshalVTUnsafe(data); err != nil {
		t.Fatal(err)
	}
	if f.Kind != 99 || f.RunId != "r" {
		t.Fatalf("got %v", &f)
	}
}

// Contract: M4
func TestLatin1HeaderPasses(t *testing.T) {
	in := &iopv1.ProviderTunnelFrame{Headers: []*iopv1.Header{{Name: "X-A", Value: []byte{0xe9}}, {Name: "X-A", Value: []byte("2")}}}
	data, err := in.MarshalVT()
	if err != nil {
		t.Fatal(err)
	}
	var out iopv1.ProviderTunnelFrame
	if err := out.UnmarshalVT(data); err != nil || !proto.Equal(in, &out) {
		t.Fatalf("%v %v", err, &out)
	}
}

// What a peer sends never panics, and decoding allocates in proportion to it.
func FuzzDecode(f *testing.F) {
	for _, mt := range messages() {
		m := mt.New()
		fill(m, 0)
		data, err := proto.Marshal(m.Interface())
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(_ *testing.T, data []byte) {
		for _, mt := range messages() {
			m := mt.New().Interface().(interface {
				UnmarshalVTUnsafe([]byte) error
				SizeVT() int
				MarshalVT() ([]byte, error)
			})
			if m.UnmarshalVTUnsafe(data) != nil {
				continue
			}
			out, err := m.MarshalVT()
			if err != nil || len(out) != m.SizeVT() {
				panic(fmt.Sprintf("%T: %v, %d bytes of %d", m, err, len(out), m.SizeVT()))
			}
		}
	})
}
