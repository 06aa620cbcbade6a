"""The launcher ``ray``: hosts that Ray places, as bundles of a placement group for each mesh.

Ray runs in a separate process (`_ray_driver/__main__.py`), a child of the process that keeps the job; the two talk over a pipe. Ray starts threads,
installs signal handlers, prints, and aborts its process when the cluster is gone. None of that may happen to the keeper.

RAY-1: placement groups and actors belong to that driver process, which ends with the keeper; Ray removes them when it has ended.
RAY-2: a waiting request is reported in Ray's own words; one that the cluster can never satisfy fails at once.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mesh_core import python_command
from mesh_core.plugins import ProbeResult, hookimpl
from mesh_launchers._contract import API_VERSION, HostSpec, LauncherPlugin, Phase, Place, Report
from mesh_launchers._durations import seconds
from mesh_launchers._host import HostProcess, tail, told

_DRIVER = "import runpy; runpy.run_module('mesh_launchers._ray_driver', run_name='__main__', alter_sys=True)"
_LAST_LINES = 12
_STOP_S = 30.0
_REACH_S = 10.0


@dataclass(frozen=True)
class RayOptions:
    """Options of the launcher ``ray``."""

    address: str | None = None
    """The cluster's address, such as ``"10.0.0.1:6379"``; by default ``RAY_ADDRESS``, or the cluster that this machine is a node of."""
    cpus: float = 1
    """Processors of each host, as Ray counts them; Ray also sets ``OMP_NUM_THREADS`` to this number."""
    gpus: float = 0
    """GPUs of each host. Ray sets ``CUDA_VISIBLE_DEVICES`` to those that it gives to the host."""
    memory: int | None = None
    """Bytes of memory that Ray sets aside for each host."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources of each host, such as ``{"highmem": 1}``."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that a host's node must have, such as ``{"ray.io/accelerator-type": "H100"}``."""
    strategy: Literal["STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK"] = "STRICT_SPREAD"
    """How Ray places the hosts of one mesh; by default each on a node of its own."""
    runtime_env: Mapping[str, Any] | None = None
    """Ray's runtime environment for the hosts: ``{"env_vars": {"NCCL_DEBUG": "INFO"}}``."""
    python: str | None = None
    """The interpreter of the hosts, with mesh-core of the script's version; by default the one that Ray's workers have there."""
    autoscaler: bool | None = None
    """Whether to wait for new nodes if the present ones can never satisfy a request; by default, whether Ray's autoscaler runs."""
    queue_timeout: float | str | None = None
    """Hosts that have waited for so long have failed, such as ``"2h"``; by default they wait forever."""
    start_timeout: float = 120.0
    """Seconds until a host's agent listens, once Ray has placed it."""
    listen: str = "0.0.0.0:0"
    """Where agents listen."""

    def __post_init__(self) -> None:
        """Check what Ray would only say later."""
        if self.queue_timeout is not None:
            seconds(self.queue_timeout, "queue_timeout")
        if self.strategy not in {"STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK"}:
            raise ValueError(
                f"strategy must be 'STRICT_SPREAD', 'SPREAD', 'PACK' or 'STRICT_PACK', got {self.strategy!r}"
            )
        for name, value in self.bundle().items():
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if not any(self.bundle().values()):
            raise ValueError("a host must ask for something: cpus, gpus, memory or resources")
        if self.address is not None and self.address.startswith("ray://"):
            raise ValueError(
                f"address {self.address!r} is for Ray Client, which is not supported: launch from a node of the cluster, and give its address "
                "without ray://"
            )

    def bundle(self) -> dict[str, float]:
        """Return what each host gets, in Ray's words."""
        memory = {} if self.memory is None else {"memory": float(self.memory)}
        asked = {"CPU": self.cpus, "GPU": self.gpus, **memory, **self.resources}
        return {name: float(value) for name, value in asked.items() if value}


class RayLauncher:
    """Starts agents in a Ray cluster; all hosts of a job have one driver process."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._drivers: dict[str, _Driver] = {}
        """By the cluster's address; one that has ended is replaced at the next start."""
        self._count = 0
        self._all: list[_Driver] = []

    async def start(self, options: RayOptions, hosts: Sequence[HostSpec]) -> None:
        """Begin to start hosts."""
        address = options.address or os.environ.get("RAY_ADDRESS") or "auto"
        driver = self._drivers.get(address)
        if driver is None or driver.has_ended:
            driver = self._drivers[address] = _Driver(self._place, address, self._count)
            self._count += 1
            self._all.append(driver)
        await driver.start(options, hosts)

    async def stop(self, numbers: Sequence[int]) -> None:
        """End hosts. What Ray has set aside for them is free again when all that were started together have ended."""
        await asyncio.gather(*[each.stop(numbers) for each in self._all])

    async def log(self, number: int, lines: int) -> str:
        """Return the last lines that a host's agent has written."""
        return _last_lines(_log(self._place, number), lines)

    async def renew(self, order: str) -> None:
        """Give all hosts new certificates."""
        await asyncio.gather(*[each.renew(order) for each in self._all])

    async def close(self) -> None:
        """End all hosts, and the drivers."""
        await asyncio.gather(*[each.close() for each in self._all])


def driver(job: str) -> list[str]:
    """Return the command of the process that talks with Ray for a job."""
    return python_command(_DRIVER, job)


class _Driver:
    """The process that talks with one Ray cluster, as the keeper sees it."""

    def __init__(self, place: Place, address: str, number: int) -> None:
        self._place = place
        self._address = address
        self._hosts: dict[int, HostSpec] = {}
        self._options: dict[int, RayOptions] = {}
        self._over: set[int] = set()
        """Hosts that have ended, and been reported."""
        self._ending: set[int] = set()
        self._environments: dict[int, Mapping[str, Any]] = {}
        self._nodes: dict[int, str] = {}
        self._failed: dict[int, str] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Task[None] | None = None
        self.has_ended = False
        self._process = HostProcess(self._heard, place.folder / f"ray{number}.log", place.silence)

    async def start(self, options: RayOptions, hosts: Sequence[HostSpec]) -> None:
        """Start hosts."""
        self._hosts |= {each.number: each for each in hosts}
        self._report([each.number for each in hosts], Phase.WAITING, "connecting to Ray")
        if self._starting is None:
            what = {"address": self._address, "job": self._place.job, "folder": str(self._place.folder)}
            words = driver(self._place.job)
            line = json.dumps(what).encode() + b"\n"
            self._starting = asyncio.ensure_future(self._process.start(words, line))
        await asyncio.shield(self._starting)
        self._options |= {each.number: options for each in hosts}
        limit = options.queue_timeout
        await self._say(
            do="start",
            options=asdict(options),
            bundle=options.bundle(),
            queue_timeout=None if limit is None else seconds(limit, "queue_timeout"),
            hosts=[self._told(each) for each in hosts],
        )

    def _told(self, host: HostSpec) -> dict[str, Any]:
        options = self._options[host.number]
        line = told(self._place, [host], address=options.listen, resources=_counted(options))
        return {"number": host.number, "name": host.name, "line": line.decode()}

    async def renew(self, order: str) -> None:
        """Give the hosts new certificates, also those that Ray has not placed yet."""
        left = [each for number, each in self._hosts.items() if number not in self._over | self._ending]
        if left and self._starting is not None and not self.has_ended:
            await asyncio.shield(self._starting)
            await self._say(do="renew", order=order, hosts=[self._told(each) for each in left])

    async def _say(self, **what: Any) -> None:
        await self._process.say(json.dumps(what))

    def _report(
        self, numbers: Iterable[int], phase: Phase, why: str = "", address: str | None = None
    ) -> None:
        for each in numbers:
            self._place.report(Report(each, phase, why, address, self._environments.get(each)))

    def _heard(self, what: Mapping[str, Any]) -> None:
        """Handle a message of the driver, or of the program of a host."""
        number = what.get("host")
        if number is None:
            self.has_ended = True
            lines = self._process.last_lines()
            for each in self._hosts.keys() - self._over - self._ending:
                self._fail(
                    each,
                    f"the process that talks with Ray has ended with status {what.get('ended')}\n{lines}",
                )
        elif number in self._over:
            pass  # it was on its way
        elif "waits" in what and number not in self._ending:
            self._report([number], Phase.WAITING, str(what["waits"]))
        elif "node" in what and "environment" not in what:
            self._nodes[number] = str(what["node"])
            self._report([number], Phase.STARTING)
        elif "environment" in what:
            self._environments[number] = what["environment"]
            self._report([number], Phase.STARTING)
        elif "address" in what and number not in self._ending:
            port = str(what["address"]).rpartition(":")[2]
            self._begin(self._reach(number, self._nodes[number], int(port)))
        elif "failed" in what:
            self._failed[number] = str(what["failed"])
        elif "gone" in what:
            if number in self._ending:
                self._end(number)
            else:
                lines = _last_lines(_log(self._place, number))
                why = self._failed.get(number) or str(what["gone"])
                self._fail(number, f"{why}\n{lines}" if lines else why)
        self._changed.set()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reach(self, number: int, node: str, port: int) -> None:
        """Report that a host runs, if this machine can connect to it; the script is here too."""
        try:
            async with asyncio.timeout(_REACH_S):
                _, writer = await asyncio.open_connection(node, port)
            writer.close()
        except (OSError, TimeoutError) as error:
            if number not in self._over | self._ending:
                why = str(error) or "no answer"
                self._fail(
                    number,
                    f"the script's machine cannot connect to it at {node}:{port}: {why}. Open the port, or name one that is open with listen=",
                )
                await self._say(do="end", hosts=[number])
            return
        if number not in self._over | self._ending:
            where = f"[{node}]" if ":" in node else node
            self._report([number], Phase.RUNNING, address=f"tcp://{where}:{port}")

    def _fail(self, number: int, why: str) -> None:
        self._over.add(number)
        self._report([number], Phase.FAILED, why.strip())

    def _end(self, number: int) -> None:
        self._over.add(number)
        self._report([number], Phase.ENDED)

    async def stop(self, numbers: Sequence[int]) -> None:
        """End hosts, and the process with the last of them."""
        mine = {each for each in numbers if each in self._hosts}
        self._ending |= mine
        if mine and not self._hosts.keys() - self._over - self._ending:
            await self.close()
        elif wanted := mine - self._over:
            await self._say(do="end", hosts=[*wanted])
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    while wanted - self._over and not self.has_ended:
                        self._changed.clear()
                        await self._changed.wait()
        for each in mine:
            self._end(each)

    async def close(self) -> None:
        """End all. Ray removes what a killed driver has left."""
        self._ending |= self._hosts.keys()
        if self._starting is not None:
            await asyncio.wait([self._starting])
        for task in self._tasks:
            task.cancel()
        await self._process.stop()
        self.has_ended = True
        for each in self._hosts.keys() - self._over:
            self._end(each)


def _counted(options: RayOptions) -> dict[str, float]:
    """Return the resources that a host states, for ``hosts.select``."""
    return {
        name: float(value) for name, value in {"cpus": options.cpus, "gpus": options.gpus}.items() if value
    }


def _log(place: Place, number: int) -> Path:
    return place.folder / f"{number}.log"


def _last_lines(path: Path, lines: int = _LAST_LINES) -> str:
    try:
        with path.open("rb") as file:
            return tail(file, lines)
    except FileNotFoundError:
        return ""


def _probe() -> ProbeResult[None]:
    # Not imported: that takes seconds.
    if importlib.util.find_spec("ray") is None:
        return ProbeResult.no(
            "Ray is not installed here",
            remedy="pip install 'mesh-launchers[ray]', in the version that the cluster runs",
        )
    return ProbeResult.yes()


RAY = LauncherPlugin(
    name="ray",
    api_version=API_VERSION,
    create=RayLauncher,
    options=RayOptions,
    probe=_probe,
    summary="nodes of a Ray cluster, by placement groups",
)


@hookimpl
def mesh_register_launchers() -> Iterable[LauncherPlugin]:
    """The plugin of this module."""
    yield RAY
