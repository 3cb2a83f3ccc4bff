"""What a policy sees of the run's events.

Invariants: the same events always give the policy the same events, so replaying a log reproduces every decision; what
a policy has no word for is left out; a pool that is not known stays unknown. A policy speaks of starvation from
BeginSample to EndSample and of a mini-batch while it is trained on, so the mini-batch in training is remembered here
until the next is asked for.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from services.scheduler.domain import events, group_events
from services.scheduler.policies import types
from services.scheduler.policies.types import PolicyConfig

_PREFILL_KEEP = 0.9
"""Share of what older readings say of a replica's prefill that is left after one more in which it prefilled: engines
change their speed, and a reading of a few short prompts alone says little."""


class PolicyFeed:
    """Turns run events into policy events, in order. `config` is what RunOpened and RunUpdated say: set it first."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self._training: tuple[int, int, int | None] | None = None
        self._covered_share = 1.0
        self._prefills: dict[str, _Prefill] = {}

    def read(self, event: events.Happening, at: float) -> Iterator[types.Event]:
        """The policy events that `event`, at run time `at`, gives rise to."""
        match event:
            case events.RunOpened():
                self._training = None
                yield types.RunOpened(at=at, config=self.config)
            case events.RunUpdated():
                yield types.RunOpened(at=at, config=self.config, goes_on=True)
            case events.MiniBatchBegan():
                yield from self._training_ended(at)
                yield types.StarvationBegan(
                    at=at, step=event.step, mini_batch=event.mini_batch, sampleable=event.sampleable
                )
            case events.MiniBatchEnded():
                yield types.StarvationEnded(
                    at=at, step=event.step, mini_batch=event.mini_batch, wait_s=event.wait_seconds
                )
                yield types.MiniBatchBegan(at=at, step=event.step, mini_batch=event.mini_batch)
                self._training = (event.step, event.mini_batch, event.tokens)
            case events.StepEnded():
                yield from self._training_ended(at)
                yield types.StepEnded(at=at, step=event.step)
            case events.RequestProgress():
                self._covered_share = event.covered_share
                requests = tuple(map(_running, event.requests))
                yield types.RequestProgress(at=at, requests=requests, covered_share=event.covered_share)
            case group_events.TrajectoryFinished():
                requests = (_finished(event),)
                yield types.RequestProgress(at=at, requests=requests, covered_share=self._covered_share)
            case events.ReplicaCounters():
                for reading in event.replicas:
                    prefill = self._prefills.setdefault(reading.replica_id, _Prefill())
                    prefill.read(reading.prefilled_tokens, reading.prefill_seconds)
                    if reading.hybrid is not None:
                        yield _counters(reading, _pool(reading.hybrid), prefill.tokens_per_s, at)
            case _:
                translated = _translate(event, at)
                if translated is not None:
                    yield translated

    def _training_ended(self, at: float) -> Iterator[types.Event]:
        if self._training is not None:
            step, mini_batch, tokens = self._training
            self._training = None
            yield types.MiniBatchEnded(at=at, step=step, mini_batch=mini_batch, tokens=tokens)


@dataclass(slots=True)
class _Prefill:
    """How fast one replica prefills, from its cumulative counters."""

    seen_tokens: int = 0
    seen_s: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def read(self, tokens: int, seconds: float) -> None:
        """The counters now. A replica that restarted counts from zero again."""
        if tokens < self.seen_tokens or seconds < self.seen_s:
            self.seen_tokens, self.seen_s = 0, 0.0
        new_tokens, new_s = tokens - self.seen_tokens, seconds - self.seen_s
        self.seen_tokens, self.seen_s = tokens, seconds
        if new_tokens > 0 and new_s > 0:
            self.tokens = self.tokens * _PREFILL_KEEP + new_tokens
            self.seconds = self.seconds * _PREFILL_KEEP + new_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second, None before anything was prefilled."""
        return self.tokens / self.seconds if self.seconds > 0 else None


def _translate(event: events.Happening, at: float) -> types.Event | None:
    """The one policy event that says the same, None if there is none."""
    match event:
        case events.StepBegan(step):
            return types.StepBegan(at=at, step=step)
        case events.DepthObserved(step, sampleable, in_flight, unpaid_credits):
            return types.DepthObserved(
                at=at, step=step, sampleable=sampleable, in_flight=in_flight, unpaid_credits=unpaid_credits
            )
        case events.LendDone():
            return types.LendDone(at=at, cost_s=event.cost_seconds, counted=event.counted)
        case events.ReclaimDone():
            return types.ReclaimDone(at=at, cost_s=event.cost_seconds, counted=event.counted)
        case events.SyncDone(hybrid=False):
            return types.SyncDone(at=at, cost_s=event.seconds)
        case group_events.GroupsAdded():
            added = zip(event.group_ids, event.group_sizes, strict=True)
            groups = tuple(types.NewGroup(group=group, size=size) for group, size in added)
            return types.GroupsAdded(at=at, step=event.born_step, groups=groups)
        case group_events.GroupFinished():
            pool = _known(event.on_hybrid)
            return types.GroupFinished(at=at, group=event.group_id, lengths=event.lengths, pool=pool)
        case group_events.GroupLeft(how=group_events.GroupExit.FAILED):
            return types.GroupFinished(at=at, group=event.group_id, lengths=(), failed=True)
        case events.TopologyChanged():
            return types.TopologyChanged(
                at=at,
                hybrid_gpus=event.hybrid_gpus,
                standalone_gpus=event.standalone_gpus,
                hybrid_replicas=event.hybrid_replicas,
                standalone_replicas=event.standalone_replicas,
            )
    return None


def _pool(hybrid: bool) -> types.Pool:
    return types.Pool.HYBRID if hybrid else types.Pool.STANDALONE


def _known(on_hybrid: bool | None) -> types.Pool | None:
    return None if on_hybrid is None else _pool(on_hybrid)


def _running(request: events.RunningRequest) -> types.RequestState:
    return types.RequestState(
        key=types.RequestKey(group=request.group_id, trajectory=request.index),
        tokens=request.done,
        replica=request.replica_id,
        pool=_known(request.on_hybrid),
    )


def _finished(event: group_events.TrajectoryFinished) -> types.RequestState:
    return types.RequestState(
        key=types.RequestKey(group=event.group_id, trajectory=event.index),
        tokens=event.length,
        replica=event.replica_id,
        pool=_known(event.on_hybrid),
        finished=True,
    )


def _counters(
    reading: events.ReplicaReading, pool: types.Pool, prefill_tokens_per_s: float | None, at: float
) -> types.ReplicaCounters:
    return types.ReplicaCounters(
        at=at,
        replica=reading.replica_id,
        pool=pool,
        decoded_tokens=reading.decoded_tokens,
        running_requests=reading.running,
        prefill_tokens_per_s=prefill_tokens_per_s,
    )
