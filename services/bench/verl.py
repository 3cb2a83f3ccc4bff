"""verl's replay buffer and the adapter's, over the same real TransferQueue with the same groups.

Invariants: both answer from the same content at the same time, by turns; the adapter's buffer is a process as in
production; a wake-up is timed from before the worker's last report until the wait has returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

from services.bench.result import Result
from services.processes.fleet import Fleet
from services.processes.service import service_spec
from turnout.client import AsyncBufferClient, BufferClient

RUN: Final = "bench-verl"
TOKENS: Final = 100
_PUT: Final = 2000
"""Keys per call while TransferQueue is filled."""


async def measure(groups: int, sessions: int, rounds: int) -> AsyncIterator[Result]:
    """Depth query and wake-up with `groups` finished groups, in milliseconds, beside verl's own buffer."""
    async with Fleet() as fleet:
        child = await fleet.start(service_spec("buffer", "--listen", "127.0.0.1:0", "--log-level", "warning"))
        for result in await asyncio.to_thread(_all, child.target, groups, sessions, rounds):
            yield result


def _all(target: str, groups: int, sessions: int, rounds: int) -> list[Result]:
    import transfer_queue
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

    from turnout.integrations.verl._index import Index, Rules

    with _transfer_queue():
        _fill(transfer_queue, groups, sessions)
        theirs = ReplayBufferAsync(
            trainer_mode="separate_async",
            trainer_config={},
            max_off_policy_threshold=8,
            max_off_policy_strategy="drop",
            sampler_kwargs={},
        )
        rules = Rules(8, wait=False, metric=None, refill=False)
        index = Index(RUN, rules, transfer_queue, BufferClient(target))
        try:
            index.start()
            if not groups == index.depth(1, "train") == theirs.get_sampleable_count(1, "train"):
                raise RuntimeError("the two buffers do not agree")
            ours, verls = _depths(index, theirs, rounds)
            woken = [_wake_up(transfer_queue, index, target, groups, number) for number in range(rounds)]
        finally:
            index.close()
    poll_ms = 1000 * float(theirs.poll_interval)
    return [
        Result(f"verl_depth_{groups}_groups", "ms", statistics.median(ours), statistics.median(verls)),
        # verl looks every poll_interval: half of it passes on average before it looks again.
        Result(f"verl_wake_up_{groups}_groups", "ms", statistics.median(woken), poll_ms / 2),
        Result(f"verl_wake_up_{groups}_groups_worst", "ms", max(woken), poll_ms),
    ]


@contextlib.contextmanager
def _transfer_queue() -> Iterator[None]:
    import ray
    import transfer_queue
    from omegaconf import OmegaConf

    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        try:
            # With as few processors as this machine may have, TransferQueue's actors would find no place.
            ray.init(_temp_dir=directory, num_cpus=8, num_gpus=0, include_dashboard=False, log_to_driver=False)
            transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
            yield
            transfer_queue.close()
        finally:
            ray.shutdown()


def _fill(queue: Any, groups: int, sessions: int) -> None:
    prompts = {f"g{number}": _prompt("finished") for number in range(groups)}
    outputs = {f"{uid}_{session}_0": _output() for uid in prompts for session in range(sessions)}
    items = [*prompts.items(), *outputs.items()]
    for at in range(0, len(items), _PUT):
        some = items[at : at + _PUT]
        queue.kv_batch_put(keys=[key for key, _ in some], partition_id="train", tags=[tag for _, tag in some])


def _prompt(status: str) -> dict[str, Any]:
    return {"is_prompt": True, "status": status, "global_steps": 1}


def _output() -> dict[str, Any]:
    return {
        "status": "success",
        "prompt_len": TOKENS,
        "response_len": TOKENS,
        "seq_len": 2 * TOKENS,
        "global_steps": 1,
        "min_global_steps": 1,
        "max_global_steps": 1,
    }


def _depths(index: Any, theirs: Any, rounds: int) -> tuple[list[float], list[float]]:
    ours: list[float] = []
    verls: list[float] = []
    for _ in range(rounds):
        ours.append(_took(lambda: index.depth(1, "train")))
        verls.append(_took(lambda: theirs.get_sampleable_count(1, "train")))
    return ours, verls


def _took(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began)


def _wake_up(queue: Any, index: Any, target: str, groups: int, number: int) -> float:
    """Milliseconds from a worker's last words about a group to the return of the wait for it."""
    from turnout.integrations.verl import _queue
    from turnout.integrations.verl._reports import GroupReport

    uid = f"late{number}"
    queue.kv_batch_put(keys=[uid], partition_id="train", tags=[_prompt("running")])
    token = index.add("train", 1, [(uid, 1)])[uid]
    parked, returned = threading.Event(), [0.0]

    def wait() -> None:
        index.look = lambda _: parked.set()
        try:
            index.wait(1, "train", groups + number + 1)
            returned[0] = time.perf_counter()
        finally:
            del index.look
            parked.set()

    thread = threading.Thread(target=wait)
    thread.start()
    parked.wait()

    async def report() -> float:
        async with AsyncBufferClient(target) as client:
            last = GroupReport(client, {"run_id": RUN, "partition": "train"}, token, uid, 1)
            await last.finished(0, [_queue.output(_output(), {})])
            queue.kv_batch_put(keys=[f"{uid}_0_0", uid], partition_id="train", tags=[_output(), {"status": "finished"}])
            began = time.perf_counter()
            await last.close()
            return began

    began = asyncio.run(report())
    thread.join()
    if not returned[0]:
        raise RuntimeError("the wait for a group failed")
    return 1000 * (returned[0] - began)
