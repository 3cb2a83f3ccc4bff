"""Tokens: what they look like, and the file that says what each may do.

Invariants: the file holds hashes alone, so that reading it lets nobody in; a token is compared by its hash and in
constant time; a file that became wrong leaves the last good one in force, and is reported; no error names a token or
its hash.

The file is a YAML list of lines such as

    - {id: worker-1, role: worker, run: my-run, sha256: 64 hexadecimal digits}

with `all_runs: true` in place of `run` for a token of every run. A token is `turnout.ID.SECRET`. The id names the line
of the file and may be logged, the secret has 256 random bits. Such a secret cannot be guessed, so one round of SHA-256
is enough where a password would need a slow hash.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from services.runtime.logs import get_logger
from services.runtime.permissions import Role

PREFIX: Final = "turnout"
"""Tools that look for leaked secrets find tokens by it."""

SECRET_BYTES: Final = 32
_LONGEST: Final = 256
_ID: Final = "[A-Za-z0-9_-]{1,64}"


@dataclass(frozen=True, slots=True)
class Token:
    """What one token allows."""

    id: str
    role: Role
    run: str | None
    """The only run it is good for; None: all."""
    digest: bytes
    """SHA-256 of the token."""


class TokensError(Exception):
    """The tokens file cannot be used; the message is one line for a person."""


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    id: str = Field(pattern=f"^{_ID}$")
    role: Role
    run: str | None = Field(None, min_length=1)
    all_runs: bool = False
    sha256: str = Field(pattern="^[0-9a-f]{64}$")

    @model_validator(mode="after")
    def _scope(self) -> _Line:
        if (self.run is not None) == self.all_runs:
            raise ValueError("give either run, or all_runs: true")
        return self


_LINES: Final = TypeAdapter(Annotated[list[_Line], Field(min_length=1)], config=ConfigDict(hide_input_in_errors=True))


def make_token(token_id: str, secret: str) -> str:
    """Return the token of an id and a secret, both of letters, digits, '-' and '_'."""
    return f"{PREFIX}.{token_id}.{secret}"


def digest(token: str) -> bytes:
    """Return the hash that the file holds of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def is_token_id(text: str) -> bool:
    """Whether `text` can be the id of a token."""
    return re.fullmatch(_ID, text) is not None


def read_tokens(text: str, origin: str) -> dict[str, Token]:
    """Return the tokens of a file by their ids; `origin` is its name. Raises TokensError."""
    try:
        lines = _LINES.validate_python(yaml.safe_load(text))
    except yaml.YAMLError:
        # Its own message would repeat the line.
        raise TokensError(f"{origin}: not valid YAML") from None
    except ValidationError as error:
        problem = error.errors(include_input=False)[0]
        place = ".".join(map(str, problem["loc"])) or "the file"
        raise TokensError(f"{origin}: {place}: {problem['msg'].removeprefix('Value error, ')}") from None
    tokens: dict[str, Token] = {}
    for line in lines:
        if line.id in tokens:
            raise TokensError(f"{origin}: the id {line.id} is there twice")
        tokens[line.id] = Token(line.id, line.role, line.run, bytes.fromhex(line.sha256))
    return tokens


class TokenFile:
    """The tokens of a file."""

    def __init__(self, path: Path) -> None:
        """Read the file; raises TokensError."""
        self._path = path
        self._log = get_logger("tokens")
        self._problem = ""
        self._seen = self._state()
        self._tokens: Mapping[str, Token] = read_tokens(self._text(), str(path))

    def __len__(self) -> int:
        """How many tokens are in force."""
        return len(self._tokens)

    def find(self, token: str) -> Token | None:
        """Return what a token allows; None if there is no such token."""
        if len(token) > _LONGEST:
            return None
        prefix, _, rest = token.partition(".")
        known = self._tokens.get(rest.partition(".")[0]) if prefix == PREFIX else None
        if known is None or not hmac.compare_digest(known.digest, digest(token)):
            return None
        return known

    def holds(self, token: Token) -> bool:
        """Whether a token that was found is still in force, unchanged."""
        return self._tokens.get(token.id) == token

    def refresh(self) -> bool:
        """Read the file again if it changed; returns whether the tokens may be others now."""
        problem, changed = "", False
        try:
            seen = self._state()
            if seen != self._seen:
                self._tokens, self._seen, changed = read_tokens(self._text(), str(self._path)), seen, True
                self._log.info("tokens read again", tokens=len(self._tokens))
        except TokensError as error:
            problem = str(error)
            if problem != self._problem:
                self._log.error("the tokens stay as they were", problem=problem)
        self._problem = problem
        return changed

    def _state(self) -> tuple[int, int, int]:
        try:
            state = os.stat(self._path)
        except OSError as error:
            raise self._unreadable(error) from None
        return state.st_mtime_ns, state.st_ino, state.st_size

    def _text(self) -> str:
        try:
            return self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: OSError | UnicodeDecodeError) -> TokensError:
        return TokensError(f"{self._path} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}")
