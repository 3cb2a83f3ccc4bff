"""A trainer: adds prompts, waits, samples, checks every byte, commits; takes checkpoints and rolls back to them.

    python -m tests.soak.trainer NAME LIFE TARGET RUN DIRECTORY LARGEST SEED

Its book has an entry before each step that changes something (`adding`, `sampling`, `committing`, ...) and one when the
answer is known (`added`, `leased`, `committed`, ...), so that the next life can finish what this one began. It has one
thread and no background task, as many trainers have.
"""

from __future__ import annotations

import base64
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import google_crc32c

from tests.soak import content
from tests.soak.book import Book, Entry, read
from tests.soak.errand import OPTIONS, PAUSE_S, Errand, is_full, is_outage
from turnout.buffer.v1 import buffer_pb2 as pb
from turnout.client import (
    BufferClient,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    Refills,
    TurnoutError,
    Unavailable,
    duration,
    new_request_id,
)

T = TypeVar("T")

PARTITION: Final = "train"
PRESENT: Final = 28
"""Groups kept in the buffer."""

BATCH: Final = 6
CHECKPOINT_EVERY: Final = 12
"""Steps."""

RESTORE_EVERY: Final = 40
KEPT_CHECKPOINTS: Final = 2


class Trainer:
    """One life of a trainer."""

    def __init__(self, errand: Errand, run_id: str, client: BufferClient, largest: int) -> None:
        self._errand = errand
        self._rng = errand.rng
        self._run = run_id
        self._client = client
        self._largest = largest
        path = errand.directory / f"{errand.name}.book"
        self._past = read(path)
        self._book = Book(path)
        self._epoch = 0
        steps = [entry["step"] for entry in self._past if entry["kind"] in ("sampling", "restored")]
        self._step = steps[-1] if steps else 0
        self._cursor = 0
        self._number = max((max(entry["numbers"]) for entry in self._past if entry["kind"] == "adding"), default=0)
        self._refills: Refills | None = None
        self._draining = False

    def run(self) -> None:
        """Train until it is time to drain, then drain."""
        self._epoch = self._insist(
            self._client.calls.OpenEpoch, pb.OpenEpochRequest(run_id=self._run, request_id=new_request_id())
        ).epoch
        self._book.write("epoch", epoch=self._epoch)
        self._resume()
        self._open_refills()
        while not self._errand.draining:
            self._train()
        self._draining = True
        self._drain()

    # ---------------------------------------------------------------------------------------------------------- calling

    def _insist(self, call: Callable[[Any], T], request: Any) -> T:
        """Repeat until the answer is known; raises what it is if it is an error."""
        while True:
            try:
                answer = call(request)
            except TurnoutError as error:
                if not is_outage(error):
                    raise
                time.sleep(PAUSE_S)
            else:
                self._errand.ok()
                return answer

    def _where(self, **more: Any) -> dict[str, Any]:
        return {"run_id": self._run, "epoch": self._epoch, **more}

    # --------------------------------------------------------------------------------------------- the life before this

    def _resume(self) -> None:
        """Finish what the life before left open."""
        last = self._past[-1] if self._past else None
        if last is None:
            return
        match last["kind"]:
            case "adding" if last["request"]:
                self._repeat_add(last)
            case "leased":
                # The groups came back with the new epoch.
                self._book.write("returned", lease=last["lease"])
            case "committing":
                self._commit(last["lease"], last["ids"], sure=False)
            case "committed":
                self._release_payload(last["lease"])
            case "checkpointing":
                # Whether it was taken is of no interest: another one will be.
                pass
            case "restoring":
                self._restore(last)
            case _:
                # Reads, and calls whose effect the events show.
                pass

    def _repeat_add(self, entry: Entry) -> None:
        request = pb.AddGroupsRequest.FromString(base64.b64decode(entry["request"]))
        request.epoch = self._epoch
        self._add(request)

    # --------------------------------------------------------------------------------------------------------- training

    def _train(self) -> None:
        self._step += 1
        if self._rng.random() < 0.04:
            # A trainer that went on without us: what is old gets stale.
            self._step += 3
        self._top_up()
        if self._rng.random() < 0.3:
            self._wait()
        self._sample(BATCH, 20.0)
        chance = self._rng.random()
        if chance < 1 / CHECKPOINT_EVERY:
            self._checkpoint()
        elif chance < 1 / CHECKPOINT_EVERY + 1 / RESTORE_EVERY:
            self._roll_back()
        elif chance < 0.2:
            self._evict()

    def _specs(self, count: int) -> tuple[list[int], list[pb.GroupSpec]]:
        numbers = list(range(self._number + 1, self._number + count + 1))
        self._number += count
        return numbers, [self._spec(f"{self._run}-{number}") for number in numbers]

    def _spec(self, group_id: str) -> pb.GroupSpec:
        size = content.group_size(self._run, group_id)
        prompt = self._insist(lambda data: self._client.payload(self._run, data), content.prompt(self._run, group_id))
        return pb.GroupSpec(group_id=group_id, group_size=size, prompt=prompt, tags={"id": group_id})

    def _top_up(self) -> None:
        read_depth = pb.GetSampleableCountRequest(run_id=self._run, partition=PARTITION)
        counts = self._insist(self._client.calls.GetSampleableCount, read_depth).depth.counts
        missing = PRESENT - (counts.pending + counts.running + counts.finished + counts.failed)
        if missing <= 0:
            return
        numbers, specs = self._specs(missing)
        request = pb.AddGroupsRequest(
            **self._where(partition=PARTITION, step=self._step, groups=specs, request_id=new_request_id())
        )
        self._book.write("adding", numbers=numbers, request=base64.b64encode(request.SerializeToString()).decode())
        self._add(request)

    def _add(self, request: pb.AddGroupsRequest) -> None:
        ids = [group.group_id for group in request.groups]
        try:
            answer = self._insist(self._client.calls.AddGroups, request)
        except NotFound as error:
            self._errand.check(error.reason == "PAYLOAD_NOT_FOUND", f"adding ended {error}")
            self._book.write("refused", ids=ids, reason=error.reason)
        else:
            self._errand.check(answer.added == len(ids), f"{answer.added} of {len(ids)} groups were added")
            self._book.write("added", ids=ids)

    def _open_refills(self) -> None:
        self._refills = self._client.refills(self._refill, run_id=self._run, partition=PARTITION, epoch=self._epoch)

    def _refill(self, count: int) -> Sequence[pb.GroupSpec]:
        if self._draining:
            return ()
        numbers, specs = self._specs(count)
        # The client chooses the request id of a payment, so no later life can repeat it: the events tell.
        self._book.write("adding", numbers=numbers, request="")
        return specs

    def _wait(self) -> None:
        request = pb.WaitForSampleableRequest(
            **self._where(
                partition=PARTITION,
                step=self._step,
                target=self._rng.randint(1, BATCH),
                cursor=self._cursor,
                max_wait=duration(self._rng.uniform(0, 5)),
            )
        )
        try:
            done = self._client.wait_for_sampleable(request, refills=self._refills)
        except TurnoutError as error:
            self._errand.check(is_outage(error) or _is_unpaid(error), f"a wait ended {error}")
            return
        self._errand.ok()
        reached = done.depth.sampleable >= request.target
        self._errand.check(
            done.outcome != pb.WAIT_OUTCOME_REACHED or reached, lambda: f"REACHED at a depth of {done.depth.sampleable}"
        )
        self._cursor = done.next_cursor

    def _sample(self, batch: int, max_wait: float) -> int:
        """Sample, check and commit; return how it ended (WaitOutcome)."""
        request = pb.SampleRequest(
            **self._where(
                partition=PARTITION,
                step=self._step,
                batch=batch,
                cursor=self._cursor,
                max_wait=duration(max_wait),
                request_id=new_request_id(),
            )
        )
        self._book.write("sampling", step=self._step, request_id=request.request_id)
        while True:
            try:
                sampled = self._client.sample(request, refills=self._refills)
                break
            except (Unavailable, DeadlineExceeded):
                # The batch may be ours already: only the same request finds it.
                time.sleep(PAUSE_S)
            except FailedPrecondition as error:
                # Away for longer than a lease lives.
                self._errand.check(error.reason == "LEASE_EXPIRED", f"sampling ended {error}")
                self._book.write("expired", request_id=request.request_id)
                return pb.WAIT_OUTCOME_TIMED_OUT
            except TurnoutError as error:
                self._errand.check(is_full(error) or _is_unpaid(error), f"sampling ended {error}")
                time.sleep(PAUSE_S)
        self._errand.ok()
        self._cursor = sampled.done.next_cursor
        if sampled.done.outcome != pb.WAIT_OUTCOME_REACHED:
            self._book.write("unmet", outcome=pb.WaitOutcome.Name(sampled.done.outcome), reason=sampled.done.reason)
            return sampled.done.outcome
        lease_id = sampled.done.lease_id
        ids = [group.group_id for group in sampled.groups]
        marks = [
            [group.group_id, one.index, one.outputs[-1].tags["mark"]]
            for group in sampled.groups
            for one in group.trajectories
        ]
        self._book.write("leased", lease=lease_id, ids=ids, marks=marks)
        self._errand.check(len(set(ids)) == batch, f"a batch of {batch} has the groups {ids}")
        readable = self._check(lease_id, sampled.groups)
        if readable and self._rng.random() < 0.06:
            self._release(lease_id)
        else:
            self._commit(lease_id, ids, sure=True)
        return sampled.done.outcome

    # --------------------------------------------------------------------------------------------------------- checking

    def _check(self, lease_id: str, groups: Sequence[pb.SampledGroup]) -> bool:
        """Check a batch to the last byte; return whether its lease still stands."""
        refs: list[pb.PayloadRef] = []
        wanted: list[tuple[str, int]] = []
        for group in groups:
            group_id = group.group_id
            size = content.group_size(self._run, group_id)
            self._errand.check(group.tags["id"] == group_id, f"{group_id} has the tags of {group.tags['id']}")
            indices = [one.index for one in group.trajectories]
            self._errand.check(indices == list(range(size)), f"{group_id} of {size} has the trajectories {indices}")
            for one in group.trajectories:
                output = one.outputs[-1]
                right = content.reward(self._run, group_id, one.index)
                self._errand.check(output.rewards["reward"] == right, f"{group_id}/{one.index} has another reward")
                refs.append(output.payload.ref)
                wanted.append((group_id, one.index))
        received = 0
        while received < len(refs):
            try:
                for data in self._client.get_payloads(self._run, refs[received:], lease_id=lease_id):
                    self._check_bytes(*wanted[received], refs[received], data)
                    received += 1
                    self._errand.ok()
            except (FailedPrecondition, NotFound) as error:
                # Away for longer than the lease lives.
                gone = error.reason in ("LEASE_EXPIRED", "LEASE_NOT_FOUND")
                self._errand.check(gone, f"reading {wanted[received]} ended {error}")
                return False
            except TurnoutError as error:
                if not is_outage(error):
                    self._errand.wrong(f"reading {wanted[received:]} ended {error} {error.metadata}")
                    return True
                time.sleep(PAUSE_S)
        return True

    def _check_bytes(self, group_id: str, index: int, ref: pb.PayloadRef, data: bytes) -> None:
        right = content.result(self._run, group_id, index, self._largest)
        self._errand.check(data == right, f"the payload of {group_id}/{index} arrived altered: {len(data)} bytes")
        crc = google_crc32c.value(right)
        self._errand.check(
            ref.crc32c == crc, f"the reference of {group_id}/{index} has the checksum {ref.crc32c:#010x}"
        )

    # --------------------------------------------------------------------------------------------------- end of a lease

    def _commit(self, lease_id: str, ids: Sequence[str], *, sure: bool) -> None:
        """Commit. `sure` is False in a later life, whose epoch gave the groups back unless the commit came first."""
        self._book.write("committing", lease=lease_id, ids=list(ids))
        try:
            answer = self._insist(
                self._client.calls.CommitSample, pb.CommitSampleRequest(**self._where(lease_id=lease_id))
            )
        except FailedPrecondition as error:
            allowed = ("LEASE_EXPIRED",) if sure else ("LEASE_EXPIRED", "LEASE_RELEASED")
            self._errand.check(error.reason in allowed, f"a commit ended {error}")
            self._book.write("returned", lease=lease_id)
            return
        self._errand.check(list(answer.group_ids) == list(ids), f"{ids} were leased and {answer.group_ids} committed")
        self._book.write("committed", lease=lease_id, ids=list(ids))
        if self._draining or self._rng.random() < 0.7:
            self._release_payload(lease_id)

    def _release(self, lease_id: str) -> None:
        request = pb.ReleaseSampleRequest(**self._where(lease_id=lease_id))
        try:
            self._insist(self._client.calls.ReleaseSample, request)
        except FailedPrecondition as error:
            self._errand.check(error.reason == "LEASE_EXPIRED", f"giving back ended {error}")
        self._book.write("returned", lease=lease_id)

    def _release_payload(self, lease_id: str) -> None:
        request = pb.ReleasePayloadRequest(**self._where(lease_id=lease_id))
        try:
            self._insist(self._client.calls.ReleasePayload, request)
        except NotFound as error:
            # A restore forgets the leases.
            self._errand.check(error.reason == "LEASE_NOT_FOUND", f"releasing payloads ended {error}")

    # ----------------------------------------------------------------------------------------- checkpoints and evicting

    def _state(self) -> tuple[list[str], list[int]]:
        """Return the ids present and the ledger, of one moment."""
        while True:
            before = self._ledger()
            ids: list[str] = []
            token = ""
            while True:
                request = pb.ListGroupsRequest(run_id=self._run, partition=PARTITION, page_size=1000, page_token=token)
                page = self._insist(self._client.calls.ListGroups, request)
                ids.extend(group.group_id for group in page.groups)
                token = page.next_page_token
                if not token:
                    break
            if self._ledger() == before:
                return sorted(ids), before

    def _ledger(self) -> list[int]:
        answer = self._insist(self._client.calls.GetLedger, pb.GetLedgerRequest(run_id=self._run, partition=PARTITION))
        return [answer.added, answer.committed, answer.evicted]

    def _checkpoint(self) -> None:
        ids, ledger = self._state()
        checkpoint_id = f"at-{self._number}-{self._step}"
        self._book.write("checkpointing", id=checkpoint_id)
        request = pb.CheckpointRequest(**self._where(step=self._step, checkpoint_id=checkpoint_id))
        try:
            self._client.calls.Checkpoint(request)
        except TurnoutError as error:
            # A full disk has no room for one; the old ones are there still.
            self._errand.check(is_outage(error), f"a checkpoint ended {error}")
            return
        after = self._state()
        self._book.write("checkpoint", id=checkpoint_id, ids=ids, ledger=ledger, sure=after == (ids, ledger))
        listed = self._insist(self._client.calls.ListCheckpoints, pb.ListCheckpointsRequest(run_id=self._run))
        names = [found.checkpoint_id for found in listed.checkpoints]
        self._errand.check(checkpoint_id in names, f"{checkpoint_id} is not among the checkpoints {names}")
        if self._rng.random() < 0.3:
            verify = pb.VerifyCheckpointRequest(run_id=self._run, checkpoint_id=checkpoint_id)
            self._attempt(self._client.calls.VerifyCheckpoint, verify, "verifying a checkpoint")
        for name in names[KEPT_CHECKPOINTS:]:
            self._delete_checkpoint(name)

    def _attempt(self, call: Callable[[Any], object], request: Any, what: str) -> None:
        try:
            self._insist(call, request)
        except TurnoutError as error:
            self._errand.wrong(f"{what} ended {error}")

    def _delete_checkpoint(self, name: str) -> None:
        request = pb.DeleteCheckpointRequest(run_id=self._run, checkpoint_id=name)
        # Not there: the first answer was lost.
        with contextlib.suppress(NotFound):
            self._insist(self._client.calls.DeleteCheckpoint, request)

    def _roll_back(self) -> None:
        listed = self._insist(self._client.calls.ListCheckpoints, pb.ListCheckpointsRequest(run_id=self._run))
        known = {entry["id"]: entry for entry in self._checkpoints() if entry["sure"]}
        name = next((found.checkpoint_id for found in listed.checkpoints if found.checkpoint_id in known), None)
        if name is None:
            return
        entry = {"id": name, "request_id": new_request_id()}
        self._book.write("restoring", **entry)
        self._restore(entry)

    def _checkpoints(self) -> list[Entry]:
        path = self._errand.directory / f"{self._errand.name}.book"
        return [entry for entry in read(path) if entry["kind"] == "checkpoint"]

    def _restore(self, entry: Entry) -> None:
        request = pb.RestoreRequest(**self._where(checkpoint_id=entry["id"], request_id=entry["request_id"]))
        answer = self._insist(self._client.calls.Restore, request)
        self._step, self._cursor = answer.step, answer.cursor
        ids, ledger = self._state()
        saved = next(one for one in self._checkpoints() if one["id"] == entry["id"])
        self._errand.check(ids == saved["ids"], lambda: f"after a restore {set(ids) ^ set(saved['ids'])} differ")
        self._errand.check(
            ledger == saved["ledger"], lambda: f"a restore made the ledger {ledger}, not {saved['ledger']}"
        )
        self._book.write("restored", id=entry["id"], step=self._step)
        # What the old content owed is not owed any more.
        self._open_refills()

    def _evict(self) -> None:
        listed = self._insist(
            self._client.calls.ListGroups, pb.ListGroupsRequest(run_id=self._run, partition=PARTITION)
        )
        ids = [group.group_id for group in listed.groups]
        chosen = self._rng.sample(ids, min(2, len(ids)))
        request = pb.EvictGroupsRequest(
            **self._where(
                partition=PARTITION, group_ids=chosen, refill=self._rng.random() < 0.5, request_id=new_request_id()
            )
        )
        self._book.write("evicting", ids=chosen)
        self._insist(self._client.calls.EvictGroups, request)

    # --------------------------------------------------------------------------------------------------------- draining

    def _drain(self) -> None:
        request = pb.AddGroupsRequest(
            **self._where(partition=PARTITION, step=self._step, end_of_prompts=True, request_id=new_request_id())
        )
        self._insist(self._client.calls.AddGroups, request)
        for batch in (BATCH, 1):
            while self._sample(batch, 30.0) != pb.WAIT_OUTCOME_EXHAUSTED:
                pass
        listed = self._insist(self._client.calls.ListCheckpoints, pb.ListCheckpointsRequest(run_id=self._run))
        for found in listed.checkpoints:
            self._delete_checkpoint(found.checkpoint_id)
        self._book.write("drained")


def _is_unpaid(error: TurnoutError) -> bool:
    """Whether a refill could not be paid from inside a wait: the upload of a prompt waited longer than it lives."""
    return isinstance(error, NotFound) and error.reason == "PAYLOAD_NOT_FOUND"


def main() -> None:
    """Train as the command line says."""
    name, life, target, run_id, directory, largest, seed = sys.argv[1:]
    errand = Errand(name, Path(directory), f"{seed}/{name}/{life}")
    with BufferClient(target, OPTIONS) as client:
        Trainer(errand, run_id, client, int(largest)).run()


if __name__ == "__main__":
    main()
