"""From what was loaded to a run that is hosted again.

Invariants: a run that is restored confirms nothing: of its hybrids nothing is seen yet, so it does not say TRAINER
while it has any; its trainer's lease begins anew, unless its opening was cut before it was answered: then nobody holds
one, and the OpenRun that is repeated need not wait.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from services.runtime.errors import data_loss
from services.scheduler.domain.config import PolicyFactory, RunConfig
from services.scheduler.domain.run import Run
from services.scheduler.hosted import HostedRun, Tools
from services.scheduler.opening import Opener, Opening, opening_of
from services.scheduler.storage.images import following_from, held_from, key_from, restore_run, undertaking_from
from services.scheduler.storage.loading import LoadedRun
from services.scheduler.trainer_calls import RESPONSES
from turnout.scheduler.v1.scheduler_pb2 import OpenRunRequest, OpenRunResponse


def restored(
    loaded: LoadedRun, tools: Tools, opener: Opener, create: PolicyFactory
) -> tuple[HostedRun, Opening, OpenRunResponse | None]:
    """The run with its peers, the OpenRun that opened it, and what that was answered. Raises DATA_LOSS."""
    try:
        return _restored(loaded, tools, opener, create)
    except (KeyError, ValueError, TypeError, AssertionError, DecodeError) as error:
        message = f"what is stored of the run {loaded.run_id!r} cannot be read: {error!r}"
        raise data_loss("JOURNAL_DAMAGED", message, run_id=loaded.run_id) from error


def _restored(
    loaded: LoadedRun, tools: Tools, opener: Opener, create: PolicyFactory
) -> tuple[HostedRun, Opening, OpenRunResponse | None]:
    state = loaded.state
    if not state.config_json or loaded.learner is None:
        raise ValueError("nothing says how it began")
    moment = tools.moment()
    config = RunConfig.of_json(state.config_json)
    run = Run(loaded.run_id, config, create, loaded.log, tools.clock.scale, moment)
    run.learner = loaded.learner
    run.goodput.replay(run.log)
    restore_run(run, state, loaded.places)
    for lend_id, cost_s in loaded.closed_lends.items():
        run.lends.close(lend_id, cost_s)
    for answer in loaded.answers.values():
        key = key_from(answer.key)
        run.order.restore(key, answer.content, RESPONSES[key.call].FromString(answer.response))
    opening = opening_of(OpenRunRequest.FromString(loaded.opened.request))
    hosted = opener.hosted(opening, run)
    hosted.answered = loaded.opened.response
    hosted.following = following_from(loaded.following)
    if state.HasField("undertaking"):
        hosted.undertaking = undertaking_from(state.undertaking)
    if run.closing:
        hosted.fence(hosted.closed())
    if run.is_open:
        tools.holdings.claim(run.run_id, held_from(loaded.places))
    if not hosted.answered:
        run.lease.lapse()
        return hosted, opening, None
    return hosted, opening, OpenRunResponse.FromString(hosted.answered)
