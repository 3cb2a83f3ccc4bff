"""A lognormal of lengths from the two facts that a log holds: their mean, and the share that reached the cap.

Formula: with X lognormal(mu, s), E[min(X, c)] = m Phi((ln c - mu - s^2) / s) + c (1 - Phi((ln c - mu) / s)), where
m = exp(mu + s^2 / 2); both facts rise with s, at a fixed mean, wherever the cap is above the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from math import erf, exp, log, sqrt

_LEAST_STD, _MOST_STD = 0.05, 2.5
_ROUNDS = 60


def mean_before_cap(capped_mean: float, log_std: float, cap: float) -> float:
    """The lognormal's mean that gives `capped_mean` tokens once lengths end at `cap`, which has to be above it."""
    if not capped_mean < cap:
        raise ValueError(f"a mean of {capped_mean:g} tokens is not below the cap of {cap:g}")
    low, high = log(capped_mean), log(capped_mean)
    while _capped_mean(exp(high), log_std, cap) < capped_mean and high < log(cap) + 8:
        high += 0.5
    return exp(_bisect(lambda at: _capped_mean(exp(at), log_std, cap) - capped_mean, low, high))


def log_std_of(capped_mean: float, clip_ratio: float, cap: float) -> float:
    """The log-deviation at which the share `clip_ratio` of lengths with that mean reaches the cap."""
    return _bisect(
        lambda log_std: _clipped(mean_before_cap(capped_mean, log_std, cap), log_std, cap) - clip_ratio,
        _LEAST_STD,
        _MOST_STD,
    )


def _capped_mean(mean: float, log_std: float, cap: float) -> float:
    middle = log(mean) - log_std**2 / 2
    below = _phi((log(cap) - middle - log_std**2) / log_std)
    return mean * below + cap * _clipped(mean, log_std, cap)


def _clipped(mean: float, log_std: float, cap: float) -> float:
    return 1 - _phi((log(cap) - log(mean) + log_std**2 / 2) / log_std)


def _phi(x: float) -> float:
    return (1 + erf(x / sqrt(2))) / 2


def _bisect(rising: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
