"""The backend `verl-ray` on a server with verl's rules, and our calls against verl's recorded signatures."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.engine.backends.base import EngineProgress, EngineRequest, ForeignRequest
from services.engine.backends.verl_ray import GONE, Tally, VerlBackend
from services.engine.cluster.verl import ENGINE_CALLS, METHODS, VerlSurface
from services.engine.domain.engine_state import NATIVE_RELEASE
from services.engine.domain.requests import Finish, JoinKey, Sampling
from services.engine.domain.spec import ALL_CACHES, KV_CACHE, WEIGHTS, PauseMode, ReplicaSpec, Role, Weights
from services.engine.domain.tokens import Stretches
from services.engine.guarded.backend import GuardedBackend
from services.runtime.clock import MonotonicClock
from services.runtime.errors import TurnoutError
from tests.verl.balancer import CONTRACT
from tests.verl.server import Mode, NewEngine, ServerActor, VerlServer

BOTH = [KV_CACHE, WEIGHTS]
VLLM = Path(__file__).parents[1] / "vllm" / "signatures"


@contextlib.contextmanager
def refused(reason: str) -> Iterator[None]:
    with pytest.raises(TurnoutError) as caught:
        yield
    assert caught.value.reason == reason, caught.value


async def backend_of(server: VerlServer) -> VerlBackend:
    surface = VerlSurface(ServerActor(server).as_actor())
    await surface.find_out()
    backend = VerlBackend(ReplicaSpec("r", Role.HYBRID, "verl-ray", "vllm_server_0_0"), surface, MonotonicClock())
    await backend.probe()
    return backend


async def empty() -> AsyncIterator[bytes]:
    for part in list[bytes]():
        yield part


def request(prompt: int = 1, max_tokens: int = 3) -> EngineRequest:
    return EngineRequest("a", [prompt], Stretches(), max_tokens, Sampling(logprobs=True))


def test_what_we_call_is_there_in_verl() -> None:
    methods = CONTRACT["classes"]["vLLMHttpServer"]["methods"]
    for name, given in METHODS.items():
        assert set(given) <= set(methods[name]["parameters"]), name
        assert set(methods[name]["required"]) <= set(given), name
    assert {"token_ids", "log_probs", "stop_reason", "extra_fields"} <= set(
        CONTRACT["classes"]["TokenOutput"]["fields"]
    )


def test_what_verl_calls_of_vllm_is_what_we_look_for() -> None:
    for name, given in ENGINE_CALLS.items():
        assert sorted(given) == CONTRACT["engine_calls"][name], name


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_verl_does_not_fit_these_versions_of_vllm(version: str) -> None:
    """If a newer record fits, the refusal has to go from the docs."""
    methods = json.loads((VLLM / f"{version}.json").read_text())["AsyncLLM"]
    lacking = [
        (name, each)
        for name, given in ENGINE_CALLS.items()
        for each in given
        if each not in methods[name]["parameters"]
    ]
    assert lacking == [("pause_generation", "wait_for_inflight_requests")]


async def test_a_vllm_that_lacks_what_verl_calls_is_named() -> None:
    with pytest.raises(TurnoutError, match=r"pause_generation\(wait_for_inflight_requests=\)") as caught:
        await backend_of(VerlServer(engine=NewEngine()))
    assert caught.value.reason == "VERL_VLLM_MISMATCH"


async def test_capabilities_are_what_verl_does_and_not_what_it_skips() -> None:
    hybrid = (await (await backend_of(VerlServer())).probe()).capabilities
    assert {"sleep", "wake_tags", "weight_version"} <= hybrid
    assert not {NATIVE_RELEASE, "pause_keep", "memory", "weight_transfer"} & hybrid
    standalone = (await (await backend_of(VerlServer(Mode.STANDALONE))).probe()).capabilities
    assert NATIVE_RELEASE in standalone
    for server in (VerlServer(Mode.STANDALONE), VerlServer(frees=False)):
        backend = await backend_of(server)
        assert "sleep" not in (await backend.probe()).capabilities
        with refused("NOT_OFFERED"):
            await backend.sleep(2, 5)


async def test_a_standalone_server_gives_up_its_kv_memory_for_an_update() -> None:
    """verl's sleep and wake_up do nothing there; without its own calls the controller could update no such server."""
    server = VerlServer(Mode.STANDALONE)
    backend = await backend_of(server)
    await backend.pause(PauseMode.ABORT, True, 5)
    await backend.release_kv_cache(5)
    assert server.engine.asleep == {KV_CACHE}
    assert (await backend.probe()).resident_tags == {WEIGHTS}
    with refused("TAG_ASLEEP"):
        await backend.resume(5)
    await backend.resume_kv_cache(5)
    await backend.resume(5)
    state = await backend.probe()
    assert not server.engine.asleep
    assert not state.paused
    assert state.declared_tags == state.resident_tags


async def test_a_lend_and_a_reclaim() -> None:
    server = VerlServer()
    backend = await backend_of(server)
    await backend.pause(PauseMode.ABORT, True, 5)
    assert server.rejecting_at_pause
    await backend.sleep(2, 5)
    with refused("TAG_ASLEEP"):
        await backend.resume(5)
    await backend.wake_up([WEIGHTS], 5)
    await backend.start_weight_update("u", 4, False, 5)
    await backend.update_weights(0, '{"mover": "own"}', empty(), 5)
    await backend.finish_weight_update("", 5)
    await backend.wake_up([KV_CACHE], 5)
    assert (await backend.probe()).paused
    await backend.reset_caches(ALL_CACHES, False, True, 5)
    await backend.resume(5)
    state = await backend.probe()
    assert (state.paused, state.weight_version, server.global_steps) == (False, 4, 4)
    assert not server.engine.paused


async def test_late_requests_wait_at_a_standalone_server_and_are_rejected_at_a_hybrid_one() -> None:
    for mode, rejects in ((Mode.STANDALONE, False), (Mode.HYBRID, True)):
        server = VerlServer(mode)
        await (await backend_of(server)).pause(PauseMode.ABORT, True, 5)
        assert server.rejecting_at_pause is rejects


async def test_a_reply_that_carries_an_error_is_a_failure() -> None:
    server = VerlServer()
    backend = await backend_of(server)
    server.reply_error = "the engine said no"
    with refused("ENGINE_FAILED"):
        await backend.pause(PauseMode.ABORT, True, 5)


async def test_a_collective_rpc_goes_through_and_has_no_answer() -> None:
    server = VerlServer()
    answer = await (await backend_of(server)).collective_rpc("check", '{"args": [1]}', None, 5)
    assert [shard.result_json for shard in answer.shards] == ["null"]
    assert server.engine.calls == ["check (1,) {}"]


async def test_verl_keeps_no_requests() -> None:
    backend = await backend_of(VerlServer())
    with refused("NOT_OFFERED"):
        await backend.pause(PauseMode.KEEP, True, 5)


async def test_another_level_than_verls_is_refused() -> None:
    backend = await backend_of(VerlServer())
    with refused("NOT_OFFERED"):
        await backend.sleep(1, 5)


async def test_another_controller_finds_what_is_asleep() -> None:
    server = VerlServer()
    backend = await backend_of(server)
    await backend.pause(PauseMode.ABORT, True, 5)
    await backend.sleep(2, 5)
    await backend.wake_up([WEIGHTS], 5)
    state = await (await backend_of(server)).probe()
    assert state.resident_tags == {WEIGHTS}
    assert (state.paused, state.weights) == (True, Weights.DISCARDED)


async def test_a_server_whose_state_nobody_knows_is_refused() -> None:
    """Its gate was closed by someone who left no note: memory may be asleep."""
    server = VerlServer()
    await server.abort_all_requests()
    with refused("ENGINE_STATE_UNKNOWN"):
        await backend_of(server)


async def test_a_sleep_that_failed_leaves_an_engine_to_be_started_again() -> None:
    server = VerlServer()
    backend = await backend_of(server)
    await backend.pause(PauseMode.ABORT, True, 5)
    server.engine.fail = "sleep"
    with refused("ENGINE_FAILED"):
        await backend.sleep(2, 5)
    with refused("ENGINE_DEAD"):
        await backend.probe()
    with refused("ENGINE_STATE_UNKNOWN"):
        await backend_of(server)


async def test_a_dead_engine_core_is_noticed() -> None:
    server = VerlServer()
    backend = await backend_of(server)
    server.engine.errored = True
    with refused("ENGINE_DEAD"):
        await backend.probe()


async def test_weights_that_the_trainer_moved_are_seen() -> None:
    server = VerlServer()
    backend = await backend_of(server)
    server.global_steps = 9
    assert (await backend.probe()).weight_version == 9


@pytest.fixture
def verl_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.engine.cluster.verl.importlib.util.find_spec", lambda name: object())


@pytest.mark.usefixtures("verl_is_here")
async def test_outputs_come_whole() -> None:
    backend = await backend_of(VerlServer())
    (output,) = [each async for each in backend.generate(request())]
    assert (list(output.token_ids), output.finish) == ([0, 1, 2], Finish.LENGTH)
    assert list(output.logprobs) == [-0.5] * 3


@pytest.mark.usefixtures("verl_is_here")
async def test_an_aborted_request_keeps_its_tokens_and_one_that_the_gate_rejects_has_none() -> None:
    server = VerlServer()
    backend = await backend_of(server)

    async def run() -> list[tuple[list[int], Finish | None]]:
        return [(list(each.token_ids), each.finish) async for each in backend.generate(request(99))]

    running = asyncio.ensure_future(run())
    while not server.engine.output_processor.request_states:  # noqa: ASYNC110 - the server has no event
        await asyncio.sleep(0)
    await backend.abort(None)
    assert await running == [([7], Finish.ABORT)]
    await server.abort_all_requests(reject_request=True)
    assert await run() == [([], Finish.ABORT)]


@pytest.mark.usefixtures("verl_is_here")
async def test_a_stream_that_is_closed_ends_its_request() -> None:
    server = VerlServer()
    backend = await backend_of(server)

    async def run() -> None:
        async for _ in backend.generate(request(99)):
            pass

    running = asyncio.ensure_future(run())
    while not server.engine.output_processor.request_states:  # noqa: ASYNC110 - the server has no event
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not server.engine.output_processor.request_states


async def test_outputs_need_verl_beside_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.engine.cluster.verl.importlib.util.find_spec", lambda name: None)
    backend = await backend_of(VerlServer())
    with refused("NOT_OFFERED"):
        async for _ in backend.generate(request()):
            pass


async def test_requests_of_verls_own_clients_are_read_in_the_server() -> None:
    """Without them the controller knows of no request, and a policy that looks ahead has nothing to look at."""
    server = VerlServer()
    backend = await backend_of(server)
    states = server.engine.output_processor.request_states

    mine = 'turnout:["train","group_1",2,10,"0f"]'
    # vLLM puts something of its own behind an id.
    states.update({mine: state(13, 4), 'turnout:["train","g",0,0,"1f"]-a1b2': state(3, 0), "another": state(5, 5)})
    progress = await backend.progress()
    keys = [(each.join_key, each.prompt_tokens, each.output_tokens) for each in progress.foreign]
    assert keys == [(JoinKey("train", "group_1", 2, 1), 3, 14), (JoinKey("train", "g", 0, 1), 3, 0)]
    assert (progress.running, progress.decoded_tokens, progress.prefilled_tokens) == (3, 4, 16)
    states[mine] = state(13, 9)
    del states["another"]
    again = await backend.progress()
    assert (again.running, again.decoded_tokens, again.prefilled_tokens) == (2, 9, 16)


def ended(server: VerlServer, request_id: str, name: str, prompt: int, made: int) -> None:
    """What the adapter's client leaves in a server; `tests/verl/adapter/test_requests.py` holds its own words."""
    notes = getattr(server, "_turnout_ended", [])
    server._turnout_ended = [*notes, (len(notes) + 1, name, prompt, made)]  # type: ignore[attr-defined]
    server.engine.output_processor.request_states.pop(request_id, None)


def state(prompt: int, made: int) -> Any:
    return SimpleNamespace(prompt_len=prompt, detokenizer=SimpleNamespace(output_token_ids=[7] * made))


async def test_every_token_is_counted_once_whenever_it_is_read() -> None:
    """What requests made after the last reading was in no counter, and the speed that `jit` learned was too low."""
    server = VerlServer()
    backend = await backend_of(server)
    states = server.engine.output_processor.request_states
    seen, late, short = (f'turnout:["train","g",{session},{2 * (session == 1)},"0f"]' for session in range(3))
    states[f"{seen}-a1b2"] = state(3, 4)
    states[late] = state(5, 1)
    progress = await backend.progress()
    assert (progress.decoded_tokens, progress.prefilled_tokens) == (5, 8)
    ended(server, f"{seen}-a1b2", seen, 3, 10)
    ended(server, short, short, 3, 6)
    del states[late]
    progress = await backend.progress()
    assert (progress.decoded_tokens, progress.prefilled_tokens, progress.foreign) == (5 + 6 + 6, 8 + 3, ())
    # Its note came later than the reading that missed it.
    ended(server, late, late, 5, 3)
    for _ in range(2):
        progress = await backend.progress()
        assert (progress.decoded_tokens, progress.prefilled_tokens) == (17 + 2, 11)


async def test_requests_whose_ends_nobody_tells_are_forgotten_in_time() -> None:
    """A worker that dies tells of none of its requests, and a run has many of them."""
    tally = Tally()
    for number in range(GONE + 10):
        name = f"lost-{number}"
        tally.take([ForeignRequest(name, JoinKey("train", "g", 0, 1), 3, 2), RUNNING], [])
    assert len(tally._made) == GONE + 2
    assert tally.decoded == 2 * (GONE + 10) + 5
    tally.take([], [ForeignRequest("lost-10", JoinKey("train", "g", 0, 1), 3, 4)])
    assert tally.decoded == 2 * (GONE + 10) + 5 + 2


RUNNING = ForeignRequest("long", JoinKey("train", "g", 1, 1), 3, 5)


async def test_under_full_determinism_requests_are_known_by_a_note() -> None:
    """The engine has to see verl's own id, which says nothing; without the note `jit` fell back to `verl`."""
    server = VerlServer()
    backend = await backend_of(server)
    mine = 'turnout:["train","g",1,0,"0f"]'
    server._turnout_names = {"det-5": mine}  # type: ignore[attr-defined]
    for request_id in ("det-5", "det-5-a1b2"):
        server.engine.output_processor.request_states = {request_id: state(3, 4), "det-6": state(3, 4)}
        progress = await backend.progress()
        assert [(each.join_key, each.output_tokens) for each in progress.foreign] == [(JoinKey("train", "g", 1, 1), 4)]
        assert (progress.running, progress.decoded_tokens) == (2, 4)


async def test_readings_at_the_same_time_are_taken_in_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading that was overtaken counted backwards: someone looks by hand while the scheduler watches."""
    server = VerlServer()
    backend = await backend_of(server)
    states = server.engine.output_processor.request_states
    states['turnout:["train","g",0,0,"0f"]'] = state(3, 4)
    first, go = asyncio.Event(), asyncio.Event()
    read = VerlSurface.requests

    async def slow(self: VerlSurface, after: int) -> Any:
        found = await read(self, after)
        if not first.is_set():
            first.set()
            await go.wait()
        return found

    monkeypatch.setattr(VerlSurface, "requests", slow)
    overtaken = asyncio.ensure_future(backend.progress())
    await first.wait()
    states['turnout:["train","g",0,0,"0f"]'] = state(3, 9)
    later = asyncio.ensure_future(backend.progress())
    go.set()
    assert [(await each).decoded_tokens for each in (overtaken, later)] == [4, 9]


async def test_a_request_that_has_not_reached_the_server_yet_is_no_request_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was taken off those that run there, and -1 was told of a server with nothing in it."""
    backend = await backend_of(VerlServer())

    async def under_way(self: GuardedBackend) -> EngineProgress:
        return EngineProgress(output_tokens={"a": 0}, waiting=1)

    monkeypatch.setattr(GuardedBackend, "progress", under_way)
    progress = await backend.progress()
    assert (progress.running, progress.waiting) == (0, 1)


@pytest.mark.parametrize("request_id", ["turnout:", 'turnout:["train"]', "turnout:[1]", 'turnout:["a","b","c",0,"d"]'])
async def test_an_id_that_only_begins_like_ours_is_nobodys(request_id: str) -> None:
    server = VerlServer()
    server.engine.output_processor.request_states[request_id] = SimpleNamespace(
        prompt_len=1, detokenizer=SimpleNamespace(output_token_ids=[])
    )
    assert (await (await backend_of(server)).progress()).foreign == ()
