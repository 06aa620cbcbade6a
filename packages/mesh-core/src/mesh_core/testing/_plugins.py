"""The conformance suites: an author subclasses the one for the plugin's kind, and pytest runs it.

Every test is about one promise of the contract, and its failure says which.
"""

import json
import pickle
from argparse import ArgumentParser
from dataclasses import FrozenInstanceError
from typing import ClassVar

from mesh_core.plugins import (
    COMMANDS,
    DOCTOR_CHECKS,
    KINDS,
    Command,
    Finding,
    Plugin,
    PluginKind,
    PluginManager,
    ProbeResult,
    name_problem,
)


class PluginConformance:
    """What holds for plugins of every kind.

    >>> class TestDoctor(PluginConformance):
    ...     plugin = PluginManager().get(COMMANDS, "doctor")
    ...     distribution = "mesh-core"
    >>> TestDoctor().test_installed_under_its_name()
    """

    plugin: ClassVar[Plugin]
    """The descriptor, as the plugin's hook yields it. Every suite sets this."""

    distribution: ClassVar[str]
    """The name of the distribution that offers it, which must be installed where the suite runs."""

    @property
    def kind(self) -> PluginKind[Plugin]:
        """The kind that the descriptor's type says."""
        found = [each for each in KINDS if isinstance(self.plugin, each.descriptor)]
        assert found, f"{type(self.plugin).__name__} is none of the descriptors that Mesh's hooks return"
        return found[0]

    def test_name_is_one_a_user_can_type(self) -> None:
        """Lower-case letters, digits, '-' and '_'."""
        assert name_problem(self.plugin.name) is None, name_problem(self.plugin.name)

    def test_api_version_is_spoken_here(self) -> None:
        """Not newer than the installed mesh-core."""
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
        json.dumps(dict(result.capabilities))

    def test_refusal_says_why_and_what_to_do(self) -> None:
        """A probe that says no is of use only with the reason and the remedy."""
        result = self.plugin.probe()
        assert result.available or (result.reason.strip() and result.remedy.strip())


class CommandPluginConformance(PluginConformance):
    """What holds for a :class:`~mesh_core.plugins.CommandPlugin`."""

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
