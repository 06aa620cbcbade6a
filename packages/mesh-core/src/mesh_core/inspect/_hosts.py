"""The hosts of a job, and what their agents report about their processes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mesh_core._common.codes import Question
from mesh_core._common.errors import MeshError
from mesh_core.inspect._ask import ROOT, Addr, addr_of, ask, hear, put, split_title

if TYPE_CHECKING:
    from mesh_core._process.process import Process

_AGENTS_SHARE = 0.4
"""The share of the timeout that agents may use; the rest is for their processes."""


def agent(host: int) -> Addr:
    """Return the address of a host's agent; the controller is the agent of host 0."""
    return 0, host, host


def pids(process: Process, addrs: Iterable[Addr], timeout: float) -> dict[Addr, int]:
    """Ask agents for the pids of processes on any host; processes that are gone are left out."""
    agents = dict.fromkeys(agent(addr[2]) for addr in addrs)
    told = ask(process, Question.TREE, agents, time.monotonic() + timeout) if agents else {}
    return {
        addr_of(who): pid
        for answer in told.values()
        for who, _, pid, *_ in answer["procs"]
        if pid is not None
    }


def stopped(process: Process, pids: Mapping[Addr, int], timeout: float) -> set[Addr]:
    """Return those processes on other hosts that a signal has stopped."""
    agents = dict.fromkeys(agent(addr[2]) for addr in pids)
    told = ask(process, Question.USAGE, agents, time.monotonic() + timeout) if agents else {}
    states = {(answer["host"], pid): used[0] for answer in told.values() for pid, used in answer["procs"]}
    return {addr for addr, pid in pids.items() if states.get((addr[2], pid)) in ("T", "t")}


@dataclass
class Host:
    """What is known about one host."""

    number: int
    name: str
    state: str
    pid: int | None = None
    address: str = ""
    why: str = ""
    told: dict[str, Any] | None = None
    """Its resource usage as reported by its agent; ``None`` for this host, where the kernel is asked directly."""
    used: dict[int, list[Any]] = field(default_factory=dict)
    """The usage of its processes, by pid."""


@dataclass
class Tree:
    """All hosts and processes, and the latest failures."""

    hosts: dict[int, Host]
    titles: dict[int, tuple[str, dict[str, int]]]
    procs: list[Any]
    failures: list[str]
    fork_servers: dict[int, list[Any]] = field(default_factory=dict)
    """By host: the pid of each, how many workers it has, the module that it is importing, and those that it has imported."""

    def host_name(self, number: int) -> str:
        """Return a host's display name."""
        host = self.hosts.get(number)
        return host.name if host is not None and host.name else f"host {number}"


def look(process: Process, timeout: float, *, pss: bool) -> tuple[Tree, float]:
    """Ask the controller for the hosts and their agents for the rest; return both and the deadline for further questions.

    A host that is unreachable or silent is reported as such and does not delay the others.
    """
    deadline = time.monotonic() + timeout
    told = ask(process, Question.TREE, {ROOT: None}, deadline).get(ROOT)
    if told is None:
        raise MeshError(
            f"the controller did not answer within {timeout} s, and only it knows all processes. "
            "It may be stopped by a signal or very busy. Try a longer timeout"
        )
    here = process.identity.host_no
    root_name = process.identity.host if here == 0 else process.name_of_host(0)
    hosts = {0: Host(0, root_name, "running")}
    for number, state, pid, name, address, why in told.get("hosts", ()):
        hosts[number] = Host(number, name, state, pid or None, address, why)
    others = [host for host in hosts.values() if host.number != 0 and host.state in ("running", "suspect")]
    agents: dict[Addr, int | None] = {agent(host.number): None for host in others}
    foreign = {addr: None for addr in (ROOT, *agents) if addr[2] != here}
    soon = time.monotonic() + _AGENTS_SHARE * max(0.0, deadline - time.monotonic())
    trees, usage = (
        put(process, Question.TREE, agents),
        put(process, Question.SHARES if pss else Question.USAGE, foreign),
    )
    heard = {ROOT: told, **hear(trees, agents, soon)}
    used = hear(usage, foreign, soon)
    found = Tree(hosts, {}, [], told["failures"])
    for host in hosts.values():
        answer = heard.get(agent(host.number))
        if answer is None:
            if host.state in ("running", "suspect"):
                host.state = "silent"
            continue
        found.procs += answer["procs"]
        found.fork_servers[host.number] = answer.get("fork_servers", [])
        found.titles |= {mesh: split_title(title) for mesh, title in answer["titles"]}
        host.told = used.get(agent(host.number))
        if host.told is None and host.number != here:
            host.state = "silent"
        if host.told is not None:
            host.name = host.told["name"] or host.name
            host.used = dict(host.told["procs"])
    return found, deadline
