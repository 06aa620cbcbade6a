"""The process that talks with a Ray cluster for the launcher ``ray``: Ray's driver, which owns the placement groups and the actors.

Commands come as lines of JSON on its standard input; what becomes of each host goes to its standard output, in the line format of `_program.py`.
When its input ends, it ends all hosts. However it ends itself, Ray kills its actors, and each host ends with its actor (RAY-1).

It runs as ``__main__``, so that Ray pickles the actor's class by value: nodes need mesh-core, but not mesh-launchers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any, TextIO

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError, RuntimeEnvSetupError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mesh_core import python_command
from mesh_launchers._host import program

POLL_S = 1.0
HEAR_S = 20.0
"""An actor with nothing to tell answers after this time, so that no call waits forever for an actor that is gone."""
CONNECT_S = 120.0
REACH_S = 10.0
END_S = 9.0
"""Longer than an agent takes to end in order."""
KEPT = 10_000
"""Lines that an actor keeps while the driver does not ask for them."""
OWN = ("RAY_JOB_ID", "RAY_RAYLET_PID", "SPT_NOENV", "PYTHONBREAKPOINT")
"""Variables that Ray sets for its own workers, which hosts must not inherit."""


class MeshHost:
    """The actor of one host: it runs the host's program as a child, and passes on what that says."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: list[tuple[str, str]] = []
        self._first = 0
        """The number of the first event that is kept."""
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def begin(self, python: str | None, words: list[str], line: bytes) -> dict[str, str]:
        """Start the program, once even if called twice; returns the node's address, or why it could not be started."""
        with self._changed:
            if self._process is None and not self._ended:
                python = python or sys.executable
                try:
                    # In its own session: Ray kills the process group of an actor, and with it what removes the credentials. The program ends with its input.
                    self._process = subprocess.Popen(
                        [python, *words],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        start_new_session=True,
                        env={name: value for name, value in os.environ.items() if name not in OWN},
                    )
                except OSError as error:
                    return {"failed": f"{error}: name an interpreter that is there with python="}
                threading.Thread(target=self._watch, args=[self._process], daemon=True).start()
                self._write(line)
        return {"node": ray.util.get_node_ip_address()}

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        readers = [
            threading.Thread(target=self._read, args=each, daemon=True)
            for each in ((process.stdout, "said"), (process.stderr, "wrote"))
        ]
        for each in readers:
            each.start()
        status = process.wait()
        for each in readers:
            # Something strange may have its output still.
            each.join(5)
        self._tell("over", str(status))

    def _read(self, pipe: Any, kind: str) -> None:
        for line in pipe:
            self._tell(kind, line.decode(errors="replace"))

    def _tell(self, kind: str, text: str) -> None:
        with self._changed:
            self._events.append((kind, text))
            if len(self._events) > KEPT and self._events[0][0] == "wrote":
                del self._events[0]
                self._first += 1
            self._changed.notify_all()

    def hear(self, after: int) -> tuple[int, list[tuple[str, str]]]:
        """Return the events from a number on, and the number of the next; those before are forgotten."""
        with self._changed:
            del self._events[: max(0, after - self._first)]
            self._first = max(self._first, after)
            self._changed.wait_for(lambda: self._events, HEAR_S)
            return self._first + len(self._events), list(self._events)

    def say(self, text: bytes) -> None:
        """Write to the program."""
        with self._changed:
            self._write(text)

    def _write(self, text: bytes) -> None:
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.write(text)
                self._process.stdin.flush()
            except OSError:
                pass  # it has ended

    def end(self) -> None:
        """End the program, and all that runs on the host; returns when it has ended."""
        with self._changed:
            self._ended = True
            process = self._process
            if process is None or process.stdin is None:
                return
            try:
                process.stdin.close()
            except OSError:
                pass
        process.wait()


class Refused(Exception):
    """Ray will not place a group."""


class Host:
    """One host, as the driver knows it."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.number: int = told["number"]
        self.name: str = told["name"]
        self.line: str = told["line"]
        self.bundle = -1
        self.actor: Any = None
        self.has_begun = False
        self.task: asyncio.Task[None] | None = None
        self.is_over = False


class Group:
    """The hosts of one placement group."""

    def __init__(self, driver: Driver, key: str, told: Mapping[str, Any], name: str, count: int) -> None:
        self._driver = driver
        self.key = key
        self._name = name
        self.options: Mapping[str, Any] = told["options"]
        self.resources: Mapping[str, float] = told["bundle"]
        self._timeout: float | None = told["queue_timeout"]
        self.free = list(range(count))
        """Bundles without a host."""
        self.hosts: set[Host] = set()
        self._count = count
        self._placing: asyncio.Task[PlacementGroup] | None = None
        self._made: Any = None

    def add(self, host: Host) -> None:
        host.bundle = self.free.pop(0)
        self.hosts.add(host)

    async def placed(self) -> PlacementGroup:
        """Return the group when Ray has placed all of it; raises :class:`Refused`."""
        if self._placing is None or self._placing.done():
            self._placing = asyncio.create_task(self._place())
        return await asyncio.shield(self._placing)

    async def _place(self) -> PlacementGroup:
        """Look at what Ray says of it, again and again, until it has been placed (RAY-2)."""
        began, hopeless = time.monotonic(), 0
        if self._made is None:
            labels = self.options["labels"]
            selectors = {"bundle_label_selector": [dict(labels)] * self._count} if labels else {}
            self._made = await asyncio.to_thread(
                placement_group,
                [dict(self.resources)] * self._count,
                strategy=self.options["strategy"],
                name=self._name,
                **selectors,
            )
        made = self._made
        while not await asyncio.to_thread(made.wait, POLL_S):
            table = await asyncio.to_thread(placement_group_table, made)
            state, why = table.get("state", "?"), table.get("stats", {}).get("scheduling_state", "")
            nodes = [each for each in await asyncio.to_thread(ray.nodes) if each["Alive"]]
            # Twice, as a node may just be joining. And not by Ray's word alone: it calls five nodes enough for STRICT_SPREAD of five, even if one has no CPU.
            hopeless = hopeless + 1 if why == "INFEASIBLE" or not self._fits(nodes) else 0
            text = f"{state}: {why}, {self._asked()}; {await asyncio.to_thread(_offered, nodes)}"
            if hopeless > 1:
                if not await asyncio.to_thread(self._more_may_come):
                    raise Refused(
                        f"Ray cannot place it, {text}. No autoscaler is there that would add nodes: ask for less, or for another strategy= than "
                        f"{self.options['strategy']!r}"
                    )
                text = f"{text}; waiting for the autoscaler to add nodes"
            waited = time.monotonic() - began
            if self._timeout is not None and waited > self._timeout:
                raise Refused(f"it has waited {waited:.0f} s (queue_timeout) for Ray, {text}")
            for each in self.hosts:
                if each.actor is None:
                    self._driver.say(each, waits=text)
        return made

    def _fits(self, nodes: Sequence[Mapping[str, Any]]) -> bool:
        """Whether these nodes could hold the group if they had nothing else."""
        rooms = [
            min(int(each["Resources"].get(name, 0) // amount) for name, amount in self.resources.items())
            for each in nodes
            if _has_labels(each["Labels"], self.options["labels"])
        ]
        match self.options["strategy"]:
            case "STRICT_SPREAD":
                return sum(room > 0 for room in rooms) >= self._count
            case "STRICT_PACK":
                return max(rooms, default=0) >= self._count
        return sum(rooms) >= self._count

    def _asked(self) -> str:
        return f"asked for {self._count} x {_shown(self.resources)}, {self.options['strategy']}" + (
            f", on nodes with {self.options['labels']}" if self.options["labels"] else ""
        )

    def _more_may_come(self) -> bool:
        given = self.options["autoscaler"]
        return _has_autoscaler() if given is None else bool(given)

    async def leave(self, host: Host) -> None:
        """Have a host no longer; without any, Ray has what was set aside again."""
        if host in self.hosts:
            self.hosts.discard(host)
            self.free.append(host.bundle)
        if not self.hosts:
            self._driver.groups.discard(self)
            if self._placing is not None:
                self._placing.cancel()
                await asyncio.wait([self._placing])
            if self._made is not None:
                made, self._made = self._made, None
                with suppress(RayError, ValueError):
                    await asyncio.to_thread(remove_placement_group, made)


class Driver:
    """All hosts that this process has."""

    def __init__(self, job: str, folder: Path, out: TextIO) -> None:
        self._job = job
        self._folder = folder
        self._out = out
        self._hosts: dict[int, Host] = {}
        self._of: dict[int, Group] = {}
        self.groups: set[Group] = set()
        self._count = 0
        self._order = b""
        """What hosts were told last; those that begin meanwhile are told it too."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._program = program()
        self._actor = ray.remote(max_concurrency=8, max_restarts=0, max_task_retries=0)(MeshHost)

    def say(self, host: Host, **what: Any) -> None:
        """Tell the keeper."""
        self._out.write(f"{host.number}:={json.dumps(what)}\n")
        self._out.flush()

    async def run(self, inbox: asyncio.Queue[bytes]) -> None:
        """Do what is asked, until the end of what can be asked."""
        while line := await inbox.get():
            if not line.strip():
                # The keeper is there, as hosts have to hear now and then.
                for each in self._hosts.values():
                    if each.has_begun and not each.is_over:
                        each.actor.say.remote(b"\n")
                continue
            what = json.loads(line)
            if what["do"] == "start":
                self._start(what)
            elif what["do"] == "renew":
                self._renew(what)
            else:
                self._begin(self._end([self._hosts[each] for each in what["hosts"]]))
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._end([each for each in self._hosts.values() if not each.is_over])

    def _begin(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _start(self, told: Mapping[str, Any]) -> None:
        hosts = [Host(each) for each in told["hosts"]]
        key = json.dumps([told["options"], told["bundle"]], sort_keys=True)
        self._hosts |= {each.number: each for each in hosts}
        waiting = list(hosts)
        # Free bundles first: they stay reserved for this job, and Ray may have moved them to a new node.
        for group in self.groups:
            while group.key == key and group.free and waiting:
                group.add(waiting[0])
                self._of[waiting.pop(0).number] = group
        if waiting:
            group = Group(self, key, told, f"mesh-{self._job}-{os.getpid()}-{self._count}", len(waiting))
            self._count += 1
            self.groups.add(group)
            for each in waiting:
                group.add(each)
                self._of[each.number] = group
        for each in hosts:
            each.task = self._begin(self._live(each))

    def _renew(self, told: Mapping[str, Any]) -> None:
        """Give hosts new certificates: those that run by an order, the others from the start."""
        self._order = f"{told['order']}\n".encode()
        for each in told["hosts"]:
            host = self._hosts[each["number"]]
            host.line = each["line"]
            if host.has_begun and not host.is_over:
                host.actor.say.remote(self._order)

    async def _live(self, host: Host) -> None:
        """Have a host from its beginning to its end."""
        group = self._of[host.number]
        options = group.options
        try:
            made = await group.placed()
            async with asyncio.timeout(options["start_timeout"]) as limit:
                host.actor = self._actor.options(
                    name=f"mesh-{self._job}-{host.number}",
                    num_cpus=group.resources.get("CPU", 0),
                    num_gpus=group.resources.get("GPU", 0),
                    memory=group.resources.get("memory"),
                    resources={k: v for k, v in group.resources.items() if k not in {"CPU", "GPU", "memory"}},
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        made, placement_group_bundle_index=host.bundle
                    ),
                    runtime_env=options["runtime_env"],
                ).remote()
                # The credentials are an argument of a call, not of the actor's creation: Ray sends calls straight to the actor's process, and keeps creations in its tables.
                words = python_command(self._program, "mesh-host", host.name)[1:]
                begun = await self._call(host, "begin", options["python"], words, host.line.encode())
                if "failed" in begun:
                    raise Refused(begun["failed"])
                host.has_begun = True
                if self._order:
                    host.actor.say.remote(self._order)
                self.say(host, node=begun["node"])
                why = await self._listen(host, limit)
        except TimeoutError:
            why = f"it has not listened after {options['start_timeout']:g} s"
        except (Refused, RuntimeEnvSetupError) as error:
            why = str(error)
        except (RayError, OSError, ValueError, TypeError) as error:
            why = _words(error)
        await self._over(host)
        self.say(host, gone=why)

    async def _listen(self, host: Host, limit: asyncio.Timeout) -> str:
        """Pass on what the program says, until it has ended; returns why it has."""
        at = 0
        with (self._folder / f"{host.number}.log").open("a") as log:
            while True:
                at, events = await self._call(host, "hear", at)
                for kind, text in events:
                    if kind == "over":
                        status = int(text)
                        return (
                            f"it was ended by signal {-status}"
                            if status < 0
                            else f"it has ended with status {status}"
                        )
                    if kind == "wrote":
                        log.write(text)
                        log.flush()
                    else:
                        self._out.write(text)
                        self._out.flush()
                        if '"address"' in text:
                            limit.reschedule(None)

    async def _call(self, host: Host, method: str, *arguments: Any) -> Any:
        """Call the actor; a lost connection is no death, of which Ray speaks when it is one."""
        while True:
            try:
                return await getattr(host.actor, method).remote(*arguments)
            except ActorUnavailableError as error:
                sys.stderr.write(f"{host.name}: {error}\n")
                await asyncio.sleep(POLL_S)

    async def _over(self, host: Host) -> None:
        """Leave nothing of a host."""
        host.is_over = True
        if host.actor is not None:
            with suppress(RayError, ValueError):
                await asyncio.to_thread(ray.kill, host.actor)
        await self._of[host.number].leave(host)

    async def _end(self, hosts: Sequence[Host]) -> None:
        await asyncio.gather(*[self._end_one(each) for each in hosts])

    async def _end_one(self, host: Host) -> None:
        if host.is_over:
            return
        host.is_over = True
        if host.task is not None:
            host.task.cancel()
            await asyncio.wait([host.task])
        if host.has_begun:
            # Nor is one waited for whose node cannot be reached.
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(END_S):
                    await host.actor.end.remote()
        await self._over(host)
        self.say(host, gone="it was ended")


def _shown(resources: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{name}: {value:g}" for name, value in resources.items()) + "}"


def _has_labels(there: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether a node has labels; ``"!a"``, ``"in(a, b)"`` and the like are for Ray to decide."""
    return all(value.startswith(("!", "in(")) or there.get(name) == value for name, value in wanted.items())


def _offered(nodes: Sequence[Mapping[str, Any]]) -> str:
    """Say what the nodes have."""
    counted = [
        {
            name: value
            for name, value in each["Resources"].items()
            if not name.startswith(("node:", "object_store_memory", "memory")) and "_group_" not in name
        }
        for each in nodes
    ]
    have = [
        f"{each['NodeManagerAddress']} {_shown(has)}" for each, has in zip(nodes, counted, strict=True) if has
    ]
    free = ray.available_resources()
    left = {name: free.get(name, 0) for name in sorted({name for has in counted for name in has})}
    return f"the cluster has {', '.join(have) or 'nothing'}, of which {_shown(left)} are free"


def _has_autoscaler() -> bool:
    """Whether nodes are started as they are needed, as far as is known: an autoscaler's nodes are of types that its configuration names."""
    try:
        from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
        from ray.autoscaler.v2.sdk import get_cluster_status
        from ray.experimental.internal_kv import _internal_kv_get

        status = (
            json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS) or b"{}").get("autoscaler_report") or {}
        )
        kinds = {*(status.get("active_nodes") or {}), *(status.get("idle_nodes") or {})}
        kinds |= {*(status.get("pending_launches") or {})}
        now = get_cluster_status(ray.get_runtime_context().gcs_address)
        kinds |= {each.ray_node_type_name for each in [*now.active_nodes, *now.idle_nodes]}
    except Exception as error:  # noqa: BLE001 - these are Ray's own affairs, which change; users can say it with autoscaler=
        sys.stderr.write(f"whether an autoscaler is there is not known: {type(error).__name__}: {error}\n")
        return True
    # Where there is none, each node is a type of its own, called by the node. Nothing is reported while the head starts, or has lost its monitor.
    return not kinds or any(each and not each.startswith("node_") for each in kinds)


def _words(error: BaseException) -> str:
    """Return what Ray says of an error, without the numbers that nobody asks for."""
    if isinstance(error, RayTaskError):
        error = error.cause
    kept = [line.strip() for line in str(error).splitlines() if not line.startswith("\t")]
    text = " ".join(line for line in kept if line)
    return text if isinstance(error, RayError) else f"{type(error).__name__}: {text}"


class Inbox:
    """What comes on the standard input, read by a thread of its own, as Ray may block the others."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._lock = threading.Lock()
        self._is_connected = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()

    def begin(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            line = sys.stdin.buffer.readline()
            with self._lock:
                if self._loop is None:
                    if not line:
                        # Nothing has been started.
                        os._exit(0)
                    self._lines.append(line)
                else:
                    self._loop.call_soon_threadsafe(self._queue.put_nowait, line)
            if not line:
                return

    def connect(self) -> asyncio.Queue[bytes]:
        """Return the queue of lines, an empty one for the end, for the loop that runs."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
            for each in self._lines:
                self._queue.put_nowait(each)
        return self._queue


async def refuse(inbox: Inbox, out: TextIO, why: str) -> None:
    """Say why nothing can be started, to whom asks for it first."""
    queue = inbox.connect()
    while line := await queue.get():
        if line.strip():
            out.writelines(
                f"{each['number']}:={json.dumps({'gone': why})}\n"
                for each in json.loads(line).get("hosts", [])
            )
            out.flush()
            return


async def serve(inbox: Inbox, out: TextIO, job: str, folder: Path) -> None:
    """Work until the input ends."""
    await Driver(job, folder, out).run(inbox.connect())


def look_for(address: str) -> None:
    """Fail if nobody listens at an address, which Ray would look at for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()


def give_up(address: str) -> None:
    """End this process, where Ray does not say that it has failed; the keeper shows what is written last."""
    sys.stderr.write(f"the Ray cluster ({address}) has not answered within {CONNECT_S:g} s\n")
    sys.stderr.flush()
    os._exit(1)


def main() -> int:
    """Connect to the cluster, and work."""
    out = os.fdopen(os.dup(1), "w")
    # What Ray prints is for the log.
    os.dup2(2, 1)
    told = json.loads(sys.stdin.buffer.readline())
    inbox = Inbox()
    inbox.begin()
    watch = threading.Timer(CONNECT_S, give_up, [told["address"]])
    watch.daemon = True
    watch.start()
    try:
        look_for(told["address"])
        # Ray has the actors' processes import from the directory in which it was started.
        with chdir(told["folder"]):
            ray.init(address=told["address"], log_to_driver=False, logging_level=logging.ERROR)
        watch.cancel()
    except Exception as error:  # noqa: BLE001 - the reason why no host comes
        place = "on this machine" if told["address"] == "auto" else f"at {told['address']}"
        hint = "Start a node here (ray start --address=...), or name the cluster with address="
        asyncio.run(
            refuse(
                inbox, out, f"no Ray cluster can be used {place}: {_words(error).removesuffix('.')}. {hint}"
            )
        )
        return 1
    asyncio.run(serve(inbox, out, told["job"], Path(told["folder"])))
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
