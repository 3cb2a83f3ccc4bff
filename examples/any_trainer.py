"""A trainer in plain PyTorch that lends its GPUs while it waits, in 60 lines.

Beside it: turnout up --run my-run --reference 1:1, and examples/any_worker.py.
"""

import io

import torch

from turnout.buffer.v1 import buffer_pb2
from turnout.scheduler.v1 import scheduler_pb2
from turnout.trainer import TrainerHooks, TrainerSetup, WeightTarget
from turnout.worker import unpack

STEPS, BATCH, MINI_BATCHES, GROUP = 5, 8, 4, 2
model = torch.nn.Sequential(torch.nn.Embedding(32_000, 16), torch.nn.Linear(16, 32_000))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
numbers = iter(range(10**9))


def groups(count: int) -> list[buffer_pb2.GroupSpec]:
    texts = [f"prompt {next(numbers)}" for _ in range(count)]
    return [buffer_pb2.GroupSpec(group_id=text, group_size=GROUP, prompt={"inline": text.encode()}) for text in texts]


def train(outputs: list[buffer_pb2.Output], payloads: list[bytes]) -> float:
    rewards = torch.tensor([output.rewards["reward"] for output in outputs])
    advantages = (rewards.view(-1, GROUP) - rewards.view(-1, GROUP).mean(1, keepdim=True)).flatten()
    for output, data, advantage in zip(outputs, payloads, advantages, strict=True):
        tokens = torch.tensor(unpack(data, output.payload.content_type)[0])
        loss = advantage * torch.nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:]) / len(outputs)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return rewards.mean().item()


sizes = {"train_batch_size": BATCH, "parameter_sync_step": MINI_BATCHES, "mini_batch_size": BATCH // MINI_BATCHES}
gpus = {"hybrid_gpus": 1, "standalone_gpus": 1}
config = scheduler_pb2.RunConfig(switch={"enable_switch": True}, total_training_steps=STEPS, **sizes, **gpus)
targets = {"buffer": "127.0.0.1:50051", "engine": "127.0.0.1:50052", "scheduler": "127.0.0.1:50053"}
setup = TrainerSetup("my-run", config, **targets, buffer_config=buffer_pb2.RunConfig(), refill_fn=groups)
with TrainerHooks.open(setup) as hooks:

    def update_weights(target: WeightTarget) -> None:
        torch.save(model.state_dict(), file := io.BytesIO())
        hooks.move_bytes(target, file.getvalue())  # or NCCL, RDMA, files to target.replicas

    hooks.on_init_end(update_weights)  # from here on all GPUs generate
    hooks.on_train_begin(groups(hooks.warmup_groups))
    for step in range(hooks.next_step, STEPS + 1):
        hooks.on_step_begin(step)
        hooks.add_groups(step, groups(BATCH))
        hooks.prepare_step(step)  # waits until the GPUs are the trainer's again
        for mini_batch in range(MINI_BATCHES):
            hooks.on_sample_begin(step, mini_batch)
            with hooks.sample(step, mini_batch, BATCH // MINI_BATCHES) as batch:
                hooks.on_sample_end(step, mini_batch)
                print(f"step {step} mini-batch {mini_batch}: reward {train(batch.outputs, batch.payloads()):.3f}")
        hooks.on_step_end(step, update_weights)  # moves weights, and may lend the GPUs
