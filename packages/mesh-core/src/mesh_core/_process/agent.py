"""A host's agent: what ``mesh host`` runs."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from mesh_core._common.errors import MeshError
from mesh_core._native import HostServer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType
    from typing import Never

    from mesh_core._common.credentials import Credentials

# How often to look for lines to log; signals end the wait at once.
_LOOK_S = 0.25


def _tell(line: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} mesh host: {line}\n")
    sys.stderr.flush()


def _heed_signals() -> tuple[list[int], dict[signal.Signals, Any]]:
    """Record the signals that end an agent in a list; return the list and the previous handlers."""
    ends: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        ends.append(number)

    ending = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        ending.append(signal.SIGHUP)  # its terminal is gone; under nohup it goes on
    return ends, {number: signal.signal(number, end) for number in ending}


def _serve(server: HostServer, ends: list[int], grace: float, tell: Callable[[str], object]) -> None:
    """Serve until a signal ends it, or until a job that was to be the only one has ended.

    With a grace period, the first SIGTERM only announces the end: jobs are notified, and have that long to leave.
    """
    leaves_at: float | None = None
    while True:
        if ends[:1] == [signal.SIGTERM] and grace and leaves_at is None:
            # Another signal, of any kind, ends it at once.
            ends.pop(0)
            leaves_at = time.monotonic() + grace
            server.leave(grace, "its agent was told to end by SIGTERM")
            tell(f"ends in {grace:g} s, or when nothing runs here any more; another SIGTERM ends it now")
        if ends:
            return
        left = _LOOK_S
        if leaves_at is not None:
            left = min(left, leaves_at - time.monotonic())
            if server.is_vacant or left <= 0:
                tell("ends: " + ("nothing runs here any more" if server.is_vacant else "its grace is over"))
                return
        closed, lines = server.wait(left)
        for line in lines:
            tell(line)
        if closed:
            return


def _fork_standby() -> tuple[int, int] | None:
    from mesh_core._process import standby

    return standby.begin()


def run_worker_loop_forever(
    address: str | None = None,
    *,
    credentials: Credentials | str | os.PathLike[str],
    dial: str | None = None,
    name: str | None = None,
    labels: Mapping[str, str] | None = None,
    resources: Mapping[str, float] | None = None,
    once: bool = False,
    ready: Callable[[str], object] | None = None,
    tell: Callable[[str], object] = _tell,
    standby: bool = False,
    **unknown: Never,
) -> None:
    """Serve jobs on this machine until SIGTERM, SIGHUP or Ctrl-C, or with ``once`` for one job: what ``mesh host`` does.

    Must run in the main thread, because signals end it. With the setting ``preemption_grace``, the first SIGTERM does not end it: it
    notifies the jobs that the host will be taken away (the event ``host_leaving``), and serves until no job has a process here, or
    the grace period is over.

    Args:
        address: where to listen, such as ``"tcp://0.0.0.0:7411"``; port 0 means any free port.
        credentials: the host's credentials, or the folder that holds them.
        dial: the address of a controller to connect to, for networks in which nobody can connect to this host.
        name: the name of the host in errors and listings; by default its network name.
        labels: what scripts select the host by, for example ``{"zone": "a"}`` (:meth:`HostMesh.select`).
        resources: amounts to select by, for example ``{"gpus": 8}``. Nobody checks or reserves them.
        once: serve only one job, and return when it has ended.
        ready: called with the address once the agent listens.
        tell: called with lines for people to read: which jobs begin and end, and who was refused.
        standby: fork this process before anything else, so that the first job's processes can be forked from that copy instead of a new
            interpreter, which is faster. For programs run by ``python -c`` that have done little but import, and hold nothing that
            workers must not have. Has no effect if threads are already running.
        **unknown: refused, with a hint at what was probably meant.
    """
    if unknown:
        from mesh_core._common.suggestions import unknown_option

        raise TypeError(
            unknown_option("run_worker_loop_forever", unknown, ("credentials", "dial", "labels", "once"))
        )
    if address is None and dial is None:
        raise ValueError("give an address to listen at, or the address of a controller to dial")
    if threading.current_thread() is not threading.main_thread():
        raise MeshError(
            "a host's agent must run in the main thread, because signals end it; start it in a process "
            "of its own"
        )
    from mesh_core._common.settings import current_settings, runtime_options
    from mesh_core._meshes.host_traits import check_labels, check_resources
    from mesh_core._system.interpreter import interpreter_words
    from mesh_core._system.scratch import Scratch

    said_labels, said_resources = check_labels(labels), check_resources(resources)
    spare = _fork_standby() if standby else None
    scratch = Scratch()
    try:
        server = HostServer(
            address,
            credentials=str(getattr(credentials, "path", credentials)),
            name=name or socket.gethostname(),
            python=interpreter_words(None),
            env=sorted(os.environ.items()),
            scratch=scratch.path,
            once=once,
            labels=sorted(said_labels.items()),
            resources=sorted(said_resources.items()),
            options=runtime_options(current_settings()),
            standby=spare,
        )
    except BaseException:
        scratch.close()
        raise
    ends, before = _heed_signals()
    try:
        if dial is not None:
            server.dial_out(dial)
            tell(f"offers itself to the controller at {dial}")
        if server.address is not None:
            if ready is not None:
                ready(server.address)
            tell(f"listens at {server.address}")
        _serve(server, ends, current_settings().preemption_grace, tell)
        if ends:
            tell(f"ends by {signal.Signals(ends[0]).name}, and with it all that runs here")
    finally:
        server.close()
        scratch.close()
        for number, handler in before.items():
            signal.signal(number, handler)
