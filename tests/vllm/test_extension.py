"""What our worker extension measures, on the records of vLLM's own allocator. Needs vLLM: `make test-vllm`."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")


@pytest.mark.filterwarnings("default")
@pytest.mark.timeout(300)
def test_freed_allocations_of_a_gpu_count_for_nothing() -> None:
    """Tensors keep their size there while their memory is gone; others than our tags are nobody's question."""
    from vllm.device_allocator import AllocationData

    from services.engine.vllm.extension import mapped_bytes

    weights = [AllocationData((0, size, 1, 2), "weights") for size in (100, 20)]
    kv = AllocationData((0, 4000, 3, 4), "kv_cache")
    other = AllocationData((0, 7, 5, 6), "default")
    assert mapped_bytes([*weights, kv, other]) == {"weights": 120, "kv_cache": 4000}
    weights[0].is_asleep = kv.is_asleep = True
    assert mapped_bytes([*weights, kv, other]) == {"weights": 20, "kv_cache": 0}


@pytest.mark.filterwarnings("default")
@pytest.mark.timeout(300)
def test_what_an_allocator_does_not_tell_is_unknown() -> None:
    """Neither an engine without sleep mode, nor a vLLM whose allocations do not say whether they are asleep."""
    from services.engine.vllm.extension import mapped_bytes

    class Older:
        tag, handle = "weights", (0, 100, 1, 2)

    assert mapped_bytes([]) is None
    assert mapped_bytes([Older()]) is None
