"""H52, the client's side: odd ids arrive as they are; what cannot travel is a clear error before anything is sent."""

from __future__ import annotations

import pytest

from tests.client.fakes import fake
from turnout.buffer.v1 import buffer_pb2
from turnout.client import BufferClient, InvalidArgument, SchedulerClient
from turnout.scheduler.v1 import scheduler_pb2
from turnout.trainer import TrainerHooks, TrainerSetup
from turnout.worker import RolloutWorker, WorkerSetup

ODD = ["组-0", "🚀", "e\u0301", "é", "שלום", " ", "a/b", "../x", "x" * 512]
LONE = "run-\ud800"


@pytest.mark.parametrize("name", ODD)
def test_h52_odd_ids_arrive_byte_for_byte(name: str) -> None:
    """An id that is trimmed or normalised on the way names another group."""
    with fake("buffer") as service, BufferClient(service.target) as client:
        client.calls.GetGroup(buffer_pb2.GetGroupRequest(run_id=name, partition=name, group_id=name))
        (request,) = service.requests("GetGroup")
        assert request.run_id == request.partition == request.group_id == name


def test_h52_a_lone_surrogate_is_refused_by_the_message_itself() -> None:
    """protobuf says what is wrong and where, before there is anything to send."""
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        buffer_pb2.GetRunRequest(run_id=LONE)


def test_h52_hooks_and_workers_name_the_field_with_the_lone_surrogate() -> None:
    """A UnicodeEncodeError from deep inside a training run does not say which of a dozen settings is wrong."""
    with fake("scheduler") as scheduler:
        setup = {
            "config": scheduler_pb2.RunConfig(),
            "scheduler": scheduler.target,
            "buffer": scheduler.target,
            "engine": scheduler.target,
        }
        with pytest.raises(InvalidArgument, match="run_id is not valid Unicode") as caught:
            TrainerHooks.open(TrainerSetup(run_id=LONE, **setup))  # type: ignore[arg-type]
        assert caught.value.reason == "BAD_ID"
        assert caught.value.metadata == {"field": "run_id", "value": ascii(LONE)}
        assert not scheduler.asked
    for field in ("run_id", "partition", "worker_id"):
        with pytest.raises(InvalidArgument, match=field):
            RolloutWorker(
                WorkerSetup(**{"run_id": "r1", "buffer": "x:1", field: LONE}),  # type: ignore[arg-type]
                generate_fn=lambda job: [],
            )


def test_h52_a_refused_message_does_not_harm_the_client() -> None:
    """The error is raised before the call; the connection must not notice."""
    with fake("scheduler") as service, SchedulerClient(service.target) as client:
        with pytest.raises(UnicodeEncodeError):
            client.calls.GetRun(scheduler_pb2.GetRunRequest(run_id=LONE))
        client.calls.GetRun(scheduler_pb2.GetRunRequest(run_id="r1"))
        assert len(service.asked) == 1
