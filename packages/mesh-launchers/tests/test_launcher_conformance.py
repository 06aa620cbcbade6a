"""The suite of the contract, on the package's own launchers: HST-1, HST-3, HST-4, KPR-3."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import pytest
from counter import lives
from greeter import kill_host
from launched import LIMIT
from sshd import SSHD, Servers

from mesh_core import Credentials
from mesh_core.plugins import PluginManager
from mesh_core.testing import KindConformance
from mesh_launchers import LAUNCHERS, HostSpec, LauncherPlugin, Phase, Place, Report, _host, launch
from mesh_launchers._contract import RESERVED
from mesh_launchers.agents import AgentLauncher, Start, shell
from mesh_launchers.testing import LauncherConformance

pytestmark = pytest.mark.slow


class TestLaunchers(KindConformance):
    """The kind."""

    kind = LAUNCHERS


class TestLocal(LauncherConformance):
    """Agents on this machine."""

    plugin = PluginManager().get(LAUNCHERS, "local")
    distribution = "mesh-launchers"

    def kill(self, host: HostSpec) -> bool:
        """Kill its agent."""
        return kill_host(host.name)


@pytest.mark.full
@pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None, reason="there is no sshd: apt install openssh-server"
)
class TestSsh(LauncherConformance):
    """Two servers on loopback."""

    plugin = PluginManager().get(LAUNCHERS, "ssh")
    distribution = "mesh-launchers"
    targets = ("b1", "b2")
    runtime = ""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def servers(cls, tmp_path_factory: Any) -> Iterator[Servers]:
        """Start them."""
        with tempfile.TemporaryDirectory(prefix="mesh-run-") as run, pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_RUNTIME_DIR", run)
            servers = Servers(tmp_path_factory.mktemp("sshd") / "servers", 2)
            cls.runtime = run
            cls.options = {"config": str(servers.config), "python": sys.executable}
            yield servers
            servers.close()
            assert not list(Path(run).glob("mesh-host-*"))

    def kill(self, host: HostSpec) -> bool:
        """Kill its agent, at the other end."""
        return kill_host(host.name, self.runtime)


@dataclass(frozen=True)
class PrologueOptions:
    """Options of :class:`Prologue`."""

    prologue: str = ""


class Prologue(AgentLauncher):
    """Runs a prologue on each host before the host."""

    async def start(self, options: PrologueOptions, hosts: Sequence[HostSpec]) -> None:
        """Begin to start hosts."""
        for host in hosts:
            words = ["sh", "-c", f"{options.prologue}; {shell(sys.executable, host.name)}"]
            self.agents.begin(host, Start(arguments=words, listen="127.0.0.1:0"))


def with_prologue() -> LauncherPlugin:
    return LauncherPlugin(
        name="prologue", api_version=1, options=PrologueOptions, create=Prologue, summary="has a prologue"
    )


@pytest.mark.parametrize("output", ["", " >/dev/null 2>&1"], ids=["inherited output", "redirected output"])
@pytest.mark.parametrize("end", ["is stopped", "is killed"])
def test_what_a_command_has_started_ends_with_its_host(tmp_path: Path, output: str, end: str) -> None:
    """HST-8: at once, and the end of the host is reported although its output is still open."""
    (tmp_path / "launcher").mkdir()
    credentials = Credentials.new(tmp_path / "credentials").host_path
    helper = tmp_path / "helper"

    async def work() -> None:
        reports: asyncio.Queue[Report] = asyncio.Queue()
        launcher = Prologue(Place("lab", tmp_path / "launcher", credentials, 60.0, reports.put_nowait))
        options = PrologueOptions(f"sh -c 'echo $$ >{helper}; exec sleep 600'{output} & true")
        await launcher.start(options, [HostSpec(0, "b1")])
        async with asyncio.timeout(LIMIT):
            while (await reports.get()).phase is not Phase.RUNNING:
                pass
            assert lives(int(helper.read_text()))
            if end == "is killed":
                assert kill_host("b1")
                while (report := await reports.get()).phase is not Phase.FAILED:
                    pass
                assert "its agent was ended by signal 9" in report.why
            else:
                begun = asyncio.get_running_loop().time()
                await launcher.stop([0])
                assert asyncio.get_running_loop().time() < begun + _host._STOP_S  # noqa: SLF001 - it was waited for so long
                assert not lives(int(helper.read_text()))
            # The report of a death need not wait for it.
            while lives(int(helper.read_text())):  # noqa: ASYNC110 - a process that is none of our own
                await asyncio.sleep(0.01)
        await launcher.close()

    asyncio.run(work())


@pytest.mark.parametrize("leaves", [False, True])
def test_the_suite_looks_for_what_a_command_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    helper = tmp_path / "helper"

    class Suite(LauncherConformance):
        plugin = with_prologue()
        options: ClassVar[Mapping[str, Any]] = {
            "prologue": f"sh -c 'echo $$ >>{helper}; exec sleep 600' >/dev/null 2>&1 & true"
        }

    if not leaves:
        Suite().test_close_leaves_nothing()
        return

    async def nothing(_leader: int) -> None:
        pass

    monkeypatch.setattr(_host, "_end_group", nothing)
    with pytest.raises(AssertionError, match=r"what a host's command has started goes on .*sleep 600"):
        Suite().test_close_leaves_nothing()
    for each in helper.read_text().split():
        with contextlib.suppress(
            ProcessLookupError
        ):  # that of the host that was starting may have ended with it meanwhile
            os.kill(int(each), signal.SIGKILL)


def test_options_that_are_called_like_an_argument_of_launch_are_refused() -> None:
    """Nobody could give them."""
    named = [each.name for each in signature(launch).parameters.values() if each.kind is not each.VAR_KEYWORD]
    assert tuple(named) == RESERVED
    for name in RESERVED:
        options = make_dataclass("Options", [(name, str, "")], frozen=True)
        with pytest.raises(ValueError, match=f"'pigeons' has an option '{name}', which launch\\(\\) takes"):
            LauncherPlugin(
                name="pigeons", api_version=1, options=options, create=Prologue, summary="takes its time"
            )
