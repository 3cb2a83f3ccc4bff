"""The runbook, held against the alerts and against services that run."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from services.runtime.permissions import Role
from tests.buffer.helpers import Caller
from tests.deployed.manifests import ROOT
from tests.deployed.site import RUN, SERVICES, Site
from tests.docs.test_pages import arguments
from turnout.client import AsyncSchedulerClient

RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
HEADING = re.compile(r"^## (\w+)$", re.MULTILINE)


def alerts() -> dict[str, str]:
    """Where each alert says that its page is."""
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule["annotations"]["runbook"] for group in groups for rule in group["rules"]}


def commands() -> list[str]:
    """Every command of the runbook."""
    return list(dict.fromkeys(line.strip() for line in RUNBOOK.splitlines() if line.startswith("    turnout ")))


def test_every_alert_has_its_place_and_every_place_an_alert() -> None:
    """At three in the morning a link into nothing is worse than none."""
    sections = HEADING.findall(RUNBOOK)
    assert sections == list(alerts())
    assert len(sections) >= 10
    assert alerts() == {name: f"docs/runbook.md#{name.lower()}" for name in sections}
    for name in sections:
        text = RUNBOOK[RUNBOOK.index(f"## {name}\n") :].partition("\n## ")[0]
        assert all(part in text for part in ("**Symptom.**", "**Look.**", "**Do.**")), name


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_every_command_works_against_services_that_run(site: Site) -> None:
    """With TLS and an operator's token in the environment, as on the machine of whoever is called."""
    site.start(*SERVICES, "agent-standalone")
    site.register()
    async with site.channel(site.members["buffer"].target) as channel:
        await Caller(channel, RUN).create()
    request = site.opening()
    async with AsyncSchedulerClient(site.members["scheduler"].target, site.options(Role.TRAINER)) as client:
        await client.calls.OpenRun(request)
    assert len(commands()) >= 8
    for command in commands():
        words = [word.replace("/var/lib/turnout", str(site.root / "data")) for word in arguments(command)]
        words = [site.members["agent-standalone"].target if word == "NODE:PORT" else word for word in words]
        if words[:2] == ["buffer", "audit"]:
            # It is for a buffer that is stopped, or a copy.
            site.members["buffer"].stop()
        done = site.turnout(*words)
        said = f"{shlex.join(words)}: {done.stdout}{done.stderr}"
        # A doctor that finds something, such as this machine's disk, has worked.
        assert done.returncode == 0 or (words[0] == "doctor" and done.returncode == 1), said
        assert done.stdout or words[0] in ("report", "events"), said
        assert "Traceback" not in done.stderr, said
        if words[:2] == ["buffer", "audit"]:
            site.members["buffer"].start()
