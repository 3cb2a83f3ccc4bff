package turnout

import (
	"context"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc/codes"

	bufferv1 "github.com/turnout-rl/turnout/clients/go/gen/turnout/buffer/v1"
)

const (
	// InlineBytes is the largest payload that travels inside a message.
	InlineBytes = 256 << 10

	chunkBytes      = 1 << 20
	payloadTime     = 2 * time.Minute
	payloadAttempts = 20
)

// PutPayload uploads one payload and returns the reference to name in a trajectory.
func PutPayload(ctx context.Context, buffer bufferv1.ReplayBufferClient, run string, data []byte) (*bufferv1.PayloadRef, error) {
	var ref *bufferv1.PayloadRef
	err := repeat(ctx, func(ctx context.Context) error {
		stream, err := buffer.PutPayload(ctx)
		if err != nil {
			return err
		}
		size := int64(len(data))
		frames := []*bufferv1.PutPayloadRequest{{Frame: &bufferv1.PutPayloadRequest_Header{
			Header: &bufferv1.PutPayloadHeader{RunId: run, Size: &size},
		}}}
		for at := 0; at < len(data); at += chunkBytes {
			end := at + chunkBytes
			if end > len(data) {
				end = len(data)
			}
			frames = append(frames, &bufferv1.PutPayloadRequest{Frame: &bufferv1.PutPayloadRequest_Chunk{Chunk: data[at:end]}})
		}
		frames = append(frames, &bufferv1.PutPayloadRequest{Frame: &bufferv1.PutPayloadRequest_End{
			End: &bufferv1.PutPayloadEnd{Crc32C: CRC32C(data)},
		}})
		for _, frame := range frames {
			if stream.Send(frame) != nil {
				break // CloseAndRecv says why
			}
		}
		answer, err := stream.CloseAndRecv()
		ref = answer.GetRef()
		return err
	})
	return ref, err
}

// GetPayloads downloads payloads under a sample lease, in the order of their references. A torn download goes on at the
// byte it had come to; each payload has the size and checksum that its reference names.
func GetPayloads(
	ctx context.Context, buffer bufferv1.ReplayBufferClient, run, lease string, refs []*bufferv1.PayloadRef,
) ([][]byte, error) {
	parts := make([][]byte, len(refs))
	if len(refs) == 0 {
		return parts, nil
	}
	var received int64
	var current int32
	err := repeat(ctx, func(ctx context.Context) error {
		stream, err := buffer.GetPayloads(ctx, &bufferv1.GetPayloadsRequest{RunId: run, LeaseId: lease, Refs: refs, ResumeAt: received})
		if err != nil {
			return err
		}
		for {
			message, err := stream.Recv()
			if err == io.EOF {
				return nil
			}
			if err != nil {
				return err
			}
			switch frame := message.GetFrame().(type) {
			case *bufferv1.GetPayloadsResponse_Header:
				current = frame.Header.GetRefIndex()
			case *bufferv1.GetPayloadsResponse_Chunk:
				parts[current] = append(parts[current], frame.Chunk...)
				received += int64(len(frame.Chunk))
			}
		}
	})
	if err != nil {
		return nil, err
	}
	for at, ref := range refs {
		if int64(len(parts[at])) != ref.GetSize() || CRC32C(parts[at]) != ref.GetCrc32C() {
			return nil, &Error{Code: codes.DataLoss, Reason: "CRC_MISMATCH", Message: fmt.Sprintf("payload %s did not arrive whole", ref.GetId())}
		}
	}
	return parts, nil
}

func repeat(ctx context.Context, work func(context.Context) error) error {
	for attempt := 1; ; attempt++ {
		within, cancel := context.WithTimeout(ctx, payloadTime)
		err := FromError(work(within))
		cancel()
		if err == nil || !retryable(err) || attempt == payloadAttempts {
			return err
		}
		if !Sleep(ctx, time.Duration(attempt)*100*time.Millisecond) {
			return err
		}
	}
}
