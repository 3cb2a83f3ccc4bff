"""A real vLLM behind our backend and our controller, beside the same engine called directly.

Invariants: one engine for all figures; every round measures both ways, the direct one first in even rounds and last in
odd ones; of calls the median of the rounds counts, of tokens per second the fastest round, since on a shared machine
the others tell of its neighbours; what is compared does the same to the engine: a controller's Sleep is beside the
calls it is made of. The controller keeps a journal, as `serve` does. Processor time is that of this process, where the
front end of the engine runs, and for the controller its client too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc.aio

from services.bench.engine import GIVE_UP_S, LEAST_SHARE, MOST_ADDED_MS, MOST_DEATH_MS
from services.bench.result import Result
from services.engine.backends.base import Backend, EngineRequest
from services.engine.domain.requests import Sampling
from services.engine.domain.spec import ALL_CACHES, KV_CACHE, WEIGHTS, PauseMode, ReplicaSpec, Role
from services.engine.domain.tokens import Stretches
from services.engine.guarded.backend import GuardedBackend
from services.engine.service import build
from services.engine.settings import EngineSettings
from services.engine.vllm import async_llm
from services.engine.vllm.async_llm import AsyncLlmSurface
from services.engine.vllm.config import VllmConfig
from services.engine.vllm.tiny_models import write_tiny_model
from services.runtime.clock import MonotonicClock
from services.runtime.journal import Durability
from turnout.engine.v1 import engine_pb2 as pb
from turnout.engine.v1 import engine_pb2_grpc

RUN: Final = "bench"
STREAMS: Final = 8
TOKENS: Final = 896
"""Of each stream at most: what the engine takes, and still little for a rollout. Some end sooner, by their seeds."""

SHORT_TOKENS: Final = 128
"""The same for outputs so short that the call of each counts more than its tokens; these have no limit."""

PROMPT: Final = (5, 6, 7, 8)
KV_BYTES: Final = 64 << 20
TIMEOUT_S: Final = 120.0

Work = Callable[[], Awaitable[object]]


async def measure(rounds: int) -> AsyncIterator[Result]:
    """Start an engine on a tiny model and yield the figures; needs vllm in this environment."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as place:
        model = write_tiny_model(Path(place))
        arguments = {
            "dtype": "bfloat16",
            "max_model_len": 1024,
            "max_num_seqs": STREAMS,
            "kv_cache_memory_bytes": KV_BYTES,
            "gpu_memory_utilization": 0.1,
        }
        config = VllmConfig(
            model=str(model), cpu=True, engine_args=arguments, environment={"VLLM_LOGGING_LEVEL": "ERROR"}
        )
        before = _children()
        surface = await async_llm.start(config)
        # The engine core is the parent of its worker.
        core = next(pid for pid, is_parent in _children().items() if is_parent and pid not in before)
        try:
            async for result in _backend_figures(surface, rounds):
                yield result
            async for result in _controller_figures(surface, core, rounds, Path(place) / "data"):
                yield result
        finally:
            await surface.close()


async def _backend_figures(surface: AsyncLlmSurface, rounds: int) -> AsyncIterator[Result]:
    engine = surface.engine
    backend = GuardedBackend(ReplicaSpec("r", Role.HYBRID, "vllm-inproc"), surface, MonotonicClock())
    await backend.probe()
    both = [WEIGHTS, KV_CACHE]

    pairs: dict[str, tuple[Work, Work]] = {
        "pause": (
            lambda: engine.pause_generation(mode="abort"),
            lambda: backend.pause(PauseMode.ABORT, True, TIMEOUT_S),
        ),
        "resume": (engine.resume_generation, lambda: backend.resume(TIMEOUT_S)),
        "sleep": (lambda: engine.sleep(1), lambda: backend.sleep(1, TIMEOUT_S)),
        "wake": (engine.wake_up, lambda: backend.wake_up(both, TIMEOUT_S)),
        "reset": (lambda: _reset_all(engine), lambda: backend.reset_caches(ALL_CACHES, True, True, TIMEOUT_S)),
    }
    direct: dict[str, list[float]] = {name: [] for name in pairs}
    ours: dict[str, list[float]] = {name: [] for name in pairs}
    for number in range(rounds):
        for way, times in _turns(number, direct, ours):
            for name, works in pairs.items():
                times[name].append(await _timed(works[way]))
    for name in pairs:
        yield _added(f"vllm_{name}", ours[name], direct[name])


async def _controller_figures(
    surface: AsyncLlmSurface, core: int, rounds: int, data_dir: Path
) -> AsyncIterator[Result]:
    engine = surface.engine
    settings = EngineSettings(listen=["127.0.0.1:0"], data_dir=data_dir, durability=Durability.OS)

    class Kept(GuardedBackend):
        """The bench's engine outlives the controller."""

        async def close(self) -> None:
            return

    async def open_backend(spec: ReplicaSpec) -> Backend:
        return Kept(spec, surface, MonotonicClock())

    async with (
        build(settings, None, open_backend) as host,
        grpc.aio.insecure_channel(host.target) as channel,
    ):
        stub: Any = engine_pb2_grpc.EngineControllerStub(channel)
        spec = pb.ReplicaSpec(replica_id="r", role=pb.REPLICA_ROLE_COLOCATED, backend="vllm-inproc")
        await stub.Register(pb.RegisterRequest(run_id=RUN, spec=spec))

        async def sleep_directly() -> None:
            await engine.pause_generation(mode="abort")
            await engine.sleep(1)

        async def wake_directly() -> None:
            await engine.wake_up()
            await engine.reset_prefix_cache(False, True)

        pairs: dict[str, tuple[Work, Work]] = {
            "pause": (
                lambda: engine.pause_generation(mode="abort"),
                lambda: stub.Pause(pb.PauseRequest(run_id=RUN)),
            ),
            "resume": (engine.resume_generation, lambda: stub.Resume(pb.ResumeRequest(run_id=RUN))),
            "reset": (lambda: _reset_all(engine), lambda: stub.ResetCaches(pb.ResetCachesRequest(run_id=RUN))),
            "sleep": (sleep_directly, lambda: stub.Sleep(pb.SleepRequest(run_id=RUN))),
            "wake": (wake_directly, lambda: stub.WakeUp(pb.WakeUpRequest(run_id=RUN))),
        }
        direct: dict[str, list[float]] = {name: [] for name in pairs}
        ours: dict[str, list[float]] = {name: [] for name in pairs}
        for number in range(rounds):
            for way, times in _turns(number, direct, ours):
                for name, works in pairs.items():
                    times[name].append(await _timed(works[way]))
        for name in pairs:
            yield _added(f"vllm_controller_{name}", ours[name], direct[name])

        backend = GuardedBackend(ReplicaSpec("r", Role.HYBRID, "vllm-inproc"), surface, MonotonicClock())
        await backend.probe()
        for tokens in (SHORT_TOKENS, TOKENS):
            async for result in _generate_figures(engine, backend, stub, rounds, tokens):
                yield result

        killed = time.perf_counter()
        os.kill(core, signal.SIGKILL)
        async for told in stub.WatchReplicas(pb.WatchReplicasRequest(run_id=RUN), timeout=GIVE_UP_S):
            if any(replica.health == pb.REPLICA_HEALTH_DEAD for replica in told.changed):
                break
        yield Result("vllm_idle_death", "ms", (time.perf_counter() - killed) * 1e3, 0.0, MOST_DEATH_MS)


async def _generate_figures(
    engine: Any, backend: GuardedBackend, stub: Any, rounds: int, tokens: int
) -> AsyncIterator[Result]:
    plain, through, below = Rates(), Rates(), Rates()
    for number in range(rounds):
        ways = [
            (plain, lambda number=number: _generate_directly(engine, f"direct-{tokens}-{number}", tokens)),
            (below, lambda number=number: _generate_below(backend, f"below-{tokens}-{number}", tokens)),
            (through, lambda number=number: _generate_through(stub, f"through-{tokens}-{number}", tokens)),
        ]
        for rates, work in ways if number % 2 else reversed(ways):
            await rates.add(work)
    short = "_short" if tokens == SHORT_TOKENS else ""
    for name, rates in (("backend", below), ("controller", through)):
        value, baseline = max(rates.rates), max(plain.rates)
        limit = None if short else LEAST_SHARE * baseline
        yield Result(f"vllm_generate_{name}{short}", "tokens/s", value, baseline, limit, at_least=True)
        yield Result(f"vllm_generate_{name}{short}_cpu", "ms/1000 tokens", min(rates.cpu), min(plain.cpu))


def _children() -> dict[int, bool]:
    """The processes that this one has started, and whether each has some of its own."""
    import psutil

    return {child.pid: bool(child.children()) for child in psutil.Process().children()}


@dataclass
class Rates:
    """Rounds of generation: tokens per second, and processor milliseconds per 1000 tokens."""

    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    async def add(self, work: Callable[[], Awaitable[int]]) -> None:
        """Measure a round, which returns how many tokens came."""
        cpu, began = time.process_time(), time.perf_counter()
        tokens = await work()
        self.rates.append(tokens / (time.perf_counter() - began))
        self.cpu.append((time.process_time() - cpu) * 1e6 / tokens)


def _turns(
    number: int, direct: dict[str, list[float]], ours: dict[str, list[float]]
) -> list[tuple[int, dict[str, list[float]]]]:
    turns = [(0, direct), (1, ours)]
    return turns[::-1] if number % 2 else turns


async def _timed(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


def _added(name: str, ours: list[float], direct: list[float]) -> Result:
    value, baseline = statistics.median(ours) * 1e3, statistics.median(direct) * 1e3
    return Result(name, "ms", value, baseline, baseline + MOST_ADDED_MS)


async def _reset_all(engine: Any) -> None:
    await engine.reset_prefix_cache(True, True)
    await engine.reset_mm_cache()
    await engine.reset_encoder_cache()


async def _generate_directly(engine: Any, prefix: str, wanted: int) -> int:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    async def one(number: int) -> int:
        params = SamplingParams(
            max_tokens=wanted,
            temperature=1.0,
            seed=number,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        tokens = 0
        async for output in engine.generate({"prompt_token_ids": list(PROMPT)}, params, f"{prefix}-{number}"):
            tokens += len(output.outputs[0].token_ids)
        return tokens

    return sum(await asyncio.gather(*(one(number) for number in range(STREAMS))))


async def _generate_below(backend: GuardedBackend, prefix: str, wanted: int) -> int:
    async def one(number: int) -> int:
        request = EngineRequest(
            f"{prefix}-{number}",
            PROMPT,
            Stretches(),
            wanted,
            Sampling(seed=number, logprobs=True),
            delta_tokens=64,
            delta_interval=0.5,
        )
        tokens = 0
        async for output in backend.generate(request):
            tokens += len(output.token_ids)
        return tokens

    return sum(await asyncio.gather(*(one(number) for number in range(STREAMS))))


async def _generate_through(stub: Any, prefix: str, wanted: int) -> int:
    async def one(number: int) -> int:
        request = pb.GenerateRequest(
            run_id=RUN,
            request_id=f"{prefix}-{number}",
            prompt_token_ids=PROMPT,
            max_tokens=wanted,
            sampling=pb.Sampling(seed=number, logprobs=True),
        )
        tokens = 0
        async for response in stub.Generate(request):
            match response.WhichOneof("event"):
                case "delta":
                    tokens += len(response.delta.token_ids)
                case "done":
                    tokens += len(response.done.rest.token_ids)
        return tokens

    return sum(await asyncio.gather(*(one(number) for number in range(STREAMS))))
