"""The suite of the contract, on the package's own launchers: HST-1, HST-3, HST-4, KPR-3."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from greeter import kill_host
from sshd import SSHD, Servers

from mesh_core.plugins import PluginManager
from mesh_core.testing import KindConformance
from mesh_launchers import LAUNCHERS, HostSpec
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
