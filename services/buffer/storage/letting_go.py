"""Letting go of a run that was deleted or replaced.

Invariant: it goes little by little, since to free all its groups at once would hold up every call; its payloads go in
any case, also if whoever waits for it gives up.
"""

from services.buffer.domain.run import Run
from services.buffer.storage.pauses import Pauses

# Payloads or groups between two looks at the time.
_PER_LOOK = 32


async def let_go(run: Run) -> None:
    """Forget what a run holds; nothing uses it any more."""
    pauses = Pauses()
    payloads = run.state.payloads
    try:
        while payloads.clear(_PER_LOOK):
            await pauses.breathe()
    finally:
        payloads.clear()
    for held in run.take_apart():
        while held:
            del held[-_PER_LOOK:]
            await pauses.breathe()
