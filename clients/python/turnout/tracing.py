"""Traces: one for each step of a trainer, joined with what the services do for it.

    from turnout import tracing
    tracing.enable()          # after the OpenTelemetry SDK was set up; needs the extra `otel`

From then on a step of `turnout.trainer` is a span, and every call carries the trace of whoever makes it, by the W3C
header `traceparent`; services that were started with `--traces` add spans of their own. Until then nothing of
OpenTelemetry is imported, and a call costs one comparison more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Metadata = tuple[tuple[str, str], ...]

_headers: Callable[[], Metadata] | None = None
_tracer: Any = None


def enable() -> None:
    """Trace from now on, in this process. Raises ImportError if OpenTelemetry is not installed."""
    global _headers, _tracer
    from opentelemetry import propagate, trace

    def headers() -> Metadata:
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        return tuple(carrier.items())

    _headers, _tracer = headers, trace.get_tracer("turnout")


def disable() -> None:
    """Stop tracing."""
    global _headers, _tracer
    _headers = _tracer = None


def enabled() -> bool:
    """Whether calls may carry a trace."""
    return _headers is not None


def headers() -> Metadata:
    """What a call carries of the trace of whoever makes it; empty while tracing is off, or outside of a trace."""
    return () if _headers is None else _headers()


def current() -> Any:
    """What `together` takes of whoever calls this; None while tracing is off."""
    if _tracer is None:
        return None
    from opentelemetry import context

    return context.get_current()


@contextmanager
def trajectory(traceparent: str, run_id: str, group_id: str, index: int, attempt: int) -> Iterator[None]:
    """Work on a trajectory in the trace that its group was added in; untraced if it was in none."""
    if _tracer is None or not traceparent:
        yield
        return
    from opentelemetry import propagate

    attributes = {
        "turnout.run_id": run_id,
        "turnout.group_id": group_id,
        "turnout.trajectory": index,
        "turnout.attempt": attempt,
    }
    parent = propagate.extract({"traceparent": traceparent})
    with _tracer.start_as_current_span("trajectory", context=parent, attributes=attributes):
        yield


@contextmanager
def together(name: str, contexts: Iterable[Any]) -> Iterator[None]:
    """Make a call on behalf of several: in the trace of the first that has one, linked with the other traces."""
    if _tracer is None:
        yield
        return
    from opentelemetry import trace

    spans: dict[int, tuple[Any, Any]] = {}
    for one in contexts:
        found = trace.get_current_span(one).get_span_context() if one is not None else None
        if found is not None and found.is_valid:
            spans.setdefault(found.trace_id, (one, found))
    if not spans:
        yield
        return
    (first, _), *others = spans.values()
    with _tracer.start_as_current_span(name, context=first, links=[trace.Link(found) for _, found in others]):
        yield


class StepSpan:
    """The span of a trainer's present step. While one is open, everything in the same task or thread belongs to it."""

    def __init__(self) -> None:
        self._span: Any = None
        self._token: Any = None

    def begin(self, run_id: str, step: int) -> None:
        """A step begins; one that is open ends."""
        self.end()
        if _tracer is None:
            return
        from opentelemetry import context, trace

        attributes = {"turnout.run_id": run_id, "turnout.step": step}
        self._span = _tracer.start_span("step", context=context.Context(), attributes=attributes)
        self._token = context.attach(trace.set_span_in_context(self._span))

    def end(self) -> None:
        """The step is over."""
        if self._span is None:
            return
        from opentelemetry import context, trace

        # Whoever made each call in a task of its own never entered it here.
        if trace.get_current_span() is self._span:
            context.detach(self._token)
        self._span.end()
        self._span = self._token = None
