"""Rules of one replica, by name: roles, levels, refusals and reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from services.engine.domain.calls import Drain, Pause, Plan, ReleaseKv, ResetCaches, Resume, ResumeKv, Sleep, WakeUp
from services.engine.domain.engine_state import NATIVE_RELEASE, EngineState
from services.engine.domain.kept import Intent, UpdateKind
from services.engine.domain.replica import Replica
from services.engine.domain.spec import (
    ALL_CACHES,
    KV_CACHE,
    WEIGHTS,
    Cache,
    Flags,
    Gpu,
    Health,
    PauseMode,
    ReplicaSpec,
    Role,
    Route,
    Weights,
)
from services.runtime.errors import TurnoutError

TAGS = frozenset({WEIGHTS, KV_CACHE})
AWAKE = EngineState(TAGS, TAGS, capabilities=frozenset({NATIVE_RELEASE}))
ASLEEP = replace(AWAKE, resident_tags=frozenset(), sleep_level=2, paused=True, pause_mode=PauseMode.ABORT)
ASLEEP_1 = replace(ASLEEP, sleep_level=1)
PAUSED = replace(AWAKE, paused=True, pause_mode=PauseMode.ABORT)
QUIET = (Pause(PauseMode.ABORT), Drain())
FULL_RESET = ResetCaches(ALL_CACHES, reset_running_requests=True, reset_connectors=True)
ENCODER = ResetCaches(frozenset({Cache.ENCODER}))
AFTER_WAKE = ResetCaches(frozenset({Cache.PREFIX}), reset_connectors=True)
GPU = Gpu("n", "g")


def made(role: Role = Role.HYBRID, state: EngineState = AWAKE, flags: Flags = Flags(), **fields: Any) -> Replica:  # noqa: B008
    """A replica in some state."""
    return Replica(ReplicaSpec("r", role, "model", gpus=(GPU,), flags=flags, **fields), state)


def route(replica: Replica) -> Route:
    """Its route now; a function, since a type checker takes an attribute to stay what it was."""
    return replica.route


def reason(act: Callable[[], object]) -> str:
    """The reason of a refusal."""
    with pytest.raises(TurnoutError) as caught:
        act()
    return caught.value.reason


SLEEP_TABLE: list[tuple[Role, Flags, int | None, Plan]] = [
    (Role.HYBRID, Flags(), None, Plan((*QUIET, Sleep(2), ENCODER))),
    (Role.HYBRID, Flags(mtp_rollout=True), None, Plan((*QUIET, Sleep(1), ENCODER))),
    (Role.HYBRID, Flags(lora_as_adapter=True), None, Plan((*QUIET, Sleep(1), ENCODER))),
    (Role.HYBRID, Flags(npu=True), None, Plan((*QUIET, Sleep(1), ENCODER))),
    (Role.HYBRID, Flags(npu=True), 2, Plan((*QUIET, Sleep(2), ENCODER))),
    (Role.STANDALONE, Flags(), None, Plan(skipped="ROLE_SKIPPED")),
    (Role.COLOCATED, Flags(), None, Plan((*QUIET, Sleep(1)))),
    (Role.COLOCATED, Flags(), 2, Plan((*QUIET, Sleep(1)))),
    (Role.HYBRID, Flags(free_cache_engine=False), None, Plan(skipped="FREE_CACHE_ENGINE_OFF")),
    (Role.COLOCATED, Flags(node_rank=1), None, Plan(skipped="NOT_NODE_0")),
]


@pytest.mark.parametrize(("role", "flags", "asked", "plan"), SLEEP_TABLE)
def test_sleep_by_role_and_flag(role: Role, flags: Flags, asked: int | None, plan: Plan) -> None:
    """Discarding weights that cannot come back, or sleeping GPUs of a standalone, would stop a run."""
    assert made(role, flags=flags).plan_sleep(asked, PauseMode.ABORT) == plan


@pytest.mark.parametrize(
    ("role", "asked", "plan"),
    [
        (Role.HYBRID, None, Plan((WakeUp(TAGS), AFTER_WAKE))),
        (Role.HYBRID, frozenset({WEIGHTS}), Plan((WakeUp(frozenset({WEIGHTS})), AFTER_WAKE))),
        (Role.STANDALONE, None, Plan(skipped="ROLE_SKIPPED")),
        (Role.COLOCATED, frozenset({WEIGHTS}), Plan((WakeUp(TAGS), AFTER_WAKE))),
    ],
)
def test_wake_by_role(role: Role, asked: frozenset[str] | None, plan: Plan) -> None:
    """A colocated replica that woke half of its memory would serve over the other half."""
    assert made(role, ASLEEP).plan_wake(asked) == plan


@pytest.mark.parametrize(
    ("role", "release", "refill"),
    [
        (Role.HYBRID, Plan((ReleaseKv(),), method="native"), Plan((ResumeKv(),))),
        (Role.STANDALONE, Plan((ReleaseKv(),), method="native"), Plan((ResumeKv(),))),
        (Role.COLOCATED, Plan(skipped="ROLE_SKIPPED"), Plan(skipped="ROLE_SKIPPED")),
    ],
)
def test_kv_by_role(role: Role, release: Plan, refill: Plan) -> None:
    """The KV calls apply to the two roles that update weights while requests wait."""
    assert made(role, PAUSED).plan_release_kv() == release
    freed = replace(PAUSED, resident_tags=frozenset({WEIGHTS}))
    assert made(role, freed).plan_resume_kv() == refill
    if not refill.skipped:
        assert made(role, freed).plan_release_kv() == Plan()
        assert made(role, PAUSED).plan_resume_kv() == Plan()


def test_kv_is_released_by_sleep_and_wake_where_the_engine_has_nothing_better() -> None:
    """Older engines have no call of their own for it."""
    old = replace(PAUSED, capabilities=frozenset())
    plan = made(Role.STANDALONE, old).plan_release_kv()
    assert plan == Plan((Sleep(2), WakeUp(frozenset({WEIGHTS}))), method="sleep_wake")


def test_kv_is_released_only_from_a_drained_engine() -> None:
    """Requests would go on over freed memory."""
    assert reason(made(state=AWAKE).plan_release_kv) == "NOT_PAUSED"
    assert reason(made(state=replace(PAUSED, running=2)).plan_release_kv) == "NOT_DRAINED"
    assert reason(made(state=replace(PAUSED, resident_tags=frozenset({KV_CACHE}))).plan_release_kv) == "TAG_ASLEEP"
    kept = made(state=replace(PAUSED, running=2, pause_mode=PauseMode.KEEP))
    assert reason(kept.plan_release_kv) == "NOT_DRAINED"
    kept.applied(Pause(PauseMode.KEEP, clear_cache=True))
    assert kept.plan_release_kv().method == "native"


def test_kv_comes_back_only_beside_everything_else() -> None:
    """Filling KV while weights sleep would start an engine without weights."""
    assert reason(made(state=ASLEEP).plan_resume_kv) == "TAG_ASLEEP"


def test_sleep_of_a_sleeping_replica() -> None:
    """A repeat is a repeat; a deeper sleep is something else, which engines ignore without a word."""
    assert made(state=ASLEEP).plan_sleep(None, PauseMode.ABORT) == Plan()
    assert reason(lambda: made(state=ASLEEP_1).plan_sleep(2, PauseMode.ABORT)) == "ASLEEP_AT_OTHER_LEVEL"


def test_kept_requests_never_drain() -> None:
    """Waiting for frozen requests would wait for ever."""
    kept = made(state=replace(PAUSED, pause_mode=PauseMode.KEEP, running=1))
    assert reason(lambda: kept.plan_sleep(None, PauseMode.WAIT)) == "PAUSED_IN_OTHER_MODE"
    assert kept.plan_sleep(None, PauseMode.ABORT).calls == (Drain(), Sleep(2), ENCODER)


@pytest.mark.parametrize("mode", list(PauseMode))
def test_pause_plans(mode: PauseMode) -> None:
    """Kept requests do not drain, all others must have ended when the call returns."""
    calls = made().plan_pause(mode, clear_cache=False).calls
    assert calls[0] == Pause(mode, clear_cache=False)
    assert (Drain() in calls) == (mode is not PauseMode.KEEP)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda r: r.doubt(), "STATE_UNKNOWN"),
        (lambda r: r.mark_unresponsive(), "ENGINE_UNRESPONSIVE"),
        (lambda r: r.mark_dead(), "ENGINE_DEAD"),
        (lambda r: r.observe(ASLEEP_1), "TAG_ASLEEP"),
        (lambda r: r.applied(Sleep(2)), "WEIGHTS_DISCARDED"),
        (lambda r: r.touch(), "WEIGHTS_HALF_UPDATED"),
        (lambda r: r.open_update("u", UpdateKind.AWAKE, False), "UPDATE_OPEN"),
        (lambda r: r.observe(replace(PAUSED, weight_version=3)), "CACHE_OLDER_THAN_WEIGHTS"),
    ],
)
def test_what_stands_in_the_way_of_serving(spoil: Callable[[Replica], None], why: str) -> None:
    """Each of these, overlooked, has served garbage or killed an engine."""
    replica = made(Role.STANDALONE, PAUSED)
    spoil(replica)
    assert reason(replica.plan_resume) == why
    assert route(replica) is not Route.SERVING
    assert replica.why_not_serving


def test_a_dummy_load_serves_after_its_first_update() -> None:
    """A standalone without weights would answer with garbage from the start."""
    replica = made(Role.STANDALONE, weights_loaded=False)
    assert route(replica) is Route.OUT
    replica.open_update("u", UpdateKind.AWAKE, keep=False)
    assert route(replica) is Route.HELD
    assert FULL_RESET in replica.stamp(4, adapter=False).calls
    replica.applied(FULL_RESET)
    replica.close_update()
    assert (route(replica), replica.weight_version, replica.cache_version) == (Route.SERVING, 4, 4)


def test_a_registered_version_that_the_engine_contradicts_is_refused() -> None:
    """Somebody is wrong about what the policy is."""
    told = replace(AWAKE, weight_version=2)
    assert reason(lambda: made(state=told, weight_version=5)) == "VERSION_MISMATCH"
    assert made(state=told).weight_version == 2
    assert made(weight_version=5).weight_version == 5


def test_a_lend_in_order() -> None:
    """Held, woken, updated, vacated, served; nothing earlier."""
    replica = made(state=ASLEEP)
    assert (route(replica), replica.confirmed_free) == (Route.OUT, True)
    assert replica.begin_lend("l") == Plan((WakeUp(frozenset({WEIGHTS})),))
    assert (route(replica), replica.confirmed_free, replica.lending) == (Route.HELD, False, True)
    assert reason(lambda: replica.begin_lend("other")) == "LEND_OPEN"
    woken = replace(ASLEEP, resident_tags=frozenset({WEIGHTS}))
    replica.observe(woken)
    assert replica.begin_lend("l") == Plan()
    assert reason(lambda: replica.plan_finish_lend(1)) == "WEIGHTS_DISCARDED"
    assert replica.open_update("u", UpdateKind.ASLEEP, keep=False) == Plan((Drain(),))
    assert reason(lambda: replica.plan_finish_lend(1)) == "UPDATE_OPEN"
    assert replica.stamp(1, adapter=False) == Plan((FULL_RESET,))
    replica.applied(FULL_RESET)
    replica.close_update()
    assert reason(replica.plan_resume) == "TAG_ASLEEP"
    assert reason(lambda: replica.plan_finish_lend(2)) == "VERSION_MISMATCH"
    assert reason(lambda: replica.plan_finish_lend(1)) == "NOT_VACATED"
    assert reason(lambda: replica.plan_wake(None)) == "NOT_VACATED"
    assert reason(replica.plan_resume_kv) == "NOT_VACATED"
    replica.vacate([GPU])
    assert replica.plan_finish_lend(1) == Plan((WakeUp(frozenset({KV_CACHE})), FULL_RESET, Resume()))
    replica.observe(PAUSED)
    assert reason(replica.plan_resume) == "REPLICA_LENDING"
    replica.applied(FULL_RESET)
    assert reason(replica.finish_lend) == "PAUSED"
    replica.observe(AWAKE)
    replica.finish_lend()
    assert (route(replica), replica.why_not_serving) == (Route.SERVING, "")
    assert replica.plan_finish_lend(1) == Plan()
    replica.withdraw()
    assert replica.plan_free() == Plan((*QUIET, Sleep(2), ENCODER))


def test_a_failed_lend_holds_no_requests_until_it_is_repeated() -> None:
    """Requests parked on a replica that will not come would wait for ever."""
    replica = made()
    replica.begin_lend("l")
    replica.fail_lend()
    assert (route(replica), replica.intent) == (Route.OUT, Intent.OUT)
    replica.begin_lend("l")
    assert route(replica) is Route.HELD
    replica.finish_lend()
    replica.fail_lend()
    assert route(replica) is Route.SERVING


def test_a_replica_that_keeps_its_memory_is_free_when_paused_and_drained() -> None:
    """free_cache_engine=false: there is no sleep that could confirm it."""
    replica = made(flags=Flags(free_cache_engine=False))
    assert not replica.confirmed_free
    assert replica.plan_free() == Plan(QUIET)
    replica.observe(replace(PAUSED, running=1))
    assert not replica.confirmed_free
    replica.observe(PAUSED)
    assert replica.confirmed_free
    assert replica.plan_free() == Plan()
    assert replica.begin_lend("l") == Plan()


def test_standalone_gpus_are_never_the_trainers() -> None:
    """The trainer must not be told that it may use them."""
    assert not made(Role.STANDALONE, ASLEEP).confirmed_free


@pytest.mark.parametrize(
    ("role", "state", "kind", "keep", "calls"),
    [
        (Role.STANDALONE, AWAKE, UpdateKind.AWAKE, False, (*QUIET, ReleaseKv())),
        (Role.STANDALONE, AWAKE, UpdateKind.AWAKE, True, (Pause(PauseMode.KEEP), ReleaseKv())),
        (Role.STANDALONE, PAUSED, UpdateKind.AWAKE, True, (Drain(), ReleaseKv())),
        (Role.COLOCATED, AWAKE, UpdateKind.AWAKE, False, QUIET),
        (Role.HYBRID, ASLEEP, UpdateKind.ASLEEP, False, (WakeUp(frozenset({WEIGHTS})),)),
        (Role.HYBRID, AWAKE, UpdateKind.ASLEEP, False, QUIET),
    ],
)
def test_how_an_update_makes_replicas_ready(
    role: Role, state: EngineState, kind: UpdateKind, keep: bool, calls: tuple[object, ...]
) -> None:
    """Weights written beside running requests or into unmapped memory have killed engines."""
    assert made(role, state).open_update("u", kind, keep).calls == calls


def test_updates_that_cannot_begin() -> None:
    """Refused before anything happened."""
    replica = made(Role.STANDALONE, replace(AWAKE, weight_version=5))
    assert reason(lambda: replica.check_update(UpdateKind.AWAKE, 4, adapter=False)) == "VERSION_OLDER"
    assert reason(lambda: replica.check_update(UpdateKind.ASLEEP, 6, adapter=False)) == "REPLICA_SERVING"
    replica.check_update(UpdateKind.AWAKE, 5, adapter=False)
    replica.check_update(UpdateKind.AWAKE, 4, adapter=False, allow_older=True)
    made(state=replace(ASLEEP, weight_version=5)).check_update(UpdateKind.ASLEEP, 4, adapter=False)
    replica.check_update(UpdateKind.AWAKE, 0, adapter=True)
    assert reason(lambda: made(state=ASLEEP).open_update("u", UpdateKind.AWAKE, keep=False)) == "TAG_ASLEEP"


def test_an_update_releases_kv_only_beside_everything_else() -> None:
    """An engine with a third tag asleep was asked for a KV-only release, which engines refuse half-way."""
    tags = AWAKE.declared_tags | {"cuda_graph"}
    half_awake = replace(PAUSED, declared_tags=tags, resident_tags=tags - {"cuda_graph"})
    assert reason(lambda: made(state=half_awake).open_update("u", UpdateKind.AWAKE, keep=False)) == "TAG_ASLEEP"


def test_an_adapter_update_leaves_the_base_as_it_was() -> None:
    """Base and adapter have versions of their own; new adapter weights make caches old all the same."""
    replica = made(Role.STANDALONE, weight_version=3)
    replica.open_update("u", UpdateKind.AWAKE, keep=False)
    replica.touch()
    replica.stamp(9, adapter=True)
    replica.close_update()
    assert (replica.weight_version, replica.adapter_version, replica.weights) == (3, 9, Weights.INTACT)
    assert reason(replica.plan_resume) == "CACHE_OLDER_THAN_WEIGHTS"
    assert reason(lambda: replica.check_update(UpdateKind.AWAKE, 8, adapter=True)) == "VERSION_OLDER"


def test_a_commit_refills_kv_and_starts_again() -> None:
    """The order in which an engine comes back: memory, caches, requests."""
    replica = made(Role.STANDALONE)
    replica.open_update("u", UpdateKind.AWAKE, keep=False)
    replica.observe(replace(PAUSED, resident_tags=frozenset({WEIGHTS})))
    assert replica.stamp(1, adapter=False).calls == (ResumeKv(), FULL_RESET, Resume())


def test_an_abandoned_update() -> None:
    """Old weights that nothing touched go on; half-written ones do not."""
    freed = replace(PAUSED, resident_tags=frozenset({WEIGHTS}))
    untouched = made(Role.STANDALONE)
    untouched.open_update("u", UpdateKind.AWAKE, keep=False)
    untouched.observe(freed)
    assert untouched.plan_abandon(touched=False) == Plan((ResumeKv(), Resume()))
    half = made(Role.STANDALONE)
    half.open_update("u", UpdateKind.AWAKE, keep=False)
    half.observe(freed)
    half.touch()
    assert half.plan_abandon(touched=True) == Plan()
    assert (half.weights, route(half)) == (Weights.HALF_UPDATED, Route.OUT)
    lent = made(state=ASLEEP_1)
    lent.begin_lend("l")
    lent.open_update("u", UpdateKind.ASLEEP, keep=False)
    assert lent.plan_abandon(touched=False) == Plan()


def test_an_engine_in_another_process_has_lost_its_weights() -> None:
    """A restart between two probes is seen by the incarnation alone."""
    replica = made(Role.STANDALONE, replace(AWAKE, incarnation="a"))
    assert route(replica) is Route.SERVING
    replica.observe(replace(AWAKE, incarnation="b", weights=Weights.INTACT))
    assert (route(replica), replica.weights) == (Route.OUT, Weights.DISCARDED)


def test_a_dead_engine_is_not_merely_unresponsive() -> None:
    """Dead is the graver of the two."""
    replica = made(Role.STANDALONE)
    replica.mark_dead()
    replica.mark_unresponsive()
    assert replica.health is Health.DEAD
    replica.answered(AWAKE)
    assert (replica.health, replica.route) == (Health.HEALTHY, Route.OUT)


def started_anew(flags: Flags = Flags()) -> Replica:  # noqa: B008
    """A hybrid whose engine was another process at the last probe, and awake."""
    replica = made(flags=flags, state=replace(ASLEEP, incarnation="a"))
    assert not replica.stray
    replica.observe(replace(AWAKE, incarnation="b"))
    return replica


def test_an_engine_that_somebody_started_on_the_trainers_gpus_is_a_stray() -> None:
    """It would keep its memory until the next step began."""
    replica = started_anew()
    assert replica.stray
    replica.observe(replace(ASLEEP, incarnation="b"))
    assert not replica.stray
    kept = Replica.restored(started_anew().kept)
    kept.answered(replace(AWAKE, incarnation="b"))
    assert kept.stray
    died = made(state=ASLEEP)
    died.mark_dead()
    died.answered(AWAKE)
    assert died.stray
    assert started_anew(Flags(free_cache_engine=False)).stray


@pytest.mark.parametrize("call", [WakeUp(TAGS), ResumeKv(), Resume()])
def test_an_engine_that_was_commanded_since_is_no_stray(call: Any) -> None:
    """An operator who wakes it must not be fought."""
    replica = started_anew()
    replica.attempted(call)
    assert not replica.stray


def test_only_a_hybrid_that_is_with_its_trainer_can_be_a_stray() -> None:
    """What is lent, or takes weights, is awake for a reason; a fresh replica waits for its first lend."""
    assert not made().stray
    standalone = made(Role.STANDALONE, replace(AWAKE, incarnation="a"))
    standalone.observe(replace(AWAKE, incarnation="b"))
    assert not standalone.stray
    lent, updated = started_anew(), started_anew()
    lent.begin_lend("l")
    updated.open_update("u", UpdateKind.ASLEEP, keep=False)
    assert not lent.stray
    assert not updated.stray


@pytest.mark.parametrize(
    ("call", "before", "after"),
    [
        (Pause(PauseMode.ABORT), AWAKE, PAUSED),
        (Resume(), PAUSED, AWAKE),
        (Sleep(2), AWAKE, ASLEEP),
        (WakeUp(TAGS), ASLEEP, AWAKE),
        (ReleaseKv(), PAUSED, replace(PAUSED, resident_tags=frozenset({WEIGHTS}))),
        (ResumeKv(), replace(PAUSED, resident_tags=frozenset({WEIGHTS})), AWAKE),
    ],
)
def test_done_means_that_the_state_says_so(call: Any, before: EngineState, after: EngineState) -> None:
    """An engine that says done and did nothing is no success."""
    assert not made(state=before).confirms(call)
    assert made(state=after).confirms(call)
    assert made().confirms(FULL_RESET)
