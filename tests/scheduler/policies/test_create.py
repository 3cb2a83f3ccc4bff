"""Policies by name."""

import subprocess
import sys
from dataclasses import FrozenInstanceError, fields

import pytest

from services.scheduler import policies
from services.scheduler.policies import types
from services.scheduler.policies.types import Action, Decision
from tests.scheduler.policies.drive import configured


@pytest.mark.parametrize("name", policies.names())
def test_policy_is_created_by_its_name(name: str) -> None:
    """A registry that maps a name to another policy would go unnoticed for a whole run."""
    assert policies.create(name, configured()).name == name


def test_names_are_those_that_exist() -> None:
    """Help texts and errors list them."""
    assert policies.names() == ("off", "fixed", "verl", "jit")


@pytest.mark.parametrize("name", ["jitter", "shadow:", "", "VERL", "verl "])
def test_unknown_policy_is_refused_and_the_names_are_listed(name: str) -> None:
    """A silent fall-back would run an experiment with the wrong policy."""
    with pytest.raises(policies.UnknownPolicyError, match="one of off, fixed, verl, jit") as caught:
        policies.create(name, configured())
    assert (caught.value.field, caught.value.value) == ("policy", name)


def test_import_loads_no_network_and_little_else() -> None:
    """Simulators start many processes: policies must not drag gRPC, protobuf or the event loop into each."""
    code = "import sys, services.scheduler.policies; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    roots = {module.split(".")[0] for module in loaded}
    assert "services.scheduler.policies.verl" in loaded
    assert roots.isdisjoint({"grpc", "google", "turnout", "asyncio", "pydantic", "matplotlib"})


def test_all_is_sorted_and_true() -> None:
    """The public names of both modules are what they say."""
    for module in (policies, types):
        assert sorted(module.__all__) == list(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)


def test_every_event_has_a_time_and_is_frozen() -> None:
    """A journal cannot order an event without a time, nor trust one that changes."""
    named = [getattr(types, name) for name in types.__all__]
    events = [each for each in named if issubclass(each, types.Event) and each is not types.Event]
    assert {types.RunOpened, types.GroupFinished, types.SyncDone} < set(events)
    for event in events:
        assert "at" in {field.name for field in fields(event)}
        assert event.__dataclass_params__.frozen
    began = types.StepBegan(at=1.0, step=1)
    with pytest.raises(FrozenInstanceError):
        began.step = 2  # type: ignore[misc]


def test_decision_says_nothing_it_was_not_told() -> None:
    """Defaults are "none", so that an absent number never reads as zero."""
    decision = Decision(action=Action.KEEP, reason="Because.")
    assert (decision.placement, decision.predicted_wait_s, decision.recheck_at, decision.threshold) == (None,) * 4
    assert decision.numbers == {}
