"""Alert rules, dashboard and runbook: they fit each other, and what the services expose."""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.buffer.service import build as build_buffer
from services.buffer.settings import BufferSettings
from services.engine.service import build as build_engine
from services.engine.settings import EngineSettings
from services.processes.child import Child, ChildSpec
from services.processes.fleet import Fleet
from services.processes.service import service_spec
from services.scheduler.service import build as build_scheduler
from services.scheduler.settings import SchedulerSettings
from tests.observability.loop import AGENT_ARGUMENTS, LOCAL, ROLES, RUN, SCALE, Targets, job, setup, step_of
from tests.observability.prometheus import ROOT, Prometheus, need, prometheus
from tests.observability.test_metrics_page import documented
from tests.runtime.certificates import Authority
from tools import dashboard
from turnout.buffer.v1 import buffer_pb2
from turnout.client import AsyncBufferClient, AsyncSchedulerClient, ClientOptions, Security
from turnout.scheduler.v1 import scheduler_pb2

DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yml"
RUNBOOK = ROOT / "docs" / "runbook.md"
LONGEST_S = 120.0


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> list[str]:
    """Every query of the dashboard as Grafana would send it."""
    content = json.loads(dashboard.DASHBOARD.read_text())
    texts = [target["expr"] for panel in content["panels"] for target in panel.get("targets", ())]
    return [text.replace("$run", ".*").replace("$__rate_interval", "15s") for text in texts]


def _known(expression: str) -> Iterator[str]:
    for name in re.findall(r"turnout_\w+", expression):
        yield re.sub(r"_(bucket|sum|count)$", "", name)


# ------------------------------------------------------------------------------------------------- without Prometheus


def test_alerts_and_dashboard_use_what_the_page_lists() -> None:
    """A query on a name that is not there is no error: the alert never fires, the panel stays empty."""
    names = set(documented())
    for expression in [*queries(), *(alert["expr"] for alert in alerts())]:
        assert set(_known(expression)) <= names, expression


def test_every_alert_fires_in_a_unit_test_and_has_its_place_in_the_runbook() -> None:
    """Whoever is woken by an alert needs to know at once what to do about it."""
    tests = yaml.safe_load((DEPLOY / "prometheus" / "alerts_test.yml").read_text())["tests"]
    fired = {check["alertname"] for test in tests for check in test["alert_rule_test"] if check.get("exp_alerts")}
    headings = re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    names = [alert["alert"] for alert in alerts()]
    assert fired == set(names)
    assert headings == names
    for alert in alerts():
        assert alert["annotations"]["runbook"] == f"docs/runbook.md#{alert['alert'].lower()}"
        assert alert["labels"]["severity"] in ("critical", "warning", "info")


def test_the_dashboard_is_what_its_module_gives() -> None:
    """An edit of the JSON alone would be lost with the next one of the module."""
    assert dashboard.DASHBOARD.read_text() == dashboard.text(), "run python3 -m tools.dashboard"


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    """Grafana moves panels that do, and the picture is another one than was meant."""
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(dashboard.DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


# ---------------------------------------------------------------------------------------------------- with Prometheus


@pytest.mark.parametrize(
    "arguments",
    [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml"), ("check", "config", "prometheus.yml")],
    ids=" ".join,
)
def test_promtool_accepts(arguments: tuple[str, ...]) -> None:
    """A rule that does not parse keeps Prometheus from starting; one that is wrong keeps quiet."""
    done = subprocess.run(
        [need("promtool"), *arguments], cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_shows_what_promtool_accepts() -> None:
    """Another spelling on the page than in the configuration that is checked would be checked by nobody."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    shown = re.findall(r"```yaml\n(scrape_configs:.*?)```", text, re.DOTALL)[0]
    checked = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    (job,), (whole,) = yaml.safe_load(shown)["scrape_configs"], checked["scrape_configs"]
    assert job == {key: whole[key] for key in job}


@asynccontextmanager
async def _processes(folder: Path) -> AsyncIterator[tuple[Targets, dict[str, str], Child]]:
    """The services as processes: their targets, where each serves metrics, and the buffer's process."""
    both = re.compile(r"^turnout \S+ (?:listening on |metrics on http://)(?P<target>[^/\s]+)(?:/metrics)?$")

    def spec(service: str, name: str, *arguments: str) -> ChildSpec:
        common = ("--listen", LOCAL, "--metrics-listen", LOCAL, "--time-scale", str(SCALE), "--log-level", "error")
        made = service_spec(service, *common, *arguments, name=name)
        return ChildSpec(made.name, made.module, made.arguments, ready=both, ready_lines=2)

    agent = [f"--replica={name}:{name.partition('-')[0]}" for name in ROLES]
    for key, value in AGENT_ARGUMENTS.items():
        if key not in ("agent", "replica", "replica_weights"):
            agent += [f"--{key.replace('_', '-')}", str(value)]
    specs = [spec(name, name, "--data-dir", str(folder / name)) for name in ("buffer", "engine", "scheduler")]
    specs.append(spec("engine", "agent", "--agent", "--no-replica-weights", *agent))
    async with Fleet() as fleet:
        children = await fleet.start_all(*specs)
        targets = Targets(*(child.targets[0] for child in children))
        yield targets, {child.spec.name: child.targets[1] for child in children}, children[0]


def _config(metrics: dict[str, str]) -> str:
    """That of deploy/, faster, and with the places of this test."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES)]
    config["scrape_configs"][0]["http_sd_configs"] = [
        {"url": f"http://{metrics[name]}/sd", "refresh_interval": "1s"} for name in ("scheduler", "engine")
    ]
    return yaml.safe_dump(config)


async def _silent(server: Prometheus) -> list[str]:
    """The queries that give no figure yet."""
    asked = queries()
    answers = await asyncio.gather(*(server.query(query) for query in asked))
    return [
        query
        for query, series in zip(asked, answers, strict=True)
        if not any(math.isfinite(float(one["value"][1])) for one in series)
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_every_query_of_the_dashboard_answers(tmp_path: Path) -> None:
    """Services, discovery, Prometheus and dashboard as a user has them: an empty panel means that two do not fit."""
    need("prometheus")
    folder = tmp_path / "prometheus"
    folder.mkdir()
    async with (
        _processes(tmp_path) as (targets, metrics, _),
        prometheus(_config(metrics), folder) as server,
        # This policy predicts, so what it predicted can be compared.
        job(targets, 10_000, "jit") as hooks,
    ):
        ends, step = time.monotonic() + LONGEST_S, 0
        silent = queries()
        while silent and time.monotonic() < ends:
            for _ in range(5):
                step += 1
                await step_of(hooks, step)
            silent = await _silent(server)
        assert silent == []
        active = (await server.ask("targets", state="active"))["activeTargets"]
        # Both lists name the controller; to Prometheus it is one target.
        assert sorted(one["labels"]["service"] for one in active) == ["agent", "buffer", "engine", "scheduler"]
        assert {one["health"] for one in active} == {"up"}
        rules = (await server.ask("rules", type="alert"))["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} == {"ok"}, rules
        assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
        assert {one["metric"]["run_id"] for one in await server.query("turnout_run_open")} == {RUN}


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_it_scrapes_over_mutual_tls_as_the_page_says(tmp_path: Path) -> None:
    """On addresses that others reach metrics need a certificate; without it every target is an alarm."""
    need("prometheus")
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    shown = re.findall(r"```yaml\n(scrape_configs:.*?)```", text, re.DOTALL)[1]
    config = yaml.safe_load(shown)
    authority = Authority(tmp_path / "tls")
    cert, key = authority.issue("service", "127.0.0.1")
    settings: dict[str, Any] = {"listen": [LOCAL], "metrics_listen": LOCAL, "grace_s": 1}
    settings |= {"tls_cert": cert, "tls_key": key, "tls_client_ca": authority.ca}
    peer = {"peer_ca": str(authority.ca), "peer_cert": cert, "peer_key": key}
    own_cert, own_key = authority.issue("prometheus", "prometheus")
    security = Security(ca=authority.ca, cert=own_cert, key=own_key)
    paths = {"ca_file": str(authority.ca), "cert_file": str(own_cert), "key_file": str(own_key)}
    folder = tmp_path / "prometheus"
    folder.mkdir()
    async with (
        build_buffer(BufferSettings.model_validate(settings)) as buffer,
        build_engine(EngineSettings.model_validate({**settings, **peer})) as engine,
        build_scheduler(SchedulerSettings.model_validate({**settings, **peer})) as scheduler,
        AsyncBufferClient(buffer.target, ClientOptions(security=security)) as buffers,
        AsyncSchedulerClient(scheduler.target, ClientOptions(security=security)) as client,
    ):
        config["global"] = {"scrape_interval": "1s"}
        (job,) = config["scrape_configs"]
        (discovery,) = job["http_sd_configs"]
        assert set(job["tls_config"]) == set(discovery["tls_config"]) == set(paths)
        job["tls_config"] = discovery["tls_config"] = paths
        assert discovery["url"].startswith("https://")
        assert scheduler.metrics_url is not None
        discovery |= {"url": scheduler.metrics_url.replace("/metrics", "/sd"), "refresh_interval": "1s"}
        run = setup(Targets(buffer.target, engine.target, scheduler.target, ""), 1, "verl")
        assert run.buffer_config is not None
        await buffers.calls.CreateRun(buffer_pb2.CreateRunRequest(run_id=RUN, config=run.buffer_config))
        request = scheduler_pb2.OpenRunRequest(
            run_id=RUN, config=run.config, buffer_target=buffer.target, engine_target=engine.target
        )
        await client.calls.OpenRun(request)
        async with prometheus(yaml.safe_dump(config), folder) as server, asyncio.timeout(LONGEST_S):
            while len(up := await server.query("up == 1")) < 3:  # noqa: ASYNC110 - Prometheus has to be asked
                await asyncio.sleep(0.5)
        assert sorted(one["metric"]["service"] for one in up) == ["buffer", "engine", "scheduler"]


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_service_that_is_killed_raises_its_alarm(tmp_path: Path) -> None:
    """Discovery, scraping and rule together: each may be right, and the alarm still not come."""
    need("prometheus")
    folder = tmp_path / "prometheus"
    folder.mkdir()

    async def until(query: str) -> None:
        async with asyncio.timeout(LONGEST_S):
            while not await server.query(query):  # noqa: ASYNC110 - Prometheus has to be asked
                await asyncio.sleep(0.5)

    async with (
        _processes(tmp_path) as (targets, metrics, buffer),
        prometheus(_config(metrics), folder) as server,
        job(targets, 1),
    ):
        await until('up{service="buffer"} == 1')
        assert await server.query("ALERTS") == []
        buffer.process.kill()
        await until('ALERTS{alertname="TurnoutServiceDown", service="buffer", alertstate="pending"}')
        # By now both lists were read again, several times: it is still a target.
        await until('count_over_time(up{service="buffer"}[15s]) >= 12 and up{service="buffer"} == 0')
