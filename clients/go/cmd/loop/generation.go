package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	enginev1 "github.com/turnout-rl/turnout/clients/go/gen/turnout/engine/v1"
	"github.com/turnout-rl/turnout/clients/go/turnout"
)

const (
	engineOutage   = 90 * time.Second
	generationTime = 10 * time.Minute
)

// trajectory is what a claim asks to be generated.
type trajectory struct {
	group   string
	index   int32
	attempt int32
	prompt  []int32
}

// generation is an output so far. Whatever is cut, what was generated is kept and continued; the segments add up.
type generation struct {
	ids      []int32
	segments []*enginev1.OutputSegment
}

// generate produces one output to the end, over restarts of the controller.
func generate(ctx context.Context, engine enginev1.EngineControllerClient, run string, t trajectory, outages *atomic.Int64) (*generation, error) {
	output := &generation{}
	heard := time.Now()
	for try := 0; ; try++ {
		done, err := attempt(ctx, engine, output.request(run, t, try), output, &heard)
		if done {
			return output, nil
		}
		if err != nil {
			var refused *turnout.Error
			away := errors.As(err, &refused) && (refused.Code == codes.Unavailable || refused.Code == codes.Canceled)
			if !away || time.Since(heard) > engineOutage {
				return nil, err
			}
			outages.Add(1)
			if !turnout.Sleep(ctx, 250*time.Millisecond) {
				return nil, err
			}
		}
		output.close()
	}
}

func attempt(
	ctx context.Context, engine enginev1.EngineControllerClient, request *enginev1.GenerateRequest, output *generation, heard *time.Time,
) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, generationTime)
	defer cancel()
	stream, err := engine.Generate(ctx, request)
	if err != nil {
		return false, turnout.FromError(err)
	}
	for {
		message, err := stream.Recv()
		if err == io.EOF {
			return false, nil
		}
		if err != nil {
			return false, turnout.FromError(err)
		}
		*heard = time.Now()
		switch event := message.GetEvent().(type) {
		case *enginev1.GenerateResponse_Delta:
			output.take(event.Delta)
		case *enginev1.GenerateResponse_Done:
			output.take(event.Done.GetRest())
			output.segments = event.Done.GetSegments()
			return event.Done.GetFinishReason() != enginev1.FinishReason_FINISH_REASON_ABORT, nil
		}
	}
}

func (g *generation) request(run string, t trajectory, try int) *enginev1.GenerateRequest {
	seed, tokens := int64(t.index), int32(32)
	return &enginev1.GenerateRequest{
		RunId:          run,
		RequestId:      fmt.Sprintf("%s/%d/%d/%d", t.group, t.index, t.attempt, try),
		JoinKey:        &enginev1.JoinKey{Partition: partition, GroupId: t.group, Trajectory: t.index, Attempt: t.attempt},
		SessionId:      t.group,
		PromptTokenIds: t.prompt,
		OutputTokenIds: g.ids,
		OutputSegments: g.segments,
		MaxTokens:      maxTokens,
		// The same in every language, so that their outputs can be compared.
		Sampling:      &enginev1.Sampling{Seed: &seed},
		DeltaTokens:   &tokens,
		DeltaInterval: durationpb.New(100 * time.Millisecond),
	}
}

func (g *generation) take(delta *enginev1.Delta) {
	if len(delta.GetTokenIds()) == 0 {
		return
	}
	if n := len(g.segments); n == 0 || delta.NewSegment || g.segments[n-1].Continued {
		g.close()
		g.segments = append(g.segments, &enginev1.OutputSegment{WeightVersion: delta.WeightVersion, ReplicaId: delta.ReplicaId})
	}
	g.segments[len(g.segments)-1].Tokens += int64(len(delta.TokenIds))
	g.ids = append(g.ids, delta.TokenIds...)
}

// close ends the last segment: what is continued begins one of its own.
func (g *generation) close() {
	if n := len(g.segments); n > 0 {
		g.segments[n-1].Continued = true
	}
}
