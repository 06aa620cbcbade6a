"""The conformance suites: an author subclasses the one for the plugin's kind, and pytest runs it.

Every test is about one promise of the contract, and its failure says which. The suites here are those of mesh-core's own
kinds. The owner of another kind derives its suite from :class:`PluginConformance`, and proves the kind itself with
:class:`KindConformance`.
"""

import inspect
import json
import pickle
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from typing import Any, ClassVar

from mesh_core._common.codes import FailureKind
from mesh_core.plugins import (
    COMMANDS,
    DOCTOR_CHECKS,
    POLICIES,
    Command,
    Finding,
    Plugin,
    PluginKind,
    PluginManager,
    ProbeResult,
    name_problem,
)
from mesh_core.policies import Due, Ended, Event, Failed, Policy, checked_actions


class KindConformance:
    """What holds for every kind that a package declares.

    >>> from mesh_core.plugins import COMMANDS
    >>> class TestCommands(KindConformance):
    ...     kind = COMMANDS
    >>> TestCommands().test_declared_by_its_owner()
    """

    kind: ClassVar[PluginKind[Plugin[Any]]]
    """The kind. Its owner must be installed where the suite runs."""

    def test_declared_by_its_owner(self) -> None:
        """The owner's entry point in the group ``mesh.kinds`` leads to this very object."""
        found = [each for each in PluginManager().kinds() if each.group == self.kind.group]
        assert found, f"no installed package declares the kind {self.kind.name!r} under mesh.kinds"
        assert found[0] is self.kind, f"{self.kind.owner} declares {found[0]}, not {self.kind}"

    def test_descriptor_says_what_create_makes(self) -> None:
        """The descriptor gives ``create`` a type of its own, so that a type checker knows the contract."""
        assert "create" in inspect.get_annotations(self.kind.descriptor), (
            f"{self.kind.descriptor.__name__} must annotate 'create' with what the contract promises"
        )

    def test_descriptor_is_a_frozen_dataclass(self) -> None:
        """Descriptors are shared by everyone who asks for the plugin."""
        try:
            plugin = self.kind.descriptor(name="made-up", api_version=self.kind.api_version, create=dict)
        except TypeError:
            return  # it has fields of its own that must be given
        try:
            plugin.name = "other"  # type: ignore[misc]
        except FrozenInstanceError:
            return
        raise AssertionError(f"{self.kind.descriptor.__name__} must be @dataclass(frozen=True, kw_only=True)")


class PluginConformance:
    """What holds for plugins of every kind; a kind's owner derives the kind's suite from it and sets ``kind``.

    >>> class TestDoctor(PluginConformance):
    ...     kind = COMMANDS
    ...     plugin = PluginManager().get(COMMANDS, "doctor")
    ...     distribution = "mesh-core"
    >>> TestDoctor().test_installed_under_its_name()
    """

    kind: ClassVar[PluginKind[Plugin[Any]]]
    """The kind. The suite of a kind sets this."""

    plugin: ClassVar[Plugin[Any]]
    """The descriptor, as the plugin's hook yields it. Every author sets this."""

    distribution: ClassVar[str]
    """The name of the distribution that offers it, which must be installed where the suite runs."""

    def test_descriptor_is_of_the_kind(self) -> None:
        """The hook yields instances of the kind's descriptor."""
        assert isinstance(self.plugin, self.kind.descriptor), (
            f"the descriptor must be a {self.kind.descriptor.__name__}, got {type(self.plugin).__name__}"
        )

    def test_name_is_one_a_user_can_type(self) -> None:
        """Lower-case letters, digits, '-' and '_'."""
        assert name_problem(self.plugin.name) is None, name_problem(self.plugin.name)

    def test_api_version_is_spoken_here(self) -> None:
        """Not newer than what the installed owner of the kind speaks."""
        newest = self.kind.api_version
        assert 1 <= self.plugin.api_version <= newest, (
            f"api_version is {self.plugin.api_version}; spoken: 1 to {newest}"
        )

    def test_summary_is_one_line(self) -> None:
        """Lists and help show it."""
        summary = self.plugin.summary
        assert len(summary.splitlines()) == 1, f"one line, not {summary!r}"
        assert len(summary) <= 100, f"at most 100 characters, not {len(summary)}"

    def test_descriptor_is_frozen(self) -> None:
        """It is shared by everyone who asks for the plugin."""
        try:
            self.plugin.name = "other"  # type: ignore[misc]
        except FrozenInstanceError:
            return
        raise AssertionError("the descriptor can be changed; do not redefine __setattr__")

    def test_installed_under_its_name(self) -> None:
        """Selected by name, through its entry point, it is this plugin, and there is no other of that name."""
        found = PluginManager().get(self.kind, self.plugin.name)
        assert found == self.plugin, f"the entry point {self.plugin.name!r} gives {found}, not {self.plugin}"
        origins = {
            each.distribution for each in PluginManager().entries(self.kind) if each.name == self.plugin.name
        }
        assert origins == {self.distribution}, f"offered by {origins}, not {self.distribution!r}"

    def test_probe_answers(self) -> None:
        """A ``ProbeResult``, never an exception, and the same when asked again."""
        first, second = self.plugin.probe(), self.plugin.probe()
        assert isinstance(first, ProbeResult), f"probe() returned {type(first).__name__}, not ProbeResult"
        assert first.available == second.available, "asked twice, the probe gave two answers"

    def test_probe_result_can_be_shown_and_sent(self) -> None:
        """Hosts tell each other what they can do; `mesh plugins --json` tells everybody."""
        result = self.plugin.probe()
        assert pickle.loads(pickle.dumps(result)) == result
        json.dumps(result.as_dict())

    def test_capabilities_are_those_of_the_kind(self) -> None:
        """A yes carries an instance of the dataclass that the kind names; nothing, for a kind without capabilities."""
        result = self.plugin.probe()
        if result.available:
            wanted = self.kind.capabilities or type(None)
            assert isinstance(result.capabilities, wanted), (
                f"the probe must return {wanted.__name__}, got {type(result.capabilities).__name__}"
            )

    def test_refusal_says_why_and_what_to_do(self) -> None:
        """A probe that says no is of use only with the reason and the remedy."""
        result = self.plugin.probe()
        assert result.available or (result.reason.strip() and result.remedy.strip())


class CommandPluginConformance(PluginConformance):
    """What holds for a :class:`~mesh_core.plugins.CommandPlugin`."""

    kind = COMMANDS

    def _command(self) -> Command:
        assert isinstance(self.plugin, COMMANDS.descriptor), (
            f"a CommandPlugin, not {type(self.plugin).__name__}"
        )
        return self.plugin.create()

    def test_creates_a_command(self) -> None:
        """Something with ``configure`` and ``run``; a new one each time."""
        first, second = self._command(), self._command()
        assert isinstance(first, Command), (
            f"create() gave {type(first).__name__}, which lacks configure() or run()"
        )
        assert first is not second, (
            "create() gave the same object twice: a command's state must not outlive its run"
        )

    def test_declares_its_options(self) -> None:
        """``configure`` works on a bare parser, and each option has a help text."""
        parser = ArgumentParser(prog=f"mesh {self.plugin.name}")
        self._command().configure(parser)
        silent = [each.dest for each in parser._actions if not each.help]
        assert not silent, f"no help text for {', '.join(silent)}"

    def test_configuring_has_no_effect_beyond_the_parser(self) -> None:
        """Configured twice, on two parsers, it declares the same: ``--help`` must not change anything."""
        command, usages = self._command(), []
        for _ in range(2):
            parser = ArgumentParser(prog=f"mesh {self.plugin.name}")
            command.configure(parser)
            usages.append(parser.format_help())
        assert usages[0] == usages[1]


class DoctorCheckConformance(PluginConformance):
    """What holds for a :class:`~mesh_core.plugins.DoctorCheck`."""

    kind = DOCTOR_CHECKS

    def _findings(self) -> list[Finding]:
        assert isinstance(self.plugin, DOCTOR_CHECKS.descriptor), (
            f"a DoctorCheck, not {type(self.plugin).__name__}"
        )
        return list(self.plugin.create()())

    def test_finds_something(self) -> None:
        """Where the check applies, it gives one or more findings, and raises nothing."""
        if not self.plugin.probe():
            return
        findings = self._findings()
        assert findings, "a check that has nothing to report gives a Finding with status 'ok'"
        strangers = [each for each in findings if not isinstance(each, Finding)]
        assert not strangers, f"not a Finding: {strangers[0]!r}"

    def test_each_finding_is_one_line(self) -> None:
        """They are shown in a table."""
        for each in self._findings() if self.plugin.probe() else []:
            assert "\n" not in each.detail + each.remedy, f"more than one line: {each}"


class PolicyPluginConformance(PluginConformance):
    """What holds for a :class:`~mesh_core.plugins.PolicyPlugin`: a random schedule of events, the same in every run."""

    kind = POLICIES

    def _policy(self) -> Policy:
        assert isinstance(self.plugin, POLICIES.descriptor), (
            f"a PolicyPlugin, not {type(self.plugin).__name__}"
        )
        return self.plugin.create()

    def test_creates_a_policy(self) -> None:
        """Something with ``on(event, now)``."""
        policy = self._policy()
        assert isinstance(policy, Policy), (
            f"create() gave {type(policy).__name__}, which lacks on(event, now)"
        )

    def test_answers_every_event_with_actions(self) -> None:
        """Whatever happens, it returns the next state and a sequence of actions, and raises nothing."""
        state = self._policy()
        for event, now in _schedule():
            state, actions = state.on(event, now)
            checked_actions(actions)

    def test_answers_every_failure(self) -> None:
        """No actions for a failure would pass it on in silence; a policy says :class:`Escalate` and why."""
        state = self._policy()
        for event, now in _schedule():
            state, actions = state.on(event, now)
            assert actions or not isinstance(event, Failed), f"no action for {event}"

    def test_is_pure(self) -> None:
        """Asked again in the same state, it gives the same answer: it returns its next state and never changes itself."""
        state = self._policy()
        for event, now in _schedule():
            following, actions = state.on(event, now)
            _, again = state.on(event, now)
            assert list(again) == list(actions), f"{event} at {now}: first {actions}, then {again}"
            state = following


def _schedule(length: int = 200, seed: int = 2026) -> Iterator[tuple[Event, float]]:
    """Failures, orderly ends and timers in random order, of a mesh of four ranks."""
    import random

    chance, now = random.Random(seed), 0.0
    for _ in range(length):
        now += chance.choice((0.0, 0.1, 1.0, 30.0, 3600.0))
        rank = chance.randrange(4)
        kind = chance.choice(list(FailureKind))
        yield chance.choice((Failed("mesh", rank, kind), Ended("mesh", rank), Due("timer"))), now
