"""The order of a trainer's calls.

Invariants: a position and a call determine what comes next, whatever time it is and whoever asks; a call that is not
among the expected ones changes nothing; while a lend waits for its weights, closing it is all that may come.

The table (s: step, i: mini-batch, a: attempt):

    BETWEEN(s)       BeginStep(s + 1) -> BEGUN     BeginValidation(s) -> VALIDATING     Save(s)
    BEGUN(s, a)      PrepareStep(s, a) -> PREPARED, or BEGUN with a + 1 after a time-out
    PREPARED(s, i)   BeginSample(s, i, a) -> SAMPLING, or PREPARED with a + 1 after LEND or a time-out
                     EndStep(s) -> BETWEEN and Save(s), if i > 0 or supply is exhausted, and a = 0: data may run out
    SAMPLING(s, i)   EndSample(s, i) -> PREPARED(s, i + 1)
    VALIDATING(s)    EndValidation(s) -> BETWEEN
    any, lending     CompleteLend or AbandonLend -> the same without the lend
"""

from dataclasses import dataclass, replace
from enum import Enum

from services.runtime.errors import TurnoutError, failed_precondition, invalid_argument


class Call(Enum):
    """The calls that have an order, by their names in the contract."""

    BEGIN_STEP = "BeginStep"
    PREPARE_STEP = "PrepareStep"
    BEGIN_SAMPLE = "BeginSample"
    END_SAMPLE = "EndSample"
    END_STEP = "EndStep"
    BEGIN_VALIDATION = "BeginValidation"
    END_VALIDATION = "EndValidation"
    COMPLETE_LEND = "CompleteLend"
    ABANDON_LEND = "AbandonLend"
    SAVE = "Save"


@dataclass(frozen=True, slots=True)
class CallKey:
    """What tells one call of a trainer from another, within an epoch. What a call has not stays at its default."""

    call: Call
    step: int = 0
    mini_batch: int = 0
    attempt: int = 0
    lend_id: str = ""

    def __str__(self) -> str:
        match self.call:
            case Call.COMPLETE_LEND | Call.ABANDON_LEND:
                arguments = f"lend_id={self.lend_id}"
            case Call.PREPARE_STEP:
                arguments = f"step={self.step}, attempt={self.attempt}"
            case Call.BEGIN_SAMPLE:
                arguments = f"step={self.step}, mini_batch={self.mini_batch}, attempt={self.attempt}"
            case Call.END_SAMPLE:
                arguments = f"step={self.step}, mini_batch={self.mini_batch}"
            case _:
                arguments = f"step={self.step}"
        return f"{self.call.value}({arguments})"


class Ending(Enum):
    """How a call ended, as far as the order is concerned."""

    DONE = "done"
    LEND = "lend"
    """It answered LEND: the lend is to be closed next."""
    TIMED_OUT = "timed_out"
    """It waited in vain and is to be repeated with attempt + 1."""
    EXHAUSTED = "exhausted"
    """It is done, but supply cannot reach what was waited for."""


class Phase(Enum):
    """Where a trainer is within its step."""

    BETWEEN = "between"
    BEGUN = "begun"
    PREPARED = "prepared"
    SAMPLING = "sampling"
    VALIDATING = "validating"


@dataclass(frozen=True, slots=True)
class Position:
    """Where a trainer is.

    step: the last one begun. lend_id: the lend that waits to be closed, empty if none. exhausted: PrepareStep of the
    step ended without reaching its threshold.
    """

    phase: Phase = Phase.BETWEEN
    step: int = 0
    mini_batch: int = 0
    attempt: int = 0
    lend_id: str = ""
    exhausted: bool = False


def expected(position: Position, mini_batches: int) -> tuple[CallKey, ...]:
    """The calls that may come next, the usual one first, in a run of `mini_batches` mini-batches per step."""
    step = position.step
    if position.lend_id:
        return (
            CallKey(Call.COMPLETE_LEND, lend_id=position.lend_id),
            CallKey(Call.ABANDON_LEND, lend_id=position.lend_id),
        )
    match position.phase:
        case Phase.BETWEEN:
            return (
                CallKey(Call.BEGIN_STEP, step + 1),
                CallKey(Call.BEGIN_VALIDATION, step),
                CallKey(Call.SAVE, step),
            )
        case Phase.BEGUN:
            return (CallKey(Call.PREPARE_STEP, step, attempt=position.attempt),)
        case Phase.PREPARED:
            sample = CallKey(Call.BEGIN_SAMPLE, step, position.mini_batch, position.attempt)
            end = (CallKey(Call.END_STEP, step), CallKey(Call.SAVE, step))
            if position.mini_batch == mini_batches:
                return end
            may_end = (position.mini_batch > 0 or position.exhausted) and position.attempt == 0
            return (sample, *end) if may_end else (sample,)
        case Phase.SAMPLING:
            return (CallKey(Call.END_SAMPLE, step, position.mini_batch),)
        case Phase.VALIDATING:
            return (CallKey(Call.END_VALIDATION, step),)


def check(position: Position, mini_batches: int, key: CallKey) -> None:
    """Raise FAILED_PRECONDITION / OUT_OF_ORDER, naming what is expected, unless `key` may come next."""
    options = expected(position, mini_batches)
    if key not in options:
        raise out_of_order(key, options)


def out_of_order(key: CallKey, options: tuple[CallKey, ...]) -> TurnoutError:
    """The error for `key` where one of `options` should have come."""
    return failed_precondition(
        "OUT_OF_ORDER",
        f"{key} was called where {options[0]} is expected",
        called=key,
        expected=options[0],
        allowed="; ".join(map(str, options)),
    )


def advance(position: Position, key: CallKey, ending: Ending = Ending.DONE, lend_id: str = "") -> Position:
    """Where the trainer is after `key`, one of the expected calls, ended so. `lend_id` goes with Ending.LEND."""
    match key.call, ending:
        case Call.BEGIN_STEP, Ending.DONE:
            return Position(Phase.BEGUN, key.step)
        case Call.PREPARE_STEP, Ending.DONE | Ending.EXHAUSTED:
            return Position(Phase.PREPARED, key.step, exhausted=ending is Ending.EXHAUSTED)
        case Call.BEGIN_SAMPLE, Ending.DONE:
            return replace(position, phase=Phase.SAMPLING, attempt=0)
        case Call.BEGIN_SAMPLE, Ending.LEND:
            return replace(position, attempt=key.attempt + 1, lend_id=lend_id)
        case Call.PREPARE_STEP | Call.BEGIN_SAMPLE, Ending.TIMED_OUT:
            return replace(position, attempt=key.attempt + 1)
        case Call.END_SAMPLE, Ending.DONE:
            return replace(position, phase=Phase.PREPARED, mini_batch=key.mini_batch + 1)
        case Call.END_STEP, Ending.DONE | Ending.LEND:
            return Position(Phase.BETWEEN, key.step, lend_id=lend_id)
        case Call.BEGIN_VALIDATION, Ending.DONE | Ending.LEND:
            return Position(Phase.VALIDATING, key.step, lend_id=lend_id)
        case Call.END_VALIDATION, Ending.DONE:
            return Position(Phase.BETWEEN, key.step)
        case Call.COMPLETE_LEND | Call.ABANDON_LEND, Ending.DONE:
            return replace(position, lend_id="")
        case Call.SAVE, Ending.DONE:
            return position
    raise AssertionError(f"{key} cannot end {ending.value}")


def call_changed(key: CallKey) -> TurnoutError:
    """The error for a repeat of `key` that says something else than the first time."""
    return invalid_argument(
        "", f"{key} was called before with other content", reason="CALL_CHANGED", call=key.call.value, called=key
    )


class CallOrder:
    """The order of one trainer's calls (one epoch of one run), with the answers already given.

    Answers are opaque here. The last `keep` of them are kept: a trainer repeats its last call, rarely an older one.
    """

    def __init__(self, position: Position, mini_batches: int, keep: int = 256) -> None:
        self.position = position
        self._mini_batches = mini_batches
        self._keep = keep
        self._answers: dict[CallKey, tuple[bytes, object]] = {}
        self.fresh: list[CallKey] = []
        """Calls answered since whoever keeps the answers took note of them, at most `keep`."""

    def expected(self) -> tuple[CallKey, ...]:
        """The calls that may come next, the usual one first."""
        return expected(self.position, self._mini_batches)

    def lending(self, lend_id: str) -> None:
        """A lend that no call of this trainer asked for waits to be closed: that of the run's start."""
        self.position = replace(self.position, lend_id=lend_id)

    def check(self, key: CallKey) -> None:
        """Raise FAILED_PRECONDITION / OUT_OF_ORDER unless `key` may come next."""
        check(self.position, self._mini_batches, key)

    def answer(self, key: CallKey, content: bytes) -> object | None:
        """The answer already given to `key`, None if there is none.

        `content` stands for all that the call said. Raises INVALID_ARGUMENT / CALL_CHANGED if it was other content.
        """
        if key not in self._answers:
            return None
        first_content, answer = self._answers[key]
        if content != first_content:
            raise call_changed(key)
        return answer

    def done(
        self, key: CallKey, content: bytes, answer: object, ending: Ending = Ending.DONE, lend_id: str = ""
    ) -> None:
        """`key`, one of the expected calls, was answered."""
        self.check(key)
        self.position = advance(self.position, key, ending, lend_id)
        self.restore(key, content, answer)
        self.fresh.append(key)
        del self.fresh[: -self._keep]

    def restore(self, key: CallKey, content: bytes, answer: object) -> None:
        """`key` was answered; where that left the trainer is `position`."""
        self._answers[key] = (content, answer)
        while len(self._answers) > self._keep:
            del self._answers[next(iter(self._answers))]

    def answers(self) -> list[tuple[CallKey, bytes, object]]:
        """All answers that are kept, the oldest first, each with what its call said."""
        return [(key, content, answer) for key, (content, answer) in self._answers.items()]

    def take_fresh(self) -> list[tuple[CallKey, bytes, object]]:
        """Those of the answers that nobody took note of yet; they count as noted from now on."""
        fresh, self.fresh = self.fresh, []
        return [(key, *self._answers[key]) for key in fresh]
