"""Writes the signatures of the vLLM that is installed: `python tests/vllm/signatures/record_signatures.py > V.json`."""

from __future__ import annotations

import inspect
import json
from typing import Any


def signatures() -> dict[str, Any]:
    """The public names of AsyncLLM with their parameters, and the fields of SamplingParams."""
    import vllm
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    methods: dict[str, dict[str, list[str]]] = {}
    for name in sorted(vars(AsyncLLM)):
        member = vars(AsyncLLM)[name]
        if name.startswith("_"):
            continue
        if not inspect.isfunction(member):
            methods[name] = {"parameters": [], "required": []}
            continue
        parameters = list(inspect.signature(member).parameters.values())[1:]
        methods[name] = {
            "parameters": [parameter.name for parameter in parameters],
            "required": [parameter.name for parameter in parameters if parameter.default is parameter.empty],
        }
    return {
        "version": vllm.__version__,
        "AsyncLLM": methods,
        "SamplingParams": sorted(inspect.signature(SamplingParams).parameters),
    }


if __name__ == "__main__":
    print(json.dumps(signatures(), indent=1))
