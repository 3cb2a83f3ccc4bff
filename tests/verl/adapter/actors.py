"""Ray actors of the trainer's tests that need no verl: servers without a GPU, and the gate that paces rollouts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from tests.verl.server import Mode, OldEngine, VerlServer


class Engine(OldEngine):
    """Keeps in order what is done to its scheduling and its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    async def pause_generation(self, **rest: Any) -> None:
        self.log.append("pause")
        await super().pause_generation(**rest)

    async def resume_generation(self) -> None:
        self.log.append("resume")
        await super().resume_generation()

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.log.append(f"sleep {level}")
        await super().sleep(level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.log.append(f"wake {'+'.join(sorted(tags or ['weights', 'kv_cache']))}")
        await super().wake_up(tags)


class Server(VerlServer):
    """`vLLMHttpServer` whose engine makes a token every few milliseconds."""

    TOKEN_S = 0.005

    def __init__(self, rank: int, hybrid: bool) -> None:
        self.log_engine = Engine()
        super().__init__(Mode.HYBRID if hybrid else Mode.STANDALONE, self.log_engine)
        self._address = (f"10.0.0.{rank}", 8000)

    def get_server_address(self) -> tuple[str, int]:
        return self._address

    def log(self) -> list[str]:
        return self.log_engine.log

    async def wait_for_requests_to_drain(self) -> None:
        """All were aborted before."""

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any) -> Any:
        while self._submission_paused:
            if self._rejecting:
                return self._answer([], "aborted")
            await asyncio.sleep(self.TOKEN_S)
        states = self.engine.output_processor.request_states
        stopped = asyncio.Event()
        made: list[int] = []
        state = stopped
        state.detokenizer = SimpleNamespace(output_token_ids=made)  # type: ignore[attr-defined]
        state.prompt_len = len(prompt_ids)  # type: ignore[attr-defined]
        states[request_id] = state
        try:
            while len(made) < sampling_params["max_tokens"]:
                try:
                    await asyncio.wait_for(stopped.wait(), self.TOKEN_S)
                    return self._answer(list(made), "aborted")
                except TimeoutError:
                    made.append(7)
            return self._answer(list(made), "completed")
        finally:
            states.pop(request_id, None)

    def _answer(self, ids: list[int], reason: str) -> Any:
        return SimpleNamespace(
            token_ids=ids,
            log_probs=[-0.5] * len(ids),
            routed_experts=None,
            num_preempted=0,
            stop_reason=reason,
            extra_fields={"global_steps": self.global_steps, "num_cached_tokens": 0},
        )


class Gate:
    """Lets rollouts of a step begin when the test says so."""

    def __init__(self) -> None:
        self._open: dict[int, asyncio.Event] = {}

    def _of(self, step: int) -> asyncio.Event:
        return self._open.setdefault(step, asyncio.Event())

    async def open(self, step: int) -> None:
        self._of(step).set()

    async def passed(self, step: int) -> None:
        await self._of(step).wait()
