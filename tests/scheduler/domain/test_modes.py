"""Who has the GPUs: intention against observation."""

from services.scheduler.domain.events import Mode
from services.scheduler.domain.modes import Modes


def mode_of(modes: Modes) -> Mode:
    """The mode, as it is at this moment: a checker takes a property for the same value twice."""
    return modes.mode


def confirmed() -> Modes:
    modes = Modes()
    modes.saw("e1", {"a": True, "b": True})
    return modes


def test_without_hybrids_the_trainer_has_all_there_is() -> None:
    """A run without hybrid GPUs would otherwise never be allowed to train."""
    assert Modes().mode is Mode.TRAINER


def test_trainer_is_reported_only_while_every_hybrid_is_confirmed_free() -> None:
    """One replica that still holds its memory is an out-of-memory crash of the trainer."""
    modes = confirmed()
    assert mode_of(modes) is Mode.TRAINER
    modes.saw("e1", {"a": True, "b": False})
    assert mode_of(modes) is Mode.RECLAIMING
    assert modes.unconfirmed == ("b",)
    assert "b" in modes.stuck_reason


def test_another_incarnation_voids_what_was_confirmed() -> None:
    """A controller that was restarted does not know any more that its replicas sleep; neither may we."""
    modes = confirmed()
    modes.restarted("e1")
    assert mode_of(modes) is Mode.TRAINER
    modes.restarted("e2")
    assert mode_of(modes) is Mode.RECLAIMING
    assert modes.unconfirmed == ("a", "b")
    modes.saw("e2", {"a": True, "b": True})
    assert mode_of(modes) is Mode.TRAINER


def test_the_way_there_and_back() -> None:
    """A transition that is skipped in the report hides where the time went."""
    modes = confirmed()
    seen = []
    for go in (modes.lending, modes.serving, modes.reclaiming, modes.returned):
        go()
        seen.append(modes.mode)
    assert seen == [Mode.LENDING, Mode.ROLLOUT, Mode.RECLAIMING, Mode.TRAINER]
    assert not modes.lent


def test_a_failure_keeps_the_run_in_between_until_a_transition_succeeds() -> None:
    """A failed reclaim that was forgotten would let the trainer begin on GPUs it does not have."""
    modes = confirmed()
    modes.serving()
    assert modes.lent
    modes.reclaiming()
    modes.failed("one replica hangs")
    assert (modes.mode, modes.stuck_reason) == (Mode.RECLAIMING, "one replica hangs")
    modes.saw("e1", {"a": True, "b": True})
    assert mode_of(modes) is Mode.RECLAIMING
    modes.returned()
    assert (modes.mode, modes.stuck_reason) == (Mode.TRAINER, "")
