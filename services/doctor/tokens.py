"""The files of tokens that settings and options name: there, readable, of the right form, and closed to others.

Invariant: no token and no hash is shown.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from services.doctor.finding import Finding, ok, problem, warning
from services.runtime.tokens import PREFIX, TokenFile, TokensError
from turnout.channels import Security, SecurityError

_OTHERS: Final = stat.S_IRWXO
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_MAKE: Final = "turnout token new --help says how one is made"


def check_tokens_file(path: Path) -> Finding:
    """A file with the hashes of those who may call."""
    try:
        known = len(TokenFile(path))
    except TokensError as error:
        return problem("tokens", str(path), str(error).removeprefix(str(path)).lstrip(": "), f"mend it; {_MAKE}")
    if _mode(path) & _OTHERS_WRITE:
        return problem(
            "tokens", str(path), "others may write to it, and so let in whom they like", f"chmod go-w {path}"
        )
    return ok("tokens", str(path), f"{known} tokens")


def check_token(subject: str, security: Security) -> Iterator[Finding]:
    """The token that calls would show, if they show one; `subject` is where it comes from."""
    try:
        metadata = security.metadata()
    except SecurityError as error:
        yield problem("tokens", subject, str(error), f"give the file with one token in it; {_MAKE}")
        return
    if metadata is None:
        return
    if not metadata[0][1].removeprefix("Bearer ").startswith(f"{PREFIX}."):
        yield problem("tokens", subject, "is no token of Turnout", _MAKE)
    elif security.token_file is not None and _mode(Path(security.token_file)) & _OTHERS:
        yield warning("tokens", subject, "everybody on this machine may read it", f"chmod o-rwx {security.token_file}")
    else:
        yield ok("tokens", subject, "can be shown")


def _mode(path: Path) -> int:
    return os.stat(path).st_mode
