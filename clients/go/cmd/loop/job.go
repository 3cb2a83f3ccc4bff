// Command loop is a trainer and a rollout worker against live services.
//
//	loop --run my-run --steps 4 --buffer HOST:PORT --engine HOST:PORT --scheduler HOST:PORT
//
// It prints one JSON line per stage, and at the end the ledger: what was trained on, and how the buffer accounts for it.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	bufferv1 "github.com/turnout-rl/turnout/clients/go/gen/turnout/buffer/v1"
	"github.com/turnout-rl/turnout/clients/go/turnout"
)

// The job that the programs of all languages run: its sizes, prompts and seeds. Change it in all of them, or in none.
const (
	partition   = "train"
	groupSize   = 2
	batch       = 4
	miniBatches = 2
	miniBatch   = batch / miniBatches
	maxTokens   = 256
	weightBytes = 1 << 20
)

type job struct {
	run, buffer, engine, scheduler string
	steps                          int64
}

// groupOf returns the prompt of the number-th group, from 0.
func groupOf(number int) *bufferv1.GroupSpec {
	size := int32(groupSize)
	return &bufferv1.GroupSpec{
		GroupId:   fmt.Sprintf("group-%03d", number),
		GroupSize: &size,
		Prompt: &bufferv1.Payload{
			Source:      &bufferv1.Payload_Inline{Inline: turnout.PackTokens([]int32{int32(1000 + number), 7, 11})},
			ContentType: turnout.Tokens,
		},
		Tags: map[string]string{"number": fmt.Sprint(number)},
	}
}

// rewardOf returns the reward of an output: something that depends on every token of it.
func rewardOf(ids []int32) float64 {
	sum := int64(0)
	for _, id := range ids {
		sum += int64(id)
	}
	return float64(sum%1000) / 1000
}

// tell prints one JSON line for whoever runs this program.
func tell(line any) {
	if err := json.NewEncoder(os.Stdout).Encode(line); err != nil {
		panic(err)
	}
}
