"""What docs/verl.md and docs/routes.md show, as verl takes it."""

from __future__ import annotations

import shlex
import types
from pathlib import Path

import pytest

from tests.docs.blocks import pieces_of

pytest.importorskip("verl", reason="needs the environment of `make test-verl`")
# verl imports of Ray what Ray will take away.
pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore:Ray state API:DeprecationWarning")]
DOCS = Path(__file__).parents[3] / "docs"


def _overrides() -> list[str]:
    found = [piece.text for piece in pieces_of("verl", (DOCS / "verl.md").read_text())]
    (command,) = [shlex.split(text) for text in found if text.startswith("python -m verl")]
    assert command[:4] == ["python", "-m", "verl.trainer.main_ppo", "..."]
    (alone,) = [text.split() for text in found if text.startswith("trainer.v1.sampler.custom_sampler")]
    return command[4:] + alone


def test_the_settings_of_the_page_are_verls() -> None:
    """A setting that verl does not know ends the run at its start, one that it ignores after days."""
    from hydra import compose, initialize_config_module
    from verl.utils.import_utils import load_extern_object

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=_overrides())
    sampler = config.trainer.v1.sampler
    assert config.trainer.v1.trainer_mode == "turnout"
    assert sampler.sampler_kwargs.buffer == "trainer-0:50051"
    made = load_extern_object(sampler.custom_sampler.path, sampler.custom_sampler.name)
    assert made.__module__.startswith("turnout.integrations.verl")
    environment = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert environment.VERL_USE_EXTERNAL_MODULES == "turnout.integrations.verl.plugin"


def test_the_shadow_of_the_page_is_a_setting() -> None:
    """Hydra refuses a key that exists with a plus, and one that does not without."""
    from hydra import compose, initialize_config_module

    page = (DOCS / "howto" / "shadow-verl.md").read_text()
    (added,) = [piece.text for piece in pieces_of("shadow-verl", page) if piece.text.startswith("+trainer")]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[*_overrides(), added])
    assert config.trainer.v1.sampler.sampler_kwargs.policy == "shadow:jit"


def test_the_router_of_the_page_is_one() -> None:
    """Whoever copies it finds out at verl's start otherwise."""
    from ray.actor import ActorClass
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    (text,) = [
        piece.text for piece in pieces_of("routes", (DOCS / "routes.md").read_text()) if piece.language == "python"
    ]
    module = types.ModuleType("my_router")
    exec(text, module.__dict__)
    assert isinstance(module.Balancer, ActorClass)
    inner = module._Balancer({"server": object()}, None)
    assert isinstance(inner, GlobalRequestLoadBalancer)
    assert list(inner.get_all_servers()) == ["server"]
