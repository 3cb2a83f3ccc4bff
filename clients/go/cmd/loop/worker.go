package main

import (
	"context"
	"fmt"
	"math/rand"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	bufferv1 "github.com/turnout-rl/turnout/clients/go/gen/turnout/buffer/v1"
	enginev1 "github.com/turnout-rl/turnout/clients/go/gen/turnout/engine/v1"
	"github.com/turnout-rl/turnout/clients/go/turnout"
)

const (
	concurrency = 16
	renewEvery  = time.Minute
)

// worker claims trajectories, generates, and hands the results in.
type worker struct {
	job    job
	buffer bufferv1.ReplayBufferClient
	engine enginev1.EngineControllerClient
	// outages counts generations that a service's end cut, and that went on.
	outages atomic.Int64

	room    chan struct{}
	stopped chan struct{}
	mutex   sync.Mutex
	live    map[string]*claimed
}

// claimed is a claim with the number of its trajectories that are still at work.
type claimed struct {
	token *bufferv1.ClaimToken
	left  int
}

func newWorker(j job, buffer bufferv1.ReplayBufferClient, engine enginev1.EngineControllerClient) *worker {
	return &worker{
		job: j, buffer: buffer, engine: engine,
		room: make(chan struct{}, concurrency), stopped: make(chan struct{}), live: map[string]*claimed{},
	}
}

// stop ends work once the trajectories at work are handed in.
func (w *worker) stop() { close(w.stopped) }

// work runs until stop; it returns what no repetition helps against.
func (w *worker) work(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	failed := make(chan error, concurrency)
	go w.renew(ctx, failed)
	var tasks sync.WaitGroup
	defer tasks.Wait()
	names := rand.New(rand.NewSource(time.Now().UnixNano()))
	for {
		select {
		case <-w.stopped:
			tasks.Wait()
			select {
			case err := <-failed:
				return err
			default:
				return nil
			}
		case err := <-failed:
			cancel()
			return err
		case w.room <- struct{}{}: // room for one at least
		}
		<-w.room
		most := int32(concurrency - len(w.room))
		answer, err := turnout.Call(ctx, w.buffer.ClaimGroups, &bufferv1.ClaimGroupsRequest{
			RunId:           w.job.run,
			Partition:       partition,
			WorkerId:        "go-worker",
			MaxTrajectories: &most,
			MaxWait:         durationpb.New(time.Second),
			RequestId:       fmt.Sprintf("%016x", names.Uint64()),
		})
		if err != nil {
			return err
		}
		for _, claim := range answer.GetClaims() {
			ids, err := turnout.UnpackTokens(claim.GetPrompt().GetInline())
			if err != nil {
				return err
			}
			w.hold(claim.GetToken(), len(claim.GetTrajectories()))
			for _, one := range claim.GetTrajectories() {
				w.room <- struct{}{}
				tasks.Add(1)
				go func(claim *bufferv1.Claim, index int32) {
					defer tasks.Done()
					defer func() { <-w.room }()
					t := trajectory{group: claim.GetGroupId(), index: index, attempt: claim.GetToken().GetAttempt(), prompt: ids}
					if err := w.finish(ctx, claim.GetToken(), t); err != nil {
						failed <- err
					}
				}(claim, one.GetIndex())
			}
		}
	}
}

func (w *worker) finish(ctx context.Context, token *bufferv1.ClaimToken, t trajectory) error {
	made, err := generate(ctx, w.engine, w.job.run, t, &w.outages)
	if err != nil {
		return err
	}
	output := &bufferv1.Output{
		PromptTokens: int64(len(t.prompt)),
		Rewards:      map[string]float64{"reward": rewardOf(made.ids)},
		Payload: &bufferv1.Payload{
			Source:      &bufferv1.Payload_Inline{Inline: turnout.PackTokens(made.ids)},
			ContentType: turnout.Tokens,
		},
	}
	for at, segment := range made.segments {
		end := bufferv1.SegmentEnd_SEGMENT_END_COMPLETED
		if at+1 < len(made.segments) {
			end = bufferv1.SegmentEnd_SEGMENT_END_CONTINUED
		}
		output.Segments = append(output.Segments, &bufferv1.Segment{
			Tokens: segment.Tokens, WeightVersion: segment.WeightVersion, End: end, ReplicaId: segment.ReplicaId,
		})
	}
	answer, err := turnout.Call(ctx, w.buffer.FinishTrajectories, &bufferv1.FinishTrajectoriesRequest{
		RunId:     w.job.run,
		Partition: partition,
		Results: []*bufferv1.TrajectoryResult{{
			Token: token, GroupId: t.group, Index: t.index, Outputs: []*bufferv1.Output{output},
		}},
	})
	if err != nil {
		return err
	}
	for _, outcome := range answer.GetOutcomes() {
		if err := turnout.ItemError(outcome); err != nil {
			return err
		}
	}
	w.drop(token)
	return nil
}

// renew extends the claims at work; what was settled meanwhile is stale, and of no interest.
func (w *worker) renew(ctx context.Context, failed chan<- error) {
	for turnout.Sleep(ctx, renewEvery) {
		w.mutex.Lock()
		request := &bufferv1.RenewClaimsRequest{RunId: w.job.run}
		for _, held := range w.live {
			request.Tokens = append(request.Tokens, held.token)
		}
		w.mutex.Unlock()
		if len(request.Tokens) == 0 {
			continue
		}
		if _, err := turnout.Call(ctx, w.buffer.RenewClaims, request); err != nil && ctx.Err() == nil {
			failed <- err
			return
		}
	}
}

// hold remembers a claim until its trajectories are settled.
func (w *worker) hold(token *bufferv1.ClaimToken, trajectories int) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.live[token.GetClaimId()] = &claimed{token: token, left: trajectories}
}

// drop says that one trajectory of a claim is settled.
func (w *worker) drop(token *bufferv1.ClaimToken) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	held := w.live[token.GetClaimId()]
	if held.left--; held.left == 0 {
		delete(w.live, token.GetClaimId())
	}
}
