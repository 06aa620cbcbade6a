"""Why a job makes no progress: chains of waits are followed to those who wait for nobody, and what these do."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mesh_core.inspect import (
    ActorState,
    ProcStacks,
    ProcState,
    Snapshot,
    StackFrame,
    ThreadStack,
    Wait,
    Waits,
)
from mesh_supervision._collectives import At
from mesh_supervision._watching._meetings import Meeting, meetings

_LIBRARIES = ("/lib/python3", "/site-packages/", "/mesh_core/", "<frozen ")
_COLLECTIVE = ("/torch/distributed/", "/mesh_tensor/_special.py")
_MEET = frozenset(
    ("all_reduce", "all_gather", "all_to_all", "barrier", "broadcast", "reduce", "reduce_scatter", "gather", "scatter", "recv", "send",
     "allreduce", "allgather", "wait", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "monitored_barrier")
)  # fmt: skip
_POOLED = " in a pool, for "
_AGAIN_S = 0.3
"""How long after the first look the second is taken."""
_MOVING_S = 5.0
"""With all ranks in collectives, a handler that has run for less is assumed to make progress."""
_BLOCKED = re.compile(r"for (the policy of .*|the fault handler) to return")
"""How the script waits for its policies and its fault handler, one at a time."""
_NOTICES = "mesh-notices"
"""The thread that asks them."""
_BRIEF_S = 0.5
"""Waits that are shorter may be about to end."""


@dataclass(frozen=True)
class Culprit:
    """An actor or process that others wait for, and that waits for nobody that Mesh knows of."""

    who: str
    """The actor, as ``trainers[3]``, or the process."""
    proc: str
    text: str
    """A description of the problem."""
    line: str = ""
    """The line of the program where it is, if it is at one."""
    waiting: int = 0
    """How many wait for it, one behind the other."""
    chain: tuple[str, ...] = ()
    """The chain of the longest wait: each waits for the next."""
    stack: str = ""
    about: str = ""
    """The collective in which others wait for it, if they do so in one; two looks that differ in it saw two collectives."""

    def __str__(self) -> str:
        lines = [f"{self.who}: {self.text}"]
        if self.line:
            lines.append(f"  at {self.line}")
        if self.chain:
            lines.append(
                f"  {self.waiting} {'wait' if self.waiting != 1 else 'waits'} for it: {' -> '.join(self.chain)}"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Reason:
    """Why a job makes no progress."""

    culprits: tuple[Culprit, ...]
    """The most waited for first."""
    circles: tuple[str, ...] = ()
    """Actors that wait for each other, so that none can continue."""

    def __str__(self) -> str:
        if not self.circles and not self.culprits:
            return "nobody waits for long, and nothing runs: the job makes progress, or has nothing to do"
        return "\n".join([*self.circles, *map(str, self.culprits)])


def why(snap: Snapshot, waits: Waits, stacks: Iterable[ProcStacks]) -> Reason:
    """Explain why a job makes no progress, from what it reports about itself at one moment."""
    return _Search(snap, waits, stacks).run()


def confirmed(ask: Callable[[], Reason], wait: Callable[[float], object] = time.sleep) -> Reason:
    """Look, and if there is a culprit look again: one that makes progress in between is not at fault."""
    first = ask()
    if not first.culprits and not first.circles:
        return first
    wait(_AGAIN_S)
    second = ask()
    known = {(each.who, each.about) for each in first.culprits}
    culprits = tuple(each for each in second.culprits if (each.who, each.about) in known)
    return Reason(culprits, second.circles if first.circles else ())


class _Search:
    def __init__(self, snap: Snapshot, waits: Waits, stacks: Iterable[ProcStacks]) -> None:
        self.snap = snap
        self.circles = [circle for circle in waits.circles if circle.is_stuck]
        self.waits = [
            wait
            for wait in waits.waits
            # A process's collectives are read from the snapshot.
            if wait.seconds >= _BRIEF_S
            and wait.kind != "runtime"
            and not (wait.kind == "promise" and At.read(wait.text.removeprefix("for ")))
        ]
        self.stacks = {each.proc: each for each in stacks}
        self.procs = {proc.name: proc for proc in snap.procs}
        self.actors: dict[str, tuple[ProcState, ActorState]] = {}
        for proc in snap.procs:
            for actor in proc.actors:
                for name in (f"{actor.name}[{actor.rank}]", actor.name):
                    self.actors.setdefault(name, (proc, actor))
        self.by: dict[str, list[Wait]] = {}
        for wait in self.waits:
            self.by.setdefault(wait.waiter, []).append(wait)

    def run(self) -> Reason:
        """Follow all waits to their ends."""
        circles = []
        for circle in self.circles:
            around = " -> ".join([*(wait.waiter for wait in circle.waits), circle.waits[0].waiter])
            longest = max(wait.seconds for wait in circle.waits)
            told = [f"a cycle, in which none can continue, for {longest:.1f} s: {around}"]
            circles.append("\n".join([*told, *map(self._of_circle, circle.waits)]))
        inside = {wait.waiter for circle in self.circles for wait in circle.waits}
        ends: dict[str, list[list[str]]] = {}
        for wait in self.waits:
            if wait.waiter in inside:
                continue
            for chain in self._chains(wait.waiter, wait, inside):
                ends.setdefault(chain[-1], []).append(chain)
        found = [
            culprit
            for who, chains in ends.items()
            if who not in inside and (culprit := self._culprit(who, chains)) is not None
        ]
        if not found and not circles:
            found = self._unasked()
        if any(each.chain for each in found):
            # The submitter of a task waits for the pool, and the pool for the replica.
            found = [each for each in found if not (_POOLED in each.text and not each.waiting)]
        for meeting in meetings(self.snap):
            found, more = self._of_meeting(meeting, found)
            circles += more
        found += self._of_collectives(found)
        found.sort(key=lambda each: (-each.waiting, each.who))
        return Reason(tuple(found), tuple(circles))

    def _of_circle(self, wait: Wait) -> str:
        """Describe one wait of a cycle: in which endpoint, for which, and at which line."""
        proc, actor = self.actors.get(wait.waiter, (self.procs.get(wait.proc), None))
        line = _line(self._thread(proc, actor))
        return f"  {wait}" + (f", at {line}" if line else "")

    def _chains(self, start: str, wait: Wait, inside: set[str]) -> list[list[str]]:
        """Return the chains from a waiter to all who wait for nobody; none passes the same place twice."""
        found: list[list[str]] = []
        todo = [([start], wait)]
        seen = {start}
        while todo:
            way, at = todo.pop()
            targets = [each for each in at.whom if each not in way]
            if not targets:
                found.append([*way, "" if at.kind != "call" else way[-1]] if not at.whom else way)
            for target in targets:
                further = [each for each in self.by.get(target, []) if target not in inside]
                if target in seen and further:
                    continue
                seen.add(target)
                if further:
                    todo += [([*way, target], each) for each in further]
                else:
                    found.append([*way, target])
        return [way if way[-1] else way[:-1] for way in found]

    def _culprit(self, who: str, chains: list[list[str]]) -> Culprit | None:
        waiting = len({each for chain in chains for each in chain[:-1]})
        longest = max(chains, key=len)
        own = [wait for wait in self.by.get(who, []) if not wait.whom]
        proc, actor = self.actors.get(who, (self.procs.get(who) or self._dumb(who), None))
        name = proc.name if proc is not None else ""
        if own and (blocked := _BLOCKED.fullmatch(own[0].text)):
            return self._blocked(who, name, blocked[1], own[0].seconds)
        if own:
            # Nobody in the job was asked for what it waits for: a value of a channel, a promise.
            text = f"waits {own[0].text}, for {own[0].seconds:.1f} s, and nobody is known who would give it"
            thread = self._thread(proc, actor)
            return Culprit(
                who,
                name,
                text,
                _line(thread),
                waiting,
                tuple(longest[:-1]) if waiting else (),
                _stack(thread),
            )
        if proc is None:
            return Culprit(
                who,
                "",
                "is not known any longer: its process has ended, or was never made",
                "",
                waiting,
                tuple(longest),
            )
        if proc.state in ("stopped", "silent", "starting"):
            said = {
                "stopped": f"its process {proc.name} (pid {proc.pid}) was stopped by a signal; SIGCONT continues it",
                "silent": f"its process {proc.name} (pid {proc.pid}) runs and does not answer",
                "starting": f"its process {proc.name} is being started",
            }
            return Culprit(who, name, said[proc.state], "", waiting, tuple(longest))
        thread = self._thread(proc, actor)
        return Culprit(
            who,
            name,
            self._doing(proc, actor, thread),
            _line(thread),
            waiting,
            tuple(longest),
            _stack(thread),
        )

    def _blocked(self, who: str, name: str, what: str, seconds: float) -> Culprit:
        """Return what is asked about a failure and does not return; the failures of all other meshes wait for it."""
        stacks = self.stacks.get(name)
        asking = [each for each in stacks.threads if each.name == _NOTICES and each.own] if stacks else []
        thread = asking[0] if asking else None
        text = f"{what} was asked about a failure and has not returned, for at least {seconds:.1f} s: failures of other meshes wait for it"
        return Culprit(who, name, text, _line(thread), 0, (), _stack(thread))

    def _dumb(self, who: str) -> ProcState | None:
        """Return the process of an actor that does not report its actors, by where the mesh has its other ranks."""
        name, _, rank = who.rstrip("]").partition("[")
        meshes = {proc.mesh for proc in self.snap.procs for actor in proc.actors if actor.name == name}
        dumb = [proc for proc in self.snap.procs if proc.state in ("stopped", "silent", "starting")]
        near = [proc for proc in dumb if proc.mesh in meshes and str(proc.rank) == rank]
        return near[0] if near else dumb[0] if len(dumb) == 1 else None

    def _doing(self, proc: ProcState, actor: ActorState | None, thread: ThreadStack | None) -> str:
        if actor is None:
            return "is busy outside of all actors"
        if actor.running:
            longest = max(actor.running, key=lambda each: each.seconds)
            many = f"{actor.queue:,} messages wait" if actor.queue > 1 else "1 message waits"
            others = f", {many} behind it" if actor.queue else ""
            if thread is None or not thread.own:
                return (
                    f"has begun {longest.endpoint} {longest.seconds:.1f} s ago, and no thread runs it: it awaits something, or has not answered "
                    f"by its port{others}"
                )
            where = "waits in a collective" if _is_meeting(thread) else "runs"
            return f"{where} {longest.endpoint} for {longest.seconds:.1f} s{others}"
        if actor.state == "starting":
            return f"its constructor has run for {actor.age:.1f} s"
        if actor.queue:
            return f"has {actor.queue:,} messages and takes none: something else keeps its thread"
        return "has nothing to do: it has handled what it was sent, and the answer is with somebody else, or lost"

    def _of_meeting(self, meeting: Meeting, found: list[Culprit]) -> tuple[list[Culprit], list[str]]:
        """Replace ranks that wait in a collective by those that keep it from completing, if processes have reported what they are in."""
        causes, circle = meeting.causes()
        if not causes and not circle:
            return found, []
        waiting = {self._name_of(meeting.proc(rank)): rank for rank in meeting.at}
        left = {each.who: each for each in found if each.who not in waiting}
        for rank, reason in causes.items():
            who, name = self._name_of(meeting.proc(rank)), meeting.proc(rank)
            if rank not in meeting.at and (ends := self._ends(who)):
                # It waits for another one in turn.
                left.update((each.who, each) for each in ends if each.who not in left)
                continue
            actor, thread = self._actor_of(name)
            proc, doing = self.procs.get(name), ""
            if proc is None:
                doing = ": its process is not there any more"
            elif proc.state != "running":
                doing = f": its process (pid {proc.pid}) is {proc.state}"
            elif rank not in meeting.at:
                doing = f": {self._doing(proc, actor, thread)}"
            others = [each for each in waiting if each != who]
            chain = (others[0], who) if others else ()
            left[who] = Culprit(who, name, reason + doing, _line(thread), len(others), chain, _stack(thread))
        return list(left.values()), [circle] if circle else []

    def _ends(self, who: str) -> list[Culprit]:
        """Return those that it finally waits for, if it waits for others."""
        made = []
        for wait in self.by.get(who, []):
            for chain in self._chains(who, wait, set()) if wait.whom else ():
                culprit = self._culprit(chain[-1], [chain])
                if culprit is not None and culprit.who != who:
                    made.append(culprit)
        return made

    def _actor_of(self, name: str) -> tuple[ActorState | None, ThreadStack | None]:
        """Return the actor of a process that has been busy for longest, or any, and its thread."""
        proc = self.procs.get(name)
        if proc is None or not proc.actors:
            return None, self._thread(proc, None)
        actor = max(proc.actors, key=lambda each: max((one.seconds for one in each.running), default=-1.0))
        return actor, self._thread(proc, actor)

    def _name_of(self, name: str) -> str:
        """Return the name of a process that people use: the actor in it."""
        actor, _ = self._actor_of(name)
        if actor is None:
            return name
        return f"{actor.name}[{actor.rank}]" if actor.point else actor.name

    def _of_collectives(self, found: list[Culprit]) -> list[Culprit]:
        """If ranks wait in a collective, return those of their mesh that have not arrived."""
        added: list[Culprit] = []
        done: set[int] = set()
        for culprit in found:
            if "waits in a collective" not in culprit.text or culprit.who not in self.actors:
                continue
            _, actor = self.actors[culprit.who]
            if actor.actor_id in done:
                continue
            done.add(actor.actor_id)
            ranks = [
                (proc, each)
                for proc in self.snap.procs
                for each in proc.actors
                if each.actor_id == actor.actor_id
            ]
            there = [each for each in ranks if _is_meeting(self._thread(*each))]
            known = {each.who for each in found}
            for proc, each in ranks:
                who = f"{each.name}[{each.rank}]"
                if (proc, each) in there:
                    continue
                thread = self._thread(proc, each)
                state = "" if proc.state == "running" else f" (its process is {proc.state})"
                text = f"has not come to the collective in which {len(there)} of {len(ranks)} ranks wait: {self._doing(proc, each, thread)}{state}"
                if who in known:
                    found[:] = [one for one in found if one.who != who]
                added.append(
                    Culprit(
                        who, proc.name, text, _line(thread), len(there), (culprit.who, who), _stack(thread)
                    )
                )
        if added or done:
            # A rank that waits in it is not the culprit; if all ranks do, one collective follows the other.
            stays = self._long if not added else ()
            found[:] = [one for one in found if "waits in a collective" not in one.text or one.who in stays]
        return added

    @property
    def _long(self) -> set[str]:
        """Return the actors that have handled a message for so long that it may not end."""
        return {
            f"{actor.name}[{actor.rank}]"
            for proc in self.snap.procs
            for actor in proc.actors
            if any(each.seconds >= _MOVING_S for each in actor.running)
        }

    def _unasked(self) -> list[Culprit]:
        """Return what has been running for long though nobody waits for it."""
        found = []
        for proc in self.snap.procs:
            if proc.state in ("stopped", "silent"):
                found.append(
                    Culprit(proc.name, proc.name, f"process {proc.name} (pid {proc.pid}) is {proc.state}")
                )
            for actor in proc.actors:
                if (
                    actor.running and max(each.seconds for each in actor.running) >= _BRIEF_S
                ) or actor.state == "starting":
                    thread = self._thread(proc, actor)
                    who = f"{actor.name}[{actor.rank}]"
                    found.append(
                        Culprit(
                            who,
                            proc.name,
                            self._doing(proc, actor, thread),
                            _line(thread),
                            0,
                            (),
                            _stack(thread),
                        )
                    )
        return found

    def _thread(self, proc: ProcState | None, actor: ActorState | None) -> ThreadStack | None:
        stacks = self.stacks.get(proc.name) if proc is not None else None
        if stacks is None:
            return None
        if actor is None:
            return next((each for each in stacks.threads if each.name not in ("loop", "") and each.own), None)
        thread = next((each for each in stacks.threads if actor.name in each.actors), None)
        if thread is not None and thread.own:
            return thread
        return next((each for each in stacks.threads if each.name == "loop"), thread)


def _own_lines(thread: ThreadStack | None) -> list[StackFrame]:
    """Return the frames of the program itself, the most recent first."""
    frames = thread.own if thread is not None else ()
    mine = [frame for frame in frames if not any(each in frame.file for each in _LIBRARIES)]
    return mine or list(frames)


def _line(thread: ThreadStack | None) -> str:
    lines = _own_lines(thread)
    return str(lines[0]) if lines else ""


def _stack(thread: ThreadStack | None) -> str:
    return "" if thread is None else str(thread)


def _is_meeting(thread: ThreadStack | None) -> bool:
    frames = thread.own if thread is not None else ()
    return any(
        any(each in frame.file for each in _COLLECTIVE) and frame.function in _MEET for frame in frames
    )
