"""All replicas of a run: where requests are, and how they move.

Invariants: a request is on one replica or complete; new and moved requests go to the replica with the fewest, unless a
placement says which pool; a request that moves is prefilled again with its prompt and everything it generated.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from math import inf

from services.simulator.replica import Moved, Replica
from services.simulator.workload import Workload


class Fleet:
    """`lengths[r]` is the final length of request r."""

    def __init__(self, workload: Workload, lengths: list[int]) -> None:
        self._workload = workload
        self._lengths = lengths
        self._speed = 1.0
        self._built = 0
        self.hybrids: list[Replica] = []
        self.standalones: list[Replica] = []
        self.all: list[Replica] = []

    def copy(self) -> Fleet:
        """An independent fleet in the same state."""
        other = Fleet(self._workload, self._lengths)
        other._speed, other._built = self._speed, self._built
        other.hybrids = [replica.copy() for replica in self.hybrids]
        other.standalones = [replica.copy() for replica in self.standalones]
        other.all = other.hybrids + other.standalones
        return other

    # -------------------------------------------------------------------------------------------------- time

    def next(self) -> tuple[float, Replica | None]:
        """When the next request completes, and on which replica; (inf, None) if nothing runs."""
        at, first = inf, None
        for replica in self.all:
            if replica.next_at < at:
                at, first = replica.next_at, replica
        return at, first

    def advance(self, now: float) -> None:
        """Decode everywhere until `now`."""
        for replica in self.all:
            replica.advance(now)

    # ---------------------------------------------------------------------------------------------- topology

    def resize(self, hybrids: int, standalones: int, lent: bool, now: float) -> None:
        """Have so many replicas from now on. Requests of lost replicas go on elsewhere; new ones begin empty."""
        lost: list[tuple[float, int]] = []
        for pool, size, hybrid in ((self.hybrids, hybrids, True), (self.standalones, standalones, False)):
            while len(pool) > size:
                lost += pool.pop().take(now)
            while len(pool) < size:
                self._built += 1
                replica = Replica(
                    f"{'hybrid' if hybrid else 'standalone'}-{self._built}", hybrid, self._workload.engine
                )
                replica.set_speed(self._speed, now)
                if lent or not hybrid:
                    replica.serve(now)
                pool.append(replica)
        self.all = self.hybrids + self.standalones
        self.place(lost, self._serving(), now)

    def set_speed(self, factor: float, now: float) -> None:
        """Decode `factor` times as fast as the curve says from now on."""
        if factor != self._speed:
            self._speed = factor
            for replica in self.all:
                replica.set_speed(factor, now)

    # ----------------------------------------------------------------------------------------------- requests

    def add(self, requests: Iterable[int], now: float) -> None:
        """Place new requests on what serves."""
        self.place([(float(self._lengths[request]), request) for request in requests], self._serving(), now)

    def lend(self, preferred: tuple[Collection[int], Collection[int]] | None, now: float) -> None:
        """Abort everything and spread it over all replicas, hybrids included; nothing serves until told to.

        preferred: requests for the hybrid and for the standalone pool; those in neither go where the fewest are.
        """
        moving = [request for replica in self.all for request in replica.take(now)]
        if preferred is not None:
            hybrid, standalone = set(preferred[0]), set(preferred[1])
            self.place([each for each in moving if each[1] in hybrid], self.hybrids, now)
            self.place([each for each in moving if each[1] in standalone], self.standalones, now)
            moving = [each for each in moving if each[1] not in hybrid and each[1] not in standalone]
        self.place(moving, self.all, now)

    def reclaim(self, now: float) -> None:
        """Abort what hybrids run and spread it over the standalone replicas."""
        moving = [request for replica in self.hybrids for request in replica.take(now)]
        self.place(moving, self.standalones, now)

    def sync(self, now: float) -> None:
        """Abort what standalone replicas run; each keeps its own and prefills it again once it serves."""
        for replica in self.standalones:
            replica.add(self._moved(replica.take(now)), now)

    def serve(self, pool: list[Replica], now: float) -> None:
        """Let `pool` serve."""
        for replica in pool:
            replica.serve(now)

    def place(self, requests: list[tuple[float, int]], pool: list[Replica], now: float) -> None:
        """Spread (tokens to decode, request) over `pool`, always to the replica with the fewest."""
        if not requests:
            return
        load = [(len(replica.ends), index) for index, replica in enumerate(pool)]
        heapq.heapify(load)
        shares: list[list[tuple[float, int]]] = [[] for _ in pool]
        for request in requests:
            count, index = load[0]
            shares[index].append(request)
            heapq.heapreplace(load, (count + 1, index))
        for replica, share in zip(pool, shares, strict=True):
            if share:
                replica.add(self._moved(share), now)

    def _moved(self, requests: list[tuple[float, int]]) -> list[Moved]:
        prompt, lengths = self._workload.lengths.prompt_tokens, self._lengths
        return [(left, request, prompt + lengths[request] - left) for left, request in requests]

    def _serving(self) -> list[Replica]:
        return [replica for replica in self.all if replica.serving]
