package main

import (
	"bytes"
	"context"
	"time"

	enginev1 "github.com/turnout-rl/turnout/clients/go/gen/turnout/engine/v1"
	"github.com/turnout-rl/turnout/clients/go/turnout"
)

// target names replicas that wait for weights.
type target struct {
	role       enginev1.ReplicaRole
	replicas   []string // empty: all of the role
	version    int64
	allowOlder bool
}

// install brings a version to replicas and returns how long it took. An update that was opened is committed or aborted.
func (t *trainer) install(ctx context.Context, to target) (time.Duration, error) {
	began := time.Now()
	hybrid := to.role == enginev1.ReplicaRole_REPLICA_ROLE_HYBRID
	kind := enginev1.UpdateKind_UPDATE_KIND_AWAKE
	if hybrid {
		kind = enginev1.UpdateKind_UPDATE_KIND_ASLEEP
	}
	opened, err := turnout.Call(ctx, t.engine.BeginWeightUpdate, &enginev1.BeginWeightUpdateRequest{
		RunId:         t.job.run,
		Epoch:         &t.epoch,
		Selector:      &enginev1.ReplicaSelector{ReplicaIds: to.replicas, Roles: []enginev1.ReplicaRole{to.role}},
		Kind:          kind,
		WeightVersion: to.version,
		AllowOlder:    to.allowOlder,
	})
	if err != nil {
		return 0, err
	}
	if err := t.move(ctx, opened, to.version, hybrid); err != nil {
		_, _ = turnout.Call(ctx, t.engine.AbortWeightUpdate, &enginev1.AbortWeightUpdateRequest{
			RunId: t.job.run, Epoch: &t.epoch, UpdateId: opened.UpdateId,
		})
		return 0, err
	}
	return time.Since(began), nil
}

func (t *trainer) move(ctx context.Context, opened *enginev1.BeginWeightUpdateResponse, version int64, hybrid bool) error {
	sent, err := t.send(ctx, opened.UpdateId, bytes.Repeat([]byte{byte(version % 251)}, weightBytes))
	if err != nil {
		return err
	}
	missed := map[string]bool{}
	for _, outcome := range sent.Operation.GetOutcomes() {
		missed[outcome.ReplicaId] = outcome.Kind == enginev1.OutcomeKind_OUTCOME_KIND_FAILED
	}
	var acks []*enginev1.UpdateAck
	var vacated []*enginev1.Vacated
	for _, replica := range opened.Wave {
		acks = append(acks, &enginev1.UpdateAck{ReplicaId: replica.ReplicaId, Ok: !missed[replica.ReplicaId]})
		for _, rank := range replica.Ranks {
			vacated = append(vacated, &enginev1.Vacated{Gpu: rank.Gpu, BytesFree: 80 << 30})
		}
	}
	if hybrid {
		if _, err := turnout.Call(ctx, t.engine.ReportVacated, &enginev1.ReportVacatedRequest{
			RunId: t.job.run, Epoch: &t.epoch, UpdateId: opened.UpdateId, Vacated: vacated,
		}); err != nil {
			return err
		}
	}
	_, err = turnout.Call(ctx, t.engine.CommitWeightUpdate, &enginev1.CommitWeightUpdateRequest{
		RunId: t.job.run, Epoch: &t.epoch, UpdateId: opened.UpdateId, Acks: acks,
	})
	return err
}

// send moves bytes through the controller in chunks with a checksum.
func (t *trainer) send(ctx context.Context, update string, weights []byte) (*enginev1.UpdateWeightsResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	stream, err := t.engine.UpdateWeights(ctx)
	if err != nil {
		return nil, turnout.FromError(err)
	}
	half := len(weights) / 2
	frames := []*enginev1.UpdateWeightsRequest{
		{Frame: &enginev1.UpdateWeightsRequest_Header{Header: &enginev1.UpdateWeightsHeader{
			RunId: t.job.run, Epoch: &t.epoch, UpdateId: update, Size: int64(len(weights)),
		}}},
		{Frame: &enginev1.UpdateWeightsRequest_Chunk{Chunk: weights[:half]}},
		{Frame: &enginev1.UpdateWeightsRequest_Chunk{Chunk: weights[half:]}},
		{Frame: &enginev1.UpdateWeightsRequest_End{End: &enginev1.UpdateWeightsEnd{Crc32C: turnout.CRC32C(weights)}}},
	}
	for _, frame := range frames {
		if stream.Send(frame) != nil {
			break // CloseAndRecv says why
		}
	}
	sent, err := stream.CloseAndRecv()
	return sent, turnout.FromError(err)
}
