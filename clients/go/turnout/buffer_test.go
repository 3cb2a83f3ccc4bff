package turnout

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"math/rand"
	"net"
	"os"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	bufferv1 "github.com/turnout-rl/turnout/clients/go/gen/turnout/buffer/v1"
)

const train = "train"

// live returns a client of the buffer that TURNOUT_TEST_BUFFER names, and a new run with some groups.
func live(t *testing.T, groups int) (bufferv1.ReplayBufferClient, string) {
	t.Helper()
	target := os.Getenv("TURNOUT_TEST_BUFFER")
	if target == "" {
		t.Skip("TURNOUT_TEST_BUFFER is not set")
	}
	link, err := Dial(target)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { link.Close() })
	buffer := bufferv1.NewReplayBufferClient(link)
	run := fmt.Sprintf("go-%d-%s", time.Now().UnixNano(), t.Name())
	if _, err := Call(context.Background(), buffer.CreateRun, &bufferv1.CreateRunRequest{RunId: run}); err != nil {
		t.Fatal(err)
	}
	for at := 0; at < groups; at++ {
		if err := add(buffer, run, fmt.Sprintf("g%d", at), 1, nil); err != nil {
			t.Fatal(err)
		}
	}
	return buffer, run
}

func add(buffer bufferv1.ReplayBufferClient, run, group string, step int64, epoch *int64) error {
	_, err := Call(context.Background(), buffer.AddGroups, &bufferv1.AddGroupsRequest{
		RunId: run, Partition: train, Step: &step, Epoch: epoch, Groups: []*bufferv1.GroupSpec{{GroupId: group}},
	})
	return err
}

func refused(t *testing.T, err error, code codes.Code, reason string) *Error {
	t.Helper()
	known, ok := err.(*Error)
	if !ok || known.Code != code || (reason != "" && known.Reason != reason) {
		t.Fatalf("want %s / %s, got %v", code, reason, err)
	}
	return known
}

// H58: steps and token counts beyond 2**53 are kept exactly.
func TestLargeNumbersAreKept(t *testing.T) {
	buffer, run := live(t, 0)
	born, version, tokens := int64(1<<53+1), int64(1<<53), int64(1<<62-1)
	if err := add(buffer, run, "big", born, nil); err != nil {
		t.Fatal(err)
	}
	answer, err := Call(context.Background(), buffer.FinishTrajectories, &bufferv1.FinishTrajectoriesRequest{
		RunId: run, Partition: train, Results: []*bufferv1.TrajectoryResult{{GroupId: "big", Outputs: []*bufferv1.Output{{
			PromptTokens: born + 2, Segments: []*bufferv1.Segment{{Tokens: tokens, WeightVersion: &version}},
		}}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := ItemError(answer.Outcomes[0]); err != nil {
		t.Fatal(err)
	}
	page, err := Call(context.Background(), buffer.ListGroups, &bufferv1.ListGroupsRequest{RunId: run, Partition: train})
	if err != nil {
		t.Fatal(err)
	}
	output := page.Groups[0].Trajectories[0].Outputs[0]
	if page.Groups[0].BornStep != born || output.PromptTokens != born+2 || output.Segments[0].Tokens != tokens ||
		output.Segments[0].GetWeightVersion() != version {
		t.Errorf("got %v", page.Groups[0])
	}
}

func wait(buffer bufferv1.ReplayBufferClient, run string, target int64, most *durationpb.Duration) (*bufferv1.WaitDone, error) {
	var done *bufferv1.WaitDone
	step := int64(1)
	err := Hold(context.Background(), 10*time.Second,
		func(ctx context.Context, _ time.Duration) (bufferv1.ReplayBuffer_WaitForSampleableClient, error) {
			return buffer.WaitForSampleable(ctx, &bufferv1.WaitForSampleableRequest{
				RunId: run, Partition: train, Step: &step, Target: target, MaxWait: most,
			})
		},
		func(message *bufferv1.WaitForSampleableResponse) (bool, error) {
			done = message.GetDone()
			return done != nil, nil
		})
	return done, err
}

// H58: boundary numbers are answered or refused by name, never rounded or wrapped.
func TestBoundaryWaits(t *testing.T) {
	buffer, run := live(t, 0)
	for _, one := range []struct {
		target  int64
		most    *durationpb.Duration
		outcome bufferv1.WaitOutcome
		code    codes.Code
	}{
		{0, durationpb.New(time.Second), bufferv1.WaitOutcome_WAIT_OUTCOME_REACHED, codes.OK},
		{1, durationpb.New(0), bufferv1.WaitOutcome_WAIT_OUTCOME_TIMED_OUT, codes.OK},
		{0, &durationpb.Duration{Seconds: 315_576_000_000}, bufferv1.WaitOutcome_WAIT_OUTCOME_REACHED, codes.OK},
		{-1, durationpb.New(time.Second), 0, codes.InvalidArgument},
		{math.MinInt64, durationpb.New(time.Second), 0, codes.InvalidArgument},
		{1, durationpb.New(-time.Second), 0, codes.InvalidArgument},
	} {
		done, err := wait(buffer, run, one.target, one.most)
		if one.code != codes.OK {
			refused(t, err, one.code, "")
		} else if err != nil || done.Outcome != one.outcome {
			t.Errorf("target %d, max_wait %v: got %v, %v", one.target, one.most, done, err)
		}
	}
	refused(t, add(buffer, run, "x", -1, nil), codes.InvalidArgument, "")
}

func TestErrorsCarryReasonAndMetadata(t *testing.T) {
	buffer, run := live(t, 0)
	_, err := Call(context.Background(), buffer.GetRun, &bufferv1.GetRunRequest{RunId: "no such run"})
	refused(t, err, codes.NotFound, "RUN_NOT_FOUND")
	epoch := int64(7)
	if known := refused(t, add(buffer, run, "x", 1, &epoch), codes.FailedPrecondition, "UNKNOWN_EPOCH"); len(known.Metadata) == 0 {
		t.Error("no metadata")
	}
}

// A deadline before max_wait is answered TIMED_OUT by the service, so that no event is lost to a deadline error.
func TestDeadlineBeforeMaxWait(t *testing.T) {
	buffer, run := live(t, 1)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	step := int64(1)
	stream, err := buffer.WaitForSampleable(ctx, &bufferv1.WaitForSampleableRequest{RunId: run, Partition: train, Step: &step, Target: 1})
	if err != nil {
		t.Fatal(err)
	}
	for {
		message, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if done := message.GetDone(); done != nil {
			if done.Outcome != bufferv1.WaitOutcome_WAIT_OUTCOME_TIMED_OUT {
				t.Errorf("got %v", done)
			}
			return
		}
	}
}

// H57: a listener that stays silent costs a deadline, not for ever.
func TestSilentListener(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	link, err := Dial(silent.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer link.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, err = Call(ctx, bufferv1.NewReplayBufferClient(link).GetRun, &bufferv1.GetRunRequest{RunId: "x"})
	if known, ok := err.(*Error); !ok || (known.Code != codes.DeadlineExceeded && known.Code != codes.Unavailable) {
		t.Errorf("got %v", err)
	}
}

func TestUnknownEnumValueMatchesNothing(t *testing.T) {
	buffer, run := live(t, 1)
	page, err := Call(context.Background(), buffer.ListGroups, &bufferv1.ListGroupsRequest{
		RunId: run, Partition: train, States: []bufferv1.GroupState{99},
	})
	if err != nil {
		refused(t, err, codes.InvalidArgument, "")
	} else if len(page.Groups) != 0 {
		t.Errorf("got %v", page.Groups)
	}
}

// Results both ways on one stream, a payload up and down, and the depth as it changes.
func TestStreams(t *testing.T) {
	buffer, run := live(t, 2)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	step, two := int64(1), int32(2)
	depths, err := buffer.WatchDepth(ctx, &bufferv1.WatchDepthRequest{RunId: run, Partition: train, Step: &step})
	if err != nil {
		t.Fatal(err)
	}
	work, err := Call(ctx, buffer.ClaimGroups, &bufferv1.ClaimGroupsRequest{RunId: run, Partition: train, WorkerId: "w", MaxTrajectories: &two})
	if err != nil || len(work.Claims) != 2 {
		t.Fatal(work, err)
	}
	large := make([]byte, 3<<20+5)
	rand.New(rand.NewSource(1)).Read(large)
	ref, err := PutPayload(ctx, buffer, run, large)
	if err != nil || ref.Size != int64(len(large)) {
		t.Fatal(ref, err)
	}
	stream, err := buffer.FinishStream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	frames := []*bufferv1.FinishStreamRequest{{Frame: &bufferv1.FinishStreamRequest_Header{
		Header: &bufferv1.FinishStreamHeader{RunId: run, Partition: train},
	}}}
	for at, claim := range work.Claims {
		payload := &bufferv1.Payload{Source: &bufferv1.Payload_Ref{Ref: ref}}
		if at > 0 {
			payload = &bufferv1.Payload{Source: &bufferv1.Payload_Inline{Inline: []byte("small")}}
		}
		result := &bufferv1.TrajectoryResult{Token: claim.Token, GroupId: claim.GroupId, Outputs: []*bufferv1.Output{{
			Segments: []*bufferv1.Segment{{Tokens: 5}}, Payload: payload,
		}}}
		frames = append(frames, &bufferv1.FinishStreamRequest{Frame: &bufferv1.FinishStreamRequest_Batch{
			Batch: &bufferv1.FinishStreamBatch{Sequence: int64(at + 1), Results: []*bufferv1.TrajectoryResult{result}},
		}})
	}
	for _, frame := range frames {
		if err := stream.Send(frame); err != nil {
			t.Fatal(err)
		}
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	for sequence := int64(1); ; sequence++ {
		answer, err := stream.Recv()
		if err == io.EOF && sequence == 3 {
			break
		}
		if err != nil || answer.Sequence != sequence {
			t.Fatal(answer, err)
		}
		for _, outcome := range answer.Outcomes {
			if err := ItemError(outcome); err != nil {
				t.Fatal(err)
			}
		}
	}
	for {
		message, err := depths.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if message.GetDepth().GetSampleable() == 2 {
			break
		}
	}
	sampling, err := buffer.Sample(ctx, &bufferv1.SampleRequest{RunId: run, Partition: train, Step: &step, Batch: two, MaxWait: durationpb.New(5 * time.Second)})
	if err != nil {
		t.Fatal(err)
	}
	var groups []*bufferv1.SampledGroup
	for {
		message, err := sampling.Recv()
		if err != nil {
			t.Fatal(err)
		}
		groups = append(groups, message.GetGroups().GetGroups()...)
		done := message.GetDone()
		if done == nil {
			continue
		}
		if done.Outcome != bufferv1.WaitOutcome_WAIT_OUTCOME_REACHED || len(groups) != 2 || groups[0].GroupId != "g0" {
			t.Fatal(done, groups)
		}
		data, err := GetPayloads(ctx, buffer, run, done.LeaseId, []*bufferv1.PayloadRef{ref})
		if err != nil || !bytes.Equal(data[0], large) {
			t.Fatal(err)
		}
		return
	}
}
