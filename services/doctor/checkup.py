"""All checks, in the order in which they are told.

Invariants: nothing is changed, and nothing is asked that moves or reads anything of a run but its replicas.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import services
from services.buffer.settings import BufferSettings
from services.doctor.certificates import check_authorities, check_pair
from services.doctor.finding import Finding, ok, problem, warning
from services.doctor.journals import check_journal
from services.doctor.machine import check_data_dir, check_files
from services.doctor.packages import check_shadowing, check_versions, installed
from services.doctor.replicas import check_replicas
from services.doctor.targets import Place, check_place
from services.doctor.tokens import check_token, check_tokens_file
from services.engine.settings import EngineSettings
from services.runtime.config import ConfigError, ServiceSettings, load_settings
from services.runtime.identity import own_version
from services.scheduler.settings import SchedulerSettings
from turnout.channels import Security, SecurityError
from turnout.client import (
    AsyncEngineClient,
    AsyncSchedulerClient,
    ClientOptions,
    RetryPolicy,
    RunNotFound,
    Timeouts,
    TurnoutError,
)
from turnout.engine.v1 import engine_pb2
from turnout.scheduler.v1 import scheduler_pb2

SETTINGS: Final[Mapping[str, type[ServiceSettings]]] = {
    "buffer": BufferSettings,
    "engine": EngineSettings,
    "scheduler": SchedulerSettings,
}

_PAIRS: Final = (("tls_cert", "tls_key"), ("peer_cert", "peer_key"))
_AUTHORITIES: Final = ("tls_client_ca", "peer_ca")


@dataclass(frozen=True, slots=True)
class Question:
    """What to look at. `configs`: YAML files by service; `data_dirs`: beside those that settings name."""

    places: tuple[Place, ...]
    data_dirs: tuple[Path, ...] = ()
    configs: Mapping[str, Path] = field(default_factory=dict)


async def checkup(question: Question) -> list[Finding]:
    """Everything that was found."""
    found = [
        *check_versions(installed()),
        *check_shadowing(Path(services.__file__).parent, os.environ.get("PYTHONPATH", ""), Path.cwd()),
        check_files(),
        *_files(question),
    ]
    looked = await asyncio.gather(*(check_place(place, os.environ, own_version()) for place in question.places))
    found += [finding for part in looked for finding in part]
    serving = {finding.subject for finding in found if finding.check == "health"}
    if all(place.subject in serving for place in question.places if place.service in ("engine", "scheduler")):
        targets = {place.service: place.target for place in question.places}
        if {"engine", "scheduler"} <= set(targets):
            found += await _engines(targets["scheduler"], targets["engine"])
    return found


def _files(question: Question) -> Iterator[Finding]:
    """The files and folders that settings, options and the environment name, each once."""
    data_dirs = dict.fromkeys(question.data_dirs)
    pairs: dict[tuple[Path, Path], None] = {}
    authorities: dict[Path, None] = {}
    tokens_files: dict[Path, None] = {}
    shown: dict[str, Security] = {}
    for service, kind in SETTINGS.items():
        try:
            # Without a file of its own: the one that TURNOUT_CONFIG names is one service's.
            settings = load_settings(kind, config=question.configs.get(service, Path(os.devnull)))
        except ConfigError as error:
            for text in error.problems:
                yield problem("settings", service, text, f"mend it; turnout {service} serve --help lists what there is")
            continue
        if service in question.configs:
            yield ok("settings", service, str(question.configs[service]))
        values = settings.model_dump()
        if values.get("data_dir") is not None:
            data_dirs[values["data_dir"]] = None
        pairs.update(
            {(values[cert], values[key]): None for cert, key in _PAIRS if values.get(cert) and values.get(key)}
        )
        if settings.tokens_file is not None:
            tokens_files[settings.tokens_file] = None
        if values.get("peer_token_file") is not None:
            shown[str(values["peer_token_file"])] = Security(token_file=values["peer_token_file"])
        authorities.update({Path(values[name]): None for name in _AUTHORITIES if _is_file(values.get(name))})
    try:
        security = Security.from_environment()
    except SecurityError as error:
        yield problem(
            "certificate", "this command", str(error), "give both of --cert and --key; one token, or its file"
        )
    else:
        shown[str(security.token_file or "TURNOUT_TOKEN")] = security
        if security.cert is not None and security.key is not None:
            pairs[Path(security.cert), Path(security.key)] = None
        if _is_file(security.ca):
            authorities[Path(str(security.ca))] = None
    now = time.time()
    for cert, key in pairs:
        yield check_pair(cert, key, now)
    for path in authorities:
        yield from check_authorities(path, now)
    for path in tokens_files:
        yield check_tokens_file(path)
    for subject, one in shown.items():
        yield from check_token(subject, one)
    for data_dir in data_dirs:
        yield from check_data_dir(data_dir)
        yield from check_journal(data_dir)


def _is_file(value: object) -> bool:
    # "system" stands for the authorities that gRPC brings along.
    return value is not None and str(value) != "system"


async def _engines(scheduler: str, engine: str) -> list[Finding]:
    """The replicas of every open run that the controller serves."""
    options = ClientOptions(timeouts=Timeouts(call=3.0, attempt=3.0), retry=RetryPolicy(max_attempts=1))
    found: list[Finding] = []
    async with AsyncSchedulerClient(scheduler, options) as runs, AsyncEngineClient(engine, options) as engines:
        try:
            listed = (await runs.calls.ListRuns(scheduler_pb2.ListRunsRequest())).runs
            for run in listed:
                if not run.open:
                    continue
                try:
                    request = engine_pb2.ListReplicasRequest(run_id=run.run_id)
                    found += check_replicas(run.run_id, (await engines.calls.ListReplicas(request)).replicas)
                except RunNotFound:
                    continue
        except (TurnoutError, SecurityError) as error:
            found.append(
                warning(
                    "engines",
                    engine,
                    f"cannot be asked: {error}",
                    "give a token of role reader or operator that is for all runs: --token-file",
                )
            )
    return found
