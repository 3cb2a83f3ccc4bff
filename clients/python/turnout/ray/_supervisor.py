"""The actor of a member: keeps one service process running.

Invariants: the process is started with the actor, again whenever it ends, and never twice at a time; after `stop` it is
not started again. It imports nothing but the client,
which is installed where Ray's workers are: a user's own folder `services` cannot get in the way.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Final

from turnout.ray._member import ANSWER_S, NAMESPACE, Member, MemberState
from turnout.ray._process import ServiceProcess, command, environment
from turnout.ray._registrar import Registrar

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 3.0
"""Before a process that ended is started again. One that cannot start, as while the process before it still has the
port or the journal, costs little."""

GRACE_S: Final = 15.0
"""A little more than the grace a service gives its own calls."""


class Supervisor:
    """A detached, restartable actor. Its calls answer at once, except `stop`."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._host = _node_ip()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._process: ServiceProcess | None = None
        self._starts = 0
        self._last_end = ""
        self._registrar: Registrar | None = None
        os.environ.update(dict(self._member.environment))
        # The process is tied to this thread, which lives as long as the actor.
        threading.Thread(target=self._supervise, name="supervise", daemon=True).start()
        if self._member.replicas:
            self._registrar = Registrar(self._member, lambda: self.state().target, self._find_controller)
            threading.Thread(target=self._registrar.run, name="register", daemon=True).start()

    def member(self) -> Member:
        """What it was made for."""
        return self._member

    def state(self) -> MemberState:
        """How its process is."""
        with self._lock:
            process, starts, last_end = self._process, self._starts, self._last_end
        registrar = self._registrar
        return MemberState(
            name=self._member.name,
            host=self._host,
            node=_node_id(),
            target="" if process is None else process.target,
            pid=None if process is None else process.pid,
            supervisor_pid=os.getpid(),
            starts=starts,
            last_end=last_end,
            unregistered=() if registrar is None else registrar.unregistered,
            registration="" if registrar is None else registrar.problem,
        )

    def stop(self) -> None:
        """End the process in order, for good."""
        self._stopping.set()
        if self._registrar is not None:
            self._registrar.stop()
        with self._lock:
            process = self._process
        if process is not None:
            process.stop(GRACE_S)

    def _supervise(self) -> None:
        member = self._member
        host = f"[{self._host}]" if ":" in self._host else self._host
        arguments = command(member.service, ("--listen", f"{host}:{member.port}", *member.arguments))
        pause = FIRST_PAUSE_S
        while True:
            variables = environment(os.environ, dict(member.environment), keep_gpus=member.gpus > 0)
            with self._lock:
                if self._stopping.is_set():
                    return
                process = self._process = ServiceProcess(arguments, variables)
                self._starts += 1
            began = time.monotonic()
            code = process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            with self._lock:
                self._process = None
                self._last_end = "\n".join([f"ended with {how}", *process.last_lines])
            served = bool(process.target)
            print(f"turnout {member.name}: ended with {how} after {time.monotonic() - began:.1f} s", flush=True)
            pause = FIRST_PAUSE_S if served else min(2 * pause, LONGEST_PAUSE_S)
            if self._stopping.wait(pause):
                return

    def _find_controller(self) -> str:
        import ray

        try:
            actor = ray.get_actor(f"{self._member.deployment}/engine", namespace=NAMESPACE)
            state: MemberState = ray.get(actor.state.remote(), timeout=ANSWER_S)
        except (ValueError, ray.exceptions.RayError):
            return ""
        return state.target


def _node_ip() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())
