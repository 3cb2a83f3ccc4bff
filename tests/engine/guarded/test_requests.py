"""Requests on their way into and out of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from services.engine.backends.base import EngineOutput, EngineRequest, engine_dead
from services.engine.domain.requests import Finish, Sampling
from services.engine.domain.tokens import Stretches
from services.engine.guarded.backend import GuardedBackend
from services.engine.guarded.surface import Tokens
from services.runtime.errors import TurnoutError
from tests.engine.guarded.fake import FakeSurface, backend_on


def request(
    request_id: str = "a", prompt: Sequence[int] = (1, 2), so_far: Sequence[int] = (), **fields: Any
) -> EngineRequest:
    fields.setdefault("max_tokens", 10)
    fields.setdefault("sampling", Sampling())
    return EngineRequest(request_id, prompt, Stretches([so_far]), **fields)


async def read(backend: GuardedBackend, wanted: EngineRequest) -> list[EngineOutput]:
    return [output async for output in backend.generate(wanted)]


async def reason(backend: GuardedBackend, wanted: EngineRequest) -> str:
    with pytest.raises(TurnoutError) as caught:
        await read(backend, wanted)
    return caught.value.reason


async def test_a_continuation_sends_what_exists_and_asks_for_the_rest() -> None:
    surface = FakeSurface()
    await read(backend_on(surface), request(so_far=[3, 4, 5]))
    assert surface.prompts == [[1, 2, 3, 4, 5]]
    assert surface.draws[0].max_tokens == 7


async def test_continuations_draw_other_numbers() -> None:
    """The engine begins a stream of random numbers with each request; the same ones again would repeat themselves."""
    surface = FakeSurface()
    backend = backend_on(surface)
    await read(backend, request(sampling=Sampling(seed=42)))
    await read(backend, request(sampling=Sampling(seed=42), so_far=[7]))
    await read(backend, request(sampling=Sampling(seed=42), so_far=[7]))
    await read(backend, request(sampling=Sampling(seed=42, temperature=0.0)))
    first, second, third, greedy = (draw.seed for draw in surface.draws)
    assert first == 42
    assert second == third != first
    assert greedy is None


async def test_a_seed_that_nobody_asked_for_stays_here() -> None:
    """vLLM on a GPU draws more slowly for every request with a seed."""
    surface = FakeSurface()
    await read(backend_on(surface), request(sampling=Sampling(seed=42, seed_is_default=True)))
    assert surface.draws[0].seed is None


async def test_requests_at_their_end_never_reach_the_engine() -> None:
    """At the budget, or at the engine's longest, which it would refuse."""
    surface = FakeSurface()
    backend = backend_on(surface)
    for wanted in (request(so_far=[1] * 10), request(so_far=[1] * 98, max_tokens=500)):
        [output] = await read(backend, wanted)
        assert (list(output.token_ids), output.finish) == ([], Finish.LENGTH)
    assert surface.prompts == []


@pytest.mark.parametrize(
    "wanted",
    [
        request(prompt=[1, 1000]),
        request(prompt=[-1]),
        request(so_far=[2**31]),
        request(sampling=Sampling(stop_token_ids=(5000,))),
    ],
)
async def test_tokens_outside_the_vocabulary_never_reach_the_engine(wanted: EngineRequest) -> None:
    surface = FakeSurface()
    assert await reason(backend_on(surface), wanted) == "TOKEN_OUT_OF_VOCABULARY"
    assert surface.prompts == []


async def test_h35_an_id_is_live_once() -> None:
    surface = FakeSurface()
    surface.held.clear()
    backend = backend_on(surface)
    first = asyncio.create_task(read(backend, request("a")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await reason(backend, request("a")) == "REQUEST_LIVE"
    surface.held.set()
    assert (await first)[-1].finish is Finish.STOP
    assert (await read(backend, request("a")))[-1].finish is Finish.STOP


async def test_h36_aborts_of_unknown_requests_leave_nothing() -> None:
    """They never reach the engine and are not remembered."""
    surface = FakeSurface()
    backend = backend_on(surface)
    await backend.abort([f"unknown-{i}" for i in range(1000)])
    assert surface.calls == []
    assert (await read(backend, request("unknown-1")))[-1].finish is Finish.STOP


@pytest.mark.parametrize("request_ids", [["a"], None])
async def test_h35_an_abort_that_overtakes_its_request_ends_it(request_ids: list[str] | None) -> None:
    """The engine does not know the request yet when the abort comes, and would go on with it to the end."""
    surface = FakeSurface()
    surface.script = [Tokens([1]), *(Tokens([i]) for i in range(2, 9)), Tokens([9], finish=Finish.LENGTH)]
    surface.held.clear()
    backend = backend_on(surface)
    reading = asyncio.create_task(read(backend, request("a")))
    await asyncio.wait_for(surface.given.wait(), 5)
    await backend.abort(request_ids)
    surface.held.set()
    outputs = await reading
    assert [list(output.token_ids) for output in outputs] == [[1]]
    assert outputs[-1].finish is Finish.ABORT
    assert (await backend.progress()).waiting == 0


async def test_an_abort_of_a_request_that_decodes_is_the_engines_to_carry_out() -> None:
    """Ended here at once, it would lose what the engine has decoded meanwhile."""
    surface = FakeSurface()
    surface.script = [Tokens([1]), Tokens([2]), Tokens([3], finish=Finish.ABORT)]
    backend = backend_on(surface)
    stream = backend.generate(request("a", delta_tokens=1))
    outputs = [await anext(stream)]
    await backend.abort(["a"])
    outputs += [output async for output in stream]
    assert [token for output in outputs for token in output.token_ids] == [1, 2, 3]
    assert surface.calls == ["abort a"]


async def test_tokens_come_before_the_error_that_ended_them() -> None:
    surface = FakeSurface()
    surface.script = [Tokens([1, 2], [-0.1, -0.2]), Tokens([3], [-0.3]), engine_dead("gone")]
    outputs: list[EngineOutput] = []
    stream = backend_on(surface).generate(request(delta_tokens=100))
    outputs.append(await anext(stream))
    with pytest.raises(TurnoutError):
        await anext(stream)
    assert [list(output.token_ids) for output in outputs] == [[1, 2, 3]]
    assert [list(output.logprobs) for output in outputs] == [[-0.1, -0.2, -0.3]]


async def test_tokens_have_the_version_under_which_they_came() -> None:
    """A new version in the middle of a stream begins another output."""
    surface = FakeSurface()
    surface.script = [Tokens([1]), Tokens([2]), Tokens([3], finish=Finish.LENGTH)]
    backend = backend_on(surface, weight_version=4)
    outputs = []
    async for output in backend.generate(request(delta_tokens=2)):
        outputs.append((list(output.token_ids), output.weight_version))
        backend._state.version = 5
    assert outputs == [([1, 2], 4), ([3], 5)]


async def test_deltas_wait_for_tokens_and_time() -> None:
    surface = FakeSurface()
    surface.script = [*(Tokens([i]) for i in range(6)), Tokens([6], finish=Finish.LENGTH)]
    backend = backend_on(surface)
    assert [len(output.token_ids) for output in await read(backend, request(delta_tokens=2))] == [2, 2, 2, 1]
    assert [len(output.token_ids) for output in await read(backend, request(delta_tokens=0))] == [7]
    late = request(delta_tokens=2, delta_interval=60.0)
    assert [len(output.token_ids) for output in await read(backend, late)] == [7]
