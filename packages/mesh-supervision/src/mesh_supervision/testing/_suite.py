"""The conformance suite for supervision policies: rules for all policies, tried on simulated meshes."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import ClassVar

from mesh_core import FailureKind
from mesh_core.policies import Escalate, Failed, Respawn, Restart, Stop
from mesh_core.testing import PolicyPluginConformance
from mesh_supervision.testing._rehearsal import Rehearsal

_SEEDS = range(15)
_STEPS = 60


class PolicyConformance(PolicyPluginConformance):
    """The rules for a policy that is offered under a name. An author sets two names, and pytest runs the rest.

    In addition to the rules of :class:`mesh_core.testing.PolicyPluginConformance`, the policy is tried on meshes whose ranks die at random
    and in loops, whose repairs fail, and whose timers come back.

    >>> from mesh_core.plugins import POLICIES, PluginManager
    >>> class TestMine(PolicyConformance):
    ...     plugin = PluginManager().get(POLICIES, "one_for_one")  # your descriptor
    ...     distribution = "mesh-supervision"
    ...     most_restarts = (3, 60.0)
    >>> TestMine().test_restarts_no_more_than_it_says()
    """

    most_restarts: ClassVar[tuple[int, float] | None] = None
    """The most restarts within so many seconds; ``None`` for a policy that never restarts."""

    repeats_forever: ClassVar[bool] = False
    """Whether it may restart a rank that always dies forever, as long as it stays within ``most_restarts``."""

    def _rehearsals(self, *, broken_starts: bool = True) -> Iterator[tuple[Rehearsal, random.Random]]:
        """Meshes in which ranks die and end at random, and repairs sometimes fail: the same in every run."""
        for seed in _SEEDS:
            chance = random.Random(seed)
            fails = chance.choice((0.0, 0.1, 0.7)) if broken_starts else 0.0
            mesh = Rehearsal(
                self._policy(),
                size=chance.choice((1, 2, 4, 7)),
                repair_seconds=chance.choice((0.0, 0.01, 5.0)),
                starts=functools.partial(_starts, chance, fails),
            )
            for _ in range(_STEPS):
                if mesh.stopped:
                    break
                _disturb(mesh, chance)
                yield mesh, chance
                mesh.advance(chance.choice((0.0, 0.001, 0.1, 1.0, 30.0, 3600.0)))
            yield mesh, chance

    def test_loses_no_failure(self) -> None:
        """Each failure is handled, passed on, postponed by a running timer, or under repair: exactly one of these."""
        for mesh, _ in self._rehearsals():
            pids = sorted(failure.pid for failure in mesh.failures() if failure.pid is not None)
            assert len(pids) == len(set(pids)), f"a failure was settled twice: {_told(mesh)}"
            died = [each for each in _failed(mesh) if each not in pids]
            assert not died, f"the failures of processes {died} were lost: {_told(mesh)}"

    def test_puts_nothing_off_forever(self) -> None:
        """If nothing else happens, every postponed failure is decided within about a day."""
        seen: set[int] = set()
        for mesh, _ in self._rehearsals():
            if id(mesh) in seen:
                continue
            seen.add(id(mesh))
            mesh.starts = lambda rank: True
            mesh.advance(24 * 3600.0)
            assert not mesh.put_off, f"still put off after a day: {mesh.put_off}; {_told(mesh)}"
            assert not mesh.under_repair, f"still under repair after a day: {_told(mesh)}"

    def test_restarts_only_ranks_of_the_mesh(self) -> None:
        """Only existing ranks, none twice in one action, in ascending order."""
        for mesh, _ in self._rehearsals():
            for began in mesh.restarts:
                assert all(0 <= rank < mesh.size for rank in began.ranks), f"{began} of {mesh.size} ranks"
            for _, _, actions in mesh.events:
                for each in actions:
                    if isinstance(each, (Restart, Respawn)) and each.ranks is not None:
                        assert list(each.ranks) == sorted(set(each.ranks)), f"{each}"

    def test_stays_silent_after_a_stop(self) -> None:
        """Once it has stopped the mesh it wants nothing else, and at most one escalation comes with the stop."""
        for mesh, _ in self._rehearsals():
            stops = [
                actions for _, _, actions in mesh.events if any(isinstance(each, Stop) for each in actions)
            ]
            assert len(stops) <= 1
            for actions in stops:
                assert sum(isinstance(each, Escalate) for each in actions) <= 1

    def test_restarts_no_more_than_it_says(self) -> None:
        """Never more than ``most_restarts``, whatever happens."""
        meshes = {id(mesh): mesh for mesh, _ in self._rehearsals()}
        for mesh in [*meshes.values(), self._crash_loop()]:
            times = [began.at for began in mesh.restarts]
            if self.most_restarts is None:
                assert not times, f"most_restarts is None, and it has restarted: {_told(mesh)}"
                continue
            most, period = self.most_restarts
            for first, past in zip(times, times[most:], strict=False):
                assert past - first > period, f"{most + 1} restarts within {past - first:g} s: {_told(mesh)}"

    def test_ends_a_crash_loop(self) -> None:
        """A rank that dies after every restart is eventually left alone, or the owner is notified."""
        mesh = self._crash_loop()
        if not self.repeats_forever:
            settled = mesh.stopped or mesh.passed_on or 0 in mesh.dead
            assert settled, f"after {len(mesh.restarts)} restarts it still continues: {_told(mesh)}"

    def test_gives_a_reason_when_it_escalates(self) -> None:
        """The reason is what the owner reads first."""
        for mesh, _ in self._rehearsals():
            for passed in mesh.passed_on:
                assert passed.reason.strip(), f"no reason for {passed.failure!r}"

    def test_serves_several_meshes_at_once(self) -> None:
        """One policy object may be given to many meshes: what happens to one does not affect another."""
        policy = self._policy()
        alone, first, second = (Rehearsal(policy, size=3) for _ in range(3))
        for rank in (0, 1, 2, 0, 1):
            alone.kill(rank)
            alone.advance(1.0)
        for rank in (0, 1, 2, 0, 1):
            for mesh in (first, second):
                mesh.kill(rank)
                mesh.advance(1.0)
        for mesh in (first, second):
            assert mesh.restarts == alone.restarts
            assert [each.reason for each in mesh.passed_on] == [each.reason for each in alone.passed_on]

    def test_is_shown_in_a_line_of_reasonable_length(self) -> None:
        """Logs and debuggers can show it, even after many events."""
        for mesh, _ in self._rehearsals():
            assert len(repr(mesh.policy)) <= 2000

    def _crash_loop(self) -> Rehearsal:
        """Return a mesh whose rank 0 dies whenever it is alive."""
        mesh = Rehearsal(self._policy(), size=2)
        for _ in range(200):
            mesh.kill(0)
            mesh.advance(0.5)
        return mesh


def _starts(chance: random.Random, fails: float, _: int) -> bool:
    return chance.random() >= fails


def _disturb(mesh: Rehearsal, chance: random.Random) -> None:
    rank = chance.randrange(mesh.size)
    match chance.randrange(6):
        case 0:
            mesh.kill(*range(mesh.size), kind=FailureKind.HOST_DEAD)
        case 1:
            mesh.kill(rank, kind=FailureKind.EXITED, exitcode=chance.choice((0, 1)))
        case 2:
            mesh.end(rank)
        case 3:
            mesh.kill(rank, chance.randrange(mesh.size), kind=FailureKind.OUT_OF_MEMORY)
        case _:
            mesh.kill(rank)


def _failed(mesh: Rehearsal) -> list[int]:
    events = [event for _, event, _ in mesh.events if isinstance(event, Failed)]
    return [each.failure.pid for each in events if each.failure.pid is not None]


def _told(mesh: Rehearsal) -> str:
    return "\n".join(f"{now:.3f} {event} -> {actions}" for now, event, actions in mesh.events[-12:])
