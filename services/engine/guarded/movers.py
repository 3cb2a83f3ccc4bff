"""Ways in which new weights reach an engine.

`info_json` of a move is a JSON object that names one:

- empty, or `{"mover": "file"}`: the chunks are one safetensors file, loaded by the `file` engine of our worker;
- `{"mover": "file", "path": P, "crc32c": C}`: the same with a file that the trainer wrote on this machine, no chunks;
- `{"mover": "transfer", "init": {...}, "update": {...}}`: vLLM's own weight-transfer API (nccl, ipc, ...); `init` is
  passed on the first time, `update` is what its update_weights takes, a list of them is one per rank;
- `{"mover": "reload", "path": P}`: the workers read the checkpoint folder P again, by collective RPC;
- `{"mover": "own"}`: the trainer moves the weights by its own means between Begin and Commit, and says so here.

Invariants: a session of vLLM's weight-transfer API is opened by the first move that needs one and closed by the finish;
bytes that were received are compared with their checksum before the engine is told of them; no file outlives its move.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import google_crc32c

from services.engine.guarded import surface as calls
from services.engine.guarded.surface import Surface
from services.runtime.errors import TurnoutError, aborted, data_loss, failed_precondition, invalid_argument

FIELDS: Final = {
    "file": frozenset({"path", "crc32c"}),
    "transfer": frozenset({"init", "update"}),
    "reload": frozenset({"path"}),
    "own": frozenset[str](),
}
"""The movers and what each may be told."""

CRC32C: Final = re.compile(r"[0-9a-f]{8}")

NEEDED: Final = {"file": calls.WEIGHT_FILES, "transfer": calls.WEIGHT_TRANSFER, "reload": calls.RELOAD}
"""What an engine must offer for a mover."""


@dataclass(slots=True)
class Move:
    """One move that is ready to be made."""

    mover: str
    info: dict[str, Any]
    received: Path | None = None
    index: int = 0
    """Which move of the transaction it is."""
    before_crc: int | None = 0
    """CRC32C of all bytes of the transaction before this move, None if it is not known."""
    joined_crc: int | None = None
    """The same up to its end."""

    def close(self) -> None:
        """Remove what was received."""
        if self.received is not None:
            self.received.unlink(missing_ok=True)


class Movers:
    """The weight moves of one engine."""

    def __init__(self, name: str, surface: Surface, spool: str | None) -> None:
        self._name = name
        self._surface = surface
        self._spool = spool
        self._in_session = False
        self._initialised = False
        # Of all bytes that were moved, and of those before each move: 0 before the first, None once some came of which
        # it is not known.
        self._crc: int | None = 0
        self._before: list[int | None] = []
        self.moved = False

    async def receive(self, size: int, info_json: str, chunks: AsyncIterator[bytes], index: int = 0) -> Move:
        """Read one move to its end; INVALID_ARGUMENT if it names what does not exist.

        `index`: which one it is; engines load tensors by their names, so that one which is made again replaces itself.
        """
        info = self._read_info(info_json)
        mover = str(info.pop("mover", "file"))
        self._check_info(mover, info, size)
        needed = NEEDED.get(mover)
        if needed is not None and needed not in self._surface.offers:
            raise failed_precondition(
                "NOT_OFFERED", f"{self._name} was not started for the mover {mover}", replica_id=self._name
            )
        before = self._crc_before(index)
        if not size:
            async for _ in chunks:
                pass
            # The worker compares it with the file that it reads.
            named = info.get("crc32c") if mover == "file" and before == 0 else None
            return Move(mover, info, None, index, before, int(named, 16) if named else None)
        path = Path(tempfile.mkstemp(prefix="turnout-weights-", suffix=".safetensors", dir=self._spool)[1])
        move = Move(mover, {"path": str(path)}, path, index, before)
        written, crc, joined = 0, 0, before or 0
        try:
            with path.open("wb") as file:  # noqa: ASYNC230 - what takes time is in a thread
                async for chunk in chunks:
                    crc = google_crc32c.extend(crc, chunk)
                    joined = google_crc32c.extend(joined, chunk)
                    written += await asyncio.to_thread(file.write, chunk)
            if written != size:
                raise aborted("WEIGHTS_INCOMPLETE", f"{written} of {size} bytes of weights arrived")
        except BaseException:
            move.close()
            raise
        move.info["crc32c"] = f"{crc:08x}"
        move.joined_crc = None if before is None else joined
        return move

    def _crc_before(self, index: int) -> int | None:
        if index < len(self._before):
            return self._before[index]
        # Of moves that an earlier controller made, nothing is known here.
        return self._crc if index == len(self._before) else None

    async def move(self, move: Move) -> None:
        """Have the engine take the weights."""
        self.moved = True
        match move.mover:
            case "reload":
                await self._surface.reload_weights(move.info["path"])
            case "file" | "transfer":
                update = move.info if move.mover == "file" else move.info.get("update", {})
                await self._open_session(move.info.get("init") or {})
                try:
                    await self._surface.update_weights(update)
                except TurnoutError:
                    # vLLM has closed the session; the next move opens another.
                    self._in_session = False
                    raise
            case _:
                pass
        unknown = max(0, move.index - len(self._before))
        self._before = [*self._before[: move.index], *[None] * unknown, move.before_crc]
        self._crc = move.joined_crc

    def check(self, checksum: str) -> None:
        """Compare the trainer's checksum, a CRC32C as 8 hexadecimal digits, with that of what came, if known."""
        if checksum and self._crc and checksum != f"{self._crc:08x}":
            raise data_loss(
                "CHECKSUM_MISMATCH",
                f"the weights of {self._name} have another checksum than the trainer's",
                value=checksum,
                current=f"{self._crc:08x}",
            )

    async def finish(self, version: int) -> None:
        """All weights have come."""
        if self._in_session:
            await self._surface.finish_update()
            self._in_session = False
        if calls.WEIGHT_VERSION in self._surface.offers:
            await self._surface.set_version(str(version))
        self._crc, self._before = 0, []

    async def abandon(self) -> None:
        """No more weights come."""
        if self._in_session:
            self._in_session = False
            # Nothing can be said of these weights any more; only the engine has to be ready for the next ones.
            with contextlib.suppress(TurnoutError):
                await self._surface.finish_update()
        self._crc, self._before, self.moved = 0, [], False

    async def _open_session(self, init: dict[str, Any]) -> None:
        if not self._initialised:
            await self._surface.init_transfer(init)
            self._initialised = True
        if not self._in_session and calls.WEIGHT_SESSIONS in self._surface.offers:
            await self._surface.start_update()
            self._in_session = True

    @staticmethod
    def _read_info(info_json: str) -> dict[str, Any]:
        try:
            info = json.loads(info_json or "{}")
        except ValueError:
            info = None
        if not isinstance(info, dict):
            raise invalid_argument("info_json", "a move is described by one JSON object")
        return info

    @staticmethod
    def _check_info(mover: str, info: dict[str, Any], size: int) -> None:
        if mover not in FIELDS:
            raise invalid_argument(
                "info_json", f"no mover {mover!r}; there are {', '.join(FIELDS)}", value=mover, reason="UNKNOWN_MOVER"
            )
        unknown = sorted(info.keys() - FIELDS[mover])
        if unknown:
            raise invalid_argument("info_json", f"mover {mover} knows no {unknown[0]!r}", value=unknown[0])
        if size and (mover != "file" or info):
            raise invalid_argument("size", f"mover {mover} takes no chunks as it is described here", value=size)
        crc32c = info.get("crc32c", "")
        if not (isinstance(crc32c, str) and (not crc32c or CRC32C.fullmatch(crc32c))):
            raise invalid_argument("info_json", "a CRC32C has 8 hexadecimal digits, small letters", value=crc32c)
        path = info.get("path")
        if not size and mover in ("file", "reload") and not (isinstance(path, str) and os.path.isabs(path)):
            raise invalid_argument("info_json", f"mover {mover} needs an absolute path, or chunks", value=path)
