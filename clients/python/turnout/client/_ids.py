"""Ids that cannot travel: pure.

Invariant: whether an id is allowed is for the services to say; only what no message can carry is refused here.
"""

from __future__ import annotations

import grpc

from turnout.client._errors import make_error


def check_text(field: str, text: str) -> None:
    """Raise InvalidArgument / BAD_ID naming the field if the text has a lone surrogate, which UTF-8 cannot carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        # ascii() shows it without raising again where the error is printed.
        raise make_error(
            grpc.StatusCode.INVALID_ARGUMENT,
            "BAD_ID",
            f"{field} is not valid Unicode: it has a lone surrogate",
            {"field": field, "value": ascii(text)},
            from_service=False,
        ) from None
