"""Images of what policies know."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.scheduler.policies.types import Action, Decision
from services.scheduler.storage import policy_image
from services.scheduler.storage.policy_image import UnreadableImageError


def again(value: Any) -> Any:
    return policy_image.read(policy_image.write(value))


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2.5, -0.0, 1e300, float("inf"), "text", True],
        (1, ("a", ()), []),
        {"a": {(1, "b"): [2]}, 3: None},
        {1, 2, 3},
        frozenset({"x"}),
        Action.LEND,
        Decision(action=Action.KEEP, reason="so", numbers={"n": 1.0}),
    ],
)
def test_what_is_read_is_what_was_written(value: Any) -> None:
    """A number that comes back a little different decides differently one day."""
    read = again(value)
    assert read == value
    assert type(read) is type(value)


def test_containers_keep_what_they_are() -> None:
    """A window of costs that forgets its length never lets a cold first cost go."""
    window = again(deque([1.0, 2.0], maxlen=3))
    window.extend([3.0, 4.0])
    assert list(window) == [2.0, 3.0, 4.0]
    array = again(np.array([[1.5, 2.5], [3.5, np.nan]]))
    np.testing.assert_array_equal(array, np.array([[1.5, 2.5], [3.5, np.nan]]))
    array[0, 0] = 9.0
    assert type(again(np.float64(0.1))) is np.float64


def test_what_is_shared_stays_shared() -> None:
    """Two parts of a policy that see one list must go on seeing one."""
    shared: list[int] = [1]
    first, second = again([shared, shared])
    first.append(2)
    assert second == [1, 2]


def test_foreign_classes_are_neither_written_nor_read() -> None:
    """An image that could name any class would run whatever a changed file names."""
    with pytest.raises(TypeError, match="holds no"):
        policy_image.write(json.JSONDecoder())
    for form in (["object", "os:_Environ", {}], ["object", "services.scheduler.policies.types:dataclass", {}], ["x"]):
        with pytest.raises(UnreadableImageError):
            policy_image.read(json.dumps({"modules": {}, "value": form}).encode())


def test_an_image_of_another_version_is_refused() -> None:
    """Half of what an older policy knew, in the fields of a newer one, is worse than nothing."""
    image = json.loads(policy_image.write(replace(Decision(action=Action.KEEP, reason="so"))))
    (module,) = image["modules"]
    image["modules"][module] += 1
    with pytest.raises(UnreadableImageError, match="another version"):
        policy_image.read(json.dumps(image).encode())
