"""Agents on the machines of a `Network`, and jobs that use them.

    site = Site(network(3), tmp_path, window=1.5)
    site.start(1, 2)
    job = site.job(0)
    job.ask("call", host=1)

`programs/job.py` is the controller; what it can be asked for are its `do_` methods.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster import HERE, Host, Network, Process, wait_until

import mesh_core
from mesh_core import Credentials

PORT = 7411
LIMIT = 45.0
PROGRAMS = HERE / "programs"
SERVE = (
    "import sys; from mesh_core import run_worker_loop_forever; "
    "run_worker_loop_forever(sys.argv[1] or None, credentials=sys.argv[2], dial=sys.argv[3] or None, name=sys.argv[4], "
    "ready=lambda address: print(address, flush=True))"
)


class Agent:
    """One agent, on a machine."""

    def __init__(self, host: Host, process: Process, log: Path, address: str) -> None:
        self.host = host
        self.process = process
        self.address = address
        self._log = log

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.real_pid

    def log(self) -> str:
        """What it has written."""
        return self._log.read_text()

    def works(self) -> list[int]:
        """The processes of its machine besides itself: those of the jobs."""
        return [pid for pid in self.host.pids() if pid != self.pid]


class Asked:
    """A request to a job that is under way."""

    def __init__(self, job: Job, number: int) -> None:
        self._job = job
        self._number = number

    def result(self, limit: float = LIMIT) -> Any:
        """Its answer."""
        return self._job.wait(self._number, limit)

    def answered(self) -> bool:
        """Whether the answer is there."""
        return self._job.answered(self._number)


class Job:
    """A controller, on a machine."""

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        self._log = log
        self._last = 0
        self._heard = b""
        self._answers: dict[int, dict[str, Any]] = {}

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.real_pid

    def log(self) -> str:
        """What it has written."""
        return self._log.read_text()

    def begin(self, what: str, **options: Any) -> Asked:
        """Send a request, and go on."""
        self._last += 1
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([self._last, what, options]).encode() + b"\n")
        self.process.stdin.flush()
        return Asked(self, self._last)

    def ask(self, what: str, **options: Any) -> Any:
        """Send a request, and wait for its answer."""
        return self.begin(what, **options).result()

    def failed_hosts(self) -> set[int]:
        """The ranks of the witnesses' processes that have ended, as the fault handler was told."""
        return {failure["rank"] for failure in self.ask("failures")}

    def wait(self, number: int, limit: float = LIMIT) -> Any:
        """Wait for the answer with this number."""
        end = time.monotonic() + limit
        while number not in self._answers:
            if not self._read(max(0, end - time.monotonic())):
                raise AssertionError(
                    f"no answer after {limit:g} s; the controller wrote: {self.log()[-2000:]}"
                )
        answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def answered(self, number: int) -> bool:
        """Whether the answer with this number has come, and nobody has taken it yet."""
        while number not in self._answers and self._read(0):
            pass
        return number in self._answers

    def _read(self, limit: float) -> bool:
        """Take the answers that come next; whether any byte came within the limit."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], limit)
        if not ready:
            return False
        came = os.read(self.process.stdout.fileno(), 1 << 16)
        if not came:
            raise AssertionError(f"the controller has ended; it wrote: {self.log()[-2000:]}")
        *lines, self._heard = (self._heard + came).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            self._answers[answer["number"]] = answer
        return True

    def end(self, within: float = LIMIT) -> int:
        """Have it end its job in good order; its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(within)


class Site:
    """The machines of a network, the credentials of one job, agents and controllers."""

    def __init__(
        self, network: Network, folder: Path, *, window: float = 2.0, fan_out: int = 16, bypass: int = 0
    ) -> None:
        self.network = network
        self.folder = folder
        self.window = window
        self.fan_out = fan_out
        # Large parts go through the agents, unless it says from which length on they do not.
        self.bypass = bypass
        self.credentials = Credentials.new(folder / "credentials")
        self.agents: dict[int, Agent] = {}
        self._count = 0

    @property
    def hosts(self) -> list[Host]:
        """The machines."""
        return self.network.hosts

    def start(self, *numbers: int) -> list[Agent]:
        """Start an agent on each of these machines, and wait until they listen."""
        begun = [(number, *self.launch(number)) for number in numbers]
        for number, process, log in begun:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], LIMIT)
            line = process.stdout.readline().decode().strip() if ready else ""
            if not line:
                raise AssertionError(f"the agent of host {number} does not listen: {log.read_text()}")
            self.agents[number] = Agent(self.hosts[number], process, log, line)
        return [self.agents[number] for number in numbers]

    def dialer(self, number: int, to: str) -> Agent:
        """Start an agent that listens nowhere, and dials a controller."""
        process, log = self.launch(number, dial=to)
        wait_until(lambda: "offers itself" in log.read_text(), "the agent does not dial")
        self.agents[number] = Agent(self.hosts[number], process, log, "")
        return self.agents[number]

    def launch(self, number: int, *, dial: str = "", credentials: Path | None = None) -> tuple[Process, Path]:
        """Start an agent, and do not wait."""
        host = self.hosts[number]
        folder = credentials or self.folder / f"host{number}"
        if not folder.exists():
            self.credentials.issue_host(folder)
        listen = "" if dial else f"{host.address}:{PORT}"
        return self._start(host, "agent", ["-c", SERVE, listen, folder, dial, host.name])

    def job(
        self,
        number: int = 0,
        *,
        workers: Sequence[int] | None = None,
        at: dict[int, str] | None = None,
        credentials: Path | None = None,
        program: str = "job.py",
        **options: Any,
    ) -> Job:
        """Start a controller on a machine, which attaches to the agents; returns when its actors are there.

        `at` are other addresses of some of the agents.
        """
        job = self.begin_job(
            number, workers=workers, at=at, credentials=credentials, program=program, **options
        )
        job.wait(0)
        return job

    def begin_job(
        self,
        number: int = 0,
        *,
        workers: Sequence[int] | None = None,
        at: dict[int, str] | None = None,
        credentials: Path | None = None,
        program: str = "job.py",
        **options: Any,
    ) -> Job:
        """Start a controller, and do not wait."""
        numbers = sorted(self.agents) if workers is None else workers
        addresses = [(at or {}).get(number, self.agents[number].address) for number in numbers]
        given = {"workers": addresses, "credentials": str(credentials or self.credentials.path), **options}
        process, log = self._start(
            self.hosts[number], "job", [PROGRAMS / program, json.dumps(given)], stdin=subprocess.PIPE
        )
        return Job(process, log)

    def report(self) -> str:
        """What all agents have written, for a test that fails."""
        return "\n".join(f"{agent.host.name}: {agent.log()[-1500:]}" for agent in self.agents.values())

    def _start(self, host: Host, kind: str, words: Sequence[Any], **options: Any) -> tuple[Process, Path]:
        self._count += 1
        log = self.folder / f"{kind}-{host.number}-{self._count}.log"
        env = {
            "PYTHONPATH": os.pathsep.join([str(PROGRAMS), str(Path(mesh_core.__file__).parents[1])]),
            "MESH_HEARTBEAT_TIMEOUT": str(self.window),
            "MESH_FAN_OUT": str(self.fan_out),
            "MESH_BYPASS_THRESHOLD": str(self.bypass),
        }
        with log.open("w") as written:
            process = host.start(
                [sys.executable, *words],
                env=env,
                cwd=self.folder,
                stdout=subprocess.PIPE,
                stderr=written,
                **options,
            )
        return process, log
