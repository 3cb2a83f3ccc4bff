"""Run: one training job, with its epoch, its current step, its partitions and its leases.

Invariants:
  * A call either raises and changes nothing, or does all of what it says.
  * Epochs only rise. A call of an older trainer is refused; leases and shown refill claims do not outlive their epoch.
  * The current step is the highest step of a call that carried the current epoch.
  * Sample leases live while their trainer does: any call of its epoch extends them, and a parked wait of it keeps them.
    Without an epoch only RenewSample does, since such calls do not tell who makes them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.buffer.domain import pump as pumping
from services.buffer.domain.caps import cap_reached
from services.buffer.domain.claims import ClaimToken
from services.buffer.domain.config import RunConfig
from services.buffer.domain.external import ExternalBook
from services.buffer.domain.ids import Ids
from services.buffer.domain.leases import Lease, LeaseBook, LeaseState
from services.buffer.domain.ledger import Ledger
from services.buffer.domain.moment import Moment
from services.buffer.domain.partition import EvictionCounts, GroupSpec, Partition
from services.buffer.domain.payloads import PayloadBook, PayloadStore
from services.buffer.domain.pump import Pumped
from services.buffer.domain.rate import RequestRate
from services.buffer.domain.state import RunState
from services.buffer.domain.waits import Wait, WaitEnd, WaitOutcome
from services.runtime.errors import (
    failed_precondition,
    invalid_argument,
    not_found,
    stale_epoch,
    unknown_epoch,
)

# Far beyond any number of trainers, and far from the end of the int64 that carries it.
_LARGEST_EPOCH = 2**62


@dataclass(frozen=True, slots=True)
class WaitSpec:
    """What a wait asks for; `sample` consumes `target` groups, otherwise the depth is only watched."""

    step: int
    target: int
    cursor: int = 0
    sample: bool = False
    auto_commit: bool = False
    request_id: str = ""
    fingerprint: bytes = b""


class Run:
    """One training job."""

    def __init__(
        self,
        run_id: str,
        config: RunConfig,
        *,
        id_prefix: str,
        store: PayloadStore,
        at: Moment,
        external: ExternalBook | None = None,
    ) -> None:
        """`id_prefix` must never have been used for a run before; `external` is what earlier runs of the id left.

        Raises INVALID_ARGUMENT if `config` is wrong.
        """
        config.validate()
        self.run_id = run_id
        self.created_at = at.wall
        ids = Ids(id_prefix)
        self.state = RunState(config, ids, PayloadBook(store, ids, external), contact_at=at.now)
        self.requests = RequestRate()
        self.partitions = {spec.name: Partition(spec, self.state) for spec in config.partitions}

    def partition(self, name: str) -> Partition:
        """The partition of that name. Raises NOT_FOUND / PARTITION_NOT_FOUND."""
        partition = self.partitions.get(name)
        if partition is None:
            raise not_found(
                "PARTITION_NOT_FOUND",
                f"run {self.run_id!r} has no partition {name!r}",
                field="partition",
                value=name,
                run_id=self.run_id,
            )
        return partition

    def check_rate(self, now: float) -> None:
        """Count a request at `now`, in monotonic wall seconds. Raises RESOURCE_EXHAUSTED / CAP_REQUEST_RATE."""
        rate = self.state.config.caps.max_request_rate
        if rate is None:
            return
        wait = self.requests.ask(rate, now)
        if wait:
            asked = self.requests.asked
            raise cap_reached(
                "max_request_rate",
                "CAP_REQUEST_RATE",
                f"{asked} requests came in this second, the cap is {rate:g} per second: come back in {wait:.3f} s",
                limit=rate,
                present=asked,
                retry_after=wait,
                run_id=self.run_id,
            )

    # ----------------------------------------------------------------------------------------------------- the trainer

    def check_epoch(self, epoch: int | None) -> None:
        """Raise FAILED_PRECONDITION / STALE_EPOCH or UNKNOWN_EPOCH unless the caller is the present trainer.

        No epoch counts as 0, which is right until one is opened.
        """
        given = epoch or 0
        if given < self.state.epoch:
            raise stale_epoch(given, self.state.epoch)
        if given > self.state.epoch:
            raise unknown_epoch(given, self.state.epoch)

    def contact(self, at: Moment, step: int | None = None) -> None:
        """The present trainer has called, perhaps for a step."""
        self.state.contact_at = at.now
        if step is not None:
            self.state.step = max(self.state.step, step)

    def heard_at(self, now: float) -> float:
        """When the trainer was heard of last; one that waits is heard of all the time, one without epoch never."""
        if not self.state.epoch:
            return float("-inf")
        parked = any(partition.waits.trainers for partition in self.partitions.values())
        return now if parked else self.state.contact_at

    def open_epoch(self, epoch: int | None, at: Moment) -> tuple[int, list[Wait]]:
        """Fence off the present trainer: returns how many groups came back, and the waits that must end."""
        state = self.state
        granted = state.epoch + 1 if epoch is None else epoch
        if granted <= state.epoch:
            raise stale_epoch(granted, state.epoch)
        if granted > _LARGEST_EPOCH:
            message = "an epoch is at most 2**62"
            raise invalid_argument("epoch", message, value=granted, reason="OUT_OF_RANGE")
        state.epoch = granted
        returned = 0
        for lease in list(state.leases.live.values()):
            returned += len(lease.groups)
            self.give_back(lease, LeaseState.RELEASED, at)
        fenced: list[Wait] = []
        for partition in self.partitions.values():
            trainers = list(partition.waits.trainers.values())
            # Waits that ended but whose stream still runs hold claims too.
            partition.refill.forget_all_waits()
            for wait in trainers:
                wait.closed = True
                partition.waits.remove(wait)
            fenced += trainers
        self.contact(at)
        return returned, fenced

    def update(self, config: RunConfig) -> None:
        """Replace the configuration. Raises INVALID_ARGUMENT, or FAILED_PRECONDITION / IMMUTABLE_FIELD."""
        config.validate()
        config.check_replaces(self.state.config)
        self.state.config = config

    # ------------------------------------------------------------------------------------------------ prompts and work

    def add_groups(
        self,
        partition: Partition,
        specs: Sequence[GroupSpec],
        step: int,
        at: Moment,
        *,
        refill_claim_id: str | None = None,
        end_of_prompts: bool = False,
    ) -> int:
        """Add all groups or none; returns what the refill claim still asks for."""
        check_step(step)
        if partition.intake_paused:
            raise failed_precondition(
                "INTAKE_PAUSED", "intake of the partition is paused", field="partition", value=partition.name
            )
        partition.check_add(specs)
        if refill_claim_id is not None:
            partition.refill.check_payment(refill_claim_id, len(specs))
        partition.add(specs, step, at)
        remaining = 0
        if refill_claim_id is not None:
            remaining = partition.refill.pay(refill_claim_id, len(specs))
        if end_of_prompts:
            partition.supply_ended = True
        elif specs and refill_claim_id is None:
            partition.supply_ended = False
        return remaining

    def renew_claim(self, token: ClaimToken, at: Moment) -> None:
        """Extend a claim. Raises FAILED_PRECONDITION / STALE_CLAIM."""
        self.state.claims.renew(token, at.now + self.state.config.lease_times.claim)

    def decline_refill(self, partition: Partition, claim_id: str) -> int:
        """There are no more prompts; returns the credits that were cancelled, 0 if the claim had ended already."""
        cancelled = partition.refill.decline(claim_id)
        if cancelled:
            partition.supply_ended = True
        return cancelled

    def evict_groups(
        self, partition: Partition, group_ids: Iterable[str], *, refill: bool, at: Moment
    ) -> EvictionCounts:
        """Evict groups on the caller's order."""
        return partition.evict_requested(group_ids, refill=refill and self.state.config.refill, at=at)

    # --------------------------------------------------------------------------------------------------------- waiting

    def open_wait(
        self, partition: Partition, spec: WaitSpec, at: Moment, *, trainer: bool
    ) -> tuple[Wait, WaitEnd | None]:
        """Enter a wait; it has ended already if it repeats a Sample that was answered."""
        check_step(spec.step)
        self._check_target(partition, spec)
        partition.evictions.check(spec.cursor)
        answered = self.state.leases.answered(spec.request_id, spec.fingerprint)
        for other in partition.waits if spec.request_id else ():
            if other.request_id == spec.request_id and other.fingerprint != spec.fingerprint:
                message = "this request_id is in use with other content"
                raise invalid_argument("request_id", message, value=spec.request_id, reason="REQUEST_ID_REUSED")
        wait = Wait(
            partition.waits.next_order(),
            spec.step,
            spec.target,
            spec.cursor,
            trainer,
            self.state.epoch,
            spec.sample,
            spec.auto_commit,
            spec.request_id,
            spec.fingerprint,
        )
        if answered is not None:
            return wait, pumping.end_of(partition, wait, WaitOutcome.REACHED, at, answered)
        partition.waits.add(wait)
        return wait, None

    def _check_target(self, partition: Partition, spec: WaitSpec) -> None:
        name, least = ("batch", 1) if spec.sample else ("target", 0)
        if spec.target < least:
            message = f"{name} must be at least {least}, it is {spec.target}"
            raise invalid_argument(name, message, value=spec.target, reason="TARGET_OUT_OF_RANGE")
        config = self.state.config
        cap = config.caps.max_groups
        if partition.training and config.gate_limit is not None:
            # The gate never lets more than this be running and finished at once.
            cap = min(cap, config.gate_limit)
        if spec.target > cap:
            raise failed_precondition(
                "TARGET_ABOVE_CAPS",
                f"the run never holds more than {cap} groups, so {spec.target} cannot be reached",
                field=name,
                value=spec.target,
                cap=cap,
            )

    def pump(self, partition: Partition, at: Moment) -> Pumped:
        """Do for the waits of a partition what the last change made possible."""
        return pumping.pump(partition, at)

    def time_out(self, partition: Partition, wait: Wait, at: Moment) -> WaitEnd:
        """The time of a wait has passed."""
        return pumping.time_out(partition, wait, at)

    def close_wait(self, partition: Partition, wait: Wait, at: Moment) -> bool:
        """The call of a wait is over, however it ended; returns whether it leaves anything to be shown to another."""
        if wait.closed:
            return False
        wait.closed = True
        partition.waits.remove(wait)
        if not wait.trainer:
            return False
        self.contact(at)
        return partition.refill.forget_wait(wait.order)

    # ---------------------------------------------------------------------------------------------------------- leases

    def commit(self, lease_id: str, at: Moment) -> Sequence[str]:
        """The groups of a lease are consumed; repeating it is fine. Returns their ids."""
        lease = self.state.leases.require(lease_id)
        if lease.state is not LeaseState.COMMITTED:
            self.state.leases.require_live(lease_id)
            self.partitions[lease.partition].commit(lease.groups, at)
            self.state.leases.end(lease, LeaseState.COMMITTED, at.now)
            self.state.leases.retained.set(lease_id, at.now + self.state.config.lease_times.sample)
        return lease.group_ids

    def release(self, lease_id: str, at: Moment) -> Sequence[str]:
        """The groups of a lease come back; repeating it is fine. Returns their ids."""
        lease = self.state.leases.require(lease_id)
        if lease.state is not LeaseState.RELEASED:
            self.state.leases.require_live(lease_id)
            self.give_back(lease, LeaseState.RELEASED, at)
        return lease.group_ids

    def renew(self, lease_id: str, at: Moment) -> float:
        """Extend a lease; returns the domain seconds it lives from now."""
        self.state.leases.require_live(lease_id)
        seconds = self.state.config.lease_times.sample
        self.state.leases.deadlines.set(lease_id, at.now + seconds)
        return seconds

    def lease_left(self, lease: Lease, now: float) -> float:
        """Domain seconds until a lease ends or, committed, until its payloads go."""
        leases = self.state.leases
        if lease.state is LeaseState.COMMITTED:
            return (leases.retained.get(lease.lease_id) or now) - now
        until = leases.deadlines.get(lease.lease_id) or now
        return max(until, self.heard_at(now) + self.state.config.lease_times.sample) - now

    def release_payload(self, lease_id: str) -> int:
        """The payloads of a committed lease may go; returns the bytes that went."""
        lease = self.state.leases.require(lease_id)
        if lease.state is LeaseState.LIVE:
            raise failed_precondition(
                "LEASE_NOT_COMMITTED", "the lease is not committed", field="lease_id", value=lease_id
            )
        if lease.state is not LeaseState.COMMITTED:
            self.state.leases.require_live(lease_id)
        self.state.leases.retained.discard(lease_id)
        return self.let_payloads_go(lease)

    def let_payloads_go(self, lease: Lease) -> int:
        """Forget what a lease that ended still holds; returns the bytes that went."""
        freed = self.state.payloads.drop(lease.payloads(), lease.small_bytes())
        lease.groups = ()
        return freed

    def give_back(self, lease: Lease, state: LeaseState, at: Moment) -> None:
        """The groups of a live lease, which ends in `state`, are sampleable again."""
        self.partitions[lease.partition].take_back(lease.groups, at)
        self.state.leases.end(lease, state, at.now)
        lease.groups = ()

    # ------------------------------------------------------------------------------------------------------------ time

    def restart(self, id_prefix: str, at: Moment) -> None:
        """The service began anew: nobody waits, and whatever runs out does so after its full time from now on."""
        state = self.state
        times = state.config.lease_times
        state.ids.prefix = id_prefix
        state.claims.restart(at.now + times.claim)
        state.leases.restart(at.now + times.sample)
        state.payloads.restart(at.now + times.payload)
        self.contact(at)
        for partition in self.partitions.values():
            partition.refill.forget_all_waits()

    # --------------------------------------------------------------------------------------------------------- reading

    def ledger(self) -> Ledger:
        """The account of all partitions together."""
        first, *others = (partition.ledger() for partition in self.partitions.values())
        total = replace(first)
        for ledger in others:
            total += ledger
        return total

    def take_apart(self) -> list[list[Any]]:
        """Forget the groups and leases, since the run is no longer used; the caller frees them in its time."""
        state = self.state
        groups = [group for partition in self.partitions.values() for group in partition.let_go()]
        apart: list[list[Any]] = [groups, state.leases.remembered()]
        state.leases = LeaseBook()
        return apart

    def clear(self) -> None:
        """Let go of everything kept outside: the run is deleted."""
        self.state.payloads.clear()


def check_step(step: int) -> None:
    """Raise INVALID_ARGUMENT / OUT_OF_RANGE for a negative step."""
    if step < 0:
        message = f"step must not be negative, it is {step}"
        raise invalid_argument("step", message, value=step, reason="OUT_OF_RANGE")
