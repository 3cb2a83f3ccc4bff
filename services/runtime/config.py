"""One validated settings model per service, and where its values come from.

Invariants: flags win over `TURNOUT_<SERVICE>_*`, that over the YAML file, that over the defaults; a key that the model
does not know is an error that names it, wherever it stands; problems come out as one line each. Building a model
directly takes arguments and defaults alone, so tests and embedders do not depend on the environment.
"""

from __future__ import annotations

import difflib
import os
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from services.runtime.addresses import Address, AddressError, parse_address

CONFIG_VARIABLE: Final = "TURNOUT_CONFIG"
NESTED: Final = "__"
"""What stands between the names of a nested field in an environment variable."""


class ConfigError(Exception):
    """The configuration is wrong; `problems` has one line for each fault."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def settings_config(service: str) -> SettingsConfigDict:
    """Return the `model_config` of a service's settings, which fixes its prefix in the environment."""
    return SettingsConfigDict(
        env_prefix=f"TURNOUT_{service.upper()}_",
        extra="forbid",
        frozen=True,
        title=service,
        validate_default=True,
        # NaN would pass for "no limit" somewhere.
        allow_inf_nan=False,
    )


def _split_commas(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Strings = Annotated[list[str], BeforeValidator(_split_commas)]
"""A list of strings; in the environment they are separated by commas, on the command line the flag is repeated."""


class ServiceSettings(BaseSettings):
    """What every service can be told. A service's own settings derive from this."""

    model_config = settings_config("service")

    listen: Strings = Field(
        ["127.0.0.1:0"],
        min_length=1,
        description="Where to listen: HOST:PORT, [IPV6]:PORT or unix:/PATH. Port 0 takes a free port and prints it.",
    )
    insecure: bool = Field(False, description="Allow addresses that other machines can reach, without TLS and tokens.")
    tls_cert: Path | None = Field(
        None,
        description="PEM file of the server's certificate with its chain; everything but Unix sockets is then TLS.",
    )
    tls_key: Path | None = Field(None, description="PEM file of its private key. Renewed files need no restart.")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of the authorities that callers need a certificate of (mutual TLS)."
    )
    tokens_file: Path | None = Field(
        None,
        description="YAML file with the tokens that callers need, as `turnout token new` prints its lines; read again "
        "when it changes.",
    )
    token_calls_per_s: float = Field(
        5000.0,
        ge=1,
        le=1e6,
        description="Calls that one token may begin per second, and as many at once after a pause.",
    )
    token_calls_at_work: int = Field(
        65_536, ge=1, le=1 << 20, description="Calls that one token may have open at once, parked ones too."
    )
    max_connections: int = Field(
        4096, ge=1, le=1 << 20, description="Connections taken per address; further ones are closed at once."
    )
    max_streams: int = Field(
        65_536, ge=16, le=1 << 20, description="Calls that one connection may have open at once; further ones wait."
    )
    metrics_listen: str | None = Field(
        None, description="Serve Prometheus metrics over HTTP on this HOST:PORT; not served if unset."
    )
    traces: bool = Field(
        False,
        description="Make OpenTelemetry spans of the calls that carry a trace, and send them by OTLP over HTTP to "
        "where OTEL_EXPORTER_OTLP_ENDPOINT says; needs the extra otel.",
    )
    grace_s: float = Field(10.0, ge=0, le=3600, description="Seconds given to calls at work after SIGTERM.")
    max_message_bytes: int = Field(
        64 << 20, ge=1 << 16, le=2**31 - 1, description="Largest message taken or sent, in bytes."
    )
    keepalive_s: float = Field(10.0, ge=1, le=7200, description="Seconds of silence after which a peer is pinged.")
    keepalive_timeout_s: float = Field(
        5.0, ge=0.1, le=600, description="Seconds after which a peer that answers no ping is gone."
    )
    time_scale: float = Field(
        1.0, gt=0, le=1000, description="Wall seconds that one second of the domain lasts; never applied to deadlines."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level to log.")
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="How to log to stderr; auto is console on a terminal and JSON elsewhere."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    @model_validator(mode="after")
    def _addresses(self) -> ServiceSettings:
        named = [("listen", text) for text in self.listen]
        if self.metrics_listen is not None:
            named.append(("metrics_listen", self.metrics_listen))
        for name, text in named:
            try:
                address = parse_address(text)
            except AddressError as error:
                raise ValueError(f"{name}: {error}") from error
            if name == "metrics_listen" and address.path:
                raise ValueError(f"metrics_listen: {text!r} is a Unix socket, metrics need HOST:PORT")
            if not address.is_local and not self.insecure:
                self._check_protected(name, address)
        return self

    @model_validator(mode="after")
    def _tls(self) -> ServiceSettings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key: give both")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError(
                "tls_client_ca: callers can show certificates only over TLS, give tls_cert and tls_key too"
            )
        return self

    def _check_protected(self, name: str, address: Address) -> None:
        # Metrics know no tokens.
        known = self.tls_client_ca is not None or (name == "listen" and self.tokens_file is not None)
        if self.tls_cert is None or not known:
            needed = "tls_client_ca" if name == "metrics_listen" else "tokens_file (or tls_client_ca)"
            raise ValueError(
                f"{name}: {address} can be reached from other machines: give tls_cert, tls_key and {needed}, listen on "
                "loopback or a Unix socket, or set --insecure"
            )


S = TypeVar("S", bound=ServiceSettings)


def load_settings(cls: type[S], *, flags: Mapping[str, Any] | None = None, config: Path | None = None) -> S:
    """Return the settings of one process, from all sources; raise ConfigError with every problem found.

    `flags` maps field names to values (nested ones as nested mappings); `config` is a YAML file, by default the one
    that TURNOUT_CONFIG names.
    """
    problems: list[str] = []
    path = config or (Path(os.environ[CONFIG_VARIABLE]) if os.environ.get(CONFIG_VARIABLE) else None)
    data: dict[str, Any] = {}
    if path is not None:
        from_file = _read_yaml(path)
        problems += _unknown_keys(cls, from_file, origin=str(path))
        data = from_file
    from_environment, unknown = _read_environment(cls)
    problems += unknown
    data = _merge(_merge(data, from_environment), dict(flags or {}))
    if problems:
        raise ConfigError(problems)
    try:
        return cls(**data)
    except ValidationError as error:
        secret = {path for path, field in leaves(cls) if "SecretStr" in str(field.annotation)}
        raise ConfigError([_problem_line(problem, secret) for problem in error.errors()]) from error


def leaves(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Yield every field that takes a value, with its path through nested models."""
    for name, field in model.model_fields.items():
        nested = nested_model(field.annotation)
        if nested is not None:
            yield from leaves(nested, (*path, name))
        else:
            yield (*path, name), field


def nested_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model that a field of this type nests, if it does."""
    if get_origin(annotation) in (Union, types.UnionType):
        found = [nested for part in get_args(annotation) if (nested := nested_model(part)) is not None]
        return found[0] if found else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def variable(model: type[BaseSettings], path: tuple[str, ...]) -> str:
    """Return the environment variable of a field."""
    return f"{model.model_config.get('env_prefix', '')}{NESTED.join(path)}".upper()


def is_list(field: FieldInfo) -> bool:
    """Whether a field takes several values."""
    return get_origin(field.annotation) is list


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            [f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}"]
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}: not valid YAML: {' '.join(str(error).split())}"]) from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError([f"{path}: must hold settings by name"])
    return content


def _unknown_keys(model: type[BaseModel], data: Mapping[str, Any], origin: str, prefix: str = "") -> list[str]:
    problems = []
    for key, value in data.items():
        field = model.model_fields.get(key)
        if field is None:
            problems.append(f"{origin}: unknown setting {prefix}{key}{_did_you_mean(key, model.model_fields)}")
        elif (nested := nested_model(field.annotation)) is not None and isinstance(value, dict):
            problems += _unknown_keys(nested, value, origin, f"{prefix}{key}.")
    return problems


def _read_environment(model: type[BaseSettings]) -> tuple[dict[str, Any], list[str]]:
    prefix = variable(model, ())
    known = {variable(model, path): (path, field) for path, field in leaves(model)}
    data: dict[str, Any] = {}
    problems = []
    for name, value in os.environ.items():
        if not name.upper().startswith(prefix):
            continue
        if name.upper() not in known:
            problems.append(f"environment: unknown variable {name}{_did_you_mean(name.upper(), known)}")
            continue
        path, field = known[name.upper()]
        place = data
        for step in path[:-1]:
            place = place.setdefault(step, {})
        place[path[-1]] = _split_commas(value) if is_list(field) else value
    return data, problems


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _did_you_mean(key: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(key, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _problem_line(problem: Any, secret: set[tuple[str, ...]]) -> str:
    message = str(problem["msg"]).removeprefix("Value error, ")
    location = tuple(str(part) for part in problem["loc"])
    if not location:
        return message
    given = "" if problem["type"] == "missing" or location in secret else f" (given: {problem['input']!r})"
    return f"{'.'.join(location)}: {message[:1].lower()}{message[1:]}{given}"
