package turnout

import (
	"fmt"

	"google.golang.org/grpc/encoding"
	"google.golang.org/protobuf/proto"
)

// codec is gRPC's own for protobuf messages. Debian builds grpc-go 1.33 against github.com/golang/protobuf 1.3, which
// cannot read code generated for google.golang.org/protobuf; with a later grpc-go it changes nothing.
type codec struct{}

func init() { encoding.RegisterCodec(codec{}) }

func (codec) Name() string { return "proto" }

func (codec) Marshal(message any) ([]byte, error) {
	known, ok := message.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("%T is no protobuf message", message)
	}
	return proto.Marshal(known)
}

func (codec) Unmarshal(data []byte, message any) error {
	known, ok := message.(proto.Message)
	if !ok {
		return fmt.Errorf("%T is no protobuf message", message)
	}
	return proto.Unmarshal(data, known)
}
