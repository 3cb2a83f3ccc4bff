"""The adapter's client of verl's servers, over servers without a process, as the controller reads them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from services.engine.cluster.verl_requests import foreign_request, look_at_requests

pytest.importorskip("verl", reason="needs the environment of `make test-verl`")
pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("default")]


def remote(call: Callable[..., Any]) -> Any:
    """A method of an actor handle."""
    return SimpleNamespace(remote=call)


def answering(answer: Any) -> Any:
    async def call(*_: Any, **__: Any) -> Any:
        return answer

    return remote(call)


class Server:
    """An actor's object, and its handle: it answers with what it was told, in turn."""

    def __init__(self, *answers: tuple[list[int], str]) -> None:
        self._answers = list(answers)
        self.seen: list[tuple[str, list[int]]] = []
        self.engine = SimpleNamespace(output_processor=SimpleNamespace(request_states={}))
        self.during: list[dict[str, Any]] = []

    def handle(self) -> Any:
        def call(function: Callable[..., Any], *given: Any) -> None:
            function(self, *given)

        return SimpleNamespace(generate=remote(self._generate), __ray_call__=remote(call))

    async def _generate(self, *, request_id: str, prompt_ids: list[int], **_: Any) -> Any:
        self.seen.append((request_id, prompt_ids))
        ids, reason = self._answers.pop(0)
        states = self.engine.output_processor.request_states
        states[request_id] = SimpleNamespace(prompt_len=len(prompt_ids), output_token_ids=ids)
        self.during.append(self.read())
        states.clear()
        return SimpleNamespace(
            token_ids=ids, log_probs=None, routed_experts=None, num_preempted=0, stop_reason=reason, extra_fields={}
        )

    def read(self) -> dict[str, Any]:
        """As the controller reads it."""
        return look_at_requests()(self, 0)


def client_of(server: Server, full_determinism: bool = False) -> Any:
    from omegaconf import OmegaConf

    from turnout.integrations.verl._requests import LLMServerClient

    balancer = SimpleNamespace(
        require_acquire_fields=answering([]),
        require_release_fields=answering([]),
        acquire_server=answering(("a", server.handle())),
        release_server=remote(lambda **_: None),
    )
    rollout = {"name": "vllm", "response_length": 8, "full_determinism": full_determinism}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    return LLMServerClient(config, load_balancer_handle=balancer)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's client waits for a second before it goes on with a request that was aborted."""
    import verl.workers.rollout.llm_server as module

    async def at_once(_: float) -> None: ...

    gather = module.asyncio.gather
    monkeypatch.setattr(module, "asyncio", SimpleNamespace(gather=gather, sleep=at_once))


async def of_session(run: Callable[[], Awaitable[Any]], session: int = 1) -> Any:
    """Run as the agent loop of a session does."""
    from turnout.integrations.verl._requests import REQUEST, RequestKey

    token = REQUEST.set(RequestKey("train", "group_1", session))
    try:
        return await run()
    finally:
        REQUEST.reset(token)


async def test_every_attempt_tells_whose_it_is_and_how_it_ended() -> None:
    """A request that a reclaim cut short goes on elsewhere: what each server made has to be told there."""
    server = Server(([7, 7], "aborted"), ([], "aborted"), ([7], "completed"))
    client = client_of(server)
    output = await of_session(partial(client.generate, "r", prompt_ids=[1, 2, 3], sampling_params={}))
    assert output.token_ids == [7, 7, 7]
    assert [prompt for _, prompt in server.seen] == [[1, 2, 3], [1, 2, 3, 7, 7], [1, 2, 3, 7, 7]]
    ended = server.read()["ended"]
    # The gate rejected the second one, so the engine never saw it.
    assert [name for name, *_ in ended] == [server.seen[0][0], server.seen[2][0]]
    first, last = (foreign_request(*note) for note in ended)
    assert first is not None
    assert last is not None
    assert (first.join_key.group_id, first.join_key.trajectory) == ("group_1", 1)
    assert (first.prompt_tokens, first.made_before, first.output_tokens) == (3, 0, 2)
    assert (last.prompt_tokens, last.made_before, last.output_tokens) == (3, 2, 3)


async def test_under_full_determinism_the_engine_sees_verls_id_and_the_controller_ours() -> None:
    """A fresh id would change what the engine draws; the same one for every turn says nothing."""
    server = Server(([7, 7], "completed"), ([7], "completed"))
    client = client_of(server, full_determinism=True)
    for prompt in ([1, 2, 3], [1, 2, 3, 7, 7, 4]):
        await of_session(partial(client.generate, "det-5", prompt_ids=prompt, sampling_params={}))
    assert [request_id for request_id, _ in server.seen] == ["det-5", "det-5"]
    for during in server.during:
        ((name, prompt, made),) = during["present"]
        request = foreign_request(name, prompt, made)
        assert request is not None
        assert request.join_key.group_id == "group_1"
    assert len(server.read()["ended"]) == 2
    assert server._turnout_names == {}  # type: ignore[attr-defined]


async def test_requests_of_nobodys_session_are_verls_own() -> None:
    server = Server(([7], "completed"))
    await client_of(server).generate("r", prompt_ids=[1], sampling_params={})
    assert not server.seen[0][0].startswith("turnout:")
    assert server.read()["ended"] == []


async def test_no_more_ends_are_kept_than_a_server_can_hold() -> None:
    """A run whose progress nobody reads has millions of requests."""
    from turnout.integrations.verl._requests import note_end

    server = Server()
    for number in range(5000):
        note_end()(server, "r", f"n{number}", 1, 1)
    found = server.read()
    assert (len(found["ended"]), found["last"]) == (4096, 5000)
    assert look_at_requests()(server, 4999)["ended"] == [("n4999", 1, 1)]
