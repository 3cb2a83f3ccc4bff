"""Range checks shared by configuration and measurements.

Invariant: a check returns nothing and changes nothing; it raises an error that names the field and the value.
"""

import math

from services.scheduler.policies.errors import NotFiniteError, OutOfRangeError


def check_whole(field: str, value: object, minimum: int) -> None:
    """Raise OutOfRangeError unless `value` is an integer (not a bool) of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise OutOfRangeError(field, value, f"a whole number of at least {minimum}")


def check_flag(field: str, value: object) -> None:
    """Raise OutOfRangeError unless `value` is a bool: the text "false" would otherwise count as true."""
    if not isinstance(value, bool):
        raise OutOfRangeError(field, value, "true or false")


def check_finite(field: str, value: float) -> None:
    """Raise OutOfRangeError unless `value` is a number, NotFiniteError if it is NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OutOfRangeError(field, value, "a number")
    if not math.isfinite(value):
        raise NotFiniteError(field, value, "finite")


def check_not_negative(field: str, value: float) -> None:
    """Raise FieldError unless `value` is a finite number of at least 0."""
    check_finite(field, value)
    if value < 0:
        raise OutOfRangeError(field, value, "at least 0")
