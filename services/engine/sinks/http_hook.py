"""Membership as a POST to a URL.

The body is JSON: `{"run_id", "incarnation", "version", "sessions_cleared", "members": [{"replica_id", "backend",
"endpoint", "role", "route"}]}`, roles and routes in lower case. Any status of 200 to 299 is an acceptance. Versions of
one incarnation rise; a receiver that got a higher one drops a lower one, which was delayed on its way.
"""

from __future__ import annotations

import ssl
from typing import Final

import httpx

from services.engine.sinks.base import Membership
from services.runtime.errors import unavailable

CONNECT_S: Final = 1.0
"""Wall seconds; the publisher bounds the whole push."""


class HttpHook:
    """A URL that takes memberships. `holds` is declared by whoever configures it; `tls` counts for https."""

    def __init__(self, url: str, holds: bool, tls: ssl.SSLContext) -> None:
        self.name = url
        self.holds = holds
        self._client = httpx.AsyncClient(verify=tls, timeout=httpx.Timeout(None, connect=CONNECT_S), trust_env=False)

    async def push(self, membership: Membership) -> None:
        body = {
            "run_id": membership.run_id,
            "incarnation": membership.incarnation,
            "version": membership.version,
            "sessions_cleared": membership.sessions_cleared,
            "members": [
                {
                    "replica_id": member.replica_id,
                    "backend": member.backend,
                    "endpoint": member.endpoint,
                    "role": member.role.value,
                    "route": member.route.value,
                }
                for member in membership.members
            ],
        }
        try:
            answer = await self._client.post(self.name, json=body)
        except httpx.HTTPError as error:
            raise unavailable("SINK_UNREACHABLE", f"{self.name}: {type(error).__name__}") from error
        if not answer.is_success:
            raise unavailable("SINK_REFUSED", f"{self.name} answered {answer.status_code}: {answer.text[:200]}")

    async def close(self) -> None:
        await self._client.aclose()
