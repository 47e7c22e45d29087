package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

var codes = []Code{CodeInvalid, CodeCredential, CodeUnreachable, CodeProvider, CodeDeadline, CodeCancelled, CodeInternal, CodeUnknown}

// Contract: AR8
func TestFailureSurvivesItsEnvelope(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := &Failure{
			Code:      rapid.SampledFrom(codes).Draw(t, "code"),
			Message:   rapid.String().Draw(t, "message"),
			Retryable: rapid.Bool().Draw(t, "retryable"),
		}
		if m := rapid.MapOfN(rapid.String(), rapid.String(), 0, 4).Draw(t, "metadata"); len(m) > 0 {
			f.Metadata = m
		}
		b, err := EncodeFailure(f)
		if err != nil {
			t.Fatal(err)
		}
		got, err := DecodeFailure(b)
		if err != nil || !reflect.DeepEqual(got, f) {
			t.Fatalf("got %+v, %v, want %+v", got, err, f)
		}
	})
}

// Old envelopes still decode: lines are added here, never edited.
// Contract: AR8
func TestFailureEnvelopesOfOld(t *testing.T) {
	for in, want := range map[string]Failure{
		`{"version":1,"code":"provider","message":"the provider broke off","retryable":false,"metadata":{"reason":"closed"}}`: {CodeProvider, "the provider broke off", false, map[string]string{"reason": "closed"}},
		`{"version":1,"code":"deadline_exceeded","message":"m","retryable":true,"later":{"x":1}}`:                             {CodeDeadline, "m", true, nil},
		`{"version":1,"code":"quota","message":"m","retryable":true}`:                                                         {CodeUnknown, "m", true, map[string]string{"original_code": "quota"}},
		`{"version":1,"code":"quota","message":"m","retryable":true,"metadata":{"a":"b","original_code":"forged"}}`:           {CodeUnknown, "m", true, map[string]string{"a": "b", "original_code": "quota"}},
		`{"version":1,"code":"unknown","message":"m","retryable":false,"metadata":{"original_code":"quota"}}`:                 {CodeUnknown, "m", false, map[string]string{"original_code": "quota"}},
	} {
		got, err := DecodeFailure([]byte(in))
		if err != nil || !reflect.DeepEqual(*got, want) {
			t.Errorf("%s: got %+v, %v", in, got, err)
		}
	}
}

func TestNoFailureEnvelope(t *testing.T) {
	for _, in := range []string{
		``, `null`, `[]`, `{}`, `{"version":2,"code":"invalid"}`, `{"version":1}`, `{"version":1,"code":7}`, `{"code":"invalid"}`, `{"version":1,"code":"a"} x`,
		`{"version":1,"code":"invalid","message":"` + strings.Repeat("x", maxFailure) + `"}`,
	} {
		if f, err := DecodeFailure([]byte(in)); !errors.Is(err, ErrFailureEnvelope) {
			t.Errorf("%.40s: %+v, %v", in, f, err)
		} else if strings.Contains(err.Error(), "xxx") {
			t.Errorf("the error quotes what came: %v", err)
		}
	}
	if _, err := EncodeFailure(&Failure{Code: CodeInvalid, Message: strings.Repeat("x", maxFailure)}); !errors.Is(err, ErrFailureEnvelope) {
		t.Errorf("too long to be decoded, but encoded: %v", err)
	}
}

// Contract: AR8
func TestFailureOf(t *testing.T) {
	own := &Failure{Code: CodeProvider, Message: "m"}
	for _, tc := range []struct {
		err       error
		code      Code
		retryable bool
	}{
		{fmt.Errorf("run: %w", own), CodeProvider, false},
		{fmt.Errorf("run: %w", ErrRunCancelled), CodeCancelled, false},
		{fmt.Errorf("run: %w", context.Canceled), CodeCancelled, false},
		{fmt.Errorf("run: %w", context.DeadlineExceeded), CodeDeadline, true},
		{errors.New("dial 10.0.0.7: token CANARY"), CodeInternal, false},
	} {
		f := FailureOf(tc.err)
		if f.Code != tc.code || f.Retryable != tc.retryable || strings.Contains(f.Message, "CANARY") || f.Message == "" {
			t.Errorf("%v: %+v", tc.err, f)
		}
	}
	if FailureOf(nil) != nil {
		t.Error("a failure of nothing")
	}
}

func FuzzDecodeFailure(f *testing.F) {
	f.Add([]byte(`{"version":1,"code":"quota","message":"m","retryable":true,"metadata":{"a":"b"}}`))
	f.Add([]byte(`{"version":1,"code":"` + strings.Repeat("é", 100) + `"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := DecodeFailure(b)
		if err != nil {
			return
		}
		if !got.Code.known() || len(got.Metadata[MetaOriginalCode]) > maxCode && got.Code != CodeUnknown && !json.Valid(b) {
			t.Fatalf("%+v", got)
		}
		again, err := EncodeFailure(got)
		if err != nil {
			if len(b) > maxFailure/8 {
				return // escapes made it longer
			}
			t.Fatal(err)
		}
		if twice, err := DecodeFailure(again); err != nil || !reflect.DeepEqual(twice, got) && len(got.Metadata) > 0 {
			t.Fatalf("%+v became %+v, %v", got, twice, err)
		}
	})
}
