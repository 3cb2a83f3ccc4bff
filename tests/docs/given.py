"""What pages take for granted: names that are the reader's own, files beside a command, services that run elsewhere."""

from __future__ import annotations

import json
from typing import Final

AGENT: Final = "127.0.0.1:50060"
"""An agent with the reference replica `standalone-9`, in the scene `job`."""

STOPPED: Final = "/var/lib/turnout/stopped"
"""Data of a buffer that is stopped, in the scene `job`."""

PROMPTS: Final = "".join(f'{{"prompt": "text {number}"}}\n' for number in range(8))


def _step(number: int) -> str:
    timing = {"step": 455.0 + number, "gen": 182.0 + number, "update_weights": 18.0}
    data = {f"timing_s/{name}": value for name, value in timing.items()} | {"response_length/mean": 13_000.0}
    return json.dumps({"step": number, "data": data}) + "\n"


VERL_METRICS: Final = "".join(_step(number) for number in range(1, 21))

TRAINER: Final = """
import itertools

from turnout.buffer.v1 import buffer_pb2

numbers = itertools.count()


def next_prompts(count):
    texts = [f"prompt {next(numbers)}" for _ in range(count)]
    return [buffer_pb2.GroupSpec(group_id=one, group_size=2, prompt={"inline": one.encode()}) for one in texts]


def state_dict_bytes():
    return bytes(1 << 16)


def train(groups, payloads):
    assert len(groups) == 2 and all(payloads)
"""

WORKER: Final = """
class tokenizer:
    encode = staticmethod(lambda text: list(text.encode()))


def grade(tags, tokens):
    return 1.0
"""

PAYLOADS: Final = """
from types import SimpleNamespace

import numpy as np

from turnout.tensors import pack
from turnout.worker import RolloutWorker, WorkerSetup

tokens, logprobs = np.arange(6, dtype=np.int32), np.zeros(6, dtype=np.float32)
worker = RolloutWorker(
    WorkerSetup("my-run", "127.0.0.1:50051", "127.0.0.1:50052", store="file:///mnt/shared/payloads", inline_bytes=0)
)
batch = SimpleNamespace(payloads=lambda: [b"".join(pack({"tokens": tokens, "logprobs": logprobs}))])
"""

PAYLOADS_THEN: Final = """
import google_crc32c

assert payload.ref.store == "uri" and payload.content_type == SAFETENSORS
assert tensors["tokens"].tolist() == [0, 1, 2, 3, 4, 5]
"""

OPEN: Final = """
from pathlib import Path

from turnout.buffer.v1 import buffer_pb2
from turnout.scheduler.v1 import scheduler_pb2
from turnout.trainer import TrainerHooks, TrainerSetup

sizes = dict(train_batch_size=2, parameter_sync_step=1, mini_batch_size=2, total_training_steps=5, standalone_gpus=1)
setup = TrainerSetup(
    "saved",
    scheduler_pb2.RunConfig(**sizes),
    scheduler="trainer-0:50053",
    buffer="trainer-0:50051",
    engine="trainer-0:50052",
    buffer_config=buffer_pb2.RunConfig(),
)
step = 1
"""

SAVING: Final = (
    OPEN
    + """
import asyncio
import threading

from turnout.worker import RolloutWorker, WorkerSetup

segments = [{"tokens": 1, "weight_version": 0, "end": 1}]
output = buffer_pb2.Output(prompt_tokens=1, segments=segments, payload={"inline": b"a"})
worker = RolloutWorker(WorkerSetup("saved", "trainer-0:50051"), generate_fn=lambda job: output)

Path("checkpoint").mkdir()
hooks = TrainerHooks.open(setup)
threading.Thread(target=lambda: asyncio.run(worker.run()), daemon=True).start()
hooks.on_step_begin(step)
hooks.add_groups(step, [buffer_pb2.GroupSpec(group_id=one, group_size=1) for one in ("a", "b")])
hooks.prepare_step(step)
hooks.on_sample_begin(step, 0)
with hooks.sample(step, 0, 2):
    hooks.on_sample_end(step, 0)
"""
)

RESUMING: Final = OPEN.replace("buffer_config=", "take_over=True,\n    buffer_config=")
"""The process before it ended a moment ago, so its lease runs still."""

CERTIFICATES: Final = """
import subprocess
from pathlib import Path

made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 1 -subj /CN=us -keyout ca.key -out ca.pem"
subprocess.run(["openssl", *made.split()], check=True)
Path("worker.token").write_text("secret")
"""

ENGINE: Final = """\
model: models/tiny-llama
engine_args:
  {dtype: bfloat16, max_model_len: 1024, max_num_seqs: 8, kv_cache_memory_bytes: 134217728, gpu_memory_utilization: 0.1}
environment: {HF_HUB_OFFLINE: "1", VLLM_LOGGING_LEVEL: ERROR}
spool: .
cpu: true
"""

LEARNER: Final = """
import google_crc32c
import safetensors.torch
import torch

from turnout.trainer import Moved, WeightTarget

model, sent = torch.nn.Linear(2, 2), []


class hooks:
    @staticmethod
    async def move_bytes(target, data):
        sent.append(data)
"""

LEARNER_THEN: Final = """
from turnout.engine.v1 import engine_pb2

replicas = tuple(engine_pb2.ReplicaLayout(replica_id=one) for one in ("r0", "r1"))
moved = await update_weights(WeightTarget(1, 1, replicas, 1, "u"))
assert set(safetensors.torch.load(sent[0])) == {"weight", "bias"}
assert moved.checksums.keys() == {"r0", "r1"} and len(moved.checksums["r0"]) == 8
"""
