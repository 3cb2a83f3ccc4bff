"""docs/metrics.md and what the services expose are the same list."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from services.engine.discovery import engine_of
from services.engine.domain.spec import ReplicaSpec, Role
from services.runtime.discovery import as_reached
from services.runtime.host import ServiceHost
from services.scheduler.domain import events
from services.scheduler.service import SchedulerService
from tests.observability.loop import RUN, close_without_engines, job, services, step_of

PAGE = Path(__file__).parents[2] / "docs/metrics.md"
ROW = re.compile(r"^\| `(turnout_\w+)` \|(.*)\|(.*)\|(.*)\|(.*)\|$")
SECTIONS = {
    "Every service": {"buffer", "engine", "scheduler", "agent"},
    "Replay buffer": {"buffer"},
    "Engine controller, and agents": {"engine", "agent"},
    "Switch scheduler": {"scheduler"},
}
NOT_SEEN_HERE = {
    "turnout_engine_route_sink_current",  # nobody else routes
}


class Row(NamedTuple):
    """A line of the page."""

    section: str
    kind: str
    labels: frozenset[str]


def documented() -> dict[str, Row]:
    rows, section = {}, ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif found := ROW.match(line):
            name, kind, labels, unit, meaning = map(str.strip, found.groups())
            assert name not in rows, f"{name} is listed twice"
            assert meaning
            assert not name.removesuffix("_total").endswith(("_seconds", "_bytes")) or unit, f"{name} has no unit"
            rows[name] = Row(section, kind, frozenset(filter(None, labels.split(", "))))
    return rows


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


async def scrape(host: ServiceHost) -> dict[str, Metric]:
    """What a service exposes of its own, by name."""
    assert host.metrics_url is not None
    text = await asyncio.to_thread(_get, host.metrics_url)
    families = {}
    for family in text_string_to_metric_families(text):
        # A client before OpenMetrics adds when a counter began as a gauge of its own.
        if family.name.startswith("turnout_") and not family.name.endswith("_created"):
            families[family.name + ("_total" if family.type == "counter" else "")] = family
    return families


def _labels(family: Metric) -> set[frozenset[str]]:
    return {frozenset(sample.labels) - {"le", "quantile"} for sample in family.samples}


def predict(scheduler: ServiceHost) -> None:
    """Have the run's policy predict, which it does by itself only where it has measured waits that took long."""
    service = scheduler.service
    assert isinstance(service, SchedulerService)
    hosted = service.registry.get(RUN)
    keep = events.DecisionMade(
        events.DecisionPoint.STEP_END, 2, events.DecisionAction.KEEP, "verl", "a test", predicted_wait_seconds=3.0
    )
    hosted.run.record(keep, hosted.moment)
    gained = events.LendGoodput("lend", 10, 5, switch_seconds=1.0, lost_seconds=2.0, gained_seconds=4.0)
    hosted.run.record(gained, hosted.moment)


async def test_the_page_lists_what_the_services_expose(tmp_path: Path) -> None:
    """An alert on a name that was renamed never fires, and nobody notices until it should have."""
    rows = documented()
    async with services(tmp_path) as house, job(house.targets, 3) as hooks:
        for step in (1, 2):
            await step_of(hooks, step)
        predict(house.scheduler)
        await step_of(hooks, 3)
        hosts = {"buffer": house.buffer, "engine": house.engine, "scheduler": house.scheduler, "agent": house.agent}
        exposed = {name: await scrape(host) for name, host in hosts.items()}
    for service, families in exposed.items():
        # The agent keeps no journal.
        expected = {name for name, row in rows.items() if service in SECTIONS[row.section]}
        if service == "agent":
            expected = {name for name in expected if not name.startswith("turnout_journal_")}
        assert set(families) == expected, f"{service}: the page and the service differ"
        for name, family in families.items():
            assert family.type == rows[name].kind, name
            assert family.documentation
            assert _labels(family) <= {rows[name].labels}, name
    seen = {name for families in exposed.values() for name, family in families.items() if family.samples}
    assert set(rows) - seen == NOT_SEEN_HERE, "the job above has to make every series once"


async def test_a_run_that_is_forgotten_leaves_no_series(tmp_path: Path) -> None:
    """A scheduler that serves hundreds of short runs must not expose the series of all of them for ever."""
    async with services(tmp_path) as house:
        async with job(house.targets, 1) as hooks:
            await step_of(hooks, 1)
        told = await scrape(house.scheduler)
        assert any(sample.labels.get("run_id") == RUN for sample in told["turnout_lends_total"].samples)
        service = house.scheduler.service
        assert isinstance(service, SchedulerService)
        service.registry._metrics.keep(())
        left = [
            sample.name
            for name, family in (await scrape(house.scheduler)).items()
            for sample in family.samples
            # Those that tell how runs stand are read from the runs themselves.
            if sample.labels.get("run_id") == RUN and not name.startswith("turnout_run_")
        ]
        assert left == []


async def _list(host: ServiceHost) -> list[dict[str, Any]]:
    assert host.metrics_url is not None
    groups: list[dict[str, Any]] = json.loads(
        await asyncio.to_thread(_get, host.metrics_url.removesuffix("metrics") + "sd")
    )
    return groups


def _place(host: ServiceHost) -> str:
    assert host.metrics_url is not None
    return host.metrics_url.removeprefix("http://").removesuffix("/metrics")


async def test_http_sd_lists_services_and_replicas(tmp_path: Path) -> None:
    """Ports that the system gave, and replicas that come and go, cannot be written into a Prometheus configuration."""
    async with services(tmp_path) as house, job(house.targets, 1):
        assert await _list(house.scheduler) == [
            {"targets": [_place(house.scheduler)], "labels": {"service": "scheduler"}},
            {"targets": [_place(house.buffer)], "labels": {"service": "buffer"}},
            {"targets": [_place(house.engine)], "labels": {"service": "engine"}},
        ]
        agent = {"service": "agent", "__meta_turnout_replicas": "hybrid-0,standalone-0"}
        assert await _list(house.engine) == [
            {"targets": [_place(house.engine)], "labels": {"service": "engine"}},
            {"targets": [_place(house.agent)], "labels": agent},
        ]
        assert await _list(house.buffer) == [{"targets": [_place(house.buffer)], "labels": {"service": "buffer"}}]


async def test_http_sd_keeps_a_peer_that_went_away(tmp_path: Path) -> None:
    """A service that dies has to stay a target: one that leaves the list is down without any alarm."""
    async with services(tmp_path) as house, job(house.targets, 1) as hooks:
        before = [await _list(host) for host in (house.scheduler, house.engine)]
        await house.agent.stop(0)
        await house.buffer.stop(0)
        assert [await _list(host) for host in (house.scheduler, house.engine)] == before
        await close_without_engines(hooks)


async def test_http_sd_leaves_out_a_peer_that_never_answered(tmp_path: Path) -> None:
    """One peer that is away must not cost Prometheus the whole list."""
    async with services(tmp_path) as house, job(house.targets, 1) as hooks:
        await house.agent.stop(0)
        assert [group["labels"]["service"] for group in await _list(house.engine)] == ["engine"]
        await close_without_engines(hooks)


@pytest.mark.parametrize(
    ("told", "target", "url"),
    [
        ("http://10.0.0.1:9101", "trainer:50051", "http://10.0.0.1:9101"),
        ("https://0.0.0.0:9101", "trainer:50051", "https://trainer:9101"),
        ("http://[::]:9101", "[fd00::7]:50051", "http://[fd00::7]:9101"),
        ("http://127.0.0.1:9101", "localhost:50051", "http://127.0.0.1:9101"),
        ("http://0.0.0.0:9101", "unix:/run/turnout.sock", "http://127.0.0.1:9101"),
        ("http://127.0.0.1:9101", "trainer:50051", None),
        ("nonsense", "trainer:50051", None),
    ],
)
def test_a_peers_metrics_are_listed_as_they_can_be_reached(told: str, target: str, url: str | None) -> None:
    """A service that listens everywhere tells 0.0.0.0, which is Prometheus' own machine."""
    assert as_reached(told, target) == url


@pytest.mark.parametrize(
    ("endpoint", "place"),
    [
        ("http://10.0.0.7:8000", "10.0.0.7:8000"),
        ("http://[fd00::7]:8000/v1", "[fd00::7]:8000"),
        ("https://vllm.example", "vllm.example:443"),
        ("actor-name", None),
        ("http://[fd00::7", None),
        ("http://vllm.example:99999", None),
    ],
)
def test_engines_behind_http_are_scraped_themselves(endpoint: str, place: str | None) -> None:
    """vLLM and SGLang serve metrics of their own at the port that requests go to."""
    target = engine_of(ReplicaSpec("r0", Role.STANDALONE, "vllm-http", endpoint))
    told = None if target is None else target.to_dict()
    assert (told and told["targets"]) == (place and [place])
    if target is not None:
        assert target.to_dict()["labels"].get("__scheme__", "http") == endpoint.partition(":")[0]
        assert (target.labels["replica_id"], target.labels["role"]) == ("r0", "standalone")
