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

    from mesh_core._common.credentials import Credentials

# Between two looks at what is to be told; signals end the wait at once.
_LOOK_S = 0.25


def _tell(line: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} mesh host: {line}\n")
    sys.stderr.flush()


def _heed_signals() -> tuple[list[int], dict[signal.Signals, Any]]:
    """A list in which signals that end an agent are put down, and what they did before."""
    ends: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        ends.append(number)

    ending = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        ending.append(signal.SIGHUP)  # its terminal has gone; under nohup it goes on
    return ends, {number: signal.signal(number, end) for number in ending}


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
) -> None:
    """Serve jobs on this machine until SIGTERM, SIGHUP or Ctrl-C, or until one has ended: what the ``mesh host`` command does.

    For the main thread, as signals end it.

    Args:
        address: where to listen, such as ``"tcp://0.0.0.0:7411"``; port 0 takes any.
        credentials: the host's credentials, or the folder that holds them.
        dial: a controller's address, for networks in which nobody can connect to this host.
        name: what errors and listings call the host; its network name if nothing is given.
        labels: what scripts select the host by, for example ``{"zone": "a"}`` (:meth:`HostMesh.select`).
        resources: the same with amounts, for example ``{"gpus": 8}``. Nobody checks or reserves them.
        once: serve one job, no other beside it, and return when it has ended.
        ready: told the address, once it listens.
        tell: told what people should know: jobs that begin and end, and who was refused.
    """
    if address is None and dial is None:
        raise ValueError("give an address to listen at, or the address of a controller to dial")
    if threading.current_thread() is not threading.main_thread():
        raise MeshError(
            "a host's agent must run in the main thread, because signals end it; start it in a process "
            "of its own"
        )
    from mesh_core._common.settings import current_settings, runtime_options
    from mesh_core._meshes.host_traits import check_labels, check_resources
    from mesh_core._meshes.spawning import interpreter_command
    from mesh_core._system.scratch import Scratch

    said_labels, said_resources = check_labels(labels), check_resources(resources)
    scratch = Scratch()
    try:
        server = HostServer(
            address,
            credentials=str(getattr(credentials, "path", credentials)),
            name=name or socket.gethostname(),
            python=interpreter_command(None),
            env=sorted(os.environ.items()),
            scratch=scratch.path,
            once=once,
            labels=sorted(said_labels.items()),
            resources=sorted(said_resources.items()),
            **runtime_options(current_settings()),
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
        while not ends:
            closed, lines = server.wait(_LOOK_S)
            for line in lines:
                tell(line)
            if closed:
                break
        if ends:
            tell(f"ends by {signal.Signals(ends[0]).name}, and with it all that runs here")
    finally:
        server.close()
        scratch.close()
        for number, handler in before.items():
            signal.signal(number, handler)
