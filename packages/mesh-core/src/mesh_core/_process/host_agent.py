"""A host's agent as a child process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh_core._common.errors import MeshError
from mesh_core._common.private_folders import temporary_folder
from mesh_core._system.interpreter import python_command

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from mesh_core._common.credentials import Credentials

_SERVE = """
import json, os, signal, sys, threading
from mesh_core import run_worker_loop_forever

def end_with_parent():
    # The parent never writes, so this returns when the parent is gone, however it went.
    os.read(0, 1)
    # Not SIGTERM, after which it might wait for jobs to leave.
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=end_with_parent, daemon=True).start()
run_worker_loop_forever(
    **json.loads(sys.argv[1]), ready=lambda address: print("tcp://" + address, flush=True)
)
"""


class HostAgent:
    """The agent of a host, like ``mesh host``, in a process of its own on this machine: for launchers and tests.

    >>> import tempfile
    >>> from mesh_core import Credentials, HostAgent, attach_to_workers, shutdown
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     job = Credentials.new(f"{folder}/job")
    ...     _ = job.issue_host(f"{folder}/host")
    ...     with HostAgent(f"{folder}/host", name="first") as agent:
    ...         hosts = attach_to_workers([agent.address], credentials=job)
    ...         hosts.initialized.get(timeout=30)
    ...         hosts.names
    ...         _ = shutdown()
    ['first']

    It ends with the process that started it, and so does everything that runs on that host.

    Args:
        credentials: the host's credentials, or the folder that holds them.
        listen: where to listen; port 0 means any free port.
        name: the name of the host in errors and listings; by default its network name.
        labels: what scripts select the host by, for example ``{"zone": "a"}`` (:meth:`HostMesh.select`).
        resources: amounts to select by, for example ``{"gpus": 8}``. Nobody checks or reserves them.
        once: serve a single job, and end when it has ended.
        env: changes to the environment of this process.
        python: the interpreter to run; by default the one that runs this script. It must have mesh_core.
        log: a file to which the agent's output is appended; by default a temporary one.
    """

    def __init__(
        self,
        credentials: Credentials | str | os.PathLike[str],
        *,
        listen: str = "127.0.0.1:0",
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        resources: Mapping[str, float] | None = None,
        once: bool = False,
        env: Mapping[str, str] | None = None,
        python: str | None = None,
        log: str | os.PathLike[str] | None = None,
    ) -> None:
        from mesh_core._meshes.host_traits import check_labels, check_resources

        self._told: dict[str, Any] = {
            "address": listen,
            "credentials": str(getattr(credentials, "path", credentials)),
            "name": name,
            "labels": check_labels(labels),
            "resources": check_resources(resources),
            "once": once,
        }
        self._env = {**os.environ, **(env or {})}
        self._python = python
        self._log_file = None if log is None else Path(log)
        self._maker = os.getpid()
        self._process: subprocess.Popen[str] | None = None
        self._address = ""

    def start(self, timeout: float = 60.0) -> Self:
        """Start the agent and wait until it listens."""
        self.launch()
        try:
            self.wait_until_ready(timeout)
        except BaseException:
            self.stop()
            raise
        return self

    def launch(self) -> None:
        """Start the agent without waiting, so that several can start at the same time."""
        if self.is_running:
            raise MeshError(f"cannot start {self!r}: it is running. Stop it first.")
        self._close()
        if self._log_file is None:
            file, name = tempfile.mkstemp(prefix="mesh-agent-", suffix=".log", dir=temporary_folder())
            os.close(file)
            self._log_file = Path(name)
            # Kept as long as this object: the log can be read after the agent's end.
            weakref.finalize(self, self._log_file.unlink, missing_ok=True)
        with self._log_file.open("a") as log:
            self._process = subprocess.Popen(
                python_command(_SERVE, json.dumps(self._told), python=self._python),
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def wait_until_ready(self, timeout: float = 60.0) -> str:
        """Wait until the agent listens, and return its address."""
        import select

        process = self._started()
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], timeout)
        line = process.stdout.readline().strip() if ready else ""
        if not line:
            if ready:
                # Its output has ended, and so will the process.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LAST_S)
            ended = process.poll()
            how = (
                f"exited with status {ended}" if ended is not None else f"does not listen after {timeout:g} s"
            )
            raise MeshError(f"{self!r} {how}; it has written:\n{self.log()}")
        self._address = line
        # A restart uses the same address, where others look for it.
        self._told["address"] = line.removeprefix("tcp://")
        return line

    @property
    def address(self) -> str:
        """The address at which it listens, for :func:`attach_to_workers`."""
        if not self._address:
            raise MeshError(f"{self!r} does not listen yet; start() it first")
        return self._address

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._started().pid

    @property
    def is_running(self) -> bool:
        """Whether its process is running."""
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """Return what the agent has written so far."""
        return "" if self._log_file is None else self._log_file.read_text()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the agent's end, and return its exit status, negative for a signal. Raises ``TimeoutError``."""
        try:
            return self._started().wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self!r} has not ended within {timeout:g} s") from None

    def send_signal(self, number: int) -> None:
        """Send the agent a signal. Returns once SIGKILL has ended it, or SIGSTOP has stopped all its threads."""
        process = self._started()
        process.send_signal(number)
        if number == signal.SIGKILL:
            process.wait()
        elif number in (signal.SIGSTOP, signal.SIGTSTP):
            _wait_stopped(process)

    def terminate(self) -> None:
        """Send SIGTERM without waiting: the agent ends in order, or first lets jobs leave (the setting ``preemption_grace``)."""
        self._end_by(signal.SIGTERM)

    def _end_by(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            # It may be stopped by a signal.
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(number)

    def stop(self, timeout: float = 10.0) -> None:
        """End the agent and all that runs on its host; kill it if it has not ended after ``timeout`` seconds."""
        self._end_by(signal.SIGINT)
        if self._process is not None:
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._close()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise MeshError(f"{self!r} is not started; start() it first")
        return self._process

    def _close(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        # A forked copy leaves the agent to its parent.
        if self._maker == os.getpid():
            self.stop()

    def __repr__(self) -> str:
        name = f"host agent {self._told['name']!r}" if self._told["name"] else "host agent"
        return f"<{name} at {self._address}>" if self._address else f"<{name}>"


_LAST_S = 10.0
_STAND_STILL_S = 10.0


def _wait_stopped(process: subprocess.Popen[str]) -> None:
    """Wait until no thread of a process runs: a signal is sent long before the last thread has stopped."""
    until = time.monotonic() + _STAND_STILL_S
    while process.poll() is None and not _stands_still(process.pid):
        if time.monotonic() > until:
            raise MeshError(
                f"process {process.pid} was sent SIGSTOP, and is still running after {_STAND_STILL_S:g} s"
            )
        time.sleep(0.001)


def _stands_still(pid: int) -> bool:
    stopped = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (thread / "stat").read_text().rpartition(") ")[2][:1] not in ("T", "t"):
                return False
            stopped += 1
    return stopped > 0
