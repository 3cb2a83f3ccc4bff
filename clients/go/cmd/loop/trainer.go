package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sort"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	bufferv1 "github.com/turnout-rl/turnout/clients/go/gen/turnout/buffer/v1"
	enginev1 "github.com/turnout-rl/turnout/clients/go/gen/turnout/engine/v1"
	schedulerv1 "github.com/turnout-rl/turnout/clients/go/gen/turnout/scheduler/v1"
	"github.com/turnout-rl/turnout/clients/go/turnout"
)

const (
	longestWait    = 5 * time.Minute
	heartbeatEvery = 5 * time.Second
	reached        = bufferv1.WaitOutcome_WAIT_OUTCOME_REACHED
	exhausted      = bufferv1.WaitOutcome_WAIT_OUTCOME_EXHAUSTED
)

// trained is a group that was trained on, comparable between languages.
type trained struct {
	GroupID string    `json:"groupId"`
	Tokens  []int     `json:"tokens"`
	CRC32C  []string  `json:"crc32c"`
	Rewards []float64 `json:"rewards"`
}

// ledger is what was trained on, and how the buffer accounts for it.
type ledger struct {
	Added     int64     `json:"added"`
	Committed int64     `json:"committed"`
	Evicted   int64     `json:"evicted"`
	Groups    []trained `json:"groups"`
	Lends     int       `json:"lends"`
	Restarted bool      `json:"restarted"`
}

// trainer calls the scheduler in the order its contract gives, and trains by reading every byte of its batches.
//
// Every call carries the epoch; a lend that began is completed or abandoned; the eviction cursor goes through all waits;
// a transition that failed is repeated, since it goes on with what is left.
type trainer struct {
	job       job
	buffer    bufferv1.ReplayBufferClient
	engine    enginev1.EngineControllerClient
	scheduler schedulerv1.SwitchSchedulerClient
	// created is closed once the run exists in the buffer.
	created chan struct{}

	epoch  int64
	cursor int64
	added  int
	book   ledger
}

func (t *trainer) train(ctx context.Context) (*ledger, error) {
	size, batchSize, n := int32(groupSize), int32(batch), int32(groupSize)
	enable, longest := true, int64(maxTokens)
	if _, err := turnout.Call(ctx, t.buffer.CreateRun, &bufferv1.CreateRunRequest{
		RunId: t.job.run,
		Config: &bufferv1.RunConfig{
			Partitions:     []*bufferv1.PartitionConfig{{Name: partition, DefaultGroupSize: &size}},
			TrainBatchSize: &batchSize,
		},
	}); err != nil {
		return nil, err
	}
	close(t.created)
	before, err := t.incarnation(ctx)
	if err != nil {
		return nil, err
	}
	opened, err := turnout.Call(ctx, t.scheduler.OpenRun, &schedulerv1.OpenRunRequest{
		RunId: t.job.run,
		Config: &schedulerv1.RunConfig{
			Switch:             &schedulerv1.SwitchConfig{EnableSwitch: &enable},
			Policy:             "verl",
			TrainBatchSize:     batch,
			ParameterSyncStep:  miniBatches,
			MiniBatchSize:      miniBatch,
			TotalTrainingSteps: t.job.steps,
			HybridGpus:         1,
			StandaloneGpus:     1,
			Partition:          partition,
			NumWarmupBatches:   1,
			GroupSize:          &n,
			MaxResponseTokens:  &longest,
		},
		BufferTarget: t.job.buffer,
		EngineTarget: t.job.engine,
	})
	if err != nil {
		return nil, err
	}
	t.epoch, t.cursor = opened.Epoch, opened.Cursor
	beating, stop := context.WithCancel(ctx)
	defer stop()
	go t.heartbeat(beating, opened.Epoch)
	if opened.Lend != nil {
		if err := t.fulfil(ctx, opened.Lend); err != nil {
			return nil, err
		}
	}
	if err := t.add(ctx, opened.NextStep, int(opened.WarmupGroups)); err != nil {
		return nil, err
	}
	for step := opened.NextStep; step <= t.job.steps; step++ {
		if err := t.step(ctx, step); err != nil {
			return nil, fmt.Errorf("step %d: %w", step, err)
		}
	}
	counts, err := turnout.Call(ctx, t.buffer.GetLedger, &bufferv1.GetLedgerRequest{RunId: t.job.run, Partition: partition})
	if err != nil {
		return nil, err
	}
	if _, err := turnout.Call(ctx, t.scheduler.CloseRun, &schedulerv1.CloseRunRequest{
		RunId: t.job.run, Epoch: t.epoch, Reason: "finished",
	}); err != nil {
		return nil, err
	}
	after, err := t.incarnation(ctx)
	if err != nil {
		return nil, err
	}
	t.book.Added, t.book.Committed, t.book.Evicted = counts.Added, counts.Committed, counts.Evicted
	t.book.Restarted = before != after
	sort.Slice(t.book.Groups, func(i, j int) bool { return t.book.Groups[i].GroupID < t.book.Groups[j].GroupID })
	return &t.book, nil
}

func (t *trainer) step(ctx context.Context, step int64) error {
	if _, err := again(ctx, func() (*schedulerv1.BeginStepResponse, error) {
		return turnout.Call(ctx, t.scheduler.BeginStep, &schedulerv1.BeginStepRequest{RunId: t.job.run, Epoch: t.epoch, Step: step})
	}); err != nil {
		return err
	}
	if err := t.add(ctx, step, batch); err != nil {
		return err
	}
	tell(map[string]any{"at": "added", "step": step})
	if err := t.prepare(ctx, step); err != nil {
		return err
	}
	for number := int32(0); number < miniBatches; number++ {
		if err := t.miniBatch(ctx, step, number); err != nil {
			return fmt.Errorf("mini-batch %d: %w", number, err)
		}
	}
	ended, err := again(ctx, func() (*schedulerv1.EndStepResponse, error) {
		return turnout.Call(ctx, t.scheduler.EndStep, &schedulerv1.EndStepRequest{RunId: t.job.run, Epoch: t.epoch, Step: step})
	})
	if err != nil {
		return err
	}
	if ended.Lend != nil {
		err = t.fulfil(ctx, ended.Lend)
	} else {
		_, err = t.update(ctx, target{role: enginev1.ReplicaRole_REPLICA_ROLE_STANDALONE, version: step})
	}
	if err != nil {
		return err
	}
	tell(map[string]any{"at": "trained", "step": step})
	return nil
}

// prepare waits until the GPUs are the trainer's again.
func (t *trainer) prepare(ctx context.Context, step int64) error {
	for attempt := int32(0); ; attempt++ {
		done, err := again(ctx, func() (*schedulerv1.PrepareStepDone, error) {
			var done *schedulerv1.PrepareStepDone
			err := turnout.Hold(ctx, longestWait,
				func(ctx context.Context, left time.Duration) (schedulerv1.SwitchScheduler_PrepareStepClient, error) {
					return t.scheduler.PrepareStep(ctx, &schedulerv1.PrepareStepRequest{
						RunId: t.job.run, Epoch: t.epoch, Step: step, Cursor: t.cursor, MaxWait: durationpb.New(left), Attempt: attempt,
					})
				},
				func(message *schedulerv1.PrepareStepResponse) (bool, error) {
					done = message.GetDone()
					return done != nil, t.decline(ctx, message.GetRefillDue())
				})
			return done, err
		})
		if err != nil {
			return err
		}
		t.cursor = done.NextCursor
		if done.Outcome == reached || done.Outcome == exhausted {
			return nil
		}
	}
}

func (t *trainer) miniBatch(ctx context.Context, step int64, number int32) error {
	if err := t.beginSample(ctx, step, number); err != nil {
		return err
	}
	began := time.Now()
	if err := t.waitForDepth(ctx, step); err != nil {
		return err
	}
	done, groups, err := t.sample(ctx, step, number)
	if err != nil {
		return err
	}
	if _, err := turnout.Call(ctx, t.scheduler.EndSample, &schedulerv1.EndSampleRequest{
		RunId: t.job.run, Epoch: t.epoch, Step: step, MiniBatch: number, Wait: durationpb.New(time.Since(began)),
	}); err != nil {
		return err
	}
	if err := t.read(ctx, done.LeaseId, groups); err != nil {
		return err
	}
	if _, err := turnout.Call(ctx, t.buffer.CommitSample, &bufferv1.CommitSampleRequest{
		RunId: t.job.run, Epoch: &t.epoch, LeaseId: done.LeaseId,
	}); err != nil {
		return err
	}
	_, err = turnout.Call(ctx, t.buffer.ReleasePayload, &bufferv1.ReleasePayloadRequest{
		RunId: t.job.run, Epoch: &t.epoch, LeaseId: done.LeaseId,
	})
	return err
}

// beginSample announces a mini-batch, and lends within the step if it is told to.
func (t *trainer) beginSample(ctx context.Context, step int64, number int32) error {
	for attempt := int32(0); ; attempt++ {
		done, err := again(ctx, func() (*schedulerv1.BeginSampleDone, error) {
			var done *schedulerv1.BeginSampleDone
			err := turnout.Hold(ctx, longestWait,
				func(ctx context.Context, left time.Duration) (schedulerv1.SwitchScheduler_BeginSampleClient, error) {
					return t.scheduler.BeginSample(ctx, &schedulerv1.BeginSampleRequest{
						RunId: t.job.run, Epoch: t.epoch, Step: step, MiniBatch: number, Attempt: attempt,
						Cursor: t.cursor, MaxWait: durationpb.New(left),
					})
				},
				func(message *schedulerv1.BeginSampleResponse) (bool, error) {
					done = message.GetDone()
					return done != nil, t.decline(ctx, message.GetRefillDue())
				})
			return done, err
		})
		if err != nil {
			return err
		}
		t.cursor = done.NextCursor
		if done.GetProceed() != nil {
			return nil
		}
		if lend := done.GetLend(); lend != nil {
			if err := t.fulfil(ctx, lend); err != nil {
				return err
			}
		}
	}
}

func (t *trainer) waitForDepth(ctx context.Context, step int64) error {
	var done *bufferv1.WaitDone
	err := turnout.Hold(ctx, longestWait,
		func(ctx context.Context, left time.Duration) (bufferv1.ReplayBuffer_WaitForSampleableClient, error) {
			return t.buffer.WaitForSampleable(ctx, &bufferv1.WaitForSampleableRequest{
				RunId: t.job.run, Partition: partition, Epoch: &t.epoch, Step: &step,
				Target: miniBatch, MaxWait: durationpb.New(left), Cursor: t.cursor,
			})
		},
		func(message *bufferv1.WaitForSampleableResponse) (bool, error) {
			done = message.GetDone()
			return done != nil, t.decline(ctx, message.GetRefillDue())
		})
	if err == nil && done.Outcome != reached {
		err = fmt.Errorf("not reached: %s", done.Reason)
	}
	return err
}

func (t *trainer) sample(ctx context.Context, step int64, number int32) (*bufferv1.SampleDone, []*bufferv1.SampledGroup, error) {
	var done *bufferv1.SampleDone
	var groups []*bufferv1.SampledGroup
	err := turnout.Hold(ctx, longestWait,
		func(ctx context.Context, left time.Duration) (bufferv1.ReplayBuffer_SampleClient, error) {
			groups = nil
			return t.buffer.Sample(ctx, &bufferv1.SampleRequest{
				RunId: t.job.run, Partition: partition, Epoch: &t.epoch, Step: &step,
				Batch: miniBatch, MaxWait: durationpb.New(left), Cursor: t.cursor,
				RequestId: fmt.Sprintf("sample-%d-%d", step, number), // a repeat after a cut gets the same batch
			})
		},
		func(message *bufferv1.SampleResponse) (bool, error) {
			groups = append(groups, message.GetGroups().GetGroups()...)
			done = message.GetDone()
			return done != nil, t.decline(ctx, message.GetRefillDue())
		})
	if err != nil {
		return nil, nil, err
	}
	if done.Outcome != reached || len(groups) != int(done.GroupCount) {
		return nil, nil, fmt.Errorf("not reached: %s, %d of %d groups", done.Reason, len(groups), done.GroupCount)
	}
	t.cursor = done.NextCursor
	return done, groups, nil
}

// read is the training: every byte is fetched and compared with what the manifest says of it.
func (t *trainer) read(ctx context.Context, lease string, groups []*bufferv1.SampledGroup) error {
	var refs []*bufferv1.PayloadRef
	for _, group := range groups {
		for _, one := range group.Trajectories {
			for _, output := range one.Outputs {
				refs = append(refs, output.GetPayload().GetRef())
			}
		}
	}
	payloads, err := turnout.GetPayloads(ctx, t.buffer, t.job.run, lease, refs)
	if err != nil {
		return err
	}
	for _, group := range groups {
		made := trained{GroupID: group.GroupId}
		for _, one := range group.Trajectories {
			for _, output := range one.Outputs {
				data := payloads[0]
				payloads = payloads[1:]
				ids, err := turnout.UnpackTokens(data)
				if err != nil {
					return err
				}
				length := int64(0)
				for _, segment := range output.Segments {
					length += segment.Tokens
				}
				if int64(len(ids)) != length || output.Rewards["reward"] != rewardOf(ids) {
					return fmt.Errorf("%s: the bytes are not those of its segments and rewards", group.GroupId)
				}
				made.Tokens = append(made.Tokens, len(ids))
				made.CRC32C = append(made.CRC32C, fmt.Sprintf("%08x", turnout.CRC32C(data)))
				made.Rewards = append(made.Rewards, rewardOf(ids))
			}
		}
		t.book.Groups = append(t.book.Groups, made)
	}
	return nil
}

// add adds the next prompts of the job; with the last of them supply ends.
func (t *trainer) add(ctx context.Context, step int64, wanted int) error {
	total := int(t.job.steps) * batch
	if left := total - t.added; wanted > left {
		wanted = left
	}
	if wanted == 0 {
		return nil
	}
	var groups []*bufferv1.GroupSpec
	for at := 0; at < wanted; at++ {
		groups = append(groups, groupOf(t.added+at))
	}
	t.added += wanted
	_, err := turnout.Call(ctx, t.buffer.AddGroups, &bufferv1.AddGroupsRequest{
		RunId: t.job.run, Partition: partition, Epoch: &t.epoch, Step: &step, Groups: groups,
		EndOfPrompts: t.added == total, RequestId: fmt.Sprintf("add-%d", t.added),
	})
	return err
}

// decline answers a refill, if there is one: this job has no prompts beyond its own.
func (t *trainer) decline(ctx context.Context, due *bufferv1.RefillDue) error {
	if due == nil {
		return nil
	}
	_, err := turnout.Call(ctx, t.buffer.DeclineRefill, &bufferv1.DeclineRefillRequest{
		RunId: t.job.run, Partition: partition, Epoch: &t.epoch, RefillClaimId: due.RefillClaimId,
	})
	return err
}

// fulfil brings weights to the replicas of a lend and completes it, or abandons it.
func (t *trainer) fulfil(ctx context.Context, lend *schedulerv1.Lend) error {
	err := t.complete(ctx, lend)
	if err != nil {
		reason := err.Error()
		if len(reason) > 500 {
			reason = strings.ToValidUTF8(reason[:500], "")
		}
		_, _ = turnout.Call(ctx, t.scheduler.AbandonLend, &schedulerv1.AbandonLendRequest{
			RunId: t.job.run, Epoch: t.epoch, LendId: lend.LendId, Reason: reason,
		})
		return err
	}
	t.book.Lends++
	return nil
}

func (t *trainer) complete(ctx context.Context, lend *schedulerv1.Lend) error {
	request := &schedulerv1.CompleteLendRequest{RunId: t.job.run, Epoch: t.epoch, LendId: lend.LendId}
	to := target{role: enginev1.ReplicaRole_REPLICA_ROLE_STANDALONE, version: lend.WeightVersion, allowOlder: lend.AllowOlder}
	if lend.UpdateStandalone {
		took, err := t.update(ctx, to)
		if err != nil {
			return err
		}
		request.StandaloneUpdate = durationpb.New(took)
	}
	to.role, to.replicas = enginev1.ReplicaRole_REPLICA_ROLE_HYBRID, lend.ReplicaIds
	took, err := t.update(ctx, to)
	if err != nil {
		return err
	}
	request.HybridUpdate = durationpb.New(took)
	_, err = again(ctx, func() (*schedulerv1.CompleteLendResponse, error) {
		return turnout.Call(ctx, t.scheduler.CompleteLend, request)
	})
	return err
}

func (t *trainer) update(ctx context.Context, to target) (time.Duration, error) {
	return again(ctx, func() (time.Duration, error) { return t.install(ctx, to) })
}

// again repeats what a restart of the controller or the scheduler cut.
func again[T any](ctx context.Context, work func() (T, error)) (T, error) {
	for attempt := 1; ; attempt++ {
		made, err := work()
		var refused *turnout.Error
		cut := errors.As(err, &refused) && (refused.Code == codes.Unavailable || refused.Code == codes.Aborted)
		if !cut || attempt == 30 || !turnout.Sleep(ctx, 500*time.Millisecond) {
			return made, err
		}
	}
}

func (t *trainer) heartbeat(ctx context.Context, epoch int64) {
	for {
		_, err := turnout.Call(ctx, t.scheduler.Heartbeat, &schedulerv1.HeartbeatRequest{RunId: t.job.run, Epoch: epoch})
		if err != nil && ctx.Err() == nil {
			// Other calls say so too, and theirs is the error that counts.
			fmt.Fprintln(os.Stderr, "heartbeat:", err)
		}
		if !turnout.Sleep(ctx, heartbeatEvery) {
			return
		}
	}
}

func (t *trainer) incarnation(ctx context.Context) (string, error) {
	answer, err := turnout.Call(ctx, t.buffer.GetRun, &bufferv1.GetRunRequest{RunId: t.job.run})
	return answer.GetIncarnation(), err
}
