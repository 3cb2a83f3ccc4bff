package turnout

import (
	"bytes"
	"math"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	bufferv1 "github.com/turnout-rl/turnout/clients/go/gen/turnout/buffer/v1"
)

// H58: 64-bit numbers come back exactly, on the wire and as JSON.
func TestBoundaryNumbersComeBack(t *testing.T) {
	for _, number := range []int64{0, -1, 1 << 31, 1 << 53, 1<<53 + 1, math.MaxInt64, math.MinInt64} {
		number := number
		segment := &bufferv1.Segment{Tokens: number, WeightVersion: &number}
		wire, err := proto.Marshal(segment)
		if err != nil {
			t.Fatal(err)
		}
		text, err := protojson.Marshal(segment)
		if err != nil {
			t.Fatal(err)
		}
		var fromWire, fromText bufferv1.Segment
		if err := proto.Unmarshal(wire, &fromWire); err != nil {
			t.Fatal(err)
		}
		if err := protojson.Unmarshal(text, &fromText); err != nil {
			t.Fatal(err)
		}
		if !proto.Equal(segment, &fromWire) || !proto.Equal(segment, &fromText) {
			t.Errorf("%d came back as %v and %v", number, fromWire.GetTokens(), fromText.GetTokens())
		}
	}
}

func TestAbsentDiffersFromZero(t *testing.T) {
	zero := int64(0)
	for _, version := range []*int64{nil, &zero} {
		wire, _ := proto.Marshal(&bufferv1.Segment{WeightVersion: version})
		var back bufferv1.Segment
		if err := proto.Unmarshal(wire, &back); err != nil {
			t.Fatal(err)
		}
		if (back.WeightVersion == nil) != (version == nil) {
			t.Errorf("%v came back as %v", version, back.WeightVersion)
		}
	}
}

// An enum value of a newer service is kept as its number.
func TestUnknownEnumValueIsKept(t *testing.T) {
	wire, _ := proto.Marshal(&bufferv1.ListGroupsRequest{States: []bufferv1.GroupState{99}})
	var back bufferv1.ListGroupsRequest
	if err := proto.Unmarshal(wire, &back); err != nil {
		t.Fatal(err)
	}
	if back.States[0] != 99 || back.States[0].String() != "99" {
		t.Errorf("got %v", back.States)
	}
	again, _ := proto.Marshal(&back)
	if !bytes.Equal(wire, again) {
		t.Errorf("%x became %x", wire, again)
	}
}

// An event of a newer service is passed over: no event is set.
func TestUnknownEventIsUnset(t *testing.T) {
	var message bufferv1.WaitForSampleableResponse
	if err := proto.Unmarshal([]byte{0x7a, 0x01, 0x61}, &message); err != nil {
		t.Fatal(err)
	}
	if message.GetEvent() != nil || message.GetDone() != nil {
		t.Errorf("got %v", message.GetEvent())
	}
}

func TestTokensAndChecksum(t *testing.T) {
	ids := []int32{0, 1, math.MaxInt32, -1}
	back, err := UnpackTokens(PackTokens(ids))
	if err != nil || len(back) != len(ids) || back[2] != ids[2] || back[3] != ids[3] {
		t.Errorf("got %v, %v", back, err)
	}
	if _, err := UnpackTokens(make([]byte, 5)); err == nil {
		t.Error("five bytes were taken")
	}
	if got := CRC32C([]byte("123456789")); got != 0xe3069283 { // RFC 3720, B.4
		t.Errorf("got %08x", got)
	}
}

func TestErrorsAreReadWithTheirDetails(t *testing.T) {
	from, err := status.New(codes.NotFound, "no such run").WithDetails(
		&errdetails.ErrorInfo{Domain: "turnout", Reason: "RUN_NOT_FOUND", Metadata: map[string]string{"run_id": "x"}})
	if err != nil {
		t.Fatal(err)
	}
	read, ok := FromError(from.Err()).(*Error)
	if !ok || read.Code != codes.NotFound || read.Reason != "RUN_NOT_FOUND" || read.Metadata["run_id"] != "x" {
		t.Errorf("got %#v", read)
	}
	if FromError(nil) != nil {
		t.Error("nil became an error")
	}
}
