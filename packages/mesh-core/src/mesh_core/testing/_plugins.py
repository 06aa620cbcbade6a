"""Conformance suites: a plugin's author subclasses the suite of the plugin's kind, and pytest runs it.

Each test checks one promise of the contract, and its failure says which. These are the suites of mesh-core's own kinds. The
owner of another kind derives its suite from :class:`PluginConformance`, and tests the kind itself with
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
from mesh_core.plugins._probes import SLOW_S
from mesh_core.policies import Due, Ended, Event, Failed, Policy, checked_actions
from mesh_core.testing._fresh import cost_of


class KindConformance:
    """Tests for every kind that a package declares.

    >>> from mesh_core.plugins import COMMANDS
    >>> class TestCommands(KindConformance):
    ...     kind = COMMANDS
    >>> TestCommands().test_declared_by_its_owner()
    """

    kind: ClassVar[PluginKind[Plugin[Any]]]
    """The kind. Its owner must be installed where the suite runs."""

    def test_declared_by_its_owner(self) -> None:
        """The owner's entry point in the group ``mesh.kinds`` refers to this very object."""
        found = [each for each in PluginManager().kinds() if each.group == self.kind.group]
        assert found, f"no installed package declares the kind {self.kind.name!r} under mesh.kinds"
        assert found[0] is self.kind, f"{self.kind.owner} must declare {self.kind}, but declares {found[0]}"

    def test_descriptor_says_what_create_makes(self) -> None:
        """The descriptor declares the type of ``create``, so that type checkers know the contract."""
        assert "create" in inspect.get_annotations(self.kind.descriptor), (
            f"{self.kind.descriptor.__name__} must annotate 'create' with what the contract promises"
        )

    def test_descriptor_is_a_frozen_dataclass(self) -> None:
        """Descriptors are shared by everyone who selects the plugin."""
        try:
            plugin = self.kind.descriptor(name="made-up", api_version=self.kind.api_version, create=dict)
        except TypeError:
            return  # it has more required fields
        try:
            plugin.name = "other"  # type: ignore[misc]
        except FrozenInstanceError:
            return
        raise AssertionError(f"{self.kind.descriptor.__name__} must be @dataclass(frozen=True, kw_only=True)")


class PluginConformance:
    """Tests for plugins of every kind; a kind's owner derives the kind's suite from it and sets ``kind``.

    >>> class TestDoctor(PluginConformance):
    ...     kind = COMMANDS
    ...     plugin = PluginManager().get(COMMANDS, "doctor")
    ...     distribution = "mesh-core"
    >>> TestDoctor().test_installed_under_its_name()
    """

    kind: ClassVar[PluginKind[Plugin[Any]]]
    """The kind. The suite of a kind sets this."""

    plugin: ClassVar[Plugin[Any]]
    """The descriptor that the plugin's hook yields. Every author sets this."""

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
        """The version is not newer than what the installed owner of the kind supports."""
        newest = self.kind.api_version
        assert 1 <= self.plugin.api_version <= newest, (
            f"api_version must be from 1 to {newest}, got {self.plugin.api_version}"
        )

    def test_summary_is_one_line(self) -> None:
        """The summary is shown in lists and help."""
        summary = self.plugin.summary
        assert len(summary.splitlines()) == 1, f"summary must be one line, got {summary!r}"
        assert len(summary) <= 100, f"summary must have at most 100 characters, got {len(summary)}"

    def test_descriptor_is_frozen(self) -> None:
        """The descriptor is shared by everyone who selects the plugin."""
        try:
            self.plugin.name = "other"  # type: ignore[misc]
        except FrozenInstanceError:
            return
        raise AssertionError("the descriptor can be changed; do not redefine __setattr__")

    def test_installed_under_its_name(self) -> None:
        """Selecting the name finds this plugin through its entry point, and no other plugin has the name."""
        found = PluginManager().get(self.kind, self.plugin.name)
        assert found == self.plugin, (
            f"the entry point {self.plugin.name!r} must give {self.plugin}, got {found}"
        )
        origins = {
            each.distribution for each in PluginManager().entries(self.kind) if each.name == self.plugin.name
        }
        assert origins == {self.distribution}, (
            f"must be offered by {self.distribution!r} alone, got {origins}"
        )

    def test_probe_answers(self) -> None:
        """The probe returns a ``ProbeResult``, never raises, and gives the same answer again."""
        first, second = self.plugin.probe(), self.plugin.probe()
        assert isinstance(first, ProbeResult), (
            f"probe() must return a ProbeResult, got {type(first).__name__}"
        )
        assert first.available == second.available, "the probe gave different answers when called twice"

    def test_costs_a_new_process_little(self) -> None:
        """All installed plugins of a kind may be imported and probed to find one, so neither may take long.

        Heavy modules are imported by ``create``, or where they are first needed. Measured in a new process, the best of three.
        """
        cost = cost_of(self.kind.group, self.plugin.name, self.distribution, SLOW_S)
        if cost is None:
            return  # installed only in this process
        assert not cost.heavy, (
            f"to import the plugin imports {', '.join(cost.heavy)}: import heavy modules inside create"
        )
        assert cost.load_s <= cost.limit_s, (
            f"to import the plugin takes {cost.load_s:.2f} s, more than {cost.limit_s:.2g} s: import inside create what takes long"
        )
        assert cost.probe_s <= cost.limit_s, (
            f"the probe takes {cost.probe_s:.2f} s, more than {cost.limit_s:.2g} s: it must be cheap"
        )

    def test_probe_result_can_be_shown_and_sent(self) -> None:
        """Results are sent between hosts and shown by `mesh plugins --json`."""
        result = self.plugin.probe()
        assert pickle.loads(pickle.dumps(result)) == result
        json.dumps(result.as_dict())

    def test_capabilities_are_those_of_the_kind(self) -> None:
        """A yes carries an instance of the kind's dataclass, or nothing if the kind has no capabilities."""
        result = self.plugin.probe()
        if result.available:
            wanted = self.kind.capabilities or type(None)
            assert isinstance(result.capabilities, wanted), (
                f"the probe must return {wanted.__name__}, got {type(result.capabilities).__name__}"
            )

    def test_refusal_says_why_and_what_to_do(self) -> None:
        """A probe that says no must give a reason and a remedy."""
        result = self.plugin.probe()
        assert result.available or (result.reason.strip() and result.remedy.strip())


class CommandPluginConformance(PluginConformance):
    """Tests for a :class:`~mesh_core.plugins.CommandPlugin`."""

    kind = COMMANDS

    def _command(self) -> Command:
        assert isinstance(self.plugin, COMMANDS.descriptor), (
            f"plugin must be a CommandPlugin, got {type(self.plugin).__name__}"
        )
        return self.plugin.create()

    def test_creates_a_command(self) -> None:
        """``create()`` returns a new object with ``configure`` and ``run`` each time."""
        first, second = self._command(), self._command()
        assert isinstance(first, Command), (
            f"create() returned {type(first).__name__}, which lacks configure() or run()"
        )
        assert first is not second, (
            "create() returned the same object twice: a command's state must not outlive its run"
        )

    def test_declares_its_options(self) -> None:
        """``configure`` works on a bare parser, and each option has a help text."""
        parser = ArgumentParser(prog=f"mesh {self.plugin.name}")
        self._command().configure(parser)
        silent = [each.dest for each in parser._actions if not each.help]
        assert not silent, f"no help text for {', '.join(silent)}"

    def test_configuring_has_no_effect_beyond_the_parser(self) -> None:
        """Configuring two parsers declares the same options: ``--help`` must not change anything."""
        command, usages = self._command(), []
        for _ in range(2):
            parser = ArgumentParser(prog=f"mesh {self.plugin.name}")
            command.configure(parser)
            usages.append(parser.format_help())
        assert usages[0] == usages[1]


class DoctorCheckConformance(PluginConformance):
    """Tests for a :class:`~mesh_core.plugins.DoctorCheck`."""

    kind = DOCTOR_CHECKS

    def _findings(self) -> list[Finding]:
        assert isinstance(self.plugin, DOCTOR_CHECKS.descriptor), (
            f"plugin must be a DoctorCheck, got {type(self.plugin).__name__}"
        )
        return list(self.plugin.create()())

    def test_finds_something(self) -> None:
        """If the check applies, it returns one or more findings and does not raise."""
        if not self.plugin.probe():
            return
        findings = self._findings()
        assert findings, "a check without problems to report must return a Finding with status 'ok'"
        strangers = [each for each in findings if not isinstance(each, Finding)]
        assert not strangers, f"findings must be Findings, got {strangers[0]!r}"

    def test_each_finding_is_one_line(self) -> None:
        """Findings are shown in a table."""
        for each in self._findings() if self.plugin.probe() else []:
            assert "\n" not in each.detail + each.remedy, f"detail and remedy must be one line, got {each}"


class PolicyPluginConformance(PluginConformance):
    """Tests for a :class:`~mesh_core.plugins.PolicyPlugin`, with random events that are the same in every run."""

    kind = POLICIES

    def _policy(self) -> Policy:
        assert isinstance(self.plugin, POLICIES.descriptor), (
            f"plugin must be a PolicyPlugin, got {type(self.plugin).__name__}"
        )
        return self.plugin.create()

    def test_creates_a_policy(self) -> None:
        """``create()`` returns an object with ``on(event, now)``."""
        policy = self._policy()
        assert isinstance(policy, Policy), (
            f"create() returned {type(policy).__name__}, which lacks on(event, now)"
        )

    def test_answers_every_event_with_actions(self) -> None:
        """For every event, the policy returns its next state and a sequence of actions, and does not raise."""
        state = self._policy()
        for event, now in _schedule():
            state, actions = state.on(event, now)
            checked_actions(actions)

    def test_answers_every_failure(self) -> None:
        """Returning no action would pass a failure on silently; a policy must return :class:`Escalate` with a reason."""
        state = self._policy()
        for event, now in _schedule():
            state, actions = state.on(event, now)
            assert actions or not isinstance(event, Failed), f"no action for {event}"

    def test_is_pure(self) -> None:
        """In the same state, the policy gives the same answer: it returns its next state and never changes itself."""
        state = self._policy()
        for event, now in _schedule():
            following, actions = state.on(event, now)
            _, again = state.on(event, now)
            assert list(again) == list(actions), f"{event} at {now}: first {actions}, then {again}"
            state = following


def _schedule(length: int = 200, seed: int = 2026) -> Iterator[tuple[Event, float]]:
    """Yield failures, orderly ends and timers of a mesh of four ranks, in random order."""
    import random

    chance, now = random.Random(seed), 0.0
    for _ in range(length):
        now += chance.choice((0.0, 0.1, 1.0, 30.0, 3600.0))
        rank = chance.randrange(4)
        kind = chance.choice(list(FailureKind))
        yield chance.choice((Failed("mesh", rank, kind), Ended("mesh", rank), Due("timer"))), now
