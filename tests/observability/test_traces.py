"""One trace for each step, over the trainer and all services."""

from __future__ import annotations

import asyncio
import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.processes.fleet import Fleet
from services.processes.service import service_spec
from services.runtime.config import ServiceSettings
from services.runtime.host import StartError
from services.runtime.process import EXIT_FAILED
from services.runtime.tracing import MISSING
from tests.observability.loop import BATCH, RUN, Targets, job, services, step_of
from tests.runtime.helpers import probe_host
from turnout import tracing
from turnout.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from turnout.scheduler.v1 import scheduler_pb2
from turnout.trainer import TrainerHooks, TrainerSetup

# OpenTelemetry takes one provider for each process, and the first one for good.
_EXPORTER = InMemorySpanExporter()
_PROVIDER = TracerProvider()
_PROVIDER.add_span_processor(SimpleSpanProcessor(_EXPORTER))


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Where every span of this process ends."""
    if trace.get_tracer_provider() is not _PROVIDER:
        trace.set_tracer_provider(_PROVIDER)
    _EXPORTER.clear()
    yield _EXPORTER
    tracing.disable()


def _services(spans: list[ReadableSpan]) -> set[str]:
    attributes = [span.attributes or {} for span in spans]
    return {str(one["turnout.service"]) for one in attributes if "turnout.service" in one}


def _named(spans: list[ReadableSpan], name: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name.rpartition("/")[2] == name]


async def test_a_step_is_one_trace_over_trainer_and_services(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """Why a step took long can lie in four processes; their logs alone do not say what belonged together."""
    async with services(tmp_path, traces=True) as house, job(house.targets, 2) as hooks:
        for step in (1, 2):
            await step_of(hooks, step)
    finished = spans.get_finished_spans()
    steps = _named(list(finished), "step")
    assert [dict(span.attributes or {}) for span in steps] == [
        {"turnout.run_id": RUN, "turnout.step": 1},
        {"turnout.run_id": RUN, "turnout.step": 2},
    ]
    assert len({span.context.trace_id for span in steps if span.context}) == 2
    for span in steps:
        assert span.context is not None
        own = [one for one in finished if one.context and one.context.trace_id == span.context.trace_id]
        # The agent is an engine controller on the engine's node, and is called by its controller alone.
        assert _services(own) == {"buffer", "engine", "scheduler"}
        names = {one.name.rpartition("/")[2] for one in own}
        assert {"BeginStep", "PrepareStep", "BeginSample", "Sample", "EndStep", "CommitSample"} <= names
        known = {one.context.span_id for one in own if one.context}
        assert all(one.parent is None or one.parent.span_id in known for one in own)
        assert [one.name for one in own if one.parent is None] == ["step"]


async def test_what_a_call_sets_in_motion_hangs_below_it(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """A lend takes long because of one replica: the span of its command stands below the scheduler's call."""
    async with services(tmp_path, traces=True) as house, job(house.targets, 2) as hooks:
        await step_of(hooks, 1)
        await step_of(hooks, 2)
    finished = list(spans.get_finished_spans())
    by_id = {span.context.span_id: span for span in finished if span.context}

    def line(span: ReadableSpan) -> list[str]:
        parents = [span.name.rpartition("/")[2]]
        while span.parent is not None and span.parent.span_id in by_id:
            span = by_id[span.parent.span_id]
            parents.append(span.name.rpartition("/")[2])
        return parents

    # A reclaim: ordered by the scheduler, told to the controller, done by the agent of the replica's node.
    lines = [line(span) for span in _named(finished, "Sleep")]
    assert any(one[:2] == ["Sleep", "Reclaim"] and one[2] in ("BeginStep", "PrepareStep") for one in lines), lines


async def test_what_workers_do_for_a_step_belongs_to_its_trace(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """A step waits for its longest trajectory: without the worker's side nobody sees which, on which replica."""
    async with services(tmp_path, traces=True) as house, job(house.targets, 1) as hooks:
        await step_of(hooks, 1)
    finished = list(spans.get_finished_spans())
    by_id = {span.context.span_id: span for span in finished if span.context}
    (step,) = _named(finished, "step")
    worked = _named(finished, "trajectory")
    assert {str((span.attributes or {})["turnout.group_id"]) for span in worked} == {f"g-1-{n}" for n in range(BATCH)}
    assert {span.parent.span_id for span in worked if span.parent} == {step.context.span_id if step.context else None}
    for name, above in (("Generate", "trajectory"), ("FinishTrajectories", "settle")):
        calls = [span for span in _named(finished, name) if span.parent and span.parent.span_id in by_id]
        direct = [span for span in calls if span.parent and by_id[span.parent.span_id].name == above]
        assert direct, name
        assert {span.context.trace_id for span in direct if span.context} == {
            step.context.trace_id if step.context else None
        }


async def test_a_call_outside_of_a_trace_makes_no_span(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """Hundreds of workers poll: a trace for each of their calls would bury the steps."""
    async with services(tmp_path, traces=True) as house, job(house.targets, 1) as hooks:
        await hooks.buffer.calls.ListRuns(buffer_pb2.ListRunsRequest())
        with trace.get_tracer("user").start_as_current_span("mine"):
            await hooks.buffer.calls.ListRuns(buffer_pb2.ListRunsRequest())
    finished = spans.get_finished_spans()
    assert [span.name for span in finished] == ["turnout.buffer.v1.ReplayBuffer/ListRuns", "mine"]


async def test_a_trainer_without_an_event_loop_is_traced_too(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """Most trainers block: their step is one trace too, with what they do themselves meanwhile."""

    def train(targets: Targets) -> None:
        setup = TrainerSetup(
            "blocking",
            scheduler_pb2.RunConfig(
                train_batch_size=1, parameter_sync_step=1, mini_batch_size=1, total_training_steps=1, standalone_gpus=1
            ),
            scheduler=targets.scheduler,
            buffer=targets.buffer,
            engine=targets.engine,
            buffer_config=buffer_pb2.RunConfig(train_batch_size=1),
        )
        with TrainerHooks.open(setup) as hooks:
            hooks.on_step_begin(1)
            with trace.get_tracer("user").start_as_current_span("forward"):
                hooks.add_groups(1, [buffer_pb2.GroupSpec(group_id="g", group_size=1)])

    async with services(tmp_path, traces=True) as house:
        await asyncio.to_thread(train, house.targets)
    finished = {span.name.rpartition("/")[2]: span for span in spans.get_finished_spans()}
    assert {"step", "forward", "BeginStep", "AddGroups"} <= set(finished)
    parents = {name: span.parent.span_id for name, span in finished.items() if span.parent}
    ids = {name: span.context.span_id for name, span in finished.items() if span.context}
    assert parents["BeginStep"] == parents["forward"] == ids["step"]
    assert parents["AddGroups"] == ids["forward"]
    assert len({span.context.trace_id for span in finished.values() if span.context}) == 1


async def test_without_traces_nothing_is_sent_along(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    """Off is the default, and must cost nothing."""
    assert tracing.headers() == ()
    async with services(tmp_path) as house, job(house.targets, 1) as hooks:
        with trace.get_tracer("user").start_as_current_span("mine"):
            await step_of(hooks, 1)
    assert [span.name for span in spans.get_finished_spans()] == ["mine"]


def test_opentelemetry_is_imported_only_if_asked_for() -> None:
    """It is an extra: a service without it has to start, and one that does not trace should not load it."""
    code = (
        "import sys, services.runtime.process, turnout.trainer, turnout.worker; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60).returncode == 0


class _Collector(BaseHTTPRequestHandler):
    """Takes spans as an OpenTelemetry collector does."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        content = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        received = ExportTraceServiceRequest.FromString(content)
        assert isinstance(self.server, _Collecting)
        self.server.received += received.resource_spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


class _Collecting(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Collector)
        self.received: list[ResourceSpans] = []


async def test_a_service_sends_its_spans_to_the_collector() -> None:
    """What is made and never sent, or lost when the service stops, is seen by nobody."""
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with _Collecting() as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}"}
        made = service_spec("buffer", "--listen", "127.0.0.1:0", "--traces", "--log-level", "error")
        async with Fleet() as fleet:
            child = await fleet.start(replace(made, environment=environment))
            async with grpc.aio.insecure_channel(child.target) as channel:
                stub: Any = buffer_pb2_grpc.ReplayBufferStub(channel)
                # As a trainer in any language would send it.
                header = (("traceparent", f"00-{trace_id}-{span_id}-01"),)
                with pytest.raises(grpc.aio.AioRpcError):
                    await stub.GetRun(buffer_pb2.GetRunRequest(run_id="none"), metadata=header)
        collector.shutdown()
    (resource,) = collector.received
    (span,) = resource.scope_spans[0].spans
    assert {one.key: one.value.string_value for one in resource.resource.attributes}["service.name"] == "turnout-buffer"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace_id, span_id)
    assert span.name == "turnout.buffer.v1.ReplayBuffer/GetRun"
    status = {one.key: one.value.int_value for one in span.attributes}["rpc.grpc.status_code"]
    assert status == grpc.StatusCode.NOT_FOUND.value[0]


async def test_traces_without_opentelemetry_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked for traces would wait for them in vain."""
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(StartError, match="otel"):
        await probe_host(settings=ServiceSettings(traces=True)).start()


def test_a_service_without_opentelemetry_says_what_to_install() -> None:
    """A traceback of an import helps nobody."""
    code = (
        "import sys; sys.modules['opentelemetry'] = None; from services.cli.main import run; "
        "sys.exit(run(['buffer', 'serve', '--listen', '127.0.0.1:0', '--traces']))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (EXIT_FAILED, f"turnout buffer: {MISSING}")
