"""Spans of the calls that carry a trace, for OpenTelemetry.

Invariants: a call without `traceparent` makes no span, so that polling workers and watches fill no trace store; what a
call sets in motion, here and at peers, belongs to its span; a service that was not asked to trace imports nothing of
OpenTelemetry.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

from services.runtime.errors import Code
from turnout.tracing import enable

MISSING: Final = "traces need OpenTelemetry: pip install 'turnout-services[otel]'"

_FAULTS: Final = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Statuses that are the server's fault, by OpenTelemetry's conventions for RPC."""


_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
"""What W3C's Trace Context allows."""


def traceparent_of(context: Any) -> str:
    """Return the trace that a call carries, to hand on; empty without a valid one. Needs no OpenTelemetry."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str) and _TRACEPARENT.fullmatch(value):
            return value
    return ""


class TracingError(Exception):
    """Traces were asked for and cannot be made; the message is one line for a person."""


class Traces:
    """Makes the spans of one service, with the tracer provider of the process."""

    def __init__(self, service: str) -> None:
        """Raises TracingError if OpenTelemetry is not there."""
        try:
            from opentelemetry import propagate, trace

            enable()
        except ImportError as error:
            raise TracingError(MISSING) from error
        self._trace, self._extract = trace, propagate.extract
        self._tracer = trace.get_tracer("turnout")
        self._service = service

    def around(
        self, method: str, serve_call: Callable[..., Awaitable[Any]], code_of: Callable[[Any], str]
    ) -> Callable[..., Awaitable[Any]]:
        """`serve_call` of (serve, asked, context), in a span if the call carries a trace.

        `code_of` tells the status that a call ended with.
        """
        trace, extract, tracer = self._trace, self._extract, self._tracer
        name = method.removeprefix("/")
        service, _, call = name.rpartition("/")
        attributes = {
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": call,
            "turnout.service": self._service,
        }

        async def traced(serve: Any, asked: Any, context: Any) -> Any:
            metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
            if "traceparent" not in metadata:
                return await serve_call(serve, asked, context)
            with tracer.start_as_current_span(
                name,
                context=extract(metadata),
                kind=trace.SpanKind.SERVER,
                attributes=attributes,
                # How a call ends is told by its status; the exceptions are our own way to that.
                record_exception=False,
                set_status_on_exception=False,
            ) as span:
                code = ""
                try:
                    return await serve_call(serve, asked, context)
                except asyncio.CancelledError:
                    code = "CANCELLED"
                    raise
                finally:
                    code = code or code_of(context)
                    span.set_attribute("rpc.grpc.status_code", Code[code].value)
                    if code in _FAULTS:
                        span.set_status(trace.StatusCode.ERROR, code)

        return traced


def export_traces(service: str) -> Callable[[], None]:
    """Send the spans of this process by OTLP to where the OTEL_ variables say; returns what sends the last ones.

    Raises TracingError.
    """
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingError(MISSING) from error
    provider = TracerProvider(resource=Resource.create({"service.name": f"turnout-{service}"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider.shutdown
