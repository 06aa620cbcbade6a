"""`mesh --help` says what each command of Mesh's packages does, in the command's own words."""

import re

import pytest

from mesh_core.cli import main
from mesh_core.plugins import COMMANDS, PluginManager


def test_help_describes_the_commands_of_all_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    manager = PluginManager()
    packages = ("mesh-launchers", "mesh-supervision")
    siblings = [each for each in manager.entries(COMMANDS) if each.distribution in packages]
    for each in siblings:
        summary = re.escape(manager.get(COMMANDS, each.name).summary)
        assert re.search(rf"^  {each.name} +{summary} \(from {each.distribution}\)$", shown, re.MULTILINE)
    assert {"exec", "top"} <= {each.name for each in siblings}
