"""The files of TLS that settings name: there, readable, a pair, and valid for a while.

Invariant: the private key is read to try it, and nothing of it is ever shown.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from services.doctor.finding import Finding, ok, problem, warning

SOON_S: Final = 14 * 86_400.0
"""Two weeks are enough to renew a certificate by hand."""

_DAY_S: Final = 86_400.0
_RENEW: Final = "renew it; a service takes the new file up without a restart"


def check_pair(cert: Path, key: Path, now: float) -> Finding:
    """A certificate with its key, at unix time `now`."""
    subject = str(cert)
    try:
        told = _handshake(cert, key)
    except OSError as error:
        # ssl.SSLError is one, too.
        if getattr(error, "reason", None) == "CERTIFICATE_VERIFY_FAILED":
            return problem("certificate", subject, str(getattr(error, "verify_message", error)), _RENEW)
        text = f"cannot be used with {key}: {getattr(error, 'reason', None) or error.strerror or error}"
        return problem("certificate", subject, text, "give a PEM file with the certificate, and its own private key")
    return _expiry(subject, told, now)


def check_authorities(path: Path, now: float) -> Iterator[Finding]:
    """A file of authorities, at unix time `now`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path)
    except OSError as error:
        text = f"cannot be read: {getattr(error, 'reason', None) or error.strerror or error}"
        yield problem("certificate", str(path), text, "give a PEM file with the certificates of the authorities")
        return
    for told in context.get_ca_certs():
        yield _expiry(str(path), told, now)


def _expiry(subject: str, told: Any, now: float) -> Finding:
    left = ssl.cert_time_to_seconds(told["notAfter"]) - now
    name = _name(told)
    if left < 0:
        return problem("certificate", subject, f"{name} expired {told['notAfter']}", _RENEW)
    if left < SOON_S:
        return warning("certificate", subject, f"{name} expires in {left / _DAY_S:.0f} days", _RENEW)
    return ok("certificate", subject, f"{name} is valid for {left / _DAY_S:.0f} days")


def _name(told: Any) -> str:
    alternatives = [value for _, value in told.get("subjectAltName", ())]
    if alternatives:
        return ", ".join(alternatives)
    fields = {key: value for group in told.get("subject", ()) for key, value in group}
    return str(fields.get("commonName", "it"))


def _handshake(cert: Path, key: Path) -> Any:
    """What the certificate says, told by a handshake in memory: the standard library reads none from a file."""
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # An encrypted key would ask the terminal for its password.
    shown.load_cert_chain(cert, key, password="")
    asked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asked.check_hostname = False
    asked.load_verify_locations(cert)
    asked.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    upwards, downwards = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = asked.wrap_bio(downwards, upwards)
    server = shown.wrap_bio(upwards, downwards, server_side=True)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return client.getpeercert()
