"""The index: which prompt groups TransferQueue holds, in a replay buffer that can wait on their number.

Invariants: TransferQueue is right and the index follows: it is made anew from the tags when a trainer starts, fed by
the agent loop workers, and compared with the tags while a wait lasts, so that a report that was lost costs time and no
group. A group is in the index before a worker may report it, and started from then on, as in verl. What the buffer
evicts is cleared in TransferQueue before the call that waited returns. Everything happens on the trainer's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from turnout.buffer.v1 import buffer_pb2
from turnout.client import BufferClient, NotFound, TurnoutError, duration, item_error
from turnout.integrations.verl import _queue
from turnout.integrations.verl._queue import TRAIN, VALIDATION, Queue, Snapshot

_log = logging.getLogger("turnout")

_CLAIM_S: Final = 30 * 86_400.0
"""The longest that a buffer allows. A claim of verl's ends with the job: its workers die with the trainer."""

_ITEMS_PER_CALL: Final = 512
"""Groups or results; well below what a call may carry."""

_GONE: Final = ("GROUP_NOT_FOUND", "GROUP_FAILED", "TRAJECTORY_SETTLED", "STALE_CLAIM")
"""A group that was settled or evicted meanwhile needs nothing more."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How the buffer treats groups: verl's sampler configuration."""

    max_versions: int | None
    """Largest span that may be trained on; None: no bound."""
    wait: bool
    """Whether old groups are waited for instead of dropped."""
    metric: str | None
    """Reward that groups are filtered by."""
    refill: bool
    """Whether evicted groups are replaced."""

    def config(self) -> buffer_pb2.RunConfig:
        """The same for the buffer."""
        strategy = buffer_pb2.STALENESS_STRATEGY_WAIT if self.wait else buffer_pb2.STALENESS_STRATEGY_DROP
        return buffer_pb2.RunConfig(
            partitions=[
                buffer_pb2.PartitionConfig(name=TRAIN, kind=buffer_pb2.PARTITION_KIND_TRAINING),
                buffer_pb2.PartitionConfig(name=VALIDATION, kind=buffer_pb2.PARTITION_KIND_VALIDATION),
            ],
            staleness=buffer_pb2.Staleness(max_versions=self.max_versions, strategy=strategy),
            group_filter_metric=self.metric,
            refill=self.refill,
            lease_times=buffer_pb2.LeaseTimes(claim=duration(_CLAIM_S)),
        )


class Index:
    """The groups of one run."""

    _open: ClassVar[dict[str, Index]] = {}

    def __init__(
        self,
        run_id: str,
        rules: Rules,
        queue: Queue,
        buffer: BufferClient,
        *,
        refill_fn: Callable[[int], Any] | None = None,
        look_interval: float = 30.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run_id = run_id
        self.rules = rules
        self.buffer = buffer
        self.epoch: int | None = None
        """Fencing token of this trainer: its own from `start` on, or the scheduler's."""
        self.cursor = 0
        """Eviction cursor: what was evicted before it has been reported."""
        self._queue = queue
        self._refill_fn = refill_fn
        self._paying = ""
        self._look_interval = look_interval
        self._now = now
        self._looked = now()
        self._late: dict[str, set[str]] = {}
        self._tokens: dict[tuple[str, str], buffer_pb2.ClaimToken] = {}
        Index._open[run_id] = self

    @classmethod
    def of(cls, run_id: str) -> Index:
        """The index of a run that this process trains. Raises LookupError."""
        try:
            return cls._open[run_id]
        except KeyError:
            raise LookupError(f"no turnout.integrations.verl.ReplayBuffer of run {run_id!r} in this process") from None

    def close(self) -> None:
        """Close the connection."""
        if Index._open.get(self.run_id) is self:
            del Index._open[self.run_id]
        self.buffer.close()

    # ------------------------------------------------------------------------------------------------------- beginning

    def start(self) -> None:
        """Make the index anew from what TransferQueue holds, and fence off predecessors; a second call does nothing.

        Groups in flight are left out: verl issues them again, and then they are added.
        """
        if self.epoch is not None:
            return
        calls, epoch = self.buffer.calls, 0
        try:
            epoch = calls.OpenEpoch(buffer_pb2.OpenEpochRequest(run_id=self.run_id)).epoch
            calls.DeleteRun(buffer_pb2.DeleteRunRequest(run_id=self.run_id, epoch=epoch))
        except NotFound:
            pass
        calls.CreateRun(buffer_pb2.CreateRunRequest(run_id=self.run_id, config=self.rules.config()))
        # The new run would begin with epoch 1 again, which a predecessor may have.
        opened = calls.OpenEpoch(buffer_pb2.OpenEpochRequest(run_id=self.run_id, epoch=epoch + 1))
        self.epoch = opened.epoch
        for partition in (TRAIN, VALIDATION):
            self._rebuild(partition, _queue.read(self._queue, partition))

    def _rebuild(self, partition: str, snapshot: Snapshot) -> None:
        terminal = {uid: tag for uid, tag in snapshot.prompts.items() if tag["status"] in _queue.TERMINAL}
        by_step: dict[int, list[tuple[str, int]]] = {}
        for uid, tag in terminal.items():
            sessions = [_queue.place_of(key).session for key in snapshot.outputs.get(uid, ())]
            by_step.setdefault(int(tag["global_steps"]), []).append((uid, max(sessions, default=0) + 1))
        for step in sorted(by_step):
            self.add(partition, step, by_step[step])
        self._settle(partition, list(terminal), snapshot)
        if terminal:
            _log.info("run %s: %d groups of %s were in TransferQueue", self.run_id, len(terminal), partition)

    # --------------------------------------------------------------------------------------------------------- groups

    def add(self, partition: str, step: int, groups: Sequence[tuple[str, int]]) -> dict[str, buffer_pb2.ClaimToken]:
        """Add prompts with their numbers of sessions, started; the tokens to report them with, by uid."""
        calls = self.buffer.calls
        tokens: dict[str, buffer_pb2.ClaimToken] = {}
        for some in _parts(groups):
            calls.AddGroups(
                buffer_pb2.AddGroupsRequest(
                    run_id=self.run_id,
                    partition=partition,
                    epoch=self.epoch,
                    step=step,
                    groups=[buffer_pb2.GroupSpec(group_id=uid, group_size=size) for uid, size in some],
                    refill_claim_id=self._paying or None,
                )
            )
            wanted = {uid for uid, _ in some}
            while wanted:
                # Nobody else claims, and nothing else is pending.
                claims = calls.ClaimGroups(
                    buffer_pb2.ClaimGroupsRequest(
                        run_id=self.run_id,
                        partition=partition,
                        worker_id="verl",
                        max_trajectories=sum(size for uid, size in some if uid in wanted),
                    )
                ).claims
                if not claims:
                    raise RuntimeError(f"{len(wanted)} groups that were added cannot be claimed: is intake paused?")
                for claim in claims:
                    tokens[claim.group_id] = claim.token
                    wanted.discard(claim.group_id)
        self._tokens.update({(partition, uid): token for uid, token in tokens.items()})
        return tokens

    def _settle(self, partition: str, uids: Sequence[str], snapshot: Snapshot) -> None:
        """Bring groups to the end that TransferQueue says they came to."""
        metric = self.rules.metric if partition == TRAIN else None
        finished = [uid for uid in uids if snapshot.prompts[uid]["status"] == _queue.FINISHED]
        values = {} if metric is None else _queue.rewards(self._queue, partition, snapshot.keys(finished), metric)
        results = [
            result
            for uid in finished
            for result in _queue.results(
                uid, snapshot.outputs.get(uid, {}), values, metric, self._tokens[partition, uid]
            )
        ]
        for some in _parts(results):
            request = buffer_pb2.FinishTrajectoriesRequest(run_id=self.run_id, partition=partition, results=some)
            for outcome in self.buffer.calls.FinishTrajectories(request).outcomes:
                error = item_error(outcome)
                if error is not None and error.reason not in _GONE:
                    raise error
        still_open = {group.group_id for group in self._groups(partition, _OPEN)}
        for uid in uids:
            if uid in still_open:
                self._end(partition, uid, failed=uid not in finished)

    def _end(self, partition: str, uid: str, *, failed: bool) -> None:
        """End a group that failed, or that has fewer trajectories than sessions."""
        place: dict[str, Any] = {"run_id": self.run_id, "partition": partition, "group_id": uid, "epoch": self.epoch}
        try:
            if not failed:
                self.buffer.calls.FinishGroup(buffer_pb2.FinishGroupRequest(**place))
                return
        except TurnoutError as error:
            if error.reason != "NOTHING_FINISHED":
                raise
        self.buffer.calls.FailGroup(buffer_pb2.FailGroupRequest(**place, error="verl says failure, or has no output"))

    # ---------------------------------------------------------------------------------------------------------- waiting

    def depth(self, step: int, partition: str) -> int:
        """How many groups could be sampled at `step`."""
        request = buffer_pb2.GetSampleableCountRequest(run_id=self.run_id, partition=partition, step=step)
        return self.buffer.calls.GetSampleableCount(request).depth.sampleable

    def wait(self, step: int, partition: str, target: int) -> dict[str, float]:
        """Wait until `target` groups are sampleable, evicting and refilling; what was evicted, under verl's names."""
        request = buffer_pb2.WaitForSampleableRequest(
            run_id=self.run_id,
            partition=partition,
            epoch=self.epoch,
            step=step,
            target=target,
            cursor=self._cursor_of(partition),
        )
        done = self.buffer.wait_for_sampleable(
            request, refills=self if partition == TRAIN else None, on_progress=lambda _: self.look(partition)
        )
        self._reached(done)
        return self._evicted(partition, done)

    def sample(self, step: int, partition: str, batch: int) -> tuple[list[str], dict[str, float]]:
        """Wait for the `batch` oldest groups and take them out; their uids, and what was evicted."""
        request = buffer_pb2.SampleRequest(
            run_id=self.run_id,
            partition=partition,
            epoch=self.epoch,
            step=step,
            batch=batch,
            cursor=self._cursor_of(partition),
            auto_commit=True,
        )
        sampled = self.buffer.sample(
            request, refills=self if partition == TRAIN else None, on_progress=lambda _: self.look(partition)
        )
        self._reached(sampled.done)
        uids = [group.group_id for group in sampled.groups]
        for group in sampled.groups:
            self._tokens.pop((partition, group.group_id), None)
            if group.failed:
                _log.warning("group %s of %s failed: %s", group.group_id, partition, group.error)
        return uids, self._evicted(partition, sampled.done, taken=uids)

    def sampleable(self, partition: str) -> Iterator[str]:
        """The uids of the groups that a wait has just counted."""
        states = [buffer_pb2.GROUP_STATE_FINISHED]
        if partition == VALIDATION:
            states.append(buffer_pb2.GROUP_STATE_FAILED)
        return (group.group_id for group in self._groups(partition, states))

    async def pay(self, due: buffer_pb2.RefillDue, step: int) -> None:
        """Let verl submit prompts for what was evicted, on this thread; they come back in `add`, which pays."""
        if self._refill_fn is not None:
            self._paying = due.refill_claim_id
            try:
                self._refill_fn(due.count)
            finally:
                self._paying = ""

    def _cursor_of(self, partition: str) -> int:
        return self.cursor if partition == TRAIN else 0

    @staticmethod
    def _reached(done: Any) -> None:
        if done.outcome != buffer_pb2.WAIT_OUTCOME_REACHED:
            raise RuntimeError(f"{buffer_pb2.WaitOutcome.Name(done.outcome)}: {done.reason}")

    def _evicted(self, partition: str, done: Any, taken: Sequence[str] = ()) -> dict[str, float]:
        if partition != TRAIN:
            return {}
        self.cursor = done.next_cursor
        if done.evictions.evicted:
            self.sweep(taken)
        return dict(done.evictions.metrics)

    # ------------------------------------------------------------------------------------- following TransferQueue

    def sweep(self, taken: Sequence[str] = ()) -> None:
        """Clear in TransferQueue what the buffer has evicted. `taken`: prompts just sampled, not cleared there yet."""
        snapshot = _queue.read(self._queue, TRAIN)
        kept = {group.group_id for group in self._groups(TRAIN)}.union(taken)
        evicted = [uid for uid, tag in snapshot.prompts.items() if tag["status"] in _queue.TERMINAL and uid not in kept]
        if evicted:
            self._queue.kv_clear(keys=[*evicted, *snapshot.keys(evicted)], partition_id=TRAIN)
        for uid in evicted:
            self._tokens.pop((TRAIN, uid), None)

    def look(self, partition: str) -> None:
        """Compare with TransferQueue, if that is due: settle what ended there twice in a row and not here."""
        if self._now() - self._looked < self._look_interval:
            return
        self._looked = self._now()
        snapshot = _queue.read(self._queue, partition)
        late = {
            group.group_id
            for group in self._groups(partition, _OPEN)
            if snapshot.prompts.get(group.group_id, {}).get("status") in _queue.TERMINAL
        }
        # At the first look its report may still be on the way.
        lost = sorted(late & self._late.get(partition, set()))
        self._late[partition] = late
        if lost:
            _log.warning("run %s: the reports of %d groups were lost; their tags are taken", self.run_id, len(lost))
            self._settle(partition, lost, snapshot)

    def _groups(self, partition: str, states: Sequence[buffer_pb2.GroupState.ValueType] = ()) -> list[buffer_pb2.Group]:
        groups: list[buffer_pb2.Group] = []
        token = ""
        while True:
            page = self.buffer.calls.ListGroups(
                buffer_pb2.ListGroupsRequest(
                    run_id=self.run_id, partition=partition, states=states, page_size=1000, page_token=token
                )
            )
            groups += page.groups
            token = page.next_page_token
            if not token:
                return groups

    def materialize(self, partition: str, uids: Sequence[str]) -> tuple[list[str], list[Mapping[str, Any]]]:
        """Keys and tags of the outputs of sampled prompts, as they arrived, and clear the prompts themselves."""
        snapshot = _queue.read(self._queue, partition)
        self._queue.kv_clear(keys=list(uids), partition_id=partition)
        wanted = set(snapshot.keys(uids))
        items = [item for item in snapshot.arrived.items() if item[0] in wanted]
        return [key for key, _ in items], [tag for _, tag in items]


_OPEN: Final = (buffer_pb2.GROUP_STATE_PENDING, buffer_pb2.GROUP_STATE_RUNNING)


def _parts(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (items[at : at + _ITEMS_PER_CALL] for at in range(0, len(items), _ITEMS_PER_CALL))
