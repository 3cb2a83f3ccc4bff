"""Why a service that speaks TLS is not understood: gRPC says for every reason that no address could be connected to.

Invariant: two handshakes at most, and no token is sent.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Final

from services.runtime.addresses import Address
from turnout.channels import SYSTEM, Security, host_of

_EXPIRED: Final = 10
_NOT_YET_VALID: Final = 9
_OTHER_NAME: Final = (62, 64)
"""OpenSSL's verification codes; of a name, and of an IP address."""

_SIGNER: Final = "give --ca: a file with the authority that signed it"
_ADVICE: Final = {
    _EXPIRED: "renew it there; the service takes the new file up without a restart",
    _NOT_YET_VALID: "look at the clocks of both machines: timedatectl",
    **dict.fromkeys(
        _OTHER_NAME, "name the host as its certificate does (subjectAltName), or say which name it bears: --server-name"
    ),
}


class _HungUpError(ConnectionError):
    """The service ended the connection when the handshake was over."""


async def tls_trouble(address: Address, target: str, security: Security, within_s: float) -> tuple[str, str] | None:
    """What is wrong about TLS with the service at `address`, and what to do; None if TLS is not what is wrong.

    `security`: how `target` was called. `within_s`: wall seconds that each handshake may take.
    """
    if address.path:
        return None
    try:
        await _handshake(address, _context(None), None, within_s)
    except (OSError, TimeoutError) as error:
        if not isinstance(error, _HungUpError):
            return _plain(target, security)
    if not security.is_tls(target):
        return "it speaks TLS, and was asked without", _SIGNER
    name = security.server_name or host_of(target) or address.host
    try:
        await _handshake(address, _context(security), name, within_s)
    except ssl.SSLCertVerificationError as error:
        advice = _ADVICE.get(error.verify_code, _SIGNER)
        return f"its certificate is refused: {error.verify_message.rstrip('.')}", advice
    except ssl.SSLError as error:
        return f"TLS fails: {error.reason or error}", _SIGNER
    except _HungUpError:
        # gRPC sends no alert.
        why = "refuses our certificate" if security.cert else "wants a certificate"
        text = f"it hangs up after the handshake, as one that {why}"
        return text, "give --cert and --key: of an authority that its --tls-client-ca names"
    except (OSError, TimeoutError):
        return None
    return None


def _plain(target: str, security: Security) -> tuple[str, str] | None:
    if not security.is_tls(target):
        return None
    return "it does not speak TLS, and was asked to", "start it with --tls-cert and --tls-key, or ask without --ca"


def _context(security: Security | None) -> ssl.SSLContext:
    """That of a caller who looks as `security` does; None: one who takes any certificate."""
    if security is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        own = None if security.ca in (None, SYSTEM) else security.ca
        context = ssl.create_default_context(cafile=own)
        if security.cert is not None and security.key is not None:
            context.load_cert_chain(security.cert, security.key, password="")
    context.set_alpn_protocols(["h2"])
    return context


async def _handshake(address: Address, context: ssl.SSLContext, name: str | None, within_s: float) -> None:
    """Shake hands, and wait for the first byte. Raises OSError (ssl.SSLError and _HungUpError are), TimeoutError."""
    async with asyncio.timeout(within_s):
        reader, writer = await asyncio.open_connection(
            address.host, address.port, ssl=context, server_hostname=name or ""
        )
        try:
            # In TLS 1.3 the service judges our certificate after the handshake; what it sends first tells.
            if not await reader.read(1):
                raise _HungUpError
        finally:
            writer.close()
