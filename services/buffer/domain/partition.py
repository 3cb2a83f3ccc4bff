"""Partition: the groups of one partition and how they come and go.

Invariants: added = committed + evicted + present; every state change of a group passes the index; the depth at a step
is exactly what Sample can hand out at it; k evictions create k refill credits, each once, and only in training
partitions of runs with refill.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.buffer.domain.arrivals import Arrivals
from services.buffer.domain.caps import cap_reached
from services.buffer.domain.config import (
    MAX_GROUP_SIZE,
    MAX_GROUPS_PER_CALL,
    PartitionConfig,
    PartitionKind,
    Staleness,
    check_group_size,
    check_items,
)
from services.buffer.domain.depth import Depth
from services.buffer.domain.dropped import DroppedPrompts
from services.buffer.domain.events import GroupEventKind
from services.buffer.domain.evictions import EvictionLog, EvictionReason
from services.buffer.domain.group import Group, GroupState
from services.buffer.domain.index import GroupIndex
from services.buffer.domain.ledger import Ledger
from services.buffer.domain.moment import Moment
from services.buffer.domain.outputs import NOTHING, InlinePayload, Payload
from services.buffer.domain.refill import RefillBook
from services.buffer.domain.staleness import oldest_kept, span
from services.buffer.domain.state import RunState
from services.buffer.domain.trajectory import Trajectory, TrajectoryState
from services.buffer.domain.waits import WaitBook
from services.runtime.errors import already_exists, invalid_argument, not_found, require_id

# Trajectories one AddGroups may bring, one group of the largest size: they are made while every other call waits.
MAX_TRAJECTORIES_PER_CALL = MAX_GROUP_SIZE


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A prompt to add; `group_size` None is the partition's default, `prompt_id` empty is the group's id."""

    group_id: str
    group_size: int | None = None
    prompt: Payload | InlinePayload | None = None
    tags: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    prompt_id: str = ""


@dataclass(frozen=True, slots=True)
class EvictionCounts:
    """What an order to evict did: removed, not present, held by Sample."""

    evicted: int
    missing: int
    sampled: int


class Partition:
    """One partition of a run."""

    def __init__(self, config: PartitionConfig, state: RunState) -> None:
        self.name = config.name
        self.training = config.kind is PartitionKind.TRAINING
        self.group_size = config.group_size
        self.state = state
        self.groups: dict[str, Group] = {}
        self.arrivals = Arrivals()
        self.index = GroupIndex(training=self.training)
        self.refill = RefillBook()
        self.evictions = EvictionLog()
        self.dropped = DroppedPrompts()
        self.waits = WaitBook()
        self.supply_ended = False
        self.intake_paused = False
        self.added = 0
        self.committed = 0

    @property
    def staleness(self) -> Staleness:
        """The bound on age that holds now."""
        return self.state.config.staleness

    @property
    def filter_metric(self) -> str | None:
        """The reward whose zero variance makes a group worthless, where filters apply."""
        return self.state.config.group_filter_metric if self.training else None

    def require(self, group_id: str) -> Group:
        """The present group of that id. Raises NOT_FOUND / GROUP_NOT_FOUND."""
        group = self.groups.get(group_id)
        if group is None:
            message = "no such group: it was never added, or it was evicted or committed"
            raise not_found("GROUP_NOT_FOUND", message, field="group_id", value=group_id, partition=self.name)
        return group

    # ------------------------------------------------------------------------------------------------------- admission

    def check_add(self, specs: Sequence[GroupSpec]) -> None:
        """Raise unless the whole batch can be added."""
        check_items("groups", len(specs), MAX_GROUPS_PER_CALL)
        seen: set[str] = set()
        size = 0
        for position, spec in enumerate(specs):
            where = f"groups[{position}]"
            require_id(f"{where}.group_id", spec.group_id)
            if spec.prompt_id:
                require_id(f"{where}.prompt_id", spec.prompt_id)
            if spec.group_size is not None:
                check_group_size(f"{where}.group_size", spec.group_size)
            if spec.prompt is not None:
                size += self.state.payloads.check(f"{where}.prompt", spec.prompt)
            if spec.group_id in seen or spec.group_id in self.groups:
                message = "a group of this id is in the same call, or present in the partition"
                raise already_exists("GROUP_EXISTS", message, field=f"{where}.group_id", value=spec.group_id)
            seen.add(spec.group_id)
        trajectories = sum(spec.group_size or self.group_size for spec in specs)
        if trajectories > MAX_TRAJECTORIES_PER_CALL:
            message = f"one call adds at most {MAX_TRAJECTORIES_PER_CALL} trajectories, over all of its groups"
            raise invalid_argument("groups", message, value=trajectories, reason="TOO_MANY_TRAJECTORIES")
        caps = self.state.config.caps
        if self.state.groups + len(specs) > caps.max_groups:
            message = (
                f"{self.state.groups} groups are present, {len(specs)} more would pass the cap of {caps.max_groups}"
            )
            raise cap_reached(
                "max_groups",
                "CAP_GROUPS",
                message,
                field="groups",
                value=len(specs),
                limit=caps.max_groups,
                present=self.state.groups,
            )
        if size:
            self.state.payloads.check_room(size, caps.max_bytes, "groups")

    def add(self, specs: Sequence[GroupSpec], step: int, at: Moment) -> None:
        """Add a batch that passed `check_add`, born at `step`."""
        state = self.state
        for spec in specs:
            state.sequence += 1
            group = Group(
                spec.group_id,
                state.sequence,
                step,
                [Trajectory() for _ in range(spec.group_size or self.group_size)],
                at.wall,
                prompt=None if spec.prompt is None else state.payloads.keep(spec.prompt),
                tags=spec.tags,
                prompt_id=spec.prompt_id,
            )
            self.groups[spec.group_id] = group
            self.arrivals.add(group)
            self.index.enter(group)
            self.log(GroupEventKind.ADDED, group, at, trajectories=group.size)
        self.added += len(specs)
        state.groups += len(specs)

    def trace(self, group_ids: Iterable[str], trace: str) -> None:
        """Note in which trace groups were added; those that are gone already need none."""
        for group_id in group_ids:
            if (group := self.groups.get(group_id)) is not None:
                group.trace = trace

    def put_back(self, group: Group) -> None:
        """Enter a group that was added in an earlier life of the service; groups come in order of arrival."""
        self.groups[group.group_id] = group
        self.arrivals.add(group)
        self.index.enter(group)
        self.state.groups += 1
        self.state.payloads.adopt_small(group.held_here())
        for payload in group.payloads():
            self.state.payloads.adopt(payload)

    def let_go(self) -> list[Group]:
        """Forget the groups, since the run is no longer used; returns them for the caller to free in its time."""
        groups = list(self.groups.values())
        self.groups, self.arrivals, self.index = {}, Arrivals(), GroupIndex(training=self.training)
        return groups

    # --------------------------------------------------------------------------------------------------------- leaving

    def end_claims(self, group: Group) -> None:
        """No worker holds a trajectory of the group any more."""
        if group.live and group.running:
            for index, trajectory in enumerate(group.members):
                if trajectory.state is TrajectoryState.RUNNING:
                    self.state.claims.release(trajectory.claim_id, index)

    def _remove(self, group: Group, final: GroupState) -> None:
        self.state.touch(self.name, group)
        self.index.leave(group)
        group.state = final
        del self.groups[group.group_id]
        self.arrivals.remove(group)
        self.state.groups -= 1

    def commit(self, groups: Iterable[Group], at: Moment) -> None:
        """Sampled groups are consumed; their payloads stay until the lease lets them go."""
        for group in groups:
            self._remove(group, GroupState.COMMITTED)
            if self.dropped:
                self.dropped.forget(group.prompt_id or group.group_id)
            self.committed += 1
            self.log(GroupEventKind.COMMITTED, group, at)

    def take_back(self, groups: Iterable[Group], at: Moment) -> None:
        """Sampled groups come back, with their place by age."""
        for group in groups:
            self.state.touch(self.name, group)
            self.index.leave(group)
            group.come_back()
            self.index.enter(group)
            self.log(GroupEventKind.RETURNED, group, at)

    def evict_due(self, step: int, at: Moment, limit: int | None = None) -> list[str]:
        """Evict what is due at `step`, or up to `limit` groups of it; returns their ids."""
        return self._evict_all(self.index.due(step, self.staleness, limit), step, at) if self.training else []

    def evict_listed(self, step: int, group_ids: Iterable[str], at: Moment) -> None:
        """Evict groups that `evict_due` once chose at `step`."""
        self._evict_all([self.groups[group_id] for group_id in group_ids], step, at)

    def _evict_all(self, due: Sequence[Group], step: int, at: Moment) -> list[str]:
        for group in due:
            self._evict(group, step, self._reasons(group, step), at)
        if self.state.config.refill:
            self.refill.add(len(due))
        return [group.group_id for group in due]

    def evict_requested(self, group_ids: Iterable[str], *, refill: bool, at: Moment) -> EvictionCounts:
        """Evict groups on the caller's order, those that Sample holds excepted."""
        evicted = missing = sampled = 0
        for group_id in dict.fromkeys(group_ids):
            group = self.groups.get(group_id)
            if group is None:
                missing += 1
            elif group.state is GroupState.SAMPLED:
                sampled += 1
            else:
                due = self._reasons(group, self.state.step) if self.training else ()
                self._evict(group, self.state.step, (*due, EvictionReason.REQUESTED), at)
                evicted += 1
        if refill and self.training:
            self.refill.add(evicted)
        return EvictionCounts(evicted, missing, sampled)

    def _reasons(self, group: Group, step: int) -> tuple[EvictionReason, ...]:
        reasons: list[EvictionReason] = []
        if group.state is GroupState.FINISHED:
            kept = oldest_kept(self.staleness, step)
            if kept is not None and group.born < kept:
                reasons.append(EvictionReason.STALE)
            if group.zero_variance:
                reasons.append(EvictionReason.ZERO_VARIANCE)
        elif group.state is GroupState.FAILED:
            reasons.append(EvictionReason.FAILED)
        return tuple(reasons)

    def _evict(self, group: Group, step: int, reasons: tuple[EvictionReason, ...], at: Moment) -> None:
        self.state.touch(self.name, group)
        self.end_claims(group)
        self._remove(group, GroupState.EVICTED)
        self.state.payloads.drop(group.payloads(), group.held_here())
        self.evictions.record(reasons, span(step, group.born))
        if EvictionReason.STALE in reasons or EvictionReason.FAILED in reasons:
            self._note_dropped(group, step, reasons)
        self.log(GroupEventKind.EVICTED, group, at, reasons=reasons)

    def _note_dropped(self, group: Group, step: int, reasons: tuple[EvictionReason, ...]) -> None:
        self.dropped.drop(
            group.prompt_id or group.group_id,
            reasons,
            group.group_id,
            born=group.born,
            step=step,
            length=group.longest,
            attempt=max(trajectory.attempt for trajectory in group.trajectories),
        )

    def next_refill(self) -> float | None:
        """When credits that are gathered for a wait may be shown to it, if there are any."""
        if not self.refill.free or not self.waits.trainers or self.supply_ended or self.intake_paused:
            return None
        return self.refill.new_claim_at(next(iter(self.waits.trainers)))

    # --------------------------------------------------------------------------------------------------------- reading

    def depth(self, step: int, now: float) -> Depth:
        """The depth at a step; changes nothing."""
        oldest = self.index.longest_running()
        return Depth(
            step=step,
            sampleable=self.index.sampleable(step, self.staleness),
            counts=self.index.snapshot(),
            hold=self.index.hold(step, self.staleness),
            unpaid_credits=self.refill.unpaid,
            supply_ended=self.supply_ended,
            intake_paused=self.intake_paused,
            oldest_running_group_id="" if oldest is None else oldest.group_id,
            oldest_running_for=0.0 if oldest is None else max(0.0, now - oldest.started_at),
        )

    def ledger(self) -> Ledger:
        """The account of every group that was ever added."""
        return Ledger(
            added=self.added,
            committed=self.committed,
            evicted=self.evictions.total.evicted,
            evicted_by_reason=self.evictions.total.by_reason.copy(),
            present=self.index.snapshot(),
            credits_created=self.refill.created,
            credits_paid=self.refill.paid,
            credits_cancelled=self.refill.cancelled,
        )

    def log(
        self,
        kind: GroupEventKind,
        group: Group,
        at: Moment,
        *,
        trajectories: int = 0,
        index: int | None = None,
        lengths: tuple[int, ...] = (),
        replica_id: str = "",
        reasons: tuple[EvictionReason, ...] = (),
        attempt: int = 0,
    ) -> None:
        """Tell what happened to a group."""
        self.state.events.append(
            kind,
            self.name,
            group.group_id,
            group.born,
            at.wall,
            trajectories=trajectories,
            index=index,
            lengths=lengths,
            replica_id=replica_id,
            reasons=reasons,
            attempt=attempt,
        )
