"""Whether engines compute what the trainer's model computes.

Invariant: token ids are compared, of greedy answers to fixed prompts; both sides compute in float32, so they differ
only where the two best tokens are as good as equal.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnout.client import AsyncEngineClient
from turnout.engine.v1 import engine_pb2


async def differing(
    engine: AsyncEngineClient,
    *,
    run_id: str,
    replica_ids: Sequence[str],
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
) -> list[str]:
    """Return the replicas whose greedy answers to the prompts are not the expected ones."""
    found = []
    for replica_id in replica_ids:
        for prompt, answer in zip(prompts, expected, strict=True):
            request = engine_pb2.GenerateRequest(
                run_id=run_id,
                prompt_token_ids=prompt,
                max_tokens=len(answer),
                sampling=engine_pb2.Sampling(temperature=0.0),
                replica_id=replica_id,
            )
            if (await engine.generate(request)).token_ids != list(answer):
                found.append(replica_id)
                break
    return found
