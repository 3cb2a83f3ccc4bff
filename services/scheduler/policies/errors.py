"""What the policies refuse.

Invariant: every error about a value carries `field` and `value`, so that a servicer can name both without reading text.
"""


class FieldError(ValueError):
    """A value cannot be used. `field` names it, `value` is what was given, `requirement` what it must be."""

    def __init__(self, field: str, value: object, requirement: str) -> None:
        # All three stay in `args`: the error survives a pickle between processes.
        super().__init__(field, value, requirement)
        self.field = field
        self.value = value
        self.requirement = requirement

    def __str__(self) -> str:
        return f"{self.field} must be {self.requirement}, got {self.value!r}"


class OutOfRangeError(FieldError):
    """The value is of the wrong kind or outside its range."""


class NotFiniteError(FieldError):
    """The value is NaN or infinite."""


class IncompatibleError(FieldError):
    """The value is legal alone, but not together with another setting, which `requirement` names."""


class UnknownPolicyError(FieldError):
    """No policy has this name; `requirement` lists those that exist."""


class EventOrderError(RuntimeError):
    """A decision was asked before the events it rests on: a fault of the caller, never of the run."""
