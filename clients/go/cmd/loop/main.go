package main

import (
	"context"
	"flag"
	"fmt"
	"os"

	"google.golang.org/grpc"

	bufferv1 "github.com/turnout-rl/turnout/clients/go/gen/turnout/buffer/v1"
	enginev1 "github.com/turnout-rl/turnout/clients/go/gen/turnout/engine/v1"
	schedulerv1 "github.com/turnout-rl/turnout/clients/go/gen/turnout/scheduler/v1"
	"github.com/turnout-rl/turnout/clients/go/turnout"
)

func main() {
	var j job
	flag.StringVar(&j.run, "run", "go", "id of the run")
	flag.StringVar(&j.buffer, "buffer", "127.0.0.1:50051", "target of the replay buffer")
	flag.StringVar(&j.engine, "engine", "127.0.0.1:50052", "target of the engine controller")
	flag.StringVar(&j.scheduler, "scheduler", "127.0.0.1:50053", "target of the switch scheduler")
	flag.Int64Var(&j.steps, "steps", 4, "training steps")
	flag.Parse()
	if err := play(j); err != nil {
		fmt.Fprintln(os.Stderr, "loop:", err)
		os.Exit(1)
	}
}

func play(j job) error {
	// A worker's waits and a trainer's calls do not share a connection: neither can hold up the other.
	var links []*grpc.ClientConn
	for _, target := range []string{j.buffer, j.engine, j.scheduler, j.buffer, j.engine} {
		link, err := turnout.Dial(target)
		if err != nil {
			return err
		}
		defer link.Close()
		links = append(links, link)
	}
	t := &trainer{
		job:       j,
		buffer:    bufferv1.NewReplayBufferClient(links[0]),
		engine:    enginev1.NewEngineControllerClient(links[1]),
		scheduler: schedulerv1.NewSwitchSchedulerClient(links[2]),
		created:   make(chan struct{}),
	}
	w := newWorker(j, bufferv1.NewReplayBufferClient(links[3]), enginev1.NewEngineControllerClient(links[4]))

	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	trained, worked := make(chan error, 1), make(chan error, 1)
	var book *ledger
	go func() {
		made, err := t.train(ctx)
		book = made
		trained <- err
	}()
	go func() {
		select {
		case <-t.created: // the worker needs the run, which the trainer makes first
			worked <- w.work(ctx)
		case <-ctx.Done():
			worked <- nil
		}
	}()
	for {
		select {
		case err := <-trained:
			if err != nil {
				return err
			}
			w.stop()
			trained = nil
		case err := <-worked:
			if err != nil || trained != nil {
				return fmt.Errorf("the worker ended: %w", err)
			}
			tell(map[string]any{"ledger": book, "outages": w.outages.Load()})
			return nil
		}
	}
}
