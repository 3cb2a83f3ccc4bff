"""Engines as fluids: exact times of small cases, and what must be conserved."""

from math import inf

import pytest

from services.simulator.fleet import Fleet
from services.simulator.replica import Replica
from services.simulator.workload import Engine, Workload

ENGINE = Engine(base_s=0.01, per_request_s=0.001, prefill_tokens_per_s=1000)


def serving(*lengths: float, prefix: float = 0.0) -> Replica:
    replica = Replica("r", False, ENGINE)
    replica.serve(0.0)
    replica.add([(length, number, prefix) for number, length in enumerate(lengths)], 0.0)
    return replica


def test_requests_share_the_speed_and_the_rest_goes_faster() -> None:
    """Two requests take 0.012 s a token; when the short one is gone, 0.011 s."""
    replica = serving(100, 300)
    assert replica.next_at == pytest.approx(1.2)
    replica.advance(replica.next_at)
    assert replica.pop() == 0
    assert replica.next_at == pytest.approx(1.2 + 200 * 0.011)
    assert replica.decoded == pytest.approx(200)


def test_prefill_stops_decoding() -> None:
    """A moved prefix that cost nothing would make every reclaim look free."""
    replica = serving(100, prefix=500)
    assert replica.next_at == pytest.approx(0.5 + 1.1)
    replica.advance(0.5)
    assert replica.decoded == 0
    assert replica.prefilled == 500
    assert replica.prefill_s == pytest.approx(0.5)


def test_a_held_replica_changes_nothing_until_it_serves() -> None:
    """Hybrids that load weights hold requests; their prefill comes after."""
    replica = Replica("r", True, ENGINE)
    replica.add([(100, 0, 500)], 3.0)
    assert replica.next_at == inf
    replica.advance(10.0)
    replica.serve(10.0)
    assert replica.next_at == pytest.approx(10 + 0.5 + 1.1)


def test_speed_change_moves_the_end() -> None:
    """Half way at half the speed: the second half takes twice as long."""
    replica = serving(100)
    replica.set_speed(0.5, 0.55)
    assert replica.next_at == pytest.approx(0.55 + 1.1)


def test_a_copy_goes_its_own_way() -> None:
    """The oracle tries many futures from one state."""
    replica = serving(100, 300)
    other = replica.copy()
    other.advance(other.next_at)
    other.pop()
    assert len(replica.ends) == 2
    assert replica.next_at == pytest.approx(1.2)


def fleet(hybrids: int, standalones: int, lengths: list[int]) -> Fleet:
    workload = Workload.model_validate(
        {
            "name": "small",
            "description": "",
            "topology": {"hybrid_replicas": hybrids, "standalone_replicas": standalones},
            "lengths": {"cap": 10_000, "modes": [{"mean": 100}]},
        }
    )
    made = Fleet(workload, lengths)
    made.resize(hybrids, standalones, True, 0.0)
    return made


def held(made: Fleet) -> list[int]:
    return sorted(request for replica in made.all for _, request in replica.ends)


def test_no_request_is_lost_or_doubled_by_any_move() -> None:
    """A request that vanished in a move would make switching look fast."""
    lengths = list(range(100, 140))
    made = fleet(3, 2, lengths)
    made.add(range(40), 0.0)
    assert held(made) == list(range(40))
    made.reclaim(1.0)
    assert not any(replica.ends for replica in made.hybrids)
    made.sync(2.0)
    made.serve(made.standalones, 3.0)
    made.lend(([1, 2], [3, 4]), 4.0)
    made.serve(made.all, 5.0)
    assert held(made) == list(range(40))
    made.resize(1, 1, True, 6.0)
    assert held(made) == list(range(40))


def test_placement_is_followed_and_the_rest_is_spread() -> None:
    """A policy's placement that is ignored cannot be judged."""
    made = fleet(1, 1, [100] * 6)
    made.add(range(6), 0.0)
    made.lend(([0], [1, 2, 3]), 0.0)
    hybrid = {request for _, request in made.hybrids[0].ends}
    assert hybrid == {0, 4, 5}


def test_moving_keeps_what_was_decoded() -> None:
    """Partial rollouts go on where they stopped: the ends move by the pause alone."""
    made = fleet(1, 1, [1000])
    made.add([0], 0.0)
    made.reclaim(0.0)
    made.serve(made.standalones, 0.0)
    before = made.next()[0]
    made.advance(1.0)
    made.sync(1.0)
    made.serve(made.standalones, 3.0)
    decoded = made.standalones[0].decoded
    assert made.next()[0] == pytest.approx(before + 2.0 + decoded / 60_000)
